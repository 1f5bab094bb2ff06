# SPDX-License-Identifier: Apache-2.0
"""Weights that a resumed run reads again, and that have changed in the meantime."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.checkpoint.store import Checkpoint
from tandem.config.schema.run import RunConfig
from tandem.driver.origins import Digests, origins_of, require_same_origins, write_origins
from tandem.errors import UserError
from tandem.models.folder import AdapterStart, ModelFolder

KEY = "actor_rollout_ref.model.path"
WITH_REFERENCE = {"actor_rollout_ref": {"actor": {"use_kl_loss": True}}}


def folder_of(path: Path, weights: bytes = b"weights") -> Path:
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(weights)
    return path


def model_in(path: Path) -> ModelFolder:
    return ModelFolder(path, {}, None, trust_remote_code=False)


def begun(run: Path, found: Digests) -> Checkpoint:
    """The checkpoint of a run that began with these weights."""
    run.mkdir()
    write_origins(found, run)
    return Checkpoint(run / "global_step_4", step=4)


def test_only_what_is_read_is_compared(tmp_path: Path) -> None:
    model = model_in(folder_of(tmp_path / "model"))
    assert origins_of(RunConfig(), model) == {}
    assert list(origins_of(RunConfig.model_validate(WITH_REFERENCE), model)) == [KEY]
    judge = {"enable": True, "model": {"path": str(folder_of(tmp_path / "judge"))}}
    config = RunConfig.model_validate(WITH_REFERENCE | {"reward_model": judge})
    assert list(origins_of(config, model)) == [KEY, "reward_model.model.path"]
    start = AdapterStart(folder_of(tmp_path / "adapter"), 0, key="the.adapter")
    assert list(origins_of(config, replace(model, start=start)))[:1] == ["the.adapter"]
    drawn = replace(model, start=AdapterStart(None, 0, key="the.rank"))
    assert KEY not in origins_of(config, drawn)  # the base of adapters is compared elsewhere


def test_a_reference_that_changed_is_refused_unless_the_checkpoint_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = RunConfig.model_validate(WITH_REFERENCE)
    model = model_in(folder_of(tmp_path / "model"))
    checkpoint = begun(tmp_path / "run", origins_of(config, model))
    require_same_origins(origins_of(config, model), checkpoint, is_wanted=False)
    folder_of(model.path, b"changed")
    found = origins_of(config, model)
    with pytest.raises(UserError) as caught:
        require_same_origins(found, checkpoint, is_wanted=False)
    assert str(caught.value).startswith(
        f"{KEY}: model.safetensors in its folder has changed since the run of {checkpoint.folder}"
    )
    with caplog.at_level(logging.WARNING):
        require_same_origins(found, checkpoint, is_wanted=True)
    assert "model.safetensors" in caplog.text


def test_files_that_are_not_here_are_not_compared_and_not_forgotten(tmp_path: Path) -> None:
    config = RunConfig.model_validate(WITH_REFERENCE)
    model = model_in(folder_of(tmp_path / "model"))
    checkpoint = begun(tmp_path / "run", origins_of(config, model))
    (model.path / "model.safetensors").unlink()
    found = origins_of(config, model)
    require_same_origins(found, checkpoint, is_wanted=False)
    write_origins(found, tmp_path / "run")
    folder_of(model.path, b"changed")
    with pytest.raises(UserError):
        require_same_origins(origins_of(config, model), checkpoint, is_wanted=False)


def test_a_run_without_digests_goes_on(tmp_path: Path) -> None:
    config = RunConfig.model_validate(WITH_REFERENCE)
    found = origins_of(config, model_in(folder_of(tmp_path / "model")))
    checkpoint = begun(tmp_path / "run", {})
    assert not (tmp_path / "run/origins.json").exists()
    require_same_origins(found, checkpoint, is_wanted=False)
    (tmp_path / "run/origins.json").write_text("{damaged")
    require_same_origins(found, checkpoint, is_wanted=False)
