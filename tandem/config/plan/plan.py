# SPDX-License-Identifier: Apache-2.0
"""The plan of a run: steps, batches, pools, memory, effects of keys, warnings.

It is computed from the configuration of ``tandem train`` or ``tandem sft``. No process is started,
and the only file that is read is the description of an adapter to start from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.config.check.ignored_keys import ignored_keys, key_effects
from tandem.config.check.platform_rules import platform_key, weight_routes
from tandem.config.check.rules import check_run, check_sft
from tandem.config.derived.pools import Placement, Pool, auxiliary_layouts, place_run
from tandem.config.derived.schedule import Schedule, schedule_run
from tandem.config.derived.sizes import ModelSizes
from tandem.config.derived.trained_model import place, trained_model
from tandem.config.parse.overrides import LoadedConfig
from tandem.config.plan.memory import NO_MODELS, MemoryPlan, plan_memory
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError

_UNUSED = {
    "logp": "the update is strictly on-policy or in bypass_mode",
    "ref_logp": "no KL term needs a reference",
}
"""Task -> the reason why a run does not need it."""
COUNTED_BEFORE_FILTER = (
    "data.filter_overlong_prompts=True: steps are counted before overlong prompts are dropped; "
    "there may be fewer"
)
"""The warning of a plan whose prompts have not been tokenised."""
SLOW_ADAPTERS = 5e-6
"""The learning rate below which a plan warns about adapters."""
UNREAD_MODEL = (
    "no such folder here; the plan does not check its family, tokenizer, division over devices and "
    "memory"
)
"""The end of the warning of a plan for another machine about a model that is not here."""

UNCHECKED_DEVICE = "the plan does not check whether it is available; if not, the run does not start"
"""The end of the warnings of a plan for another machine about its platforms."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one run.

    Attributes:
        num_train_rows, num_val_rows: the numbers of rows before filtering, None if unknown.
        schedule: the steps of the run, None if the number of rows is unknown.
        sequences_per_step: the number of sequences trained on in one training step.
        optimizer_steps_per_step: the number of mini-batches times passes.
        placement: the tasks and their devices.
        memory: the memory of one accelerator of each pool, None if the sizes of the model are
            unknown.
        key_effects: every key that was set, as it was spelled -> its effect.
        verl_defaults: the keys that were not set and have a default of verl -> the default.
        ignored_keys: the keys that were set without effect -> the reason.
        unknown_keys: the unknown keys, each passed with ``+``.
        warnings: the warnings, one line each.
        run: what the run does and where: name -> text, for a table.
        refusals: the errors with which the command would end, such as features that are not built.
        config: the whole resolved configuration.
    """

    num_train_rows: int | None
    num_val_rows: int | None
    schedule: Schedule | None
    sequences_per_step: int
    optimizer_steps_per_step: int
    placement: Placement
    memory: Mapping[str, MemoryPlan] | None
    key_effects: Mapping[str, str]
    verl_defaults: Mapping[str, Any]
    ignored_keys: Mapping[str, str]
    unknown_keys: tuple[str, ...]
    warnings: tuple[str, ...]
    run: Mapping[str, str]
    refusals: tuple[UserError, ...]
    config: RunConfig | SftConfig

    @property
    def weights(self) -> Mapping[str, str]:
        """The routes of weights: "one pool -> other pool" -> the transport and its reason."""
        config = self.config
        return {} if isinstance(config, SftConfig) else weight_routes(config, self.placement)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, ready for JSON."""
        schedule = self.schedule
        return {
            "total_training_steps": schedule and schedule.total_training_steps,
            "steps_per_epoch": schedule and schedule.steps_per_epoch,
            "sequences_per_step": self.sequences_per_step,
            "optimizer_steps_per_step": self.optimizer_steps_per_step,
            "validation_steps": schedule and list(schedule.validation_steps),
            "checkpoint_steps": schedule and list(schedule.save_steps),
            "num_train_rows": self.num_train_rows,
            "num_val_rows": self.num_val_rows,
            "pools": [self._pool_dict(pool) for pool in self.placement.pools],
            "weights": dict(self.weights),
            "key_effects": dict(self.key_effects),
            "verl_defaults": dict(self.verl_defaults),
            "keys_without_effect": dict(self.ignored_keys),
            "unknown_keys": list(self.unknown_keys),
            "warnings": list(self.warnings),
            "run": dict(self.run),
            "refusals": [str(error) for error in self.refusals],
            "config": self.config.model_dump(mode="json"),
        }

    def tasks_of(self, pool: Pool) -> tuple[str, ...]:
        """Return the tasks of the pool, and the auxiliary models if it trains."""
        if "actor-train" not in pool.tasks or isinstance(self.config, SftConfig):
            return pool.tasks
        return (*pool.tasks, *auxiliary_layouts(self.config))

    def _pool_dict(self, pool: Pool) -> dict[str, Any]:
        layouts = self.placement.layouts
        memory = (self.memory or {}).get(pool.name)
        return {
            "tasks": list(pool.tasks),
            "unused_tasks": list(pool.unused_tasks),
            "devices": pool.num_devices,
            "platform": pool.platform,
            "nodes": [
                {"node": run.node, "first": run.first, "last": run.last}
                for run in self.placement.node_ranges(pool)
            ],
            "data_parallel": {task: layouts[task].data_parallel for task in self.tasks_of(pool)},
            "memory_gib": None if memory is None else memory.to_gib(),
        }


