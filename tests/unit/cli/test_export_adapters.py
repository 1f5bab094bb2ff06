# SPDX-License-Identifier: Apache-2.0
"""L3: ``tandem export`` of a run with adapters is peft's ``merge_and_unload``, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tandem.checkpoint.store import CheckpointStore
from tandem.cli import export
from tandem.config.derived.adapters import ADAPTER_WEIGHTS
from tandem.errors import UserError
from tandem.facade.run import Run
from tandem.models.adapters import BASE_FILE, merge_adapter
from tandem.models.language_model import NativeModel
from tandem.models.weights import WEIGHTS_FILE
from tests.fakes.tiny_adapters import ALL, open_adapted, spread_b
from tests.unit.models.tiny_models import NATIVE, write_hf

ACTOR = "run/global_step_1/actor"


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A folder with a base and a run whose checkpoint has adapters of it."""
    write_hf(NATIVE["qwen3_biases"](), tmp_path / "base")
    _save_run(tmp_path, open_adapted(tmp_path / "base", ALL))
    return tmp_path


def _save_run(folder: Path, model: NativeModel) -> None:
    spread_b(model)
    with CheckpointStore(folder / "run").writing(1, {}) as partial:
        (partial / "actor").mkdir()
        model.save(partial / "actor")


def test_l3_export_equals_merge_and_unload(trained: Path) -> None:
    """L3: in fp32, and transformers loads the exported folder."""
    _check_export(trained)


def test_l3_also_with_rslora_a_tied_head_and_some_modules(tmp_path: Path) -> None:
    """L3: the scale is alpha / sqrt(r), which is not exact in binary."""
    write_hf(NATIVE["qwen2_tied"](), tmp_path / "base")
    adapters = replace(ALL, rank=6, has_root_scale=True, targets=("q_proj", "v_proj", "down_proj"))
    _save_run(tmp_path, open_adapted(tmp_path / "base", adapters))
    _check_export(tmp_path)


def _check_export(trained: Path) -> None:
    assert export.run([str(trained / "run"), "--output", str(trained / "out")]) == 0
    base = AutoModelForCausalLM.from_pretrained(trained / "base", dtype=torch.float32)
    wanted = peft.PeftModel.from_pretrained(base, trained / ACTOR).merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(trained / "out", dtype=torch.float32).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_base_in_bf16_is_rounded_once(trained: Path) -> None:
    path = trained / "base" / WEIGHTS_FILE
    exact = load_file(path)
    save_file({name: x.bfloat16() for name, x in exact.items()}, path, metadata={"format": "pt"})
    model = open_adapted(trained / "base", ALL, base_dtype=torch.bfloat16)
    _save_run(trained, model)
    export.run([str(trained / "run"), "--output", str(trained / "half")])
    export.run([str(trained / "run"), "--output", str(trained / "full"), "--dtype", "float32"])
    half, full = (load_file(trained / x / WEIGHTS_FILE) for x in ("half", "full"))
    assert all(torch.equal(half[name], full[name].bfloat16()) for name in half)
    assert any(not torch.equal(half[name].float(), full[name]) for name in half)


def _move_base(folder: Path) -> None:
    (folder / "base").rename(folder / "moved")


def _change_base(folder: Path) -> None:
    path = folder / "base" / WEIGHTS_FILE
    tensors = load_file(path)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, path, metadata={"format": "pt"})


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / ACTOR / name).unlink()


def _cut(folder: Path) -> None:
    path = folder / ACTOR / ADAPTER_WEIGHTS
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_move_base, "--base='.*base': the base model of these adapters is not there. Name"),
        (
            _change_base,
            "--base='.*base': the adapters of .* were trained on other weights",
        ),
        (_remove(BASE_FILE), f"{BASE_FILE} cannot be read"),
        (_remove(ADAPTER_WEIGHTS), f"it has no {ADAPTER_WEIGHTS}"),
        (_cut, f"{ADAPTER_WEIGHTS} cannot be read"),
    ],
)
def test_damage_is_named_in_one_line(
    trained: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(trained)
    with pytest.raises(UserError, match=message) as caught:
        merge_adapter(trained / ACTOR, trained / "out")
    assert "\n" not in str(caught.value)


def test_a_moved_base_is_named_by_an_option(trained: Path) -> None:
    _move_base(trained)
    arguments = [str(trained / "run"), "--output", str(trained / "out")]
    assert export.run([*arguments, "--base", str(trained / "moved")]) == 0
    assert (trained / "out" / WEIGHTS_FILE).is_file()


def test_the_model_folder_of_a_python_run_is_merged(trained: Path) -> None:
    folder = Run(trained / "run").model_folder
    assert folder.name == "model_step_1"
    merged, base = (load_file(x / WEIGHTS_FILE) for x in (folder, trained / "base"))
    assert merged.keys() == base.keys()


def test_an_adapter_that_is_no_run_is_named_as_what_it_is(trained: Path) -> None:
    arguments = ["--output", str(trained / "out")]
    with pytest.raises(UserError, match="RUN=.*actor': is a part of a checkpoint. Name the check"):
        export.run([str(trained / ACTOR), *arguments])
    (trained / ACTOR).rename(trained / "adapter")
    with pytest.raises(UserError, match="RUN=.*: is an adapter that belongs to no run. Merge it"):
        export.run([str(trained / "adapter"), *arguments])
