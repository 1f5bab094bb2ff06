# SPDX-License-Identifier: Apache-2.0
"""Strangers that connect to the port at which a run waits for the workers of a server."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from tandem.rollout.attached import messages
from tandem.rollout.attached.messages import WorkerCall, receive_message, send_message


class Exchange:
    """A request whose answer does not come."""

    local_address = "127.0.0.1"

    def __init__(self) -> None:
        self.pair = socket.socketpair()

    def fileno(self) -> int:
        return self.pair[0].fileno()

    def result(self) -> None:
        return

    def close(self) -> None:
        for end in self.pair:
            end.close()


class ServerOfStrangers:
    """A server at whose first worker a stranger connects before."""

    def __init__(self, said: bytes) -> None:
        self._said = said
        self.threads: list[threading.Thread] = []

    def ask(self, path: str, body: Any = None, **_: Any) -> Exchange:
        if body is not None:
            self.threads = [threading.Thread(target=self._connect, args=(body["whom"],))]
            self.threads[0].start()
        return Exchange()

    def _connect(self, whom: dict[str, Any]) -> None:
        place = (whom["address"], whom["port"])
        with socket.create_connection(place) as stranger, socket.create_connection(place) as worker:
            send_message(worker, {"token": whom["token"]})
            send_message(worker, {"is_worker": True})
            with suppress(OSError):  # the run ends the connection at any point of this
                stranger.sendall(self._said)
            assert worker.recv(1) == b"", "the run has ended the connection"


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1",
        b"\x00\x00\x01\x00",
        _framed(b"[" * 200_000),
        _framed(json.dumps({"token": "\u00e9"}).encode()),
        _framed(b'{"token": "\\ud800"}'),
        _framed(b"\xff"),
    ],
)
def test_a_stranger_does_not_hold_an_update_up(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(messages, "_PROOF_S", 1.0)
    server: Any = ServerOfStrangers(said)
    begun = time.monotonic()
    call = WorkerCall(server, "/update", field="whom", num_workers=1, silence_s=600.0)
    assert time.monotonic() - begun < 60.0
    (worker,) = call.channels
    assert worker.gettimeout() == 600.0
    assert receive_message(worker) == {"is_worker": True}
    call.close()
    server.threads[0].join()
