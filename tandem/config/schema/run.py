# SPDX-License-Identifier: Apache-2.0
"""``RunConfig``: all keys of ``tandem train``, which are those of verl's ``ppo_trainer``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

from pydantic import Field, model_validator

from tandem.config.schema.actor import DEFAULT_MINI_BATCH, ActorConfig
from tandem.config.schema.algorithm import AlgorithmConfig
from tandem.config.schema.critic import CRITIC_FOLLOWS, CriticConfig
from tandem.config.schema.data import DataConfig
from tandem.config.schema.fields import TRAINS, Section, follow, read_if
from tandem.config.schema.megatron import STAGE_KEYS
from tandem.config.schema.model import ModelConfig
from tandem.config.schema.pools import PoolsConfig
from tandem.config.schema.ref import RefConfig
from tandem.config.schema.reward import CustomRewardConfig, RewardConfig
from tandem.config.schema.reward_model import REWARD_MODEL_FOLLOWS, RewardModelConfig
from tandem.config.schema.rollout import RolloutConfig
from tandem.config.schema.separate import AsyncTrainingConfig, SeparateRolloutConfig
from tandem.config.schema.trainer import RayConfig, TrainerConfig

_ROUNDING = 1e-9
_FOLLOWS_ACTOR = {
    "log_prob_use_dynamic_bsz": "use_dynamic_bsz",
    "log_prob_max_token_len_per_gpu": "ppo_max_token_len_per_gpu",
}
"""Key of rollout and ref -> the key of the actor that it follows if it is not set, as in verl."""

_FOLLOWS: Mapping[str, str] = {
    "data.seed": "trainer.seed",
    "actor_rollout_ref.rollout.seed": "trainer.seed",
    "actor_rollout_ref.actor.data_loader_seed": "trainer.seed",
    **CRITIC_FOLLOWS,
    **REWARD_MODEL_FOLLOWS,
}
"""Key -> the key that it follows if it is not set."""


_CALLS_FUNCTIONS = (
    "calls_reward_functions=True: the reward model scores training, and there is no validation"
)


class ActorRolloutRefConfig(Section):
    """``actor_rollout_ref.*``: the policy in its three roles."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="The model.")
    actor: ActorConfig = Field(default_factory=ActorConfig, description="The policy in training.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="Generation.")
    ref: RefConfig = Field(
        default_factory=RefConfig,
        description="The reference policy.",
        json_schema_extra=read_if(
            "needs_reference=True: there is no reference, as use_kl_loss=False and "
            "use_kl_in_reward=False"
        ),
    )

    hybrid_engine: bool = Field(
        default=True,
        description="Train and generate on the same devices. False: half of the devices train and "
        "half generate, unless trainer.separated_node_tasks is set.",
    )
    nccl_timeout: int = Field(
        default=600,
        ge=1,
        description="Timeout of collectives in seconds, for any communication library. A process "
        "that sends no heartbeat for half of that time counts as failed.",
    )

    @model_validator(mode="before")
    @classmethod
    def _follow_actor(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Fill unset micro-batch limits of rollout and ref, and ref's layout, from the actor."""
        actor: Any = values.get("actor", {}) if isinstance(values, dict) else None  # pyright: ignore
        if not isinstance(actor, dict):
            return values
        limits: dict[str, Any] = {
            key: actor[source] for key, source in _FOLLOWS_ACTOR.items() if source in actor
        }
        filled = dict(values)
        for name in ("rollout", "ref"):
            role: Any = values.get(name, {})
            filled[name] = limits | role if isinstance(role, dict) else role
        if isinstance(filled["ref"], dict):
            ref = cast(dict[str, Any], filled["ref"])
            filled["ref"] = ref | _layout_of_ref(cast(dict[str, Any], actor), ref)
        return filled


def _layout_of_ref(actor: dict[str, Any], ref: dict[str, Any]) -> dict[str, Any]:
    followed, own = (role.get("fsdp_config", {}) for role in (actor, ref))
    if not isinstance(followed, dict) or not isinstance(own, dict):
        return {}
    inherited = dict(cast(dict[str, Any], followed))
    if "pipeline_model_parallel_size" in own:  # the layers of a stage belong to their number
        for name in STAGE_KEYS:
            inherited.pop(name, None)
    return {"fsdp_config": inherited | own}


def _with_small_mini_batches(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``values`` with an unset mini-batch of the actor that is no larger than the batch."""
    data: Any = values.get("data", {})
    batch: Any = data.get("train_batch_size") if isinstance(data, dict) else None  # pyright: ignore
    if not isinstance(batch, int) or not 0 < batch < DEFAULT_MINI_BATCH:
        return values
    source = {"actor_rollout_ref.actor.ppo_mini_batch_size": "data.train_batch_size"}
    return follow(values, source)


class RunConfig(Section):
    """The configuration of ``tandem train``."""

    data: DataConfig = Field(default_factory=DataConfig, description="Prompts.")
    actor_rollout_ref: ActorRolloutRefConfig = Field(
        default_factory=ActorRolloutRefConfig, description="The policy in its three roles."
    )
    algorithm: AlgorithmConfig = Field(
        default_factory=AlgorithmConfig, description="Advantage estimation and its inputs."
    )
    reward: RewardConfig = Field(
        default_factory=RewardConfig,
        description="Processes that compute rewards.",
        json_schema_extra=read_if(_CALLS_FUNCTIONS),
    )
    reward_model: RewardModelConfig = Field(
        default_factory=RewardModelConfig, description="A reward model, and the reward manager."
    )
    custom_reward_function: CustomRewardConfig = Field(
        default_factory=CustomRewardConfig,
        description="A user's reward function.",
        json_schema_extra=read_if(_CALLS_FUNCTIONS),
    )
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="The run.")
    pools: PoolsConfig = Field(
        default_factory=PoolsConfig, description="Platforms of pools, and transport of weights."
    )
    ray_kwargs: RayConfig = Field(default_factory=RayConfig, description="Settings of Ray.")
    async_training: AsyncTrainingConfig = Field(
        default_factory=AsyncTrainingConfig, description="verl's keys of a batch."
    )
    rollout: SeparateRolloutConfig = Field(
        default_factory=SeparateRolloutConfig, description="verl's keys of devices that generate."
    )
    critic: CriticConfig = Field(
        default_factory=CriticConfig,
        description="The critic.",
        json_schema_extra=read_if(
            "uses_critic=True: there is no critic, as algorithm.adv_estimator needs none, or "
            "critic.enable=False",
            TRAINS,
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _follow(cls, values: dict[str, Any]) -> dict[str, Any]:
        return follow(_with_small_mini_batches(values), _FOLLOWS)

    @property
    def sequences_per_step(self) -> int:
        """``data.train_batch_size * rollout.n``."""
        return self.data.train_batch_size * self.actor_rollout_ref.rollout.n

    @property
    def most_prompts_begun(self) -> int:
        """The largest number of prompts that are generated, or wait until weights that were trained
        on them are in use: ``1 + trainer.batches_ahead`` batches, rounded down.
        """
        batch = self.data.train_batch_size
        return batch + math.floor(self.trainer.batches_ahead * batch + _ROUNDING)

    @property
    def most_prompts_generated(self) -> float:
        """The number of prompts that dynamic sampling may generate for a step, 0 for any number:
        ``max_num_gen_batches`` batches of ``data.gen_batch_size``, for each batch that is generated
        at the same time.
        """
        size = self.data.gen_batch_size or self.data.train_batch_size
        limit = self.algorithm.filter_groups.max_num_gen_batches
        return limit * size * (self.trainer.batches_ahead + 1)

    @property
    def optimizer_steps_per_step(self) -> int:
        """``data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs``."""
        actor = self.actor_rollout_ref.actor
        return self.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs

    @property
    def has_environment(self) -> bool:
        """Whether there are tools, simulated users or agents, so that rows may have episodes."""
        rollout = self.actor_rollout_ref.rollout
        turns, agents = rollout.multi_turn, rollout.agent.agent_loop_config_path
        paths = (turns.tool_config_path, turns.function_tool_path, turns.interaction_config_path)
        return any(path is not None for path in (*paths, agents))

    @property
    def uses_critic(self) -> bool:
        """Whether a critic is trained; if ``critic.enable`` is null, the estimator decides."""
        enable = self.critic.enable
        return self.algorithm.estimator.needs_values if enable is None else enable

    @property
    def calls_reward_functions(self) -> bool:
        """Whether rules or functions score anything: training, or validation."""
        return not self.reward_model.enable or bool(self.data.val_files)

    @property
    def frees_cache(self) -> bool:
        """Whether devices that train and generate free the rollout's cache and weights while they
        train; never with a lag, because sequences are kept over training steps.
        """
        return self.actor_rollout_ref.rollout.free_cache_engine and self.trainer.max_lag == 0

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy is needed: for KL in the loss or in the reward."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the policy must score a batch before its update.

        With ``rollout_correction.bypass_mode``, the rollout's log-probs are used instead. With one
        optimizer step, the loss itself computes the old log-probs, unless KL in the reward,
        rejection, normalized weights, the estimator or routing replay need the whole batch before
        the update.
        """
        correction = self.algorithm.rollout_correction
        if correction.bypass_mode:
            return False
        normalizes = correction.rollout_is_batch_normalize and self.importance_level is not None
        has_several_steps = self.optimizer_steps_per_step > 1
        whole_batch = normalizes or correction.rejects or self.algorithm.estimator.needs_squares
        whole_batch = whole_batch or self.replays_old_log_probs
        return has_several_steps or self.algorithm.use_kl_in_reward or whole_batch

    @property
    def replays_old_log_probs(self) -> bool:
        """Whether updates replay the experts that computed old log-probs (R2)."""
        return self.actor_rollout_ref.actor.router_replay.mode == "R2"

    @property
    def surveys_mini_batches(self) -> bool:
        """Whether the policy scores each mini-batch before its optimizer step: because the loss
        marks tokens, or because ``bypass_mode`` normalizes weights.
        """
        correction = self.algorithm.rollout_correction
        if correction.reinforces:
            return correction.rollout_is_batch_normalize and self.importance_level is not None
        return self.actor_rollout_ref.actor.policy_loss.traits.marks_tokens

    @property
    def importance_level(self) -> Literal["token", "sequence"] | None:
        """``rollout_is`` with ``auto`` resolved; None if no importance weights are applied."""
        is_quantized = self.actor_rollout_ref.rollout.quantization is not None
        may_differ = is_quantized or self.trainer.max_lag > 0
        return self.algorithm.rollout_correction.level(may_differ=may_differ)

    @property
    def compares_policies(self) -> bool:
        """Whether the log-probs of rollout and trainer are compared: for rejection, for importance
        weights, or because rollouts may lag behind.
        """
        rejects = self.algorithm.rollout_correction.rejects
        return rejects or self.importance_level is not None or self.trainer.max_lag > 0
