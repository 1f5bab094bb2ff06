# SPDX-License-Identifier: Apache-2.0
"""Policy losses token by token: value and gradient of their formulas, in Python's floats."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tandem.algorithms.losses import PolicyTerms, compute_loss
from tandem.config.schema.actor import ActorConfig, PolicyLossConfig
from tandem.errors import UserError

SETTINGS = ActorConfig(
    clip_ratio_low=0.1,
    clip_ratio_high=0.15,
    clip_ratio_c=1.5,
    tau_pos=1.0,
    tau_neg=1.7,
    policy_loss=PolicyLossConfig(dro_beta=0.4, ppo_kl_coef=0.3),
)


@dataclass(frozen=True, slots=True)
class Token:
    """The loss of one token, its derivative by the log-prob, and whether two bounds changed it."""

    value: float
    slope: float
    clipped: bool = False
    clipped_lower: bool = False


def sapo(logp: float, old: float, advantage: float, marked: bool) -> Token:
    ratio, tau = math.exp(logp - old), 1.0 if advantage > 0 else 1.7
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return Token(-advantage * 4 / tau * gate, -advantage * 4 * gate * (1 - gate) * ratio)


def dppo_tv(logp: float, old: float, advantage: float, marked: bool) -> Token:
    moved = math.exp(logp) - math.exp(old)
    return divergence(logp, old, advantage, far=moved > 0.15 if advantage > 0 else moved < -0.1)


def dppo_kl(logp: float, old: float, advantage: float, marked: bool) -> Token:
    new, before = math.exp(logp), math.exp(old)
    kl = before * math.log(before / new) + (1 - before) * math.log((1 - before) / (1 - new))
    far = (kl > 0.15 and new > before) if advantage > 0 else (kl > 0.1 and new < before)
    return divergence(logp, old, advantage, far=far)


def divergence(logp: float, old: float, advantage: float, *, far: bool) -> Token:
    if far:
        return Token(0.0, 0.0, clipped=True)
    ratio = math.exp(logp - old)
    weight = min(ratio, 1.5)
    return Token(-advantage * weight * logp, -advantage * weight, clipped_lower=ratio > 1.5)


def dro(logp: float, old: float, advantage: float, marked: bool) -> Token:
    distance = logp - old
    return Token(-advantage * logp + 0.2 * distance**2, -advantage + 0.4 * distance)


def clip_cov(logp: float, old: float, advantage: float, marked: bool) -> Token:
    ratio = math.exp(logp - old)
    clipped = ratio > 1.15 if advantage > 0 else ratio < 0.9
    if marked:
        return Token(0.0, 0.0, clipped=True)
    if clipped:
        return Token(-advantage * (1.15 if advantage > 0 else 0.9), 0.0)
    return Token(-advantage * ratio, -advantage * ratio)


def kl_cov(logp: float, old: float, advantage: float, marked: bool) -> Token:
    ratio, sign = math.exp(logp - old), math.copysign(1.0, logp - old)
    return Token(
        -advantage * ratio + marked * 0.3 * abs(logp - old),
        -advantage * ratio + marked * 0.3 * sign,
    )


FORMULAS = {
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}


def random_terms(seed: int, *, size: int = 200) -> PolicyTerms:
    generator = torch.Generator().manual_seed(seed)
    old_R = -3 * torch.rand(size, generator=generator)
    logp_R = (old_R + 0.6 * torch.randn(size, generator=generator)).clamp(max=-1e-3)
    advantages_R = torch.randn(size, generator=generator)
    advantages_R[::10] = 0.0
    return PolicyTerms(
        logp_R=logp_R.requires_grad_(),
        old_logp_R=old_R,
        advantages_R=advantages_R,
        sequence_R=torch.arange(size),
        num_sequences=size,
        marked_R=torch.rand(size, generator=generator) < 0.3,
    )


@pytest.mark.parametrize("mode", FORMULAS)
def test_value_gradient_and_bounds_equal_the_formula(mode: str) -> None:
    terms = random_terms(seed=3)
    assert terms.marked_R is not None
    columns = (terms.logp_R, terms.old_logp_R, terms.advantages_R, terms.marked_R)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    wanted = [FORMULAS[mode](*row) for row in rows]
    got = compute_loss(terms, SETTINGS, loss_mode=mode)
    (slope_R,) = torch.autograd.grad(got.loss_R.sum(), terms.logp_R)
    assert got.loss_R.tolist() == pytest.approx([t.value for t in wanted], rel=1e-5, abs=1e-6)
    assert slope_R.tolist() == pytest.approx([t.slope for t in wanted], rel=1e-5, abs=1e-6)
    assert got.clipped_R.tolist() == [t.clipped for t in wanted]
    assert got.clipped_lower_R.tolist() == [t.clipped_lower for t in wanted]
    if mode.startswith("dppo"):
        assert got.clipped_R.any() and not got.clipped_R.all() and got.clipped_lower_R.any()


@pytest.mark.parametrize("mode", FORMULAS)
def test_where_the_policies_agree_the_gradient_is_that_of_the_plain_policy_gradient(
    mode: str,
) -> None:
    terms = random_terms(seed=4)
    same_R = terms.old_logp_R.clone().requires_grad_()
    marks_R = torch.zeros(200, dtype=torch.bool)
    on_policy = replace(terms, logp_R=same_R, marked_R=marks_R)
    loss_R = compute_loss(on_policy, SETTINGS, loss_mode=mode).loss_R
    (slope_R,) = torch.autograd.grad(loss_R.sum(), same_R)
    torch.testing.assert_close(slope_R, -terms.advantages_R)


def test_a_token_that_the_policy_is_sure_of_has_a_finite_divergence() -> None:
    """Rounding may put its log-prob above 0."""
    logp_R = torch.tensor([1e-7, -30.0]).requires_grad_()
    terms = PolicyTerms(logp_R, torch.tensor([-0.5, 1e-7]), torch.ones(2), torch.arange(2), 2)
    loss = compute_loss(terms, SETTINGS, loss_mode="dppo_kl").loss_R.sum()
    (slope_R,) = torch.autograd.grad(loss, logp_R)
    assert loss.isfinite() and slope_R.isfinite().all()


def test_cispo_without_a_lower_bound_only_caps_its_weights() -> None:
    """The paper's form: ``clip_ratio_low=10`` in verl's examples."""
    terms = random_terms(seed=5)
    open_below = SETTINGS.model_copy(update={"clip_ratio_low": 10.0})
    loss_R = compute_loss(terms, open_below, loss_mode="cispo").loss_R
    (slope_R,) = torch.autograd.grad(loss_R.sum(), terms.logp_R)
    ratio_R = (terms.logp_R - terms.old_logp_R).detach().exp()
    torch.testing.assert_close(slope_R, -terms.advantages_R * ratio_R.clamp(max=1.15))
    assert (ratio_R < 0.9).any()


@pytest.mark.parametrize(
    ("result", "fault"),
    [
        ("loss_R", "returned Tensor"),
        ("TokenLosses(loss_R, None, never_R)", "returned clipped_R of type NoneType"),
        ("TokenLosses(loss_R.mean(), never_R, never_R)", r"returned loss_R of shape \(\)"),
        ("TokenLosses(loss_R, never_R, loss_R)", "returned clipped_lower_R of torch.float32"),
    ],
)
def test_a_loss_of_the_user_with_a_wrong_result_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: str, fault: str
) -> None:
    module = f"losses_{abs(hash(result))}"
    (tmp_path / f"{module}.py").write_text(
        "from tandem.algorithms.losses import TokenLosses\n"
        "def own(terms, settings):\n"
        "    loss_R, never_R = -terms.logp_R, terms.logp_R > 9\n"
        f"    return {result}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=f"loss_mode='{module}:own': {fault}"):
        compute_loss(random_terms(seed=6), SETTINGS, loss_mode=f"{module}:own")
