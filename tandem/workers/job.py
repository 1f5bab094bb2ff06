# SPDX-License-Identifier: Apache-2.0
"""The job of a worker process, as plain values that the driver sends to it."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.comm.store import StorePlace
from tandem.config.derived.adapters import Adapters
from tandem.config.derived.pools import RankLayout
from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.model import ModelConfig
from tandem.config.schema.optim import OptimConfig
from tandem.config.schema.rollout import RolloutConfig
from tandem.platforms.place import WorkerPlace
from tandem.platforms.record import Platform
from tandem.types import TokenIds
from tandem.weight_sync.handshake import LinkSettings


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A model of a run, held by one device or sharded over the ranks of a pool.

    Attributes:
        random_seed: the seed of random weights; None loads the weights.
        section: the section of the keys that ``layout`` came from, for messages.
        value_head_seed: the seed of a critic's value head; see
            ``models.folder.check_critic_folder``.
        adapters: the adapters that are trained instead of the weights; None trains all weights.
        adapter_seed: the seed of the adapters' initial values.
        freezes_tower: whether the vision tower of a model that sees is not trained.
        freezes_router: whether the routers of a model with experts are not trained.
    """

    model: ModelConfig
    layout: FsdpConfig
    ranks: RankLayout
    random_seed: int | None
    section: str
    value_head_seed: int | None = None
    is_reward_model: bool = False
    adapters: Adapters | None = None
    adapter_seed: int = 0
    freezes_tower: bool = False
    freezes_router: bool = False


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """A policy or a critic that is trained."""

    policy: PolicySpec
    optim: OptimConfig
    total_steps: int


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """A policy that generates, unsharded in each process. Its weights come through the link.

    Attributes:
        policy: the trained policy. The rollout uses its precision, and reads the base of its
            adapters itself, because the link carries them alone.
        is_reference: whether the base also computes the reference of a run with adapters.
        scores: whether the same weights compute old log-probs between two updates.
        max_length: the length of the longest sequence, in tokens.
    """

    policy: PolicySpec
    config: RolloutConfig
    eos_ids: TokenIds
    scores: bool
    max_length: int
    is_reference: bool = False


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A pool's part of the weight link of a run.

    Attributes:
        first_rank: the rank in the link of the pool's first process.
        size: the number of processes of the link.
        crosses: whether the link joins devices of different platforms.
    """

    first_rank: int
    size: int
    crosses: bool
    settings: LinkSettings


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """The job of all workers of a pool. A task that the pool does not have is None.

    Attributes:
        platform: the platform of the pool's devices.
        store: the place of the driver's store.
        timeout_s: the time limit of every collective.
        critic, reward_model: the models besides the policy, in the pool that trains.
        scorer: the policy in training, in a pool that neither trains nor generates.
        reference: the initial policy.
        base: the policy whose frozen weights all processes of the run must read alike: the base of
            its adapters, or its vision tower. None if all its weights are trained.
        is_replaceable: whether a worker of the pool can be started again without the others.
    """

    platform: Platform
    store: StorePlace
    timeout_s: float
    trainer: TrainerSpec | None = None
    critic: TrainerSpec | None = None
    scorer: PolicySpec | None = None
    reference: PolicySpec | None = None
    base: PolicySpec | None = None
    reward_model: PolicySpec | None = None
    rollout: RolloutSpec | None = None
    link: LinkSpec | None = None
    is_replaceable: bool = False


def build_worker(job: WorkerJob, place: WorkerPlace) -> object:
    """Build this process's ``Worker``."""
    # A slow import, which the driver does not need.
    from tandem.workers.worker import Worker

    return Worker(job, place)
