# SPDX-License-Identifier: Apache-2.0
"""Which way bytes take, and why."""

from __future__ import annotations

import pytest

from tandem.config.check.platform_rules import weight_routes
from tandem.config.check.rules import check_run
from tandem.config.derived.pools import place_run
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.driver.arguments import check_platforms
from tandem.errors import UserError
from tandem.weight_sync.plan import Route
from tandem.weight_sync.transport_choice import (
    Endpoint,
    RouteChoice,
    TransportKind,
    choose_route,
    choose_transport,
)

CPU = Endpoint("cpu", "", "cpu")
GPUS = [Endpoint("cuda", f"GPU-{n}", "cuda", maps_peers=True) for n in range(3)]
SHARED_NPU = [Endpoint("npu", "1", "npu")] * 2
NPUS = [Endpoint("npu", f"{n}", "npu") for n in range(2)]
MUSAS = [Endpoint("musa", f"{n}", "musa") for n in range(2)]


def _with_flagcx(endpoints: list[Endpoint], vendor: str) -> list[Endpoint]:
    return [Endpoint(e.device_type, e.device_id, e.platform, flagcx=vendor) for e in endpoints]


@pytest.mark.parametrize(
    ("endpoints", "kind", "reason"),
    [
        ([CPU, CPU, CPU], TransportKind.COLLECTIVE, "all tensors lie in host memory"),
        (GPUS, TransportKind.COLLECTIVE, "each process has a cuda device"),
        ([GPUS[0], GPUS[0]], TransportKind.IPC, "the processes share a cuda device"),
        ([GPUS[0], GPUS[0], GPUS[1]], TransportKind.STAGED, "tensors lie on cuda"),
        (SHARED_NPU, TransportKind.STAGED, "tensors lie on npu"),
    ],
)
def test_the_fastest_way_within_a_platform(
    endpoints: list[Endpoint], kind: TransportKind, reason: str
) -> None:
    choice = choose_transport(endpoints)
    assert (choice.kind, choice.reason) == (kind, reason)
    members = tuple(range(len(endpoints)))
    assert choose_route(Route(0, members[1:]), endpoints) == RouteChoice(choice)


def test_a_wanted_way_is_taken_or_refused() -> None:
    assert choose_transport(GPUS, TransportKind.STAGED).kind is TransportKind.STAGED
    with pytest.raises(UserError, match="between cuda there is only collective and staged"):
        choose_transport(GPUS, TransportKind.IPC)


def test_what_crosses_is_staged_and_one_receiver_passes_it_on() -> None:
    endpoints = [*NPUS, *MUSAS, CPU]
    choices = [choose_route(Route(sender, (2, 3)), endpoints) for sender in (0, 1)]
    assert [choice.relay for choice in choices] == [2, 3], "senders have relays of their own"
    for choice in choices:
        assert choice.first.kind is TransportKind.STAGED
        assert choice.inside is not None
        assert choice.inside.kind is TransportKind.COLLECTIVE
    assert str(choices[0]) == (
        "staged, between npu and musa only the hosts connect (npu has no FlagCX); "
        "rank 2 passes them on: collective"
    )
    assert choose_route(Route(0, (4,)), endpoints).relay is None


def test_flagcx_where_both_sides_have_it_and_it_connects_them() -> None:
    endpoints = [*_with_flagcx(GPUS, "NVIDIA"), *_with_flagcx(MUSAS, "MUSA")]
    route = Route(1, (2, 3, 4))
    assert choose_route(route, endpoints).first.kind is TransportKind.FLAGCX
    assert (
        choose_route(route, endpoints, wanted=TransportKind.STAGED).first.reason == "as configured"
    )


def test_a11_flagcx_only_where_asked_for_if_a_vendor_has_one_rank() -> None:
    """It would go through the hosts, which its newer versions do wrongly."""
    endpoints = [*_with_flagcx(GPUS, "NVIDIA"), *_with_flagcx(MUSAS, "MUSA")]
    route = Route(1, (3, 4))
    choice = choose_route(route, endpoints)
    assert choice.first.kind is TransportKind.STAGED
    assert choice.first.reason == (
        "between cuda and musa: with one rank of NVIDIA, FlagCX also goes through the hosts"
    )
    assert choice.first.is_surprising
    forced = choose_route(route, endpoints, wanted=TransportKind.FLAGCX)
    assert (forced.first.kind, forced.first.is_surprising) == (TransportKind.FLAGCX, False)
    assert forced.relay is None, "it fans out by itself"


@pytest.mark.parametrize(
    ("endpoints", "wanted", "why"),
    [
        (
            [NPUS[0], MUSAS[0]],
            TransportKind.COLLECTIVE,
            "between npu and musa there is only staged",
        ),
        ([NPUS[0], MUSAS[0]], TransportKind.FLAGCX, "npu and musa: npu has no FlagCX"),
        (
            [*_with_flagcx(NPUS[:1], "ASCEND"), *_with_flagcx(MUSAS[:1], "MUSA")],
            TransportKind.FLAGCX,
            "FlagCX does not connect ASCEND with MUSA",
        ),
    ],
)
def test_a_crossing_that_is_forced_and_does_not_exist(
    endpoints: list[Endpoint], wanted: TransportKind, why: str
) -> None:
    with pytest.raises(UserError, match=why):
        choose_route(Route(0, (1,)), endpoints, wanted=wanted)


VENDORS = {"npu": "ASCEND", "musa": "MUSA", "cuda": "NVIDIA"}
"""FlagCX's names of platforms; it is not on the host."""


def _planned(trains: str, generates: str, wanted: str) -> str:
    """Return the transport that the plan of a run tells, "" if the run is refused."""
    arguments = (
        "actor_rollout_ref.hybrid_engine=False",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=2",
        f"pools.actor-train.platform={trains}",
        f"pools.generate.platform={generates}",
        f"pools.transport={wanted}",
    )
    config = load_config(RunConfig, arguments).config
    placement = place_run(config)
    try:
        check_run(config)
        check_platforms(config, place_run(config))
    except UserError:
        return ""
    (route,) = weight_routes(config, placement).values()
    return route.split()[0]


def _chosen(trains: str, generates: str, wanted: str) -> str:
    """Return the transport that the link takes, "" if it refuses."""
    has_flagcx = wanted == "flagcx"
    endpoints = [
        Endpoint(name, f"{rank}", name, flagcx=VENDORS.get(name, "") if has_flagcx else "")
        for rank, name in enumerate((trains, trains, generates, generates))
    ]
    kind = None if wanted == "auto" else TransportKind(wanted)
    try:
        return choose_route(Route(0, (2, 3)), endpoints, wanted=kind).first.kind.value
    except UserError:
        return ""


@pytest.mark.parametrize("wanted", ["auto", "collective", "flagcx", "staged"])
@pytest.mark.parametrize("generates", ["cpu", "cuda", "npu", "musa"])
@pytest.mark.parametrize("trains", ["cpu", "cuda", "npu", "musa"])
def test_the_plan_tells_the_transport_that_the_link_takes(
    trains: str, generates: str, wanted: str
) -> None:
    assert _planned(trains, generates, wanted) == _chosen(trains, generates, wanted)
