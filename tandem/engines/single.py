# SPDX-License-Identifier: Apache-2.0
"""Training on one device in this process, and the frozen reference policy.

An update is a sum over micro-batches with global denominators: loss, gradients and metrics do not
depend on the split into micro-batches. A step whose loss or gradient is not finite is skipped. A
copy of the stored weights may compute in a lower precision. Of a model with adapters, "weights" are
the adapters alone. Gradients are then summed, and the optimizer steps, in the precision of the
stored weights, which may be on the device only during that step. There is no autocast, no loss
scaling and no sharding.

Shapes: R response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from tandem.api import Loss, Scores
from tandem.config.schema.optim import OptimConfig
from tandem.engines.checkpoint import (
    OPTIMIZER_FILE,
    SHARDED_FILE,
    fingerprint,
    incomplete,
    read_state,
)
from tandem.engines.gradient_sums import GradientSums
from tandem.engines.offload import OffloadedParameters, on_device
from tandem.engines.optim import PolicyOptimizer, choose_changed, make_schedule
from tandem.engines.shards import unsharded_map
from tandem.engines.steps import Totals, backward, clip, report_step, score
from tandem.engines.streaming import StreamedStep, stream_steps
from tandem.errors import UserError
from tandem.models.adapted import trained_parameters
from tandem.models.adapters import load_adapter
from tandem.models.language_model import LanguageModel, NativeModel
from tandem.models.operators import TORCH
from tandem.models.weights import load_weights
from tandem.types import LossScale, PackedBatch, UpdateReport


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
        """Create an engine that owns ``model``.

        Args:
            compute: a copy of the model in the precision of computation, if that differs.
            offload_optimizer: whether the moments are in host memory between steps.
            offload_weights: whether the weights of ``model`` are, too; requires ``compute``.
        """
        self._model = model
        self._compute = model if compute is None else compute
        self._computed = trained_parameters(self._compute.module)
        self._weights = trained_parameters(model.module)
        is_changed = choose_changed(model)
        self._changed = {name: x for name, x in self._weights.items() if is_changed(name)}
        self._sums: GradientSums | None = None
        if self._compute is not model:
            decoder = self._compute.decoder
            operators = TORCH if decoder is None else decoder.operators
            dtypes = {name: weight.dtype for name, weight in self._weights.items()}
            self._sums = GradientSums(self._computed, dtypes, operators=operators)
        self._offloaded: OffloadedParameters | None = None
        if offload_weights:
            assert self._compute is not model, "the weights of the forward pass cannot be offloaded"
            self._offloaded = OffloadedParameters(self._changed.values())
        self._device = self._compute.lm_head_weight.device
        self._shard_map = unsharded_map(self._weights)
        self._optimizer = PolicyOptimizer(model, config, shard_map=self._shard_map)
        self._offload_optimizer = offload_optimizer
        self._streamed: StreamedStep | None = None
        if offload_optimizer or offload_weights:
            self._streamed = stream_steps(
                self._optimizer,
                device=self._device,
                offloaded=self._offloaded,
                hosts_moments=offload_optimizer,
            )
        if self._streamed is not None and total_training_steps > 0:
            self._streamed.allocate(self._changed)
        self._schedule = make_schedule(config, total_training_steps)
        self._learning_rate = config.lr
        self._clip_norm = config.clip_grad
        self._schedule_step = 0

    def score(self, batches: Sequence[PackedBatch], temperature: float) -> list[Scores]:
        """Return log-probs, or values, of the response tokens of each batch."""
        return [score(self._compute, batch, temperature=temperature) for batch in batches]

    def update(
        self, batches: Sequence[PackedBatch], loss: Loss, *, scale: LossScale, temperature: float
    ) -> UpdateReport:
        """Take one optimizer step over all micro-batches, possibly none.

        Raises:
            torch.OutOfMemoryError: a micro-batch did not fit; weights and optimizer are unchanged.
            UserError: the optimizer's step did not fit.
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
            except torch.OutOfMemoryError as error:  # some weights may have been updated
                raise _out_of_memory() from error
        self._drop_gradients()
        return report

    def _gradients(self) -> dict[str, Tensor]:
        if self._sums is None:
            found = {name: weight.grad for name, weight in self._weights.items()}
        else:
            found = self._sums.totals()
        # Missing gradients become zeros: an optimizer would skip a weight without one.
        return {
            name: torch.zeros_like(weight, device=self._device) if x is None else x
            for name, weight in self._weights.items()
            for x in (found.get(name),)
        }

    def _drop_gradients(self) -> None:
        if self._sums is not None:
            self._sums.drop()
        for weight in self._computed.values():
            weight.grad = None

    def advance_schedule(self) -> None:
        """Advance the learning-rate schedule; called once per training step."""
        self._schedule_step += 1

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder with the stored weights and the optimizer's state."""
        self._model.save(folder)
        state = {
            "model": self._fingerprint(),
            "optimizer": self._optimizer.state_dict(),
            "schedule_step": self._schedule_step,
        }
        try:
            torch.save(state, folder / OPTIMIZER_FILE)
        except RuntimeError as error:  # torch's report of a full disk
            raise OSError(f"{OPTIMIZER_FILE}: {error}") from error

    def load(self, folder: Path) -> None:
        """Restore a checkpoint of this engine, or of any number of ranks, exactly.

        Raises:
            UserError: the checkpoint belongs to another model or optimizer, or is incomplete.
        """
        if (folder / SHARDED_FILE).is_file():
            # Importing torch's distributed checkpoints takes 1 s, and few runs need them here.
            from tandem.engines.sharded_checkpoint import load_sharded

            self._schedule_step = load_sharded(
                folder,
                self._weights,
                optimizer=self._optimizer,
                regions=self._shard_map.regions,
                model=self._fingerprint(),
            )
        else:
            # From a map of the file, moments that rest on the host are read once.
            hosts = self._offload_optimizer
            device = torch.device("cpu") if hosts else self._device
            state = read_state(folder, device, model=self._fingerprint(), mapped=hosts)
            self._optimizer.require_same(state["optimizer"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._schedule_step = state["schedule_step"]
            _load_weights(self._model, folder)
        self._update_compute_weights()

    def _accumulate(
        self, batches: Sequence[PackedBatch], loss: Loss, *, scale: LossScale, temperature: float
    ) -> Totals:
        totals = Totals(torch.zeros((), device=self._device))
        if self._sums is not None:
            self._sums.begin()
        for batch in batches:
            totals.add(
                backward(self._compute, batch, loss=loss, scale=scale, temperature=temperature)
            )
        return totals

    def _step(self, gradients: dict[str, Tensor], *, rate_factor: float) -> None:
        adam, streamed = self._optimizer.alone, self._streamed
        if adam is not None and streamed is not None:
            rate = self._optimizer.rate_of(adam, rate_factor=rate_factor)
            for weights in streamed.parts(self._changed, gradients, rate=rate):
                self._update_compute_weights(weights)
            return
        with on_device(self._offloaded):
            self._optimizer.step(self._weights, gradients, rate_factor=rate_factor)
            if self._offload_optimizer:
                self._optimizer.offload()
            self._update_compute_weights()
        if self._offloaded is not None:
            self._offloaded.wait()

    @torch.no_grad()
    def _update_compute_weights(self, chosen: Mapping[str, Tensor] | None = None) -> None:
        """Copy the stored weights, or some, into the weights of the forward pass, in place."""
        if self._compute is self._model:
            return
        for name, kept in self._weights.items():
            if chosen is None or name in chosen:
                self._computed[name].copy_(kept)

    def _fingerprint(self) -> str:
        decoder = self._model.decoder
        architecture = None if decoder is None else decoder.config
        parameters = (region for (region,) in self._shard_map.regions.values())
        return fingerprint(self._model.family, architecture, parameters=parameters)


class ReferenceModel:
    """An ``api.ReferencePolicy`` on one device, whose weights never change."""

    data_parallel_size = sequence_parallel_size = 1

    def __init__(self, model: LanguageModel, *, offload_weights: bool = False) -> None:
        """Freeze ``model``, which must not share parameters with the trained one.

        Args:
            offload_weights: whether the weights are in host memory between calls of ``score``.
        """
        model.module.requires_grad_(False)
        self._model = model
        self._offloaded: OffloadedParameters | None = None
        if offload_weights:
            self._offloaded = OffloadedParameters(model.module.parameters(), frozen=True)

    def score(self, batches: Sequence[PackedBatch], temperature: float) -> list[Scores]:
        """Return log-probs, or values, of the response tokens of each batch."""
        with on_device(self._offloaded):
            return [score(self._model, batch, temperature=temperature) for batch in batches]


def _out_of_memory() -> UserError:
    return UserError(
        "out of memory",
        rule="the optimizer's step does not fit the device, for any size of micro-batches",
        remedy="Set optimizer_offload=True or optim.moments_dtype=bfloat16, or lower "
        "actor_rollout_ref.rollout.gpu_memory_utilization.",
    )


@torch.no_grad()
def _load_weights(model: LanguageModel, folder: Path) -> None:
    # In place, because other models may share the storage.
    if isinstance(model, NativeModel) and model.config.adapters is not None:
        load_adapter(model.config, folder, slices=model.trained_slices(), key="checkpoint")
        return
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
