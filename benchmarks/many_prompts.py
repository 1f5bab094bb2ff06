# SPDX-License-Identifier: Apache-2.0
"""The start, the draws and the state of a run on many prompts.

    python benchmarks/many_prompts.py [--rows 1000000] [--filtered-rows 100000] [--output FILE]

The rows are word problems of 150 characters in one parquet file. ``start`` is all that ``tandem
train`` does before it loads a model's weights, without the imports: it reads, checks and counts the
rows. It is measured with truncation, and with ``data.filter_overlong_prompts`` at the first and at
the second start. Then prompts are drawn in batches of 1,024, half of the first batches are closed,
and a second source continues from the state: ``same_after_resume`` tells whether it draws what the
first one draws. Each case is a process of its own. Prints one JSON object.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
from measure import describe, tell
from processes import children_end, start
from pyarrow import parquet

from tandem.cli.train import parse
from tandem.driver.train import prepare
from tandem.quickstart.model import write_model
from tandem.quickstart.tokenizer import END_ID, PAD_ID, save_tokenizer, train_tokenizer
from tandem.quickstart.word_problems import WORD_PROBLEMS

BATCH_ROWS = 1024
NUM_BATCHES = 8
VOCABULARY = 2048
DIFFERENT_PROBLEMS = 10_000
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0.0\n"


def write_task(folder: Path, *, num_rows: int) -> None:
    """Write a tiny model, a reward and the prompts."""
    problems = WORD_PROBLEMS.draw(DIFFERENT_PROBLEMS, seed=1)
    tokenizer = train_tokenizer([problem.question for problem in problems])
    (folder / "model").mkdir(parents=True)
    save_tokenizer(tokenizer, folder / "model")
    write_model(folder / "model", num_tokens=VOCABULARY, eos_id=END_ID, pad_id=PAD_ID, seed=0)
    (folder / "reward.py").write_text(REWARD)
    rows = [
        {
            "data_source": "many",
            "prompt": [{"role": "user", "content": f"{index}: {problem.question}"}],
            "reward_model": {"style": "rule", "ground_truth": problem.result},
            "extra_info": {"index": index},
        }
        for index in range(num_rows)
        for problem in [problems[index % DIFFERENT_PROBLEMS]]
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")


@contextmanager
def timed(figures: dict[str, Any], name: str) -> Iterator[None]:
    """Add the seconds and the processor seconds of the block to ``figures``."""
    begin_s, begin_cpu_s = time.monotonic(), time.process_time()
    yield
    figures[f"{name}_s"] = round(time.monotonic() - begin_s, 2)
    figures[f"{name}_cpu_s"] = round(time.process_time() - begin_cpu_s, 2)


def measure(folder: Path, keys: Sequence[str]) -> dict[str, Any]:
    """Return the figures of one start in this process."""
    config = parse(
        [
            f"actor_rollout_ref.model.path={folder / 'model'}",
            f"custom_reward_function.path={folder / 'reward.py'}",
            f"data.train_files={folder / 'train.parquet'}",
            "data.val_files=[]",
            f"data.train_batch_size={BATCH_ROWS}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH_ROWS}",
            "data.max_prompt_length=256",
            f"trainer.default_local_dir={folder / 'run'}",
            *keys,
        ]
    )
    figures: dict[str, Any] = {}
    with timed(figures, "start"):
        source = prepare(config).source
    figures["rows"] = len(source)
    figures["start_peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    with timed(figures, "draw_of_8192"):
        drawn = [prompt for _ in range(NUM_BATCHES) for prompt in source.draw(BATCH_ROWS)]
    half = len(drawn) // 2
    source.mark_trained([prompt.uid for prompt in drawn[:half:2]])
    state = source.state()
    figures["state_bytes"] = len(json.dumps(state))
    figures["open_prompts"] = len(state["open"])
    wanted = [*drawn[1:half:2], *drawn[half:], *source.draw(BATCH_ROWS)]
    again = prepare(config).source
    again.restore(json.loads(json.dumps(state)))
    figures["same_after_resume"] = again.draw(len(wanted)) == wanted
    return figures


CASES: Mapping[str, tuple[str, ...]] = {
    "truncation": ("data.truncation=left",),
    "filter_first_start": ("data.filter_overlong_prompts=True",),
    "filter_second_start": ("data.filter_overlong_prompts=True",),
}


def measure_case(case: str, folder: Path) -> dict[str, Any]:
    """Return the figures of a case, measured in a process of its own."""
    environment = {**os.environ, "HF_HOME": str(folder / "hub")}
    words = [sys.executable, __file__, "--case", case, "--folder", str(folder)]
    process = start(words, env=environment, stdout=subprocess.PIPE)
    output, _ = process.communicate()
    if process.returncode != 0:
        sys.exit(f"the case {case} failed")
    return json.loads(output)


@children_end()
def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--filtered-rows", type=int, default=100_000)
    parser.add_argument("--output", type=Path, help="write the JSON object here too")
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.folder, CASES[options.case])))
        return
    cases: dict[str, Any] = {}
    for num_rows, names in (
        (options.rows, list(CASES)[:1]),
        (options.filtered_rows, list(CASES)[1:]),
    ):
        with tempfile.TemporaryDirectory() as folder:
            write_task(Path(folder), num_rows=num_rows)
            cases |= {name: measure_case(name, Path(folder)) for name in names}
    tell({"benchmark": "many_prompts", **describe(), "cases": cases}, options.output)


if __name__ == "__main__":
    main()
