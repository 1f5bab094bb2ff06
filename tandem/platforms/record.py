# SPDX-License-Identifier: Apache-2.0
"""What is known of an accelerator family, as a frozen record of facts and a few callables.

Code branches on these facts, never on a vendor's name. More families are added as records, not as
code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from tandem.platforms.capture import Capturer, cuda_graphs, eager
from tandem.platforms.isolation import CUDA_LIKE, HOST, Visibility


@dataclass(frozen=True, slots=True)
class Platform:
    """One accelerator family.

    Attributes:
        name: the public name (``trainer.device``).
        device_type: what torch calls its devices.
        compute_dtype: the precision ``dtype=auto`` means here.
        has_bfloat16: whether this process's device computes in it.
        is_available: whether this process can use it.
        device_name: the chip's name, for reports and peak rates.
        total_memory_bytes: of the device, whatever is in use now.
        memory_allocated_bytes, memory_reserved_bytes: the peaks since the start of the process.
        microbatch_tokens: the size of a micro-batch that computes fastest, None for the largest
            that fits memory. On a CPU a small one gains nothing and costs calls of operators.
        prepare_thread: what a thread that computes must do first.
        kernels: who computes what is not a matrix product: torch, or our Triton kernels.
        make_capturer: how a sequence of operations is recorded and replayed.
        has_own_memory: whether its memory is apart from the host's, and bounded.
        num_multiprocessors: how many programs run at the same time.
        visibility: how several processes of a node are kept to a device each.
        num_devices: how many this process sees.
        use_device: makes the one of an index the device of the calling thread.
    """

    name: str
    device_type: str
    compute_dtype: torch.dtype
    has_bfloat16: Callable[[], bool]
    is_available: Callable[[], bool]
    device_name: Callable[[], str]
    total_memory_bytes: Callable[[], int]
    memory_allocated_bytes: Callable[[], int]
    memory_reserved_bytes: Callable[[], int]
    microbatch_tokens: int | None
    prepare_thread: Callable[[], object]
    kernels: Literal["torch", "triton"]
    make_capturer: Callable[[], Capturer]
    has_own_memory: bool
    num_multiprocessors: Callable[[], int]
    visibility: Visibility
    num_devices: Callable[[], int]
    use_device: Callable[[int], object]


def _flush_denormals() -> bool:
    """Products of small probabilities are often denormal, and those cost a CPU 100 cycles each."""
    return torch.set_flush_denormal(True)


def _nothing() -> None:
    return None


CPU = Platform(
    name="cpu",
    device_type="cpu",
    compute_dtype=torch.float32,
    has_bfloat16=lambda: True,
    is_available=lambda: True,
    device_name=lambda: "cpu",
    total_memory_bytes=lambda: psutil.virtual_memory().total,
    memory_allocated_bytes=lambda: 0,
    memory_reserved_bytes=lambda: 0,
    microbatch_tokens=4096,
    prepare_thread=_flush_denormals,
    kernels="torch",
    make_capturer=eager,
    has_own_memory=False,
    num_multiprocessors=lambda: 1,
    visibility=HOST,
    num_devices=lambda: 1,
    use_device=lambda index: None,
)

CUDA = Platform(
    name="cuda",
    device_type="cuda",
    compute_dtype=torch.bfloat16,
    has_bfloat16=lambda: torch.cuda.is_bf16_supported(including_emulation=False),
    is_available=torch.cuda.is_available,
    device_name=torch.cuda.get_device_name,
    total_memory_bytes=lambda: torch.cuda.get_device_properties(None).total_memory,
    memory_allocated_bytes=torch.cuda.max_memory_allocated,
    memory_reserved_bytes=torch.cuda.max_memory_reserved,
    microbatch_tokens=None,
    prepare_thread=_nothing,
    kernels="triton",
    make_capturer=cuda_graphs,
    has_own_memory=True,
    num_multiprocessors=lambda: torch.cuda.get_device_properties(None).multi_processor_count,
    visibility=CUDA_LIKE,
    num_devices=torch.cuda.device_count,
    use_device=torch.cuda.set_device,
)

PLATFORMS = {platform.name: platform for platform in (CUDA, CPU)}
"""In order of preference when none is asked for."""
