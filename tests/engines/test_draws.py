# SPDX-License-Identifier: Apache-2.0
"""V6: vLLM's tokens are those of the native engine, and depend on nothing but the sample.
V7: an engine that is built again draws them again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.rollout.factory import build_dense
from tandem.rollout.vllm.engine import VllmRolloutEngine, build
from tandem.types import Completion, GenerationRequest, SamplingParams
from tests.engines.bench import (
    MAX_ERROR,
    open_spec,
    requests,
    running,
    scheduling_ahead,
    tokens_of,
    write_model,
)

pytest.importorskip("vllm", reason="needs vllm: make test-engines")

NUM_BLOCKS = 40
BLOCK = 32
LONG = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen2 tied")


def _asked() -> list[GenerationRequest]:
    """Return requests for 204 samples under three rules."""
    asked = requests(num_prompts=4, n=17)
    assert sum(len(request.sample_ids) for request in asked) == 204
    return asked


@pytest.fixture(scope="module")
def expected(folder: Path) -> Mapping[int, Completion]:
    """What the native engine draws."""
    with running(build_dense, open_spec(folder)) as bench:
        return bench.generate(_asked())


@pytest.mark.parametrize("scheduling", [nullcontext, scheduling_ahead])
@pytest.mark.parametrize(
    ("keys", "is_reversed"),
    [({}, False), ({"max_num_seqs": 3, "max_num_batched_tokens": 48}, True)],
    ids=["as the native engine", "other batches, order and chunks"],
)
def test_v6_tokens_are_those_of_the_native_engine(
    folder: Path,
    expected: Mapping[int, Completion],
    keys: Mapping[str, Any],
    is_reversed: bool,
    scheduling: Callable[[], AbstractContextManager[None]],
) -> None:
    """V7 too: each case has an engine of its own."""
    with scheduling(), running(build, open_spec(folder, **keys)) as bench:
        asked = _asked()
        found = bench.generate(asked[::-1] if is_reversed else asked)
    assert tokens_of(found) == tokens_of(expected)
    for sample_id, one in expected.items():
        assert found[sample_id].log_probs == pytest.approx(list(one.log_probs), abs=MAX_ERROR)


def test_generation_leaves_the_random_states_of_the_process(folder: Path) -> None:
    """Rewards and agents may draw from them in a run of one process."""
    with running(build, open_spec(folder)) as bench:
        of_python, of_torch = random.getstate(), torch.get_rng_state()
        of_numpy = np.random.get_state()[1:]
        bench.generate(requests(num_prompts=2, n=2))
        assert random.getstate() == of_python
        assert torch.equal(torch.get_rng_state(), of_torch)
        assert str(np.random.get_state()[1:]) == str(of_numpy)


@pytest.mark.parametrize("scheduling", [nullcontext, scheduling_ahead])
def test_v6_samples_that_vllm_interrupts_draw_the_same(
    folder: Path, scheduling: Callable[[], AbstractContextManager[None]]
) -> None:
    """The cache has 40 blocks of 32 tokens, and 16 sequences of up to 195 tokens are under way."""
    asked = [
        GenerationRequest(tuple(range(8 * i, 8 * i + 8)), tuple(range(2 + i, 92)), LONG)
        for i in range(4)
    ]
    with running(build_dense, open_spec(folder)) as bench:
        expected = bench.generate(asked)
    arguments = {"block_size": BLOCK, "num_gpu_blocks_override": NUM_BLOCKS}
    keys = {"max_num_seqs": 16, "engine_kwargs": {"vllm": arguments}}
    spec = open_spec(folder, disable_log_stats=False, **keys)
    with scheduling(), running(build, spec) as bench:
        assert isinstance(bench.engine, VllmRolloutEngine)
        assert bench.engine.capacity.cache_tokens == NUM_BLOCKS * BLOCK
        interrupted = _count_interruptions(bench.engine)
        found = bench.generate(asked)
        assert interrupted, "no sequence was interrupted: the cache is too large for this test"
    assert tokens_of(found) == tokens_of(expected)


def _count_interruptions(engine: VllmRolloutEngine) -> Sequence[str]:
    """Return a list that each interruption of a sequence by vLLM's scheduler makes longer."""
    scheduler: Any = engine._engine.engine_core.engine_core.scheduler
    names: list[str] = []
    preempt = scheduler._preempt_request

    def counted(request: Any, *args: Any, **keys: Any) -> Any:
        names.append(request.request_id)
        return preempt(request, *args, **keys)

    scheduler._preempt_request = counted
    return names
