# SPDX-License-Identifier: Apache-2.0
"""The actor's loss: values, gradients against padded formulas, additivity over micro-batches."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.algorithms.losses import POLICY_LOSSES
from tandem.algorithms.sequences import AGGREGATIONS
from tandem.errors import UserError
from tandem.types import LossColumns, LossInputs, LossScale
from tests.fakes.losses import PLAIN, changed

LENGTHS = [3, 1, 6, 4]
PADDED = ("cispo", "geo_mean", "gpg", "gspo", "vanilla")
"""The losses with a formula for padded rows here; those of tests/unit/algorithms/test_losses.py are
written token by token.
"""
FULL = changed(PLAIN, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1)


def scalar_inputs(logps, olds, advantages) -> LossInputs:
    """Each token is a sequence of its own; scale as if it were the whole step."""
    count = len(logps)
    return LossInputs(
        score_R=torch.tensor(logps, requires_grad=True),
        entropy_R=None,
        sequence_R=torch.arange(count),
        num_sequences=count,
        columns=LossColumns(
            torch.tensor(advantages),
            torch.tensor(olds),
            marked_R=torch.ones(count, dtype=torch.bool),
        ),
        scale=LossScale(num_tokens=count, num_sequences=count),
    )


def random_inputs(seed: int = 0) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    sequence_R = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    size = len(sequence_R)
    old_R = -2 * torch.rand(size, generator=generator)
    advantages_R = torch.tensor([1.0, -0.5, 0.3, -2.0])[sequence_R]
    return LossInputs(
        score_R=(old_R + 0.5 * torch.randn(size, generator=generator)).requires_grad_(),
        entropy_R=torch.rand(size, generator=generator).requires_grad_(),
        sequence_R=sequence_R,
        num_sequences=len(LENGTHS),
        columns=LossColumns(
            advantages_R,
            old_R,
            old_R + 0.2 * torch.randn(size, generator=generator),
            marked_R=torch.arange(size) % 3 == 0,
        ),
        scale=LossScale(num_tokens=size, num_sequences=len(LENGTHS)),
    )


def part(inputs: LossInputs, first: int, last: int) -> LossInputs:
    """Sequences first..last-1 as a micro-batch of their own."""
    tokens = (inputs.sequence_R >= first) & (inputs.sequence_R < last)
    columns = inputs.columns
    assert columns is not None and inputs.entropy_R is not None
    return LossInputs(
        score_R=inputs.score_R[tokens],
        entropy_R=inputs.entropy_R[tokens],
        sequence_R=inputs.sequence_R[tokens] - first,
        num_sequences=last - first,
        columns=columns.map(lambda column_R: column_R[tokens]),
        scale=inputs.scale,
    )


def gradients(loss: torch.Tensor, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    assert inputs.entropy_R is not None
    got = torch.autograd.grad(loss, (inputs.score_R, inputs.entropy_R), allow_unused=True)
    return got[0], torch.zeros_like(inputs.entropy_R) if got[1] is None else got[1]


def padded(values_R: torch.Tensor) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(values_R.split(LENGTHS)), batch_first=True)


def padded_aggregate(values: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    """The aggregations as a user of padded batches writes them (loss_scale_factor 10)."""
    sums = (values * mask).sum(1)
    return {
        "token-mean": sums.sum() / mask.sum(),
        "token-sum": sums.sum(),
        "seq-mean-token-sum": sums.mean(),
        "seq-mean-token-mean": (sums / mask.sum(1)).mean(),
        "seq-mean-token-sum-norm": (sums / 10).mean(),
    }[mode]


def padded_policy_loss(inputs: LossInputs, mode: str, agg: str) -> torch.Tensor:
    """Losses written over padded rows, straight from the papers' formulas."""
    assert inputs.columns is not None and inputs.columns.old_logp_R is not None
    logp, old = padded(inputs.score_R), padded(inputs.columns.old_logp_R)
    advantage = padded(inputs.columns.advantages_R)
    mask = padded(torch.ones_like(inputs.score_R))
    ratio = torch.exp(logp - old)
    mean_log_ratio = ((logp - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    if mode == "gpg":
        return padded_aggregate(-advantage * logp, mask, agg)
    if mode == "cispo":
        return padded_aggregate(-ratio.detach().clamp(0.8, 1.28) * advantage * logp, mask, agg)
    if mode == "geo_mean":
        clipped = torch.where(
            advantage > 0, (logp - old).clamp(max=0.28), (logp - old).clamp(min=-0.2)
        )
        return (-advantage[:, 0] * ((clipped * mask).sum(1) / mask.sum(1)).exp()).mean()
    if mode == "gspo":
        ratio = torch.exp(logp - logp.detach() + mean_log_ratio.detach())
        agg = "seq-mean-token-mean"
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
    if mode == "vanilla":
        loss = torch.where(advantage < 0, torch.minimum(loss, -3 * advantage), loss)
    return padded_aggregate(loss, mask, agg)


def test_vanilla_clips_above_below_and_by_the_dual_bound():
    inputs = scalar_inputs([0.0, 0.0, 0.0, 0.0], [-0.5, 0.5, -0.5, -2.0], [1.0, -1.0, -1.0, -1.0])
    outputs = PLAIN(inputs)
    expected = [-1.28, 0.8, 1.6487213, 3.0]  # clip-higher, clip-low, unclipped, dual
    assert outputs.loss.item() == pytest.approx(sum(expected) / 4)
    assert outputs.metrics["actor/pg_clipfrac"].item() == pytest.approx(0.5)
    assert outputs.metrics["actor/pg_clipfrac_lower"].item() == pytest.approx(0.25)
    assert outputs.metrics["actor/ppo_kl"].item() == pytest.approx((-0.5 + 0.5 - 0.5 - 2) / 4)
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.score_R)
    assert gradient.tolist() == pytest.approx([0, 0, 1.6487213 / 4, 0])


def test_on_policy_ratio_is_exactly_one():
    inputs = scalar_inputs([-1.0, -3.0], [0.0, 0.0], [0.7, -0.2])
    assert inputs.columns is not None
    inputs = replace(inputs, columns=replace(inputs.columns, old_logp_R=None))
    outputs = PLAIN(inputs)
    assert outputs.loss.item() == pytest.approx((-0.7 + 0.2) / 2)
    assert outputs.metrics["actor/ppo_kl"].item() == 0
    assert outputs.metrics["actor/pg_clipfrac"].item() == 0
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.score_R)
    assert gradient.tolist() == pytest.approx([-0.35, 0.1])


