# SPDX-License-Identifier: Apache-2.0
"""V2: twenty versions that come from another process over the weight link, to vLLM and to SGLang.
Each is the trainer's, under all names of its checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tandem.comm.store import connect_store
from tandem.models.language_model import NativeModel
from tandem.rollout.factory import build_engine
from tandem.testing.contracts.rollout import EngineBench
from tandem.types import Completion, GenerationRequest
from tandem.weight_sync.handshake import LinkTensors
from tandem.weight_sync.link import open_link
from tandem.workers.generation import LinkedRollout
from tests.distributed.spawn import HOST, run_ranks
from tests.engines.bench import MAX_ERROR, largest_error, open_spec, requests, write_model
from tests.fakes.generation import change
from tests.fakes.patience import LIMIT_S
from tests.unit.weight_sync.layouts import place, settings

PYTHON = os.environ.get("TANDEM_SGLANG_PYTHON", "")
NUM_VERSIONS = 20
BUCKET_BYTES = 8192
"""Smaller than the largest tensors."""
TIMEOUT_S = 900.0
"""Of the whole test and of each wait for the other process, whose engine takes a while to start."""


def _keys(engine: str) -> Mapping[str, Any]:
    return {"name": engine, "engine_kwargs": {"sglang": {"python": PYTHON}}}


def _asked(version: int) -> list[GenerationRequest]:
    return requests(first_id=100 * version, num_prompts=1)


def _run_rank(rank: int, size: int, store_port: int, folder: Path, engine: str) -> dict[str, Any]:
    """Rank 0 trains, rank 1 generates and returns its samples and the names that it takes."""
    store = connect_store(HOST, store_port, timeout_s=LIMIT_S)
    spec = open_spec(folder, **_keys(engine))
    model = spec.model
    assert isinstance(model, NativeModel)
    generates = rank == 1
    rollout = LinkedRollout(build_engine(spec), model, keeps_policy=True) if generates else None
    tensors = (
        LinkTensors(receives=model.held_slices)
        if generates
        else LinkTensors(sends=model.held_slices)
    )
    link = open_link(
        store,
        place(rank, size, name="weights"),
        tensors=tensors,
        settings=settings(BUCKET_BYTES, BUCKET_BYTES, timeout_s=TIMEOUT_S),
    )
    samples: dict[int, Completion] = {}
    for version in range(NUM_VERSIONS):
        if rollout is None:
            change(model, seed=version)
        else:
            rollout.prepare()
        link.transfer(version)
        if rollout is not None:
            rollout.use(link.gate, version)
            samples |= EngineBench(rollout.engine, rollout.engine, model).generate(_asked(version))
    link.close()
    if rollout is None:
        return {}
    with closing(rollout.engine):
        sink = rollout.engine.sink()
        assert sink is not None
        return {"samples": samples, "names": [spec.name for spec in sink.manifest()]}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_v2_twenty_versions_from_another_process_are_each_the_trainers(
    tmp_path: Path, engine: str
) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm", reason="needs vllm: make test-engines")
    elif not PYTHON:
        pytest.skip("needs sglang: make test-engines")
    write_model(tmp_path, "qwen2 tied")
    arguments = (_run_rank, 2, tmp_path, engine)
    _, found = run_ranks(*arguments, timeout_s=TIMEOUT_S, joined=False)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(found["names"]) == set(file.keys())
    spec = open_spec(tmp_path)
    trainer = EngineBench(None, None, spec.model)  # pyright: ignore[reportArgumentType]
    for version in range(NUM_VERSIONS):
        change(spec.model, seed=version)
        assert largest_error(trainer, _asked(version), found["samples"]) <= MAX_ERROR
        ids = (i for request in _asked(version) for i in request.sample_ids)
        runs = (run for i in ids for run in found["samples"][i].version_runs)
        assert {number for number, _ in runs} == {version}
