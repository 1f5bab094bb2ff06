# SPDX-License-Identifier: Apache-2.0
"""Doubles of vendors' devices: a process gets real devices of torch, under the vendor's name, that
the host computes. What a double is called, which variable restricts it and which collective library
it has is read from the vendor's platform record, so that code under test cannot tell.

What a double cannot show: races between streams (nothing runs beside anything else), a vendor's
kernels and their accuracy, speed. A process has one double at most, as torch has one place for
them.
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
from tandem.testing.device_module import DeviceModule
from tandem.testing.extension import open_extension

DEFAULT_DEVICES = 2
DOUBLES = tuple(platform.name for platform in BUILT_IN if platform.extension)
"""The vendors whose devices torch knows by a plug-in only."""
MEMORY_BYTES = 8 * 1024**3
"""Of each device; more than that cannot be allocated in one process."""


@dataclass(frozen=True, slots=True)
class _Double:
    """The one of this process."""

    platform: Platform
    extension: Any


_here: list[_Double] = []


def become(name: str, *, num_devices: int = DEFAULT_DEVICES) -> None:
    """Give this process the devices of a vendor. Does nothing if it has them already.

    Args:
        name: of a platform whose device type torch leaves to plug-ins.
        num_devices: on this node; the vendor's variable shows the process some of them only.

    Raises:
        UserError: the process has another double, or the extension cannot be built.
    """
    platform = platform_named(name)
    if _here:
        if _here[0].platform.name != platform.name:
            raise UserError(
                f"double={platform.name}: this process is one of {_here[0].platform.name} already. "
                "Use one process for each vendor."
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
    """Whether this process has made-up devices."""
    return bool(_here)


def double_platform(name: str, *, num_devices: int = DEFAULT_DEVICES) -> Platform:
    """The vendor's record, with a probe that makes the process a double. It can be pickled: any
    process that uses it gets the double, without further help.

    Example:
        >>> double_platform("mthreads").device_type
        'musa'
    """
    platform = platform_named(name)
    return replace(platform, extension="", probe=partial(_probe, platform.name, num_devices))


def write_vendor_package(folder: Path, name: str, *, num_devices: int = DEFAULT_DEVICES) -> None:
    """Write a stand-in for the vendor's extension of torch: where ``folder`` is on the path of a
    process and of its children, the vendor's own record finds the double, unmodified."""
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
    """The double's own collectives over ``store``, for groups made without a default world.

    Args:
        timeout: a timedelta.
        averages: whether ``ReduceOp.AVG`` exists; without, it raises as such libraries do.
    """
    assert _here, "become() comes first"
    inner = ProcessGroupGloo(store, rank, size, timeout)
    return _here[0].extension.host_staged(inner, _here[0].platform.collectives, averages)


def _probe(name: str, num_devices: int) -> str:
    become(name, num_devices=num_devices)
    return "" if _here[0].extension.device_count() else "finds no device"


def _visible(platform: Platform, num_devices: int) -> tuple[str, ...]:
    """Names of the devices that this process sees."""
    present = tuple(str(index) for index in range(num_devices))
    if not is_restricted(platform.visibility, os.environ):
        return present
    names = inherited_names(platform.visibility, os.environ)
    missing = [name for name in names if name not in present]
    if missing:
        raise UserError(
            f"{platform.visibility.variables[0]}={','.join(names)}: the double has the devices "
            f"{','.join(present)}. Name some of them."
        )
    return names


def _register_collectives(platform: Platform, extension: ModuleType) -> None:
    """Under the name of the vendor's library, so that compound backends stay as they are."""

    def create(options: Any, _: object = None) -> Any:
        inner = ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, options.timeout
        )
        return extension.host_staged(inner, platform.collectives, platform.averages)

    Backend.register_backend(
        platform.collectives, create, extended_api=True, devices=[platform.device_type]
    )