@pytest.mark.parametrize("mode", sorted(POLICY_LOSSES))
def test_huge_log_ratios_stay_finite(mode: str):
    inputs = scalar_inputs([0.0, -500.0], [-500.0, 0.0], [-1.0, 1.0])
    outputs = changed(PLAIN, loss_mode=mode)(inputs)
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.score_R)
    assert outputs.loss.isfinite() and gradient.isfinite().all()


@pytest.mark.parametrize("agg", AGGREGATIONS)
@pytest.mark.parametrize("mode", PADDED)
def test_loss_and_gradient_equal_the_padded_formula(mode: str, agg: str):
    inputs = random_inputs()
    loss = changed(PLAIN, loss_mode=mode, loss_agg_mode=agg, loss_scale_factor=10.0)(inputs).loss
    expected = padded_policy_loss(inputs, mode, agg)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        gradients(loss, inputs)[0], gradients(expected, inputs)[0], rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("agg", AGGREGATIONS)
def test_total_is_policy_minus_entropy_plus_kl(agg: str):
    inputs = random_inputs()
    assert inputs.columns is not None and inputs.columns.ref_logp_R is not None
    assert inputs.entropy_R is not None
    outputs = changed(FULL, loss_agg_mode=agg, loss_scale_factor=10.0)(inputs)
    mask = padded(torch.ones_like(inputs.score_R))
    difference = inputs.columns.ref_logp_R - inputs.score_R
    kl = padded_aggregate(padded(difference.exp() - difference - 1), mask, agg)
    entropy = padded_aggregate(padded(inputs.entropy_R), mask, agg)
    expected = padded_policy_loss(inputs, "vanilla", agg) - 0.01 * entropy + 0.1 * kl
    torch.testing.assert_close(outputs.loss, expected)
    torch.testing.assert_close(outputs.metrics["actor/kl_loss"], kl.detach())
    torch.testing.assert_close(outputs.metrics["actor/entropy_loss"], entropy.detach())
    torch.testing.assert_close(outputs.metrics["actor/entropy"], inputs.entropy_R.detach().mean())
    for got, wanted in zip(
        gradients(outputs.loss, inputs), gradients(expected, inputs), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("agg", AGGREGATIONS)
@pytest.mark.parametrize("mode", sorted(POLICY_LOSSES))
def test_micro_batches_add_up(mode: str, agg: str, cut: int):
    inputs = random_inputs(seed=1)
    loss = changed(FULL, loss_mode=mode, loss_agg_mode=agg, loss_scale_factor=10.0)
    whole = loss(inputs)
    parts = [loss(part(inputs, 0, cut)), loss(part(inputs, cut, len(LENGTHS)))]
    total = parts[0].loss + parts[1].loss
    torch.testing.assert_close(total, whole.loss, rtol=1e-6, atol=1e-6)
    assert parts[0].metrics.keys() == whole.metrics.keys()
    for name, value in whole.metrics.items():
        added = parts[0].metrics[name] + parts[1].metrics[name]
        torch.testing.assert_close(added, value, rtol=1e-6, atol=1e-6, msg=name)
    for got, wanted in zip(gradients(total, inputs), gradients(whole.loss, inputs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_entropy_is_asked_for_only_when_used():
    assert not PLAIN.needs_entropy
    assert FULL.needs_entropy
    assert changed(PLAIN, calculate_entropy=True).needs_entropy
    reported = changed(PLAIN, calculate_entropy=True)(random_inputs())
    assert reported.loss.item() == PLAIN(replace(random_inputs(), entropy_R=None)).loss.item()
    assert "actor/entropy" in reported.metrics


def test_metrics_are_detached_scalars():
    for value in FULL(random_inputs()).metrics.values():
        assert value.shape == () and not value.requires_grad


def test_it_survives_pickling():
    assert pickle.loads(pickle.dumps(FULL)) == FULL


def test_a_loss_of_the_user_without_a_gradient_is_refused_unless_another_term_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loss_without_gradient.py").write_text(
        "from tandem.algorithms.losses import TokenLosses\n"
        "def own(terms, settings):\n"
        "    never_R = terms.logp_R > 9\n"
        "    return TokenLosses(-terms.logp_R.detach(), never_R, never_R)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mode = "loss_without_gradient:own"
    with pytest.raises(UserError, match=f"loss_mode='{mode}': returned loss_R without a gradient"):
        replace(PLAIN, loss_mode=mode)(random_inputs())
    assert replace(FULL, loss_mode=mode)(random_inputs()).loss.requires_grad
