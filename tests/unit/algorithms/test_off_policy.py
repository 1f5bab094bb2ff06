# SPDX-License-Identifier: Apache-2.0
"""Off-policy correction against loops in float64, and what it does to loss and gradient."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tandem.algorithms.losses import POLICY_LOSSES
from tandem.algorithms.off_policy import (
    CLIPPED,
    Correction,
    ImportanceSampling,
    Mismatch,
    Rejection,
    importance_weights,
    kept_tokens,
    lag_sums,
    metrics_by_lag,
    monitored,
    normalized,
    raw_weights,
)
from tandem.algorithms.policy_loss import PolicyLoss
from tandem.algorithms.sequences import AGGREGATIONS
from tandem.types import LossColumns, LossInputs, LossScale
from tests.fakes.losses import PLAIN, changed

LENGTHS = [3, 0, 1, 5]
TOKEN = ImportanceSampling(by_sequence=False, lower=None, upper=1.2)
SEQUENCE = ImportanceSampling(by_sequence=True, lower=None, upper=1.2)
LOSS = changed(PLAIN, clip_ratio_high=0.2)


def mismatch(seed: int = 1) -> Mismatch:
    generator = torch.Generator().manual_seed(seed)
    behaviour_R = -2 * torch.rand(sum(LENGTHS), generator=generator)
    return Mismatch(
        behaviour_R + 0.4 * torch.randn(sum(LENGTHS), generator=generator),
        behaviour_R,
        torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
        len(LENGTHS),
    )


def log_ratios(of: Mismatch) -> list[list[float]]:
    """By sequence, in Python's floats."""
    flat = [
        p - b
        for p, b in zip(of.proximal_logp_R.tolist(), of.behaviour_logp_R.tolist(), strict=True)
    ]
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return [flat[start : start + n] for start, n in zip(starts, LENGTHS, strict=True)]


def expected_raw(of: Mismatch, by_sequence: bool) -> list[float]:
    if by_sequence:
        return [math.exp(sum(row)) for row in log_ratios(of) for _ in row]
    return [math.exp(value) for row in log_ratios(of) for value in row]


@pytest.mark.parametrize("by_sequence", [False, True])
@pytest.mark.parametrize("lower", [None, 0.8])
def test_weights_equal_the_formula(by_sequence: bool, lower: float | None) -> None:
    sampling = ImportanceSampling(by_sequence, lower, 1.2)
    raw = expected_raw(mismatch(), by_sequence)
    wanted = [min(weight, 1.2) for weight in raw]
    if lower is not None:
        wanted = [weight if lower <= weight <= 1.2 else 0.0 for weight in raw]
    got = importance_weights(mismatch(), sampling).tolist()
    assert got == pytest.approx(wanted, rel=1e-5)
    assert any(weight != value for weight, value in zip(wanted, raw, strict=True))


@pytest.mark.parametrize("by_sequence", [False, True])
def test_the_logarithm_of_a_weight_stays_within_20(by_sequence: bool) -> None:
    """Tokens that one policy all but rules out, beside one of which both say the same."""
    apart_R, sequence_R = torch.tensor([300.0, 0.0, -300.0]), torch.arange(3)
    of = Mismatch(apart_R - 400, torch.full((3,), -400.0), sequence_R, 3)
    wanted = pytest.approx([math.exp(20), 1.0, math.exp(-20)], rel=1e-5)
    assert raw_weights(of, by_sequence=by_sequence).tolist() == wanted
    unbounded = ImportanceSampling(by_sequence, lower=1e-12, upper=1e12)
    assert importance_weights(of, unbounded).tolist() == wanted
    figures = monitored(of, Correction(None, (), monitored_upper=2.0))
    assert all(value_R.isfinite().all() for value_R in figures.values())
    assert figures["weight"].tolist() == wanted


@pytest.mark.parametrize(
    ("sampling", "lower"),
    [(None, 1 / 1.2), (TOKEN, 1 / 1.2), (replace(TOKEN, lower=0.7), 0.7)],
)
def test_low_weights_are_those_below_the_lower_bound_or_else_the_inverse_of_the_upper(
    sampling: ImportanceSampling | None, lower: float
) -> None:
    low_R = monitored(mismatch(), Correction(sampling, (), monitored_upper=1.2))["low"]
    wanted = [float(weight < lower) for weight in expected_raw(mismatch(), by_sequence=False)]
    assert low_R.tolist() == wanted
    assert {*wanted} == {0.0, 1.0}


