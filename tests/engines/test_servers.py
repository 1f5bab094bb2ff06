# SPDX-License-Identifier: Apache-2.0
"""V15: servers of the real vLLM on the CPU, attached by URL: the tokens of the native engine under
three versions, a server that joins late, and one that is killed.

The tests share two servers, and the last one kills the first.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tandem.rollout.attached import fleet as fleet_module
from tandem.rollout.attached.engine import AttachedRolloutEngine
from tandem.rollout.attached.protocol import LOGPROBS_MODE, PROCESSOR
from tandem.rollout.attached.server import Server, ServerLost
from tandem.rollout.factory import EngineSpec, build_dense, build_engine
from tandem.rollout.feed import FedRollout, WeightFeed
from tandem.types import Completion, GenerationRequest
from tests.engines.bench import MAX_ERROR, open_spec, requests, tokens_of, write_model
from tests.fakes.generation import change, generate
from tests.fakes.patience import PATIENCE_S

pytest.importorskip("vllm", reason="needs vllm: make test-engines")

START_S = 900.0
"""How long a server may take to start on a machine that does other work too."""
ENVIRONMENT: Mapping[str, str] = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
FLAGS = (
    *("--enable-scale-out", "--skip-tokenizer-init", "--no-async-scheduling", "--enforce-eager"),
    *("--load-format", "dummy", "--generation-config", "vllm", "--dtype", "float32"),
    *("--weight-transfer-config", '{"backend": "tandem"}', "--logits-processors", PROCESSOR),
    *("--logprobs-mode", LOGPROBS_MODE, "--max-num-seqs", "9", "--max-model-len", "256"),
    # One process less than on CPUs by default.
    "--distributed-executor-backend",
    "vllm.v1.executor.uniproc_executor.UniProcExecutor",
)


@dataclass(frozen=True)
class Started:
    """A server of vLLM in a process group of its own."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def wait(self) -> None:
        """Wait until it answers."""
        limit = time.monotonic() + START_S
        while time.monotonic() < limit:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                Server(self.url).get("/health")
            except ServerLost:
                time.sleep(0.5)
            else:
                return
        pytest.fail(f"{self.url} did not start: {self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        """Kill all of its processes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)


def _free_port() -> int:
    """Return a free port, of those that the system gives to no outgoing connection."""
    for port in random.sample(range(20_000, 32_000), k=12_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    pytest.fail("no port is free")


def _start(model: Path, log: Path) -> Started:
    port = _free_port()  # none that the system gives to outgoing connections meanwhile
    # The program of "vllm serve", which asks for the metadata of the package vllm, not vllm-cpu.
    program = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    place = ("--model", str(model), "--host", "127.0.0.1", "--port", str(port))
    with log.open("wb") as output:
        process = subprocess.Popen(
            (*program, *place, *FLAGS),
            env=dict(os.environ) | ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Started(process, f"http://127.0.0.1:{port}", log)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen2 tied")


@pytest.fixture(scope="module")
def servers(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Started, Started]]:
    plugins = [point.name for point in entry_points(group="vllm.general_plugins")]
    assert "tandem" in plugins, "tandem was installed before it had the plug-in: pip install -e ."
    folder = tmp_path_factory.mktemp("logs")
    started = tuple(_start(model, folder / f"{number}.log") for number in range(2))
    try:
        for one in started:
            one.wait()
        yield started[0], started[1]
    finally:
        for one in started:
            one.kill()


def _attach(model: Path, listed: Path) -> tuple[EngineSpec, AttachedRolloutEngine, FedRollout]:
    kwargs = {"vllm": {"urls": str(listed)}}
    spec = open_spec(model, name="vllm", partial_rollout=True, engine_kwargs=kwargs)
    engine = build_engine(spec)
    assert isinstance(engine, AttachedRolloutEngine)
    return spec, engine, FedRollout(engine, WeightFeed(spec.model, engine.sink()))


def _is_that_of(native: dict[int, Completion], found: dict[int, Completion]) -> bool:
    for sample_id, one in native.items():
        assert list(found[sample_id].log_probs) == pytest.approx(one.log_probs, abs=MAX_ERROR)
    return tokens_of(found) == tokens_of(native)


def _serving(engine: AttachedRolloutEngine) -> list[str]:
    return [member.server.url for member in engine._fleet.members]


def test_v15_tokens_of_three_versions_with_a_server_that_joins_late(
    model: Path,
    servers: tuple[Started, Started],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = tmp_path / "servers.txt"
    listed.write_text(f"{servers[0].url}\n")
    spec, engine, rollout = _attach(model, listed)
    native = build_dense(spec)
    asked = requests()
    for version in range(3):
        if version:
            change(spec.model, seed=version)
        if version == 2:
            monkeypatch.setattr(fleet_module, "AGAIN_S", PATIENCE_S)
            listed.write_text("".join(f"{one.url}\n" for one in servers))
            engine._fleet._asked_again = float("-inf")  # the ten seconds have passed
        rollout.set_weights_version(version)
        native.set_weights_version(version)
        assert _is_that_of(generate(native, asked), generate(rollout, asked))
    assert _serving(engine) == [one.url for one in servers]
    engine.close()


def test_v15_samples_of_a_killed_server_run_again_on_the_other(
    model: Path,
    servers: tuple[Started, Started],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before it is killed, somebody else pauses it, which is said."""
    monkeypatch.setattr(fleet_module, "SILENCE_S", 0.1)
    listed = tmp_path / "servers.txt"
    listed.write_text("".join(f"{one.url}\n" for one in servers))
    spec, engine, rollout = _attach(model, listed)
    native = build_dense(spec)
    rollout.set_weights_version(0)
    native.set_weights_version(0)
    asked: list[GenerationRequest] = requests()
    rollout.add(asked)
    found = {one.sample_id: one for one in rollout.advance()}
    Server(servers[0].url).post("/pause", query={"mode": "keep"})
    limit_s = time.monotonic() + START_S
    while f"{servers[0].url} was paused from outside of this run" not in caplog.text:
        assert time.monotonic() < limit_s, caplog.text
        found |= {one.sample_id: one for one in rollout.advance(1)}
    servers[0].kill()
    while completions := rollout.advance():
        assert found.keys().isdisjoint(one.sample_id for one in completions)
        found |= {one.sample_id: one for one in completions}
    assert _is_that_of(generate(native, asked), found)
    assert _serving(engine) == [servers[1].url]
    engine.close()
