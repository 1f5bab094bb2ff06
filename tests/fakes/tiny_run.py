# SPDX-License-Identifier: Apache-2.0
"""What a test run needs: a policy, GSM8K-like prompts, demonstrations, and the arguments of a small
run on them (four prompts times four samples of twelve tokens a step).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tandem.quickstart.word_problems import WORD_PROBLEMS, Problem, correct
from tests.fakes.tiny_policy import write_tiny_policy

DATA_SOURCE = "openai/gsm8k"
REWARDS = Path(__file__).parent / "rewards.py"
VARYING = ("timing_", "perf/", "global_seqlen/", "pipeline/", "rollout/engine/")
"""Metrics whose names begin like this differ from run to run, or with the number of devices."""


@dataclass(frozen=True)
class Material:
    """Files of a test run. Do not write into them."""

    policy: Path
    train: Path
    test: Path
    demonstrations: Path
    conversations: Path


def write_material(folder: Path) -> Material:
    """Make everything, in about a second."""
    material = Material(
        policy=write_tiny_policy(folder / "policy"),
        train=folder / "gsm8k/train.parquet",
        test=folder / "gsm8k/test.parquet",
        demonstrations=folder / "demonstrations.parquet",
        conversations=folder / "conversations.parquet",
    )
    write_prompts(material.train, WORD_PROBLEMS.draw(40, seed=3))
    write_prompts(material.test, WORD_PROBLEMS.draw(6, seed=4))
    problems = WORD_PROBLEMS.draw(48, seed=5)
    rows = [{"question": p.question, "answer": correct(p)} for p in problems]
    pq.write_table(pa.Table.from_pylist(rows), material.demonstrations)
    turns = [
        {"messages": [_turn("user", p.question), _turn("assistant", correct(p))]} for p in problems
    ]
    pq.write_table(pa.Table.from_pylist(turns), material.conversations)
    return material


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def prompt_row(problem: Problem, index: int) -> dict[str, Any]:
    """One row in verl's schema."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.result},
        "extra_info": {"split": "train", "index": index},
    }


def write_prompts(path: Path, problems: Sequence[Problem]) -> Path:
    """A parquet file of prompts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [prompt_row(problem, index) for index, problem in enumerate(problems)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def train_arguments(material: Material, run: Path, *overrides: str) -> list[str]:
    """``tandem train`` of four steps into the folder ``run``; ``overrides`` come last and win."""
    return [
        "train",
        f"data.train_files={material.train}",
        f"data.val_files={material.test}",
        "data.train_batch_size=4",
        "data.max_prompt_length=96",
        "data.max_response_length=12",
        f"actor_rollout_ref.model.path={material.policy}",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        f"custom_reward_function.path={REWARDS}",
        "custom_reward_function.name=graded",
        f"trainer.default_local_dir={run}",
        "trainer.total_training_steps=4",
        *overrides,
    ]


def sft_arguments(material: Material, run: Path, *overrides: str) -> list[str]:
    """``tandem sft`` of six steps into the folder ``run``; ``overrides`` come last and win."""
    return [
        "sft",
        f"data.train_files={material.demonstrations}",
        f"data.val_files={material.demonstrations}",
        "data.train_batch_size=8",
        "data.max_length=128",
        f"model.partial_pretrain={material.policy}",
        "optim.lr=0.01",
        f"trainer.default_local_dir={run}",
        "trainer.total_training_steps=6",
        *overrides,
    ]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics_of(run: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of a run by step; each metric of a step must be recorded only once."""
    by_step: dict[int, dict[str, float]] = {}
    for record in read_lines(run / "metrics.jsonl"):
        row = by_step.setdefault(record.pop("step"), {})
        twice = row.keys() & record.keys() - {"training/global_step"}
        assert not twice, f"{twice} stand twice in metrics.jsonl"
        row.update(record)
    return by_step


def repeatable(metrics: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """The metrics that must be the same in every run of the same command."""
    return {
        step: {name: value for name, value in row.items() if not name.startswith(VARYING)}
        for step, row in metrics.items()
    }
