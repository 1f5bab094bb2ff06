# SPDX-License-Identifier: Apache-2.0
"""``RunConfig``: the whole key tree of ``tandem train``, which is verl's ``ppo_trainer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from pydantic import BaseModel, Field, model_validator

from tandem.config.schema.actor import ActorConfig
from tandem.config.schema.algorithm import AlgorithmConfig
from tandem.config.schema.critic import CRITIC_FOLLOWS, CriticConfig
from tandem.config.schema.data import DataConfig
from tandem.config.schema.fields import NOT_BUILT, SECTION, follow, no_effect
from tandem.config.schema.model import ModelConfig
from tandem.config.schema.pools import PoolsConfig
from tandem.config.schema.ref import RefConfig
from tandem.config.schema.reward import CustomRewardConfig, RewardConfig
from tandem.config.schema.reward_model import REWARD_MODEL_FOLLOWS, RewardModelConfig
from tandem.config.schema.rollout import RolloutConfig
from tandem.config.schema.trainer import RayConfig, TrainerConfig

_FOLLOWS_ACTOR = {
    "log_prob_use_dynamic_bsz": "use_dynamic_bsz",
    "log_prob_max_token_len_per_gpu": "ppo_max_token_len_per_gpu",
}
"""Keys of rollout and ref that take the actor's value if they are not set, as in verl."""

_FOLLOWS: Mapping[str, str] = {
    "data.seed": "trainer.seed",
    "actor_rollout_ref.rollout.seed": "trainer.seed",
    "actor_rollout_ref.actor.data_loader_seed": "trainer.seed",
    **CRITIC_FOLLOWS,
    **REWARD_MODEL_FOLLOWS,
}
"""Keys that take the value of others if they are not set."""


class ActorRolloutRefConfig(BaseModel):
    """``actor_rollout_ref.*``: one policy in its three roles."""

    model_config = SECTION

    model: ModelConfig = Field(default_factory=ModelConfig, description="The model.")
    actor: ActorConfig = Field(default_factory=ActorConfig, description="The policy in training.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="Generation.")
    ref: RefConfig = Field(default_factory=RefConfig, description="The reference policy.")

    hybrid_engine: bool = Field(
        default=True,
        description="Trainer and rollout on the same devices; False gives each half of them, "
        "unless trainer.separated_node_tasks says otherwise.",
    )
    nccl_timeout: int = Field(
        default=600,
        ge=1,
        description="Deadline of collectives in seconds, of any library; a process that gives no "
        "sign of life for half of it has failed.",
    )

    @model_validator(mode="before")
    @classmethod
    def _follow_actor(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Give rollout and ref the actor's micro-batch limits, and ref the actor's layout, where
        they have none of their own.
        """
        actor: Any = values.get("actor", {})
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
    """``fsdp_config`` of the reference: its own keys over the actor's."""
    below, above = (role.get("fsdp_config", {}) for role in (actor, ref))
    if not isinstance(below, dict) or not isinstance(above, dict):
        return {}
    return {"fsdp_config": cast(dict[str, Any], below) | above}


class RunConfig(BaseModel):
    """Everything ``tandem train`` can be told."""

    model_config = SECTION

    data: DataConfig = Field(default_factory=DataConfig, description="Prompts.")
    actor_rollout_ref: ActorRolloutRefConfig = Field(
        default_factory=ActorRolloutRefConfig, description="The policy in its three roles."
    )
    algorithm: AlgorithmConfig = Field(
        default_factory=AlgorithmConfig, description="From rewards to advantages."
    )
    reward: RewardConfig = Field(default_factory=RewardConfig, description="Reward processes.")
    reward_model: RewardModelConfig = Field(
        default_factory=RewardModelConfig, description="A reward model, and reward managers."
    )
    custom_reward_function: CustomRewardConfig = Field(
        default_factory=CustomRewardConfig, description="A reward function of the user."
    )
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="The run.")
    pools: PoolsConfig = Field(
        default_factory=PoolsConfig, description="On whose devices each task runs."
    )
    ray_kwargs: RayConfig = Field(default_factory=RayConfig, description="Settings of Ray.")
    critic: CriticConfig = Field(default_factory=CriticConfig, description="The critic.")

    global_profiler: dict[str, Any] = no_effect(dict[str, Any], "Profilers.", why=NOT_BUILT)
    transfer_queue: dict[str, Any] = no_effect(
        dict[str, Any],
        "verl's transfer queue.",
        why="micro-batches go straight to the ranks that compute them",
    )

    @model_validator(mode="before")
    @classmethod
    def _follow(cls, values: dict[str, Any]) -> dict[str, Any]:
        return follow(values, _FOLLOWS)

    @property
    def sequences_per_step(self) -> int:
        """``data.train_batch_size * rollout.n``."""
        return self.data.train_batch_size * self.actor_rollout_ref.rollout.n

    @property
    def optimizer_steps_per_step(self) -> int:
        """``data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs``."""
        actor = self.actor_rollout_ref.actor
        return self.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs

    @property
    def uses_critic(self) -> bool:
        """``critic.enable``, or if that is null whether the advantages need values."""
        enable = self.critic.enable
        return self.algorithm.estimator.needs_values if enable is None else enable

    @property
    def frees_cache(self) -> bool:
        """Whether devices that train, too, keep nothing of generation meanwhile; with a lag there
        is something to generate at any time.
        """
        return self.actor_rollout_ref.rollout.free_cache_engine and self.trainer.max_lag == 0

    @property
    def needs_reference(self) -> bool:
        """Whether anything reads log-probs of the reference: KL in the loss or in the reward."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the policy must score a batch before it is updated.

        Not if one optimizer step is taken (the policy it starts from is the current one, which the
        loss sees), and not in ``rollout_correction.bypass_mode``, which takes the rollout's own
        log-probs. Rejection and normalised weights look at the whole batch before the update.
        """
        correction = self.algorithm.rollout_correction
        if correction.bypass_mode:
            return False
        normalizes = correction.rollout_is_batch_normalize and self.importance_level is not None
        rejects = correction.rollout_rs is not None
        has_several_steps = self.optimizer_steps_per_step > 1
        return has_several_steps or self.algorithm.use_kl_in_reward or normalizes or rejects

    @property
    def importance_level(self) -> Literal["token", "sequence"] | None:
        """``rollout_is`` with ``auto`` decided; None where the ratio of the loss is the weight."""
        return self.algorithm.rollout_correction.level(may_lag=self.trainer.max_lag > 0)

    @property
    def compares_policies(self) -> bool:
        """Whether anything looks at the difference of rollout and trainer beyond its size: a
        correction, or rollouts that may lag behind.
        """
        rejects = self.algorithm.rollout_correction.rollout_rs is not None
        return rejects or self.importance_level is not None or self.trainer.max_lag > 0
