# SPDX-License-Identifier: Apache-2.0
"""``algorithm.*``: advantages, KL in the reward, dynamic sampling, rollout correction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from tandem.config.schema.actor import KlEstimator
from tandem.config.schema.correction import RolloutCorrectionConfig
from tandem.config.schema.dotted import ByName, traits_of
from tandem.config.schema.fields import NOT_BUILT, SECTION, no_effect


@dataclass(frozen=True, slots=True)
class Estimator:
    """The traits of an advantage estimator.

    Attributes:
        needs_values: it reads the values of a critic.
        needs_groups: it compares the samples of a prompt and has no meaning for a single one.
        prefers_groups: it compares them too, but takes the reward itself where there is one.
        needs_baseline_rollout: it compares each sample with the greedy response to its prompt.
        reads: the keys below ``algorithm`` that it reads.
    """

    needs_values: bool = False
    needs_groups: bool = False
    prefers_groups: bool = False
    needs_baseline_rollout: bool = False
    reads: tuple[str, ...] = ("gamma", "lam", "norm_adv_by_std_in_grpo")


_GRPO = Estimator(prefers_groups=True, reads=("norm_adv_by_std_in_grpo",))

ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(needs_values=True, reads=("gamma", "lam")),
    "grpo": _GRPO,
    "grpo_vectorized": _GRPO,
    "grpo_passk": Estimator(needs_groups=True, reads=("norm_adv_by_std_in_grpo",)),
    "reinforce_plus_plus": Estimator(reads=("gamma",)),
    "reinforce_plus_plus_baseline": Estimator(needs_groups=True, reads=()),
    "rloo": Estimator(needs_groups=True, reads=()),
    "opo": Estimator(needs_groups=True, reads=()),
    "remax": Estimator(needs_baseline_rollout=True, reads=()),
    "gpg": Estimator(needs_groups=True, reads=()),
}
"""The built-in advantage estimators by their names; ``algorithms.advantages`` computes them."""

EstimatorName = Annotated[str, ByName(ESTIMATORS)]


class KlCtrlConfig(BaseModel):
    """``kl_ctrl.*``: the coefficient of the KL in the reward."""

    model_config = SECTION

    type: Literal["fixed", "adaptive"] = Field(
        default="fixed", description="fixed, or adaptive towards target_kl."
    )
    kl_coef: float = Field(default=0.001, ge=0, description="(First) coefficient.")
    horizon: int = Field(default=10000, ge=1, description="Sequences over which adaptive moves.")
    target_kl: float = Field(default=0.1, gt=0, description="KL that adaptive aims at.")


class FilterGroupsConfig(BaseModel):
    """``filter_groups.*``: DAPO's dynamic sampling."""

    model_config = SECTION

    enable: bool = Field(
        default=False, description="Drop groups whose samples all fare alike, and draw others."
    )
    metric: Literal["acc", "score", "seq_reward", "seq_final_reward"] = Field(
        default="seq_reward",
        description="What must differ: acc and score as the reward function returns them, "
        "seq_reward and seq_final_reward after shaping.",
    )
    max_num_gen_batches: int = Field(
        default=0,
        ge=0,
        description="Give up if so many batches do not fill one step; 0: never.",
    )


class AlgorithmConfig(BaseModel):
    """From rewards to advantages."""

    model_config = SECTION

    adv_estimator: EstimatorName = Field(
        default="grpo",
        description="Advantage estimator: a name of the list, or a function of your own as "
        "package.module:function. gae needs the values of a critic (see critic.*).",
    )
    gamma: float = Field(default=1.0, ge=0, le=1, description="Discount of rewards.")
    lam: float = Field(default=1.0, ge=0, le=1, description="Lambda of gae.")
    norm_adv_by_std_in_grpo: bool = Field(
        default=True,
        description="Divide by the group's standard deviation; False is Dr.GRPO's choice.",
    )
    use_kl_in_reward: bool = Field(
        default=False, description="Subtract KL to the reference from rewards."
    )
    kl_penalty: KlEstimator = Field(default="kl", description="Estimator of that KL.")
    kl_ctrl: KlCtrlConfig = Field(
        default_factory=KlCtrlConfig, description="Coefficient of that KL."
    )
    filter_groups: FilterGroupsConfig = Field(
        default_factory=FilterGroupsConfig, description="Dynamic sampling."
    )
    rollout_correction: RolloutCorrectionConfig = Field(
        default_factory=RolloutCorrectionConfig, description="Rollout against trainer."
    )

    use_pf_ppo: bool = no_effect(False, "PF-PPO resampling.", why=NOT_BUILT)
    pf_ppo: dict[str, Any] = no_effect(dict[str, Any], "Settings of PF-PPO.", why=NOT_BUILT)

    @property
    def estimator(self) -> Estimator:
        """The traits of ``adv_estimator``; raises UserError if it cannot be imported."""
        return traits_of("algorithm.adv_estimator", self.adv_estimator, known=ESTIMATORS)
