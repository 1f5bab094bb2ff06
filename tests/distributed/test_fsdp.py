# SPDX-License-Identifier: Apache-2.0
"""Sharded training equals training in one process: reports, log-probs and weights after 5 steps."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed

from tandem.algorithms.sft import SftLoss
from tandem.api import Loss
from tandem.config.schema.optim import OptimConfig
from tandem.data.packing import TrainSequence
from tandem.engines.single import ReferenceModel
from tandem.models.folder import open_model
from tandem.types import SliceSpec, UpdateReport
from tests.distributed.spawn import run_ranks
from tests.distributed.training import (
    TEMPERATURE,
    TOLERANCE,
    Case,
    assembled,
    check_gradients,
    check_outcomes,
    copied_parts,
    deal,
    open_engine,
    open_sharded_model,
    open_single,
    save_first_steps,
    train_all,
    train_single,
)
from tests.fakes.tiny_vision import FAMILIES as SEEING_FAMILIES
from tests.fakes.tiny_vision import VOCAB, draw_prompt, write_seeing
from tests.unit.engines.minibatch import SCALE, SEQUENCES, PoisonedLoss, cut_batches
from tests.unit.models.test_hf import OTHERS
from tests.unit.models.tiny_models import EXPERTS, NATIVE, write_hf

ADAMW = OptimConfig(lr=2e-4, lr_warmup_steps=2, clip_grad=0.5)
MUON = OptimConfig(optimizer="Muon", lr=2e-4, muon_lr=1e-4)
FAMILIES = ("qwen2_tied", "qwen2_untied", "qwen3_biases")
EXACT = {"stored": torch.float64, "compute": torch.float64}
OFFLOADED = {"param_offload": True, "optimizer_offload": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return tiny random models by family. Do not write into them."""
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        write_hf(NATIVE[family](), root / family)
    return {family: root / family for family in FAMILIES}


def test_one_rank(folders: dict[str, Path]) -> None:
    case = Case(folders["qwen2_tied"], ADAMW)
    check_outcomes(case, run_ranks(train_all, 1, [case])[0])


def test_two_ranks(folders: dict[str, Path]) -> None:
    tied, untied, qwen3 = (Case(folders[family], ADAMW) for family in FAMILIES)
    cases = [
        tied,
        untied,
        replace(qwen3, recompute=True, config={"forward_prefetch": True}),
        replace(untied, optim=MUON),
        replace(tied, config=OFFLOADED),
        replace(untied, config={"offload_policy": True, "reshard_after_forward": False}),
        replace(untied, config={"fsdp_size": 1}),
        replace(qwen3, config={"tensor_model_parallel_size": 2}),
        replace(tied, config={"ulysses_sequence_parallel_size": 2}),
        replace(tied, is_critic=True),
        replace(untied, is_critic=True, optim=MUON, config=OFFLOADED),
        replace(qwen3, is_critic=True, config={"ulysses_sequence_parallel_size": 2}),
        replace(untied, is_critic=True, config={"tensor_model_parallel_size": 2}),
    ]
    by_rank = run_ranks(train_all, 2, cases)
    for case, *ranks in zip(cases, *by_rank, strict=True):
        check_outcomes(case, ranks)


@pytest.fixture(scope="module")
def of_transformers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return tiny random models of families that our decoder lacks. Do not write into them."""
    root = tmp_path_factory.mktemp("transformers")
    for family in ("gemma", "phi", "cohere", "gpt2"):
        write_hf(OTHERS[family](), root / family)
    return {path.name: path for path in root.iterdir()}


def test_two_ranks_with_transformers_code(of_transformers: dict[str, Path]) -> None:
    """Heads that are tied (Gemma, GPT-2), that have a bias (Phi), and that are scaled (Cohere)."""
    gemma, phi, cohere, gpt2 = (
        Case(of_transformers[family], ADAMW) for family in ("gemma", "phi", "cohere", "gpt2")
    )
    cases = [
        gemma,
        phi,
        cohere,
        replace(gpt2, recompute=True, config=OFFLOADED),
        replace(gemma, optim=MUON),
        replace(phi, config={"offload_policy": True, "reshard_after_forward": False}),
        replace(cohere, config={"fsdp_size": 1}, recompute=True),
    ]
    by_rank = run_ranks(train_all, 2, cases)
    for case, *ranks in zip(cases, *by_rank, strict=True):
        check_outcomes(case, ranks)


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return tiny random models with experts by family. Do not write into them."""
    root = tmp_path_factory.mktemp("experts")
    families = ("qwen3_moe", "dots1", "olmoe", "deepseek_v3")
    for family in families:
        write_hf(EXPERTS[family](), root / family)
    write_hf(EXPERTS["dots1"](), root / "one-sided")
    choose_first_experts(root / "one-sided")
    return {folder.name: folder for folder in root.iterdir()}


