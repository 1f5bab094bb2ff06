# SPDX-License-Identifier: Apache-2.0
"""The keys of verl's trainers with devices for generation, in terms of tandem's own keys.

verl's ``fully_async_main`` trains ``trigger_parameter_sync_step`` times on ``require_batches``
mini-batches, and then gives the weights to the rollout. Here these mini-batches are one batch. It
may generate ``1 + staleness_threshold`` batches between two transfers, which is what
``trainer.generate_ahead_steps`` means, of which the threshold is another name. verl counts the
devices that train and those that generate apart, and tandem counts all of them and gives shares.
``main_ppo`` with ``trainer.v1.trainer_mode`` generates whole batches ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import attrgetter
from typing import Any, cast

from tandem.config.schema.pools import HALVES
from tandem.config.schema.run import RunConfig
from tandem.config.schema.separate import AsyncTrainingConfig, SeparateRolloutConfig
from tandem.config.schema.trainer import TrainerConfig
from tandem.errors import UserError

SEPARATE_SECTIONS = "async_training.* and rollout.*"
V1_SECTION = "trainer.v1.*"
HOST_DEVICES = 8
"""The number of devices of a host, where verl's keys leave it open."""

_BATCH = "data.train_batch_size"
_BYPASS = "algorithm.rollout_correction.bypass_mode"
_NONE_APART = "rollout.nnodes=null rollout.n_gpus_per_node=null"
RESULTS = (
    _BATCH,
    "trainer.total_training_steps",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.separated_node_tasks",
    "trainer.separated_node_ratios",
    "trainer.async_pipeline",
    "trainer.generate_ahead_steps",
    "actor_rollout_ref.hybrid_engine",
    _BYPASS,
)
"""The keys that verl's decide."""


def with_separate_devices(config: RunConfig) -> tuple[RunConfig, str]:
    """Return a configuration with verl's keys in terms of tandem's, and a warning that names them.

    It is ``config`` itself, and "", if none of verl's keys is set.

    Raises:
        UserError: the keys contradict others, or the devices do not lie on equal nodes.
    """
    asynchronous, rollout = config.async_training, config.rollout
    if config.trainer.v1.trainer_mode != "sync":
        changed = _in_mode(config)
        became = _difference(config, changed)
        return changed, f"{V1_SECTION} is read as {became}" if became else ""
    if asynchronous == AsyncTrainingConfig() and rollout == SeparateRolloutConfig():
        return config, ""
    given = config
    config = _with_batch(config)
    config = _with_correction(config)
    if rollout.total_rollout_steps is not None:
        config = _with_steps(config, rollout.total_rollout_steps)
    if rollout.nnodes is not None or rollout.n_gpus_per_node is not None:
        num_nodes, num_generating = _generating(rollout)
        _require_no_shares(config, num_nodes)
        config = _with_pools(config, num_nodes, num_generating=num_generating)
    own = {"async_training": AsyncTrainingConfig(), "rollout": SeparateRolloutConfig()}
    became = _difference(given, config)
    config = config.model_copy(update=own)
    return config, f"{SEPARATE_SECTIONS} are read as {became}" if became else ""


def _in_mode(config: RunConfig) -> RunConfig:
    """Return a copy that trains as ``trainer.v1.trainer_mode`` says.

    A recorded configuration has the devices and the lag already.

    Raises:
        UserError: ``trainer.async_pipeline=False`` is set.
    """
    if "async_pipeline" in config.trainer.model_fields_set and not config.trainer.async_pipeline:
        raise UserError(
            "trainer.async_pipeline",
            False,
            rule=f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode} trains asynchronously",
            remedy="Leave it out, or set trainer.v1.trainer_mode=sync.",
        )
    v1, rollout = config.trainer.v1, config.actor_rollout_ref.rollout
    is_apart = v1.trainer_mode == "separate_async"
    mode = v1.separate_async if is_apart else v1.colocate_async
    lag = min(mode.num_warmup_batches, v1.sampler.max_off_policy_threshold - 1)
    if "generate_ahead_steps" not in config.trainer.model_fields_set:
        config = _with_trainer(config, {"generate_ahead_steps": float(lag)})
    config = _with_trainer(config, {"async_pipeline": True})
    trainer = config.trainer
    has_shares = trainer.separated_node_tasks or trainer.separated_node_ratios
    if has_shares or (is_apart and rollout.nnodes == 0):
        return config
    per_node = rollout.n_gpus_per_node or trainer.n_gpus_per_node
    return _with_pools(config, rollout.nnodes if is_apart else 0, num_generating=per_node)


def _difference(given: RunConfig, config: RunConfig) -> str:
    """Return the keys in which two configurations differ, as a command line gives them."""
    values = ((key, attrgetter(key)(config)) for key in RESULTS)
    changed = [(key, value) for key, value in values if value != attrgetter(key)(given)]
    return " ".join(f"{key}={_shown(value)}" for key, value in changed)


def _shown(value: Any) -> str:
    if not isinstance(value, tuple):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return f"[{','.join(map(_shown, cast(tuple[Any, ...], value)))}]"


