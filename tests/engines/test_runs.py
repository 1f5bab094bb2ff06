# SPDX-License-Identifier: Apache-2.0
"""Runs that generate with vLLM: GRPO as with the native engine (V12), experts, and a family that
transformers trains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.quickstart.tokenizer import END_ID, PAD_ID
from tests.engines.bench import MAX_ERROR, write_model
from tests.fakes.commands import Ended, run_command
from tests.fakes.tiny_policy import TINY, write_tiny_policy, write_tiny_tokenizer
from tests.fakes.tiny_run import Material, metrics_of, repeatable, train_arguments

pytest.importorskip("vllm", reason="needs vllm: make test-engines")

MAX_STRAYS = 2 / 16
"""The scores of two of 16 samples. Two devices add up gradients in another order, and AdamW divides
a gradient that is nearly zero by its own size. After the first step, a few weights then differ by
up to twice the learning rate, and a number that falls where two tokens meet draws the other.
"""
SLOWLY = "actor_rollout_ref.actor.optim.lr=1e-4"
"""A rate at which fewer than one of the 192 tokens of a step is expected to be another."""


def _train(material: Material, folder: Path, policy: Path, *keys: str) -> Ended:
    """Run two GRPO steps of two updates each, whose samples the trainer scores itself."""
    arguments = (
        f"actor_rollout_ref.model.path={policy}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.total_training_steps=2",
        *keys,
    )
    return run_command(train_arguments(material, folder / "run", *arguments), folder=folder)


def _name(engine: str) -> str:
    return f"actor_rollout_ref.rollout.name={engine}"


def _write_experts(folder: Path) -> Path:
    vocabulary = write_tiny_tokenizer(folder).get_vocab_size()
    sizes = {"vocab_size": vocabulary, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
    return write_model(folder, "qwen3_moe", **sizes)


def _write_dense(folder: Path) -> Path:
    return write_tiny_policy(folder, size=replace(TINY, hidden=64))


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(_write_dense, id="dense", marks=pytest.mark.deep),
        pytest.param(_write_experts, id="experts"),
    ],
)
def test_v12_a_run_with_vllm_is_that_of_the_native_engine(
    material: Material, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    """The samples of a dense model are also compared in ``test_quickstart`` and, with updates, in
    ``test_killed_workers``.
    """
    policy = write(tmp_path / "policy")
    metrics: dict[str, dict[int, dict[str, float]]] = {}
    for engine in ("native", "vllm"):
        ended = _train(material, tmp_path / engine, policy, _name(engine))
        assert ended.code == 0, ended.stderr
        metrics[engine] = metrics_of(tmp_path / engine / "run")
    for step, row in repeatable(metrics["native"]).items():
        for metric, value in row.items():
            found = metrics["vllm"][step][metric]
            assert found == pytest.approx(value, abs=1e-4), (step, metric)


def test_transformers_trains_a_family_with_which_vllm_generates_on_one_device_and_two(
    material: Material, tmp_path: Path
) -> None:
    """``auto`` chooses vLLM: neither tandem's decoder nor its engine computes Gemma.

    On two devices, each shards the trainer and has an engine. Until the first update the runs are
    the same; then few samples differ.
    """
    policy = tmp_path / "policy"
    vocabulary = write_tiny_tokenizer(policy).get_vocab_size()
    write_model(policy, "gemma", vocab_size=vocabulary, eos_token_id=END_ID, pad_token_id=PAD_ID)
    metrics: dict[int, dict[int, dict[str, float]]] = {}
    for num_devices in (1, 2):
        folder = tmp_path / str(num_devices)
        keys = (_name("auto"), SLOWLY, f"trainer.n_gpus_per_node={num_devices}")
        ended = _train(material, folder, policy, *keys)
        assert ended.code == 0, ended.stderr
        assert "slow" not in ended.stderr, "transformers' generate must not have been chosen"
        found = metrics[num_devices] = metrics_of(folder / "run")
        steps = {step: row for step, row in found.items() if step > 0}
        assert len(steps) == 2
        for row in steps.values():
            assert row["training/rollout_logp_diff_max"] <= MAX_ERROR
            assert row["actor/grad_norm"] > 0
            assert row["rollout/engine/num_prefilled_tokens"] > 0
    for step, row in repeatable(metrics[1]).items():
        found = metrics[2][step]
        if step == 2:
            score = "critic/score/mean"
            assert found[score] == pytest.approx(row[score], abs=MAX_STRAYS)
            continue
        for metric, value in row.items():
            assert found[metric] == pytest.approx(value, rel=1e-4, abs=1e-4), metric
