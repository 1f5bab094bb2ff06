# SPDX-License-Identifier: Apache-2.0
"""How often servers that take no part are asked, on a clock of the test."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.rollout.attached import fleet as fleet_module
from tandem.rollout.attached.fit import Misfit, ServerFacts
from tandem.rollout.attached.fleet import Fleet
from tandem.rollout.attached.server import Server
from tests.fakes.vllm_server import VllmServerDouble


@pytest.mark.parametrize(
    ("takes_s", "waits_s"),
    [(60.0, [10, 20, 40, 80, 160, 320, 640, 640]), (0.0, [10] * 8)],
)
def test_a_server_that_takes_long_to_fail_is_asked_less_and_less(
    folder: Path, monkeypatch: pytest.MonkeyPatch, takes_s: float, waits_s: list[float]
) -> None:
    server = VllmServerDouble(folder)
    now = 0.0
    asked: list[float] = []

    def check(_: Server) -> ServerFacts:
        nonlocal now
        asked.append(now)
        now += takes_s
        raise Misfit("its engine hangs", "Start it again.")

    urls: list[str] = []
    monkeypatch.setattr(fleet_module, "AGAIN_S", 30.0)
    monkeypatch.setattr(fleet_module, "time", SimpleNamespace(monotonic=lambda: now))
    fleet = Fleet(lambda: urls, require_usable=lambda _: None, check=check)
    urls.append(server.url)
    while len(asked) <= len(waits_s):
        now += 1.0
        assert fleet.find_more() == []
    server.kill()
    found_s = [after - before - takes_s for before, after in pairwise(asked)]
    assert found_s == pytest.approx(waits_s, abs=1.5)
