# SPDX-License-Identifier: Apache-2.0
"""A server of vLLM: requests to its HTTP routes.

A server that cannot be reached, ends, or answers that its engine has ended is lost (``ServerLost``)
and may come back. An answer that another attempt would not change is an ``EngineFailure``.
"""

from __future__ import annotations

import errno
import json
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlencode, urlsplit

from tandem.api import EngineFailure

CALL_S = 60.0
"""How long a call may take that computes nothing."""
_SHOWN = 200
"""The number of characters of an answer that is shown."""


class ServerLost(Exception):
    """A server that does not answer. The message says why, in one line and without the URL."""


class KeyWanted(EngineFailure):
    """A request that was refused because it has no API key."""


class Server:
    """A server at a URL."""

    def __init__(self, url: str) -> None:
        """Take the URL, e.g. ``http://host:8000``. Nothing is sent."""
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        self._connects: Callable[..., HTTPConnection] = HTTPConnection
        if parts.scheme == "https":
            self._connects = partial(HTTPSConnection, context=_tls())
        self._place = (parts.hostname or "", parts.port)
        self._prefix = parts.path

    def get(
        self, path: str, *, timeout_s: float = CALL_S, query: Mapping[str, str] | None = None
    ) -> Any:
        """Return the JSON that the server answers.

        Raises:
            ServerLost, EngineFailure: see the file.
        """
        return self.ask(path, method="GET", timeout_s=timeout_s, query=query).result()

    def post(self, path: str, body: Any = None, *, query: Mapping[str, str] | None = None) -> Any:
        """Send JSON, and return the JSON that the server answers; see ``get``."""
        return self.ask(path, body, query=query).result()

    def ask(
        self,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        timeout_s: float = CALL_S,
        query: Mapping[str, str] | None = None,
    ) -> Exchange:
        """Send a request, and return at once.

        Args:
            timeout_s: the longest silence while the answer is read.

        Raises:
            ServerLost: the server cannot be reached.
            EngineFailure: this process may open no more connections.
        """
        connection = self._connects(*self._place, timeout=min(timeout_s, CALL_S))
        target = self._prefix + path + (f"?{urlencode(query)}" if query else "")
        content = None if body is None else json.dumps(body).encode()
        headers = {} if content is None else {"Content-Type": "application/json"}
        try:
            connection.request(method, target, body=content, headers=headers)
        except (OSError, HTTPException, ValueError) as error:  # ValueError: a wrong host or path
            connection.close()
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise EngineFailure(
                    "vLLM: each sample has a connection, and this process may open no more: raise "
                    "its limit (ulimit -n), or lower rollout.max_num_seqs"
                ) from error
            raise ServerLost(_reason(error)) from error
        connection.sock.settimeout(timeout_s)
        return Exchange(connection, url=self.url, path=path)


class Exchange:
    """A request that was sent, and its answer.

    Attributes:
        path: the path of the request.
    """

    def __init__(self, connection: HTTPConnection, *, url: str, path: str) -> None:
        self.path = path
        self._url, self._connection = url, connection

    def fileno(self) -> int:
        """Return the descriptor that becomes readable with the answer."""
        return self._connection.sock.fileno()

    @property
    def local_address(self) -> str:
        """The address of this machine from which the server is reached."""
        return self._connection.sock.getsockname()[0]

    def result(self) -> Any:
        """Wait for the answer, and return its JSON, None if it has no content.

        Raises:
            ServerLost: the server ended, is silent, or answers that its engine has ended.
            EngineFailure: it refuses the request.
        """
        try:
            answer = self._connection.getresponse()
            data = answer.read()
        except (OSError, HTTPException) as error:
            raise ServerLost(_reason(error)) from error
        finally:
            self._connection.close()
        content = _content(data)
        if answer.status < HTTPStatus.BAD_REQUEST:
            return content
        said = f"{self.path} answered {answer.status}: {_said(content, data)}"
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise ServerLost(said)
        kind = KeyWanted if answer.status == HTTPStatus.UNAUTHORIZED else EngineFailure
        raise kind(f"vLLM at {self._url}: {said}")

    def close(self) -> None:
        """Give the request up. vLLM stops to generate for it."""
        self._connection.close()


def _tls() -> ssl.SSLContext:
    """Return settings under which nothing arrives before the answer.

    TLS 1.3 sends tickets once the connection stands, which look like an answer to a selector.
    """
    context = ssl.create_default_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def _content(data: bytes) -> Any:
    try:
        return json.loads(data) if data else None
    except ValueError:
        return None


def _said(content: Any, data: bytes) -> str:
    """Return the message of an error that vLLM answered, in one line."""
    found = content
    for name in ("error", "detail", "message"):
        found = found.get(name, found) if isinstance(found, dict) else found
    text = found if isinstance(found, str) else data.decode(errors="replace")
    return " ".join(text.split())[:_SHOWN] or "nothing"


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(error, OSError):
        return (error.strerror or str(error) or type(error).__name__).lower()
    if isinstance(error, ValueError):
        return "its URL cannot be used"
    return "it ended the connection"
