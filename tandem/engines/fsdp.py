# SPDX-License-Identifier: Apache-2.0
"""A rank of the training engine of a sharded model.

All ranks make the same calls in the same order, each with its own micro-batches. Loss, gradients
and metrics are sums over all ranks: an update equals the one of ``SingleDeviceEngine`` for any
number of ranks. A step that is not finite on one rank is skipped on all. If one rank runs out of
memory, the run ends, because the other ranks wait for it.

Shapes: R response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.utils import get_total_norm

from tandem.api import Loss, Scores
from tandem.config.schema.optim import OptimConfig
from tandem.engines.adamw import Moments
from tandem.engines.checkpoint import SHARDED_FILE, fingerprint, read_state
from tandem.engines.fsdp_model import FsdpModel, with_idle
from tandem.engines.optim import PolicyOptimizer, make_schedule
from tandem.engines.sharded_checkpoint import load_sharded, read_adapters, save_sharded
from tandem.engines.shards import unsharded_map, view_of
from tandem.engines.steps import (
    Totals,
    clip,
    idle_loss,
    loss_of,
    report_step,
    router_metrics,
)
from tandem.engines.streaming import StreamedStep, stream_steps
from tandem.models.adapters import load_adapter, save_adapter
from tandem.models.decoder import DecoderConfig
from tandem.models.hf import open_transformers_model
from tandem.models.parallel import is_whole, slices_of_rows
from tandem.models.weights import copy_companions, load_slices, write_config
from tandem.types import HeldSlice, LossScale, PackedBatch, UpdateReport


class FsdpEngine:
    """A rank of an ``api.TrainEngine``.

    The argument ``num_rounds`` is the maximum of the ranks' numbers of batches; None if they are
    equal. A rank with fewer batches computes dummy batches in the remaining rounds.
    """

    def __init__(self, model: FsdpModel, config: OptimConfig, *, total_training_steps: int) -> None:
        self._model = model
        self._optimizer = PolicyOptimizer(model.language_model, config, shard_map=model.shard_map)
        self._streamed: StreamedStep | None = None
        settings = model.spec.config
        if settings.optimizer_offload and not settings.offload_policy:
            device = model.spec.device
            self._streamed = stream_steps(self._optimizer, device=device, hosts_moments=True)
        if self._streamed is not None and total_training_steps > 0:
            self._streamed.allocate(self._changed_weights())
        self._schedule = make_schedule(config, total_training_steps)
        self._learning_rate = config.lr
        self._clip_norm = config.clip_grad
        self._schedule_step = 0

    @property
    def data_parallel_size(self) -> int:
        """The number of micro-batches that the ranks compute in parallel."""
        return self._model.spec.layout.data_parallel

    @property
    def sequence_parallel_size(self) -> int:
        """The number of ranks that share the tokens of a micro-batch."""
        return self._model.spec.layout.sequence_parallel

    def score(
        self, batches: Sequence[PackedBatch], temperature: float, *, num_rounds: int | None = None
    ) -> list[Scores]:
        """Return log-probs, or values, of the response tokens of each batch."""
        return self._model.score(batches, temperature=temperature, num_rounds=num_rounds)

    def score_initial(
        self, batches: Sequence[PackedBatch], temperature: float, *, num_rounds: int | None = None
    ) -> list[Scores]:
        """Score as ``score`` does, with the adapters that the run started from."""
        with self._model.initial_adapters():
            return self.score(batches, temperature, num_rounds=num_rounds)

    def update(
        self,
        batches: Sequence[PackedBatch],
        loss: Loss,
        *,
        scale: LossScale,
        temperature: float,
        num_rounds: int | None = None,
    ) -> UpdateReport:
        """Take one optimizer step over the micro-batches of all ranks. All ranks report the same.

        Offloaded weights are onloaded and stay on the device.
        """
        self._model.onload()
        totals = self._accumulate(
            batches, loss, scale=scale, temperature=temperature, num_rounds=num_rounds
        )
        gradients = self._model.gradients()
        self._broadcast_unsplit(gradients)
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
        """Advance the learning-rate schedule; called once per training step."""
        self._schedule_step += 1

    def on_device(self) -> AbstractContextManager[None]:
        """Return a context in which the weights are on the device."""
        return self._model.on_device()

    def held_slices(self) -> list[HeldSlice]:
        """Return this rank's weights: views, valid until weights are moved."""
        return self._model.held_slices()

    def save(self, folder: Path) -> None:
        """Write this rank's part of weights and optimizer into a folder on a shared file system."""
        tower = {} if self._model.folder.start else self._model.frozen_tower()
        save_sharded(
            folder,
            {**self._model.weights(), **tower},
            optimizer=self._optimizer,
            regions={**self._model.shard_map.regions, **unsharded_map(tower).regions},
            model=self._fingerprint(),
            schedule_step=self._schedule_step,
        )
        if self._model.spec.rank == 0:
            source, stored = self._model.folder, self._model.spec.stored
            config = self._model.config
            if source.start is not None:
                assert isinstance(config, DecoderConfig), "only our decoder has adapters"
                save_adapter(
                    config, folder, adapters=read_adapters(folder, config), base=source.path
                )
                return
            write_config(source.hf_config, folder, dtype=stored)
            copy_companions(source.path, folder)

    def load(self, folder: Path) -> None:
        """Restore a checkpoint of any number of ranks, or of ``SingleDeviceEngine``, exactly.

        Raises:
            UserError: the checkpoint belongs to another model or optimizer, or is incomplete.
        """
        if (folder / SHARDED_FILE).is_file():
            self._schedule_step = load_sharded(
                folder,
                self._model.weights(),
                optimizer=self._optimizer,
                regions=self._model.shard_map.regions,
                model=self._fingerprint(),
            )
            self._model.share_embedding()
            return
        state = read_state(folder, torch.device("cpu"), model=self._fingerprint(), mapped=True)
        self._optimizer.require_same(state["optimizer"])
        self._take_moments(state["optimizer"])
        self._schedule_step = state["schedule_step"]
        config, slices = self._model.config, self._model.held_slices()
        with torch.no_grad():
            if not isinstance(config, DecoderConfig):
                self._take_weights(folder, slices)
                return
            load = load_slices if config.adapters is None else load_adapter
            load(config, folder, slices=slices, key="checkpoint")
        self._model.share_embedding()

    def _accumulate(
        self,
        batches: Sequence[PackedBatch],
        loss: Loss,
        *,
        scale: LossScale,
        temperature: float,
        num_rounds: int | None,
    ) -> Totals:
        """Sum loss and metrics over this rank's micro-batches, and gradients over all ranks."""
        model, pipeline = self._model.language_model, self._model.pipeline
        totals = Totals(torch.zeros((), device=self._model.spec.device))
        rounds = with_idle(batches, num_rounds)

        def finish(index: int, h_LD: Tensor) -> Tensor:
            batch, is_own = rounds[index], index < len(batches)
            if is_own:
                totals.add_metrics(router_metrics(model, batch, scale=scale))
            if pipeline is not None and not pipeline.stage.is_last:
                return h_LD
            if not is_own:
                return idle_loss(model, batch, h_LD=h_LD)
            outputs = loss_of(
                model, batch, h_LD=h_LD, loss=loss, scale=scale, temperature=temperature
            )
            totals.add(outputs)
            return outputs.loss

        announce_backward = self._model.announce_backward
        if pipeline is not None:
            pipeline.train(rounds, finish, announce_backward=announce_backward)
            return totals
        for index, batch in enumerate(rounds):
            announce_backward(is_last=index == len(rounds) - 1)
            finish(index, model.hidden(batch)).backward()
        return totals

    def _broadcast_unsplit(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace the gradients of parameters that tensor parallelism does not split by rank 0's.

        Such parameters must stay bitwise equal, but kernels may add in different orders.
        """
        peers = self._model.language_model.layout.tensor
        if peers.size == 1:
            return
        shares = self._model.shard_map.shares
        wholes = [part for name, part in gradients.items() if is_whole(shares[name])]
        flat = torch.cat([part.flatten() for part in wholes]).to(self._model.spec.device)
        distributed.broadcast(flat, group=peers.group, group_src=0)
        parts = flat.split([part.numel() for part in wholes])
        for whole, part in zip(wholes, parts, strict=True):
            whole.copy_(part.view_as(whole))

    def _sum_over_ranks(self, totals: Totals, gradients: Mapping[str, Tensor]) -> _Sums:
        """Sum loss, squared norm and metrics over all ranks, with bitwise equal results on each."""
        shard_map = self._model.shard_map
        norm = get_total_norm([x for name, x in gradients.items() if shard_map.is_owner(name)])
        values = [norm.to(totals.loss.device), totals.loss, *totals.metrics.values()]
        norm, loss, *metrics = torch.stack(values).tolist()
        place = shard_map.place
        reports = place.tensor == place.sequence == 0  # one of the ranks with this micro-batch
        mine = _Sums(
            loss=loss if reports else 0.0,
            grad_norm=norm,
            metrics=dict(zip(totals.metrics, metrics, strict=True)) if reports else {},
        )
        everyone: list[Any] = [mine] * self._model.spec.layout.num_ranks
        distributed.all_gather_object(everyone, mine)
        return _sum(everyone)

    def _step(self, gradients: Mapping[str, Tensor], *, norm: float, rate_factor: float) -> None:
        parts = list(gradients.values())
        clip(parts, parts[0].new_tensor(norm, dtype=torch.float32), limit=self._clip_norm)
        weights, adam, streamed = self._model.weights(), self._optimizer.alone, self._streamed
        if adam is not None and streamed is not None:
            rate = self._optimizer.rate_of(adam, rate_factor=rate_factor)
            for _ in streamed.parts(self._changed_weights(), gradients, rate=rate):
                pass
        else:
            self._optimizer.step(weights, gradients, rate_factor=rate_factor)
            if self._model.spec.config.optimizer_offload:
                self._optimizer.offload()
        self._model.share_embedding()

    def _changed_weights(self) -> dict[str, Tensor]:
        is_changed = self._model.config.is_changed
        return {name: x for name, x in self._model.weights().items() if is_changed(name)}

    def _take_weights(self, folder: Path, slices: Sequence[HeldSlice]) -> None:
        """Copy this rank's part of the weights that one process wrote with transformers."""
        saved = open_transformers_model(
            folder,
            dtype=self._model.spec.stored,
            trust_remote_code=self._model.folder.trust_remote_code,
            random_seed=None,
        )
        whole = dict(saved.module.named_parameters())
        for held in slices:
            held.tensor.copy_(view_of(whole[held.spec.name], held.spec))

    def _take_moments(self, state: Mapping[str, Moments]) -> None:
        """Copy this rank's part of the moments of unsharded parameters."""
        if not any(state.values()):
            self._optimizer.load_state_dict(state)
            return
        self._optimizer.allocate(self._model.weights())
        optimizer = self._optimizer
        for kind, moments in optimizer.state_dict().items():
            for moment, parts in moments.items():
                whole_of = dict(zip(optimizer.every_member[kind], state[kind][moment], strict=True))
                for name, part in zip(optimizer.members[kind], parts, strict=True):
                    self._copy_part(name, part, whole=whole_of[name])

    def _copy_part(self, name: str, part: Tensor, *, whole: Tensor) -> None:
        if not part.dim():
            part.copy_(whole)
            return
        for held in slices_of_rows(self._model.shard_map.regions[name], part):
            held.tensor.copy_(view_of(whole, held.spec))

    def _fingerprint(self) -> str:
        config = self._model.config
        parameters = (regions[0] for regions in self._model.shard_map.shares.values())
        return fingerprint(
            self._model.language_model.family,
            config if isinstance(config, DecoderConfig) else None,
            parameters=parameters,
        )


@dataclass(frozen=True, slots=True)
class _Sums:
    """Loss, gradient norm and metrics of one rank, or of all ranks together."""

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
