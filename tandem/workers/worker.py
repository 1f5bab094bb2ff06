# SPDX-License-Identifier: Apache-2.0
"""What one process of a pool holds: the engines of its tasks, and its end of the weight link.

Built in the process itself from a ``WorkerJob``. Trainer and rollout share no storage here, as the
trainer's weights are cut over all ranks: the link brings its slices to the rollout, and to a policy
that scores on devices of its own. All ranks of a pool make the same calls, but for generation.
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from tandem.api import Loss, RolloutEngine
from tandem.comm.flagcx_plugin import pool_library
from tandem.comm.store import connect_store
from tandem.comm.world import WorldPlace, join_world
from tandem.config.derived.pools import REWARD_MODEL
from tandem.engines.fsdp import FsdpEngine
from tandem.engines.fsdp_model import FsdpModel, FsdpSpec, open_fsdp_model
from tandem.engines.steps import score
from tandem.errors import UserError
from tandem.models.folder import (
    ModelFolder,
    check_critic_folder,
    check_folder,
    check_reward_folder,
    open_part,
)
from tandem.models.language_model import NativeModel
from tandem.models.operators import operators_for
from tandem.models.parallel import WHOLE
from tandem.models.weights import allocate
from tandem.platforms.place import WorkerPlace
from tandem.platforms.record import Platform
from tandem.rollout.factory import make_rollout
from tandem.types import (
    Completion,
    GenerationRequest,
    LossScale,
    PackedBatch,
    UpdateReport,
)
from tandem.weight_sync.handshake import LinkSettings, LinkTensors, nothing
from tandem.weight_sync.link import WeightLink, open_link
from tandem.workers.job import LinkSpec, PolicySpec, RolloutSpec, TrainerSpec, WorkerJob
from tandem.workers.linking import link_place
from tandem.workers.precision import compute_dtype, stored_dtype
from tandem.workers.remote import PeakMemory
from tandem.workers.resting import RestingRollout


class Worker:
    """One process. Methods are what ``remote`` calls by name."""

    def __init__(self, job: WorkerJob, place: WorkerPlace) -> None:
        """Join the pool and load what its tasks need. Collective over the pool, then over the link.

        Raises:
            UserError: a model cannot be loaded, or not so.
        """
        self._place = place
        self._timeout_s = job.timeout_s
        self._platform = job.platform
        self._device = _device(self._platform, place)
        store = connect_store(*job.store, timeout_s=job.timeout_s)
        join_world(
            store,
            WorldPlace(
                name=place.pool,
                rank=place.rank,
                size=place.size,
                device=self._device,
                library=pool_library(self._platform, wants_flagcx=place.wants_flagcx),
                timeout_s=job.timeout_s,
            ),
        )
        self._trainer, trained = self._open_trainer(job.trainer)
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
        self._rollout, self._generator = self._open_rollout(job.rollout)
        receiver = self._frozen.get("logp") if self._generator is None else self._generator
        self._link = self._open_link(job.link, store, sends=trained, receives=receiver)
        self._resting = self._open_resting(job.rollout)
        gc.freeze()  # what is here now stays, and need not be looked through again

    def describe(self) -> dict[str, Any]:
        """Where this is."""
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
    ) -> list[Tensor]:
        """This rank's micro-batches, by the model that does ``task``."""
        if self._resting is not None:
            self._resting.rest()
        if task in ("actor-train", "critic"):
            scores = self._training(task).score(batches, temperature, num_rounds=num_rounds)
            self._offload_critic(task)
            return scores
        if task == "generate":
            assert self._generator is not None, f"pool {self._place.pool} does not generate"
            with self._whole_version():
                return [score(self._generator, batch, temperature=temperature) for batch in batches]
        policy = self._frozen[task]
        guard = self._whole_version() if task == "logp" else nullcontext()
        with policy.on_device(), guard:
            return policy.score(batches, temperature=temperature, num_rounds=num_rounds)

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
        """One optimizer step of the model that does ``task`` with this rank's micro-batches, and
        what it took."""
        if self._resting is not None:
            self._resting.rest()
        report = self._training(task).update(
            batches, loss, scale=scale, temperature=temperature, num_rounds=num_rounds
        )
        return report, PeakMemory.of(self._platform)

    def advance_schedule(self, task: str) -> None:
        """See ``api.TrainEngine``."""
        self._training(task).advance_schedule()
        self._offload_critic(task)

    def save(self, task: str, folder: Path) -> None:
        """See ``api.TrainEngine``. Raises UserError if this rank's part cannot be written."""
        try:
            self._training(task).save(folder)
        except OSError as error:
            raise UserError(
                f"trainer.default_local_dir={str(folder.parents[1])!r}: {self._place.pool} rank "
                f"{self._place.rank} could not write its part of the checkpoint "
                f"({error.strerror or error}); earlier ones are kept. Free some space, or take a "
                "folder that all nodes share, and run the same command again to resume."
            ) from error

    def load(self, task: str, folder: Path) -> None:
        """See ``api.TrainEngine``."""
        self._training(task).load(folder)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """See ``api.RolloutEngine``."""
        self._generating().add(requests)

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """See ``api.RolloutEngine``. Raises SyncError if the weights are not a whole version."""
        with self._whole_version():
            return self._generating().advance(max_steps)

    def transfer(self, version: int) -> None:
        """Take part in bringing the trainer's weights to everybody, as ``version``. Returns when
        this process may go on to train or to generate; see ``WeightLink.begin``.

        With it the training of a step ends: weights that are offloaded leave the device.
        """
        if self._resting is not None:
            self._resting.wake()
        with self._on_device([self._trainer, self._frozen.get("logp")]), self._tagged():
            self._linked().begin(version)

    def swap(self, version: int | None = None) -> int | None:
        """Put the newest version that has arrived in use, between two calls of ``advance``.

        Args:
            version: wait until it is there, or a later one.

        Returns:
            the version in use, None in a process that receives none.
        """
        link = self._linked()
        if not link.receives:
            return None
        with self._on_device([self._frozen.get("logp")]), self._tagged():
            return link.swap(version)

    @contextmanager
    def _tagged(self) -> Iterator[None]:
        """The rollout is told if another version is in use afterwards."""
        gate = self._linked().gate
        before = gate.version
        yield
        if self._rollout is not None and gate.version not in (before, None):
            self._rollout.set_weights_version(gate.version)

    @contextmanager
    def _on_device(self, policies: Sequence[FsdpEngine | FsdpModel | None]) -> Iterator[None]:
        """Hold weights that may be offloaded on the device, and offload them afterwards."""
        with ExitStack() as stack:
            for policy in policies:
                if policy is not None:
                    stack.enter_context(policy.on_device())
            yield

    def _whole_version(self) -> AbstractContextManager[object]:
        """While weights that come through the link are used. Raises SyncError if they are none, or
        if newer ones have failed to come."""
        link = self._linked()
        link.check()
        return link.gate.reading(self._timeout_s)

    def _linked(self) -> WeightLink:
        assert self._link is not None, f"pool {self._place.pool} has no part in the weights"
        return self._link

    def _training(self, task: str) -> FsdpEngine:
        engine = self._critic if task == "critic" else self._trainer
        assert engine is not None, f"pool {self._place.pool} does not train for {task}"
        return engine

    def _offload_critic(self, task: str) -> None:
        """Weights that are offloaded leave the device; the policy's do so with their transfer."""
        if task == "critic":
            self._training(task).offload()

    def _generating(self) -> RolloutEngine:
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
        """What does not train is kept in the precision it is computed with."""
        compute = compute_dtype(spec.layout, self._platform, section=spec.section)
        fsdp = FsdpSpec(
            config=spec.layout,
            layout=spec.ranks,
            rank=self._place.rank,
            device=self._device,
            stored=compute
            if frozen
            else stored_dtype(spec.layout, self._platform, section=spec.section),
            compute=compute,
        )
        return open_fsdp_model(
            _folder(spec),
            fsdp,
            random_seed=spec.random_seed,
            operators=operators_for(self._platform),
            frozen=frozen,
        )

    def _open_rollout(
        self, spec: RolloutSpec | None
    ) -> tuple[RolloutEngine | None, NativeModel | None]:
        if spec is None:
            return None, None
        folder = check_folder(spec.model.path, load_weight=False)
        operators = operators_for(self._platform)
        dtype = compute_dtype(spec.layout, self._platform)
        model = open_part(folder, WHOLE, dtype=dtype, device="meta", operators=operators)
        assert isinstance(model, NativeModel), "the driver has refused any other"
        allocate(model.decoder, dtype=dtype, device=self._device)
        model.decoder.requires_grad_(False)
        model.device = self._device
        engine = make_rollout(model, spec.config, eos_ids=spec.eos_ids, platform=self._platform)
        return engine, model

    def _open_resting(self, spec: RolloutSpec | None) -> RestingRollout | None:
        """Where the device trains, too; the weights come back with the next transfer."""
        if spec is None or self._trainer is None or not spec.config.free_cache_engine:
            return None
        assert self._rollout is not None and self._generator is not None, "a rollout is open"
        return RestingRollout(
            self._rollout,
            self._generator.module,
            gate=self._linked().gate,
            timeout_s=self._timeout_s,
        )

    def _open_link(
        self,
        spec: LinkSpec | None,
        store: Store,
        *,
        sends: FsdpModel | None,
        receives: FsdpModel | NativeModel | None,
    ) -> WeightLink | None:
        if spec is None:
            return None
        return open_link(
            store,
            link_place(spec, self._place, platform=self._platform, device=self._device),
            tensors=LinkTensors(
                sends=nothing if sends is None else sends.held_slices,
                receives=nothing if receives is None else receives.held_slices,
                settle=nothing if self._rollout is None else self._rollout.settle,
            ),
            settings=LinkSettings(
                send_bucket_bytes=spec.send_bucket_bytes,
                receive_bucket_bytes=spec.receive_bucket_bytes,
                timeout_s=self._timeout_s,
                double_buffered=spec.double_buffered,
                staged=spec.staged,
                way=spec.way,
            ),
        )


def _folder(spec: PolicySpec) -> ModelFolder:
    model, loads = spec.model, spec.random_seed is None
    trusts = model.trust_remote_code
    if spec.is_reward_model:
        key = "reward_model.model.path"
        return check_reward_folder(model.path, trust_remote_code=trusts, key=key)
    if spec.value_head_seed is None:
        return check_folder(model.path, trust_remote_code=trusts, load_weight=loads)
    return check_critic_folder(
        model.path,
        seed=spec.value_head_seed,
        trust_remote_code=trusts,
        load_weight=loads,
        key="critic.model.path",
    )


def _device(platform: Platform, place: WorkerPlace) -> torch.device:
    if platform.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(platform.device_type, place.device_index)
