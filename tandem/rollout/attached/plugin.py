# SPDX-License-Identifier: Apache-2.0
"""tandem's plug-in for vLLM's server: it takes weights from a trainer, and draws tokens by key.

vLLM calls ``register`` by the entry point ``vllm.general_plugins`` wherever tandem is installed. A
server uses the plug-in with ``--weight-transfer-config '{"backend": "tandem"}'`` and
``--logits-processors tandem.rollout.attached.plugin:KeyedDraw``. Its processes import this file;
a trainer's do not. Requests without a stream are drawn by vLLM.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import torch

from tandem.api import EngineFailure
from tandem.rollout.attached.messages import receive_message, send_message
from tandem.rollout.attached.protocol import BACKEND, PROTOCOL, SIZES, STREAM
from tandem.rollout.attached.wire import receive_manifest, receive_tensors
from tandem.rollout.sampler import DrawRule
from tandem.rollout.vllm.draw import Stream, processor_class
from tandem.rollout.vllm.library import of_vllm
from tandem.rollout.vllm.weights import LoadedModel, VllmSink

_TRANSFER = "distributed.weight_transfer"
_CONNECT_S, _SILENCE_S = 30.0, 600.0
"""How long a connection may take, and how long the trainer may be silent in an update."""


def register() -> None:
    """Register the class that receives weights with vLLM, which imports it when it is used."""
    factory = of_vllm(f"{_TRANSFER}.factory", "WeightTransferEngineFactory")
    try:
        factory.register_engine(BACKEND, __name__, "TandemTransfer")
    except ValueError:
        return  # a process that loads plug-ins twice


def __getattr__(name: str) -> Any:
    """Make the classes that derive from vLLM's, when vLLM asks for them."""
    if name == "TandemTransfer":
        made = _transfer_class()
    elif name == "KeyedDraw":
        made = processor_class(stream_of, log_probs=None)  # the server returns them
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made
    return made


def stream_of(params: Any) -> Stream | None:
    """Return the stream of a request by its parameters; None if it has none."""
    given = (params.extra_args or {}).get(STREAM)
    if given is None:
        return None
    temperature, top_k, top_p = given["rule"]
    return Stream(
        int(given["key"]),
        DrawRule(temperature=temperature, top_k=top_k, top_p=top_p),
        forced=tuple(given.get("forced", ())),
    )


@dataclass(slots=True)
class UpdateState:
    """The state of a worker's updates.

    Attributes:
        is_open: whether a version was begun and has not arrived whole. vLLM cannot load another
            then.
        is_started: whether vLLM has started an update and not finished it. It refuses to start
            another then.
    """

    is_open: bool = False
    is_started: bool = False


def describe_model(
    vllm_config: Any, state: UpdateState, *, address: str, port: int, token: str
) -> None:
    """Connect to the run, and tell it which model this worker computes, and how."""
    hf_config = vllm_config.model_config.hf_config
    with socket.create_connection((address, port), timeout=_CONNECT_S) as channel:
        send_message(channel, {"token": token})
        facts = {
            "protocol": PROTOCOL,
            "model": {name: getattr(hf_config, name, None) for name in SIZES},
            "dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
            "is_whole": not state.is_open,
            "is_started": state.is_started,
            "draws": not vllm_config.use_v2_model_runner,
        }
        send_message(channel, facts)


def receive_version(
    target: LoadedModel, state: UpdateState, *, address: str, port: int, token: str
) -> None:
    """Connect to the trainer and load the version that it sends.

    Args:
        state: it is open from when the model is opened until the version is whole.
        token: proves to the trainer who connects.

    Raises:
        EngineFailure, OSError: the version was not loaded whole. The trainer has been told why if
            it is still there.
    """
    with socket.create_connection((address, port), timeout=_CONNECT_S) as channel:
        channel.settimeout(_SILENCE_S)
        send_message(channel, {"token": token})
        sink = VllmSink(target, receive_manifest(channel), on_end=lambda version: None)
        number = int(receive_message(channel)["version"])
        try:
            if state.is_open:
                raise EngineFailure("vLLM: an earlier version did not arrive whole: start it again")
            state.is_open = True
            sink.begin(number)
            send_message(channel, {"ready": True})
            for name, tensor in receive_tensors(channel):
                sink.take(name, tensor)
            sink.end()
            state.is_open = False
        except (EngineFailure, RuntimeError, ValueError, KeyError, TypeError) as error:
            first = (str(error).splitlines() or [""])[0]
            text = first if isinstance(error, EngineFailure) else f"{type(error).__name__}: {first}"
            send_message(channel, {"error": text})
            raise
        send_message(channel, {"error": None})


def _transfer_class() -> type:
    """Return the class whose object in each worker of a server receives weights."""
    base = of_vllm(f"{_TRANSFER}.base", "WeightTransferEngine")

    class TandemTransfer(base):
        """A receiver of versions that a trainer of tandem sends over a connection of its own."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._updates = UpdateState()

        def parse_init_info(self, init_dict: dict[str, Any]) -> dict[str, Any]:
            """Return whom to connect to."""
            return init_dict

        def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
            """Describe the model. Each update has a connection of its own."""
            describe_model(self.vllm_config, self._updates, **init_info)

        def start_weight_update(self) -> None:
            """Note it: the update opens the model."""
            self._updates.is_started = True

        def update_weights(self, update_info: dict[str, Any]) -> None:
            """Receive a whole version from the trainer at ``update_info``'s address."""
            model = self.model
            target = LoadedModel(
                get_model=lambda: model,
                device=torch.device(self.device),
                vllm_config=self.vllm_config,
            )
            receive_version(target, self._updates, **update_info)
            if target.device.type != "cpu":
                torch.accelerator.synchronize()

        def receive_weights(self, update_info: Any) -> None:
            """Do nothing: ``update_weights`` receives."""

        def finish_weight_update(self) -> None:
            """Note it: the update closed the model."""
            self._updates.is_started = False

        def shutdown(self) -> None:
            """Do nothing: no connection is kept."""

    return TandemTransfer
