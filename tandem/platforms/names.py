# SPDX-License-Identifier: Apache-2.0
"""The names of platforms and what else they are called, without torch and without their records, so
that a mistake in one is said at once and ``tandem plan`` knows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points

from tandem.errors import UserError

GROUP = "tandem.platforms"
VARIABLE = "VERL_PLATFORM"
"""verl's variable, with our names and aliases."""
AUTO = "auto"
"""Whichever is found."""
ALIASES: Mapping[str, tuple[str, ...]] = {
    "cuda": ("nvidia",),
    "rocm": ("amd", "hip"),
    "metax": ("maca",),
    "npu": ("ascend", "huawei"),
    "musa": ("mthreads", "moorethreads"),
    "mlu": ("cambricon",),
    "xpu": ("intel",),
    "cpu": ("host",),
}
"""Of those that are built in."""
ALONE_IN_FLAGCX = frozenset({"npu"})
"""FlagCX connects them to no other platform."""

GPUS_OF_RAY = frozenset({"cuda", "rocm", "metax", "musa", "mlu", "xpu"})
"""Built-in ones whose devices Ray all calls GPU."""


def platform_name(name: str, *, key: str) -> str:
    """The name of the platform that a name or alias means; it need not be usable here.

    Args:
        key: where the name stands, for the message.

    Raises:
        UserError: there is none.

    Example:
        >>> platform_name("ascend", key="trainer.device")
        'npu'
    """
    for known, aliases in ALIASES.items():
        if name == known or name in aliases:
            return known
    found = sorted({entry.name for entry in plug_ins()})
    if name in found:
        return name
    called = [*ALIASES, *(alias for aliases in ALIASES.values() for alias in aliases)]
    close = get_close_matches(name, [*called, *found], n=1)
    raise UserError(
        f"{key}={name}: there is no such platform. "
        f"{f'Did you mean {close[0]}? ' if close else ''}Known: {', '.join([*ALIASES, *found])}."
    )


def plug_ins() -> Iterator[EntryPoint]:
    """Platforms that installed packages declare."""
    return iter(entry_points(group=GROUP))
