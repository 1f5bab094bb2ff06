# SPDX-License-Identifier: Apache-2.0
"""The placement of tasks on devices: one pool for all tasks, or the groups of dots.rl with shares.

Devices are counted from 0 over all nodes, and a pool is a contiguous range of them. This is only
arithmetic: it queries no device, and ``device_rules`` has already found all errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, pairwise

from tandem.config.parse.shares import share_devices
from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.pools import HALVES
from tandem.config.schema.rollout import RolloutConfig
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

TASKS = ("actor-train", "logp", "ref_logp", "generate")
CRITIC, REWARD_MODEL = "critic", "reward_model"
"""The auxiliary models. They are not tasks: they use the devices of actor-train."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device of a node, with its number on that node."""

    node: int
    local_index: int


@dataclass(frozen=True, slots=True)
class NodeRange:
    """The devices ``first .. last`` of one node."""

    node: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Pool:
    """A range of devices and the tasks that share them.

    Attributes:
        tasks: the tasks that the run performs; empty for an unused pool.
        unused_tasks: the tasks that the configuration names, but the run does not need.
        first_device: the number of the first device of the pool.
        num_devices: the number of devices of the pool.
        platform: the platform of the devices, as the configuration names it: a name, an alias, or
            ``auto``.
    """

    tasks: tuple[str, ...]
    unused_tasks: tuple[str, ...]
    first_device: int
    num_devices: int
    platform: str

    @property
    def name(self) -> str:
        """The names of the tasks, for messages and stores."""
        return "+".join(self.tasks or self.unused_tasks)


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The division of a pool's ranks for one task: stages x data x sequence x tensor parallel.

    Attributes:
        num_ranks: the number of devices of the pool.
        tensor_parallel: the number of ranks over which each matrix is split.
        sequence_parallel: the number of ranks over which the tokens of a micro-batch are split.
        num_shards: the number of ranks over which each tensor-parallel part of the weights of a
            stage is sharded; there are ``ranks_per_stage / ranks_per_copy`` copies of it.
        expert_parallel: the number of consecutive ranks over which the experts are divided. It
            divides ``ranks_per_copy``.
        pipeline_parallel: the number of stages of layers. The first ``ranks_per_stage`` ranks
            compute the first one.
        first_stage_layers, last_stage_layers: the number of layers of these stages; None for an
            equal share of those that the others leave.
        groups_heads: whether the heads of query, key and value lie by group, as in Megatron.

    Example:
        With 8 ranks, tensor_parallel 2 and sequence_parallel 2, two micro-batches are computed at
        the same time, each by 4 ranks.
    """

    num_ranks: int
    tensor_parallel: int
    sequence_parallel: int
    num_shards: int
    expert_parallel: int = 1
    pipeline_parallel: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    groups_heads: bool = False

    @property
    def ranks_per_stage(self) -> int:
        """The number of ranks that compute the same layers."""
        return self.num_ranks // self.pipeline_parallel

    @property
    def ranks_per_copy(self) -> int:
        """The number of ranks that hold the weights of a stage once:
        ``tensor_parallel * num_shards``.
        """
        return self.tensor_parallel * self.num_shards

    @property
    def num_expert_shards(self) -> int:
        """The number of ranks over which the experts of a process are sharded.

        With expert parallelism these are the ranks of a copy that hold the same experts.
        """
        if self.expert_parallel == 1:
            return self.num_shards
        return self.ranks_per_copy // self.expert_parallel

    @property
    def ranks_per_microbatch(self) -> int:
        """``tensor_parallel * sequence_parallel``."""
        return self.tensor_parallel * self.sequence_parallel

    @property
    def data_parallel(self) -> int:
        """The number of micro-batches that a stage computes at the same time:
        ``ranks_per_stage / ranks_per_microbatch``.
        """
        return self.ranks_per_stage // self.ranks_per_microbatch

    def group_of(self, rank: int) -> int:
        """Return which of the ``data_parallel`` groups of a stage computes with ``rank``."""
        return rank % self.ranks_per_stage // self.ranks_per_microbatch

    def layers_of_stages(self, num_layers: int) -> tuple[range, ...]:
        """Return the layers of each stage. The first stages have the layers that are left over.

        Example:
            >>> RankLayout(2, 1, 1, num_shards=1, pipeline_parallel=2).layers_of_stages(5)
            (range(0, 3), range(3, 5))
        """
        stages = self.pipeline_parallel
        given = {0: self.first_stage_layers, stages - 1: self.last_stage_layers}
        fixed = {stage: count for stage, count in given.items() if count is not None}
        free = [stage for stage in range(stages) if stage not in fixed]
        each, more = divmod(num_layers - sum(fixed.values()), max(1, len(free)))
        counts = {stage: each + (place < more) for place, stage in enumerate(free)} | fixed
        ends = [0, *accumulate(counts[stage] for stage in range(stages))]
        return tuple(range(first, end) for first, end in pairwise(ends))


@dataclass(frozen=True, slots=True)
class Placement:
    """The pools of a run and the layouts of its tasks.

    Attributes:
        pools: the pools in the order of their devices; devices after the last pool are idle.
        num_nodes, devices_per_node: the size of the whole run.
        layouts: the layout of each task that the run performs, and of each auxiliary model.
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
        """The pools with at least one task."""
        return tuple(pool for pool in self.pools if pool.tasks)

    @property
    def generates_apart(self) -> bool:
        """Whether generation and training are on different devices and can run at the same time."""
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
        """Return the pool of a task that the run performs."""
        return next(pool for pool in self.pools if task in pool.tasks)

    def devices_of(self, pool: Pool) -> tuple[Device, ...]:
        """Return the devices of a pool by rank."""
        numbers = range(pool.first_device, pool.first_device + pool.num_devices)
        return tuple(Device(*divmod(number, self.devices_per_node)) for number in numbers)

    def node_ranges(self, pool: Pool) -> tuple[NodeRange, ...]:
        """Return the devices of a pool, node by node."""
        by_node = groupby(self.devices_of(pool), key=lambda device: device.node)
        indices = {node: [device.local_index for device in devices] for node, devices in by_node}
        return tuple(NodeRange(node, found[0], found[-1]) for node, found in indices.items())


