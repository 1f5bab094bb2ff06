# SPDX-License-Identifier: Apache-2.0
"""Losses and tokens of small fixed runs, bit for bit as they were recorded.

Whoever moves a bit of them finds out here, and decides whether it was meant (``golden_runs``).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes.tiny_run import Material
from tests.golden.golden_runs import RECIPES, RECORDED, conditions, fingerprint, observe


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_fixed_run_gives_the_recorded_losses_and_tokens(
    recipe: str, material: Material, tmp_path: Path
) -> None:
    recorded = json.loads(RECORDED.read_text())
    if recorded["conditions"] != conditions():
        pytest.skip(f"recorded with {recorded['conditions']}, this is {conditions()}")
    assert recorded["material"] == fingerprint(material), "the runs begin with something else"
    found = observe(recipe, material, tmp_path)
    assert found["samples"] == recorded[recipe]["samples"]
    assert found["metrics"] == recorded[recipe]["metrics"]
