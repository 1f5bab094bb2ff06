# SPDX-License-Identifier: Apache-2.0
"""The rules for generation and training at the same time, or in turns."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.derived.pools import place_run
from tandem.config.schema.run import RunConfig
from tandem.errors import UserError

_ROLLOUT = "actor_rollout_ref.rollout"


def asynchronous_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors in the keys of asynchronous training."""
    yield from _mode_errors(config)
    yield from _placement_errors(config)
    yield from _round_errors(config)
    yield from _wave_errors(config)


def _mode_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield an error if verl's mode with devices for generation has none."""
    trainer, nodes = config.trainer, config.actor_rollout_ref.rollout.nnodes
    is_apart = trainer.v1.trainer_mode == "separate_async"
    if is_apart and nodes == 0 and not trainer.separated_node_tasks:
        yield UserError(
            f"{_ROLLOUT}.nnodes",
            nodes,
            rule="trainer.v1.trainer_mode=separate_async needs nodes that generate",
            remedy=f"Set {_ROLLOUT}.nnodes=1 and {_ROLLOUT}.n_gpus_per_node.",
        )


def _placement_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield an error unless generation has devices of its own or alternates with training.

    Generation alternates with training if a group holds both tasks and ``hybrid_engine=False``; a
    hybrid engine means that they follow each other in every step.
    """
    key = "trainer.async_pipeline"
    if not config.trainer.async_pipeline or place_run(config).generates_apart:
        return
    if not config.trainer.separated_node_tasks:
        halves = ", which gives generation half of the devices"
        yield UserError(
            key,
            True,
            rule="generation must have devices of its own, or take turns with training",
            remedy="Set actor_rollout_ref.hybrid_engine=False"
            f"{halves if config.trainer.num_devices > 1 else ''}; to take turns, also set "
            "trainer.separated_node_tasks=[[actor-train,logp,ref_logp,generate]] "
            "trainer.separated_node_ratios=[1.0]. Or set trainer.async_pipeline=False.",
        )
    elif config.actor_rollout_ref.hybrid_engine:
        yield UserError(
            key,
            True,
            rule="generate is in the group of actor-train, and a hybrid engine runs these tasks "
            "one after the other in every step",
            remedy="Set actor_rollout_ref.hybrid_engine=False to let them take turns, or take "
            "generate out of that group in trainer.separated_node_tasks, or set "
            "trainer.async_pipeline=False.",
        )
    elif config.trainer.max_lag > 0:
        yield from time_sharing_errors(config)


def _round_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield an error if rounds, which are whole batches, shall begin a part of a batch ahead."""
    trainer = config.trainer
    if trainer.deterministic_async and trainer.batches_ahead != trainer.max_lag:
        yield UserError(
            "trainer.generate_ahead_steps",
            trainer.generate_ahead_steps,
            rule="trainer.deterministic_async=True generates whole batches",
            remedy=f"Set trainer.generate_ahead_steps={trainer.max_lag}.",
        )


def _wave_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield an error if turns shall be drawn in waves while the trainer changes the weights."""
    if config.actor_rollout_ref.rollout.full_determinism and config.trainer.max_lag > 0:
        yield UserError(
            f"{_ROLLOUT}.full_determinism",
            True,
            rule="steps are generated ahead (trainer.generate_ahead_steps="
            f"{config.trainer.generate_ahead_steps:g}), where time decides which weights draw",
            remedy="Set trainer.async_pipeline=False, or leave it out.",
        )


def time_sharing_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield an error for each key that keeps sequences from continuing with new weights.

    They must continue if trainer and rollout take turns on the same devices.
    """
    rule = "generate is in the group of actor-train, where sequences continue with new weights"
    apart = "take generate out of that group in trainer.separated_node_tasks."
    if config.trainer.deterministic_async:
        key = "trainer.deterministic_async"
        yield UserError(key, True, rule=rule, remedy=f"Set {key}=False, or {apart}")
    if not config.actor_rollout_ref.rollout.partial_rollout:
        key = f"{_ROLLOUT}.partial_rollout"
        yield UserError(key, False, rule=rule, remedy=f"Set {key}=True, or {apart}")
