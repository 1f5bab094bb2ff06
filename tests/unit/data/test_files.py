# SPDX-License-Identifier: Apache-2.0
"""Counting and reading of data files, and what a user sees when one is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.data.files import RowFault, RowSource, count_rows, read_rows
from tandem.errors import UserError

Rows = list[dict[str, Any]]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json"])
def test_every_format_gives_the_same_rows(name: str, rows: Rows, write: Callable[..., str]) -> None:
    path = write(rows, name)
    assert count_rows([path]) == 7
    assert read_rows([path]) == rows


def test_files_are_concatenated_in_order(rows: Rows, write: Callable[..., str]) -> None:
    files = [write(rows[:2], "a.jsonl"), write(rows[2:6], "b.parquet"), write(rows[6:], "c.json")]
    assert read_rows(files) == rows
    assert count_rows(files) == len(rows)


def test_json_lines_may_have_the_suffix_json(tmp_path: Path) -> None:
    path = tmp_path / "lines.json"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert read_rows([str(path)]) == [{"a": 1}, {"a": 2}]
    assert count_rows([str(path)]) == 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_byte_order_mark_is_no_content(name: str, rows: Rows, write: Callable[..., str]) -> None:
    path = Path(write(rows, name))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert count_rows([str(path)]) == 7
    assert read_rows([str(path)]) == rows


def test_home_is_expanded(
    rows: Rows, write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(rows)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert count_rows(["~/train.parquet"]) == 7


def test_a_missing_gsm8k_file_names_the_command_that_makes_it() -> None:
    with pytest.raises(UserError) as error:
        count_rows(["/nowhere/gsm8k/train.parquet"])
    assert str(error.value) == (
        "data.train_files='/nowhere/gsm8k/train.parquet': no such file. Create it with: "
        "tandem prepare gsm8k --output /nowhere/gsm8k"
    )


def test_a_missing_file_is_reported_under_its_key() -> None:
    with pytest.raises(UserError, match=r"^data\.val_files='/nowhere/x\.parquet': no such file\. "):
        read_rows(["/nowhere/x.parquet"], key="data.val_files")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("x" * 300, "it cannot be found .File name too long."),
        ("/dev/null", "no such file"),
        ("/dev/null/x.jsonl", "no such file"),
        ("a\0b.jsonl", "no such file"),
        ("~nobody-has-this-name/x.jsonl", "no such file"),
    ],
)
def test_a_name_that_no_file_can_have_is_one_line(name: str, rule: str) -> None:
    for read in (count_rows, read_rows):
        with pytest.raises(UserError, match=rf"^data\.train_files='.*': {rule}\. ") as caught:
            read([name])
        assert "\n" not in str(caught.value)


def test_no_file_at_all_is_an_error() -> None:
    with pytest.raises(UserError, match=r"^data\.train_files=\[\]"):
        count_rows([])


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json"])
def test_an_empty_file_is_an_error(name: str, write: Callable[..., str]) -> None:
    path = write([], name)
    for read in (count_rows, read_rows):
        with pytest.raises(UserError, match="the file has no rows"):
            read([path])


def test_a_file_of_no_bytes_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    path.touch()
    with pytest.raises(UserError, match="not a readable parquet file") as error:
        count_rows([str(path)])
    assert "\n" not in str(error.value)


def test_a_damaged_parquet_file_is_one_line(rows: Rows, write: Callable[..., str]) -> None:
    path = Path(write(rows * 100))
    content = bytearray(path.read_bytes())
    content[4:200] = bytes(196)
    path.write_bytes(content)
    assert count_rows([str(path)]) == 700  # the metadata stand at the end
    with pytest.raises(UserError, match="not a readable parquet file") as error:
        read_rows([str(path)])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("{oops", "not valid JSON"),
        ("[1]", "not a JSON obj"),
        ('{"a": "\x01"}', "not valid JSON"),
        ('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", "not valid JSON"),
    ],
)
def test_a_bad_line_is_named(line: str, rule: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n')
    with pytest.raises(UserError, match=f"line 2 is {rule}"):
        read_rows([str(path)])


def test_a_separator_within_a_text_does_not_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "x\u2028y\x85z"}\n{"a": 1, "a": 2}\n', encoding="utf-8")
    assert read_rows([str(path)]) == [{"a": "x\u2028y\x85z"}, {"a": 2}]


def test_a_fault_names_the_file_and_the_row_within_it(
    rows: Rows, write: Callable[..., str]
) -> None:
    files = [write(rows[:3], "a.jsonl"), write(rows[3:], "b.parquet")]
    source, fault = RowSource(files, "data.train_files"), RowFault("is x", "Mind it.")
    assert str(source.fault(2, fault)) == f"data.train_files='{files[0]}': row 2 is x. Mind it."
    assert str(source.fault(4, fault)) == f"data.train_files='{files[1]}': row 1 is x. Mind it."


def test_the_planner_can_count_without_heavy_imports(rows: Rows, write: Callable[..., str]) -> None:
    code = (
        "import sys; from tandem.data.files import count_rows; "
        f"assert count_rows([{write(rows, 'a.jsonl')!r}]) == 7; "
        "assert not {'torch', 'transformers', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            "question,answer",
            r"the format \.csv is not read\. Convert it to one of",
        ),
        ("a.parquet", '{"prompt": 1}', r"holds JSON, not parquet\. Rename it to a\.jsonl"),
        ("a.parquet", '[{"prompt": 1}]', r"holds JSON, not parquet\. Rename it to a\.json\."),
        ("a.parquet", "version https://git-lfs.github.com/spec/v1", "a pointer of Git LFS"),
        ("a.parquet", "PAR1 and no end", "not a readable parquet file"),
        ("a.jsonl", '[{"prompt": 1},\n{}]', r"line 1 is not valid JSON .*one array \.json"),
        ("a.jsonl", '["prompt"]', r"line 1 is not a JSON object\. Write one object per line"),
    ],
)
def test_a_file_of_another_format_is_named_with_the_way_out(
    name: str, content: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=rf"^data\.train_files='{path}': .*{message}"):
        read_rows([str(path)])


def test_a_folder_names_its_files(rows: Rows, write: Callable[..., str], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=r"is a folder\. Name files\. The formats are parquet"):
        count_rows([str(empty)])
    path = write(rows, "a.parquet")
    with pytest.raises(UserError) as error:
        count_rows([str(tmp_path)])
    assert error.value.remedy == f"Name its files: data.train_files=[{path}]."


def test_a_data_set_of_the_hub_names_the_converter() -> None:
    with pytest.raises(UserError, match=r"no such file\. Data sets of the hub.*prepare"):
        count_rows(["openai/gsm8k"])
