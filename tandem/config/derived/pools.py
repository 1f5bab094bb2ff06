# SPDX-License-Identifier: Apache-2.0
"""Which devices do which tasks: one pool for everything, or dots.rl's groups with their shares.

Devices are counted from 0 over all nodes, and a pool is a contiguous range of them. This is only
arithmetic: what cannot be placed is found by ``device_rules`` before, and no device is looked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby

from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

TASKS = ("actor-train", "logp", "ref_logp", "generate")
CRITIC, REWARD_MODEL = "critic", "reward_model"
"""Models that are no tasks of their own: they are on the devices of actor-train."""
HALVES = (("actor-train", "logp", "ref_logp"), ("generate",))
"""The groups of ``hybrid_engine=False`` where none are named."""
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Device:
    """One of a node's devices, as the node counts them."""

    node: int
    local_index: int


@dataclass(frozen=True, slots=True)
class NodeRange:
    """Devices ``first .. last`` of one node."""

    node: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Pool:
    """Tasks that share devices ``first_device .. + num_devices``.

    Attributes:
        tasks: those that the run performs; empty for a pool with nothing to do.
        unused_tasks: those that were named and that nothing in the run asks for.
        platform: of its devices, as it was asked for: a name, an alias, or ``auto``.
    """

    tasks: tuple[str, ...]
    unused_tasks: tuple[str, ...]
    first_device: int
    num_devices: int
    platform: str

    @property
    def name(self) -> str:
        """Its tasks, for messages and stores."""
        return "+".join(self.tasks or self.unused_tasks)


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How the ranks of a pool divide for one task: data x sequence x tensor parallel.

    Attributes:
        num_ranks: devices of the pool.
        tensor_parallel: ranks over which each matrix is split.
        sequence_parallel: ranks over which the tokens of a micro-batch are split.
        num_shards: ranks over which each tensor parallel part of the weights is spread; there are
            ``num_ranks / (tensor_parallel * num_shards)`` copies of it.

    Example:
        8 ranks, tensor_parallel 2, sequence_parallel 2: 2 micro-batches at a time, each by 4 ranks.
    """

    num_ranks: int
    tensor_parallel: int
    sequence_parallel: int
    num_shards: int

    @property
    def ranks_per_microbatch(self) -> int:
        """``tensor_parallel * sequence_parallel``."""
        return self.tensor_parallel * self.sequence_parallel

    @property
    def data_parallel(self) -> int:
        """Micro-batches computed at the same time: ``num_ranks / ranks_per_microbatch``."""
        return self.num_ranks // self.ranks_per_microbatch


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a run happens.

    Attributes:
        pools: in the order of their devices; what follows the last one is idle.
        num_nodes, devices_per_node: of the whole run.
        layouts: of each task that the run performs, and of the ``models_beside`` the policy.
    """

    pools: tuple[Pool, ...]
    num_nodes: int
    devices_per_node: int
    layouts: Mapping[str, RankLayout]

    @property
    def num_devices(self) -> int:
        """``num_nodes * devices_per_node``."""
        return self.num_nodes * self.devices_per_node

    @property
    def used_pools(self) -> tuple[Pool, ...]:
        """Those that have something to do."""
        return tuple(pool for pool in self.pools if pool.tasks)

    @property
    def generates_apart(self) -> bool:
        """Whether other devices generate than train, so that both can happen at the same time."""
        return self.pool_of("generate") is not self.pool_of("actor-train")

    @property
    def is_mixed(self) -> bool:
        """Whether pools have devices of different platforms."""
        return len({pool.platform for pool in self.used_pools}) > 1

    @property
    def is_one_process(self) -> bool:
        """Whether one device does everything."""
        return len(self.used_pools) == 1 and self.used_pools[0].num_devices == 1

    def pool_of(self, task: str) -> Pool:
        """The pool of a task that the run performs."""
        return next(pool for pool in self.pools if task in pool.tasks)

    def devices_of(self, pool: Pool) -> tuple[Device, ...]:
        """The devices of a pool by rank."""
        numbers = range(pool.first_device, pool.first_device + pool.num_devices)
        return tuple(Device(*divmod(number, self.devices_per_node)) for number in numbers)

    def node_ranges(self, pool: Pool) -> tuple[NodeRange, ...]:
        """The devices of a pool, node by node."""
        by_node = groupby(self.devices_of(pool), key=lambda device: device.node)
        indices = {node: [device.local_index for device in devices] for node, devices in by_node}
        return tuple(NodeRange(node, found[0], found[-1]) for node, found in indices.items())


def place_run(config: RunConfig) -> Placement:
    """The pools that ``hybrid_engine`` and ``separated_node_*`` ask for.

    Example:
        >>> [pool.num_devices for pool in place_run(config_of_red_moe_on_16_devices).pools]
        [8, 4, 4]
    """
    trainer = config.trainer
    pools = _ranges(
        task_groups(config),
        share_devices(_ratios(config), trainer.num_devices),
        needed=needed_tasks(config),
        platform=partial(platform_of, config),
    )
    layouts = {task: _layout(task, pool, config=config) for pool in pools for task in pool.tasks}
    num_ranks = layouts["actor-train"].num_ranks
    layouts |= {name: rank_layout(own, num_ranks) for name, own in models_beside(config).items()}
    return Placement(pools, trainer.nnodes, trainer.n_gpus_per_node, layouts)


