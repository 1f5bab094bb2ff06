# SPDX-License-Identifier: Apache-2.0
"""``algorithm.*``: advantages, KL in the reward, dynamic sampling, rollout correction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from tandem.config.schema.actor import KlEstimator
from tandem.config.schema.correction import RolloutCorrectionConfig
from tandem.config.schema.dotted import ByName, traits_of
from tandem.config.schema.fields import Section, Strings, read_if


@dataclass(frozen=True, slots=True)
class Estimator:
    """The traits of an advantage estimator.

    Attributes:
        needs_values: whether it reads the values of a critic.
        needs_groups: whether it compares the samples of a prompt, and needs at least two.
        prefers_groups: whether it compares the samples of a prompt, but also accepts a single
            sample, whose advantage is its reward.
        needs_baseline_rollout: whether it compares each sample with the greedy response to the same
            prompt.
        needs_squares: whether it reads, for each token, its log-prob and the sum of squared
            probabilities under the policy before the update.
        reads: the keys below ``algorithm`` that it reads.
    """

    needs_values: bool = False
    needs_groups: bool = False
    prefers_groups: bool = False
    needs_baseline_rollout: bool = False
    needs_squares: bool = False
    reads: tuple[str, ...] = ("gamma", "lam", "norm_adv_by_std_in_grpo")


_GRPO = Estimator(prefers_groups=True, reads=("norm_adv_by_std_in_grpo",))
_GROUP = Estimator(prefers_groups=True, reads=())
_TOKEN_BASELINE = Estimator(prefers_groups=True, needs_squares=True, reads=())

ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(needs_values=True, reads=("gamma", "lam")),
    "grpo": _GRPO,
    "grpo_vectorized": _GRPO,
    "grpo_passk": Estimator(needs_groups=True, reads=("norm_adv_by_std_in_grpo",)),
    "reinforce_plus_plus": Estimator(reads=("gamma",)),
    "reinforce_plus_plus_baseline": _GROUP,
    "rloo": _GROUP,
    "rloo_vectorized": _GROUP,
    "opo": _GROUP,
    "remax": Estimator(needs_baseline_rollout=True, reads=()),
    "gpg": _GROUP,
    "gdpo": Estimator(
        prefers_groups=True,
        reads=("norm_adv_by_std_in_grpo", "gdpo_reward_keys", "gdpo_reward_weights"),
    ),
    "optimal_token_baseline": _TOKEN_BASELINE,
    "tir_optimal_token_baseline": _TOKEN_BASELINE,
}
"""The built-in advantage estimators by name; ``algorithms.advantages`` computes them."""

EstimatorName = Annotated[str, ByName(ESTIMATORS)]


class KlCtrlConfig(Section):
    """``kl_ctrl.*``: the coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = Field(
        default="fixed",
        description="fixed: the coefficient is constant. adaptive: it follows target_kl.",
    )
    kl_coef: float = Field(
        default=0.001, ge=0, description="Coefficient; with type=adaptive, its initial value."
    )
    horizon: int = Field(
        default=10000,
        ge=1,
        description="Number of sequences over which the coefficient adapts; a larger number makes "
        "it change more slowly.",
        json_schema_extra=read_if("type=adaptive"),
    )
    target_kl: float = Field(
        default=0.1,
        gt=0,
        description="KL divergence that the adaptive coefficient aims at.",
        json_schema_extra=read_if("type=adaptive"),
    )


class FilterGroupsConfig(Section):
    """``filter_groups.*``: DAPO's dynamic sampling."""

    enable: bool = Field(
        default=False,
        description="Drop groups whose samples all have the same metric, and draw other prompts.",
    )
    metric: Literal["acc", "score", "seq_reward", "seq_final_reward"] = Field(
        default="seq_reward",
        description="Metric that must differ within a group. acc, score: as the reward function "
        "returns them; seq_reward, seq_final_reward: the reward after shaping.",
        json_schema_extra=read_if("enable=True"),
    )
    max_num_gen_batches: int = Field(
        default=0,
        ge=0,
        description="Maximum number of batches drawn to fill one step; the run fails if it needs "
        "more. 0: no limit.",
        json_schema_extra=read_if("enable=True"),
    )


class AlgorithmConfig(Section):
    """Advantage estimation and its inputs."""

    adv_estimator: EstimatorName = Field(
        default="grpo",
        description="Advantage estimator: gae, grpo, grpo_vectorized, grpo_passk, rloo, "
        "rloo_vectorized, opo, remax, gpg, gdpo, reinforce_plus_plus, "
        "reinforce_plus_plus_baseline, optimal_token_baseline, tir_optimal_token_baseline, or a "
        "function of your own as package.module:function. gae needs the values of a critic (see "
        "critic.*).",
    )
    gamma: float = Field(default=1.0, ge=0, le=1, description="Discount factor of rewards.")
    lam: float = Field(default=1.0, ge=0, le=1, description="Lambda of gae.")
    norm_adv_by_std_in_grpo: bool = Field(
        default=True,
        description="Divide GRPO's advantages by the standard deviation of the group. False: "
        "Dr. GRPO.",
    )
    gdpo_reward_keys: Strings = Field(
        default=(),
        description="Numbers of the reward that gdpo normalizes apart, by the names that the "
        "reward function returns.",
    )
    gdpo_reward_weights: tuple[float, ...] | None = Field(
        default=None,
        description="Weights of gdpo_reward_keys, in their order; null: all 1.",
    )
    use_kl_in_reward: bool = Field(
        default=False,
        description="Subtract the KL divergence from the reference policy from the rewards.",
    )
    kl_penalty: KlEstimator = Field(
        default="kl",
        description="Estimator of the KL divergence in the reward.",
        json_schema_extra=read_if("use_kl_in_reward=True"),
    )
    kl_ctrl: KlCtrlConfig = Field(
        default_factory=KlCtrlConfig,
        description="Coefficient of the KL penalty in the reward.",
        json_schema_extra=read_if("use_kl_in_reward=True"),
    )
    filter_groups: FilterGroupsConfig = Field(
        default_factory=FilterGroupsConfig, description="Dynamic sampling."
    )
    rollout_correction: RolloutCorrectionConfig = Field(
        default_factory=RolloutCorrectionConfig,
        description="Correction of rollouts whose policy differs from the trained one.",
    )

    @property
    def estimator(self) -> Estimator:
        """The traits of ``adv_estimator``; raises UserError if it cannot be imported."""
        return traits_of(
            "algorithm.adv_estimator",
            self.adv_estimator,
            known=ESTIMATORS,
            arguments=("inputs", "settings"),
        )
