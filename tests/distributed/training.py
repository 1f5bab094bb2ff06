# SPDX-License-Identifier: Apache-2.0
"""Functions that tests of sharded engines run in every process, and assembly of the parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.api import Loss, Scores
from tandem.config.derived.adapters import Adapters
from tandem.config.derived.pools import rank_layout
from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.optim import OptimConfig
from tandem.data.packing import TrainSequence
from tandem.engines.fsdp import FsdpEngine
from tandem.engines.fsdp_model import FsdpModel, FsdpSpec, open_fsdp_model
from tandem.engines.shards import view_of
from tandem.engines.single import SingleDeviceEngine
from tandem.models.adapted import trained_parameters
from tandem.models.folder import (
    ModelFolder,
    adapt_folder,
    check_critic_folder,
    check_folder,
    freeze_router,
    freeze_tower,
    open_part,
)
from tandem.models.operators import Operators, operators_for
from tandem.models.parallel import WHOLE
from tandem.platforms.registry import platform_named
from tandem.types import PackedBatch, SliceSpec, UpdateReport
from tests.unit.engines.minibatch import LOSS, SCALE, SEQUENCES, VALUE_LOSS, cut_batches

TEMPERATURE = 0.9
TOTAL_STEPS = 10
NUM_STEPS = 5
BALANCE = "actor/experts/max_over_mean"
TOLERANCE = 1e-5
EXACT_TOLERANCE = 1e-6
"""In fp64, where the order of sums hardly matters. Some metrics and AdamW's moments are in fp32."""
LOOSE_TOLERANCE = 1e-4
"""Muon computes in bf16, where a sum in another order may round the other way. The families that
transformers computes have larger logits, and biases of keys; see below."""
BIAS_TOLERANCE = 1e-4
"""A bias of keys at a low rotary frequency hardly changes softmax: its gradient is mostly rounding,
which AdamW makes as large as other steps."""


@dataclass(frozen=True)
class Case:
    """A way to train: from a model folder, by ``config``, with micro-batches of some sequences.

    ``stored``: the precision of weights and optimizer.
    ``is_critic``: whether to train a critic that is initialised from the folder's model.
    ``adapters``: what to train instead of the weights, with a spread B.
    ``freezes_tower``, ``freezes_router``: whether a vision tower or routers are left as they are.
    ``sequences``: what is learned; the responses must be those of ``SEQUENCES``.
    ``megatron_adaptor``: what lets megatron-core compute on the device.
    ``platform``: of the devices; each rank has the one of its number.
    """

    folder: Path
    optim: OptimConfig
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    compute: torch.dtype = torch.float32
    stored: torch.dtype = torch.float32
    max_sequences: int = 3
    recompute: bool = False
    is_critic: bool = False
    adapters: Adapters | None = None
    freezes_tower: bool = False
    freezes_router: bool = False
    sequences: Sequence[TrainSequence] = tuple(SEQUENCES)
    megatron_adaptor: str = ""
    platform: str = "cpu"

    @property
    def is_exact(self) -> bool:
        """Whether it computes in fp64."""
        return self.compute == torch.float64

    @property
    def tolerance(self) -> float:
        """Of losses, norms, metrics and weights."""
        if self.optim.optimizer == "Muon" or self.model.decoder_config is None:
            return LOOSE_TOLERANCE
        return EXACT_TOLERANCE if self.is_exact else TOLERANCE

    @property
    def operators(self) -> Operators:
        """Those that runs have on the platform."""
        return operators_for(platform_named(self.platform))

    def device(self, rank: int) -> torch.device:
        """The device of a rank."""
        return torch.device("cpu") if self.platform == "cpu" else torch.device(self.platform, rank)

    @property
    def loss(self) -> Loss:
        """A policy's or a critic's."""
        return VALUE_LOSS if self.is_critic else LOSS

    @property
    def model(self) -> ModelFolder:
        """The folder, checked."""
        folder = str(self.folder)
        if self.is_critic:
            return check_critic_folder(folder, seed=7, key="k")
        checked = check_folder(folder)
        checked = freeze_tower(checked) if self.freezes_tower else checked
        checked = freeze_router(checked) if self.freezes_router else checked
        return checked if self.adapters is None else adapt_folder(checked, self.adapters, seed=3)


@dataclass(frozen=True)
class Outcome:
    """The results of one process: of its micro-batches reports, log-probs and the experts of their
    tokens, and weights.
    """

    reports: list[UpdateReport]
    log_probs: list[Tensor]
    routes: list[Tensor | None]
    parts: list[tuple[SliceSpec, Tensor]]


