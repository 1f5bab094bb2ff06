# SPDX-License-Identifier: Apache-2.0
"""The delivery of a version of weights to one server.

The server pauses. Each of its workers connects to this process, receives all tensors by their names
in checkpoint files, loads them by vLLM's own loader, and accounts for all names in both directions
(``rollout.vllm.weights``). Then vLLM's prefix cache is emptied, and the server goes on.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from tandem.api import EngineFailure
from tandem.rollout.attached.fit import ServerFacts
from tandem.rollout.attached.messages import WorkerCall, receive_message, send_message
from tandem.rollout.attached.server import Server, ServerLost
from tandem.rollout.attached.wire import end_version, send_manifest, send_tensor
from tandem.types import SliceSpec

LOAD_S = 600.0
"""How long a worker may take to load what it has received."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version of weights.

    Attributes:
        number: the number in this run.
        label: the name by which a server knows it. No other run has it.
    """

    number: int
    label: str


class Delivery:
    """The delivery of one version to one server, which pauses until ``finish``.

    Every method raises ServerLost if the server ended, and EngineFailure if it cannot load the
    version.
    """

    def __init__(
        self,
        server: Server,
        version: Version,
        *,
        manifest: Sequence[SliceSpec],
        facts: ServerFacts,
    ) -> None:
        """Pause the server and wait until its workers have opened their models.

        An update that another run has started and left is finished first: vLLM starts no other.
        """
        self._server, self._version = server, version
        self._specs = {spec.name: spec for spec in manifest}
        server.post("/pause", query={"mode": "keep", "clear_cache": "false"})
        if facts.is_started:
            server.post("/finish_weight_update", {"weight_version": f"{version.label}-not-begun"})
        server.post("/start_weight_update")
        self._call = WorkerCall(
            server,
            "/update_weights",
            field="update_info",
            num_workers=facts.num_workers,
            silence_s=LOAD_S,
        )
        try:
            for channel in self._call.channels:
                send_manifest(channel, manifest)
                send_message(channel, {"version": version.number})
            for channel in self._call.channels:
                self._require_success(channel)
        except OSError as error:
            self.close()
            raise ServerLost(f"its workers ended ({error})") from error
        except EngineFailure:
            self.close()
            raise

    def take(self, name: str, tensor: Tensor) -> None:
        """Send one tensor to each worker."""
        try:
            for channel in self._call.channels:
                send_tensor(channel, tensor, spec=self._specs[name])
        except OSError as error:
            raise self._broken(error) from error

    def finish(self, *, keeps_cache: bool) -> None:
        """Wait until all workers have loaded the version, empty the cache, and let the server go
        on.
        """
        try:
            for channel in self._call.channels:
                end_version(channel)
            for channel in self._call.channels:
                self._require_success(channel)
        except OSError as error:
            raise self._broken(error) from error
        self._call.finish()
        self._server.post("/finish_weight_update", {"weight_version": self._version.label})
        if not keeps_cache:
            answer = self._server.post(
                "/reset_prefix_cache", query={"reset_running_requests": "true"}
            )
            if not answer["success"]:
                raise EngineFailure(f"vLLM at {self._server.url} did not empty its prefix cache")
        self._server.post("/resume")

    def close(self) -> None:
        """End the connections; idempotent."""
        self._call.close()

    def _require_success(self, channel: socket.socket) -> None:
        """Wait for the account of a worker."""
        error = receive_message(channel).get("error")
        if error:
            raise EngineFailure(f"{error} (server {self._server.url})")

    def _broken(self, error: OSError) -> Exception:
        """Return the error of a connection that broke, or what a worker said before it ended."""
        for channel in self._call.channels:
            with suppress(OSError):
                channel.settimeout(1.0)
                said = receive_message(channel).get("error")
                if said:
                    return EngineFailure(f"{said} (server {self._server.url})")
        return ServerLost(f"its workers ended ({error})")
