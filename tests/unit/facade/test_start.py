# SPDX-License-Identifier: Apache-2.0
"""The names of the Python API, and what changing a table of tandem does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.algorithms.advantages import ADVANTAGES
from tandem.algorithms.losses import POLICY_LOSSES
from tandem.errors import UserError
from tandem.facade.start import claim_folder, data_keys
from tandem.metrics.sinks import LOGGERS
from tandem.rewards.routing import RULES


def test_every_name_can_be_had_and_others_are_errors() -> None:
    for name in tandem.__all__:
        assert getattr(tandem, name).__name__ == name
    with pytest.raises(AttributeError, match="'tandem' has no attribute 'fit'"):
        _ = tandem.fit  # pyright: ignore


def test_importing_tandem_loads_nothing_heavy() -> None:
    code = "import sys, tandem; print({'torch', 'pydantic', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("table", [ADVANTAGES, POLICY_LOSSES, LOGGERS, RULES])
def test_tables_cannot_be_changed_which_worker_processes_would_not_see(table: Any) -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        table["mine"] = print


def test_runs_that_start_together_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [claim_folder("train", {}, folder=None) for _ in range(3)]
    assert len(set(folders)) == 3 and all(folder.is_dir() for folder in folders)
    assert all(folder.is_absolute() for folder in folders)
    assert claim_folder("train", {}, folder="mine") == tmp_path / "mine"


@pytest.mark.parametrize(
    ("held_out", "given", "frequency"),
    [
        (["v.jsonl"], {}, 1_000_000_000),
        ([], {}, None),
        (["v.jsonl"], {"trainer.test_freq": -1}, None),
        (["v.jsonl"], {"trainer.val_only": True}, None),
    ],
)
def test_rows_to_validate_on_are_used_after_the_last_step(
    held_out: list[str], given: dict[str, Any], frequency: int | None
) -> None:
    keys = data_keys(["t.jsonl"], held_out, given=given)
    assert keys["data.val_files"] == held_out
    assert keys.get("trainer.test_freq") == frequency


@pytest.mark.parametrize("train", [tandem.train, tandem.sft])
def test_a_file_is_no_folder_and_a_model_has_a_name(train: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "2?"}]
    with pytest.raises(UserError, match=f"folder='{__file__}': cannot be written"):
        train(model="m", data=rows, folder=__file__)
    with pytest.raises(UserError, match="model=None: is neither a path nor a name"):
        train(model=None, data=rows, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for folder in (5, b"run"):
        with pytest.raises(UserError, match="folder=.*: is not a path"):
            train(model="m", data=rows, folder=folder)