def choose_first_experts(folder: Path) -> None:
    """Let the routers of a dots.llm1 send all tokens to experts 0, 1 and 2."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensor.zero_()[:3] = 9.0
    save_file(tensors, file, metadata={"format": "pt"})


def test_mo9_two_ranks_with_experts(with_experts: dict[str, Path]) -> None:
    qwen3, dots = (Case(with_experts[family], ADAMW, **EXACT) for family in ("qwen3_moe", "dots1"))
    cases = [
        qwen3,
        replace(dots, config=OFFLOADED, recompute=True),
        replace(dots, config={"offload_policy": True, "reshard_after_forward": False}),
        replace(dots, config={"fsdp_size": 1}, optim=MUON),
        replace(qwen3, optim=MUON, freezes_router=True),
        replace(dots, config={"tensor_model_parallel_size": 2}),
        replace(qwen3, config={"ulysses_sequence_parallel_size": 2}),
        # The norms of queries and keys are over the heads of both ranks.
        Case(with_experts["olmoe"], ADAMW, **EXACT, config={"tensor_model_parallel_size": 2}),
        # The heads of latent attention are divided, and the latent vector is not.
        Case(with_experts["deepseek_v3"], ADAMW, **EXACT, config={"tensor_model_parallel_size": 2}),
    ]
    by_rank = run_ranks(train_all, 2, cases)
    for case, *ranks in zip(cases, *by_rank, strict=True):
        check_outcomes(case, ranks)


def test_mo9_experts_divided_over_two_ranks(with_experts: dict[str, Path]) -> None:
    """Divide experts, with every other way of dividing; all results are those of one process."""
    qwen3, dots = (Case(with_experts[family], ADAMW, **EXACT) for family in ("qwen3_moe", "dots1"))
    divided = {"expert_model_parallel_size": 2}
    cases = [
        replace(qwen3, config=divided),
        replace(qwen3, config=divided, freezes_router=True),
        replace(dots, config={**divided, **OFFLOADED}, recompute=True),
        replace(dots, config={**divided, "offload_policy": True, "reshard_after_forward": False}),
        replace(qwen3, config=divided, optim=MUON),
        replace(dots, config={**divided, "tensor_model_parallel_size": 2}),
        replace(qwen3, config={**divided, "ulysses_sequence_parallel_size": 2}),
        Case(
            with_experts["deepseek_v3"],
            MUON,
            **EXACT,
            config={**divided, "ulysses_sequence_parallel_size": 2},
            recompute=True,
        ),
    ]
    by_rank = run_ranks(train_all, 2, cases)
    for case, *ranks in zip(cases, *by_rank, strict=True):
        check_outcomes(case, ranks)


def test_mo9_gradients_of_divided_experts(with_experts: dict[str, Path], tmp_path: Path) -> None:
    divided = {"expert_model_parallel_size": 2}
    dots = Case(with_experts["dots1"], ADAMW, **EXACT)
    cases = [
        Case(with_experts["qwen3_moe"], ADAMW, **EXACT, config=divided),
        replace(dots, config={**divided, "tensor_model_parallel_size": 2}),
        replace(dots, config={**divided, "ulysses_sequence_parallel_size": 2}),
    ]
    saved = [(case, tmp_path / str(number)) for number, case in enumerate(cases)]
    for _, folder in saved:
        folder.mkdir()
    reports, _ = run_ranks(save_first_steps, 2, saved)
    for (case, folder), report in zip(saved, reports, strict=True):
        check_gradients(case, folder, report=report)


@pytest.fixture(scope="module")
def that_see(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return tiny random models that see, by family. Do not write into them."""
    root = tmp_path_factory.mktemp("seeing")
    for family in SEEING_FAMILIES:
        write_seeing(family, root / family)
    return {family: root / family for family in SEEING_FAMILIES}


def _with_pictures(keys: Sequence[int]) -> tuple[TrainSequence, ...]:
    """Return the sequences of ``SEQUENCES``, where some prompts have pictures."""
    rng, first_id, prompts = random.Random(3), VOCAB, {}
    for key in keys:
        prompts[key] = draw_prompt(rng, [(2, 3), (1, 2)][: 1 + key % 2], first_id=first_id)
        first_id += sum(picture.num_tokens for picture in prompts[key][1])
    return tuple(
        replace(x, prompt_ids=tuple(prompts[x.prompt_key][0]), pictures=prompts[x.prompt_key][1])
        if x.prompt_key in prompts
        else x
        for x in SEQUENCES
    )


