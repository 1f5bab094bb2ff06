# SPDX-License-Identifier: Apache-2.0
"""The keys of verl's asynchronous trainers, beside those of all trainers.

``fully_async_main`` and ``one_step_off_policy.main_ppo`` read ``async_training.*`` and
``rollout.*``, and ``main_ppo`` reads ``trainer.v1.*``. These keys say the same as other keys of
tandem, into which ``parse.separate`` turns them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.config.schema.fields import Section, read_if


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


class ColocatedConfig(Section):
    """``trainer.v1.colocate_async.*``."""

    num_warmup_batches: int = Field(
        default=1,
        ge=0,
        description="Number of batches that are generated ahead (trainer.generate_ahead_steps).",
        json_schema_extra=read_if("trainer.v1.trainer_mode=colocate_async"),
    )


class SeparatedConfig(Section):
    """``trainer.v1.separate_async.*``."""

    num_warmup_batches: int = Field(
        default=1,
        ge=0,
        description="Number of batches that are generated ahead (trainer.generate_ahead_steps).",
        json_schema_extra=read_if("trainer.v1.trainer_mode=separate_async"),
    )


class SamplerConfig(Section):
    """``trainer.v1.sampler.*``."""

    max_off_policy_threshold: int = Field(
        default=8,
        ge=1,
        description="Number of versions of the weights over which a sample may extend: one more "
        "than the largest lag.",
        json_schema_extra=read_if("trainer.v1.trainer_mode!=sync"),
    )


class TrainerModeConfig(Section):
    """``trainer.v1.*``: verl's names of asynchronous training with ``main_ppo``."""

    trainer_mode: Literal["sync", "colocate_async", "separate_async"] = Field(
        default="sync",
        description="colocate_async: generation and training take turns on all devices; "
        "separate_async: actor_rollout_ref.rollout.nnodes nodes generate beside those of the "
        "trainer; sync: trainer.async_pipeline decides.",
    )
    colocate_async: ColocatedConfig = Field(
        default_factory=ColocatedConfig, description="Keys of colocate_async."
    )
    separate_async: SeparatedConfig = Field(
        default_factory=SeparatedConfig, description="Keys of separate_async."
    )
    sampler: SamplerConfig = Field(
        default_factory=SamplerConfig, description="The choice of samples."
    )
