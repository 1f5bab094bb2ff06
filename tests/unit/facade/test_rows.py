# SPDX-License-Identifier: Apache-2.0
"""Rows in memory as files, and their shares for validation."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tandem.data.files import read_rows
from tandem.errors import UserError
from tandem.facade.rows import write_data
from tests.fakes.seeing_files import png


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


def test_pictures_become_text_that_is_the_same_picture(tmp_path: Path) -> None:
    """Rows of datasets have objects of Pillow, and files of the hub mappings with bytes."""
    image = Image.open(io.BytesIO(png()))
    forms = [image, png(), {"bytes": png(), "path": None}, {"path": "a.png"}, "b.png"]
    row = {"prompt": "<image>", "seen": forms}
    (file,), _ = write_data([row, {"prompt": "?"}], None, folder=tmp_path, image_key="seen")
    (written, plain) = read_rows([file])
    assert "seen" not in plain and written["seen"][3:] == [{"path": "a.png"}, "b.png"]
    texts = [*written["seen"][:2], written["seen"][2]["bytes"]]
    for text in texts:
        data = base64.b64decode(text.removeprefix("data:image;base64,"))
        assert Image.open(io.BytesIO(data)).tobytes() == image.tobytes()
    with pytest.raises(UserError, match="train: row 0 has a picture that has numbers of an unknow"):
        write_data([{"images": [Image.new("F", (9, 9))]}], None, folder=tmp_path)


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
