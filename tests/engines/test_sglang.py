# SPDX-License-Identifier: Apache-2.0
"""SGLang as a rollout engine, with the real SGLang on the CPU: the contract suite, the tokens of
the native engine, and how wrong weights, dead and stopped processes show.

Tests share an engine, and the last ones end it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from tandem.api import EngineDied, EngineFailure
from tandem.config.schema.rollout import EngineKwargs, RolloutConfig
from tandem.models.folder import open_model
from tandem.platforms.record import CPU
from tandem.rollout.factory import EngineSpec, build_dense, build_engine
from tandem.rollout.feed import FedRollout, WeightFeed, checkpoint_views
from tandem.rollout.restarts import RestartingEngine
from tandem.rollout.sglang.engine import SglangRolloutEngine, build
from tandem.rollout.sglang.weights import SglangSink
from tandem.testing.contracts.rollout import check_engine
from tests.fakes.generation import change, generate, requests_of_all_rules
from tests.fakes.tiny_qwen2 import write_random_qwen2

PYTHON = os.environ.get("TANDEM_SGLANG_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs sglang: make test-engines")

EOS = (0, 1)
CONFIG = RolloutConfig(
    max_num_seqs=8,
    max_num_batched_tokens=64,
    seed=3,
    engine_kwargs=EngineKwargs(sglang={"python": PYTHON}),
)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    """A model with large random weights, which make stale ones visible; its head is not tied."""
    folder = tmp_path_factory.mktemp("qwen2")
    write_random_qwen2(folder, tied=False)
    model = open_model(str(folder), dtype=torch.float32, device="cpu")
    model.module.requires_grad_(False)
    return EngineSpec(model, folder, CONFIG, EOS, CPU)


@pytest.fixture(scope="module")
def engine(spec: EngineSpec) -> Iterator[SglangRolloutEngine]:
    """An engine without weights."""
    engine = build(spec)
    yield engine
    engine.close()


def _processes_of_group(group: int) -> list[int]:
    """The living processes of a process group."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def _ends(group: int) -> bool:
    """Whether all processes of a group end within ten seconds of a kill."""
    start = time.monotonic()
    while _processes_of_group(group) and time.monotonic() - start < 10:
        time.sleep(0.05)
    return not _processes_of_group(group)


def test_sglang_keeps_the_promises_of_rollout_engines(tmp_path: Path) -> None:
    def start(spec: EngineSpec) -> SglangRolloutEngine:
        kwargs = CONFIG.engine_kwargs
        return build(replace(spec, config=spec.config.model_copy(update={"engine_kwargs": kwargs})))

    assert check_engine(start, tmp_path) == []


def test_its_tokens_are_those_of_the_native_engine(
    spec: EngineSpec, engine: SglangRolloutEngine
) -> None:
    native = build_dense(spec)
    rollout = FedRollout(engine, WeightFeed(spec.model, engine.sink()))
    for version in range(3):
        if version:
            change(spec.model, seed=version)
        rollout.set_weights_version(version)
        native.set_weights_version(version)
        requests = requests_of_all_rules()
        found, expected = generate(rollout, requests), generate(native, requests)
        assert found.keys() == expected.keys()
        for sample_id, one in expected.items():
            assert list(found[sample_id].token_ids) == list(one.token_ids)
            assert list(found[sample_id].log_probs) == pytest.approx(list(one.log_probs), abs=1e-4)


def test_the_canary_finds_each_tensor_that_is_a_tenth_off(
    spec: EngineSpec, engine: SglangRolloutEngine
) -> None:
    change(spec.model, seed=9)  # biases are 0 at first
    engine.add(requests_of_all_rules()[:1])
    names = [name for name, _ in checkpoint_views(spec.model)]
    for version, wrong in enumerate(names, start=10):
        sink = engine.sink()
        sink.begin(version)
        for name, view in checkpoint_views(spec.model):
            sink.take(name, view * 1.1 if name == wrong else view)
        sink.end()
        engine.set_weights_version(version)
        with pytest.raises(EngineFailure, match=f"SGLang: version {version} was not loaded as"):
            engine.advance()


def test_a_parameter_that_is_not_written_whole_is_named(
    spec: EngineSpec, engine: SglangRolloutEngine
) -> None:
    left_out = "model.layers.1.self_attn.k_proj.weight"
    whole = engine.sink()
    manifest = [one for one in whole.manifest() if one.name != left_out]
    sink = SglangSink(
        engine._process,
        manifest,
        memory=engine._memory,
        keeps_cache=False,
        on_end=lambda version: pytest.fail(f"version {version} is not whole"),
    )
    sink.begin(90)
    for name, view in checkpoint_views(spec.model):
        if name != left_out:
            sink.take(name, view)
    written = r"parameters were not written: model.layers.1.self_attn.qkv_proj.weight$"
    with pytest.raises(EngineFailure, match=written):
        sink.end()


def test_its_processes_listen_at_loopback_only(engine: SglangRolloutEngine) -> None:
    for pid in _processes_of_group(engine._process.pid):
        places = psutil.Process(pid).net_connections("inet")
        listening = {place.laddr.ip for place in places if place.status == psutil.CONN_LISTEN}
        assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_a_scheduler_that_is_stopped_is_killed_with_its_processes(
    spec: EngineSpec, engine: SglangRolloutEngine
) -> None:
    group = engine._process.pid
    schedulers = [pid for pid in _processes_of_group(group) if pid != group]
    WeightFeed(spec.model, engine.sink()).deliver(91)
    engine.add(requests_of_all_rules()[-1:])
    for pid in schedulers:
        os.kill(pid, signal.SIGSTOP)
    engine._process._stall_s, engine._process._longest_s = 3.0, 0.0
    start = time.monotonic()
    with pytest.raises(EngineFailure, match="SGLang made no progress for 3 s and was killed"):
        engine.advance()
    engine.close()
    assert time.monotonic() - start < 10
    assert _ends(group)
    with pytest.raises(EngineFailure, match="SGLang has ended"):
        engine.advance()


def test_a_killed_scheduler_is_replaced_and_then_leaves_no_process(spec: EngineSpec) -> None:
    allowed = CONFIG.model_copy(update={"name": "sglang", "max_engine_restarts": 1})
    engine = build_engine(replace(spec, config=allowed))
    assert isinstance(engine, RestartingEngine)
    requests = requests_of_all_rules()
    native = build_dense(spec)
    native.set_weights_version(0)
    expected = generate(native, requests)
    try:
        rollout = FedRollout(engine, WeightFeed(spec.model, engine.sink()))
        rollout.set_weights_version(0)
        first = _kill_scheduler_of(engine)
        found = generate(rollout, requests)
        assert {i: list(one.token_ids) for i, one in found.items()} == {
            i: list(one.token_ids) for i, one in expected.items()
        }
        assert _ends(first)
        engine.add(requests)
        second = _kill_scheduler_of(engine)
        start = time.monotonic()
        with pytest.raises(EngineDied, match="SGLang: process killed by SIGKILL"):
            engine.advance()
        assert time.monotonic() - start < 10
        assert _ends(second)
    finally:
        engine.close()


def _kill_scheduler_of(engine: RestartingEngine) -> int:
    """Kill SGLang's scheduler. Return its process group."""
    inner = engine._engine
    assert isinstance(inner, SglangRolloutEngine)
    group = inner._process.pid
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in _processes_of_group(group)}
    (scheduler,) = (pid for pid, title in titles.items() if b"sglang::scheduler" in title)
    os.kill(scheduler, signal.SIGKILL)
    return group
