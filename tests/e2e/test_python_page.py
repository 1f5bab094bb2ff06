# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/python.md, as they stand there, in one script of small runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tandem.data.files import read_rows
from tests.fakes.tiny_run import Material

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DATASETS = """
import json

class Rows(list):
    def map(self, function):
        return Rows(row | function(row) for row in self)

def load_dataset(name, subset, split):
    assert (name, subset, split) == ("openai/gsm8k", "main", "train")
    return Rows(json.load(open("rows.json")))
"""
SMALL = """
BOTH = {"data.train_batch_size": 4, "trainer.device": "cpu", "trainer.total_training_steps": 2}
SFT = BOTH
TRAIN = BOTH | {"data.max_response_length": 8, "actor_rollout_ref.rollout.n": 2}
"""


def small(block: str) -> str:
    """Return an example with fewer and shorter responses, except the one with a wrong size."""
    name = "SFT" if "tandem.sft(" in block else "TRAIN"
    wrong = '"data.train_batch_size": 0'
    return block if wrong in block else re.sub(r"keys=(\{.*?\})", rf"keys=\1 | {name}", block)


def test_the_examples_run(material: Material, tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / "docs/python.md").read_text("utf-8"))
    rows = [
        {"question": row["prompt"][0]["content"], "answer": f"#### {index}"}
        for index, row in enumerate(read_rows([str(material.train)]))
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "datasets.py").write_text(DATASETS)
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen/Qwen2.5-0.5B-Instruct").symlink_to(material.policy)
    (tmp_path / "script.py").write_text(SMALL + "\n".join(small(block) for block in blocks))
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "data.train_batch_size 0 must be at least 1" in done.stdout
    assert (tmp_path / "outputs/two/report.html").exists()
    assert (tmp_path / "outputs/two/model_step_2/config.json").exists()
    assert (tmp_path / "outputs/sft/global_step_2").is_dir()


def test_readme_begins_with_the_same_lines() -> None:
    first = BLOCK.findall((ROOT / "docs/python.md").read_text("utf-8"))[0]
    assert first in (ROOT / "README.md").read_text("utf-8")
