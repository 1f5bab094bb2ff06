# SPDX-License-Identifier: Apache-2.0
"""Adapters of the text decoder of a model that sees, against the released peft."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from tandem.config.derived.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tandem.data.packing import pack
from tandem.errors import UserError
from tandem.models.adapted import trained_parameters
from tandem.models.adapters import merge_adapter
from tandem.models.language_model import NativeModel
from tests.fakes.scoring import score_batch
from tests.fakes.tiny_adapters import ALL, open_adapted, spread_b
from tests.fakes.tiny_vision import FAMILIES, write_seeing
from tests.unit.models.test_vision import make_batch, their_log_probs


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, and our adapter with an effect on it, whose B is not zero."""
    root = tmp_path_factory.mktemp(request.param)
    write_seeing(request.param, root / "base")
    model = open_adapted(root / "base")
    spread_b(model)
    (root / "adapter").mkdir()
    model.save(root / "adapter")
    return root


def open_ours(folder: Path) -> NativeModel:
    return open_adapted(folder / "base", replace(ALL, folder=folder / "adapter"))


def open_theirs(folder: Path) -> Any:
    """Return peft's model over transformers'."""
    base = AutoModelForImageTextToText.from_pretrained(folder / "base").float().eval()
    return peft.PeftModel.from_pretrained(base, folder / "adapter")


def test_names_are_those_of_transformers_modules(folder: Path) -> None:
    """L2: for models that see."""
    tensors = load_file(folder / "adapter" / ADAPTER_WEIGHTS)
    prefix = "base_model.model.model.language_model.layers."
    assert tensors and all(name.startswith(prefix) for name in tensors)
    content = json.loads((folder / "adapter" / ADAPTER_CONFIG).read_text())
    # By their last parts alone, peft would adapt maps of the tower too.
    assert all("language_model" in name for name in content["target_modules"])
    theirs = open_theirs(folder)
    own = {name.replace(".default", "") for name, _ in theirs.named_parameters() if "lora" in name}
    assert own == tensors.keys()


def test_log_probs_equal_pefts_and_the_tower_is_frozen(folder: Path) -> None:
    """L1: for models that see."""
    ours, theirs, sequences = open_ours(folder), open_theirs(folder), make_batch()
    scores = score_batch(ours, pack(sequences), temperature=1.0, with_entropy=False).score_R
    base = theirs.get_base_model()
    with torch.no_grad():
        want = torch.cat([their_log_probs(base, ours, sequence) for sequence in sequences])
    assert (scores - want).abs().max() < 1e-5  # as without adapters
    scores.sum().backward()
    own = trained_parameters(ours.decoder)
    assert all("lora" in name for name in own)
    frozen = [x for name, x in ours.decoder.named_parameters() if name not in own]
    assert all(x.grad is None for x in frozen)
    copy = ours.with_own_adapters(torch.float32)
    assert copy.decoder.tower is ours.base().decoder.tower is ours.decoder.tower


def test_a_merged_export_equals_pefts(folder: Path, tmp_path: Path) -> None:
    """L3: for models that see."""
    merge_adapter(folder / "adapter", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    open_theirs(folder).merge_and_unload().save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert merged.keys() == theirs.keys()
    assert all(torch.equal(merged[name], theirs[name]) for name in merged)
    base = load_file(folder / "base" / "model.safetensors")
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert len(changed) == 3 * 7 and not any("visual" in name for name in changed)


def test_rules_are_about_the_modules_of_the_text(folder: Path) -> None:
    some = replace(ALL, targets=r".*language_model.*\.(q|v)_proj", excludes=r".*visual.*")
    maps = open_adapted(folder / "base", some).config.adapters
    assert maps is not None and {name.split(".")[-1] for name, _ in maps.maps} == {"qkv"}
    with pytest.raises(UserError, match="target_modules=.*no linear map of the model's 3 layers"):
        open_adapted(folder / "base", replace(ALL, targets=r"model\.visual\..*"))
