# SPDX-License-Identifier: Apache-2.0
"""What a worker process is to do, as plain values that the driver sends it."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.config.derived.pools import RankLayout
from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.model import ModelConfig
from tandem.config.schema.optim import OptimConfig
from tandem.config.schema.rollout import RolloutConfig
from tandem.platforms.place import WorkerPlace
from tandem.platforms.record import Platform
from tandem.types import TokenIds
from tandem.weight_sync.transport_choice import Way


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A model that the ranks of a pool hold and compute together.

    ``random_seed`` draws its weights; None loads them. ``value_head_seed`` makes it a critic, see
    ``models.folder.check_critic_folder``; or it ``is_reward_model``. ``section`` is that of the
    keys that ``layout`` came from, for messages.
    """

    model: ModelConfig
    layout: FsdpConfig
    ranks: RankLayout
    random_seed: int | None
    section: str
    value_head_seed: int | None = None
    is_reward_model: bool = False


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """A policy or a critic that is trained."""

    policy: PolicySpec
    optim: OptimConfig
    total_steps: int


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """A policy that generates, whole in each process. Its weights come through the link.

    ``layout`` says in which precision the trainer computes, and hence the rollout.
    """

    model: ModelConfig
    layout: FsdpConfig
    config: RolloutConfig
    eos_ids: TokenIds


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """The weight link of a run: of its ``size`` processes this pool's begin at ``first_rank``;
    ``crosses``: they have devices of different platforms. For the rest see ``LinkSettings``."""

    first_rank: int
    size: int
    send_bucket_bytes: int
    receive_bucket_bytes: int
    double_buffered: bool
    staged: bool
    way: Way | None
    crosses: bool


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """The same for all workers of a pool. A task that the pool does not have is None.

    Attributes:
        platform: of the pool's devices.
        store: host and port of the driver's store.
        timeout_s: of every collective.
        critic: in the pool that trains, if the run has one.
        scorer: the policy as it is trained, in a pool that neither trains nor generates.
        reference: the policy as it was.
        reward_model: as ``critic``.
    """

    platform: Platform
    store: tuple[str, int]
    timeout_s: float
    trainer: TrainerSpec | None = None
    critic: TrainerSpec | None = None
    scorer: PolicySpec | None = None
    reference: PolicySpec | None = None
    reward_model: PolicySpec | None = None
    rollout: RolloutSpec | None = None
    link: LinkSpec | None = None


def build_worker(job: WorkerJob, place: WorkerPlace) -> object:
    """The ``Worker`` of a process, built in it. What it needs is loaded there only: it takes
    seconds, and the driver does not compute."""
    from tandem.workers.worker import Worker

    return Worker(job, place)
