# SPDX-License-Identifier: Apache-2.0
"""Attached servers, with doubles of them: tokens of the native engine, lost and new servers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.api import EngineFailure
from tandem.config.schema.rollout import EngineKwargs, RolloutConfig
from tandem.models.folder import open_model
from tandem.platforms.record import CPU
from tandem.rollout.attached import engine as engine_module
from tandem.rollout.attached import fleet as fleet_module
from tandem.rollout.attached.engine import AttachedRolloutEngine, build
from tandem.rollout.canary import NUM_TOKENS
from tandem.rollout.factory import EngineSpec, build_dense
from tandem.rollout.feed import FedRollout, WeightFeed
from tandem.types import Completion, GenerationRequest, SamplingParams
from tests.fakes.generation import change, generate
from tests.fakes.patience import PATIENCE_S
from tests.fakes.vllm_server import VllmServerDouble

EOS = (0, 1)
RULES = (
    SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=12),
    SamplingParams(temperature=0.7, top_p=0.8, top_k=20, max_new_tokens=12),
    SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=12, ignore_eos=True),
)
REQUESTS = [
    GenerationRequest((3 * i, 3 * i + 1, 3 * i + 2), tuple(range(5 + i, 12 + 2 * i)), rule)
    for i, rule in enumerate(RULES * 2)
]
LONG = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=60, ignore_eos=True)
Starts = Callable[..., VllmServerDouble]


@pytest.fixture
def start(folder: Path) -> Iterator[Starts]:
    """Starts servers, which end with the test."""
    started: list[VllmServerDouble] = []

    def start(**settings: Any) -> VllmServerDouble:
        started.append(VllmServerDouble(folder, **settings))
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.fixture(autouse=True)
def is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that do not take part are asked at every opportunity."""
    monkeypatch.setattr(fleet_module, "RETRY_S", 0.0)
    monkeypatch.setattr(fleet_module, "AGAIN_S", PATIENCE_S)


def _spec(folder: Path, urls: Any, **keys: Any) -> EngineSpec:
    model = open_model(str(folder), dtype=torch.float32, device="cpu")
    model.module.requires_grad_(False)
    kwargs = EngineKwargs(vllm={"urls": urls})
    config = RolloutConfig(
        name="vllm", max_num_seqs=4, max_num_batched_tokens=64, seed=3, engine_kwargs=kwargs, **keys
    )
    return EngineSpec(model, folder, config, EOS, CPU, max_length=100)


def _attach(spec: EngineSpec) -> tuple[AttachedRolloutEngine, FedRollout]:
    engine = build(spec)
    rollout = FedRollout(engine, WeightFeed(spec.model, engine.sink()))
    rollout.set_weights_version(0)
    return engine, rollout


def _native(spec: EngineSpec, requests: list[GenerationRequest]) -> dict[int, list[int]]:
    native = build_dense(spec)
    native.set_weights_version(0)
    return _tokens(generate(native, requests))


def _tokens(found: dict[int, Completion]) -> dict[int, list[int]]:
    return {sample_id: list(one.token_ids) for sample_id, one in found.items()}


def test_two_servers_draw_the_tokens_of_the_native_engine(folder: Path, start: Starts) -> None:
    servers = [start(), start()]
    spec = _spec(folder, [server.url for server in servers])
    engine, rollout = _attach(spec)
    native = build_dense(spec)
    for version in range(3):
        if version:
            change(spec.model, seed=version)
        rollout.set_weights_version(version)
        native.set_weights_version(version)
        found, expected = generate(rollout, REQUESTS), generate(native, REQUESTS)
        assert _tokens(found) == _tokens(expected)
        for sample_id, one in expected.items():
            assert list(found[sample_id].log_probs) == pytest.approx(list(one.log_probs), abs=1e-4)
            assert found[sample_id].weights_version == version
            assert found[sample_id].finish_reason is one.finish_reason
    assert all(len(set(server.salts)) == 3 for server in servers), "caches are keyed by version"
    assert engine.metrics()["num_decoded_tokens"] > 0
    engine.close()


