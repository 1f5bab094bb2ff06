# SPDX-License-Identifier: Apache-2.0
"""Doubles of vendors' devices: torch devices under a vendor's name that compute on the host.

A double takes its name, its visibility variable and its collective library from the vendor's
platform record: code under test sees no difference. A double cannot show races between streams,
because all work runs in order, nor a vendor's kernels with their accuracy and speed. A process has
at most one double, because torch reserves one device type for extensions.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import Backend, ProcessGroupGloo
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from tandem.errors import UserError
from tandem.platforms.isolation import inherited_names, is_restricted
from tandem.platforms.record import Platform
from tandem.platforms.registry import BUILT_IN, platform_named
from tandem.testing.compiling import open_extension
from tandem.testing.device_module import DeviceModule

DEFAULT_DEVICES = 2
DOUBLES = tuple(platform.name for platform in BUILT_IN if platform.extension)
"""The platforms whose devices torch knows only through an extension."""
MEMORY_BYTES = 8 * 1024**3
"""The memory of each device; a process cannot allocate more on it."""


@dataclass(frozen=True, slots=True)
class _Double:
    platform: Platform
    extension: Any


_here: list[_Double] = []


def become(name: str, *, num_devices: int = DEFAULT_DEVICES) -> None:
    """Give this process the devices of a vendor, unless it has them already.

    Args:
        name: a platform whose device type torch leaves to extensions.
        num_devices: the number of devices of the node; the vendor's variable may restrict the
            process to some of them.

    Raises:
        UserError: the process has another double, or the extension cannot be built.
    """
    platform = platform_named(name)
    if _here:
        if _here[0].platform.name != platform.name:
            raise UserError(
                "double",
                platform.name,
                rule=f"this process is already a double of {_here[0].platform.name}",
                remedy="Use one process for each vendor.",
            )
        return
    physical_ids = _visible(platform, num_devices)
    extension = open_extension()
    extension.open(len(physical_ids), MEMORY_BYTES)
    _here.append(_Double(platform, extension))
    rename_privateuse1_backend(platform.device_type)
    module = DeviceModule(platform.device_type, extension, physical_ids=physical_ids)
    torch._register_device_module(platform.device_type, module)
    generate_methods_for_privateuse1_backend()
    _register_collectives(platform, extension)


def is_double() -> bool:
    """Return whether the devices of this process are doubles."""
    return bool(_here)


def double_platform(name: str, *, num_devices: int = DEFAULT_DEVICES) -> Platform:
    """Return the vendor's record with a probe that gives the process the double.

    The record can be pickled: every process that probes it gets the double.

    Example:
        >>> double_platform("mthreads").device_type
        'musa'
    """
    platform = platform_named(name)
    return replace(platform, extension="", probe=partial(_probe, platform.name, num_devices))


def write_vendor_package(folder: Path, name: str, *, num_devices: int = DEFAULT_DEVICES) -> None:
    """Write a stand-in for the vendor's extension of torch.

    The vendor's unmodified record finds the double in every process with ``folder`` on its path.
    """
    extension = platform_named(name).extension
    package = folder / extension
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from tandem.testing.doubles import become\n\n"
        f"become({name!r}, num_devices={num_devices})\n"
    )


def make_backend(
    store: c10d.Store, *, rank: int, size: int, timeout: Any, averages: bool = True
) -> Any:
    """Make the double's collectives over ``store``, for a group without a default world.

    Args:
        timeout: a timedelta.
        averages: whether ``ReduceOp.AVG`` is supported; otherwise it raises.
    """
    assert _here, "become() comes first"
    inner = ProcessGroupGloo(store, rank, size, timeout)
    return _here[0].extension.host_staged(inner, _here[0].platform.collectives, averages)


def _probe(name: str, num_devices: int) -> str:
    become(name, num_devices=num_devices)
    return "" if _here[0].extension.device_count() else "finds no device"


def _visible(platform: Platform, num_devices: int) -> tuple[str, ...]:
    present = tuple(str(index) for index in range(num_devices))
    if not is_restricted(platform.visibility, os.environ):
        return present
    names = inherited_names(platform.visibility, os.environ)
    missing = [name for name in names if name not in present]
    if missing:
        raise UserError(
            platform.visibility.variables[0],
            ",".join(names),
            rule=f"the double has the devices {','.join(present)}",
            remedy="Name only these.",
        )
    return names


def _register_collectives(platform: Platform, extension: ModuleType) -> None:
    """Register the collectives under the name of the vendor's library, for compound backends."""

    def create(options: Any, _: object = None) -> Any:
        inner = ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, options.timeout
        )
        return extension.host_staged(inner, platform.collectives, platform.averages)

    Backend.register_backend(
        platform.collectives, create, extended_api=True, devices=[platform.device_type]
    )
