# SPDX-License-Identifier: Apache-2.0
"""The model that a command trains: one form for ``tandem train`` and ``tandem sft``.

The two commands have different keys for the same settings. The driver reads this form, and its
messages name the keys of the command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.config.derived.adapters import Adapters, adapters_of
from tandem.config.derived.pools import (
    CRITIC,
    REWARD_MODEL,
    Placement,
    place_run,
    place_sft,
    section_of,
)
from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.model import ModelConfig
from tandem.config.schema.optim import OptimConfig
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig


@dataclass(frozen=True, slots=True)
class ModelOfTask:
    """The model that does a task, or an auxiliary model.

    Attributes:
        layout: the keys that lay out its weights over ranks.
        section: their section, for messages.
        optim: None for a model that only scores.
    """

    config: ModelConfig
    layout: FsdpConfig
    section: str
    optim: OptimConfig | None = None


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The model that a command trains.

    Attributes:
        key: the configuration key of its path.
        chat_template: the template that replaces the tokenizer's; None keeps that.
        load_weight: whether its weights are loaded; else they are drawn at random.
        max_tokens: the length of the longest sequence, in tokens.
        max_tokens_key: the keys that ``max_tokens`` is computed from.
        of_task: the model of each task and each auxiliary model of the run. Tasks that are missing
            use the one of ``actor-train``.
        timeout_s: the timeout of collectives.
        freezes_tower: whether the vision tower of a model that sees is not trained.
        freezes_router: whether the routers of a model with experts are not trained.
    """

    config: ModelConfig
    key: str
    chat_template: str | None
    load_weight: bool
    max_tokens: int
    max_tokens_key: str
    of_task: Mapping[str, ModelOfTask]
    timeout_s: float
    freezes_tower: bool = False
    freezes_router: bool = False

    @property
    def adapters(self) -> Adapters | None:
        """The adapters that are trained instead of the weights; None trains all weights.

        Raises:
            UserError: the adapter to start from cannot be used.
        """
        return adapters_of(self.config, section=self.key.removesuffix(".path"))

    @property
    def name(self) -> str:
        """The key with its value, for messages."""
        return f"{self.key}={self.config.path!r}"


def trained_model(config: RunConfig | SftConfig) -> TrainedModel:
    """Return the model that a command with this configuration trains."""
    if isinstance(config, SftConfig):
        return TrainedModel(
            config=config.model,
            key="model.path",
            chat_template=config.chat_template,
            load_weight=True,
            max_tokens=config.data.max_length,
            max_tokens_key="data.max_length",
            of_task={
                "actor-train": ModelOfTask(config.model, config.engine, "engine", config.optim)
            },
            timeout_s=config.nccl_timeout,
        )
    roles, data = config.actor_rollout_ref, config.data
    actor, critic, judge = roles.actor, config.critic, config.reward_model
    models = {
        "actor-train": (roles.model, actor.fsdp_config, actor.optim),
        "ref_logp": (roles.model, roles.ref.fsdp_config, None),
    }
    if config.uses_critic:
        models[CRITIC] = (critic.model, critic.model.fsdp_config, critic.optim)
    if judge.enable:
        models[REWARD_MODEL] = (judge.model, judge.model.fsdp_config, None)
    return TrainedModel(
        config=roles.model,
        key="actor_rollout_ref.model.path",
        chat_template=roles.model.custom_chat_template,
        load_weight=roles.actor.load_weight,
        max_tokens=data.max_prompt_length + data.max_response_length,
        max_tokens_key="data.max_prompt_length + data.max_response_length",
        of_task={
            task: ModelOfTask(model, layout, section_of(task), optim)
            for task, (model, layout, optim) in models.items()
        },
        timeout_s=roles.nccl_timeout,
        freezes_tower=actor.freeze_vision_tower,
        freezes_router=actor.freeze_moe_router,
    )


def place(config: RunConfig | SftConfig) -> Placement:
    """Return the pools of a command with this configuration."""
    return place_sft(config) if isinstance(config, SftConfig) else place_run(config)
