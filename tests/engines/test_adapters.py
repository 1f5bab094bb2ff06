# SPDX-License-Identifier: Apache-2.0
"""Runs with adapters (LoRA) whose engine gets the sums of weights and adapters: they are those of
the native engine, which adds the products of the adapters.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from os import environ
from pathlib import Path

import pytest

from tests.engines.bench import MAX_ERROR
from tests.fakes.commands import run_command
from tests.fakes.tiny_policy import TINY, write_tiny_policy
from tests.fakes.tiny_run import Material, metrics_of, repeatable, train_arguments

PYTHON = environ.get("TANDEM_SGLANG_PYTHON", "")
ROLLOUT = "actor_rollout_ref.rollout"
KEYS = (
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "trainer.device=cpu",
    "trainer.total_training_steps=3",
)
ENGINES = {
    "native": (),
    "vllm": (),
    "sglang": (f"{ROLLOUT}.engine_kwargs.sglang.python={PYTHON}",),
}


def _run(material: Material, folder: Path, policy: Path, *, name: str) -> Path:
    arguments = train_arguments(
        material,
        folder / name / "run",
        f"actor_rollout_ref.model.path={policy}",
        f"{ROLLOUT}.name={name}",
        *KEYS,
        *ENGINES[name],
    )
    ended = run_command(arguments, folder=folder / name)
    assert ended.code == 0, ended.stderr
    return folder / name / "run"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "vllm",
            marks=pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm"),
        ),
        pytest.param(
            "sglang",
            marks=[
                pytest.mark.skipif(not PYTHON, reason="needs sglang: make test-engines"),
                pytest.mark.deep,
            ],
        ),
    ],
)
def test_a_run_with_adapters_is_that_of_the_native_engine(
    material: Material, tmp_path: Path, name: str
) -> None:
    """The adapters matter: the log-probs of the base would differ by more from the second step."""
    policy = write_tiny_policy(tmp_path / "policy", size=replace(TINY, hidden=64))
    expected = metrics_of(_run(material, tmp_path, policy, name="native"))
    found = metrics_of(_run(material, tmp_path, policy, name=name))
    for step, row in repeatable(expected).items():
        for metric, value in row.items():
            assert found[step][metric] == pytest.approx(value, rel=1e-4, abs=1e-4), (step, metric)
    for step in (1, 2, 3):
        assert found[step]["training/rollout_logp_diff_max"] <= MAX_ERROR
        assert found[step]["actor/grad_norm"] > 0
