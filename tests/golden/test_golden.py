# SPDX-License-Identifier: Apache-2.0
"""Losses and tokens of small fixed runs: as recorded, bit for bit on processors that are known.

These are single turns, which go through the episodes of several turns as the trivial case (M7).
``golden_runs`` says how far results on another processor may lie from the recorded ones, and why.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden.golden_runs import (
    RECIPES,
    RECORDED,
    conditions,
    deviations,
    digest,
    fingerprint,
    observe,
    write_golden_material,
)


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text())


@pytest.mark.parametrize("recipe", RECIPES)
def test_m7_a_fixed_run_of_single_turns_gives_the_recorded_losses_and_tokens(
    recipe: str, recorded: dict[str, Any], tmp_path: Path
) -> None:
    material = write_golden_material(tmp_path / "material")
    assert fingerprint(material) == recorded["material"], "the runs begin with other weights"
    seen = observe(recipe, material, tmp_path)
    left = list(deviations(seen, recorded[recipe]))
    assert not left, "\n".join(left)
    expected = recorded[recipe]["digests"].get(conditions())
    assert expected in (None, digest(seen)), "bits have changed, within the bounds of rounding"


def test_tokens_and_metrics_that_are_not_recorded_are_deviations(recorded: dict[str, Any]) -> None:
    run = recorded["grpo"]
    assert not list(deviations(run, run))
    other = json.loads(json.dumps(run))
    other["samples"][0]["tokens"][0] += "x"
    other["metrics"]["1"]["actor/grad_norm"] *= 1 + 1e-4
    del other["metrics"]["2"]["actor/entropy"]
    assert len(list(deviations(other, run))) == 3
