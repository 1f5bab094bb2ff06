# SPDX-License-Identifier: Apache-2.0
"""What is known of an accelerator family, as a frozen record of facts and a few callables; and the
two families whose devices torch brings itself. Others are in ``vendors``, all of them in
``registry``.

Code branches on these facts, never on a vendor's name. More families are added as records, not as
code. Making a record, or importing this file, asks nothing of any device: that is what ``probe`` is
for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import psutil
import torch
from torch.cuda import nccl

from tandem.platforms.capture import Capturer, cuda_graphs, eager
from tandem.platforms.isolation import CUDA_LIKE, HOST, Visibility
from tandem.platforms.names import ALIASES

_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Platform:
    """One accelerator family. Records can be pickled: a process that is sent one can use it.

    Attributes:
        name: the public name (``trainer.device``).
        vendor: who makes them.
        aliases: other names it is asked for by.
        device_type: what torch calls its devices.
        extension: the package that brings them to torch; "" if torch has them.
        probe: loads that, and says why this process cannot use the platform: a phrase, or "".
        collectives: the backend of torch.distributed for its own tensors.
        averages: whether that can reduce by ``ReduceOp.AVG``.
        maps_memory: whether a process can map another's memory on the same device.
        compute_dtype: the precision ``dtype=auto`` means here.
        has_bfloat16: whether this process's device computes in it.
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
        versions: of its library of collectives and of its driver, where they can be told.
        use_device: makes the one of an index the device of the calling thread.
        device_uuid: what the driver calls the device of an index, None for that of the calling
            thread: the same whatever the device is listed as; "" if it does not tell.
    """

    name: str
    vendor: str
    aliases: tuple[str, ...]
    device_type: str
    extension: str
    probe: Callable[[], str]
    collectives: str
    averages: bool
    maps_memory: bool
    compute_dtype: torch.dtype
    has_bfloat16: Callable[[], bool]
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
    versions: Callable[[], Mapping[str, str]]
    use_device: Callable[[int], object]
    device_uuid: Callable[[int | None], str]

    def is_available(self) -> bool:
        """Whether this process can use it."""
        return not self.probe()


def device_uuid(device_type: str, index: int | None) -> str:
    """See ``Platform.device_uuid``, for what torch calls devices of that type."""
    properties = torch.get_device_module(device_type).get_device_properties(index)
    uuid = str(getattr(properties, "uuid", ""))
    return uuid if uuid.strip("0-") else ""


def no_uuid(_: int | None) -> str:
    """See ``Platform.device_uuid``, for those that do not tell."""
    return ""


def _flush_denormals() -> bool:
    """Products of small probabilities are often denormal, and those cost a CPU 100 cycles each."""
    return torch.set_flush_denormal(True)


def nothing() -> None:
    return None


def cuda_problem(build: str) -> str:
    """See ``Platform.probe``, for those whose devices torch calls cuda.

    Args:
        build: of torch: ``cuda``, ``rocm`` or ``maca``.
    """
    found = "rocm" if torch.version.hip else "maca" if "metax" in torch.__version__ else "cuda"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without it"
    if found != build:
        return f"torch {torch.__version__} is built for {found}"
    return "" if torch.cuda.is_available() else "finds no device"


def _no_problem() -> str:
    return ""


def _yes() -> bool:
    return True


def _zero() -> int:
    return 0


def one() -> int:
    return 1


def _host_name() -> str:
    return "cpu"


def _host_memory() -> int:
    return psutil.virtual_memory().total


def _ignore(_: int) -> None:
    return None


def _cuda_bfloat16() -> bool:
    return torch.cuda.is_bf16_supported(including_emulation=False)


def _cuda_memory() -> int:
    return torch.cuda.get_device_properties(None).total_memory


def _cuda_multiprocessors() -> int:
    return torch.cuda.get_device_properties(None).multi_processor_count


def _cuda_versions() -> dict[str, str]:
    versions = {"nccl": ".".join(map(str, nccl.version()))}
    if _DRIVER.is_file():
        found = re.search(r"\d+(\.\d+)+", _DRIVER.read_text())
        versions |= {"driver": found.group()} if found else {}
    return versions


CPU = Platform(
    name="cpu",
    vendor="any",
    aliases=ALIASES["cpu"],
    device_type="cpu",
    extension="",
    probe=_no_problem,
    collectives="gloo",
    averages=False,
    maps_memory=False,
    compute_dtype=torch.float32,
    has_bfloat16=_yes,
    device_name=_host_name,
    total_memory_bytes=_host_memory,
    memory_allocated_bytes=_zero,
    memory_reserved_bytes=_zero,
    microbatch_tokens=4096,
    prepare_thread=_flush_denormals,
    kernels="torch",
    make_capturer=eager,
    has_own_memory=False,
    num_multiprocessors=one,
    visibility=HOST,
    num_devices=one,
    versions=dict,
    use_device=_ignore,
    device_uuid=no_uuid,
)

CUDA = Platform(
    name="cuda",
    vendor="NVIDIA",
    aliases=ALIASES["cuda"],
    device_type="cuda",
    extension="",
    probe=partial(cuda_problem, "cuda"),
    collectives="nccl",
    averages=True,
    maps_memory=True,
    compute_dtype=torch.bfloat16,
    has_bfloat16=_cuda_bfloat16,
    device_name=torch.cuda.get_device_name,
    total_memory_bytes=_cuda_memory,
    memory_allocated_bytes=torch.cuda.max_memory_allocated,
    memory_reserved_bytes=torch.cuda.max_memory_reserved,
    microbatch_tokens=None,
    prepare_thread=nothing,
    kernels="triton",
    make_capturer=cuda_graphs,
    has_own_memory=True,
    num_multiprocessors=_cuda_multiprocessors,
    visibility=CUDA_LIKE,
    num_devices=torch.cuda.device_count,
    versions=_cuda_versions,
    use_device=torch.cuda.set_device,
    device_uuid=partial(device_uuid, "cuda"),
)
