# SPDX-License-Identifier: Apache-2.0
"""Records of the platforms that torch reaches through a vendor's extension or build.

Their facts come from the vendors' documentation; docs/platforms.md lists those that were verified
on hardware. No vendor's package is loaded before ``probe`` is called.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tandem.platforms.capture import eager
from tandem.platforms.isolation import Visibility
from tandem.platforms.names import ALIASES
from tandem.platforms.record import (
    CUDA,
    Platform,
    cuda_problem,
    device_uuid,
    no,
    no_uuid,
    nothing,
    one,
)

ASCEND = Visibility(
    mode="mask",
    resource="NPU",
    variables=("ASCEND_RT_VISIBLE_DEVICES",),
)
XPU = Visibility(
    mode="mask",
    resource="GPU",
    variables=("ONEAPI_DEVICE_SELECTOR",),
    prefix="level_zero:",
)
MLU = Visibility(
    mode="mask", resource="GPU", is_known_to_ray=False, variables=("MLU_VISIBLE_DEVICES",)
)
MUSA = Visibility(
    mode="select", resource="GPU", is_known_to_ray=False, variables=("MUSA_VISIBLE_DEVICES",)
)
"""Moore Threads' devices. Their collectives fail between processes that see one device each, so the
mode is ``select``."""


def extension_problem(device_type: str, extension: str) -> str:
    """Return why this process cannot use the platform, "" if it can. See ``Platform.probe``."""
    if extension and importlib.util.find_spec(extension) is None:
        return f"the package {extension} is not installed"
    try:
        if extension:
            importlib.import_module(extension)
        found = torch.get_device_module(device_type).is_available()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        # Without a driver, vendors' packages fail in many ways.
        return f"{extension or device_type} cannot be loaded: {error}"
    return "" if found else "finds no device"


def extension_platform(
    name: str,
    *,
    vendor: str,
    extension: str,
    collectives: str,
    visibility: Visibility,
    megatron_adaptor: str = "",
) -> Platform:
    """Return the record of a platform whose torch extension has the functions of every device.

    These are ``device_count``, ``set_device``, ``get_device_properties``, ``max_memory_allocated``
    and so on of ``torch.get_device_module(name)``. docs/extend/platform.md has an example.
    """
    ask = partial(partial, _ask, name)
    return Platform(
        name=name,
        vendor=vendor,
        aliases=ALIASES.get(name, ()),
        device_type=name,
        extension=extension,
        probe=partial(extension_problem, name, extension),
        collectives=collectives,
        averages=False,
        maps_memory=False,
        compute_dtype=torch.bfloat16,
        has_bfloat16=partial(_has_bfloat16, name),
        has_fp8=no,
        device_name=ask("get_device_name"),
        total_memory_bytes=partial(_total_memory, name),
        memory_allocated_bytes=ask("max_memory_allocated"),
        memory_reserved_bytes=ask("max_memory_reserved"),
        microbatch_tokens=None,
        prepare_thread=nothing,
        kernels="torch",
        make_capturer=eager,
        has_own_memory=True,
        num_multiprocessors=one,
        visibility=visibility,
        num_devices=ask("device_count"),
        versions=dict,
        use_device=ask("set_device"),
        device_uuid=partial(device_uuid, name),
        runs_megatron=bool(megatron_adaptor),
        megatron_adaptor=megatron_adaptor,
    )


def _ask(device_type: str, function: str, *arguments: object) -> Any:
    """Call a function of torch's module for the device type."""
    return getattr(torch.get_device_module(device_type), function)(*arguments)


def _has_bfloat16(device_type: str) -> bool:
    # Some extensions lack the function. All chips of these vendors compute in bfloat16.
    module = torch.get_device_module(device_type)
    return not hasattr(module, "is_bf16_supported") or module.is_bf16_supported()


def _total_memory(device_type: str) -> int:
    module = torch.get_device_module(device_type)
    return module.get_device_properties(module.current_device()).total_memory


NPU = extension_platform(
    "npu",
    vendor="Huawei",
    extension="torch_npu",
    collectives="hccl",
    visibility=ASCEND,
    megatron_adaptor="mindspeed",
)
MUSA_PLATFORM = extension_platform(
    "musa",
    vendor="Moore Threads",
    extension="torch_musa",
    collectives="mccl",
    visibility=MUSA,
)
MLU_PLATFORM = extension_platform(
    "mlu",
    vendor="Cambricon",
    extension="torch_mlu",
    collectives="cncl",
    visibility=MLU,
)
XPU_PLATFORM = extension_platform(
    "xpu",
    vendor="Intel",
    extension="",
    collectives="xccl",
    visibility=XPU,
)
ROCM = replace(
    CUDA,
    name="rocm",
    vendor="AMD",
    aliases=ALIASES["rocm"],
    probe=partial(cuda_problem, "rocm"),
    has_fp8=no,
    kernels="torch",
    make_capturer=eager,
    device_uuid=no_uuid,
)
"""AMD's devices. Their collective library is RCCL, which torch calls nccl. Our Triton kernels and
graphs are untested there and not used. Chips without a serial number share one uuid, so uuids are
unused.
"""
METAX = replace(
    ROCM,
    name="metax",
    vendor="MetaX",
    aliases=ALIASES["metax"],
    probe=partial(cuda_problem, "maca"),
)

VENDORS = (ROCM, METAX, NPU, MUSA_PLATFORM, MLU_PLATFORM, XPU_PLATFORM)
"""The platforms of this file, in order of preference."""