def test_normalised_weights_have_mean_1_over_tokens_or_over_sequences() -> None:
    weights_R = importance_weights(mismatch(), TOKEN)
    assert normalized(weights_R, mismatch(), by_sequence=False).mean().item() == pytest.approx(1)
    weights_R = importance_weights(mismatch(), SEQUENCE)
    got = normalized(weights_R, mismatch(), by_sequence=True).tolist()
    of_sequences = [got[0], got[3], got[4]]
    assert sum(of_sequences) / 3 == pytest.approx(1)
    assert sum(got) / len(got) != pytest.approx(1)


def divergence(row: list[float], option: str) -> list[float]:
    level, estimator = option.rsplit("_", 1)
    values = {
        "k1": [-x for x in row],
        "k2": [x * x / 2 for x in row],
        "k3": [math.exp(x) - 1 - x for x in row],
    }[estimator]
    if level == "token" or not row:
        return values
    reduced = {"sum": sum(values), "mean": sum(values) / len(values), "max": max(values)}
    return [reduced[level.removeprefix("seq_")]] * len(row)


@pytest.mark.parametrize(
    ("option", "lower", "upper"),
    [
        *((f"{level}_k1", 0.9, 1.1) for level in ("token", "seq_sum", "seq_mean")),
        *((f"{level}_k2", None, 0.05) for level in ("token", "seq_sum", "seq_mean", "seq_max")),
        *((f"{level}_k3", None, 0.05) for level in ("token", "seq_sum", "seq_mean", "seq_max")),
    ],
)
def test_rejection_equals_the_formula(option: str, lower: float | None, upper: float) -> None:
    values = [value for row in log_ratios(mismatch()) for value in divergence(row, option)]
    wanted = [value <= upper for value in values]
    if lower is not None:
        wanted = [math.log(lower) <= value <= math.log(upper) for value in values]
    got = kept_tokens(mismatch(), Rejection(option, lower, upper)).tolist()
    assert got == wanted
    assert True in wanted and False in wanted


def test_one_token_that_the_trainer_all_but_rules_out_is_a_veto_against_its_sequence() -> None:
    rows = log_ratios(mismatch())
    veto = sorted(min(row) for row in rows if row)[1]
    got = kept_tokens(mismatch(), Rejection("seq_max_k1", None, -veto)).tolist()
    assert got == [min(row) >= veto - 1e-7 for row in rows for _ in row]
    assert True in got and False in got


def test_what_is_not_counted_changes_no_weight_of_its_sequence() -> None:
    counted_R = torch.tensor([True, False, True] + [True] * 6)
    of = replace(mismatch(), counted_R=counted_R)
    broken_R = of.proximal_logp_R.clone()
    broken_R[1] = math.nan
    weights = importance_weights(replace(of, proximal_logp_R=broken_R), SEQUENCE)
    rows = log_ratios(of)
    assert weights[0].item() == pytest.approx(min(math.exp(rows[0][0] + rows[0][2]), 1.2))
    assert weights.isfinite().all()


