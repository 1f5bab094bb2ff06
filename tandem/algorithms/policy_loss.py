# SPDX-License-Identifier: Apache-2.0
"""The actor's loss: ``agg(policy loss) - entropy_coeff * agg(entropy) + kl_loss_coef * agg(KL)``.

The losses and metrics of the micro-batches of one optimizer step add up, because all denominators
come from ``LossScale``; sums by lag are divided after the step (``off_policy.metrics_by_lag``). The
engine checks once per step that the loss is finite.

Shapes: R response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tandem.algorithms.covariance import mark_tokens
from tandem.algorithms.kl import estimate_kl
from tandem.algorithms.losses import PolicyTerms, TokenLosses, compute_loss, require_gradient
from tandem.algorithms.off_policy import (
    CLIPPED,
    REJECTED,
    Correction,
    Mismatch,
    all_kept,
    importance_weights,
    lag_sums,
    monitored,
    normalized,
)
from tandem.algorithms.sequences import aggregate, token_mean
from tandem.config.schema.actor import ActorConfig, loss_traits
from tandem.types import LossColumns, LossInputs, LossOutputs, LossScale

_LOWEST_WEIGHT = 1e-10
"""The weight that stands for 0 in a geometric mean, as in verl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """The loss of a policy.

    Attributes:
        loss_mode: the policy loss, a name of ``losses.POLICY_LOSSES`` or a dotted path.
        settings: the keys of the loss, its aggregation, entropy and KL.
        loss_scale_factor: the divisor of ``seq-mean-token-sum-norm`` (verl's default: the longest
            response allowed); None with any other mode.
        calculate_entropy: whether to report the entropy even if it is not part of the loss.
        correction: the off-policy correction between the current policy and
            ``LossColumns.rollout_logp_R``, if any. Rejected tokens contribute nothing to any term,
            but the denominators of the step count them.
        max_lag: the largest entry of ``LossColumns.lag_R``.
    """

    loss_mode: str
    settings: ActorConfig
    loss_scale_factor: float | None = None
    calculate_entropy: bool = False
    correction: Correction | None = None
    max_lag: int = 0

    @property
    def needs_entropy(self) -> bool:
        """Whether ``LossInputs.entropy_R`` must be computed."""
        return self.calculate_entropy or self.settings.entropy_coeff != 0

    def survey(
        self,
        logp_R: Tensor,
        columns: LossColumns,
        *,
        sequence_R: Tensor,
        random: np.random.Generator,
    ) -> LossColumns:
        """Return the columns of a mini-batch with those that depend on all of its tokens.

        It is called before each optimizer step if ``RunConfig.surveys_mini_batches``.

        Args:
            logp_R: the log-probs of the tokens under the current policy.
            sequence_R: the sequence of each token; every sequence has one.
            random: the source of random choices.
        """
        num_sequences = int(sequence_R[-1]) + 1
        inputs = LossInputs(
            score_R=logp_R,
            entropy_R=None,
            sequence_R=sequence_R,
            num_sequences=num_sequences,
            columns=columns,
            scale=LossScale(len(logp_R), num_sequences),
        )
        mismatch = self._mismatch(inputs)
        sampling = None if self.correction is None else self.correction.importance
        if mismatch is not None and sampling is not None and sampling.in_survey:
            weights_R = importance_weights(mismatch, sampling)
            weights_R = normalized(weights_R, mismatch, by_sequence=sampling.by_sequence)
            columns = replace(columns, weights_R=weights_R)
        if loss_traits(self.loss_mode).marks_tokens:
            terms = self._terms(replace(inputs, kept_R=self._kept(mismatch)))
            marked_R = mark_tokens(terms, self.settings, loss_mode=self.loss_mode, random=random)
            columns = replace(columns, marked_R=marked_R)
        return columns

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Return this micro-batch's share of the loss, and its metrics.

        Without ``old_logp_R`` the ratio is exactly 1 (on-policy).
        """
        settings, mismatch = self.settings, self._mismatch(inputs)
        inputs = replace(inputs, kept_R=self._kept(mismatch))
        loss, metrics = self._policy_term(inputs, mismatch)
        if inputs.entropy_R is not None:
            entropy = self._aggregate(inputs.entropy_R, inputs)
            metrics["actor/entropy"] = token_mean(inputs.entropy_R, inputs)
            if settings.entropy_coeff != 0:
                metrics["actor/entropy_loss"] = entropy.detach()
                loss = loss - settings.entropy_coeff * entropy
        if settings.use_kl_loss:
            kl = self._kl_term(inputs)
            metrics["actor/kl_loss"] = kl.detach()
            loss = loss + settings.kl_loss_coef * kl
        if inputs.score_R.requires_grad:
            require_gradient(loss, loss_mode=self.loss_mode)
        metrics["actor/loss"] = loss.detach()
        return LossOutputs(loss=loss, metrics=metrics)

    def _mismatch(self, inputs: LossInputs) -> Mismatch | None:
        """Return the two policies of the correction, if they are compared in the loss."""
        assert inputs.columns is not None, "a policy loss needs LossColumns"
        rollout_logp_R = inputs.columns.rollout_logp_R
        if self.correction is None or rollout_logp_R is None:
            return None
        return Mismatch(
            inputs.score_R.detach(), rollout_logp_R, inputs.sequence_R, inputs.num_sequences
        )

    def _kept(self, mismatch: Mismatch | None) -> Tensor | None:
        if mismatch is None or self.correction is None or not self.correction.rejections:
            return None
        return all_kept(mismatch, self.correction.rejections)

    def _terms(self, inputs: LossInputs) -> PolicyTerms:
        columns = inputs.columns
        assert columns is not None, "a policy loss needs LossColumns"
        old_logp_R = columns.old_logp_R
        return PolicyTerms(
            logp_R=inputs.score_R,
            old_logp_R=inputs.score_R.detach() if old_logp_R is None else old_logp_R,
            advantages_R=columns.advantages_R,
            sequence_R=inputs.sequence_R,
            num_sequences=inputs.num_sequences,
            kept_R=inputs.kept_R,
            marked_R=columns.marked_R,
        )

    def _policy_term(
        self, inputs: LossInputs, mismatch: Mismatch | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        columns, traits = inputs.columns, loss_traits(self.loss_mode)
        assert columns is not None, "a policy loss needs LossColumns"
        terms = self._terms(inputs)
        tokens = compute_loss(terms, self.settings, loss_mode=self.loss_mode)
        if inputs.kept_R is not None:
            clipped = (
                flag_R & inputs.kept_R for flag_R in (tokens.clipped_R, tokens.clipped_lower_R)
            )
            tokens = TokenLosses(tokens.loss_R, *clipped)
        weights_R = columns.weights_R
        if weights_R is None and mismatch is not None and self.correction is not None:
            sampling = self.correction.importance
            weights_R = None if sampling is None else importance_weights(mismatch, sampling)
        if weights_R is not None and traits.weighs_sequences:
            mean_N = terms.mean_by_sequence((weights_R + _LOWEST_WEIGHT).log())
            weights_R = mean_N.exp()[inputs.sequence_R]
        token_loss_R = tokens.loss_R if weights_R is None else tokens.loss_R * weights_R
        mode = "seq-mean-token-mean" if traits.is_sequence_level else self.settings.loss_agg_mode
        loss = aggregate(token_loss_R, inputs, mode=mode, scale_factor=self.loss_scale_factor)
        metrics = {
            "actor/pg_loss": loss.detach(),
            "actor/pg_clipfrac": token_mean(tokens.clipped_R, inputs),
            "actor/pg_clipfrac_lower": token_mean(tokens.clipped_lower_R, inputs),
            "actor/ppo_kl": token_mean(-terms.log_ratio(), inputs),
        }
        return loss, metrics | self._sums_by_lag(inputs, mismatch, clipped_R=tokens.clipped_R)

    def _sums_by_lag(
        self, inputs: LossInputs, mismatch: Mismatch | None, *, clipped_R: Tensor
    ) -> dict[str, Tensor]:
        if self.correction is None:
            return {}
        assert inputs.columns is not None, "a policy loss needs LossColumns"
        values = {CLIPPED: clipped_R.float()}
        if mismatch is not None:
            values |= monitored(mismatch, self.correction)
        if inputs.kept_R is not None:
            values[REJECTED] = (~inputs.kept_R).float()
        lag_R = inputs.columns.lag_R
        if lag_R is None:
            lag_R = torch.zeros_like(inputs.sequence_R)
        counts_R = torch.ones_like(inputs.score_R.detach())
        return lag_sums(values, counts_R=counts_R, lag_R=lag_R, num_lags=self.max_lag + 1)

    def _kl_term(self, inputs: LossInputs) -> Tensor:
        assert inputs.columns is not None and inputs.columns.ref_logp_R is not None, (
            "use_kl_loss needs ref_logp_R"
        )
        kind = self.settings.kl_loss_type
        kl_R = estimate_kl(inputs.score_R, inputs.columns.ref_logp_R, kind=kind)
        return self._aggregate(kl_R, inputs)

    def _aggregate(self, values_R: Tensor, inputs: LossInputs) -> Tensor:
        mode = self.settings.loss_agg_mode
        return aggregate(values_R, inputs, mode=mode, scale_factor=self.loss_scale_factor)
