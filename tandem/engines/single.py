# SPDX-License-Identifier: Apache-2.0
"""Training on one device in this process, and the frozen reference policy.

An update is a sum over micro-batches with global denominators, so that loss, gradient and metrics
do not depend on how the mini-batch was cut. A step whose loss or gradient is not finite is not
taken. Weights are kept in one precision and may be computed with in a lower one: gradients are then
summed up and the optimizer steps in the precision they are kept in; only then need the kept weights
be on the device. No autocast, no loss scaling, no sharding.

Shapes: T packed tokens, R response tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from tandem.api import Loss
from tandem.config.schema.optim import OptimConfig
from tandem.engines.checkpoint import (
    OPTIMIZER_FILE,
    SHARDED_FILE,
    fingerprint,
    incomplete,
    read_state,
)
from tandem.engines.optim import PolicyOptimizer, make_schedule
from tandem.engines.resting import RestingParameters
from tandem.engines.sharded_access import restore
from tandem.engines.slices import whole_holding
from tandem.engines.steps import Totals, backward, clip, report_step, score
from tandem.errors import UserError
from tandem.models.language_model import LanguageModel
from tandem.models.weights import load_weights
from tandem.types import LossScale, PackedBatch, UpdateReport

_NO_ROOM_TO_STEP = (
    "out of memory: the optimizer's step does not fit the device, whatever the micro-batches. Set "
    "optimizer_offload=True or optim.moments_dtype=bfloat16, or lower "
    "actor_rollout_ref.rollout.gpu_memory_utilization."
)


class SingleDeviceEngine:
    """``api.TrainEngine`` on the device of ``model``."""

    data_parallel_size = sequence_parallel_size = 1

    def __init__(
        self,
        model: LanguageModel,
        config: OptimConfig,
        *,
        total_training_steps: int,
        compute: LanguageModel | None = None,
        offload_optimizer: bool = False,
        offload_weights: bool = False,
    ) -> None:
        """Take over ``model``.

        Args:
            compute: a copy of it in the precision to compute in, if another.
            offload_optimizer: the optimizer's state rests in the host's memory between steps.
            offload_weights: so do the weights of ``model``, which then is not what computes.
        """
        self._model = model
        self._compute = model if compute is None else compute
        self._computed = list(self._compute.module.parameters())
        self._weights = dict(model.module.named_parameters())
        self._sums: dict[str, Tensor] = {}
        self._resting: RestingParameters | None = None
        if offload_weights:
            assert self._compute is not model, "weights that are computed with cannot rest"
            self._resting = RestingParameters(self._weights.values())
            self._resting.rest()
        self._device = self._compute.lm_head_weight.device
        self._holding = whole_holding(self._weights)
        self._optimizer = PolicyOptimizer(model, config, holding=self._holding)
        self._offload_optimizer = offload_optimizer
        self._schedule = make_schedule(config, total_training_steps)
        self._learning_rate = config.lr
        self._clip_norm = config.clip_grad
        self._schedule_step = 0

    def score(self, batches: Sequence[PackedBatch], temperature: float) -> list[Tensor]:
        """What the model says of the response tokens, fp32 (R,) a batch, on the CPU."""
        return [score(self._compute, batch, temperature=temperature) for batch in batches]

    def update(
        self, batches: Sequence[PackedBatch], loss: Loss, *, scale: LossScale, temperature: float
    ) -> UpdateReport:
        """One optimizer step over all micro-batches. Without any, the gradient is zero.

        Running out of memory with the micro-batches (torch.OutOfMemoryError) leaves everything as
        it was.

        Raises:
            UserError: the optimizer ran out of memory.
        """
        try:
            totals = self._accumulate(batches, loss, scale=scale, temperature=temperature)
            gradients = self._gradients()
            norm = torch.nn.utils.get_total_norm(list(gradients.values()))
        except torch.OutOfMemoryError:
            self._drop_gradients()
            raise
        numbers = torch.stack([totals.loss, norm, *totals.metrics.values()]).tolist()
        factor = self._schedule.factor(self._schedule_step)
        report = report_step(
            numbers[0],
            numbers[1],
            metrics=dict(zip(totals.metrics, numbers[2:], strict=True)),
            rate=self._learning_rate * factor,
        )
        if not report.skipped:
            try:
                clip(list(gradients.values()), norm, limit=self._clip_norm)
                self._step(gradients, rate_factor=factor)
            except torch.OutOfMemoryError as error:  # part of the weights may have been stepped
                raise UserError(_NO_ROOM_TO_STEP) from error
        self._drop_gradients()
        return report

    def _gradients(self) -> dict[str, Tensor]:
        """Of all weights, zero where there is none: optimizers would skip a weight without one."""
        if self._compute is self._model:
            found = {name: weight.grad for name, weight in self._weights.items()}
        else:
            found = {name: self._sums.get(name) for name in self._weights}
        return {
            name: torch.zeros_like(self._weights[name], device=self._device) if x is None else x
            for name, x in found.items()
        }

    def _drop_gradients(self) -> None:
        self._sums = {}
        for parameter in self._computed:
            parameter.grad = None

    def advance_schedule(self) -> None:
        """Step the learning-rate schedule; called once a training step."""
        self._schedule_step += 1

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder with the weights as they are, and the optimizer beside it."""
        self._model.save(folder)
        state = {
            "model": self._fingerprint(),
            "optimizer": self._optimizer.state_dict(),
            "schedule_step": self._schedule_step,
        }
        try:
            torch.save(state, folder / OPTIMIZER_FILE)
        except RuntimeError as error:  # how torch reports a disk that is full
            raise OSError(f"{OPTIMIZER_FILE}: {error}") from error

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote, bit by bit.

        Raises:
            UserError: it belongs to another model or optimizer, or is incomplete.
        """
        if (folder / SHARDED_FILE).is_file():
            self._schedule_step = restore(
                folder,
                self._weights,
                optimizer=self._optimizer,
                model=self._fingerprint(),
                boxes=self._holding.boxes,
            )
        else:
            state = read_state(folder, self._device, model=self._fingerprint())
            self._optimizer.require_same(state["optimizer"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._schedule_step = state["schedule_step"]
            _load_weights(self._model, folder)
        self._refresh()

    def _accumulate(
        self, batches: Sequence[PackedBatch], loss: Loss, *, scale: LossScale, temperature: float
    ) -> Totals:
        """Add up gradients, loss and metrics of all micro-batches."""
        totals = Totals(torch.zeros((), device=self._device))
        for batch in batches:
            totals.add(
                backward(self._compute, batch, loss=loss, scale=scale, temperature=temperature)
            )
            self._collect_gradients()
        return totals

    def _step(self, gradients: dict[str, Tensor], *, rate_factor: float) -> None:
        if self._resting is not None:
            self._resting.wake()
        self._optimizer.step(self._weights, gradients, rate_factor=rate_factor)
        if self._offload_optimizer:
            self._optimizer.rest()
        self._refresh()
        if self._resting is not None:
            self._resting.rest()

    @torch.no_grad()
    def _collect_gradients(self) -> None:
        """Add what a micro-batch left in the lower precision to the gradients that are kept."""
        if self._compute is self._model:
            return
        for (name, kept), computed in zip(self._weights.items(), self._computed, strict=True):
            if computed.grad is None:
                continue
            if name in self._sums:
                self._sums[name].add_(computed.grad)
            else:
                self._sums[name] = computed.grad.to(kept.dtype)
            computed.grad = None

    @torch.no_grad()
    def _refresh(self) -> None:
        """Round the weights into those that are computed with, in place."""
        if self._compute is not self._model:
            for kept, computed in zip(self._weights.values(), self._computed, strict=True):
                computed.copy_(kept)

    def _fingerprint(self) -> str:
        decoder = self._model.decoder
        architecture = None if decoder is None else decoder.config
        boxes = (box for (box,) in self._holding.boxes.values())
        return fingerprint(self._model.family, architecture, parameters=boxes)


class ReferenceModel:
    """``api.ReferencePolicy``: a model that is scored with and never changed."""

    data_parallel_size = sequence_parallel_size = 1

    def __init__(self, model: LanguageModel, *, offload_weights: bool = False) -> None:
        """Freezes ``model``, which must not share parameters with the trained one.

        Args:
            offload_weights: they rest in the host's memory while nothing is scored.
        """
        model.module.requires_grad_(False)
        self._model = model
        self._resting: RestingParameters | None = None
        if offload_weights:
            self._resting = RestingParameters(model.module.parameters(), frozen=True)
            self._resting.rest()

    def score(self, batches: Sequence[PackedBatch], temperature: float) -> list[Tensor]:
        """Log-probs of the response tokens, fp32 (R,) a batch, on the CPU."""
        if self._resting is not None:
            self._resting.wake()
        try:
            return [score(self._model, batch, temperature=temperature) for batch in batches]
        finally:
            if self._resting is not None:
                self._resting.rest()


@torch.no_grad()
def _load_weights(model: LanguageModel, folder: Path) -> None:
    """Into the parameters in place, so that whoever shares their storage sees them."""
    if model.decoder is not None:
        load_weights(model.decoder, folder, key="checkpoint")
        return
    module: Any = model.module
    parameters = dict(module.named_parameters())
    dtype = next(iter(parameters.values())).dtype
    try:
        restored = type(module).from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise incomplete(folder, f"its weights cannot be read ({error})") from error
    for name, parameter in restored.named_parameters():
        parameters[name].copy_(parameter)
