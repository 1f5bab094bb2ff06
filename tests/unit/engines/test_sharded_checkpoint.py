# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as regions: round trips in one process, export, and what is wrong with one."""

from __future__ import annotations

import json
import os
import pickle
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from tandem.config.schema.optim import OptimConfig
from tandem.engines.checkpoint import SHARDED_FILE
from tandem.engines.optim import PolicyOptimizer
from tandem.engines.sharded_checkpoint import (
    export_sharded,
    load_sharded,
    read_record,
    save_sharded,
)
from tandem.engines.shards import unsharded_map
from tandem.engines.single import SingleDeviceEngine
from tandem.errors import UserError
from tandem.models.experts import is_fixed
from tandem.models.folder import open_model
from tandem.models.language_model import LanguageModel
from tandem.models.weights import copy_companions, read_config, write_config
from tests.unit.engines.minibatch import LOSS, SCALE, cut_batches
from tests.unit.models.tiny_models import EXPERTS, write_hf

MUON = OptimConfig(optimizer="Muon", lr=1e-3, muon_lr=1e-3)


class Trained:
    """A model with an optimizer that has taken some steps on random gradients."""

    def __init__(self, folder: Path, *, steps: int) -> None:
        self.model = _open(folder)
        self.weights: dict[str, Tensor] = {
            name: p.detach() for name, p in self.model.module.named_parameters()
        }
        self.shard_map = unsharded_map(self.weights)
        self.optimizer = PolicyOptimizer(self.model, MUON, shard_map=self.shard_map)
        for _ in range(steps):
            gradients = {name: torch.randn_like(x) for name, x in self.weights.items()}
            self.optimizer.step(self.weights, gradients, rate_factor=1.0)

    def store(self, folder: Path, *, model: str = "a model") -> None:
        save_sharded(
            folder,
            self.weights,
            optimizer=self.optimizer,
            regions=self.shard_map.regions,
            model=model,
            schedule_step=7,
        )

    def restore(self, folder: Path) -> int:
        return load_sharded(
            folder,
            self.weights,
            optimizer=self.optimizer,
            regions=self.shard_map.regions,
            model="a model",
        )


def _open(folder: Path) -> LanguageModel:
    return open_model(str(folder), dtype=torch.float32, device="cpu")


def _check_same(one: Trained, other: Trained) -> None:
    for name, weight in one.weights.items():
        assert torch.equal(weight, other.weights[name]), name
    theirs = other.optimizer.state_dict()
    for kind, moments in one.optimizer.state_dict().items():
        assert moments.keys() == theirs[kind].keys()
        for moment, parts in moments.items():
            assert all(map(torch.equal, parts, theirs[kind][moment])), (kind, moment)


@pytest.mark.parametrize("steps", [0, 2])
def test_what_was_stored_comes_back(tiny_policy_folder: Path, tmp_path: Path, steps: int) -> None:
    trained, fresh = (Trained(tiny_policy_folder, steps=n) for n in (steps, 3 - steps))
    trained.store(tmp_path)
    assert fresh.restore(tmp_path) == 7
    _check_same(trained, fresh)


def test_an_export_has_the_trained_weights(tiny_policy_folder: Path, tmp_path: Path) -> None:
    trained, saved = Trained(tiny_policy_folder, steps=1), tmp_path / "saved"
    saved.mkdir()
    trained.store(saved)
    write_config(read_config(tiny_policy_folder), saved, dtype=torch.float32)
    copy_companions(tiny_policy_folder, saved)
    for dtype in (None, "bfloat16"):
        folder = tmp_path / f"as {dtype}"
        export_sharded(saved, folder, dtype=dtype)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert str(model.dtype) == f"torch.{dtype or 'float32'}"
        assert transformers.AutoTokenizer.from_pretrained(folder).eos_token_id is not None
        for name, parameter in _open(folder).module.named_parameters():
            expected = trained.weights[name].to(model.dtype).float()
            assert torch.equal(parameter, expected), name


def test_mo4_an_export_keeps_a_routers_correction_in_fp32(tmp_path: Path) -> None:
    source, saved, exported = tmp_path / "source", tmp_path / "saved", tmp_path / "exported"
    write_hf(EXPERTS["dots1"](), source)
    model = open_model(str(source), dtype=torch.bfloat16, device="cpu")
    weights = {name: p.detach() for name, p in model.module.named_parameters()}
    corrections = [name for name in weights if is_fixed(name)]
    for name in corrections:
        assert weights[name].dtype == torch.float32
        weights[name].fill_(1 / 3)
    shard_map = unsharded_map(weights)
    optimizer = PolicyOptimizer(model, OptimConfig(), shard_map=shard_map)
    saved.mkdir()
    save_sharded(
        saved,
        weights,
        optimizer=optimizer,
        regions=shard_map.regions,
        model="a model",
        schedule_step=0,
    )
    write_config(read_config(source), saved, dtype=torch.bfloat16)
    export_sharded(saved, exported)
    again = dict(_open(exported).module.named_parameters())
    assert corrections
    for name in corrections:
        assert torch.equal(again[name], weights[name])


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def _damages() -> Iterator[tuple[str, Callable[[Path], None]]]:
    yield "no record", lambda folder: (folder / SHARDED_FILE).unlink()
    yield "half a record", lambda folder: _cut(folder / SHARDED_FILE)
    yield "no metadata", lambda folder: (folder / ".metadata").unlink()
    yield "half the metadata", lambda folder: _cut(folder / ".metadata")
    yield "no data", lambda folder: (folder / "__0_0.distcp").unlink()
    yield "half the data", lambda folder: _cut(folder / "__0_0.distcp")


