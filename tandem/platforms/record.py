# SPDX-License-Identifier: Apache-2.0
"""The record of an accelerator platform, and those of the two platforms that torch supports itself.

A record holds facts and a few callables. Code branches on these facts, never on a vendor's name; a
new platform is a new record, not new code. Making a record queries no device; only ``probe`` does.
The other records are in ``vendors``, and ``registry`` finds all of them by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch.cuda import nccl

from tandem.platforms.capture import Capturer, cuda_graphs, eager
from tandem.platforms.host_memory import host_memory_bytes
from tandem.platforms.isolation import CUDA_LIKE, HOST, Visibility
from tandem.platforms.names import ALIASES

_DRIVER = Path("/proc/driver/nvidia/version")


def no() -> bool:
    """Return that a device lacks something."""
    return False


@dataclass(frozen=True, slots=True)
class Platform:
    """A platform: one family of accelerators. Records can be pickled and sent to other processes.

    Attributes:
        name: the public name (``trainer.device``).
        vendor: the company that makes the devices.
        aliases: other names that users may write.
        device_type: torch's name of its devices.
        extension: the package that adds them to torch; "" if torch supports them itself.
        probe: loads the extension and returns why this process cannot use the platform, as a
            phrase; "" if it can.
        collectives: the backend of torch.distributed for its tensors.
        averages: whether the backend supports ``ReduceOp.AVG``.
        maps_memory: whether a process can map the memory of another one on the same device.
        compute_dtype: the precision of ``dtype=auto``.
        has_bfloat16: returns whether this process's device computes in bfloat16.
        has_fp8: returns whether this process's device multiplies matrices of fp8 (e4m3).
        device_name: returns the chip's name, for reports and peak rates.
        total_memory_bytes: returns the memory of the device, used or not.
        memory_allocated_bytes, memory_reserved_bytes: return the peaks since the process started.
        microbatch_tokens: the fastest size of a micro-batch; None for the largest that fits into
            memory. On a CPU a smaller one gains nothing and calls more operators.
        prepare_thread: must be called first in each thread that computes.
        kernels: the implementation of operators except matrix products: torch or Triton. Triton
            needs ``mem_get_info`` and ``memory_stats`` in torch's module of the device, and
            ``torch.mm`` and ``torch.addmm`` with ``out_dtype``.
        make_capturer: returns a function that records a sequence of operations for replay.
        has_own_memory: whether its memory is separate from the host's, and bounded.
        num_multiprocessors: returns how many programs run at the same time.
        visibility: how each process of a node is restricted to one device.
        num_devices: returns the number of devices that this process sees.
        versions: returns the known versions of its collective library and its driver.
        use_device: makes the device of an index that of the calling thread.
        device_uuid: returns the driver's id of the device of an index, or of the calling thread's
            device for None. The id does not depend on the index; "" if unknown.
        runs_megatron: whether the layers of megatron-core, which name their device, run on it.
        megatron_adaptor: the package with which they do; "" if they need none.
        has_dense_attention: returns whether torch has an operator for this process's device that
            computes one long segment in less time than flash attention of several lengths.
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
    has_fp8: Callable[[], bool]
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
    runs_megatron: bool = False
    megatron_adaptor: str = ""
    has_dense_attention: Callable[[], bool] = no

    def is_available(self) -> bool:
        """Return whether this process can use the platform."""
        return not self.probe()


def device_uuid(device_type: str, index: int | None) -> str:
    """Return a device's uuid as torch reports it. See ``Platform.device_uuid``."""
    properties = torch.get_device_module(device_type).get_device_properties(index)
    uuid = str(getattr(properties, "uuid", ""))
    return uuid if uuid.strip("0-") else ""


def no_uuid(_: int | None) -> str:
    """Return "", for platforms without uuids. See ``Platform.device_uuid``."""
    return ""


def _flush_denormals() -> bool:
    # Products of small probabilities are often denormal, and each costs a CPU 100 cycles.
    return torch.set_flush_denormal(True)


def nothing() -> None:
    return None


def cuda_problem(build: str) -> str:
    """Return why torch cannot use its ``cuda`` devices, "" if it can. See ``Platform.probe``.

    Args:
        build: the build of torch that the platform needs: ``cuda``, ``rocm`` or ``maca``.
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


def _ignore(_: int) -> None:
    return None


def _cuda_bfloat16() -> bool:
    return torch.cuda.is_bf16_supported(including_emulation=False)


def _cuda_fp8() -> bool:
    return torch.cuda.get_device_capability() >= (8, 9)


def _cuda_dense_attention() -> bool:
    return torch.cuda.get_device_capability() >= (9, 0) and torch.backends.cudnn.is_available()


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
    has_fp8=_yes,
    device_name=_host_name,
    total_memory_bytes=host_memory_bytes,
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
    has_fp8=_cuda_fp8,
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
    runs_megatron=True,
    has_dense_attention=_cuda_dense_attention,
)
