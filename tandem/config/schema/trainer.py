# SPDX-License-Identifier: Apache-2.0
"""``trainer.*``: how long, how often, where to, on what; and ``ray_kwargs.*``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from tandem.config.schema.fields import NOT_BUILT, SECTION, Seed, StringGroups, Strings, no_effect

ResumeMode = Literal["auto", "disable", "resume_path"]


class RayConfig(BaseModel):
    """``ray_kwargs.*``: only a run of several processes has Ray."""

    model_config = SECTION

    ray_init: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Passed to ray.init, e.g. {num_cpus:8}."
    )
    timeline_json_file: str | None = no_effect(None, "Ray's trace.", why=NOT_BUILT)


class TrainerConfig(BaseModel):
    """The run."""

    model_config = SECTION

    project_name: str = Field(
        default="verl_examples", min_length=1, description="Project, for loggers."
    )
    experiment_name: str = Field(default="gsm8k", min_length=1, description="Run, for loggers.")
    default_local_dir: str | None = Field(
        default=None,
        description="Folder of checkpoints and records; null: checkpoints/<project>/<experiment>.",
    )
    total_epochs: int = Field(default=30, ge=1, description="Passes over the training rows.")
    total_training_steps: int | None = Field(
        default=None, ge=1, description="Stop after this many steps, if the epochs last that long."
    )
    nnodes: int = Field(default=1, ge=1, description="Nodes.")
    n_gpus_per_node: int = Field(default=1, ge=1, description="Devices per node (verl: 8).")
    device: str = Field(
        default="auto",
        description="Platform: auto, cuda, rocm, npu, musa, cpu, ... (tandem doctor lists them); "
        "one that is not here ends the run.",
    )
    save_freq: int = Field(
        default=-1, description="Save every so many steps and after the last; 0 or less: never."
    )
    test_freq: int = Field(
        default=-1, description="Validate every so many steps and after the last; 0 or less: never."
    )
    val_before_train: bool = Field(default=True, description="Validate before the first step.")
    val_only: bool = Field(default=False, description="Validate once and stop.")
    critic_warmup: int = Field(
        default=0,
        ge=0,
        description="The actor is updated from this step on (verl's meaning), the critic always.",
    )
    resume_mode: ResumeMode = Field(
        default="auto",
        description="auto: go on from the latest checkpoint if there is one; disable: start anew; "
        "resume_path: go on from resume_from_path.",
    )
    resume_from_path: str | None = Field(default=None, description="A folder global_step_N.")
    seed: Seed = Field(
        default=1,
        ge=0,
        description="Seed of the run: other seeds take it if it is set and they are not.",
    )
    max_actor_ckpt_to_keep: int | None = Field(
        default=None, ge=1, description="Checkpoints to keep; null keeps all."
    )
    logger: Strings = Field(
        default=("console",),
        description="console, file, tensorboard, wandb; metrics.jsonl is always written "
        "(verl: console and wandb).",
    )
    log_val_generations: int = Field(
        default=0,
        ge=0,
        description="Validation samples shown on the console after each validation.",
    )
    rollout_data_dir: str | None = Field(
        default=None, description="Folder for all training rollouts, one <step>.jsonl each."
    )
    validation_data_dir: str | None = Field(
        default=None, description="Folder for all validation rollouts, one <step>.jsonl each."
    )

    async_pipeline: bool = Field(
        default=False,
        description="Generate while training, on devices of its own or in turns on the same.",
    )
    generate_ahead_steps: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="With async_pipeline the largest lag: weights versions between the one that "
        "drew a token and the one that trains on it. 0 is on-policy, 1 one step off; at most 1000.",
    )
    deterministic_async: bool = Field(
        default=False,
        description="Generate in rounds: weights change only when all that was begun is complete, "
        "so that an asynchronous run can be repeated.",
    )
    separated_node_tasks: StringGroups = Field(
        default=(),
        description="Groups of logp, ref_logp, actor-train, generate; each has its own devices.",
    )
    separated_node_ratios: tuple[float, ...] = Field(
        default=(),
        description="Share of all devices for each of these groups; together at most 1.",
    )
    balance_batch: bool = Field(
        default=True,
        description="Give data-parallel ranks sequences of the same cost, not of the same number.",
    )
    ray_wait_register_center_timeout: int = Field(
        default=300, ge=1, description="Seconds that all processes of a run may take to start."
    )
    max_critic_ckpt_to_keep: int | None = no_effect(
        None,
        "Critic checkpoints to keep.",
        why="a checkpoint holds actor and critic: max_actor_ckpt_to_keep decides",
    )
    default_hdfs_dir: str | None = no_effect(None, "Copy checkpoints to HDFS.", why=NOT_BUILT)
    del_local_ckpt_after_load: bool = no_effect(
        False,
        "Delete a checkpoint once loaded.",
        why="old checkpoints go by max_actor_ckpt_to_keep only",
    )
    esi_redundant_time: float = no_effect(0, "Time to save before an instance ends.", why=NOT_BUILT)
    use_legacy_worker_impl: str = no_effect(
        "auto", "Which of verl's workers.", why="there is one implementation"
    )
    use_v1: bool = no_effect(True, "Which of verl's trainers.", why="there is one pipeline")

    @property
    def run_folder(self) -> Path:
        """``default_local_dir``, or ``checkpoints/<project>/<experiment>``; ``~`` expanded."""
        if self.default_local_dir is not None:
            return Path(self.default_local_dir).expanduser()
        return Path("checkpoints") / self.project_name / self.experiment_name

    @property
    def rollout_data_folder(self) -> Path:
        """``rollout_data_dir`` with ``~`` expanded; ask only if it is set."""
        assert self.rollout_data_dir is not None, "trainer.rollout_data_dir is not set"
        return Path(self.rollout_data_dir).expanduser()

    @property
    def validation_data_folder(self) -> Path:
        """``validation_data_dir`` with ``~`` expanded; ask only if it is set."""
        assert self.validation_data_dir is not None, "trainer.validation_data_dir is not set"
        return Path(self.validation_data_dir).expanduser()

    @property
    def resume_folder(self) -> Path:
        """``resume_from_path`` with ``~`` expanded; ask only with ``resume_mode=resume_path``."""
        assert self.resume_from_path is not None, "trainer.resume_from_path is not set"
        return Path(self.resume_from_path).expanduser()

    @property
    def max_lag(self) -> int:
        """Versions that a rollout may be behind: ``generate_ahead_steps`` if ``async_pipeline``."""
        return self.generate_ahead_steps if self.async_pipeline else 0

    @property
    def lockstep(self) -> bool:
        """Whether generation waits for the weights of each step: ``max_lag`` is 0, or
        ``deterministic_async``.
        """
        return self.max_lag == 0 or self.deterministic_async

    @property
    def num_devices(self) -> int:
        """``nnodes * n_gpus_per_node``."""
        return self.nnodes * self.n_gpus_per_node