def open_engine(case: Case, *, rank: int, size: int) -> FsdpEngine:
    """Open one rank of an engine. All ranks must call it."""
    model = open_sharded_model(case, rank=rank, size=size)
    model.language_model.set_gradient_checkpointing(case.recompute)
    return FsdpEngine(model, case.optim, total_training_steps=TOTAL_STEPS)


def open_sharded_model(
    case: Case, *, rank: int, size: int, frozen: bool = False, random_seed: int | None = None
) -> FsdpModel:
    """Open one rank's part of a model. All ranks must call it."""
    config = FsdpConfig(**case.config)
    spec = FsdpSpec(
        config,
        rank_layout(config, size),
        rank=rank,
        device=case.device(rank),
        stored=case.stored,
        compute=case.compute,
        megatron_adaptor=case.megatron_adaptor,
    )
    return open_fsdp_model(
        case.model, spec, frozen=frozen, random_seed=random_seed, operators=case.operators
    )


def open_single(case: Case) -> tuple[SingleDeviceEngine, dict[str, Tensor]]:
    """Return the engine that the sharded ones must equal, and its weights, in use."""
    stored = open_part(
        case.model,
        WHOLE,
        dtype=case.stored,
        device=case.device(0),
        base_dtype=case.compute,
        operators=case.operators,
    )
    engine = SingleDeviceEngine(
        stored,
        case.optim,
        total_training_steps=TOTAL_STEPS,
        compute=stored.in_dtype(case.compute),
    )
    return engine, {name: p.detach() for name, p in trained_parameters(stored.module).items()}


def deal(case: Case, engine: FsdpEngine, *, rank: int, size: int) -> tuple[list[PackedBatch], int]:
    """Return a rank's micro-batches, fewer for the last ranks, and the number of rounds."""
    batches = cut_batches(case.max_sequences, sequences=case.sequences)
    layout = rank_layout(FsdpConfig(**case.config), size)
    num_groups = engine.data_parallel_size
    return batches[layout.group_of(rank) :: num_groups], -(-len(batches) // num_groups)


def train_rank(
    engine: FsdpEngine,
    batches: Sequence[PackedBatch],
    *,
    num_rounds: int,
    num_steps: int = NUM_STEPS,
    loss: Loss = LOSS,
) -> Outcome:
    """Train some steps as one rank."""
    reports: list[UpdateReport] = []
    for _ in range(num_steps):
        with engine.on_device():  # and off it afterwards, with param_offload
            reports.append(
                engine.update(
                    batches, loss, scale=SCALE, temperature=TEMPERATURE, num_rounds=num_rounds
                )
            )
        engine.advance_schedule()
    recording = [replace(batch, with_routes=True) for batch in batches]
    scores = engine.score(recording, TEMPERATURE, num_rounds=num_rounds)
    routes = [None if x.routes_TLK is None else x.routes_TLK.cpu() for x in scores]
    log_probs = [x.score_R.cpu() for x in scores]
    return Outcome(reports, log_probs, routes, copied_parts(engine))


def copied_parts(engine: FsdpEngine) -> list[tuple[SliceSpec, Tensor]]:
    """Return copies of the parts that a rank holds now."""
    return [(held.spec, held.tensor.to("cpu", copy=True)) for held in engine.held_slices()]


def train_single(
    engine: SingleDeviceEngine, case: Case, *, num_steps: int = NUM_STEPS
) -> tuple[list[UpdateReport], list[Scores]]:
    """Train in one process, which computes all micro-batches, and return reports and scores."""
    batches, reports = cut_batches(case.max_sequences, sequences=case.sequences), []
    for _ in range(num_steps):
        reports.append(engine.update(batches, case.loss, scale=SCALE, temperature=TEMPERATURE))
        engine.advance_schedule()
    recording = [replace(batch, with_routes=True) for batch in batches]
    return reports, engine.score(recording, TEMPERATURE)


def assembled(parts: Iterable[tuple[SliceSpec, Tensor]]) -> dict[str, Tensor]:
    """Return whole weights from the parts of all ranks, which must agree where they overlap."""
    wholes: dict[str, Tensor] = {}
    for spec, tensor in parts:
        whole = wholes.setdefault(spec.name, torch.full(spec.shape, math.nan, dtype=spec.dtype))
        held = view_of(whole, spec)
        assert held.isnan().all() or torch.equal(held, tensor), f"ranks differ in {spec}"
        held.copy_(tensor)
    for name, whole in wholes.items():
        assert not whole.isnan().any(), f"nobody holds all of {name}"
    return wholes


def train_all(rank: int, size: int, store_port: int, cases: Sequence[Case]) -> list[Outcome]:
    """Train each case as one rank."""
    outcomes = []
    for case in cases:
        engine = open_engine(case, rank=rank, size=size)
        batches, num_rounds = deal(case, engine, rank=rank, size=size)
        outcomes.append(train_rank(engine, batches, num_rounds=num_rounds, loss=case.loss))
    return outcomes


def save_first_steps(
    rank: int, size: int, store_port: int, saved: Sequence[tuple[Case, Path]]
) -> list[UpdateReport]:
    """Train a step of each case as one rank and save it."""
    reports: list[UpdateReport] = []
    for case, folder in saved:
        engine = open_engine(case, rank=rank, size=size)
        batches, num_rounds = deal(case, engine, rank=rank, size=size)
        outcome = train_rank(engine, batches, num_rounds=num_rounds, num_steps=1, loss=case.loss)
        engine.save(folder)
        reports += outcome.reports
    return reports


def first_gradients(engine: SingleDeviceEngine) -> dict[str, Tensor]:
    """Return AdamW's first moments, which after one step are a share of the clipped gradients."""
    optimizer = engine._optimizer  # pyright: ignore[reportPrivateUsage]
    moments = optimizer.state_dict()["AdamW"]["exp_avg"]
    return dict(zip(optimizer.members["AdamW"], moments, strict=True))


def check_gradients(case: Case, folder: Path, *, report: UpdateReport) -> None:
    """Compare loss and gradients of a saved first step with those of one process. AdamW's steps
    would not show it if a whole tensor's gradient were too large.
    """
    loaded, _ = open_single(replace(case, config={}))
    loaded.load(folder)
    alone, _ = open_single(case)
    (expected,), _ = train_single(alone, case, num_steps=1)
    tolerance = case.tolerance
    loss = expected.metrics["actor/loss"]
    assert report.metrics["actor/loss"] == pytest.approx(loss, rel=tolerance)
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=tolerance)
    wanted = first_gradients(alone)
    for name, found in first_gradients(loaded).items():
        bound = tolerance * float(wanted[name].abs().max())
        assert bound > 0
        torch.testing.assert_close(found, wanted[name], rtol=0, atol=bound, msg=name)


