# SPDX-License-Identifier: Apache-2.0
"""A process of a pool: the engines of the pool's tasks, and its end of the weight link.

It is built in the process itself from a ``WorkerJob``. Trainer and rollout share no storage but
that of experts that both divide alike (``shared_experts``), because the trainer's other weights are
sharded over all ranks. The link sends them to the rollout, and to a policy that scores on separate
devices. Except for generation, all ranks of a pool make the same calls.
"""

from __future__ import annotations

import gc
import os
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.api import Capacity, Loss, Scores
from tandem.comm.flagcx_plugin import pool_library
from tandem.comm.world import WorldPlace, consecutive_group, join_world
from tandem.config.derived.pools import CRITIC, REWARD_MODEL
from tandem.engines.fsdp import FsdpEngine
from tandem.engines.fsdp_model import FsdpModel
from tandem.engines.steps import score
from tandem.errors import UserError
from tandem.models.language_model import NativeModel
from tandem.models.parallel import WHOLE, ParallelLayout, Peers
from tandem.platforms.place import WorkerPlace
from tandem.platforms.record import Platform
from tandem.rollout.factory import EngineSpec, build_engine
from tandem.types import (
    Completion,
    GenerationRequest,
    LossScale,
    PackedBatch,
    UpdateReport,
)
from tandem.weight_sync.handshake import LinkTensors, nothing
from tandem.weight_sync.link import WeightLink, open_link
from tandem.workers.generation import LinkedRollout
from tandem.workers.job import PolicySpec, RolloutSpec, TrainerSpec, WorkerJob
from tandem.workers.linking import link_place
from tandem.workers.parts import (
    changing_slices,
    open_policy_part,
    open_received,
    received_folder,
    require_same_base,
)
from tandem.workers.policies import compute_dtype, open_initial
from tandem.workers.remote import PeakMemory
from tandem.workers.shared_experts import shared_experts


