# SPDX-License-Identifier: Apache-2.0
"""The workload of fixed lengths for ``cpu_tiny.py``: prompts of 16 digits (a token each), any
reward that varies.
"""

import random
from pathlib import Path

import pyarrow
from pyarrow import parquet

from tandem.quickstart.model import ModelSize, write_model
from tandem.quickstart.tokenizer import END_ID, PAD_ID, save_tokenizer, train_tokenizer
from tandem.quickstart.word_problems import WORD_PROBLEMS, correct

VOCABULARY = 512
SIZE = ModelSize(hidden=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate=256)
REWARD = '''"""Any reward that differs between samples: both systems have the same."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return (len(solution_str) % 7) / 7
'''


def write_task(folder: Path) -> tuple[Path, Path, Path]:
    """Model folder, prompts and reward file."""
    model = folder / "model"
    model.mkdir()
    problems = WORD_PROBLEMS.draw(500, seed=1)
    tokenizer = train_tokenizer(f"{p.question}\n{correct(p)}" for p in problems)
    save_tokenizer(tokenizer, model)
    write_model(model, num_tokens=VOCABULARY, eos_id=END_ID, pad_id=PAD_ID, seed=0, size=SIZE)
    numbers = random.Random(0)
    rows = [
        {
            "data_source": "fixed",
            "prompt": "".join(numbers.choices("0123456789", k=16)),
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index in range(512)
    ]
    prompts, reward = folder / "train.parquet", folder / "reward.py"
    parquet.write_table(pyarrow.Table.from_pylist(rows), prompts)
    reward.write_text(REWARD)
    return model, prompts, reward