def models_beside(config: RunConfig) -> Mapping[str, FsdpConfig]:
    """How those of ``CRITIC`` and ``REWARD_MODEL`` that the run has are laid out: by the keys
    ``NAME.model.fsdp_config.*``."""
    beside: dict[str, FsdpConfig] = {}
    if config.uses_critic:
        beside[CRITIC] = config.critic.model.fsdp_config
    if config.reward_model.enable:
        beside[REWARD_MODEL] = config.reward_model.model.fsdp_config
    return beside


def place_sft(config: SftConfig) -> Placement:
    """One pool that trains."""
    trainer = config.trainer
    pool = Pool(("actor-train",), (), 0, trainer.num_devices, platform=trainer.device)
    layouts = {"actor-train": rank_layout(config.engine, trainer.num_devices)}
    return Placement((pool,), trainer.nnodes, trainer.n_gpus_per_node, layouts)


def needed_tasks(config: RunConfig) -> tuple[str, ...]:
    """The tasks that the run performs, in the order of ``TASKS``."""
    needed = {
        "logp": config.needs_old_log_probs,
        "ref_logp": config.needs_reference,
    }
    return tuple(task for task in TASKS if needed.get(task, True))


def rank_layout(config: FsdpConfig, num_ranks: int) -> RankLayout:
    """How ``num_ranks`` divide as ``config`` says; with ``fsdp_size=-1`` nothing is held twice."""
    split = config.tensor_model_parallel_size
    return RankLayout(
        num_ranks=num_ranks,
        tensor_parallel=split,
        sequence_parallel=config.ulysses_sequence_parallel_size,
        num_shards=num_ranks // split if config.fsdp_size < 0 else config.fsdp_size,
    )


def share_devices(ratios: Sequence[float], num_devices: int) -> tuple[int, ...]:
    """Whole devices by largest remainder; together ``floor(sum(ratios) * num_devices)``.

    Example:
        >>> share_devices((0.5, 0.25, 0.25), 8)
        (4, 2, 2)
    """
    exact = [ratio * num_devices for ratio in ratios]
    shares = [math.floor(value + ROUNDING) for value in exact]
    left = math.floor(sum(exact) + ROUNDING) - sum(shares)
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for index in by_remainder[:left]:
        shares[index] += 1
    return tuple(shares)


def scorer_of(pool: Pool) -> str | None:
    """The task whose weights compute ``logp`` where that is the pool's: those in training, else
    those that generate, else its own; None in other pools."""
    if "logp" not in pool.tasks:
        return None
    return next(task for task in ("actor-train", "generate", "logp") if task in pool.tasks)


def _layout(task: str, pool: Pool, *, config: RunConfig) -> RankLayout:
    roles = config.actor_rollout_ref
    weights = scorer_of(pool) if task == "logp" else task
    if weights == "generate":
        return RankLayout(pool.num_devices, tensor_parallel=1, sequence_parallel=1, num_shards=1)
    layout = roles.ref.fsdp_config if task == "ref_logp" else roles.actor.fsdp_config
    return rank_layout(layout, pool.num_devices)


def task_groups(config: RunConfig) -> Sequence[tuple[str, ...]]:
    """The tasks of each pool, whether the run performs them or not."""
    named = config.trainer.separated_node_tasks
    return named or ((TASKS,) if config.actor_rollout_ref.hybrid_engine else HALVES)


def show_groups(groups: Iterable[Sequence[str]]) -> str:
    """As they are written behind ``trainer.separated_node_tasks=``."""
    return f"[{','.join(f'[{names}]' for names in map(','.join, groups))}]"


def show_shares(ratios: Sequence[float]) -> str:
    """Ratios of that proportion that add up to 1, in hundredths, as they are written behind
    ``trainer.separated_node_ratios=``; equal ones if they are too different for that.

    Example:
        >>> show_shares((0.5, 0.5, 1.0))
        '[0.25,0.25,0.5]'
    """
    total = sum(ratios)
    shares = share_devices([ratio / total for ratio in ratios], 100)
    if 0 in shares:
        shares = share_devices([1 / len(ratios)] * len(ratios), 100)
    return f"[{','.join(f'{share / 100:g}' for share in shares)}]"


def _ratios(config: RunConfig) -> Sequence[float]:
    if config.trainer.separated_node_tasks:
        return config.trainer.separated_node_ratios
    return (1.0,) if config.actor_rollout_ref.hybrid_engine else (0.5, 0.5)


def named_platforms(config: RunConfig) -> Mapping[str, str]:
    """By task, of those that the run performs."""
    needed = needed_tasks(config)
    return {task: platform for task, platform in config.pools.named.items() if task in needed}


def platform_of(config: RunConfig, tasks: Sequence[str]) -> str:
    """That of a pool with these tasks: the one that one of them names, else the run's."""
    named = named_platforms(config)
    return next((named[task] for task in tasks if task in named), config.trainer.device)


def _ranges(
    groups: Sequence[tuple[str, ...]],
    shares: Sequence[int],
    *,
    needed: Sequence[str],
    platform: Callable[[Sequence[str]], str],
) -> tuple[Pool, ...]:
    return tuple(
        Pool(
            tasks=tuple(task for task in tasks if task in needed),
            unused_tasks=tuple(task for task in tasks if task not in needed),
            first_device=end - share,
            num_devices=share,
            platform=platform(tasks),
        )
        for tasks, share, end in zip(groups, shares, accumulate(shares), strict=True)
    )