class Worker:
    """A process of a pool. ``remote`` calls its methods by name."""

    def __init__(self, job: WorkerJob, place: WorkerPlace) -> None:
        """Join the pool and load its models. Collective over the pool.

        A worker that can be replaced joins no other, because they would not wait for its successor.

        Raises:
            UserError: a model cannot be loaded, or not sharded over the pool.
        """
        self._place = place
        self._timeout_s = job.timeout_s
        self._platform = job.platform
        self._device = _device(self._platform, place)
        self._store = job.store.connect(timeout_s=job.timeout_s)
        is_alone = job.is_replaceable
        join_world(
            self._store,
            WorldPlace(
                name=uuid.uuid4().hex if is_alone else place.pool,
                rank=0 if is_alone else place.rank,
                size=1 if is_alone else place.size,
                device=self._device,
                library=pool_library(self._platform, wants_flagcx=place.wants_flagcx),
                timeout_s=job.timeout_s,
            ),
        )
        if job.base is not None:
            require_same_base(job.base, self._store, host=socket.gethostname())
        self._trainer, self._trained = self._open_trainer(job.trainer)
        self._critic, _ = self._open_trainer(job.critic)
        self._frozen = {
            task: self._open_policy(spec, frozen=True)
            for task, spec in (
                ("logp", job.scorer),
                ("ref_logp", job.reference),
                (REWARD_MODEL, job.reward_model),
            )
            if spec is not None
        }
        self._rollout = self._open_rollout(job.rollout)
        self._answers = job.rollout is None or job.rollout.config.answers(place.rank)
        self._initial: NativeModel | None = None
        if job.rollout is not None and self._rollout is not None and job.rollout.is_reference:
            self._initial = open_initial(job.rollout.policy, self._rollout.policy)
        self._sleeps = (
            job.rollout is not None
            and self._trainer is not None
            and job.rollout.config.free_cache_engine
        )
        self._link_spec = job.link
        self._link: WeightLink | None = None
        gc.freeze()  # these objects stay: the collector can skip them

    def describe(self) -> dict[str, Any]:
        """Return where this process runs, and on which device."""
        return {
            "pool": self._place.pool,
            "rank": self._place.rank,
            "node": self._place.node,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "platform": self._platform.name,
            "device": f"{self._platform.name}:{self._place.physical_id or self._place.rank}",
            "chip": self._platform.device_name(),
        }

    def score(
        self, batches: Sequence[PackedBatch], task: str, *, temperature: float, num_rounds: int
    ) -> list[Scores]:
        """Score this rank's micro-batches with the model that does ``task``."""
        self._let_rollout_sleep()
        if task == "actor-train":
            return self._training(task).score(batches, temperature, num_rounds=num_rounds)
        if task == CRITIC:
            critic = self._training(task)
            with critic.on_device():
                return critic.score(batches, temperature, num_rounds=num_rounds)
        if task == "generate":
            policy = self._generating().policy
            with self._whole_version():
                return [score(policy, batch, temperature=temperature) for batch in batches]
        if self._initial is not None and task == "ref_logp":
            return [score(self._initial, batch, temperature=temperature) for batch in batches]
        if task == "ref_logp" and task not in self._frozen:
            trainer = self._training("actor-train")
            return trainer.score_initial(batches, temperature, num_rounds=num_rounds)
        frozen = self._frozen[task]
        whole = self._whole_version() if task == "logp" else nullcontext()
        with frozen.on_device(), whole:
            return frozen.score(batches, temperature=temperature, num_rounds=num_rounds)

    def update(
        self,
        batches: Sequence[PackedBatch],
        task: str,
        *,
        loss: Loss,
        scale: LossScale,
        temperature: float,
        num_rounds: int,
    ) -> tuple[UpdateReport, PeakMemory]:
        """Take one optimizer step of the model that does ``task``.

        Returns:
            its report, and the peak memory of the device.
        """
        self._let_rollout_sleep()
        report = self._training(task).update(
            batches, loss, scale=scale, temperature=temperature, num_rounds=num_rounds
        )
        return report, PeakMemory.of(self._platform)

    def advance_schedule(self, task: str) -> None:
        """Advance the learning-rate schedule, and offload a critic's weights."""
        engine = self._training(task)
        with on_device([engine if task == CRITIC else None]):
            engine.advance_schedule()

    def save(self, task: str, folder: Path) -> None:
        """Save this rank's part of a model. Raise UserError if it cannot be written."""
        try:
            self._training(task).save(folder)
        except OSError as error:
            raise UserError(
                "trainer.default_local_dir",
                str(folder.parents[1]),
                rule=f"{self._place.pool} rank {self._place.rank} could not write its part of the "
                f"checkpoint ({error.strerror or error}); earlier ones are kept",
                remedy="Free some space, or choose a folder that all nodes share, and run the same "
                "command again to resume.",
            ) from error

    def load(self, task: str, folder: Path) -> None:
        """Restore a model that ``save`` wrote."""
        self._training(task).load(folder)

    def capacity(self) -> Capacity:
        """Return the capacity of the rollout engine."""
        return self._generating().engine.capacity

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        self._generating().engine.add(requests)

    def forget(self, sample_ids: Sequence[int]) -> None:
        """Free what the rollout engine keeps of samples that have ended."""
        self._generating().engine.forget(sample_ids)

    def advance(self, max_steps: int | None = None) -> tuple[list[Completion], Mapping[str, float]]:
        """Generate; return the completions and the engine's counters.

        Of several ranks that draw the same sequences, only the first returns something.

        Raises:
            SyncError: the weights are not a complete version.
        """
        engine = self._generating().engine
        with self._whole_version():
            finished = engine.advance(max_steps)
        return (finished, engine.metrics()) if self._answers else ([], {})

    def join_link(self, generation: int) -> None:
        """Join the weight link of a generation, in place of the one before. Collective over it.

        Raises:
            SyncError: a process of the link did not join in time.
            UserError: the transport that was requested cannot be used.
        """
        if self._link is not None:
            self._link.close()
        rollout = self._rollout
        if rollout is not None:
            rollout.prepare()
        self._link = self._open_link(generation)
        if rollout is not None:
            rollout.release()
        gc.freeze()

    def transfer(self, version: int) -> None:
        """Take part in sending the trainer's weights, as ``version``, to all pools of the link.

        Return when this process may train or generate again; see ``WeightLink.begin``. Offloaded
        weights then leave the device.
        """
        with on_device([self._trainer, self._frozen.get("logp")]), self._receiving():
            self._linked().begin(version)

    def swap(self, version: int | None = None) -> int | None:
        """Put the newest version that has arrived into use, between two calls of ``advance``.

        Args:
            version: wait until this version or a later one has arrived.

        Returns:
            the version in use; None in a process that receives no weights.
        """
        link = self._linked()
        if not link.receives:
            return None
        with on_device([self._frozen.get("logp")]), self._receiving():
            return link.swap(version)

    @contextmanager
    def _receiving(self) -> Iterator[None]:
        """Prepare the rollout for new weights, and put them into use if they arrive."""
        gate, rollout = self._linked().gate, self._rollout
        before = gate.version
        if rollout is not None:
            rollout.prepare()
        yield
        if rollout is not None:
            if gate.version is not None and gate.version != before:
                rollout.use(gate, gate.version)
            rollout.release()

    def _let_rollout_sleep(self) -> None:
        """Free the rollout's memory on a device that also trains, if the job is so configured."""
        if self._sleeps:
            self._generating().sleep(self._linked().gate, timeout_s=self._timeout_s)

    def _whole_version(self) -> AbstractContextManager[object]:
        """Hold the received weights unchanged. Raise SyncError if they are not a complete
        version, or if a newer one failed to arrive.
        """
        link = self._linked()
        link.check()
        return link.gate.reading(self._timeout_s)

    def _linked(self) -> WeightLink:
        assert self._link is not None, f"pool {self._place.pool} is not part of the weight link"
        return self._link

    def _training(self, task: str) -> FsdpEngine:
        engine = self._critic if task == CRITIC else self._trainer
        assert engine is not None, f"pool {self._place.pool} has no trainer of {task}"
        return engine

    def _generating(self) -> LinkedRollout:
        assert self._rollout is not None, f"pool {self._place.pool} does not generate"
        return self._rollout

    def _open_trainer(self, spec: TrainerSpec | None) -> tuple[FsdpEngine | None, FsdpModel | None]:
        if spec is None:
            return None, None
        model = self._open_policy(spec.policy, frozen=False)
        settings = spec.policy.model
        model.language_model.set_gradient_checkpointing(
            settings.enable_gradient_checkpointing, settings.recompute_granularity
        )
        return FsdpEngine(model, spec.optim, total_training_steps=spec.total_steps), model

    def _open_policy(self, spec: PolicySpec, *, frozen: bool) -> FsdpModel:
        return open_policy_part(
            spec, self._platform, rank=self._place.rank, device=self._device, frozen=frozen
        )

    def _open_rollout(self, spec: RolloutSpec | None) -> LinkedRollout | None:
        if spec is None:
            return None
        folder = received_folder(spec.policy)
        layout = self._rollout_layout(spec.config.expert_peers)
        shared = self._shared_experts(spec.policy, layout)
        policy = open_received(
            spec.policy,
            folder,
            platform=self._platform,
            device=self._device,
            layout=layout,
            shared=shared,
        )
        engine = build_engine(
            EngineSpec(
                model=policy,
                folder=folder.path,
                config=spec.config,
                eos_ids=spec.eos_ids,
                platform=self._platform,
                max_length=spec.max_length,
                rank=self._place.rank,
                num_ranks=self._place.size,
            )
        )
        # Servers that join later get the version in use from it.
        needs_policy = spec.config.restarts_engine or spec.config.attaches_servers
        keeps_policy = spec.scores or needs_policy
        return LinkedRollout(engine, policy, keeps_policy=keeps_policy, shared=shared)

    def _rollout_layout(self, num_devices: int) -> ParallelLayout:
        """Return the processes that divide the experts in generation. Collective over the pool."""
        if num_devices == 1:
            return WHOLE
        group = consecutive_group(num_devices, timeout_s=self._timeout_s)
        return ParallelLayout(expert=Peers(self._place.rank % num_devices, num_devices, group))

    def _shared_experts(self, spec: PolicySpec, layout: ParallelLayout) -> Mapping[str, Tensor]:
        if self._trained is None or layout.expert.size == 1:
            return {}
        dtype = compute_dtype(spec.layout, self._platform)
        return shared_experts(self._trained, layout, dtype=dtype)

    def _open_link(self, generation: int) -> WeightLink:
        spec, rollout, trained = self._link_spec, self._rollout, self._trained
        assert spec is not None, f"pool {self._place.pool} is not part of the weight link"
        receiver = self._frozen.get("logp") if rollout is None else rollout.policy
        return open_link(
            self._store,
            link_place(
                spec,
                self._place,
                generation=generation,
                platform=self._platform,
                device=self._device,
            ),
            tensors=LinkTensors(
                sends=nothing if trained is None else trained.held_slices,
                receives=nothing if receiver is None else changing_slices(receiver),
                settle=nothing if rollout is None else rollout.engine.settle,
            ),
            settings=spec.settings,
        )


@contextmanager
def on_device(models: Sequence[FsdpEngine | FsdpModel | None]) -> Iterator[None]:
    """Hold offloaded weights on the device for the duration of the block."""
    with ExitStack() as stack:
        for model in models:
            if model is not None:
                stack.enter_context(model.on_device())
        yield


def _device(platform: Platform, place: WorkerPlace) -> torch.device:
    if platform.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(platform.device_type, place.device_index)