def test_VL9_two_ranks_that_see(that_see: dict[str, Path]) -> None:  # noqa: N802
    """VL9: Of the ranks of a round, sometimes one alone has pictures, and once none of them has."""
    first, second = (
        Case(that_see[family], ADAMW, sequences=_with_pictures([0, 2, 3]))
        for family in SEEING_FAMILIES
    )
    batches = cut_batches(first.max_sequences, sequences=first.sequences)
    sees = [bool(batch.pictures) for batch in batches]
    assert {tuple(sees[i : i + 2]) for i in range(0, len(sees), 2)} > {(True, False)}
    cases = [
        replace(first, recompute=True, config={"forward_prefetch": True}),
        replace(second, config={"offload_policy": True, "reshard_after_forward": False}),
        replace(second, optim=MUON),
        replace(first, freezes_tower=True, config=OFFLOADED),
        replace(first, config={"ulysses_sequence_parallel_size": 2}),
        replace(second, config={"ulysses_sequence_parallel_size": 2}, freezes_tower=True),
        replace(first, config={"tensor_model_parallel_size": 2}),
        replace(second, config={"tensor_model_parallel_size": 2}),
    ]
    by_rank = run_ranks(train_all, 2, cases)
    for case, *ranks in zip(cases, *by_rank, strict=True):
        check_outcomes(case, ranks)


def test_mo9_and_mo10_experts_divided_over_four_ranks(with_experts: dict[str, Path]) -> None:
    """Divide experts over all ranks, half of them or a copy's; micro-batches are unequal.

    With six sequences in a micro-batch there are three for four ranks, so that one has no work.
    The experts of the last model that get tokens are held by two ranks.
    """
    names = ("qwen3_moe", "dots1", "one-sided")
    qwen3, dots, one_sided = (Case(with_experts[name], ADAMW, **EXACT) for name in names)
    by_two, by_four = ({"expert_model_parallel_size": size} for size in (2, 4))
    cases = [
        replace(qwen3, config=by_four, max_sequences=6),
        replace(dots, config=by_two, recompute=True),
        replace(qwen3, config={**by_two, "fsdp_size": 2}),
        replace(dots, config={**by_two, "tensor_model_parallel_size": 2}),
        replace(dots, config={**by_four, "tensor_model_parallel_size": 2}, optim=MUON),
        replace(qwen3, config={**by_two, "ulysses_sequence_parallel_size": 2}),
        replace(one_sided, config=by_four),
    ]
    by_rank = run_ranks(train_all, 4, cases)
    for case, *ranks in zip(cases, *by_rank, strict=True):
        check_outcomes(case, ranks)
    routes = [part for rank in by_rank for part in rank[-1].routes if part is not None]
    assert routes and all(int(part.max()) == 2 for part in routes)


def test_four_ranks(folders: dict[str, Path]) -> None:
    tied, untied, qwen3 = (Case(folders[family], ADAMW) for family in FAMILIES)
    split = {"tensor_model_parallel_size": 2}
    cases = [
        qwen3,
        replace(tied, max_sequences=6),
        replace(untied, config={"fsdp_size": 2}),
        replace(tied, optim=MUON, config={"fsdp_size": 2}),
        replace(qwen3, optim=MUON, config=split),
        replace(tied, config={**split, "ulysses_sequence_parallel_size": 2}),
        replace(untied, config={**split, "fsdp_size": 1}),
    ]
    by_rank = run_ranks(train_all, 4, cases)
    for case, *ranks in zip(cases, *by_rank, strict=True):
        check_outcomes(case, ranks)


def _train_apart(
    rank: int, size: int, store_port: int, case: Case
) -> list[tuple[SliceSpec, Tensor]]:
    """Train ranks that compute slightly differently, as kernels may."""
    engine = open_engine(case, rank=rank, size=size)
    for _ in range(2):
        engine.update(cut_batches(6), SftLoss(), scale=SCALE, temperature=1.0 + 1e-3 * rank)
    return copied_parts(engine)


def test_what_tensor_ranks_hold_whole_stays_the_same(folders: dict[str, Path]) -> None:
    config = {"tensor_model_parallel_size": 2}
    case = Case(folders["qwen3_biases"], OptimConfig(lr=1e-3), config=config)
    first, second = run_ranks(_train_apart, 2, case)
    assert assembled([*first, *second])


