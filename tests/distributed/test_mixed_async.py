# SPDX-License-Identifier: Apache-2.0
"""One step off across vendors (A15): pools of doubles compute what pools of the host compute, every
sample is one version old, and the last step launches no generation.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tandem.metrics.trace import TRACE_FILE, read_trace
from tandem.testing.doubles import write_vendor_package
from tests.distributed.fp32_metrics import differences
from tests.fakes.commands import Conditions, run_command
from tests.fakes.tiny_run import Material, metrics_of, read_lines, repeatable, train_arguments

pytestmark = pytest.mark.usefixtures("doubles")

NUM_STEPS = 3
SETTINGS = (
    f"trainer.total_training_steps={NUM_STEPS}",
    "trainer.n_gpus_per_node=2",
    "trainer.device=cpu",
    "trainer.val_before_train=False",
    "trainer.async_pipeline=True",
    "trainer.generate_ahead_steps=1",
    "trainer.deterministic_async=True",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.optim.lr=0.001",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "actor_rollout_ref.actor.fsdp_config.model_dtype=float32",
)
VENDORS = ("pools.actor-train.platform=npu", "pools.generate.platform=musa")
BYPASS = "algorithm.rollout_correction.bypass_mode=True"
Run = Callable[..., Path]


MODES = ((), pytest.param((BYPASS,), marks=pytest.mark.deep))


@pytest.fixture(scope="module")
def finished(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The folder of a run, made when it is first asked for."""
    packages = tmp_path_factory.mktemp("vendors")
    for name in ("npu", "musa"):
        write_vendor_package(packages, name)
    path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])

    @cache
    def run(*arguments: str) -> Path:
        folder = tmp_path_factory.mktemp("run")
        words = train_arguments(material, folder / "run", *SETTINGS, *arguments)
        conditions = Conditions(environment={"PYTHONPATH": path}, forked_workers=True)
        ended = run_command(words, folder=folder, conditions=conditions)
        assert ended.code == 0, ended.stderr
        return folder / "run"

    return run


def test_a15_doubles_of_two_vendors_compute_what_the_host_computes(finished: Run) -> None:
    host, mixed = (repeatable(metrics_of(finished(*words))) for words in ((), VENDORS))
    assert not list(differences(mixed, host))


@pytest.mark.deep
def test_the_bounds_tell_another_learning_rate_and_a_missing_step(finished: Run) -> None:
    host, wrong = (
        repeatable(metrics_of(finished(*words)))
        for words in ((), ("actor_rollout_ref.actor.optim.lr=0.0011",))
    )
    told = " ".join(differences(wrong, host))
    assert "rollout_corr/rollout_is_std" in told and "rollout_corr/kl" in told
    told = " ".join(differences({NUM_STEPS: host[NUM_STEPS - 1]}, {NUM_STEPS: host[NUM_STEPS]}))
    assert "rollout_corr/rollout_is_std" in told and "actor/pg_loss" in told


@pytest.mark.parametrize("mode", MODES, ids=["decoupled", "bypass"])
def test_a15_every_sample_is_one_version_old(finished: Run, mode: tuple[str, ...]) -> None:
    run = finished(*VENDORS, *mode)
    tags = {(r["step"], r["weights_version"]) for r in read_lines(run / "rollouts.jsonl")}
    # Step s trains the weights of version s - 1; before the first there is nothing to be ahead of.
    assert tags == {(1, 0)} | {(step, step - 2) for step in range(2, NUM_STEPS + 1)}
    assert all(not r["switches"] for r in read_lines(run / "rollouts.jsonl"))


@pytest.mark.parametrize("mode", MODES, ids=["decoupled", "bypass"])
def test_a15_weights_change_between_rounds_and_the_last_step_launches_none(
    finished: Run, mode: tuple[str, ...]
) -> None:
    events = read_trace(finished(*VENDORS, *mode) / TRACE_FILE)
    rounds = [e for e in events if e["ph"] == "X" and e["name"] == "generate"]
    assert {e["args"]["version"] for e in rounds} == set(range(NUM_STEPS - 1))
    changes = {e["args"]["version"]: e["ts"] for e in events if e["name"] == "version in use"}
    for one in rounds:
        version = one["args"]["version"]
        assert one["ts"] >= changes.get(version, 0), "it begins when its weights are in use"
        assert one["ts"] + one["dur"] <= changes[version + 1], "and ends before they are replaced"
