# SPDX-License-Identifier: Apache-2.0
"""A2: the facts of every platform are those that were written down, and no others creep in.

After a change that is meant, write them anew: ``python -m tests.unit.platforms.test_vendors``.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from tandem.comm.world import world_backend
from tandem.platforms.names import GPUS_OF_RAY
from tandem.platforms.record import Platform
from tandem.platforms.registry import BUILT_IN
from tandem.platforms.vendors import extension_problem

RECORDED = Path(__file__).parent / "platforms.json"


def facts(platform: Platform) -> dict[str, Any]:
    """What can be written down of a record; all else is what torch says of a device."""
    visibility = platform.visibility
    return {
        "vendor": platform.vendor,
        "aliases": list(platform.aliases),
        "device_type": platform.device_type,
        "extension": platform.extension,
        "isolation": visibility.mode,
        "visible_variables": list(visibility.variables),
        "renumbering_variable": visibility.renumbering,
        "ray_resource": visibility.resource,
        "ray_hands_out_names": visibility.is_known_to_ray,
        "collectives": platform.collectives,
        "world": world_backend(platform.device_type, platform.collectives),
        "averages": platform.averages,
        "maps_memory": platform.maps_memory,
        "has_own_memory": platform.has_own_memory,
        "compute_dtype": str(platform.compute_dtype).removeprefix("torch."),
        "kernels": platform.kernels,
        "graphs": platform.make_capturer.__name__,
    }


def test_the_plan_knows_which_devices_ray_calls_by_one_name() -> None:
    assert {one.name for one in BUILT_IN if one.visibility.resource == "GPU"} == GPUS_OF_RAY


def test_a2_facts_are_those_written_down() -> None:
    found = {platform.name: facts(platform) for platform in BUILT_IN}
    assert found == json.loads(RECORDED.read_text())


@pytest.mark.parametrize("platform", BUILT_IN, ids=lambda platform: platform.name)
def test_records_can_be_sent_to_other_processes(platform: Platform) -> None:
    sent = pickle.loads(pickle.dumps(platform))
    assert facts(sent) == facts(platform)
    assert sent.probe() == platform.probe()


def test_a2_names_and_aliases_are_unique() -> None:
    names = [name for platform in BUILT_IN for name in (platform.name, *platform.aliases)]
    assert len(names) == len(set(names))


def test_reasons_name_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert extension_problem("nosuch", "torch_nosuch") == (
        "the package torch_nosuch is not installed"
    )
    (tmp_path / "torch_broken_driver.py").write_text("raise OSError('libdriver.so is missing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    problem = extension_problem("nosuch", "torch_broken_driver")
    assert problem == "torch_broken_driver cannot be loaded: libdriver.so is missing"


if __name__ == "__main__":
    recorded = {platform.name: facts(platform) for platform in BUILT_IN}
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
