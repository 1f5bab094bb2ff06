# SPDX-License-Identifier: Apache-2.0
"""Which way bytes take, and why."""

from __future__ import annotations

import pytest

from tandem.errors import UserError
from tandem.weight_sync.plan import Route
from tandem.weight_sync.transport_choice import Endpoint, Path, Way, choose_path, choose_way

CPU = Endpoint("cpu", "", "cpu")
GPUS = [Endpoint("cuda", f"GPU-{n}", "cuda", maps_peers=True) for n in range(3)]
SHARED_NPU = [Endpoint("npu", "1", "npu")] * 2
NPUS = [Endpoint("npu", f"{n}", "npu") for n in range(2)]
MUSAS = [Endpoint("musa", f"{n}", "musa") for n in range(2)]


def _with_flagcx(endpoints: list[Endpoint], vendor: str) -> list[Endpoint]:
    return [Endpoint(e.device_type, e.device_id, e.platform, flagcx=vendor) for e in endpoints]


@pytest.mark.parametrize(
    ("endpoints", "way", "reason"),
    [
        ([CPU, CPU, CPU], Way.COLLECTIVE, "all tensors lie in host memory"),
        (GPUS, Way.COLLECTIVE, "each process has a cuda device"),
        ([GPUS[0], GPUS[0]], Way.IPC, "the processes share a cuda device"),
        ([GPUS[0], GPUS[0], GPUS[1]], Way.STAGED, "tensors lie on cuda"),
        (SHARED_NPU, Way.STAGED, "tensors lie on npu"),
    ],
)
def test_the_fastest_way_within_a_platform(
    endpoints: list[Endpoint], way: Way, reason: str
) -> None:
    choice = choose_way(endpoints)
    assert (choice.way, choice.reason) == (way, reason)
    members = tuple(range(len(endpoints)))
    assert choose_path(Route(0, members[1:]), endpoints) == Path(choice)


def test_a_wanted_way_is_taken_or_refused() -> None:
    assert choose_way(GPUS, Way.STAGED).way is Way.STAGED
    with pytest.raises(UserError, match="between cuda there is only collective and staged"):
        choose_way(GPUS, Way.IPC)


def test_what_crosses_is_staged_and_one_receiver_passes_it_on() -> None:
    endpoints = [*NPUS, *MUSAS, CPU]
    paths = [choose_path(Route(sender, (2, 3)), endpoints) for sender in (0, 1)]
    assert [path.relay for path in paths] == [2, 3], "senders have relays of their own"
    for path in paths:
        assert path.choice.way is Way.STAGED
        assert path.inside is not None
        assert path.inside.way is Way.COLLECTIVE
    assert str(paths[0]) == (
        "staged, between npu and musa only the hosts connect (npu has no FlagCX); "
        "rank 2 passes them on: collective"
    )
    assert choose_path(Route(0, (4,)), endpoints).relay is None


def test_flagcx_where_both_sides_have_it_and_it_connects_them() -> None:
    endpoints = [*_with_flagcx(GPUS, "NVIDIA"), *_with_flagcx(MUSAS, "MUSA")]
    route = Route(1, (2, 3, 4))
    assert choose_path(route, endpoints).choice.way is Way.FLAGCX
    assert choose_path(route, endpoints, wanted=Way.STAGED).choice.reason == "as asked for"


def test_a11_flagcx_only_where_asked_for_if_a_vendor_has_one_rank() -> None:
    """It would go through the hosts, which its newer versions do wrongly."""
    endpoints = [*_with_flagcx(GPUS, "NVIDIA"), *_with_flagcx(MUSAS, "MUSA")]
    route = Route(1, (3, 4))
    path = choose_path(route, endpoints)
    assert path.choice.way is Way.STAGED
    assert path.choice.reason == (
        "between cuda and musa: with one rank of NVIDIA, FlagCX goes through the hosts too"
    )
    assert path.choice.is_surprising
    forced = choose_path(route, endpoints, wanted=Way.FLAGCX)
    assert (forced.choice.way, forced.choice.is_surprising) == (Way.FLAGCX, False)
    assert forced.relay is None, "it fans out by itself"


@pytest.mark.parametrize(
    ("endpoints", "wanted", "why"),
    [
        ([NPUS[0], MUSAS[0]], Way.COLLECTIVE, "between npu and musa there is only staged"),
        ([NPUS[0], MUSAS[0]], Way.FLAGCX, "flagcx: npu and musa: npu has no FlagCX"),
        (
            [*_with_flagcx(NPUS[:1], "ASCEND"), *_with_flagcx(MUSAS[:1], "MUSA")],
            Way.FLAGCX,
            "FlagCX does not connect ASCEND with MUSA",
        ),
    ],
)
def test_a_crossing_that_is_forced_and_does_not_exist(
    endpoints: list[Endpoint], wanted: Way, why: str
) -> None:
    with pytest.raises(UserError, match=why):
        choose_path(Route(0, (1,)), endpoints, wanted=wanted)
