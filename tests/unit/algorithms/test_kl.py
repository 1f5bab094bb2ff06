# SPDX-License-Identifier: Apache-2.0
"""KL estimators, the KL penalty in the reward, and its controllers."""

import pytest
import torch

from tandem.algorithms.kl import (
    KL_ESTIMATORS,
    AdaptiveKl,
    FixedKl,
    estimate_kl,
    mean_sequence_kl,
    next_kl_controller,
    penalise_rewards,
    place_scores,
)


def kl_and_gradient(logp: float, ref: float, kind: str) -> tuple[float, float]:
    logp_R = torch.tensor([logp], requires_grad=True)
    kl_R = estimate_kl(logp_R, torch.tensor([ref]), kind=kind)
    kl_R.sum().backward()
    assert logp_R.grad is not None
    return kl_R.item(), logp_R.grad.item()


@pytest.mark.parametrize(
    ("logp", "ref", "expected"),
    [(-1.0, -1.2, 0.0187308), (-0.5, -3.0, 1.582085), (-3.0, -0.5, 8.682494)],
)
def test_low_var_kl_vectors(logp: float, ref: float, expected: float):
    assert kl_and_gradient(logp, ref, "low_var_kl")[0] == pytest.approx(expected, rel=1e-5)
    assert kl_and_gradient(logp, ref, "k3")[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        ("kl", 0.5, 1.0),
        ("k1", 0.5, 1.0),
        ("abs", 0.5, 1.0),
        ("mse", 0.125, 0.5),
        ("k2", 0.125, 0.5),
    ],
)
def test_other_estimators(kind: str, value: float, gradient: float):
    assert kl_and_gradient(-1.0, -1.5, kind) == pytest.approx((value, gradient))


@pytest.mark.parametrize("kind", sorted(KL_ESTIMATORS))
def test_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind: str):
    plain, _ = kl_and_gradient(-1.0, -1.5, kind)
    assert kl_and_gradient(-1.0, -1.5, kind + "+") == pytest.approx((plain, 0.5))


def test_low_var_kl_saturates_at_ten_without_gradient():
    assert kl_and_gradient(-30.0, -0.5, "low_var_kl") == (10.0, 0.0)
    assert kl_and_gradient(-2000.0, -0.5, "low_var_kl") == (10.0, 0.0)


def test_unknown_estimator_is_named():
    with pytest.raises(ValueError, match="full.*low_var_kl"):
        estimate_kl(torch.zeros(1), torch.zeros(1), kind="full")


def test_rewards_with_kl_penalty():
    sequence_R = torch.tensor([0, 0, 1])
    rewards_R = place_scores(torch.tensor([1.0, -1.0]), sequence_R)
    assert rewards_R.tolist() == [0, 1, -1]
    penalised_R = penalise_rewards(rewards_R, torch.tensor([0.5, 1.0, 2.0]), coefficient=0.1)
    assert penalised_R.tolist() == pytest.approx([-0.05, 0.9, -1.2])


def test_mean_sequence_kl_weighs_sequences_alike():
    kl = mean_sequence_kl(torch.tensor([1.0, 3.0, 6.0]), torch.tensor([0, 0, 1]), num_sequences=2)
    assert kl.item() == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("mean_kl", "coefficient"),
    [(6.0, 0.1), (6.6, 0.1 * 1.0064), (60.0, 0.1 * 1.0128), (0.0, 0.1 * 0.9872)],
)
def test_adaptive_controller(mean_kl: float, coefficient: float):
    controller = AdaptiveKl(coefficient=0.1, target=6.0, horizon=10000)
    after = next_kl_controller(controller, mean_kl=mean_kl, num_sequences=640)
    assert after.coefficient == pytest.approx(coefficient)
    assert isinstance(after, AdaptiveKl) and after.target == 6.0


def test_fixed_controller_stays():
    controller = FixedKl(0.001)
    assert next_kl_controller(controller, mean_kl=9.0, num_sequences=640) == controller


def test_adaptive_controller_rejects_a_target_of_zero():
    with pytest.raises(ValueError, match=r"target_kl=0\.0"):
        AdaptiveKl(coefficient=0.1, target=0.0, horizon=10000)
