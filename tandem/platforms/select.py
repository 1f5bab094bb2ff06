# SPDX-License-Identifier: Apache-2.0
"""Which platform is used: the one that is asked for by a key, else the one of the environment, else
the first that is found. One that is asked for and cannot be used is an error, never another one
(docs/adr/0002-trainer-device.md).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

from tandem.errors import UserError
from tandem.platforms.names import AUTO, VARIABLE, plug_ins
from tandem.platforms.record import CPU, Platform
from tandem.platforms.registry import BUILT_IN, PlugInError, load_plug_in, platform_named

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Probed:
    """A platform and why it cannot be used here; "" if it can. ``is_installed``: what brings it to
    torch is here, working or not."""

    name: str
    problem: str
    is_installed: bool


@dataclass(frozen=True, slots=True)
class Selection:
    """What was chosen, and why; and what ``auto`` passed over that is installed, in one line."""

    platform: Platform
    reason: str
    caution: str = ""


def select_platform(requested: str, *, key: str = "trainer.device") -> Platform:
    """See ``choose_platform``, with this process's environment. Warns of what is passed over."""
    selection = choose_platform(requested, os.environ, key=key)
    if selection.caution:
        _warn_once(selection.caution)
    return selection.platform


def choose_platform(
    requested: str, environment: Mapping[str, str], *, key: str = "trainer.device"
) -> Selection:
    """The platform of a name or alias; for ``auto`` that of the environment, or the first found.

    Raises:
        UserError: the one asked for does not exist, or cannot be used here.
    """
    if requested != AUTO:
        return Selection(_usable(requested, key=key), f"{key}={requested}")
    wanted = environment.get(VARIABLE, "")
    if wanted:
        return Selection(_usable(wanted, key=VARIABLE), f"{VARIABLE}={wanted}")
    found = next(platform for platform in _in_order() if platform.is_available())
    reason = f"{key}={AUTO}, and it is the first that is found"
    return Selection(found, reason, _passed_over(key) if found is CPU else "")


def probe_all() -> tuple[Probed, ...]:
    """Every platform that is known here, in order of preference, broken plug-ins included."""
    probed = [_probed(platform) for platform in BUILT_IN]
    for entry in plug_ins():
        try:
            plug_in = _probed(load_plug_in(entry))
        except PlugInError as error:
            plug_in = Probed(entry.name, str(error), is_installed=True)
        probed.insert(-1, plug_in)
    return tuple(probed)


def resolve_dtype(name: str, platform: Platform, *, key: str) -> torch.dtype:
    """The torch dtype of a config value; ``auto`` is the platform's own compute precision.

    Args:
        key: where the value stands in the configuration, for the message.

    Raises:
        UserError: the device cannot compute in it.
    """
    dtype = platform.compute_dtype if name == "auto" else DTYPES[name]
    if dtype == torch.bfloat16 and not platform.has_bfloat16():
        raise UserError(
            f"{key}={name}: {platform.device_name()} does not compute in bfloat16. "
            f"Set {key}=float32."
        )
    return dtype


def _probed(platform: Platform) -> Probed:
    extension = platform.extension
    is_installed = bool(extension) and find_spec(extension) is not None
    return Probed(platform.name, platform.probe(), is_installed)


def _passed_over(key: str) -> str:
    """Of a choice that ended at the host: what is installed and cannot be used, if anything."""
    unusable = [one for one in probe_all() if one.problem and one.is_installed]
    if not unusable:
        return ""
    listed = "; ".join(f"{one.name}: {one.problem}" for one in unusable)
    return (
        f"{key}={AUTO}: computing on the host, as what is installed for other devices cannot be "
        f"used ({listed}). Set {key}={CPU.name} if the host is meant."
    )


@cache
def _warn_once(caution: str) -> None:
    logger.warning("%s", caution)


def _usable(name: str, *, key: str) -> Platform:
    platform = platform_named(name, key=key)
    problem = platform.probe()
    if problem:
        probed = probe_all()
        usable = ", ".join(one.name for one in probed if not one.problem)
        log = "; ".join(f"{one.name}: {one.problem}" for one in probed if one.problem)
        raise UserError(
            f"{key}={name}: {platform.name} cannot be used here: {problem}. "
            f"Name one that can: {usable} (not {log})."
        )
    return platform


def _in_order() -> list[Platform]:
    """Those that can be loaded; the host is the last."""
    others = [platform for platform in BUILT_IN if platform is not CPU]
    for entry in plug_ins():
        try:
            others.append(load_plug_in(entry))
        except PlugInError:
            continue  # nobody asked for it; tandem doctor lists it
    return [*others, CPU]
