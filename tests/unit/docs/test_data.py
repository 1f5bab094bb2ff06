# SPDX-License-Identifier: Apache-2.0
"""The converter of docs/data.md writes rows that a run can read and score."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tandem.config.schema.data import DataConfig
from tandem.data.prompts import load_prompts
from tandem.data.tokenizer import load_codec
from tandem.rewards.routing import check_sources
from tests.fakes.tiny_run import Material

PAGE = Path(__file__).parents[3] / "docs/data.md"


def test_the_converter_writes_rows_of_the_schema(material: Material, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    config = DataConfig(train_files=(str(tmp_path / "train.jsonl"),))
    entries = load_prompts(config, load_codec(str(material.policy)))
    assert [entry.ground_truth for entry in entries] == ["5", "8"]
    check_sources({entry.data_source for entry in entries})
