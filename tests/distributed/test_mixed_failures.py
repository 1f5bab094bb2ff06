# SPDX-License-Identifier: Apache-2.0
"""A rollout that is killed while weights cross between vendors (A12): whether it passes them on to
its neighbour or gets them from it, all others know at once, use nothing of what has come, and go on
with another in its place.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
from torch._C._distributed_c10d import Store

from tandem.comm.group import Group, GroupPlace, form_group
from tandem.comm.store import connect_store
from tandem.platforms.record import CPU
from tandem.testing.doubles import double_platform
from tandem.weight_sync.failure import SyncError
from tandem.weight_sync.handshake import LinkPlace
from tandem.weight_sync.link import WeightLink, open_link
from tests.distributed.spawn import HOST, run_ranks
from tests.fakes.patience import LIMIT_S, PATIENCE_S
from tests.unit.weight_sync.faulty_group import faulty
from tests.unit.weight_sync.layouts import held, receiving, sending, settings

pytestmark = pytest.mark.usefixtures("doubles")

PLATFORMS = ("npu", "musa", "musa", "cpu")
RELAY, BEHIND = 1, 2
TIMEOUT_S = LIMIT_S
"""A lost connection is noticed sooner."""
SHAPE, BUCKET, NUM_MESSAGES = (64, 16), 256, 16
BUCKET_OF_DEATH = 3


class _End:
    """A process of the link: the trainer's weights are the version that it sends."""

    def __init__(
        self,
        rank: int,
        store_port: int,
        *,
        name: str = "weights",
        make_group: Callable[[Store, GroupPlace], Group] = form_group,
    ) -> None:
        device_type = PLATFORMS[rank]
        platform = CPU if device_type == "cpu" else double_platform(device_type)
        assert platform.is_available()
        device = torch.device("cpu") if platform is CPU else torch.device(device_type, rank % 2)
        platform.use_device(rank % 2)
        self.weights = torch.zeros(SHAPE, device=device)
        slices = [held("w", self.weights, whole=SHAPE, offset=(0, 0))]
        self.is_trainer = rank == 0
        self.link: WeightLink = open_link(
            connect_store(HOST, store_port, timeout_s=LIMIT_S),
            LinkPlace(
                name,
                rank,
                len(PLATFORMS),
                f"{device_type} {rank}",
                device,
                platform,
                f"{device_type}:{rank}",
            ),
            tensors=sending(slices) if self.is_trainer else receiving(slices),
            settings=settings(BUCKET, BUCKET, timeout_s=TIMEOUT_S),
            make_group=make_group,
        )

    def transfer(self, version: int) -> None:
        if self.is_trainer:
            self.weights.fill_(version)
        self.link.transfer(version)

    def holds(self, version: int) -> bool:
        expected = None if self.is_trainer else version
        return self.link.gate.version == expected and bool((self.weights.cpu() == version).all())


def _drill(rank: int, size: int, store_port: int, victim: int) -> tuple[str, float]:
    """What a survivor says, and after how many seconds; nothing in the victim's place."""
    del size
    if rank == victim:
        child = os.fork()
        if not child:
            _die_in_a_bucket(rank, store_port)
        os.waitpid(child, 0)
        connect_store(HOST, store_port, timeout_s=LIMIT_S).wait(["replace"])
        successor = _End(rank, store_port, name="weights again")
        successor.transfer(3)
        assert successor.holds(3)
        return "", 0.0
    end = _End(rank, store_port)
    end.transfer(1)
    assert end.holds(1)
    started = time.monotonic()
    with pytest.raises(SyncError) as caught:
        end.transfer(2)
    took_s = time.monotonic() - started
    if not end.is_trainer:
        with (
            pytest.raises(SyncError, match="weights cannot be used: version 2 did not"),
            end.link.gate.reading(1),
        ):
            pass
    connect_store(HOST, store_port, timeout_s=LIMIT_S).set("replace", "")
    successor = _End(rank, store_port, name="weights again")
    successor.transfer(3)
    assert successor.holds(3)
    return str(caught.value), took_s


def _die_in_a_bucket(rank: int, store_port: int) -> None:
    """Of the second version. The relay takes part in two broadcasts of each bucket."""
    per_bucket = 2 if rank == RELAY else 1

    def act(number: int, bucket: torch.Tensor) -> None:
        del bucket
        if number == (NUM_MESSAGES + BUCKET_OF_DEATH) * per_bucket:
            os.kill(os.getpid(), signal.SIGKILL)

    end = _End(rank, store_port, make_group=faulty(act))
    end.transfer(1)
    end.transfer(2)
    os._exit(1)  # it was to be killed: the survivors notice that nothing failed


@pytest.mark.parametrize("victim", [RELAY, BEHIND], ids=["relay", "behind it"])
def test_a12_a_killed_rollout_ends_the_transfer_everywhere_and_can_be_replaced(
    victim: int,
) -> None:
    told = run_ranks(_drill, len(PLATFORMS), victim, joined=False)
    said = [words for rank, (words, _) in enumerate(told) if rank != victim]
    assert said[0].endswith(f"no answer from rank {victim}")
    assert said == [said[0]] * (len(PLATFORMS) - 1)
    assert max(took_s for _, took_s in told) < PATIENCE_S
