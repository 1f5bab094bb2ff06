# SPDX-License-Identifier: Apache-2.0
"""V2: many versions one after the other take no memory. V3: checkpoints with a head that the tied
model does not have (tied and untied heads are in test_parity). V16: what is left behind by an
update that fails.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.api import EngineFailure
from tandem.rollout.feed import checkpoint_views
from tandem.rollout.vllm import weights as weights_module
from tandem.rollout.vllm.engine import build
from tandem.rollout.vllm.weights import VllmSink
from tandem.testing.contracts.rollout import EngineBench
from tests.engines.bench import (
    MAX_ERROR,
    largest_error,
    open_spec,
    requests,
    running,
    write_model,
)
from tests.engines.parity import check_versions, write_tied_model_with_a_head

pytest.importorskip("vllm", reason="needs vllm: make test-engines")

NUM_VERSIONS = 20
MAX_GROWTH = 8 << 20
"""Bytes. Twenty copies of the model would have 4 MB, and of its packed layers as much again. The
allocator keeps up to some megabytes."""


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_v3_a_checkpoint_of_a_tied_model_with_a_head(tmp_path: Path, load_format: str) -> None:
    """vLLM makes a separate head of it. The trainer, and so each update, has none."""
    write_tied_model_with_a_head(tmp_path)
    with running(build, open_spec(tmp_path, load_format=load_format)) as bench:
        check_versions(bench)


def test_v2_twenty_versions_are_each_right_and_take_no_memory(tmp_path: Path) -> None:
    spec = open_spec(write_model(tmp_path, "qwen2 tied"))
    with running(build, spec) as bench:
        sizes: list[int] = []
        for seed in range(NUM_VERSIONS):
            bench.use_new_weights(seed)
            asked = requests(first_id=100 * seed, num_prompts=1)
            assert largest_error(bench, asked, bench.generate(asked)) <= MAX_ERROR
            gc.collect()
            sizes.append(_resident_bytes())
        assert sizes[-1] - sizes[4] < MAX_GROWTH, sizes


def test_scales_of_a_quantized_cache_need_not_come(tmp_path: Path) -> None:
    """On GPUs, fp8 models of vLLM 0.26 have them, and put back those in use. CPUs have no fp8."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    spec = open_spec(write_model(tmp_path, "qwen2 tied"))
    with running(build, spec) as bench:
        sink = bench.engine.sink()
        assert isinstance(sink, VllmSink)
        layers = [layer for layer in sink._model().modules() if isinstance(layer, Attention)]
        for layer in layers:
            parameters, _ = get_layerwise_info(layer).restore_metadata
            scale = torch.nn.Parameter(torch.empty((), device="meta"), requires_grad=False)
            parameters["k_scale"] = scale
        bench.use_new_weights(1)
        asked = requests(first_id=0, num_prompts=1)
        assert largest_error(bench, asked, bench.generate(asked)) <= MAX_ERROR
        assert layers and all("k_scale" not in dict(layer.named_parameters()) for layer in layers)


def test_v16_an_engine_computes_nothing_after_an_update_that_failed(tmp_path: Path) -> None:
    spec = open_spec(write_model(tmp_path, "qwen2 tied"))
    with running(build, spec) as bench:
        sink = bench.engine.sink()
        assert sink is not None
        (name, view), *_ = checkpoint_views(spec.model)
        sink.begin(1)
        sink.take(name, view)
        with pytest.raises(EngineFailure, match=f"weight {name} came twice"):
            sink.take(name, view)
        bench.engine.add([bench.request(0)])
        for _ in range(2):
            with pytest.raises(EngineFailure, match="vLLM: version 1 was not loaded whole"):
                bench.engine.advance()


@pytest.mark.parametrize("family", ["qwen2 tied", "qwen3_moe"])
def test_later_versions_are_loaded_in_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Many small ones, the last of which is not full. Each version is right."""
    monkeypatch.setattr(weights_module, "_GROUP_BYTES", 10_000)
    with running(build, open_spec(write_model(tmp_path, family))) as bench:
        groups = watched_groups(bench, monkeypatch)
        check_versions(bench)
        assert len(groups) > 3 and max(map(len, groups)) > 1
        tensors = [name for name, _ in checkpoint_views(bench.model)]
        assert [name for group in groups for name in group][: len(tensors)] == tensors


@pytest.mark.parametrize(
    ("dropped", "says"),
    [
        ("layers.0.mlp.down_proj.weight", "vLLM dropped .*layers.0.mlp.down_proj.weight"),
        (
            "layers.1.self_attn.q_proj.weight",
            "log-probs of known tokens differ",
        ),  # k, v write it too
    ],
)
def test_what_is_dropped_from_a_later_version_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropped: str, says: str
) -> None:
    with running(build, open_spec(write_model(tmp_path, "qwen2 tied"))) as bench:
        bench.use_new_weights(1)
        watched_groups(bench, monkeypatch, dropped=dropped)
        with pytest.raises(EngineFailure, match=says):
            bench.use_new_weights(2)
            bench.generate([bench.request(0)])


def watched_groups(
    bench: EngineBench, monkeypatch: pytest.MonkeyPatch, *, dropped: str = "nothing"
) -> list[list[str]]:
    """Return the names that vLLM's loader is called with from now on, by call. It does not see
    those that end in ``dropped``.
    """
    sink = bench.engine.sink()
    assert isinstance(sink, VllmSink)
    model, groups = sink._model(), list[list[str]]()
    load = model.load_weights

    def watched(pairs: Iterable[tuple[str, Tensor]]) -> set[str]:
        kept = [(name, tensor) for name, tensor in pairs if not name.endswith(dropped)]
        groups.append([name for name, _ in kept])
        return load(kept)

    monkeypatch.setattr(model, "load_weights", watched)
    return groups


def _resident_bytes() -> int:
    """Return the resident memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