def _with_trainer(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return a copy with other values of ``trainer.*``."""
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=values)})


def _with_batch(config: RunConfig) -> RunConfig:
    asynchronous, given = config.async_training, config.data.train_batch_size
    rounds, batches = asynchronous.trigger_parameter_sync_step, asynchronous.require_batches
    if rounds is None and batches is None:
        return config
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    batch = (rounds or 1) * (batches or 1) * mini
    is_given = "train_batch_size" in config.data.model_fields_set
    if is_given and given not in (0, batch):
        raise UserError(
            _BATCH,
            given,
            rule=f"trigger_parameter_sync_step ({rounds or 1}) times require_batches "
            f"({batches or 1}) of async_training, times {mini} prompts of a mini-batch, is {batch}",
            remedy=f"Set {_BATCH}=0, which means that product, or leave async_training.* out.",
        )
    data = config.data.model_copy(update={"train_batch_size": batch})
    return config.model_copy(update={"data": data})


def _with_correction(config: RunConfig) -> RunConfig:
    """Return a copy that takes the rollout's log-probs for the old ones if verl's keys say so."""
    asynchronous = config.async_training
    taken, computed = asynchronous.use_rollout_log_probs, asynchronous.compute_prox_log_prob
    if taken is None and computed is None:
        return config
    bypass = taken is not False and computed is not True
    correction = config.algorithm.rollout_correction
    if "bypass_mode" in correction.model_fields_set and correction.bypass_mode != bypass:
        raise UserError(
            _BYPASS,
            correction.bypass_mode,
            rule="async_training.use_rollout_log_probs and compute_prox_log_prob mean that it is "
            f"{bypass}",
            remedy="Leave it out, or those of async_training.",
        )
    correction = correction.model_copy(update={"bypass_mode": bypass})
    algorithm = config.algorithm.model_copy(update={"rollout_correction": correction})
    return config.model_copy(update={"algorithm": algorithm})


def _with_steps(config: RunConfig, num_prompts: int) -> RunConfig:
    batch, given = config.data.train_batch_size, config.trainer.total_training_steps
    steps = num_prompts // batch if batch else 0
    if steps == 0:
        raise UserError(
            "rollout.total_rollout_steps",
            num_prompts,
            rule=f"is the number of prompts of the whole run, and a step takes {batch}",
            remedy=f"Set rollout.total_rollout_steps={batch} or more.",
        )
    return _with_trainer(
        config, {"total_training_steps": steps if given is None else min(steps, given)}
    )


def _require_no_shares(config: RunConfig, num_nodes: int) -> None:
    """Raise UserError if tandem's own keys divide the devices, too."""
    trainer = config.trainer
    if trainer.separated_node_tasks or trainer.separated_node_ratios:
        raise UserError(
            "rollout.nnodes",
            num_nodes,
            rule="trainer.separated_node_tasks and separated_node_ratios give the devices that "
            "generate, too",
            remedy=f"Set {_NONE_APART}, or leave out trainer.separated_node_*.",
        )


def _with_pools(config: RunConfig, num_nodes: int, *, num_generating: int) -> RunConfig:
    """Return a copy in which so many devices generate, or all of them in turns if that is 0."""
    trainer = config.trainer
    trains, generates = trainer.num_devices, num_nodes * num_generating
    nodes, per_node = _hosts(trainer, num_nodes, num_generating=num_generating)
    total = nodes * per_node
    shared = generates == 0
    groups = (tuple(chain.from_iterable(HALVES)),) if shared else HALVES
    config = _with_trainer(
        config,
        {
            "nnodes": nodes,
            "n_gpus_per_node": per_node,
            "separated_node_tasks": groups,
            "separated_node_ratios": (1.0,) if shared else (trains / total, generates / total),
        },
    )
    roles = config.actor_rollout_ref.model_copy(update={"hybrid_engine": False})
    return config.model_copy(update={"actor_rollout_ref": roles})


def _generating(rollout: SeparateRolloutConfig) -> tuple[int, int]:
    """Return the number of nodes that generate, and of devices on each that do."""
    numbers = {"nnodes": rollout.nnodes, "n_gpus_per_node": rollout.n_gpus_per_node}
    if 0 in numbers.values():
        return 0, 0
    for name, other in (("nnodes", "n_gpus_per_node"), ("n_gpus_per_node", "nnodes")):
        if numbers[other] is None:
            raise UserError(
                f"rollout.{name}",
                numbers[name],
                rule=f"rollout.{other} is not set, and both give the devices that generate",
                remedy=f"Set rollout.{other}, or rollout.{name}=null.",
            )
    assert rollout.nnodes is not None and rollout.n_gpus_per_node is not None, "both are set"
    return rollout.nnodes, rollout.n_gpus_per_node


def _hosts(trainer: TrainerConfig, num_nodes: int, *, num_generating: int) -> tuple[int, int]:
    """Return the number of nodes of the whole run, and of devices on each.

    Devices of the trainer and of the rollout that fit one host of ``HOST_DEVICES`` share it, if
    both have as many nodes.
    """
    total = trainer.num_devices + num_nodes * num_generating
    together = trainer.n_gpus_per_node + num_generating
    larger = max(trainer.n_gpus_per_node, num_generating)
    if total == trainer.num_devices:
        return trainer.nnodes, trainer.n_gpus_per_node
    if trainer.nnodes == num_nodes and together <= max(HOST_DEVICES, larger):
        return trainer.nnodes, together
    if total % larger == 0:
        return total // larger, larger
    is_in_mode = trainer.v1.trainer_mode != "sync"
    raise UserError(
        "actor_rollout_ref.rollout.n_gpus_per_node" if is_in_mode else "rollout.n_gpus_per_node",
        num_generating,
        rule=f"the {total} devices that train or generate do not lie on nodes of {larger}",
        remedy=("" if is_in_mode else f"Set {_NONE_APART}. ")
        + "Count all devices with trainer.nnodes and trainer.n_gpus_per_node, and give shares of "
        "them with trainer.separated_node_tasks and trainer.separated_node_ratios.",
    )