def place_run(config: RunConfig) -> Placement:
    """Return the placement that ``hybrid_engine`` and ``separated_node_*`` describe.

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
    layouts |= {
        name: rank_layout(own, num_ranks) for name, own in auxiliary_layouts(config).items()
    }
    return Placement(pools, trainer.nnodes, trainer.n_gpus_per_node, layouts)


def auxiliary_layouts(config: RunConfig) -> Mapping[str, FsdpConfig]:
    """Return the section ``NAME.model.fsdp_config`` of each auxiliary model of the run, by name."""
    layouts: dict[str, FsdpConfig] = {}
    if config.uses_critic:
        layouts[CRITIC] = config.critic.model.fsdp_config
    if config.reward_model.enable:
        layouts[REWARD_MODEL] = config.reward_model.model.fsdp_config
    return layouts


def section_of(task: str) -> str:
    """Return the section that lays out the weights of a task, or of an auxiliary model."""
    if task in (CRITIC, REWARD_MODEL):
        return f"{task}.model.fsdp_config"
    return f"actor_rollout_ref.{'ref' if task == 'ref_logp' else 'actor'}.fsdp_config"


def place_sft(config: SftConfig) -> Placement:
    """Return the placement of ``tandem sft``: one pool that trains."""
    trainer = config.trainer
    pool = Pool(("actor-train",), (), 0, trainer.num_devices, platform=trainer.device)
    layouts = {"actor-train": rank_layout(config.engine, trainer.num_devices)}
    return Placement((pool,), trainer.nnodes, trainer.n_gpus_per_node, layouts)


def needed_tasks(config: RunConfig) -> tuple[str, ...]:
    """Return the tasks that the run performs, in the order of ``TASKS``."""
    needed = {
        "logp": config.needs_old_log_probs,
        "ref_logp": config.needs_reference,
    }
    return tuple(task for task in TASKS if needed.get(task, True))


def rank_layout(config: FsdpConfig, num_ranks: int) -> RankLayout:
    """Return the layout of ``num_ranks`` ranks.

    ``fsdp_size`` shards over all of them if it is -1 or more than there are.
    """
    split, stages = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    most = num_ranks // (split * stages)
    return RankLayout(
        num_ranks=num_ranks,
        tensor_parallel=split,
        sequence_parallel=config.ulysses_sequence_parallel_size,
        num_shards=most if config.fsdp_size < 0 else min(config.fsdp_size, most),
        expert_parallel=config.num_expert_devices,
        pipeline_parallel=stages,
        first_stage_layers=config.num_layers_in_first_pipeline_stage,
        last_stage_layers=config.num_layers_in_last_pipeline_stage,
        groups_heads=config.backend == "mcore",
    )


def scorer_of(pool: Pool) -> str | None:
    """Return the task whose weights compute old log-probs in this pool; None without ``logp``.

    It is ``actor-train``, else ``generate``, else ``logp``, which holds a copy of its own.
    """
    if "logp" not in pool.tasks:
        return None
    return next(task for task in ("actor-train", "generate", "logp") if task in pool.tasks)


def generates_only(placement: Placement) -> bool:
    """Return whether the workers that generate have no other task."""
    return placement.pool_of("generate").tasks == ("generate",)


def replaces_workers(rollout: RolloutConfig, placement: Placement) -> bool:
    """Return whether a worker that only generates is replaced when it ends."""
    is_staged = rollout.enable_param_async or rollout.enable_dual_buffer
    is_whole = rollout.ranks_per_engine == 1
    is_wanted = rollout.max_engine_restarts > 0
    return is_wanted and generates_only(placement) and is_whole and not is_staged


def reference_of(pool: Pool, *, config: RunConfig) -> str | None:
    """Return the task whose weights compute the reference in this pool; None without one.

    Adapters do not change their base: where a process trains or generates with them, the reference
    computes with the same base. Otherwise it is ``ref_logp``, which holds weights of its own.
    """
    if "ref_logp" not in pool.tasks:
        return None
    has_adapters = config.actor_rollout_ref.model.trains_adapters
    shared = ("actor-train", "generate") if has_adapters else ()
    return next((task for task in shared if task in pool.tasks), "ref_logp")


def _layout(task: str, pool: Pool, *, config: RunConfig) -> RankLayout:
    roles = config.actor_rollout_ref
    weights = task
    if task == "logp":
        weights = scorer_of(pool)
    elif task == "ref_logp":
        weights = reference_of(pool, config=config)
    if weights == "generate":
        return RankLayout(pool.num_devices, tensor_parallel=1, sequence_parallel=1, num_shards=1)
    layout = roles.ref.fsdp_config if weights == "ref_logp" else roles.actor.fsdp_config
    return rank_layout(layout, pool.num_devices)


def task_groups(config: RunConfig) -> Sequence[tuple[str, ...]]:
    """Return the tasks of each pool, whether the run performs them or not."""
    named = config.trainer.separated_node_tasks
    return named or ((TASKS,) if config.actor_rollout_ref.hybrid_engine else HALVES)


def _ratios(config: RunConfig) -> Sequence[float]:
    if config.trainer.separated_node_tasks:
        return config.trainer.separated_node_ratios
    return (1.0,) if config.actor_rollout_ref.hybrid_engine else (0.5, 0.5)


def named_platforms(config: RunConfig) -> Mapping[str, str]:
    """Return the named platforms of the tasks that the run performs, by task."""
    needed = needed_tasks(config)
    return {task: platform for task, platform in config.pools.named.items() if task in needed}


def platform_of(config: RunConfig, tasks: Sequence[str]) -> str:
    """Return the platform of a pool with these tasks: one that a task names, or the run's."""
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
