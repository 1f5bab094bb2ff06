# SPDX-License-Identifier: Apache-2.0
"""The actor's loss: ``agg(policy loss) - entropy_coeff * agg(entropy) + kl_loss_coef * agg(KL)``.

The losses and metrics of the micro-batches of one optimizer step add up, because all denominators
come from ``LossScale``; sums by lag are divided after the step (``off_policy.figures_by_lag``). The
engine checks once per step that the loss is finite.

Shapes: R response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.algorithms.kl import KL_ESTIMATORS, estimate_kl
from tandem.algorithms.losses import (
    POLICY_LOSSES,
    ClipRange,
    PolicyTerms,
    TokenLosses,
    compute_loss,
)
from tandem.algorithms.off_policy import (
    CLIPPED,
    REJECTED,
    Correction,
    Mismatch,
    all_kept,
    importance_weights,
    lag_sums,
    monitored,
)
from tandem.algorithms.sequences import AGGREGATIONS, aggregate, token_mean
from tandem.config.schema.actor import loss_traits
from tandem.config.schema.imports import is_dotted
from tandem.errors import UserError
from tandem.types import LossInputs, LossOutputs

_ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """The loss of a policy; its fields are verl's keys under ``actor_rollout_ref.actor``.

    Attributes:
        clip_ratio_low, clip_ratio_high, clip_ratio_c: the fields of ``losses.ClipRange``.
        loss_scale_factor: the divisor of ``seq-mean-token-sum-norm`` (verl's default: the longest
            response allowed); None with any other mode.
        calculate_entropy: whether to report the entropy even if it is not part of the loss.
        kl_loss_coef: the coefficient of the KL term; read with ``use_kl_loss`` only.
        correction: the off-policy correction between the current policy and
            ``LossColumns.rollout_logp_R``, if any. Rejected tokens contribute nothing to the policy
            term, but denominators count them.
        max_lag: the largest entry of ``LossColumns.lag_R``.

    Raises:
        UserError: a name is unknown, ``clip_ratio_c`` is at most 1, or the scale factor is missing.
    """

    loss_mode: str
    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float
    loss_agg_mode: str
    loss_scale_factor: float | None
    entropy_coeff: float
    calculate_entropy: bool
    use_kl_loss: bool
    kl_loss_coef: float
    kl_loss_type: str
    correction: Correction | None = None
    max_lag: int = 0

    def __post_init__(self) -> None:
        if not is_dotted(self.loss_mode):
            _check_name("policy_loss.loss_mode", self.loss_mode, known=tuple(POLICY_LOSSES))
        _check_name("loss_agg_mode", self.loss_agg_mode, known=AGGREGATIONS)
        _check_name("kl_loss_type", self.kl_loss_type.removesuffix("+"), known=tuple(KL_ESTIMATORS))
        if self.clip_ratio_c <= 1:
            raise UserError(
                f"{_ACTOR}.clip_ratio_c",
                self.clip_ratio_c,
                rule="must be greater than 1",
                remedy=f"Set {_ACTOR}.clip_ratio_c=3.0.",
            )
        if self.loss_agg_mode == "seq-mean-token-sum-norm" and not self.loss_scale_factor:
            raise UserError(
                f"{_ACTOR}.loss_scale_factor",
                self.loss_scale_factor,
                rule="must be positive with loss_agg_mode=seq-mean-token-sum-norm",
                remedy="Set it to data.max_response_length.",
            )

    @property
    def needs_entropy(self) -> bool:
        """Whether ``LossInputs.entropy_R`` must be computed."""
        return self.calculate_entropy or self.entropy_coeff != 0

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Return this micro-batch's share of the loss, and its metrics.

        Without ``old_logp_R`` the ratio is exactly 1 (on-policy).
        """
        loss, metrics = self._policy_term(inputs)
        if inputs.entropy_R is not None:
            entropy = self._aggregate(inputs.entropy_R, inputs)
            metrics["actor/entropy"] = token_mean(inputs.entropy_R, inputs)
            if self.entropy_coeff != 0:
                metrics["actor/entropy_loss"] = entropy.detach()
                loss = loss - self.entropy_coeff * entropy
        if self.use_kl_loss:
            kl = self._kl_term(inputs)
            metrics["actor/kl_loss"] = kl.detach()
            loss = loss + self.kl_loss_coef * kl
        metrics["actor/loss"] = loss.detach()
        return LossOutputs(loss=loss, metrics=metrics)

    def _policy_term(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        columns = inputs.columns
        assert columns is not None, "a policy loss needs LossColumns"
        old_logp_R = columns.old_logp_R
        terms = PolicyTerms(
            logp_R=inputs.score_R,
            old_logp_R=inputs.score_R.detach() if old_logp_R is None else old_logp_R,
            advantages_R=columns.advantages_R,
            sequence_R=inputs.sequence_R,
            num_sequences=inputs.num_sequences,
        )
        clip = ClipRange(self.clip_ratio_low, self.clip_ratio_high, self.clip_ratio_c)
        tokens = compute_loss(terms, clip, loss_mode=self.loss_mode)
        factor_R, corrected = self._corrected(inputs, tokens)
        token_loss_R = tokens.loss_R if factor_R is None else tokens.loss_R * factor_R
        sequence_level = loss_traits(self.loss_mode).is_sequence_level
        mode = "seq-mean-token-mean" if sequence_level else self.loss_agg_mode
        loss = aggregate(token_loss_R, inputs, mode=mode, scale_factor=self.loss_scale_factor)
        metrics = {
            "actor/pg_loss": loss.detach(),
            "actor/pg_clipfrac": token_mean(tokens.clipped_R, inputs),
            "actor/pg_clipfrac_lower": token_mean(tokens.clipped_lower_R, inputs),
            "actor/ppo_kl": token_mean(-terms.log_ratio(), inputs),
        }
        return loss, metrics | corrected

    def _corrected(
        self, inputs: LossInputs, tokens: TokenLosses
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the factors of the token losses (None if all are 1), and the sums by lag."""
        columns, correction = inputs.columns, self.correction
        assert columns is not None, "a policy loss needs LossColumns"
        if correction is None:
            return columns.weights_R, {}
        factor_R, values = columns.weights_R, {CLIPPED: tokens.clipped_R.float()}
        if columns.rollout_logp_R is not None:
            mismatch = Mismatch(
                inputs.score_R.detach(),
                columns.rollout_logp_R,
                inputs.sequence_R,
                inputs.num_sequences,
            )
            values |= monitored(mismatch, correction)
            if correction.importance is not None:
                factor_R = importance_weights(mismatch, correction.importance)
            if correction.rejections:
                kept_R = all_kept(mismatch, correction.rejections)
                values[REJECTED] = (~kept_R).float()
                factor_R = kept_R.float() if factor_R is None else factor_R * kept_R
        lag_R = torch.zeros_like(inputs.sequence_R) if columns.lag_R is None else columns.lag_R
        counts_R = torch.ones_like(inputs.score_R.detach())
        sums = lag_sums(values, counts_R=counts_R, lag_R=lag_R, num_lags=self.max_lag + 1)
        return factor_R, sums

    def _kl_term(self, inputs: LossInputs) -> Tensor:
        assert inputs.columns is not None and inputs.columns.ref_logp_R is not None, (
            "use_kl_loss needs ref_logp_R"
        )
        kl_R = estimate_kl(inputs.score_R, inputs.columns.ref_logp_R, kind=self.kl_loss_type)
        return self._aggregate(kl_R, inputs)

    def _aggregate(self, values_R: Tensor, inputs: LossInputs) -> Tensor:
        return aggregate(
            values_R, inputs, mode=self.loss_agg_mode, scale_factor=self.loss_scale_factor
        )


def _check_name(key: str, name: str, *, known: tuple[str, ...]) -> None:
    if name not in known:
        raise UserError(
            f"{_ACTOR}.{key}",
            name,
            rule="unknown",
            remedy=f"Use one of {', '.join(known)}.",
        )
