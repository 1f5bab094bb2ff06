# SPDX-License-Identifier: Apache-2.0
"""FlagCX between real processes with devices of several vendors, as doubles and the stub play them
(A9)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import Store

from tandem.comm.deadline import Deadline, GroupError
from tandem.comm.flagcx import form_flagcx_group
from tandem.comm.flagcx_library import Abi, load_library
from tandem.comm.group import Group, GroupPlace
from tandem.comm.store import connect_store
from tandem.errors import UserError
from tandem.platforms.registry import platform_named
from tandem.testing.doubles import become
from tandem.testing.flagcx_stub import counters, stub_library
from tandem.types import HeldSlice
from tandem.weight_sync.failure import SyncError
from tandem.weight_sync.handshake import FlagcxAccess
from tandem.weight_sync.link import WeightLink, open_link
from tandem.weight_sync.transport_choice import TransportKind
from tests.distributed.spawn import HOST, run_ranks
from tests.fakes.patience import LIMIT_S, PATIENCE_S
from tests.unit.weight_sync.layouts import (
    check_arrived,
    cut,
    empty_copy,
    make_weights,
    place,
    receiving,
    sending,
    settings,
)

pytestmark = pytest.mark.usefixtures("doubles", "flagcx_stub")

DOUBLES = ("mlu", "musa", "musa")
VENDORS = {"mlu": "MLU", "musa": "MUSA", "npu": "ASCEND"}
both_abis = pytest.mark.parametrize("abi", Abi)


def _device(rank: int, port: int, doubles: tuple[str, ...]) -> tuple[Store, torch.device]:
    """Return the common objects of a process: the driver's store, and its device."""
    os.environ["FLAGCX_STUB_VENDOR"] = VENDORS[doubles[rank]]
    become(doubles[rank])
    return connect_store(HOST, port, timeout_s=LIMIT_S), torch.device(doubles[rank], 0)


def _raw(stream: Any) -> int:
    return getattr(stream, f"{stream.device.type}_stream")


def _form(
    store: Store, place_: GroupPlace, *, abi: Abi, handle: Callable[..., int] = _raw
) -> Group:
    library = load_library(stub_library(abi))
    return form_flagcx_group(store, place_, library=library, stream_handle=handle)


def _group_place(rank: int, size: int, device: torch.device) -> GroupPlace:
    return GroupPlace("weights", tuple(range(size)), rank, device, LIMIT_S)


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _broadcast(rank: int, size: int, port: int, abi: Abi) -> tuple[list[str], list[str], Any]:
    """Return digests of the received bytes, warnings, and counts of copied and freed streams."""
    store, device = _device(rank, port, DOUBLES)
    warnings = _Messages()
    logging.getLogger("tandem.comm.flagcx").addHandler(warnings)
    group = _form(store, _group_place(rank, size, device), abi=abi)
    digests: list[str] = []
    for dtype in (torch.bfloat16, torch.float32, torch.int8, torch.bool):
        for shape in ((), (0,), (3, 5), (1_100_003,)):
            generator = torch.Generator().manual_seed(rank)
            tensor = torch.randint(0, 2, shape, generator=generator).to(dtype).to(device)
            deadline = Deadline(LIMIT_S, store=store, key="failure")
            group.broadcast(tensor, root=0).wait(deadline)
            data = tensor.cpu().reshape(-1).view(torch.uint8).numpy()
            digests.append(sha256(data).hexdigest())
    assert counters(stub_library(abi)) == (1, 0)
    group.close()
    return digests, warnings.texts, counters(stub_library(abi))


@both_abis
def test_a9_vendors_differ_and_bytes_do_not(abi: Abi) -> None:
    (digests, warnings, streams), *others = run_ranks(_broadcast, 3, abi, joined=False)
    assert warnings == ["group weights: FlagCX goes through the host because MLU has only one rank"]
    assert len(set(digests)) > 8
    assert streams == (1, 1)
    assert others == [(digests, [], (1, 1))] * 2