def _timeouts(rank: int, size: int, store_port: int, case: Case) -> set[timedelta]:
    model = open_sharded_model(case, rank=rank, size=size)
    peers = model.language_model.layout
    groups = (distributed.group.WORLD, peers.tensor.group, peers.sequence.group)
    host = torch.device("cpu")
    return {group._get_backend(host).options._timeout for group in groups if group is not None}


def test_groups_within_a_world_take_its_timeout(folders: dict[str, Path]) -> None:
    ways = {"tensor_model_parallel_size": 2, "ulysses_sequence_parallel_size": 2}
    for found in run_ranks(_timeouts, 4, Case(folders["qwen2_tied"], ADAMW, config=ways)):
        assert len(found) == 1


@dataclass(frozen=True)
class Behaviour:
    """The results of one rank."""

    poisoned: list[UpdateReport]
    before: list[tuple[SliceSpec, Tensor]]
    after: list[tuple[SliceSpec, Tensor]]
    healthy: UpdateReport
    reference: list[Tensor]
    random: list[tuple[SliceSpec, Tensor]]


def _behave(rank: int, size: int, store_port: int, case: Case) -> Behaviour:
    """Run steps that one rank spoils, the reference policy, and random weights."""
    engine = open_engine(case, rank=rank, size=size)
    batches, num_rounds = deal(case, engine, rank=rank, size=size)
    every = cut_batches(case.max_sequences)

    def update(loss: Loss) -> UpdateReport:
        return engine.update(batches, loss, scale=SCALE, temperature=1.0, num_rounds=num_rounds)

    before = copied_parts(engine)
    poisoned = [update(PoisonedLoss(x, len(every[-1].target_R))) for x in (math.nan, math.inf)]
    after = copied_parts(engine)
    healthy = update(SftLoss())
    frozen = open_sharded_model(case, rank=rank, size=size, frozen=True)
    asking = [replace(batch, with_squares=True) for batch in batches]
    scores = frozen.score(asking, temperature=TEMPERATURE, num_rounds=num_rounds)
    drawn = open_sharded_model(case, rank=rank, size=size, random_seed=5).held_slices()
    random = [(held.spec, held.tensor) for held in drawn]
    log_probs = [x.score_R for x in scores]
    return Behaviour(poisoned, before, after, healthy, reference=log_probs, random=random)


def test_steps_that_are_not_finite_references_and_random_weights(folders: dict[str, Path]) -> None:
    case = Case(folders["qwen2_tied"], OptimConfig(lr=1e-3), max_sequences=6)
    ranks = run_ranks(_behave, 2, case)
    engine, _ = open_single(case)
    batches = cut_batches(case.max_sequences)
    healthy = engine.update(batches, SftLoss(), scale=SCALE, temperature=1.0)
    model = open_model(str(case.folder), dtype=torch.float32, device="cpu")
    asking = [replace(batch, with_squares=True) for batch in batches]
    scores = ReferenceModel(model).score(asking, TEMPERATURE)
    for number, rank in enumerate(ranks):
        assert all(report.skipped for report in rank.poisoned)
        for (spec, before), (_, after) in zip(rank.before, rank.after, strict=True):
            assert torch.equal(before, after), spec
        assert rank.healthy.metrics == pytest.approx(healthy.metrics, abs=TOLERANCE)
        assert rank.healthy.grad_norm == pytest.approx(healthy.grad_norm, rel=TOLERANCE)
        for actual, expected in zip(rank.reference, scores[number::2], strict=True):
            torch.testing.assert_close(actual, expected.score_R, rtol=0, atol=TOLERANCE)
    drawn = open_model(str(case.folder), dtype=torch.float32, device="cpu", random_seed=5)
    found = assembled(part for rank in ranks for part in rank.random)
    for name, parameter in drawn.module.named_parameters():
        assert torch.equal(found[name], parameter), name


def test_half_precision_stays_close(folders: dict[str, Path]) -> None:
    """Compare with one process with other micro-batches, which also rounds other sums."""
    case = Case(folders["qwen3_biases"], ADAMW, compute=torch.bfloat16)
    by_rank = run_ranks(train_all, 2, [case])
    engine, weights = open_single(case)
    reports, _ = train_single(engine, case)
    for actual, expected in zip(by_rank[0][0].reports, reports, strict=True):
        assert actual.metrics == pytest.approx(expected.metrics, rel=0.02, abs=0.02)
        assert actual.grad_norm == pytest.approx(expected.grad_norm, rel=0.02)
    found = assembled(part for (rank,) in by_rank for part in rank.parts)
    for name, expected in weights.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], expected, rtol=0, atol=4 * ADAMW.lr)