def test_samples_of_a_server_that_dies_run_again_on_the_other(
    folder: Path, start: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = start(step_s=0.01), start(step_s=0.01)
    spec = _spec(folder, [first.url, second.url])
    expected = _native(spec, REQUESTS)
    engine, rollout = _attach(spec)
    rollout.add(REQUESTS)
    found = {one.sample_id: one for one in rollout.advance()}
    first.kill()
    while completions := rollout.advance():
        for one in completions:
            assert one.sample_id not in found, "each sample is returned once"
            found[one.sample_id] = one
    assert _tokens(found) == expected
    assert f"The rollout server {first.url} is left out: " in caplog.text
    assert engine.metrics()["num_lost_servers"] == 1
    with caplog.at_level(logging.INFO):
        again = start(port=first.port)
        change(spec.model, seed=1)
        rollout.set_weights_version(1)
    assert f"The rollout server {first.url} takes part; servers: 2" in caplog.text
    assert generate(rollout, REQUESTS).keys() == expected.keys()
    assert again.num_tokens > 0, "it was brought to the version in use"
    engine.close()


def test_a_server_that_is_added_gets_the_version_in_use_first(
    folder: Path, start: Starts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listed = tmp_path / "servers.txt"
    listed.write_text(f"# ours\n{start(step_s=0.005).url}\n")
    spec = _spec(folder, str(listed))
    expected = _native(spec, REQUESTS)
    engine, rollout = _attach(spec)
    rollout.add(REQUESTS)
    found = {one.sample_id: one for one in rollout.advance()}
    late, wrong = start(), ("http://10.0.0.9:80O0", "http://[::1:8000", "http://a..b:8000")
    listed.write_text("\n".join([listed.read_text(), *wrong, late.url]))
    while completions := rollout.advance():
        found |= {one.sample_id: one for one in completions}
    assert _tokens(found) == expected
    assert late.num_tokens > 8, "it generated more than the canary"
    assert set(late.salts) == {engine._fleet.members[0].label}
    for url in wrong:
        assert caplog.text.count(f"The rollout server {url} takes no part: ") == 1
    engine.close()


def test_each_token_has_the_version_that_drew_it(folder: Path, start: Starts) -> None:
    server = start(step_s=0.05)
    spec = _spec(folder, server.url, partial_rollout=True)
    engine, rollout = _attach(spec)
    rollout.add([GenerationRequest((0, 1), (5, 6, 7), LONG)])
    while server.num_tokens < NUM_TOKENS + 4:
        assert rollout.advance(max_steps=5) == []
    server.pause()  # until the update
    change(spec.model, seed=1)
    rollout.set_weights_version(1)
    found = rollout.advance() + rollout.advance()
    assert sorted(one.sample_id for one in found) == [0, 1]
    for one in found:
        assert one.weights_version == 0
        ((index, version),) = one.switches
        assert 0 < index < 60 and version == 1
    engine.close()


def test_the_time_of_a_step_does_not_shrink_with_the_number_of_answers(
    folder: Path, start: Starts
) -> None:
    engine, rollout = _attach(_spec(folder, start(step_s=0.01).url))
    lengths = [replace(LONG, max_new_tokens=2 * n) for n in range(1, 13)]
    rollout.add([GenerationRequest((n,), (5, 6, 7), one) for n, one in enumerate(lengths)])
    num_left = len(lengths)
    while num_left:
        num_left -= len(rollout.advance(max_steps=32))
    assert engine._step_s >= 0.01, "the double sleeps so long behind each token"
    engine.close()


@pytest.mark.parametrize(
    "path", ["/pause", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
)
def test_a_server_that_dies_in_an_update_is_left_out(
    folder: Path, start: Starts, path: str
) -> None:
    first, second = start(), start()
    spec = _spec(folder, [first.url, second.url])
    engine, rollout = _attach(spec)
    first.dies_in = path
    change(spec.model, seed=1)
    rollout.set_weights_version(1)
    found = generate(rollout, REQUESTS)
    assert {one.weights_version for one in found.values()} == {1}
    assert [member.server.url for member in engine._fleet.members] == [second.url]
    engine.close()


def test_a_server_that_comes_back_half_replaced_takes_no_part(
    folder: Path, start: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = start(), start()
    spec = _spec(folder, [first.url, second.url])
    engine, rollout = _attach(spec)
    first.kill()
    for version in (1, 2):
        change(spec.model, seed=version)
        rollout.set_weights_version(version)
        assert len(generate(rollout, REQUESTS[:1])) == 3
        if version == 1:
            start(port=first.port, is_half=True)
    assert [member.server.url for member in engine._fleet.members] == [second.url]
    assert caplog.text.count("its model is half replaced") == 1
    engine.close()


def test_an_update_that_another_run_has_left_is_finished_first(folder: Path, start: Starts) -> None:
    server = start(is_started=True)
    spec = _spec(folder, server.url)
    engine, rollout = _attach(spec)
    for version in (0, 1):
        change(spec.model, seed=version)
        rollout.set_weights_version(version)
        found = generate(rollout, REQUESTS[:1])
        assert {one.weights_version for one in found.values()} == {version}
    assert not server.is_started and engine.metrics()["num_lost_servers"] == 0
    engine.close()


def test_the_last_server_is_named_when_it_ends(folder: Path, start: Starts) -> None:
    server = start(step_s=0.02)
    spec = _spec(folder, server.url)
    engine, rollout = _attach(spec)
    rollout.add(REQUESTS)
    rollout.advance()
    server.kill()
    with pytest.raises(EngineFailure, match=f"no server is left; the last was {server.url}: "):
        for _ in range(100):
            rollout.advance()
    engine.close()


def test_a_silent_server_is_left_out(
    folder: Path, start: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "RETRY_S", 1e6)
    monkeypatch.setattr(fleet_module, "SILENCE_S", 0.2)
    monkeypatch.setattr(fleet_module, "PROBES", (("/health", 3.0),))
    # Five rows of samples take the other one longer than the silence and the probe.
    first, second = start(step_s=0.01), start(step_s=0.15)
    spec = _spec(folder, [first.url, second.url])
    expected = _native(spec, REQUESTS)
    engine, rollout = _attach(spec)
    first.is_deaf = True
    assert _tokens(generate(rollout, REQUESTS)) == expected
    assert [member.server.url for member in engine._fleet.members] == [second.url]
    engine.close()


def test_a_server_that_somebody_else_pauses_is_named_and_goes_on(
    folder: Path,
    start: Starts,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fleet_module, "SILENCE_S", 0.01)
    monkeypatch.setattr(engine_module, "_WAIT_S", 0.02)
    server = start()
    spec = _spec(folder, server.url)
    expected = _native(spec, REQUESTS)
    engine, rollout = _attach(spec)
    rollout.add(REQUESTS)
    found = {one.sample_id: one for one in rollout.advance()}
    server.pause()
    said = f"The rollout server {server.url} was paused from outside of this run: its "
    limit_s = time.monotonic() + PATIENCE_S
    while said not in caplog.text:
        assert time.monotonic() < limit_s, caplog.text
        found |= {one.sample_id: one for one in rollout.advance(1)}
    assert found.keys() < expected.keys(), "it did not go on by itself"
    server.pause(False)
    while completions := rollout.advance():
        found |= {one.sample_id: one for one in completions}
    assert _tokens(found) == expected
    # A sample that ends just after the pause shows that the server goes on: it is named once more.
    assert caplog.text.count(said) in (1, 2) and engine.metrics()["num_lost_servers"] == 0
    engine.close()


def test_the_canary_finds_a_tensor_that_was_not_replaced(folder: Path, start: Starts) -> None:
    server = start(wrong="model.layers.1.mlp.down_proj.weight")
    spec = _spec(folder, server.url)
    engine, rollout = _attach(spec)
    rollout.add(REQUESTS)
    with pytest.raises(EngineFailure, match=f"{server.url}: version 0 was not loaded as"):
        rollout.advance()
    engine.close()


def test_weights_of_another_run_are_noticed(folder: Path, start: Starts) -> None:
    server, own = start(), start()
    spec = _spec(folder, [server.url, own.url])
    engine, rollout = _attach(spec)
    server._label = "tandem-of another run-7"
    expected = _native(spec, REQUESTS)
    assert _tokens(generate(rollout, REQUESTS)) == expected
    assert engine.metrics()["num_lost_servers"] >= 1
    engine.close()