def _form_in_vain(rank: int, size: int, port: int, doubles: tuple[str, ...], handle: Any) -> str:
    store, device = _device(rank, port, doubles)
    if handle is _corrupt and rank == 1:
        os.environ["FLAGCX_STUB_CORRUPT"] = "1"
    store.set(f"here {rank}", "")
    store.wait([f"here {other}" for other in range(size)])
    started = time.monotonic()
    with pytest.raises((UserError, GroupError)) as raised:
        own = handle if rank == size - 1 else _raw
        _form(store, _group_place(rank, size, device), abi=Abi.DEVICE_HANDLE, handle=own)
    assert time.monotonic() - started < PATIENCE_S, "nobody waits for a time limit"
    return f"{raised.type.__name__}: {raised.value}"


def _unknown_stream(stream: Any) -> int:
    return stream.gpu_stream


def _no_number(stream: Any) -> Any:
    return stream


def _default_stream(stream: Any) -> int:
    return 0


def _corrupt(stream: Any) -> int:
    """Form a group by a library with a fault."""
    return _raw(stream)


@pytest.mark.parametrize(
    ("doubles", "handle", "error"),
    [
        (("mlu", "musa", "mlu"), _raw, "UserError: flagcx='weights': the ranks of one vendor must"),
        (("npu", "musa"), _raw, "UserError: flagcx='weights': FlagCX does not connect ASCEND with"),
        (
            DOUBLES,
            _unknown_stream,
            "rank 2: Stream of musa:0: its platform does not support such a",
        ),
        (DOUBLES, _no_number, "rank 2: Stream of musa:0: its platform returns torch.Stream"),
        (DOUBLES, _default_stream, "rank 2: Stream of musa:0: its platform returns 0 as the"),
        (DOUBLES, _corrupt, "UserError: flagcx='weights': a test broadcast arrived corrupted"),
    ],
)
def test_a9_all_processes_learn_at_once_what_cannot_be_connected(
    doubles: tuple[str, ...], handle: Callable[[Any], int], error: str
) -> None:
    answers = run_ranks(_form_in_vain, len(doubles), doubles, handle, joined=False)
    assert len(set(answers)) == 1
    assert error in answers[0]


def _link(rank: int, size: int, port: int, abi: Abi) -> str:
    """Send two versions, a third whose broadcasts fail in one process, and a fourth anew."""
    store, device = _device(rank, port, DOUBLES)
    weights = make_weights(300)
    sends = cut({name: w.to(device) for name, w in weights.items()}, (1, 1), rank=0)
    rooms = [
        HeldSlice(room.spec, room.tensor.to(device)) for room in empty_copy(weights, torch.bfloat16)
    ]
    own = replace(
        place(rank, size),
        device=device,
        platform=platform_named(DOUBLES[rank]),
        flagcx=FlagcxAccess(VENDORS[DOUBLES[rank]], partial(_form, abi=abi)),
    )
    form = partial(
        open_link,
        store,
        tensors=sending(sends) if rank == 0 else receiving(rooms),
        settings=settings(4096, 4096, timeout_s=LIMIT_S, transport=TransportKind.FLAGCX),
    )
    link = form(own)
    failure = ""
    for version in (1, 2, 3, 4):
        for held, whole in zip(sends, weights.values(), strict=True):
            whole.mul_(version)
            held.tensor.mul_(version)
        if version == 3:
            failure = _fail(link, fails_here=rank == size - 1)
            link = form(replace(own, name="weights again"))
            continue
        link.transfer(version)
        if rank:
            check_arrived([HeldSlice(r.spec, r.tensor.cpu()) for r in rooms], weights)
    link.close()
    return failure


def _fail(link: WeightLink, *, fails_here: bool) -> str:
    """Send the third version, which ends the link."""
    if fails_here:
        os.environ["FLAGCX_STUB_FAIL"] = "flagcxBroadcast:6"
    started = time.monotonic()
    with pytest.raises(SyncError) as raised:
        link.transfer(3)
    assert time.monotonic() - started < PATIENCE_S, "nobody waits for a time limit"
    os.environ.pop("FLAGCX_STUB_FAIL", None)
    return str(raised.value)


@both_abis
def test_a9_weights_cross_between_vendors_and_one_that_fails_is_no_hang(abi: Abi) -> None:
    answers = run_ranks(_link, 3, abi, joined=False)
    assert len(set(answers)) == 1
    assert "process 2 (rank 2): flagcxBroadcast: remote error (FlagCX result 6)" in answers[0]
