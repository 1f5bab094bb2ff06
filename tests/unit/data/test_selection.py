# SPDX-License-Identifier: Apache-2.0
"""Which rows are used and which tokens are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.config.schema.data import DataConfig
from tandem.data.selection import choose_rows, read_used_rows, truncate
from tandem.errors import UserError

TOKENS = np.arange(10)


@pytest.mark.parametrize(
    ("side", "kept"),
    [("left", [5, 6, 7, 8, 9]), ("right", [0, 1, 2, 3, 4]), ("middle", [0, 1, 7, 8, 9])],
)
def test_truncation_keeps_what_verl_keeps(side: str, kept: list[int]) -> None:
    assert truncate(TOKENS, 5, side=side).tolist() == kept
    assert truncate(TOKENS, 10, side=side) is TOKENS
    assert len(truncate(TOKENS, 1, side=side)) == 1


def test_rows_are_all_or_the_first_or_a_random_sample() -> None:
    assert choose_rows(5, -1, shuffle=True, seed=0) == [0, 1, 2, 3, 4]
    assert choose_rows(5, 9, shuffle=True, seed=0) == [0, 1, 2, 3, 4]
    assert choose_rows(5, 3, shuffle=False, seed=0) == [0, 1, 2]
    sample = choose_rows(1000, 10, shuffle=True, seed=0)
    assert sample == sorted(set(sample)) == choose_rows(1000, 10, shuffle=True, seed=0)
    assert len(sample) == 10
    assert sample != choose_rows(1000, 10, shuffle=True, seed=1)


def test_training_and_validation_have_files_and_limits_of_their_own(
    rows: list[dict[str, Any]], write: Callable[..., str]
) -> None:
    config = DataConfig(
        train_files=(write(rows, "a.jsonl"),),
        val_files=(write(rows[:4], "b.jsonl"),),
        shuffle=False,
        train_max_samples=5,
        val_max_samples=2,
    )
    assert list(read_used_rows(config, validation=False).rows) == [0, 1, 2, 3, 4]
    assert list(read_used_rows(config, validation=True).rows) == [0, 1]


def test_only_validation_can_do_without_files() -> None:
    config = DataConfig(train_files=(), val_files=())
    assert read_used_rows(config, validation=True).rows == {}
    with pytest.raises(UserError, match=r"^data\.train_files=\[\]"):
        read_used_rows(config, validation=False)


INDEXED = """
class Rows:
    def __init__(self, data_files, config):
        self.files = data_files

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"prompt": f"{self.files[0]} {index}"}


def nothing(data_files, config):
    return None


class Unsized:
    def __init__(self, data_files, config):
        pass

    def __len__(self):
        return 3
"""


def made_by(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows that a class or function of ``INDEXED`` makes."""
    file = folder / "indexed.py"
    file.write_text(INDEXED)
    keys = {"train_files": ["a"], "custom_cls": {"path": str(file), "name": name}}
    config = DataConfig.model_validate(keys)
    return list(read_used_rows(config, validation=False).rows.values())


def test_a_data_set_may_have_a_length_and_items_as_those_of_torch(tmp_path: Path) -> None:
    assert made_by(tmp_path, "Rows") == [{"prompt": f"a {index}"} for index in range(3)]


@pytest.mark.parametrize("name", ["nothing", "Unsized"])
def test_a_data_set_that_is_none_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=rf"{name} returned \w+, not rows\. Return mappings"):
        made_by(tmp_path, name)
