# SPDX-License-Identifier: Apache-2.0
"""Selection of a run's platform: by a key, else by the environment, else the first that is found.

A requested platform that cannot be used is an error. No other one replaces it
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
    """The result of probing a platform.

    Attributes:
        problem: why it cannot be used here, "" if it can.
        is_installed: whether its extension of torch is installed, working or not.
    """

    name: str
    problem: str
    is_installed: bool


@dataclass(frozen=True, slots=True)
class Selection:
    """A chosen platform and the reason for it.

    ``caution``: one line that names the installed platforms that ``auto`` skipped, "" if none.
    """

    platform: Platform
    reason: str
    caution: str = ""


def select_platform(requested: str, *, key: str = "trainer.device") -> Platform:
    """Choose a platform as ``choose_platform`` does, in this process's environment.

    Log a warning that names the installed platforms that ``auto`` skipped.
    """
    selection = choose_platform(requested, os.environ, key=key)
    if selection.caution:
        _warn_once(selection.caution)
    return selection.platform


def choose_platform(
    requested: str, environment: Mapping[str, str], *, key: str = "trainer.device"
) -> Selection:
    """Choose the platform of a name or an alias.

    ``auto`` means the platform that ``VERL_PLATFORM`` names, or without it the first that is found.

    Raises:
        UserError: the requested platform does not exist, or cannot be used here.
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
    """Probe every known platform, broken plug-ins included, in order of preference."""
    probed = [_probed(platform) for platform in BUILT_IN]
    for entry in plug_ins():
        try:
            plug_in = _probed(load_plug_in(entry))
        except PlugInError as error:
            plug_in = Probed(entry.name, str(error), is_installed=True)
        probed.insert(-1, plug_in)
    return tuple(probed)


def resolve_dtype(name: str, platform: Platform, *, key: str) -> torch.dtype:
    """Return the torch dtype of a config value; ``auto`` is the platform's compute precision.

    Args:
        key: the key that has this value, for the message.

    Raises:
        UserError: the device cannot compute in it.
    """
    dtype = platform.compute_dtype if name == "auto" else DTYPES[name]
    if dtype == torch.bfloat16 and not platform.has_bfloat16():
        raise UserError(
            key,
            name,
            rule=f"{platform.device_name()} does not compute in bfloat16",
            remedy=f"Set {key}=float32.",
        )
    return dtype


def _probed(platform: Platform) -> Probed:
    extension = platform.extension
    is_installed = bool(extension) and find_spec(extension) is not None
    return Probed(platform.name, platform.probe(), is_installed)


def _passed_over(key: str) -> str:
    """Return one line that names the installed platforms that cannot be used, "" if none."""
    unusable = [one for one in probe_all() if one.problem and one.is_installed]
    if not unusable:
        return ""
    listed = "; ".join(f"{one.name}: {one.problem}" for one in unusable)
    return (
        f"{key}={AUTO}: computing on the host, because the packages installed for other devices "
        f"cannot be used ({listed}). Set {key}={CPU.name} if the host is intended."
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
            key,
            name,
            rule=f"{platform.name} cannot be used here: {problem}",
            remedy=f"Name one that can: {usable} (not {log}).",
        )
    return platform


def _in_order() -> list[Platform]:
    """Return the platforms that can be loaded; the host is the last."""
    others = [platform for platform in BUILT_IN if platform is not CPU]
    for entry in plug_ins():
        try:
            others.append(load_plug_in(entry))
        except PlugInError:
            continue  # not requested; tandem doctor lists it
    return [*others, CPU]
