# SPDX-License-Identifier: Apache-2.0
"""The names and aliases of platforms.

This file needs neither torch nor the records: even ``tandem plan`` reports a wrong name.
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
"""The first platform that is found."""
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
"""The aliases of the built-in platforms."""
ALONE_IN_FLAGCX = frozenset({"npu"})
"""The built-in platforms that FlagCX connects to no other platform."""

GPUS_OF_RAY = frozenset({"cuda", "rocm", "metax", "musa", "mlu", "xpu"})
"""The built-in platforms whose devices Ray calls GPU."""


def platform_name(name: str, *, key: str) -> str:
    """Return the platform's name for a name or an alias. The platform need not be usable here.

    Args:
        key: the key that has this value, for the message.

    Raises:
        UserError: there is no such platform.

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
    if name.lower() == "gpu":
        remedy = f"Set {key}=auto for the devices that are found, or {key}=cuda for NVIDIA's."
        raise UserError(key, name, rule="there is no such platform", remedy=remedy)
    close = get_close_matches(name, [*called, *found], n=1)
    guess = f"Did you mean {close[0]}? " if close else ""
    raise UserError(
        key,
        name,
        rule="there is no such platform",
        remedy=f"{guess}Known: {', '.join([*ALIASES, *found])}.",
    )


def plug_ins() -> Iterator[EntryPoint]:
    """Iterate over the platforms that installed packages declare."""
    return iter(entry_points(group=GROUP))
