# SPDX-License-Identifier: Apache-2.0
"""SGLang as a rollout engine, with the real SGLang on the CPU: the contract suite, the tokens of
the native engine (V6, V7), each token under its version (V5), and how wrong weights (V1, V4), dead
(V10) and stopped processes (V11) show.

Tests share an engine, and the last ones end it.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from tandem.rollout.sglang import client
from tandem.rollout.sglang.client import SglangProcess
from tandem.rollout.sglang.engine import SglangRolloutEngine, build
from tandem.rollout.sglang.weights import SglangSink
from tandem.testing.contracts.rollout import EngineBench, check_engine
from tandem.types import GenerationRequest, SamplingParams
from tests.engines.groups import ends, processes_of_group
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


def test_v1_sglang_keeps_the_promises_of_rollout_engines(tmp_path: Path) -> None:
    def start(spec: EngineSpec) -> SglangRolloutEngine:
        kwargs = CONFIG.engine_kwargs
        return build(replace(spec, config=spec.config.model_copy(update={"engine_kwargs": kwargs})))

    assert check_engine(start, tmp_path) == []


def test_v6_its_tokens_are_those_of_the_native_engine(
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


def test_v5_each_token_has_the_log_prob_of_its_version(
    spec: EngineSpec, engine: SglangRolloutEngine
) -> None:
    """The weights change twice within sequences, whose keys and values are computed anew. New
    samples of the same prompt get the new weights alone.
    """
    rollout = FedRollout(engine, WeightFeed(spec.model, engine.sink()))
    long = SamplingParams(1.0, 1.0, -1, max_new_tokens=60, ignore_eos=True)
    prompt = tuple(range(4, 64))
    bench = EngineBench(engine, rollout, spec.model, version=40)
    rollout.set_weights_version(40)
    old = GenerationRequest((4000, 4001), prompt, long)
    rollout.add([old])
    weights = {40: bench.weights()}
    for _ in range(2):
        assert rollout.advance(10) == []
        bench.use_new_weights(seed=bench.version)
        weights[bench.version] = bench.weights()
    new = GenerationRequest((5000, 5001), prompt, long)
    rollout.add([new])
    found = bench.drain([old, new])
    for sample_id in new.sample_ids:
        assert found[sample_id].version_runs == ((42, 60),)
    for request in (old, new):
        for one in (found[i] for i in request.sample_ids):
            assert [version for version, _ in one.version_runs] in ([40, 41, 42], [42])
            start = 0
            for version, length in one.version_runs:
                for weight, values in zip(
                    spec.model.module.parameters(), weights[version], strict=True
                ):
                    weight.copy_(values)
                expected = bench.log_probs(request, one)[start : start + length].tolist()
                assert list(one.log_probs[start : start + length]) == pytest.approx(
                    expected, abs=1e-4
                )
                start += length


def test_v1_the_canary_finds_each_tensor_that_is_a_tenth_off(
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


def test_v1_a_parameter_that_is_not_written_whole_is_named(
    spec: EngineSpec, engine: SglangRolloutEngine
) -> None:
    """Each tensor of a layer and outside of layers is left out once. The sink does not expect it
    either, which would refuse the version (``test_weights``).
    """
    names = [name for name, _ in checkpoint_views(spec.model)]
    for left_out in (name for name in names if ".layers.0." not in name):
        sink = SglangSink(
            engine._process,
            [one for one in engine.sink().manifest() if one.name != left_out],
            family=spec.model.family,
            memory=engine._memory,
            keeps_cache=False,
            on_end=lambda version: pytest.fail(f"version {version} is not whole"),
        )
        sink.begin(90)
        for name, view in checkpoint_views(spec.model):
            if name != left_out:
                sink.take(name, view)
        fused = re.sub("[qkv]_proj", "qkv_proj", re.sub("(gate|up)_proj", "gate_up_proj", left_out))
        with pytest.raises(EngineFailure, match=f"parameters were not written: {fused}$"):
            sink.end()


@pytest.mark.parametrize(("remedy", "version"), [("salt", 70), ("reset", 72), ("none", 74)])
def test_v4_the_prefix_cache_is_keyed_by_version_and_emptied(
    spec: EngineSpec,
    engine: SglangRolloutEngine,
    monkeypatch: pytest.MonkeyPatch,
    remedy: str,
    version: int,
) -> None:
    """Either is enough. Without both, the canary finds the keys and values of other weights."""
    call = SglangProcess.call

    def mutated(self: SglangProcess, name: str, arguments: Mapping[str, Any]) -> Any:
        changed = dict(arguments)
        if name == "end":
            changed["keeps_cache"] = remedy != "reset"
            changed["version"] = changed["version"] if remedy == "salt" else str(version)
        return call(self, name, changed)

    monkeypatch.setattr(SglangProcess, "call", mutated)
    rollout = FedRollout(engine, WeightFeed(spec.model, engine.sink()))
    change(spec.model, seed=version)
    rollout.set_weights_version(version)
    generate(rollout, requests_of_all_rules()[1:2])
    change(spec.model, seed=version + 1)
    rollout.set_weights_version(version + 1)
    expected = (
        pytest.raises(EngineFailure, match=f"version {version + 1} was not loaded as")
        if remedy == "none"
        else nullcontext()
    )
    with expected:
        generate(rollout, requests_of_all_rules()[1:2])


def test_v10_its_processes_listen_at_loopback_only_and_leave_no_files(
    engine: SglangRolloutEngine,
) -> None:
    mapped = ""
    for pid in processes_of_group(engine._process.pid):
        places = psutil.Process(pid).net_connections("inet")
        listening = {place.laddr.ip for place in places if place.status == psutil.CONN_LISTEN}
        assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        sockets = [str(place.laddr) for place in psutil.Process(pid).net_connections("unix")]
        left = [path for path in sockets if path.startswith("/") and Path(path).exists()]
        assert all(path.startswith(engine._process._folder.name) for path in left), left
        mapped += Path(f"/proc/{pid}/maps").read_text()
    shared = [line for line in mapped.splitlines() if "/dev/shm/" in line]
    assert shared and all(line.endswith(" (deleted)") for line in shared), shared


def test_v11_a_scheduler_that_is_stopped_is_killed_with_its_processes(
    spec: EngineSpec,
    engine: SglangRolloutEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = engine._process.pid
    schedulers = [pid for pid in processes_of_group(group) if pid != group]
    WeightFeed(spec.model, engine.sink()).deliver(91)
    engine.add(requests_of_all_rules()[-1:])
    for pid in schedulers:
        os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(client, "SLOW_S", 1.0)
    engine._process._stall_s, engine._process._longest_s = 3.0, 0.0
    start = time.monotonic()
    with pytest.raises(EngineFailure, match="SGLang made no progress for 3 s and was killed"):
        engine.advance()
    engine.close()
    assert time.monotonic() - start < 10
    assert not Path(engine._process._folder.name).exists()
    (warning,) = caplog.messages
    assert warning == (
        f"SGLang has made no progress for 1 s. After 3 s, its processes (group {group}) are killed"
    )
    assert ends(group)
    with pytest.raises(EngineFailure, match="SGLang has ended"):
        engine.advance()


def test_v10_a_killed_scheduler_is_replaced_and_then_leaves_no_process(spec: EngineSpec) -> None:
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
        assert ends(first)
        engine.add(requests)
        second = _engine_of(engine)._process.pid
        os.kill(second, signal.SIGKILL)  # the parent of the scheduler
        start = time.monotonic()
        with pytest.raises(EngineDied, match="SGLang: process killed by SIGKILL"):
            engine.advance()
        assert time.monotonic() - start < 10
        assert ends(second)
    finally:
        engine.close()


def _kill_scheduler_of(engine: RestartingEngine) -> int:
    """Kill SGLang's scheduler. Return its process group."""
    group = _engine_of(engine)._process.pid
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_of_group(group)}
    (scheduler,) = (pid for pid, title in titles.items() if b"sglang::scheduler" in title)
    os.kill(scheduler, signal.SIGKILL)
    return group


def _engine_of(engine: RestartingEngine) -> SglangRolloutEngine:
    inner = engine._engine
    assert isinstance(inner, SglangRolloutEngine)
    return inner
