# SPDX-License-Identifier: Apache-2.0
"""Rows in memory as files, and their shares for validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.data.files import read_rows
from tandem.errors import UserError
from tandem.facade.rows import write_data


def rows(number: int) -> list[dict[str, Any]]:
    """Return rows with short columns, one of them with values of NumPy."""
    return [
        {"prompt": f"{n}?", "ground_truth": np.int64(n), "level": np.array([n])}
        for n in range(number)
    ]


def test_a_share_is_drawn_alike_every_time_and_kept_apart(tmp_path: Path) -> None:
    first = write_data(rows(10), 0.2, folder=tmp_path)
    assert write_data(iter(rows(10)), 0.2, folder=tmp_path) == first
    train, validation = (read_rows(files) for files in first)
    assert len(train) == 8 and len(validation) == 2
    assert {row["prompt"] for row in train + validation} == {f"{n}?" for n in range(10)}
    assert all(row["level"] == [row["ground_truth"]] for row in train)


def test_other_rows_are_another_file_and_paths_stay_as_they_are(tmp_path: Path) -> None:
    (one,), none = write_data(rows(3), None, folder=tmp_path)
    (other,), _ = write_data(rows(4), None, folder=tmp_path)
    assert one != other and none == []
    assert write_data(Path(one), [one, other], folder=tmp_path) == (
        [one],
        [one, other],
    )
    held_out = write_data([one, other], 0.5, folder=tmp_path)
    assert [len(read_rows(files)) for files in held_out] == [3, 4]


@pytest.mark.parametrize(
    ("data", "share", "message"),
    [
        ({"train": rows(1), "test": rows(1)}, None, "train: dict holds no rows"),
        (["a row", {}], None, "train: row 0 is str, not a mapping"),
        ([], None, "train"),
        (rows(4), 1, "validation=1: a share must be"),
        ([{"prompt": object()}], None, "row 0 holds a value that JSON cannot hold"),
    ],
)
def test_what_is_not_rows_is_named(
    data: Any, share: float | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        write_data(data, share, folder=tmp_path)