@pytest.mark.parametrize(("name", "damage"), list(_damages()))
def test_an_incomplete_checkpoint_is_refused(
    tiny_policy_folder: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    trained = Trained(tiny_policy_folder, steps=1)
    trained.store(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match="cannot be read") as refusal:
        trained.restore(tmp_path)
    assert "\n" not in str(refusal.value), name


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "no such"},
        {"dtype": "nn"},
        {"dtype": 3},
        {"moments": []},
        {"schedule_step": None},
        {"other": 1},
    ],
)
def test_a_record_of_other_content_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    record = {"model": "m", "dtype": "float32", "moments": {}, "schedule_step": 3}
    (tmp_path / SHARDED_FILE).write_text(json.dumps(record))
    assert read_record(tmp_path).schedule_step == 3
    for content in (json.dumps(record | change), "[]", "[" * 100_000):
        (tmp_path / SHARDED_FILE).write_text(content)
        with pytest.raises(UserError, match=f"{SHARDED_FILE} cannot be read"):
            read_record(tmp_path)


class Hostile:
    """An object whose unpickling calls a function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize(
    "make",
    [
        lambda mark: Hostile(os.mkdir, mark),
        lambda mark: Hostile(getattr, Hostile(__import__, "os"), "mkdir"),
        lambda mark: Metadata({"a": Hostile(os.mkdir, mark)}, storage_data={}),  # pyright: ignore
        lambda mark: Hostile(torch.load, mark),
        lambda mark: Hostile(eval, f"__import__('os').mkdir({mark!r})"),
    ],
)
def test_no_file_of_a_checkpoint_runs_code(
    tiny_policy_folder: Path, tmp_path: Path, make: Callable[[str], object]
) -> None:
    """Neither the index nor the tensors, whose pickles are read by torch with ``weights_only``."""
    trained, mark = Trained(tiny_policy_folder, steps=1), tmp_path / "was here"
    hostile = make(str(mark))
    for name in (".metadata", "__0_0.distcp"):
        folder = tmp_path / name.strip("._")
        folder.mkdir()
        trained.store(folder)
        if name == ".metadata":
            (folder / name).write_bytes(pickle.dumps(hostile))
        else:
            torch.save(hostile, folder / name)
        with pytest.raises(UserError, match="cannot be read") as refusal:
            trained.restore(folder)
        assert "\n" not in str(refusal.value)
        assert not mark.exists()


def test_an_index_of_something_else_is_refused(tiny_policy_folder: Path, tmp_path: Path) -> None:
    trained = Trained(tiny_policy_folder, steps=1)
    trained.store(tmp_path)
    for content in (pickle.dumps([1]), pickle.dumps(torch.Size([1])), b"", b"no pickle"):
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(UserError, match="cannot be read"):
            trained.restore(tmp_path)


def test_a_foreign_checkpoint_is_refused(tiny_policy_folder: Path, tmp_path: Path) -> None:
    trained = Trained(tiny_policy_folder, steps=1)
    trained.store(tmp_path, model="another model")
    with pytest.raises(UserError, match="another model"):
        trained.restore(tmp_path)
    record = json.loads((tmp_path / SHARDED_FILE).read_text())
    record |= {"model": "a model", "moments": {"AdamW": []}}
    (tmp_path / SHARDED_FILE).write_text(json.dumps(record))
    with pytest.raises(UserError, match="optim.optimizer='Muon': the checkpoint has the state"):
        trained.restore(tmp_path)
    engine = SingleDeviceEngine(_open(tiny_policy_folder), MUON, total_training_steps=10)
    with pytest.raises(UserError, match="another model"):
        engine.load(tmp_path)
    assert not engine.update(cut_batches(), LOSS, scale=SCALE, temperature=1.0).skipped


def test_a_full_disk_is_an_os_error(tiny_policy_folder: Path, tmp_path: Path) -> None:
    trained = Trained(tiny_policy_folder, steps=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match="cannot write"):
            trained.store(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / SHARDED_FILE).exists()
