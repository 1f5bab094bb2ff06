# SPDX-License-Identifier: Apache-2.0
"""Requests to a server: what is not an answer, and what is no fault of the server."""

from __future__ import annotations

import errno
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

import pytest

from tandem.api import EngineFailure
from tandem.rollout.attached.server import Server, ServerLost

# Of 127.0.0.1, by openssl req -x509 -newkey ec, until the year 2126.
PEM = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgT9RqJAedK+aS6DAp
WzljzKOaIaPqCF7Mm8o8X+SIbeihRANCAARN+SNzAWNUYVRUPG8EQduBCECYWYFu
kOe/xQvTTFlCSHtKnjpwGY3RmFZ85iO+uVUDu+ob30T0ucdSjEYd/YDi
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBkDCCATagAwIBAgIUS2W6Q3J8IDkhnEaEoUoLBiYEGkwwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyNDAwMTY1N1oYDzIxMjYxMDMx
MDAxNjU3WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAARN+SNzAWNUYVRUPG8EQduBCECYWYFukOe/xQvTTFlCSHtKnjpwGY3R
mFZ85iO+uVUDu+ob30T0ucdSjEYd/YDio2QwYjAdBgNVHQ4EFgQUlJHuzBZEINIQ
8vHTHXyqcykCaaMwHwYDVR0jBBgwFoAUlJHuzBZEINIQ8vHTHXyqcykCaaMwDwYD
VR0TAQH/BAUwAwEB/zAPBgNVHREECDAGhwR/AAABMAoGCCqGSM49BAMCA0gAMEUC
IEB/XCCrx2oO32OkN8ac+SziHyGCBUXCDb3Edvv7tmlSAiEAq/oE60bTpf6pN2Ry
BiiQxnMwIc17Iah8DlFptKQuXKg=
-----END CERTIFICATE-----
"""


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, threading.Event]]:
    """Yield the URL of a server over TLS, which answers once the event is set."""
    pem, may_answer = tmp_path / "own.pem", threading.Event()
    pem.write_text(PEM)
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            may_answer.wait(30)
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"https://127.0.0.1:{server.server_address[1]}", may_answer
        may_answer.set()
        server.shutdown()


def test_nothing_arrives_over_tls_before_the_answer(slow: tuple[str, threading.Event]) -> None:
    url, may_answer = slow
    with DefaultSelector() as selector:
        exchange = Server(url).ask("/", method="GET")
        selector.register(exchange, EVENT_READ)
        assert selector.select(0.2) == []
        may_answer.set()
        assert selector.select(30)
        selector.unregister(exchange)
    assert exchange.result() == {}


def test_a_process_without_room_for_connections_does_not_blame_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("socket.create_connection", refuse)
    with pytest.raises(EngineFailure, match="ulimit -n"):
        Server("http://127.0.0.1:9").ask("/")


def test_a_host_that_no_name_can_have_is_a_lost_server() -> None:
    with pytest.raises(ServerLost, match="its URL cannot be used"):
        Server("http://a..b:8000").get("/health")
