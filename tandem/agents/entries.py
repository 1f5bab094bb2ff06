# SPDX-License-Identifier: Apache-2.0
"""Checks that the entries of the files of tools and of agents share.

Each raises ValueError with a clause, to which the reader of a file adds the file and the entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any
from urllib.parse import urlsplit


def unknown_field(fields: Mapping[Any, Any], known: Set[str]) -> Any:
    """Return the first name of ``fields`` that is not known, which may be no text; else None."""
    return next((name for name in fields if name not in known), None)


def require_url(url: str) -> str:
    """Return an address of the web; raise ValueError if it is none."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"the url {url!r} does not begin with http")
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError as error:  # brackets of a host that do not match, or a port that is no port
        raise ValueError(f"the url {url!r} is not valid ({error})") from error
    if not is_whole:
        raise ValueError(f"the url {url!r} has no host, or the port 0")
    return url