def make_plan(
    loaded: LoadedConfig[RunConfig] | LoadedConfig[SftConfig],
    *,
    num_train_rows: int | None = None,
    num_val_rows: int | None = None,
    sizes: ModelSizes | None = None,
    auxiliary: Mapping[str, ModelSizes] = NO_MODELS,
    warnings: Sequence[str] = (),
    refusals: Iterable[UserError] = (),
) -> Plan:
    """Plan a run of ``tandem train`` or ``tandem sft``, depending on the type of configuration.

    Args:
        num_train_rows, num_val_rows: the numbers of rows in the files, None if unknown.
        sizes: the sizes of the model, None if unknown.
        auxiliary: as in ``plan_memory``.
        warnings: the warnings of the caller, which come first.
        refusals: as in ``Plan``.

    Raises:
        UserError: keys contradict each other, or there are too few rows for one batch.
    """
    config = loaded.config
    train_rows = _taken(num_train_rows, config.data.train_max_samples)
    if isinstance(config, SftConfig):
        check_sft(config)
    else:
        check_run(config)
    own_warnings = _plan_warnings(config, has_rows=train_rows is not None)
    return Plan(
        num_train_rows=train_rows,
        num_val_rows=_taken(num_val_rows, config.data.val_max_samples),
        schedule=None if train_rows is None else schedule_run(config, train_rows),
        sequences_per_step=config.sequences_per_step,
        optimizer_steps_per_step=config.optimizer_steps_per_step,
        placement=place(config),
        memory=None
        if sizes is None or config.trainer.device == "cpu"
        else plan_memory(config, sizes, auxiliary=auxiliary),
        key_effects=key_effects(loaded),
        verl_defaults=loaded.verl_defaults,
        ignored_keys=ignored_keys(loaded),
        unknown_keys=loaded.unknown_keys,
        warnings=(*warnings, *loaded.warnings, *own_warnings),
        run=describe_run(config),
        refusals=tuple(refusals),
        config=config,
    )


def _plan_warnings(config: RunConfig | SftConfig, *, has_rows: bool) -> Iterator[str]:
    if isinstance(config, RunConfig) and has_rows and config.data.filter_overlong_prompts:
        yield COUNTED_BEFORE_FILTER
    yield from _device_warnings(config)
    yield from run_warnings(config)


def describe_run(config: RunConfig | SftConfig) -> dict[str, str]:
    """Return what a run trains, by which algorithm and reward, and where it writes."""
    folder = {"run folder": str(config.trainer.run_folder)} | _describe_adapters(config)
    if isinstance(config, SftConfig):
        return {"model": config.model.path, "algorithm": "supervised fine-tuning"} | folder
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    parts = [
        str(algorithm.adv_estimator),
        "policy loss REINFORCE"
        if algorithm.rollout_correction.reinforces
        else f"policy loss {actor.policy_loss.loss_mode}",
        *(["each mini-batch scored first"] if config.surveys_mini_batches else []),
        f"{config.actor_rollout_ref.rollout.n} samples of a prompt",
        *(["KL in the loss"] if actor.use_kl_loss else []),
        *(["KL in the reward"] if algorithm.use_kl_in_reward else []),
    ]
    function, judge = config.custom_reward_function, config.reward_model
    rewards = [f"model {judge.model.path}"] if judge.enable else []
    rewards += [path if ":" in path else f"{function.name} of {path}" for path in function.path]
    return {
        "model": config.actor_rollout_ref.model.path,
        "algorithm": ", ".join(parts),
        "reward": ", ".join(rewards) or f"the rule of each row's {config.data.reward_fn_key}",
        "rollout engine": config.actor_rollout_ref.rollout.name,
        **_describe_episodes(config),
        **folder,
    }


def _describe_episodes(config: RunConfig) -> dict[str, str]:
    """Return the tools of a run, the bounds of its episodes, and their deadlines."""
    if not config.has_environment:
        return {}
    rollout = config.actor_rollout_ref.rollout
    turns, agent = rollout.multi_turn, rollout.agent
    files = (
        turns.tool_config_path,
        turns.function_tool_path,
        turns.interaction_config_path,
        agent.agent_loop_config_path,
    )
    bounds = [
        f"at most {most} {what}"
        for most, what in (
            (turns.max_assistant_turns, "turns of the policy"),
            (turns.max_user_turns, "answers"),
        )
        if most is not None
    ]
    bounds.append(f"{config.data.max_response_length} tokens, drawn and given")
    cut = {
        "left": "the last characters remain",
        "right": "the first ones remain",
        "middle": "both ends remain",
    }
    is_cut = "max_tool_response_length" in turns.model_fields_set
    observations = "; observations of OpenEnv whole" if files[-1] and not is_cut else ""
    return {
        "tools and agents": f"{', '.join(file for file in files if file)}; calls as {turns.format}",
        "episodes": ", ".join(bounds),
        "results of calls": f"at most {turns.max_tool_response_length} characters; of longer ones "
        f"{cut[turns.tool_response_truncate_side]}{observations}",
        "deadlines": f"{turns.tool_timeout_s:g} s a call, {agent.timeout_s:g} s an episode, in up "
        f"to {agent.num_workers} processes",
    }


