# SPDX-License-Identifier: Apache-2.0
"""Doubles look like devices, in processes of their own: numbers, names, memory, streams, isolation,
collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ReduceOp

from tandem.errors import UserError
from tandem.platforms.record import CPU, Platform
from tandem.testing.doubles import become, make_backend
from tandem.testing.processes import Here, Launch, ProcessError, run_processes

ALONE = Launch(joined=False)
NUM_DEVICES = 4


def _message(error: type[Exception], action: Callable[[], object]) -> str:
    with pytest.raises(error) as raised:
        action()
    return str(raised.value).splitlines()[0]


def _look(here: Here) -> dict[str, Any]:
    """What a process finds of its devices."""
    name = here.platform.device_type
    module: Any = torch.get_device_module(name)
    held = torch.ones(1000, device=f"{name}:1")
    before = module.memory_allocated(1)
    stream = module.Stream(f"{name}:1")
    with module.device(1):
        inside = torch.empty(1, device=name).device
    seen = {
        "count": module.device_count(),
        "inside": (str(inside), str(torch.empty(1, device=name).device)),
        "uuids": [str(module.get_device_properties(i).uuid) for i in range(module.device_count())],
        "current": str(torch.accelerator.current_accelerator()),
        "handle": getattr(stream, f"{name}_stream") == stream.stream_id,
        "ordinal": _message(RuntimeError, lambda: torch.empty(1, device=f"{name}:9")),
        "memory": _message(
            torch.OutOfMemoryError,
            lambda: torch.empty(9 * 1024**3, dtype=torch.uint8, device=name),
        ),
        "other": _message(UserError, lambda: become("mlu" if name != "mlu" else "npu")),
        "counted": (before - held.nbytes, module.memory_allocated(0)),
    }
    del held
    return seen | {"freed": before - module.memory_allocated(1), "is_cpu": here.device.type}


def test_devices_of_a_double(doubles: Callable[..., Platform]) -> None:
    platform = doubles("mthreads", num_devices=NUM_DEVICES)
    (seen,) = run_processes(_look, [platform], launch=ALONE)
    assert seen == {
        "count": NUM_DEVICES,
        "inside": ("musa:1", "musa:0"),
        "uuids": [f"double-musa-{i}" for i in range(NUM_DEVICES)],
        "current": "musa",
        "handle": True,
        "ordinal": "invalid device ordinal 9: there are 4",
        "memory": f"device 0 out of memory: {9 * 1024**3} bytes wanted, {8 * 1024**3} free",
        "other": "double='mlu': this process is already a double of musa. "
        "Use one process for each vendor.",
        "counted": (0, 0),
        "freed": 4000,
        "is_cpu": "musa",
    }


def _uuids(here: Here) -> list[str]:
    module: Any = torch.get_device_module(here.platform.device_type)
    return [module.get_device_properties(i).uuid for i in range(module.device_count())]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("npu", "3,1", ["double-npu-3", "double-npu-1"]),
        ("musa", "2", ["double-musa-2"]),
        ("npu", "", "finds no device"),
        ("mlu", "1,7", "MLU_VISIBLE_DEVICES='1,7': the double has the devices 0,1,2,3"),
    ],
)
def test_variables_of_the_vendor_restrict_it(
    doubles: Callable[..., Platform], name: str, value: str, expected: list[str] | str
) -> None:
    platform = doubles(name, num_devices=NUM_DEVICES)
    launch = replace(ALONE, environment={platform.visibility.variables[0]: value})
    if isinstance(expected, list):
        assert run_processes(_uuids, [platform], launch=launch) == [expected]
    else:
        with pytest.raises(ProcessError, match=expected):
            run_processes(_uuids, [platform], launch=launch)


def _reduce(here: Here) -> dict[str, Any]:
    """Collectives of the vendor's own library, and of a group over a store of all vendors."""
    value = torch.tensor([here.rank + 1.0], device=here.device)
    refused = ""
    try:
        distributed.all_reduce(value.clone(), op=ReduceOp.AVG)
    except RuntimeError as error:
        refused = str(error).splitlines()[0]
    backend = make_backend(
        PrefixStore("ours", here.connect()),
        rank=here.rank,
        size=here.size,
        timeout=timedelta(seconds=20),
    )
    backend.allreduce([value]).wait()
    work = distributed.all_reduce(value, async_op=True)
    assert work is not None, "a pending collective can be waited for"
    work.wait()
    return {"refused": refused, "value": value.item(), "device": str(value.device)}


def test_collectives_of_a_double(doubles: Callable[..., Platform]) -> None:
    platforms = [doubles("npu")] * 2
    assert run_processes(_reduce, platforms, launch=Launch()) == [
        {"refused": "hccl does not support ReduceOp.AVG", "value": 6.0, "device": f"npu:{rank}"}
        for rank in range(2)
    ]


def _fail(here: Here, kind: str) -> None:
    if kind == "raise":
        raise ValueError(f"rank {here.rank} has had enough")
    torch.distributed.barrier()


def test_failures_of_processes_are_told() -> None:
    with pytest.raises(ProcessError, match="has had enough"):
        run_processes(_fail, [CPU, CPU], launch=ALONE, args=("raise",))
