# SPDX-License-Identifier: Apache-2.0
"""V12: the quickstart learns with vLLM, and no token's log-prob leaves the trainer's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.bench import MAX_ERROR
from tests.fakes.commands import run_command
from tests.fakes.tiny_run import metrics_of

pytest.importorskip("vllm", reason="needs vllm: make test-engines")

NUM_STEPS = 140
TIMEOUT_S = 1800
"""Three minutes on an idle machine. A machine that is busy with other jobs took nine."""
MIN_ACCURACY = 0.95


def test_v12_the_quickstart_learns_with_vllm(tmp_path: Path) -> None:
    arguments = (
        "quickstart",
        "--folder",
        str(tmp_path / "quickstart"),
        "actor_rollout_ref.rollout.name=vllm",
        # The trainer scores each batch too, so that the two can be compared.
        "algorithm.rollout_correction.bypass_mode=false",
        f"trainer.test_freq={NUM_STEPS}",
    )
    ended = run_command(arguments, folder=tmp_path, timeout_s=TIMEOUT_S)
    assert ended.code == 0, ended.stderr
    summary = json.loads(ended.stdout.splitlines()[-1])
    assert summary["accuracy_after"] >= MIN_ACCURACY, summary
    metrics = metrics_of(tmp_path / "quickstart/grpo")
    trained = [row for row in metrics.values() if "actor/grad_norm" in row]
    assert len(trained) == NUM_STEPS
    assert max(row["training/rollout_logp_diff_max"] for row in trained) <= MAX_ERROR
