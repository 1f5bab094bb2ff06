# SPDX-License-Identifier: Apache-2.0
"""The entries of ``engine_kwargs.vllm`` that attach servers, and the list of their URLs.

``urls`` has URLs, or names a file with one a line, which is read again every ten seconds. vLLM is
not imported, and need not be installed.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tandem.errors import UserError
from tandem.rollout.vllm.keys import ALLOW_UNTESTED, SECTION, URLS

ALLOW_PUBLIC = "allow_public"
"""Whether a server may have an address that is not private."""
_OWN = (URLS, ALLOW_PUBLIC, ALLOW_UNTESTED)
_KEY = f"{SECTION}.{URLS}"
_SPLIT = "actor_rollout_ref.rollout.tensor_model_parallel_size"


def check_keys(given: Mapping[str, Any], *, num_ranks: int) -> None:
    """Raise UserError if the entries or their URLs cannot be used. No server is asked.

    Args:
        given: ``engine_kwargs.vllm``.
        num_ranks: ``rollout.tensor_model_parallel_size``.
    """
    for name, value in given.items():
        if name not in _OWN:
            raise UserError(
                f"{SECTION}.{name}",
                value,
                rule=f"servers are attached ({_KEY}), and it is an argument of their own",
                remedy="Set it in the command that starts vllm serve.",
            )
    if num_ranks > 1:
        raise UserError(
            _SPLIT,
            num_ranks,
            rule=f"servers are attached ({_KEY}), which have devices of their own",
            remedy="Leave it out, and start vllm serve with --tensor-parallel-size.",
        )
    _require_types(given)
    urls = listed_urls(given)
    if not urls:
        raise UserError(_KEY, given[URLS], rule="it lists no server", remedy="List one.")
    for url in urls:
        require_usable(url, given)


class Share:
    """The servers of one process among those that generate: each of them drives its own.

    Servers are dealt out in the order in which their URLs are listed. One that is added at the end,
    or left out, changes nothing for the others.

    Args:
        given: ``engine_kwargs.vllm``.
        rank: the number of the process.
        num_ranks: the number of processes.
    """

    def __init__(self, given: Mapping[str, Any], *, rank: int, num_ranks: int) -> None:
        self._given, self._rank, self._num_ranks = given, rank, num_ranks
        self._ever: dict[str, None] = {}

    def urls(self) -> list[str]:
        """Return the URLs of the moment; raise UserError if their file cannot be read."""
        listed = listed_urls(self._given)
        self._ever.update(dict.fromkeys(listed))
        own = list(self._ever)[self._rank :: self._num_ranks]
        return [url for url in own if url in listed]


def listed_urls(given: Mapping[str, Any]) -> Sequence[str]:
    """Return the URLs of the moment, each once.

    Raises:
        UserError: the file of URLs cannot be read.
    """
    value = given[URLS]
    if isinstance(value, str) and not value.startswith(("http://", "https://")):
        try:
            lines = Path(value).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            cause = getattr(error, "strerror", None) or "it is not text"
            raise UserError(
                _KEY,
                value,
                rule=f"this file of URLs cannot be read ({cause})",
                remedy="Give URLs such as [http://host:8000], or a file with one a line.",
            ) from error
        found = [line.partition("#")[0].strip() for line in lines]
    else:
        found = [value] if isinstance(value, str) else list(value)
    return list(dict.fromkeys(url.rstrip("/") for url in found if url))


def require_usable(url: str, given: Mapping[str, Any]) -> None:
    """Raise UserError unless a URL is one of HTTP whose host has private addresses only.

    vLLM's routes for weights ask for no password. ``allow_public=True`` allows other addresses.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _no_url(url) from None
    if parts.scheme not in ("http", "https") or not host or port is None:
        raise _no_url(url)
    if parts.username is not None or parts.password is not None:
        raise UserError(
            _KEY,
            f"{parts.scheme}://...@{host}:{port}",
            rule="names and passwords in URLs are not sent, and would stand in logs",
            remedy="Leave them out.",
        )
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port)}
    except (OSError, ValueError) as error:
        raise UserError(
            _KEY, url, rule="its host has no address", remedy="Correct the name of the host."
        ) from error
    public = sorted(address for address in addresses if _is_public(address))
    if public and not given.get(ALLOW_PUBLIC, False):
        raise UserError(
            _KEY,
            url,
            rule=f"{public[0]} is a public address, and anybody there can replace the weights of "
            "a server",
            remedy=f"Use a private network, or allow it with {SECTION}.{ALLOW_PUBLIC}=True.",
        )


def _require_types(given: Mapping[str, Any]) -> None:
    """Raise UserError unless the entries are of the types that they have in a configuration."""
    for name in (ALLOW_PUBLIC, ALLOW_UNTESTED):
        if not isinstance(given.get(name, False), bool):
            raise UserError(
                f"{SECTION}.{name}",
                given[name],
                rule="must be True or False",
                remedy="Leave it out, or set it to True.",
            )
    urls: Any = given[URLS]
    listed: Any = urls if isinstance(urls, list | tuple) else [urls]
    if not all(isinstance(url, str) for url in listed):
        raise UserError(
            _KEY,
            urls,
            rule="must be text, or a list of text",
            remedy="Give URLs such as [http://host:8000], or a file with one a line.",
        )


def _no_url(url: str) -> UserError:
    return UserError(
        _KEY, url, rule="it is not a URL with a port", remedy="Write http://host:8000."
    )


def _is_public(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_global