def test_metrics_by_lag_equal_the_formulas_and_add_up_over_microbatches() -> None:
    of, lag_R = mismatch(), torch.tensor([0, 0, 2, 2, 2, 0, 0, 0, 2])
    correction = Correction(TOKEN, (), monitored_upper=1.2)
    values = monitored(of, correction) | {CLIPPED: (lag_R == 2).float()}
    sums: dict[str, float] = {}
    for part in (slice(0, 4), slice(4, 9)):
        some = lag_sums(
            {name: value[part] for name, value in values.items()},
            counts_R=torch.ones(len(lag_R[part])),
            lag_R=lag_R[part],
            num_lags=4,
        )
        sums = {name: sums.get(name, 0.0) + value.item() / 100 for name, value in some.items()}
    metrics = metrics_by_lag({"actor/pg_clipfrac": 0.5, "other": 1.0, **sums})
    flat = [value for row in log_ratios(of) for value in row]
    for suffix, chosen in (
        ("", range(9)),
        ("/lag_0", [0, 1, 5, 6, 7]),
        ("/lag_2", [2, 3, 4, 8]),
    ):
        rows = [flat[i] for i in chosen]
        weights = [min(math.exp(x), 1.2) for x in rows]
        size = len(rows)
        mean, square = sum(weights) / size, sum(w * w for w in weights) / size
        high = sum(math.exp(x) > 1.2 for x in rows) / size
        low = sum(math.exp(x) < 1 / 1.2 for x in rows) / size
        wanted = {
            "kl": sum(-x for x in rows) / size,
            "k3_kl": sum(math.exp(x) - 1 - x for x in rows) / size,
            "rollout_is_mean": mean,
            "rollout_is_eff_sample_size": mean**2 / square,
            "rollout_is_ratio_fraction_high": high,
            "rollout_is_ratio_fraction_low": low,
        }
        got = {name: metrics[f"rollout_corr/{name}{suffix}"] for name in wanted}
        assert got == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] == 0.5 and metrics["other"] == 1.0
    assert metrics["actor/pg_clipfrac/lag_2"] == pytest.approx(1.0)
    assert metrics["actor/pg_clipfrac/lag_0"] == 0.0
    assert not [name for name in metrics if name.endswith(("lag_1", "lag_3")) or "sum" in name]


def inputs(columns: LossColumns, current_R: torch.Tensor) -> LossInputs:
    of = mismatch()
    return LossInputs(
        score_R=current_R.detach().requires_grad_(),
        entropy_R=None,
        sequence_R=of.sequence_R,
        num_sequences=of.num_sequences,
        columns=columns,
        scale=LossScale(num_tokens=9, num_sequences=4),
    )


ADVANTAGES_R = torch.tensor([1.0, 1.0, 1.0, -0.5, 2.0, 2.0, 2.0, 2.0, 2.0])


def gradient(loss: PolicyLoss, given: LossInputs) -> torch.Tensor:
    (found,) = torch.autograd.grad(loss(given).loss, given.score_R)
    return found


@pytest.mark.parametrize("sampling", [TOKEN, SEQUENCE])
def test_the_decoupled_gradient_is_weight_times_that_of_the_clipped_ratio(
    sampling: ImportanceSampling,
) -> None:
    of = mismatch()
    weights_R = importance_weights(of, sampling)
    current_R = of.proximal_logp_R + torch.tensor([0.0, 0.5, -0.1, 0.1, 0.0, 0.3, 0.1, -0.3, 0.0])
    plain = LossColumns(ADVANTAGES_R, of.proximal_logp_R)
    wanted = weights_R * gradient(LOSS, inputs(plain, current_R))
    got = gradient(LOSS, inputs(replace(plain, weights_R=weights_R), current_R))
    torch.testing.assert_close(got, wanted)
    assert not torch.equal(got, gradient(LOSS, inputs(plain, current_R)))


@pytest.mark.parametrize("sampling", [TOKEN, SEQUENCE])
def test_the_loss_itself_finds_the_weights_that_are_known_before_the_update(
    sampling: ImportanceSampling,
) -> None:
    """One optimizer step a batch: current and proximal policy are the same."""
    of = mismatch()
    known = LossColumns(
        ADVANTAGES_R, of.proximal_logp_R, weights_R=importance_weights(of, sampling)
    )
    found = LossColumns(ADVANTAGES_R, rollout_logp_R=of.behaviour_logp_R)
    loss = changed(LOSS, correction=Correction(sampling, (), 1.2))
    wanted = gradient(LOSS, inputs(known, of.proximal_logp_R))
    torch.testing.assert_close(gradient(loss, inputs(found, of.proximal_logp_R)), wanted)
    metrics = loss(inputs(found, of.proximal_logp_R)).metrics
    assert "rollout_corr/rollout_is_eff_sample_size" in metrics_by_lag(
        {name: value.item() for name, value in metrics.items()}
    )


def test_reinforce_is_weighted_log_likelihood_with_a_detached_weight() -> None:
    of = mismatch()
    loss = changed(LOSS, loss_mode="gpg", correction=Correction(TOKEN, (), 1.2))
    columns = LossColumns(ADVANTAGES_R, of.behaviour_logp_R, rollout_logp_R=of.behaviour_logp_R)
    weights_R = importance_weights(of, TOKEN)
    got = gradient(loss, inputs(columns, of.proximal_logp_R))
    torch.testing.assert_close(got, -weights_R * ADVANTAGES_R / 9)


