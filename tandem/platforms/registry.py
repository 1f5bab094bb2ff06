# SPDX-License-Identifier: Apache-2.0
"""All platforms by name: the built-in records, and those of installed packages, which declare them
under the entry-point group ``tandem.platforms``.

A plug-in is loaded when it is asked for, or when everything here is looked through; one that cannot
be loaded is an error in the first case and a line of ``tandem doctor`` in the second.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint

from tandem.errors import UserError
from tandem.platforms.names import ALIASES, platform_name, plug_ins
from tandem.platforms.record import CPU, CUDA, Platform
from tandem.platforms.vendors import METAX, MLU_PLATFORM, MUSA_PLATFORM, NPU, ROCM, XPU_PLATFORM

BUILT_IN = (CUDA, ROCM, METAX, NPU, MUSA_PLATFORM, MLU_PLATFORM, XPU_PLATFORM, CPU)
"""In order of preference when none is asked for."""


class PlugInError(Exception):
    """An installed platform cannot be loaded."""


def platform_named(name: str, *, key: str = "trainer.device") -> Platform:
    """The record of that name or alias, whether it can be used here or not.

    Args:
        key: where the name stands, for the message.

    Raises:
        UserError: there is none, or its package cannot be loaded.
    """
    known = platform_name(name, key=key)
    built_in = next((platform for platform in BUILT_IN if platform.name == known), None)
    if built_in is not None:
        return built_in
    found = {entry.name: entry for entry in plug_ins()}
    try:
        return load_plug_in(found[name])
    except PlugInError as error:
        raise UserError(f"{key}={name}: {error}. Mend or remove that package.") from error


def load_plug_in(entry: EntryPoint) -> Platform:
    """Raises PlugInError: whatever a stranger's package does when it is loaded."""
    source = f"its plug-in {entry.value}"
    if any(entry.name in (name, *aliases) for name, aliases in ALIASES.items()):
        raise PlugInError(f"{source} takes the name of a built-in platform")
    try:
        platform = entry.load()
    except Exception as error:
        raise PlugInError(f"{source} cannot be loaded ({type(error).__name__}: {error})") from error
    if not isinstance(platform, Platform):
        raise PlugInError(f"{source} is no tandem.platforms.record.Platform")
    if platform.name != entry.name:
        raise PlugInError(f"{source} calls itself {platform.name}")
    return platform
