# SPDX-License-Identifier: Apache-2.0
"""``async_training.*`` and ``rollout.*``: what verl's trainers with devices for generation read.

These trainers are ``fully_async_main`` and ``one_step_off_policy.main_ppo``. Their sections say the
same as other keys of tandem, into which ``parse.separate`` turns them.
"""

from __future__ import annotations

from pydantic import Field

from tandem.config.schema.fields import Section


class AsyncTrainingConfig(Section):
    """The batch of a version of the weights, in verl's words."""

    trigger_parameter_sync_step: int | None = Field(
        default=None,
        ge=1,
        description="Number of times that require_batches mini-batches are trained on before "
        "weights go to the rollout. data.train_batch_size is this times require_batches times "
        "actor_rollout_ref.actor.ppo_mini_batch_size.",
    )
    require_batches: int | None = Field(
        default=None,
        ge=1,
        description="Number of mini-batches in a part of the batch (trigger_parameter_sync_step).",
    )
    use_rollout_log_probs: bool | None = Field(
        default=None,
        description="Whether the log-probs of the rollout are the old ones: "
        "algorithm.rollout_correction.bypass_mode.",
    )
    compute_prox_log_prob: bool | None = Field(
        default=None,
        description="Whether the trainer computes the old log-probs: the opposite of "
        "algorithm.rollout_correction.bypass_mode.",
    )


class SeparateRolloutConfig(Section):
    """The devices that generate, beside those of ``trainer.*``, which then count the others."""

    nnodes: int | None = Field(
        default=None,
        ge=0,
        description="Number of nodes that generate; trainer.nnodes is the number of the others. "
        "0: the devices of the trainer generate in turns with training.",
    )
    n_gpus_per_node: int | None = Field(
        default=None,
        ge=0,
        description="Number of devices that generate on each node of rollout.nnodes; "
        "trainer.n_gpus_per_node is the number of the others.",
    )
    total_rollout_steps: int | None = Field(
        default=None,
        ge=1,
        description="Number of prompts of the whole run: trainer.total_training_steps times "
        "data.train_batch_size.",
    )
