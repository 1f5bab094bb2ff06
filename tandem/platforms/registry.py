# SPDX-License-Identifier: Apache-2.0
"""Look-up of platforms by name: the built-in records and those of installed packages.

Packages declare them under the entry-point group ``tandem.platforms``. A plug-in is loaded when its
name is requested or when all platforms are searched. A plug-in that cannot be loaded is an error in
the first case and a line of ``tandem doctor`` in the second.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint

from tandem.errors import UserError
from tandem.platforms.names import ALIASES, platform_name, plug_ins
from tandem.platforms.record import CPU, CUDA, Platform
from tandem.platforms.vendors import VENDORS

BUILT_IN = (CUDA, *VENDORS, CPU)
"""The built-in records, the preferred ones first."""


class PlugInError(Exception):
    """An installed platform that cannot be loaded."""


def platform_named(name: str, *, key: str = "trainer.device") -> Platform:
    """Return the record of a name or an alias, even if it cannot be used here.

    Args:
        key: the key that has this value, for the message.

    Raises:
        UserError: there is no such platform, or its package cannot be loaded.
    """
    known = platform_name(name, key=key)
    built_in = next((platform for platform in BUILT_IN if platform.name == known), None)
    if built_in is not None:
        return built_in
    found = {entry.name: entry for entry in plug_ins()}
    try:
        return load_plug_in(found[name])
    except PlugInError as error:
        remedy = "Repair or remove that package."
        raise UserError(key, name, rule=str(error), remedy=remedy) from error


def load_plug_in(entry: EntryPoint) -> Platform:
    """Return the record that a package declares.

    Raises:
        PlugInError: it cannot be loaded, or is not a record of that name.
    """
    source = f"its plug-in {entry.value}"
    if any(entry.name in (name, *aliases) for name, aliases in ALIASES.items()):
        raise PlugInError(f"{source} takes the name of a built-in platform")
    try:
        platform = entry.load()
    except Exception as error:  # a foreign package may raise anything
        raise PlugInError(f"{source} cannot be loaded ({type(error).__name__}: {error})") from error
    if not isinstance(platform, Platform):
        raise PlugInError(f"{source} is not a tandem.platforms.record.Platform")
    if platform.name != entry.name:
        raise PlugInError(f"{source} has the name {platform.name}")
    return platform
