# SPDX-License-Identifier: Apache-2.0
"""The GSM8K preprocessing script: verl's schema, options and one-line errors."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyarrow import parquet

SCRIPT = Path(__file__).parents[3] / "examples" / "data_preprocess" / "gsm8k.py"
TRAIN = [
    {
        "question": "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of "
        "babysitting. How much did she earn?",
        "answer": "Weng earns 12/60 = $<<12/60=0.2>>0.2 per minute.\n"
        "Working 50 minutes, she earned 0.2 x 50 = $<<0.2*50=10>>10.\n#### 10",
    },
    {
        "question": "How many people live there?",
        "answer": "500*20=<<500*20=10000>>10000\n#### 10,000",
    },
]
TEST = [
    {
        "question": "A robe takes 2 bolts of blue fiber and half that much white fiber.  "
        "How many bolts in total does it take?",
        "answer": "It takes 2/2=<<2/2=1>>1 bolt of white fiber\n#### 3",
    }
]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gsm8k_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with both splits."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name, rows in (("train", TRAIN), ("test", TEST)):
        lines = "\n".join(json.dumps(row) for row in rows)
        (folder / f"{name}.jsonl").write_text(lines + "\n")
    return folder


@dataclass(frozen=True)
class Outcome:
    code: int
    output: str
    error: str


@pytest.fixture
def run(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Runs the script with options."""

    def run_script(*options: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["gsm8k.py", *map(str, options)])
        code = script.main()
        return Outcome(code, *capsys.readouterr())

    return run_script


def read(path: Path) -> list[dict[str, Any]]:
    return parquet.read_table(path).to_pylist()


@pytest.mark.parametrize("option", ["--local_dir", "--local_save_dir"])
def test_rows_have_verls_schema(
    option: str, run: Callable[..., Outcome], source: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "deep" / "gsm8k"
    assert run(option, folder, "--source", source).code == 0
    first, second = read(folder / "train.parquet")
    assert first == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": TRAIN[0]["question"]
                + ' Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "10"},
        "extra_info": {"split": "train", "index": 0, **TRAIN[0]},
    }
    assert second["reward_model"]["ground_truth"] == "10000"
    assert second["extra_info"]["index"] == 1
    (only,) = read(folder / "test.parquet")
    assert (only["extra_info"]["split"], only["reward_model"]["ground_truth"]) == ("test", "3")
    assert sorted(path.name for path in folder.iterdir()) == ["test.parquet", "train.parquet"]


def test_the_default_folder_and_the_note_on_hdfs(
    run: Callable[..., Outcome],
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    outcome = run("--source", source, "--hdfs_dir", "hdfs://x")
    assert outcome.code == 0
    assert len(read(tmp_path / "data" / "gsm8k" / "train.parquet")) == 2
    assert "train.parquet: 2 rows" in outcome.output
    assert "Nothing was copied to HDFS" in outcome.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("test.jsonl", None), "must hold test.jsonl"),
        (("train.jsonl", "{oops"), "line 1 is not valid JSON"),
        (("train.jsonl", '{"question": "?"}'), "train row 0 lacks question or answer"),
        (("test.jsonl", '{"question": "?", "answer": "no number"}'), "has no '#### <number>'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    change: tuple[str, str | None],
    message: str,
    run: Callable[..., Outcome],
    source: Path,
    tmp_path: Path,
) -> None:
    name, content = change
    if content is None:
        (source / name).unlink()
    else:
        (source / name).write_text(content)
    outcome = run("--local_dir", tmp_path / "out", "--source", source)
    assert outcome.code == 2
    assert outcome.error.startswith("error: ")
    assert outcome.error.count("\n") == 1
    assert message in outcome.error
    assert not (tmp_path / "out").exists()


def test_without_the_datasets_package_the_remedy_is_named(
    run: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    outcome = run("--local_dir", tmp_path)
    assert outcome.code == 2
    assert "pip install datasets" in outcome.error
    assert "--source" in outcome.error
