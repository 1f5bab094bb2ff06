# SPDX-License-Identifier: Apache-2.0
"""V12: the quickstart learns with vLLM and with SGLang, and no token's log-prob leaves the
trainer's. Its first steps are those of the native engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

import tandem.quickstart
from tests.engines.bench import MAX_ERROR
from tests.fakes.commands import run_command
from tests.fakes.tiny_run import metrics_of, read_lines

PYTHON = os.environ.get("TANDEM_SGLANG_PYTHON", "")
ROLLOUT = "actor_rollout_ref.rollout"
KEYS: Mapping[str, tuple[str, ...]] = {
    "vllm": (f"{ROLLOUT}.name=vllm",),
    "sglang": (f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.engine_kwargs.sglang.python={PYTHON}"),
}
NUM_STEPS = 140
NUM_COMPARED = 20
TIMEOUT_S = 7200
"""With vLLM, three minutes on an idle machine; a machine that is busy with other jobs took nine.
SGLang takes several times as long."""
MIN_ACCURACY, MIN_ALIKE = 0.95, 0.95


@pytest.mark.parametrize("engine", ["vllm", pytest.param("sglang", marks=pytest.mark.deep)])
def test_v12_the_quickstart_learns(tmp_path: Path, engine: str) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm", reason="needs vllm: make test-engines")
    elif not PYTHON:
        pytest.skip("needs sglang: make test-engines")
    folder, dumps = tmp_path / "quickstart", tmp_path / "dumps"
    arguments = (
        "quickstart",
        "--folder",
        str(folder),
        *KEYS[engine],
        # The trainer scores each batch too, so that the two can be compared.
        "algorithm.rollout_correction.bypass_mode=false",
        f"trainer.test_freq={NUM_STEPS}",
        f"trainer.rollout_data_dir={dumps}",
    )
    ended = run_command(arguments, folder=tmp_path, timeout_s=TIMEOUT_S)
    assert ended.code == 0, ended.stderr
    summary = json.loads(ended.stdout.splitlines()[-1])
    assert summary["accuracy_after"] >= MIN_ACCURACY, summary
    metrics = metrics_of(folder / "grpo")
    trained = [row for row in metrics.values() if "actor/grad_norm" in row]
    assert len(trained) == NUM_STEPS
    assert max(row["training/rollout_logp_diff_max"] for row in trained) <= MAX_ERROR

    native = [_train_natively(folder, tmp_path / f"native {seed}", seed=seed) for seed in range(2)]
    found, expected = _outputs(dumps), _outputs(tmp_path / "native 0/dumps")
    alike = sum(one == other for one, other in zip(found, expected, strict=True))
    assert alike >= MIN_ALIKE * len(expected)
    curve = [row["critic/score/mean"] for row in trained[:NUM_COMPARED]]
    assert _distance(curve, native[0]) <= _distance(native[0], native[1])


def _train_natively(quickstart: Path, folder: Path, *, seed: int) -> list[float]:
    """Train the warm model of a quickstart with the native engine. Return its mean scores."""
    (model,) = (quickstart / "sft").glob("global_step_*/actor")
    materials = quickstart / "materials"
    arguments = (
        "train",
        str(Path(tandem.quickstart.__file__).parent / "grpo.yaml"),
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={materials / 'train.parquet'}",
        f"data.val_files={materials / 'test.parquet'}",
        "algorithm.rollout_correction.bypass_mode=false",
        *(f"{place}.seed={seed}" for place in ("data", ROLLOUT, "trainer")),
        f"trainer.total_training_steps={NUM_COMPARED}",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        f"trainer.default_local_dir={folder / 'run'}",
        f"trainer.rollout_data_dir={folder / 'dumps'}",
    )
    ended = run_command(arguments, folder=folder, timeout_s=TIMEOUT_S)
    assert ended.code == 0, ended.stderr
    metrics = metrics_of(folder / "run")
    return [metrics[step]["critic/score/mean"] for step in range(1, NUM_COMPARED + 1)]


def _outputs(dumps: Path) -> list[tuple[str, str]]:
    """Return prompt and response of each sample of the first step."""
    return sorted((row["input"], row["output"]) for row in read_lines(dumps / "1.jsonl"))


def _distance(curve: list[float], other: list[float]) -> float:
    """Return the mean distance between two curves."""
    return sum(abs(x - y) for x, y in zip(curve, other, strict=True)) / len(curve)
