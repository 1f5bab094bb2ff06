# SPDX-License-Identifier: Apache-2.0
"""Training on one device in this process, and the frozen reference policy.

An update is a sum over micro-batches with global denominators, so that loss, gradient and metrics
do not depend on how the mini-batch was cut. A step whose loss or gradient is not finite is not
taken. Weights are kept in one precision and may be computed with in a lower one: gradients are then
summed up and the optimizer steps in the precision they are kept in. No autocast, no loss scaling,
no sharding.

Shapes: T packed tokens, R response tokens, D hidden.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError
from torch import Tensor

from tandem.api import Loss
from tandem.config.optim import OptimConfig
from tandem.engines.optim import PolicyOptimizer, make_schedule
from tandem.errors import UserError
from tandem.models.language_model import LanguageModel, score_batch
from tandem.models.logprob import TokenLogProbs
from tandem.models.weights import load_weights
from tandem.types import LossColumns, LossInputs, LossScale, PackedBatch, UpdateReport

logger = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.pt"


class SingleDeviceEngine:
    """``api.TrainEngine`` on the device of ``model``."""

    def __init__(
        self,
        model: LanguageModel,
        config: OptimConfig,
        *,
        total_training_steps: int,
        compute: LanguageModel | None = None,
        offload_optimizer: bool = False,
    ) -> None:
        """Take over ``model``.

        Args:
            compute: a copy of it in the precision to compute in, if another.
            offload_optimizer: the optimizer's state rests in the host's memory between steps.
        """
        self._model = model
        self._compute = model if compute is None else compute
        self._computed = [p for p in self._compute.module.parameters() if p.requires_grad]
        self._parameters = [p for p in model.module.parameters() if p.requires_grad]
        self._optimizer = PolicyOptimizer(model, config, offload=offload_optimizer)
        self._schedule = make_schedule(config, total_training_steps)
        self._learning_rate = config.lr
        self._clip_norm = config.clip_grad
        self._schedule_step = 0

    def log_probs(self, batches: Sequence[PackedBatch], temperature: float) -> list[Tensor]:
        """Log-probs of the response tokens, fp32 (R,) a batch, on the CPU."""
        return score(self._compute, batches, temperature=temperature)

    def update(
        self, batches: Sequence[PackedBatch], loss: Loss, *, scale: LossScale, temperature: float
    ) -> UpdateReport:
        """One optimizer step over all micro-batches. Without any, the gradient is zero.

        Running out of memory (torch.OutOfMemoryError) leaves everything as it was.
        """
        try:
            total, metrics = self._accumulate(batches, loss, scale=scale, temperature=temperature)
        except torch.OutOfMemoryError:
            self._drop_gradients()
            raise
        gradients = [self._gradient(parameter) for parameter in self._parameters]
        norm = torch.nn.utils.get_total_norm(gradients)
        numbers = torch.stack([total, norm, *metrics.values()]).tolist()
        factor = self._schedule.factor(self._schedule_step)
        report = UpdateReport(
            metrics=dict(zip(metrics, numbers[2:], strict=True)),
            grad_norm=numbers[1],
            learning_rate=self._learning_rate * factor,
            skipped=not all(map(math.isfinite, numbers[:2])),
        )
        if report.skipped:
            logger.warning("update skipped: loss %s, gradient norm %s", *numbers[:2])
        else:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._clip_norm, norm)
            self._optimizer.step(factor)
            self._refresh()
        self._drop_gradients()
        return report

    def _drop_gradients(self) -> None:
        for parameter in (*self._parameters, *self._computed):
            parameter.grad = None

    def advance_schedule(self) -> None:
        """Step the learning-rate schedule; called once a training step."""
        self._schedule_step += 1

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder with the weights as they are, and the optimizer beside it."""
        self._model.save(folder)
        state = {
            "model": fingerprint(self._model),
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
        state = self._read_state(folder)
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule_step = state["schedule_step"]
        _load_weights(self._model, folder)
        self._refresh()

    def export(self, folder: Path) -> None:
        """Write a Hugging Face model folder."""
        self._model.save(folder)

    def _accumulate(
        self, batches: Sequence[PackedBatch], loss: Loss, *, scale: LossScale, temperature: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add up gradients, loss and metrics of all micro-batches."""
        total = self._parameters[0].new_zeros((), dtype=torch.float32)
        metrics: dict[str, Tensor] = {}
        for batch in batches:
            scores = score_batch(
                self._compute, batch, temperature=temperature, with_entropy=loss.needs_entropy
            )
            outputs = loss(_loss_inputs(batch, scores, scale=scale))
            outputs.loss.backward()
            self._collect_gradients()
            total = total + outputs.loss.detach()
            for name, value in outputs.metrics.items():
                metrics[name] = metrics[name] + value if name in metrics else value
        return total, metrics

    @torch.no_grad()
    def _collect_gradients(self) -> None:
        """Add what a micro-batch left in the lower precision to the gradients that are kept."""
        if self._compute is self._model:
            return
        for kept, computed in zip(self._parameters, self._computed, strict=True):
            if computed.grad is not None:
                self._gradient(kept).add_(computed.grad)
            computed.grad = None

    @torch.no_grad()
    def _refresh(self) -> None:
        """Round the weights into those that are computed with, in place."""
        if self._compute is not self._model:
            for kept, computed in zip(self._parameters, self._computed, strict=True):
                computed.copy_(kept)

    def _gradient(self, parameter: torch.nn.Parameter) -> Tensor:
        """Its gradient, zero if absent: optimizers would skip a parameter without one."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def _read_state(self, folder: Path) -> Mapping[str, Any]:
        path = folder / OPTIMIZER_FILE
        if not is_zipfile(path):  # what torch writes, and what a file cut short no longer is
            raise _incomplete(folder, f"it has no complete {OPTIMIZER_FILE}")
        try:
            state = torch.load(path, map_location=self._parameters[0].device, weights_only=True)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            cause = " ".join(str(error).split())[:120]
            raise _incomplete(folder, f"{OPTIMIZER_FILE} cannot be read ({cause})") from error
        if state["model"] != fingerprint(self._model):
            raise UserError(
                f"checkpoint={str(folder)!r}: it belongs to another model. "
                "Set actor_rollout_ref.model.path to the one it was trained from, "
                "or trainer.resume_mode=disable."
            )
        return state


class ReferenceModel:
    """``api.ReferencePolicy``: a model that is scored with and never changed."""

    def __init__(self, model: LanguageModel) -> None:
        """Freezes ``model``, which must not share parameters with the trained one."""
        model.module.requires_grad_(False)
        self._model = model

    def log_probs(self, batches: Sequence[PackedBatch], temperature: float) -> list[Tensor]:
        """Log-probs of the response tokens, fp32 (R,) a batch, on the CPU."""
        return score(self._model, batches, temperature=temperature)


@torch.no_grad()
def score(
    model: LanguageModel, batches: Sequence[PackedBatch], *, temperature: float
) -> list[Tensor]:
    """Log-probs of the response tokens of each batch, fp32 (R,), on the CPU."""
    return [
        score_batch(model, batch, temperature=temperature, with_entropy=False).logp_R.cpu()
        for batch in batches
    ]


def fingerprint(model: LanguageModel) -> str:
    """Tells models apart by architecture and by names, shapes and types of parameters."""
    parameters = [
        (name, tuple(parameter.shape), str(parameter.dtype))
        for name, parameter in model.module.named_parameters()
    ]
    architecture = None if model.decoder is None else model.decoder.config
    return hashlib.sha256(repr((model.family, architecture, parameters)).encode()).hexdigest()


def _loss_inputs(batch: PackedBatch, scores: TokenLogProbs, *, scale: LossScale) -> LossInputs:
    device = scores.logp_R.device
    return LossInputs(
        logp_R=scores.logp_R,
        entropy_R=scores.entropy_R,
        sequence_R=batch.sequence_R.to(device),
        num_sequences=batch.num_sequences,
        columns=_columns_on(batch.columns, device),
        scale=scale,
    )


def _columns_on(columns: LossColumns | None, device: torch.device) -> LossColumns | None:
    if columns is None:
        return None
    old, ref = columns.old_logp_R, columns.ref_logp_R
    return replace(
        columns,
        advantages_R=columns.advantages_R.to(device),
        old_logp_R=None if old is None else old.to(device),
        ref_logp_R=None if ref is None else ref.to(device),
    )


def _incomplete(folder: Path, reason: str) -> UserError:
    return UserError(
        f"checkpoint={str(folder)!r}: {reason}. "
        "Resume from a complete checkpoint or set trainer.resume_mode=disable."
    )


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
        raise _incomplete(folder, f"its weights cannot be read ({error})") from error
    for name, parameter in restored.named_parameters():
        parameters[name].copy_(parameter)