def _describe_adapters(config: RunConfig | SftConfig) -> dict[str, str]:
    """Return the adapters that are trained, and the reference of a run with them."""
    adapters = trained_model(config).adapters
    if adapters is None:
        return {}
    rule = adapters.targets if isinstance(adapters.targets, str) else ", ".join(adapters.targets)
    start = "new" if adapters.folder is None else f"from {adapters.folder}"
    text = f"LoRA, rank {adapters.rank}, scale {adapters.scale:g}, {start}, on {rule}"
    described = {"trained": f"{text}; the model's weights stay as they are"}
    if isinstance(config, RunConfig) and config.needs_reference:
        initial = "the model" if adapters.folder is None else "the model with that adapter"
        described["reference"] = f"{initial}, over the same weights"
    return described


def adapter_warnings(config: RunConfig | SftConfig) -> Iterator[str]:
    """Yield a warning if adapters have a learning rate that is usual for all weights."""
    model = trained_model(config)
    own = model.of_task["actor-train"]
    if model.config.trains_adapters and own.optim is not None and own.optim.lr < SLOW_ADAPTERS:
        key = f"{own.section.rpartition('.')[0]}.optim.lr".lstrip(".")
        yield (
            f"{key}={own.optim.lr:g}: adapters usually learn at about ten times the rate of all "
            "weights, which is 1e-5 or more"
        )


def _taken(num_rows: int | None, max_samples: int) -> int | None:
    """Return the rows that ``*_max_samples`` leaves; -1 and 0 leave all."""
    return num_rows if num_rows is None or max_samples <= 0 else min(num_rows, max_samples)


def _pool_warnings(config: RunConfig, placement: Placement) -> Iterator[str]:
    trainer = config.trainer
    if not config.actor_rollout_ref.hybrid_engine and not trainer.separated_node_tasks:
        yield (
            "actor_rollout_ref.hybrid_engine=False without trainer.separated_node_tasks: "
            "half of the devices train, half generate"
        )
    for pool in placement.pools:
        if not pool.tasks:
            reasons = " and ".join(_UNUSED[task] for task in pool.unused_tasks)
            yield f"pool {pool.name}: its {pool.num_devices} device(s) stay idle, as {reasons}"
    idle = placement.num_devices - sum(pool.num_devices for pool in placement.pools)
    if idle > 0:
        yield (
            f"trainer.separated_node_ratios: {idle} of {placement.num_devices} devices stay idle"
        )


def _device_warnings(config: RunConfig | SftConfig) -> Iterator[str]:
    named = {platform_key(pool, config): pool.platform for pool in place(config).used_pools}
    for key, platform in named.items():
        if platform not in ("auto", "cpu"):
            yield f"{key}={platform}: {UNCHECKED_DEVICE}"


def run_warnings(config: RunConfig | SftConfig) -> Iterator[str]:
    """Yield a warning, one line each, for settings that are allowed but rarely intended."""
    trainer = config.trainer
    if trainer.max_restarts > 0 and not trainer.saves:
        yield (
            f"trainer.max_restarts={trainer.max_restarts}: a restart begins with the first step, "
            f"because trainer.save_freq={trainer.save_freq} saves no step before the last one"
        )
    yield from adapter_warnings(config)
    if isinstance(config, RunConfig):
        yield from _pool_warnings(config, place_run(config))
        yield from _algorithm_warnings(config)


def _algorithm_warnings(config: RunConfig) -> Iterator[str]:
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    val_kwargs = rollout.val_kwargs
    if rollout.n == 1 and config.algorithm.estimator.prefers_groups:
        yield (
            "actor_rollout_ref.rollout.n=1: with a single sample per prompt "
            f"{config.algorithm.adv_estimator} has no baseline, and the advantage is the reward "
            "itself; groups of 5 to 16 are usual"
        )
    if rollout.n > 1 and not rollout.do_sample:
        yield (
            f"actor_rollout_ref.rollout.n={rollout.n}: all samples of a prompt are the same, "
            "because rollout.do_sample=False is greedy, and nothing is learned from comparing them"
        )
    if val_kwargs.n > 1 and not val_kwargs.samples:
        yield (
            f"actor_rollout_ref.rollout.val_kwargs.n={val_kwargs.n}: all samples are the same, "
            "because validation is greedy with val_kwargs.temperature=0 or val_kwargs."
            "do_sample=False"
        )
    if trainer.critic_warmup > 1 and not config.uses_critic:
        yield (
            f"trainer.critic_warmup={trainer.critic_warmup}: there is no critic to warm up, and "
            "nothing is learned before that step"
        )
