# SPDX-License-Identifier: Apache-2.0
"""The state of a worker's updates, with a double of vLLM's class."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.api import EngineFailure
from tandem.rollout.attached import plugin
from tandem.rollout.attached.messages import receive_message, send_message
from tandem.rollout.attached.plugin import UpdateState
from tandem.rollout.attached.wire import end_version, send_manifest


class Base:
    """vLLM's ``WeightTransferEngine``."""

    def __init__(self, model: Any) -> None:
        self.model, self.device, self.vllm_config = model, "cpu", None


class Sink:
    """A sink that fails in the method ``fails_in``."""

    fails_in = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def begin(self, version: int) -> None:
        self._do("begin")

    def end(self) -> None:
        self._do("end")

    def _do(self, name: str) -> None:
        if name == self.fails_in:
            raise EngineFailure(f"vLLM: {name}")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the plug-in's object in a worker."""
    monkeypatch.setattr(plugin, "of_vllm", lambda *_: Base)
    monkeypatch.setattr(plugin, "VllmSink", Sink)
    return plugin._transfer_class()(torch.nn.Linear(1, 1))


def update(worker: Any) -> str | None:
    """Send the worker a version without tensors; return its account."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address, port = listener.getsockname()
        whom = {"address": address, "port": port, "token": "t"}
        errors: list[Exception] = []

        def run() -> None:
            try:
                worker.update_weights(whom)
            except EngineFailure as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        channel, _ = listener.accept()
        with channel:
            assert receive_message(channel) == {"token": "t"}
            send_manifest(channel, [])
            send_message(channel, {"version": 1})
            said = receive_message(channel)
            if "ready" in said:
                end_version(channel)
                said = receive_message(channel)
        thread.join()
    assert bool(errors) == bool(said["error"])
    return said["error"]


def test_a_trainer_that_cannot_be_reached_leaves_the_model_whole(worker: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address, port = closed.getsockname()
    with pytest.raises(OSError, match="refused"):
        worker.update_weights({"address": address, "port": port, "token": "t"})
    assert worker._updates == UpdateState()
    assert update(worker) is None
    assert worker._updates == UpdateState()


@pytest.mark.parametrize("method", ["begin", "end"])
def test_a_version_that_was_begun_and_did_not_arrive_whole_leaves_it_open(
    worker: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(Sink, "fails_in", method)
    assert update(worker) == f"vLLM: {method}"
    monkeypatch.undo()
    assert worker._updates.is_open


def test_an_update_that_vllm_has_started_is_noted_until_it_is_finished(worker: Any) -> None:
    whom: dict[str, Any] = {"token": "t"}
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(), dtype=torch.float32),
        use_v2_model_runner=False,
    )
    worker.vllm_config = vllm_config
    told: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        whom["address"], whom["port"] = listener.getsockname()
        for step in (worker.start_weight_update, worker.finish_weight_update):
            step()
            worker.init_transfer_engine(whom)
            channel, _ = listener.accept()
            with channel:
                receive_message(channel)
                told.append(receive_message(channel)["is_started"])
    assert told == [True, False]
