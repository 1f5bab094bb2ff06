# SPDX-License-Identifier: Apache-2.0
"""Generation with experts divided over processes: the tokens of one process that holds all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.api import RolloutEngine
from tandem.comm.world import consecutive_group
from tandem.config.schema.rollout import RolloutConfig
from tandem.models.folder import check_folder, open_part
from tandem.models.language_model import NativeModel
from tandem.models.parallel import WHOLE, ParallelLayout, Peers
from tandem.platforms.capture import Capturer, Replay
from tandem.platforms.record import CPU
from tandem.rollout.divided import DividedEngine
from tandem.rollout.factory import EngineSpec, build_engine
from tandem.rollout.lock_step import LockStep
from tandem.rollout.settings import NativeRolloutConfig
from tandem.types import Completion, GenerationRequest, SamplingParams
from tests.distributed.spawn import run_ranks
from tests.fakes import interpreted_triton
from tests.fakes.commands import Conditions, run_command
from tests.fakes.patience import LIMIT_S
from tests.fakes.tiny_experts import write_tiny_qwen3_moe
from tests.fakes.tiny_run import Material, metrics_of, read_lines, repeatable, train_arguments
from tests.unit.models.tiny_models import EXPERTS, write_hf

_PATIENCE_S = 20.0
SAMPLED = SamplingParams(1.0, 1.0, -1, max_new_tokens=9)
CASES = ("qwen3_moe", "dots1", "deepseek_v3")
Found = dict[int, Completion]


@dataclass(frozen=True)
class _Wave:
    """Requests, and the version of weights that comes after some advances, or None."""

    requests: tuple[GenerationRequest, ...]
    version: int | None = None


def _request(first: int, num_samples: int, *ids: int, tokens: int = 9) -> GenerationRequest:
    samples = tuple(range(first, first + num_samples))
    return GenerationRequest(samples, ids, replace(SAMPLED, max_new_tokens=tokens))


WAVES = (
    # More prompts than processes, of unequal lengths and ends.
    _Wave(
        (
            _request(0, 3, 3, 5, 7),
            _request(3, 1, 11, tokens=1),
            _request(4, 2, *range(20, 32)),
            _request(6, 5, 40, 41, tokens=17),
        )
    ),
    # One process has work, and the weights change in the middle.
    _Wave((_request(20, 1, 9, 8, 7, tokens=12),), version=1),
    # One prompt for all.
    _Wave((_request(30, 6, 2, 4, tokens=7),), version=2),
)


def _engine(folder: Path, layout: ParallelLayout, config: RolloutConfig) -> RolloutEngine:
    model = open_part(check_folder(str(folder)), layout, dtype=torch.float32, device="cpu")
    assert isinstance(model, NativeModel)
    return build_engine(EngineSpec(model, folder, config, eos_ids=(0, 1, 2), platform=CPU))


def _generate(engine: RolloutEngine, waves: Sequence[_Wave]) -> Found:
    found: Found = {}
    for wave in waves:
        engine.add(wave.requests)
        if wave.version is not None:
            found |= {one.sample_id: one for one in engine.advance(3)}
            engine.set_weights_version(wave.version)
        # All processes make the same number of calls, as the driver does; the last ones are idle.
        for _ in range(24):
            found |= {one.sample_id: one for one in engine.advance(4)}
    return found


def _generate_on_rank(
    rank: int, size: int, store_port: int, folders: Sequence[Path], config: RolloutConfig
) -> list[tuple[Found, float]]:
    results: list[tuple[Found, float]] = []
    for folder in folders:
        engine = _engine(folder, ParallelLayout(expert=Peers(rank, size)), config)
        found = _generate(engine, WAVES)
        results.append((found, engine.metrics()["num_idle_passes"]))
    return results


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.deep)])
def test_tokens_do_not_depend_on_the_number_of_processes_that_divide_experts(
    tmp_path: Path, size: int
) -> None:
    """Few rows: sequences wait for one, and processes end at different times (MO9, MO10)."""
    folders = [tmp_path / case for case in CASES]
    for case, folder in zip(CASES, folders, strict=True):
        write_hf(EXPERTS[case](), folder)
    config = RolloutConfig(max_num_seqs=2, enable_rollout_routing_replay=True)
    ranks = run_ranks(_generate_on_rank, size, folders, config)
    for number, folder in enumerate(folders):
        alone = _generate(_engine(folder, WHOLE, config), WAVES)
        together = [rank[number] for rank in ranks]
        ids = [sample for found, _ in together for sample in found]
        assert sorted(ids) == sorted(alone), "each sample is drawn by one process"
        assert all(found for found, _ in together)
        assert sum(idle for _, idle in together) > 0, "some pass had to be made for others alone"
        for found, _ in together:
            for sample, completion in found.items():
                wanted = alone[sample]
                assert completion.token_ids == wanted.token_ids
                assert completion.finish_reason == wanted.finish_reason
                assert np.array_equal(completion.routes, wanted.routes), "the router is whole"
                assert completion.log_probs == pytest.approx(wanted.log_probs, abs=1e-5)


def _generate_in_groups(
    rank: int, size: int, store_port: int, folder: Path
) -> tuple[Found, float | None]:
    """Generate in two groups of two, of which the last process leaves its peer alone.

    Returns:
        the completions, and after how many seconds the process that was left alone found out.
    """
    group = consecutive_group(2, timeout_s=_PATIENCE_S)
    layout = ParallelLayout(expert=Peers(rank % 2, 2, group))
    engine = _engine(folder, layout, RolloutConfig())
    if rank == 3:
        return {}, None
    if rank < 2:
        return _generate(engine, WAVES[:1]), None
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        _generate(engine, WAVES[:1])
    return {}, time.monotonic() - started


def test_groups_are_independent_and_wait_for_a_lost_process_for_a_limited_time(
    tmp_path: Path,
) -> None:
    write_hf(EXPERTS["qwen3_moe"](), tmp_path)
    ranks = run_ranks(_generate_in_groups, 4, tmp_path)
    alone = _generate(_engine(tmp_path, WHOLE, RolloutConfig()), WAVES[:1])
    found = ranks[0][0] | ranks[1][0]
    assert found.keys() == alone.keys()
    assert all(found[x].token_ids == alone[x].token_ids for x in alone)
    assert ranks[2][1] < LIMIT_S


def _generate_in_pages(
    rank: int, size: int, store_port: int, folder: Path, rounds: Sequence[_Wave]
) -> tuple[Found, float]:
    """Draw with the engine of accelerators, whose kernels are interpreted."""
    interpreted_triton.install()
    from tandem.rollout.paged.engine import PagedRolloutEngine

    layout = ParallelLayout(expert=Peers(rank, size)) if size > 1 else WHOLE
    model = open_part(check_folder(str(folder)), layout, dtype=torch.float32, device="cpu")
    assert isinstance(model, NativeModel)
    decoder, peers = model.decoder, layout.expert
    lock_step = LockStep(peers, lambda: None) if size > 1 else None
    engine = PagedRolloutEngine(
        decoder,
        NativeRolloutConfig(
            seed=1,
            eos_ids=(0, 1, 2),
            max_num_seqs=3,
            max_num_batched_tokens=16,
            max_cache_bytes=1 << 24,
        ),
        make_capturer=_running_capturer,
        num_multiprocessors=1,
        lock_step=lock_step,
        page_tokens=8,
        least_shared_bytes=1,  # so that a process reads pages once where another has none in common
    )
    if lock_step is None:
        return _generate(engine, rounds), 0.0
    divided = DividedEngine(engine, peers, lock_step=lock_step)
    found = _generate(divided, rounds)
    assert divided.sleep(), "all is drawn"
    found |= _generate(divided, rounds[:1])  # with what is captured anew
    return found, divided.metrics()["num_idle_passes"]


def _running_capturer() -> Capturer:
    """Return a capturer that runs a function before it captures it, as that of graphs does."""

    def capture(function: Callable[[], None]) -> Replay:
        function()
        return function

    return capture


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.deep)])
def test_the_engine_of_accelerators_draws_the_same_with_divided_experts(
    tmp_path: Path, size: int
) -> None:
    pytest.importorskip("triton", reason="the kernels need triton")
    folder = write_tiny_qwen3_moe(tmp_path)
    (alone, _), *_ = run_ranks(_generate_in_pages, 1, folder, WAVES)
    together = run_ranks(_generate_in_pages, size, folder, WAVES)
    ids = [sample for found, _ in together for sample in found]
    assert sorted(ids) == sorted(alone)
    assert sum(idle for _, idle in together) > 0
    for found, _ in together:
        for sample, completion in found.items():
            assert completion.token_ids == alone[sample].token_ids
            assert completion.log_probs == pytest.approx(alone[sample].log_probs, abs=1e-5)


DIVIDED = (
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.actor.fsdp_config.expert_model_parallel_size=2",
    "actor_rollout_ref.rollout.expert_parallel_size=2",
    "actor_rollout_ref.rollout.free_cache_engine=True",
)
BALANCE = ("actor/experts/max_over_mean",)
"""It is about what a device computes at once."""


def test_a_run_with_divided_experts_draws_and_learns_what_one_process_does(
    material: Material, cluster: Conditions, tmp_path: Path
) -> None:
    policy = write_tiny_qwen3_moe(tmp_path / "policy")
    runs = {"alone": (), "divided": DIVIDED}
    for name, words in runs.items():
        arguments = train_arguments(
            material,
            tmp_path / name,
            f"actor_rollout_ref.model.path={policy}",
            "trainer.total_training_steps=2",
            "trainer.test_freq=2",
            *words,
        )
        ended = run_command(arguments, folder=tmp_path, conditions=cluster)
        assert ended.code == 0, ended.stderr
    alone, divided = (repeatable(metrics_of(tmp_path / name)) for name in runs)
    assert alone.keys() == divided.keys()
    for step, row in alone.items():
        of_a_device = {name: divided[step][name] for name in BALANCE if name in row}
        assert divided[step] == pytest.approx(row | of_a_device, abs=1e-5)
    assert _drawn(tmp_path / "alone") == _drawn(tmp_path / "divided")


def _drawn(run: Path) -> list[tuple[int, int, str]]:
    lines = read_lines(run / "rollouts.jsonl")
    return sorted((line["step"], line["sample_id"], line["response"]) for line in lines)