def check_outcomes(case: Case, ranks: Sequence[Outcome]) -> None:
    """Compare what the ranks trained with what one process trains."""
    tolerance = case.tolerance
    engine, weights = open_single(case)
    reports, scores = train_single(engine, case)
    for rank in ranks:
        assert rank.reports == ranks[0].reports
    layout = rank_layout(FsdpConfig(**case.config), len(ranks))
    # Ranks that share the tokens of a sequence count their own tokens only.
    uncounted = {BALANCE} if case.config.get("ulysses_sequence_parallel_size", 1) > 1 else set()
    for actual, expected in zip(ranks[0].reports, reports, strict=True):
        compared = {k: v for k, v in expected.metrics.items() if k not in uncounted}
        assert actual.metrics.keys() == expected.metrics.keys()
        assert {name: actual.metrics[name] for name in compared} == pytest.approx(
            compared, abs=tolerance
        )
        assert actual.grad_norm == pytest.approx(expected.grad_norm, rel=tolerance)
        assert actual.learning_rate == expected.learning_rate and not actual.skipped
    found = assembled(part for rank in ranks for part in rank.parts)
    assert found.keys() == weights.keys()
    for name, expected in weights.items():
        is_rounding = name.endswith("qkv.bias") and not case.is_exact
        allowed = max(tolerance, BIAS_TOLERANCE if is_rounding else 0.0)
        assert float((found[name] - expected).abs().max()) < allowed, (name, case)
    one_of_each, size = ranks[:: layout.ranks_per_microbatch], layout.data_parallel
    stages = [one_of_each[i : i + size] for i in range(0, len(one_of_each), size)]
    for index, expected in enumerate(scores):
        group, place = index % size, index // size
        log_probs = stages[-1][group].log_probs[place]
        torch.testing.assert_close(log_probs, expected.score_R, rtol=0, atol=tolerance)
        parts = [stage[group].routes[place] for stage in stages]
        routes = [part for part in parts if part is not None]
        assert bool(routes) == (expected.routes_TLK is not None)
        if expected.routes_TLK is not None:  # rounding may swap a few
            together = torch.cat(routes, 1)
            assert together.shape == expected.routes_TLK.shape
            assert (together == expected.routes_TLK).float().mean() > 0.95
