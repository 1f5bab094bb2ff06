# SPDX-License-Identifier: Apache-2.0
"""Training a model that is spread over the ranks of a pool: one rank of the engine.

All ranks make the same calls in the same order, each with its own micro-batches. Loss, gradients
and metrics are sums over all of them, so that an update is that of ``SingleDeviceEngine`` whatever
the number of ranks: a step that is not finite on one rank is taken on none. Running out of memory
on one rank ends the run, because the others then wait in vain.

Shapes: R response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.utils import get_total_norm

from tandem.api import Loss
from tandem.config.schema.optim import OptimConfig
from tandem.engines.adamw import Moments
from tandem.engines.checkpoint import SHARDED_FILE, fingerprint, read_state
from tandem.engines.optim import PolicyOptimizer, make_schedule
from tandem.engines.sharded import restore, store
from tandem.engines.sharded_model import ShardedModel, idle_batch
from tandem.engines.slices import in_whole
from tandem.engines.steps import Totals, backward, clip, report_step
from tandem.models.language_model import score_batch
from tandem.models.parallel import is_whole, slices_of_rows
from tandem.models.weights import copy_companions, load_slices, write_config
from tandem.types import HeldSlice, LossScale, PackedBatch, UpdateReport


class FsdpEngine:
    """One rank of an ``api.TrainEngine``.

    Where a method takes ``num_rounds`` it is the same on all ranks, and at least the number of
    batches of each; a rank with fewer computes without effect in the other rounds. None means that
    all ranks have as many batches as this one.
    """

    def __init__(
        self, model: ShardedModel, config: OptimConfig, *, total_training_steps: int
    ) -> None:
        """Take over ``model``."""
        self._model = model
        self._optimizer = PolicyOptimizer(model.language_model, config, holding=model.holding)
        self._schedule = make_schedule(config, total_training_steps)
        self._learning_rate = config.lr
        self._clip_norm = config.clip_grad
        self._schedule_step = 0

    @property
    def data_parallel_size(self) -> int:
        """Micro-batches computed at the same time by all ranks together."""
        return self._model.sharding.layout.data_parallel

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share the tokens of a micro-batch."""
        return self._model.sharding.layout.sequence_parallel

    def score(
        self, batches: Sequence[PackedBatch], temperature: float, *, num_rounds: int | None = None
    ) -> list[Tensor]:
        """What the model says of the response tokens of this rank's batches, fp32 (R,) each, on the
        CPU.
        """
        return self._model.score(batches, temperature=temperature, num_rounds=num_rounds)

    def update(
        self,
        batches: Sequence[PackedBatch],
        loss: Loss,
        *,
        scale: LossScale,
        temperature: float,
        num_rounds: int | None = None,
    ) -> UpdateReport:
        """One optimizer step over the micro-batches of all ranks, which all report the same."""
        self._model.wake()
        totals = self._accumulate(
            batches, loss, scale=scale, temperature=temperature, num_rounds=num_rounds
        )
        gradients = self._model.gradients()
        self._agree_on_whole(gradients)
        sums = self._sum_over_ranks(totals, gradients)
        factor = self._schedule.factor(self._schedule_step)
        report = report_step(
            sums.loss, sums.grad_norm, metrics=sums.metrics, rate=self._learning_rate * factor
        )
        if not report.skipped:
            self._step(gradients, norm=report.grad_norm, rate_factor=factor)
        self._model.drop_gradients()
        return report

    def advance_schedule(self) -> None:
        """Step the learning-rate schedule; called once a training step."""
        self._schedule_step += 1

    def rest(self) -> None:
        """Move the weights to the host's memory if the config asks for it, until the next call that
        computes with them."""
        self._model.rest()

    def wake(self) -> None:
        """Undo ``rest``, as ``score`` and ``update`` do by themselves."""
        self._model.wake()

    def held_slices(self) -> list[HeldSlice]:
        """This rank's weights, in use: valid until ``rest`` or ``wake``."""
        return self._model.held_slices()

    def save(self, folder: Path) -> None:
        """Write this rank's part of weights and optimizer into a folder that all ranks share."""
        store(
            folder,
            self._model.weights(),
            optimizer=self._optimizer,
            boxes=self._model.holding.boxes,
            model=self._fingerprint(),
            schedule_step=self._schedule_step,
        )
        if self._model.sharding.rank == 0:
            source, stored = self._model.folder, self._model.sharding.stored
            write_config(source.hf_config, folder, dtype=stored)
            copy_companions(source.path, folder)

    def load(self, folder: Path) -> None:
        """Restore what ``save``, here or on any number of ranks, or ``SingleDeviceEngine.save``
        wrote, bit by bit.

        Raises:
            UserError: it belongs to another model or optimizer, or is incomplete.
        """
        weights, boxes = self._model.weights(), self._model.holding.boxes
        if (folder / SHARDED_FILE).is_file():
            self._schedule_step = restore(
                folder, weights, optimizer=self._optimizer, model=self._fingerprint(), boxes=boxes
            )
            return
        state = read_state(folder, torch.device("cpu"), model=self._fingerprint(), mapped=True)
        self._optimizer.require_same(state["optimizer"])
        self._take_moments(state["optimizer"])
        self._schedule_step = state["schedule_step"]
        config = self._model.language_model.config
        with torch.no_grad():
            load_slices(config, folder, slices=self._model.held_slices(), key="checkpoint")

    def _accumulate(
        self,
        batches: Sequence[PackedBatch],
        loss: Loss,
        *,
        scale: LossScale,
        temperature: float,
        num_rounds: int | None,
    ) -> Totals:
        """Add up loss and metrics of this rank's micro-batches, and the gradients of all ranks'."""
        model = self._model.language_model
        totals = Totals(torch.zeros((), device=self._model.sharding.device))
        rounds = len(batches) if num_rounds is None else num_rounds
        for index in range(rounds):
            self._model.announce_backward(is_last=index == rounds - 1)
            if index < len(batches):
                batch = batches[index]
                totals.add(backward(model, batch, loss=loss, scale=scale, temperature=temperature))
            else:
                scores = score_batch(model, idle_batch(), temperature=1.0, with_entropy=False)
                (scores.score_R.sum() * 0.0).backward()
        return totals

    def _agree_on_whole(self, gradients: Mapping[str, Tensor]) -> None:
        """What every tensor-parallel rank holds whole must stay the same bit by bit, but kernels
        need not add in the same order on all of them: they take the first one's gradients."""
        peers = self._model.language_model.layout.tensor
        if peers.size == 1:
            return
        shares = self._model.holding.shares
        wholes = [part for name, part in gradients.items() if is_whole(shares[name])]
        flat = torch.cat([part.flatten() for part in wholes]).to(self._model.sharding.device)
        distributed.broadcast(flat, group=peers.group, group_src=0)
        parts = flat.split([part.numel() for part in wholes])
        for whole, part in zip(wholes, parts, strict=True):
            whole.copy_(part.view_as(whole))

    def _sum_over_ranks(self, totals: Totals, gradients: Mapping[str, Tensor]) -> _Sums:
        """Each rank adds the same numbers in the same order, so that all decide alike."""
        holding = self._model.holding
        norm = get_total_norm([part for name, part in gradients.items() if holding.counts(name)])
        values = [norm.to(totals.loss.device), totals.loss, *totals.metrics.values()]
        norm, loss, *metrics = torch.stack(values).tolist()
        place = holding.place
        speaks = place.tensor == place.sequence == 0  # of those that compute the same micro-batch
        mine = _Sums(
            loss=loss if speaks else 0.0,
            grad_norm=norm,
            metrics=dict(zip(totals.metrics, metrics, strict=True)) if speaks else {},
        )
        everyone: list[Any] = [mine] * self._model.sharding.layout.num_ranks
        distributed.all_gather_object(everyone, mine)
        return _sum(everyone)

    def _step(self, gradients: Mapping[str, Tensor], *, norm: float, rate_factor: float) -> None:
        parts = list(gradients.values())
        clip(parts, parts[0].new_tensor(norm, dtype=torch.float32), limit=self._clip_norm)
        self._optimizer.step(self._model.weights(), gradients, rate_factor=rate_factor)
        if self._model.sharding.config.optimizer_offload:
            self._optimizer.rest()

    def _take_moments(self, state: Mapping[str, Moments]) -> None:
        """This rank's part of moments of whole parameters."""
        if not any(state.values()):
            self._optimizer.load_state_dict(state)
            return
        self._optimizer.allocate(self._model.weights())
        for kind, moments in self._optimizer.state_dict().items():
            for moment, parts in moments.items():
                members = zip(
                    self._optimizer.members[kind], parts, state[kind][moment], strict=True
                )
                for name, part, whole in members:
                    self._copy_part(name, part, whole=whole)

    def _copy_part(self, name: str, part: Tensor, *, whole: Tensor) -> None:
        if not part.dim():
            part.copy_(whole)
            return
        for held in slices_of_rows(self._model.holding.boxes[name], part):
            held.tensor.copy_(in_whole(whole, held.spec))

    def _fingerprint(self) -> str:
        model = self._model.language_model
        boxes = (boxes[0] for boxes in self._model.holding.shares.values())
        return fingerprint(model.family, model.config, parameters=boxes)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of one rank, or over all of them."""

    loss: float
    grad_norm: float
    metrics: Mapping[str, float]


def _sum(parts: Sequence[_Sums]) -> _Sums:
    metrics: dict[str, float] = {}
    for part in parts:
        for name, value in part.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value
    return _Sums(
        loss=sum(part.loss for part in parts),
        grad_norm=math.hypot(*(part.grad_norm for part in parts)),
        metrics=metrics,
    )
