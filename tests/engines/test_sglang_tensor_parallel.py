# SPDX-License-Identifier: Apache-2.0
"""V8 for SGLang: an engine over two devices, whose schedulers are children of one process."""

from __future__ import annotations

import os
import signal
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.api import EngineDied, EngineFailure
from tandem.rollout.factory import build_dense
from tandem.rollout.feed import checkpoint_views
from tandem.rollout.sglang.engine import SglangRolloutEngine, build
from tandem.rollout.sglang.follower import Follower
from tandem.testing.contracts.rollout import EngineBench
from tests.chaos.processes import MARK, none_left
from tests.engines.bench import (
    MAX_ERROR,
    largest_error,
    open_spec,
    requests,
    running,
    tokens_of,
    write_model,
)
from tests.engines.groups import ends, processes_of_group
from tests.engines.parity import check_tensors_that_are_left_out, is_seen
from tests.fakes.commands import Conditions, run_command
from tests.fakes.tiny_policy import TINY, write_tiny_policy
from tests.fakes.tiny_run import Material, metrics_of, repeatable, train_arguments

PYTHON = os.environ.get("TANDEM_SGLANG_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs sglang: make test-engines")

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
KEYS = {
    "name": "sglang",
    "tensor_model_parallel_size": 2,
    "engine_kwargs": {"sglang": {"python": PYTHON}},
}
MAX_LENGTH = 96


def test_v8_an_engine_over_two_devices(tmp_path: Path) -> None:
    """Tokens are those of the native engine, and log-probs those of the trainer under each version.

    A tensor that is left out is named, one that is wrong is seen, one that a scheduler does not get
    is named, and a killed scheduler ends the engine.
    """
    folder = write_model(tmp_path, "qwen2 tied", **SIZES)
    with running(build_dense, open_spec(folder)) as bench:
        expected = tokens_of(bench.generate(requests()))
    spec = replace(open_spec(folder, **KEYS), max_length=MAX_LENGTH)
    with running(build, spec) as bench:
        engine = bench.engine
        assert isinstance(engine, SglangRolloutEngine)
        assert len(_schedulers(engine._process.pid)) == 2
        assert tokens_of(bench.generate(requests())) == expected
        for seed in range(2):
            bench.use_new_weights(seed)
            asked = requests(first_id=1000 * seed + 1000)
            assert largest_error(bench, asked, bench.generate(asked)) <= MAX_ERROR
        check_tensors_that_are_left_out(
            bench, names=["model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
        )
        _check_second_half(bench)
        _check_kill(engine, bench)


def _check_second_half(bench: EngineBench) -> None:
    """What is wrong in the part of the second scheduler is seen, and what it lacks is named."""
    views = dict(checkpoint_views(bench.model))
    for name, dim in (("self_attn.o_proj", 1), ("mlp.up_proj", 0), ("mlp.down_proj", 1)):
        full = f"model.layers.1.{name}.weight"
        first, second = views[full].chunk(2, dim)
        assert is_seen(bench, views | {full: torch.cat((first, -second), dim)}), name
        unwritten = torch.cat((first, torch.full_like(second, float("nan"))), dim)
        with pytest.raises(EngineFailure, match="parameters were not written: model.layers.1"):
            is_seen(bench, views | {full: unwritten})


def _schedulers(group: int) -> list[int]:
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_of_group(group)}
    return [pid for pid, title in titles.items() if b"sglang::scheduler" in title]


def _check_kill(engine: SglangRolloutEngine, bench: EngineBench) -> None:
    """The second scheduler is killed: the engine says so within ten seconds, and all of it ends."""
    bench.use_new_weights(seed=9)
    group = engine._process.pid
    os.kill(max(_schedulers(group)), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(EngineDied, match="SGLang: process killed by SIGKILL"):
        bench.generate(requests(first_id=9000))
    assert time.monotonic() - start < 10
    assert ends(group)


def test_the_other_process_of_an_engine_generates_nothing(tmp_path: Path) -> None:
    spec = replace(open_spec(write_model(tmp_path, "qwen2 tied", **SIZES), **KEYS), rank=1)
    with running(build, spec) as bench:
        assert isinstance(bench.engine, Follower)
        bench.rollout.add(requests())
        assert bench.rollout.advance() == []


@pytest.mark.deep  # what it adds to the engine's test is the driver, which vLLM's runs show
def test_v8_a_run_with_sglang_over_two_devices_is_that_of_the_native_engine(
    material: Material, tmp_path: Path
) -> None:
    policy = write_tiny_policy(tmp_path, size=replace(TINY, hidden=64, num_kv_heads=2))
    rollout = "actor_rollout_ref.rollout"
    over_two = (
        f"{rollout}.tensor_model_parallel_size=2",
        f"{rollout}.engine_kwargs.sglang.python={PYTHON}",
    )
    rows: dict[str, dict[int, dict[str, float]]] = {}
    mark = uuid.uuid4().hex
    for name, keys in (("native", ()), ("sglang", over_two)):
        arguments = train_arguments(
            material,
            tmp_path / name / "run",
            f"actor_rollout_ref.model.path={policy}",
            f"{rollout}.name={name}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "trainer.device=cpu",
            "trainer.n_gpus_per_node=2",
            "trainer.total_training_steps=3",
            *keys,
        )
        conditions = Conditions(environment={MARK: mark})
        ended = run_command(arguments, folder=tmp_path / name, conditions=conditions)
        assert ended.code == 0, ended.stderr
        rows[name] = metrics_of(tmp_path / name / "run")
    for step, row in repeatable(rows["native"]).items():
        for metric, value in row.items():
            found = rows["sglang"][step][metric]
            assert found == pytest.approx(value, rel=1e-4, abs=1e-4), (step, metric)
    for step in (1, 2, 3):
        assert rows["sglang"][step]["training/rollout_logp_diff_max"] <= MAX_ERROR
    assert none_left(mark)
