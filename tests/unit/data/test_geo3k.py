# SPDX-License-Identifier: Apache-2.0
"""Geometry3K's files become rows that a model that sees reads and its rule scores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.cli.prepare import run
from tandem.data.files import read_rows, write_parquet
from tandem.data.geo3k import DATA_SOURCE, geo3k_rows
from tandem.errors import UserError
from tandem.rewards.routing import find_rule
from tests.fakes.seeing_files import png


def write_copy(folder: Path, **changes: object) -> Path:
    """Write a copy of the data set, as the hub has it."""
    example = {
        "images": [{"bytes": png(), "path": None}],
        "problem": "<image>Find x.",
        "answer": "3",
    }
    for split in ("train", "test"):
        path = folder / "data" / f"{split}-00000-of-00001.parquet"
        write_parquet([{**example, **changes}] * 2, path, key="test")
    return folder


def test_a_copy_becomes_rows_of_verls_schema(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    copy = write_copy(tmp_path / "copy")
    words = ["geo3k", "--local_save_dir", str(tmp_path / "out"), "--local_dataset_path", str(copy)]
    assert run(words) == 0
    assert "train.parquet: 2 rows" in capsys.readouterr().out
    row = read_rows([str(tmp_path / "out" / "train.parquet")])[1]
    (message,) = row["prompt"]
    assert message["content"].startswith("<image>Find x. You FIRST think about the reasoning")
    assert message["content"].endswith(r"The final answer MUST BE put in \boxed{}.")
    assert row["images"] == [{"bytes": png()}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "3"}
    assert row["extra_info"] == {
        "split": "train",
        "index": 1,
        "answer": "3",
        "question": "<image>Find x.",
    }
    rule = find_rule(row["data_source"])
    assert rule is not None
    said = {
        r"<think>so</think> \boxed{3}": 1.0,
        r"\boxed{3}": 0.9,
        r"<think></think>\boxed{4}": 0.1,
    }
    for text, score in said.items():
        found = rule(data_source=DATA_SOURCE, solution_str=text, ground_truth="3", extra_info={})
        assert found["score"] == pytest.approx(score)


def test_another_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must hold data/train-00000-of-00001.parquet"):
        geo3k_rows(str(tmp_path), "train")
    with pytest.raises(UserError, match="test row 0 has a picture that is int"):
        geo3k_rows(str(write_copy(tmp_path / "wrong", images=[3])), "test")
    other = tmp_path / "other" / "data" / "train-0.parquet"
    write_parquet([{"problem": "?", "answer": "3"}], other, key="test")
    with pytest.raises(UserError, match="train row 0 lacks one of problem, answer, images"):
        geo3k_rows(str(tmp_path / "other"), "train")
