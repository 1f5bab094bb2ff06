# SPDX-License-Identifier: Apache-2.0
"""Lines that survive a crash and a resume."""

import json
import math
import subprocess
import sys

import pytest

from tandem.errors import UserError
from tandem.metrics.jsonl import (
    BEFORE_FIRST_STEP,
    JsonLinesFile,
    last_step,
    read_records,
    truncate_after,
)


def _write(path, steps, *, keep_through_step=BEFORE_FIRST_STEP):
    file = JsonLinesFile(path, keep_through_step=keep_through_step)
    for step in steps:
        file.append({"step": step, "value": step / 7})
    file.close()


def test_resumed_file_equals_uninterrupted_one(tmp_path):
    _write(tmp_path / "whole.jsonl", range(10))
    _write(tmp_path / "resumed.jsonl", range(8))
    _write(tmp_path / "resumed.jsonl", range(5, 10), keep_through_step=4)

    resumed = (tmp_path / "resumed.jsonl").read_bytes()
    assert resumed == (tmp_path / "whole.jsonl").read_bytes()


def test_an_unfinished_line_is_ignored_and_then_removed(tmp_path):
    path = tmp_path / "m.jsonl"
    _write(path, [0, 1])
    with path.open("ab") as stream:
        stream.write(b'{"step": 2, "val')

    assert [record["step"] for record in read_records(path)] == [0, 1]
    _write(path, [2], keep_through_step=1)
    assert [record["step"] for record in read_records(path)] == [0, 1, 2]


def test_a_new_run_replaces_the_file(tmp_path):
    path = tmp_path / "m.jsonl"
    _write(path, [0, 1, 2])
    _write(path, [0])

    assert [record["step"] for record in read_records(path)] == [0]


def test_removed_records_are_kept_aside_with_all_that_follows_a_damaged_line(tmp_path):
    path, aside = tmp_path / "m.jsonl", tmp_path / "before" / "m.jsonl"
    _write(path, [0, 1, 2, 1, 3])
    truncate_after(path, 3, aside=aside)
    assert not aside.parent.exists()

    truncate_after(path, 1, aside=aside)
    assert [record["step"] for record in read_records(path)] == [0, 1, 1]
    assert [record["step"] for record in read_records(aside)] == [2, 3]

    kept = path.read_text()
    path.write_text(kept + 'damaged\n{"step": 2}\n')
    truncate_after(path, 1, aside=aside)
    assert (path.read_text(), aside.read_text()) == (kept, 'damaged\n{"step": 2}\n')


@pytest.mark.parametrize("step", ['"2"', "null", "[]"])
def test_a_record_without_a_number_of_its_step_is_kept(step, tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"step": 1}}\n{{"step": {step}}}\n{{"step": 2}}\n')
    truncate_after(path, 1)
    assert path.read_text() == f'{{"step": 1}}\n{{"step": {step}}}\n'


def test_nothing_to_truncate(tmp_path):
    truncate_after(tmp_path / "none.jsonl", 3)

    assert read_records(tmp_path / "none.jsonl") == []


def test_last_step_is_that_of_the_last_whole_line(tmp_path):
    path = tmp_path / "m.jsonl"
    assert last_step(path) == BEFORE_FIRST_STEP
    path.write_text('{"step": 0}\n{"step": 4}\n{"step": 5')
    assert last_step(path) == 4


def test_lines_are_strict_json(tmp_path):
    path = tmp_path / "m.jsonl"
    file = JsonLinesFile(path, keep_through_step=BEFORE_FIRST_STEP)
    file.append({"step": 1, "nan": math.nan, "list": [math.inf, 1.5], "text": "\ud800 \u2028 \n"})
    file.close()

    line = path.read_bytes()
    assert line.count(b"\n") == 1
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1,
        "nan": None,
        "list": [None, 1.5],
        "text": "\ud800 \u2028 \n",
    }


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\noops\n{"step": 2}\n')

    with pytest.raises(UserError, match="line 2 is not a JSON object"):
        read_records(path)


def test_a_killed_process_loses_nothing_it_appended(tmp_path):
    path = tmp_path / "m.jsonl"
    program = (
        "import os, pathlib, signal\n"
        "from tandem.metrics.jsonl import JsonLinesFile\n"
        f"file = JsonLinesFile(pathlib.Path({str(path)!r}), keep_through_step=-1)\n"
        "file.append({'step': 0})\n"
        "file.append({'step': 1})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program], check=False)

    assert killed.returncode < 0
    assert [record["step"] for record in read_records(path)] == [0, 1]


def test_a_full_disk_leaves_whole_lines(tmp_path):
    path = tmp_path / "m.jsonl"
    program = (
        "import pathlib, resource\n"
        "from tandem.metrics.jsonl import JsonLinesFile\n"
        f"file = JsonLinesFile(pathlib.Path({str(path)!r}), keep_through_step=-1)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))\n"
        "file.append({'step': 0, 'text': 'x' * 10})\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        file.append({'step': 1, 'text': 'x' * 10})\n"
        "    except OSError:\n"
        "        print('full')\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True)

    assert done.stdout == "full\nfull\n"
    assert path.read_bytes() == b'{"step": 0, "text": "xxxxxxxxxx"}\n'


def test_a_late_record_of_an_earlier_step_is_kept(tmp_path):
    path = tmp_path / "m.jsonl"
    _write(path, [3, 4, 5, 3, 6, 4, 5])
    _write(path, [5], keep_through_step=4)

    assert [record["step"] for record in read_records(path)] == [3, 4, 3, 4, 5]
