# SPDX-License-Identifier: Apache-2.0
"""``trainer.*`` and ``ray_kwargs.*``: length, devices, outputs and asynchrony of a run."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from tandem.config.schema.fields import (
    SECTION,
    TRAINS,
    VALIDATES,
    Section,
    Seed,
    StringGroups,
    Strings,
    read_if,
)
from tandem.config.schema.separate import TrainerModeConfig

_MAY_LAG = "trainer.max_lag>0: the largest lag is 0: each batch is generated and then trained on"

Frequency = int | Literal["after_each_epoch"]
ResumeMode = Literal["auto", "disable", "resume_path"]


class RayConfig(Section):
    """``ray_kwargs.*``: settings of Ray, which only a run of several processes starts."""

    ray_init: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Arguments of ray.init, e.g. {num_cpus:8}."
    )


class TrainerConfig(BaseModel):
    """The run."""

    model_config = SECTION

    project_name: str = Field(
        default="verl_examples", min_length=1, description="Name of the project, for loggers."
    )
    experiment_name: str = Field(
        default="gsm8k", min_length=1, description="Name of the run, for loggers."
    )
    default_local_dir: str | None = Field(
        default=None,
        description="Folder of checkpoints and records. null: checkpoints/<project>/<experiment>.",
    )
    total_epochs: int = Field(
        default=30,
        ge=1,
        description="Number of passes over the training rows.",
        json_schema_extra=read_if(TRAINS),
    )
    total_training_steps: int | None = Field(
        default=None,
        ge=1,
        description="Stop after this number of steps, if the epochs last that long.",
        json_schema_extra=read_if(TRAINS),
    )
    nnodes: int = Field(default=1, ge=1, description="Number of nodes.")
    n_gpus_per_node: int = Field(
        default=1, ge=1, description="Number of devices per node (verl: 8)."
    )
    device: str = Field(
        default="auto",
        description="Platform of the devices: auto, cuda, rocm, npu, musa, cpu, ...; tandem doctor "
        "lists them. A platform that is not available is an error.",
    )
    save_freq: Frequency = Field(
        default=-1,
        description="Number of steps between checkpoints, or after_each_epoch; the last step is "
        "saved too. Negative: the last step only (verl: never). 0: never, except when a signal "
        "stops the run.",
        json_schema_extra=read_if(TRAINS),
    )
    test_freq: Frequency = Field(
        default=-1,
        description="Number of steps between validations, or after_each_epoch; the last step is "
        "validated too. 0 or less: never.",
        json_schema_extra=read_if(TRAINS, VALIDATES),
    )
    val_before_train: bool = Field(
        default=True,
        description="Validate before the first step.",
        json_schema_extra=read_if(VALIDATES),
    )
    val_only: bool = Field(default=False, description="Validate once and stop.")
    critic_warmup: int = Field(
        default=0,
        ge=0,
        description="First step that updates the actor, as in verl; the critic is updated in all "
        "steps.",
    )
    resume_mode: ResumeMode = Field(
        default="auto",
        description="auto: resume from the latest checkpoint of the folder if there is one; "
        "disable: start from the beginning; resume_path: resume from resume_from_path.",
    )
    resume_from_path: str | None = Field(
        default=None,
        description="Folder global_step_N of a checkpoint.",
        json_schema_extra=read_if("resume_mode=resume_path"),
    )
    max_restarts: int = Field(
        default=0,
        ge=0,
        description="Number of times that a failed run starts again by itself, from its newest "
        "checkpoint: never after a wrong input or a signal, and not twice from one checkpoint.",
        json_schema_extra=read_if(TRAINS),
    )
    seed: Seed = Field(
        default=1,
        ge=0,
        description="Seed of the run. Other seeds that are not set follow it.",
    )
    max_actor_ckpt_to_keep: int | None = Field(
        default=None,
        ge=1,
        description="Number of checkpoints to keep. null: all.",
        json_schema_extra=read_if(
            "trainer.saves=True: trainer.save_freq is not positive: the last step alone is saved, "
            "or none"
        ),
    )
    logger: Strings = Field(
        default=("console",),
        description="Where metrics are written: console, file, tensorboard, wandb, mlflow, "
        "swanlab, or a sink of your own as package.module:Sink. metrics.jsonl is always written. "
        "(verl: console and wandb.)",
    )
    metrics: Strings = Field(
        default=(),
        description="Functions of your own, as package.module:function, that compute metrics of "
        "the batch of each step (docs/extend/metrics.md).",
    )
    log_val_generations: int = Field(
        default=0,
        ge=0,
        description="Number of validation samples printed after each validation.",
        json_schema_extra=read_if(VALIDATES),
    )
    rollout_data_dir: str | None = Field(
        default=None,
        description="Folder to write all training rollouts to, one <step>.jsonl per step.",
        json_schema_extra=read_if(TRAINS),
    )
    validation_data_dir: str | None = Field(
        default=None,
        description="Folder to write all validation rollouts to, one <step>.jsonl per validation.",
        json_schema_extra=read_if(VALIDATES),
    )

    async_pipeline: bool = Field(
        default=False,
        description="Generate while training: on separate devices, or alternating with training on "
        "the same devices.",
        json_schema_extra=read_if(_MAY_LAG),
    )
    generate_ahead_steps: float = Field(
        default=0,
        ge=0,
        le=1000,
        description="Maximum lag with async_pipeline: the number of weights versions between the "
        "one that sampled a token and the one that is trained on it. 0: on-policy; 1: one step "
        "off-policy; 0.5: one step, for at most half of a batch. (verl: "
        "async_training.staleness_threshold.)",
        json_schema_extra=read_if("async_pipeline=True"),
    )
    deterministic_async: bool = Field(
        default=False,
        description="Generate in lockstep: weights change only after all started samples are "
        "complete, which makes an asynchronous run reproducible.",
        json_schema_extra=read_if(_MAY_LAG),
    )
    separated_node_tasks: StringGroups = Field(
        default=(),
        description="Groups of the tasks logp, ref_logp, actor-train and generate; each group has "
        "its own devices.",
    )
    separated_node_ratios: tuple[float, ...] = Field(
        default=(),
        description="Share of all devices for each group of separated_node_tasks; the sum is at "
        "most 1.",
    )
    v1: TrainerModeConfig = Field(
        default_factory=TrainerModeConfig, description="verl's keys of asynchronous training."
    )
    balance_batch: bool = Field(
        default=True,
        description="Give data-parallel ranks sequences of the same total cost instead of the same "
        "number of sequences.",
    )
    ray_wait_register_center_timeout: int = Field(
        default=300, ge=1, description="Time limit in seconds for all processes of a run to start."
    )

    @property
    def run_folder(self) -> Path:
        """``default_local_dir``, or ``checkpoints/<project>/<experiment>``; ``~`` expanded."""
        if self.default_local_dir is not None:
            return Path(os.path.expanduser(self.default_local_dir))
        return Path("checkpoints") / self.project_name / self.experiment_name

    @property
    def saves(self) -> bool:
        """Whether checkpoints are written while the run trains."""
        return isinstance(self.save_freq, str) or self.save_freq > 0

    @property
    def rollout_data_folder(self) -> Path:
        """``rollout_data_dir`` with ``~`` expanded; the key must be set."""
        assert self.rollout_data_dir is not None, "trainer.rollout_data_dir is not set"
        return Path(os.path.expanduser(self.rollout_data_dir))

    @property
    def validation_data_folder(self) -> Path:
        """``validation_data_dir`` with ``~`` expanded; the key must be set."""
        assert self.validation_data_dir is not None, "trainer.validation_data_dir is not set"
        return Path(os.path.expanduser(self.validation_data_dir))

    @property
    def resume_folder(self) -> Path:
        """``resume_from_path`` with ``~`` expanded; the key must be set."""
        assert self.resume_from_path is not None, "trainer.resume_from_path is not set"
        return Path(os.path.expanduser(self.resume_from_path))

    @property
    def batches_ahead(self) -> float:
        """The batches that may be generated ahead: ``generate_ahead_steps`` if ``async_pipeline``,
        else 0.
        """
        return self.generate_ahead_steps if self.async_pipeline else 0

    @property
    def max_lag(self) -> int:
        """The maximum lag in weights versions: ``batches_ahead``, rounded up."""
        return math.ceil(self.batches_ahead)

    @property
    def lockstep(self) -> bool:
        """Whether generation waits for the weights of each step: ``max_lag == 0`` or
        ``deterministic_async``.
        """
        return self.max_lag == 0 or self.deterministic_async

    @property
    def num_devices(self) -> int:
        """``nnodes * n_gpus_per_node``."""
        return self.nnodes * self.n_gpus_per_node