def test_rejected_tokens_have_no_gradient_in_bypass_mode() -> None:
    of = mismatch()
    rejections = (Rejection("token_k1", 0.9, 1.1), Rejection("token_k3", None, 10.0))
    kept_R = kept_tokens(of, rejections[0])
    columns = LossColumns(ADVANTAGES_R, of.behaviour_logp_R, rollout_logp_R=of.behaviour_logp_R)
    loss = changed(LOSS, correction=Correction(None, rejections, 2.0), clip_ratio_high=9.0)
    given = inputs(columns, of.proximal_logp_R)
    assert (gradient(loss, given)[~kept_R] == 0).all()
    assert (gradient(loss, inputs(columns, of.proximal_logp_R))[kept_R] != 0).all()
    metrics = {name: value.item() for name, value in loss(given).metrics.items()}
    share = metrics_by_lag(metrics)["rollout_corr/rollout_rs_masked_fraction"]
    assert share == pytest.approx((~kept_R).float().mean().item())


@pytest.mark.parametrize("agg", AGGREGATIONS)
@pytest.mark.parametrize("mode", sorted(POLICY_LOSSES))
def test_rejection_in_the_loss_equals_rejection_before_it(mode: str, agg: str) -> None:
    """Bypass mode rejects in the loss; else rejected tokens have left the batch before. Both divide
    by the tokens and sequences that were drawn.
    """
    of, rejection = mismatch(), Rejection("token_k1", 0.8, 1.25)
    kept_R = kept_tokens(of, rejection)
    assert 0 < kept_R.sum() < len(kept_R)
    current_R, old_R = of.proximal_logp_R, of.behaviour_logp_R
    loss = changed(
        LOSS,
        loss_mode=mode,
        loss_agg_mode=agg,
        loss_scale_factor=10.0,
        entropy_coeff=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.1,
    )
    columns = LossColumns(
        ADVANTAGES_R,
        old_R,
        old_R - 0.1,
        rollout_logp_R=old_R,
        marked_R=torch.arange(len(old_R)) % 2 == 0,
    )
    whole = replace(inputs(columns, current_R), entropy_R=-current_R.square())
    left = replace(
        whole,
        score_R=current_R[kept_R].detach().requires_grad_(),
        entropy_R=-current_R[kept_R].square(),
        sequence_R=of.sequence_R[kept_R],
        columns=replace(columns.map(lambda x_R: x_R[kept_R]), rollout_logp_R=None),
    )
    rejects = replace(loss, correction=Correction(None, (rejection,), 2.0))
    torch.testing.assert_close(rejects(whole).loss, loss(left).loss)
    slope_R = gradient(rejects, whole)
    torch.testing.assert_close(slope_R[kept_R], gradient(loss, left))
    assert (slope_R[~kept_R] == 0).all() and (slope_R != 0).any()


def test_a_sequence_of_geo_mean_is_weighed_by_the_geometric_mean_of_its_weights() -> None:
    of = mismatch()
    weights_R = importance_weights(of, replace(TOKEN, lower=0.9))
    assert (weights_R == 0).any()
    current_R = of.proximal_logp_R + 0.05 * torch.arange(9)
    columns = LossColumns(ADVANTAGES_R, of.proximal_logp_R, weights_R=weights_R)
    loss = changed(LOSS, loss_mode="geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4)
    total, start = 0.0, 0
    for length in LENGTHS:
        rows = range(start, start + length)
        start += length
        if not rows:
            continue
        ratios = [min(0.05 * i, 0.4) if ADVANTAGES_R[i] > 0 else 0.05 * i for i in rows]
        advantage = sum(ADVANTAGES_R[i].item() for i in rows) / length
        weight = math.exp(sum(math.log(weights_R[i].item() + 1e-10) for i in rows) / length)
        total -= advantage * math.exp(sum(ratios) / length) * weight
    assert loss(inputs(columns, current_R)).loss.item() == pytest.approx(total / 4, rel=1e-4)


def test_without_a_correction_nothing_is_added() -> None:
    of = mismatch()
    columns = LossColumns(ADVANTAGES_R, of.proximal_logp_R)
    outputs = LOSS(inputs(columns, of.behaviour_logp_R))
    assert not [name for name in outputs.metrics if "lag" in name or "rollout_corr" in name]
