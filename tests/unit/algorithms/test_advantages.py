# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators against published numbers and against padded loops."""

import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tandem.algorithms.advantages import ADVANTAGES, AdvantageInputs, estimate_advantages
from tandem.algorithms.kl import place_scores
from tandem.config.schema.algorithm import AlgorithmConfig
from tandem.errors import UserError

LENGTHS = [3, 1, 5, 2, 4, 6]
GROUPS = [40, 7, 40, 7, 40, 99]  # any numbers; 99 is alone


@dataclass(frozen=True)
class Settings:
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    gdpo_reward_keys: tuple[str, ...] = ("right", "form")
    gdpo_reward_weights: tuple[float, ...] | None = None


def outcome_inputs(scores, groups, lengths=None, valid=None) -> AdvantageInputs:
    count = len(scores)
    lengths = lengths or [1] * count
    sequence_R = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths))
    return AdvantageInputs(
        token_rewards_R=place_scores(torch.tensor(scores), sequence_R),
        sequence_R=sequence_R,
        num_sequences=count,
        group_N=torch.tensor(groups),
        valid_N=torch.tensor(valid or [True] * count),
    )


def dense_inputs(seed: int = 0) -> AdvantageInputs:
    """Random rewards on every token and values, of the ragged lengths above."""
    generator = torch.Generator().manual_seed(seed)
    sequence_R = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return AdvantageInputs(
        token_rewards_R=torch.randn(len(sequence_R), generator=generator),
        sequence_R=sequence_R,
        num_sequences=len(LENGTHS),
        group_N=torch.tensor(GROUPS),
        valid_N=torch.ones(len(LENGTHS), dtype=torch.bool),
        values_R=torch.randn(len(sequence_R), generator=generator),
        greedy_scores_N=torch.randn(len(LENGTHS), generator=generator),
        old_logp_R=-3 * torch.rand(len(sequence_R), generator=generator),
        squares_R=torch.rand(len(sequence_R), generator=generator),
        parts_N={
            "right": torch.randn(len(LENGTHS), generator=generator),
            "form": torch.randn(len(LENGTHS), generator=generator),
        },
    )


def estimate(name: str, inputs: AdvantageInputs, **settings) -> list[float]:
    return ADVANTAGES[name](inputs, Settings(**settings)).advantages_R.tolist()


def per_sequence(name: str, inputs: AdvantageInputs, **settings) -> list[float]:
    """The advantage of each sequence, checked to be the same for all of its tokens."""
    values = torch.tensor(estimate(name, inputs, **settings))
    firsts = []
    for sequence in range(inputs.num_sequences):
        mine = values[inputs.sequence_R == sequence]
        assert (mine == mine[0]).all()
        firsts.append(mine[0].item())
    return firsts


def padded(values_R: torch.Tensor, gap: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the ragged batch, ``gap`` masked tokens before each row's last one, and the mask."""
    width = max(LENGTHS) + gap
    rows, mask = torch.full((len(LENGTHS), width), 9.0), torch.zeros(len(LENGTHS), width)
    for row, values in enumerate(values_R.split(LENGTHS)):
        columns = [*range(len(values) - 1), len(values) - 1 + gap]
        rows[row, columns] = values
        mask[row, columns] = 1
    return rows, mask


def whitened(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    chosen = values[mask.bool()].double()
    return ((chosen - chosen.mean()) * (chosen.var(unbiased=True) + 1e-8).rsqrt()).float()


def test_grpo_divides_by_the_unbiased_deviation():
    values = per_sequence("grpo", outcome_inputs([1.0, 0.0, 0.0, 1.0, 1.0], [0] * 5, [2] * 5))
    assert values == pytest.approx([0.73030, -1.09544, -1.09544, 0.73030, 0.73030], abs=1e-5)


def test_grpo_without_std():
    inputs = outcome_inputs([1.0, 0.0, 0.0, 1.0, 1.0], [0] * 5)
    values = per_sequence("grpo", inputs, norm_adv_by_std_in_grpo=False)
    assert values == pytest.approx([0.4, -0.6, -0.6, 0.4, 0.4])


def test_grpo_of_interleaved_groups_and_a_group_of_one():
    values = per_sequence("grpo", outcome_inputs([1.0, 4.0, 3.0, 2.0, 2.0, 0.7], GROUPS, LENGTHS))
    root = 2**-0.5
    assert values == pytest.approx([-1, root, 1, -root, 0, 0.7], abs=1e-5)


def test_equal_scores_give_exactly_zero():
    assert per_sequence("grpo", outcome_inputs([0.1] * 7, [0] * 7)) == [0.0] * 7


def test_failed_rewards_leave_the_baseline_and_get_zero():
    nan = float("nan")
    with_failure = outcome_inputs(
        [1.0, nan, 0.0, 0.0], [0] * 4, [2, 3, 1, 2], [True, False, True, True]
    )
    without = outcome_inputs([1.0, 0.0, 0.0], [0] * 3)
    for name in ("grpo", "rloo", "grpo_passk", "gpg"):
        first, failed, *rest = per_sequence(name, with_failure)
        assert failed == 0
        assert [first, *rest] == pytest.approx(per_sequence(name, without), abs=1e-6), name


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_failed_sequences_do_not_touch_the_others(name: str):
    inputs = dense_inputs()
    keep = torch.tensor([True, True, False, True, True, True])
    tokens = keep[inputs.sequence_R]
    poisoned = torch.where(tokens, inputs.token_rewards_R, float("nan"))
    with_failure = ADVANTAGES[name](
        replace(inputs, token_rewards_R=poisoned, valid_N=keep), Settings(gamma=0.9, lam=0.8)
    )
    renumber = torch.tensor([0, 1, -1, 2, 3, 4])
    assert inputs.values_R is not None and inputs.greedy_scores_N is not None
    assert inputs.old_logp_R is not None and inputs.squares_R is not None
    without = ADVANTAGES[name](
        AdvantageInputs(
            token_rewards_R=inputs.token_rewards_R[tokens],
            sequence_R=renumber[inputs.sequence_R[tokens]],
            num_sequences=5,
            group_N=inputs.group_N[keep],
            valid_N=keep[keep],
            values_R=inputs.values_R[tokens],
            greedy_scores_N=inputs.greedy_scores_N[keep],
            old_logp_R=inputs.old_logp_R[tokens],
            squares_R=inputs.squares_R[tokens],
            parts_N={name: part_N[keep] for name, part_N in inputs.parts_N.items()},
        ),
        Settings(gamma=0.9, lam=0.8),
    )
    assert (with_failure.advantages_R[~tokens] == 0).all()
    assert with_failure.returns_R.isfinite().all()
    torch.testing.assert_close(with_failure.advantages_R[tokens], without.advantages_R)
    torch.testing.assert_close(with_failure.returns_R[tokens], without.returns_R)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "grpo_passk"])
def test_the_last_one_left_of_a_group_gets_zero(name: str):
    inputs = outcome_inputs([1.0, float("nan")], [0, 0], valid=[True, False])
    assert per_sequence(name, inputs) == [0, 0]


def test_rloo_is_the_reward_minus_the_mean_of_the_others():
    values = per_sequence("rloo", outcome_inputs([1.0, 0.0, 0.5, 7.0], [0, 0, 0, 1]))
    assert values == pytest.approx([0.75, -0.75, 0.0, 7.0])


def test_opo_weighs_the_baseline_by_length():
    values = per_sequence("opo", outcome_inputs([1.0, 0.0, 7.0], [0, 0, 1], [1, 3, 2]))
    assert values == pytest.approx([0.75, -0.25, 7.0])


def test_grpo_passk_rewards_only_the_leader():
    inputs = outcome_inputs([0.2, 1.0, 0.5, 3.0, 3.0, 9.0], [0, 0, 0, 1, 1, 2])
    values = per_sequence("grpo_passk", inputs, norm_adv_by_std_in_grpo=False)
    assert values == pytest.approx([0, 0.5, 0, 0, 0, 0])
    std = torch.tensor([0.2, 1.0, 0.5]).std().item()
    assert per_sequence("grpo_passk", inputs)[1] == pytest.approx(0.5 / (std + 1e-6))


def test_gpg_scales_by_the_share_of_rewarded_sequences():
    values = per_sequence("gpg", outcome_inputs([1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1]))
    assert values == pytest.approx([2.0, -2.0, 0, 0])


@pytest.mark.parametrize("gap", [0, 2])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.95, 0.9), (0.9, 0.0)])
def test_gae_equals_the_padded_loop_with_masked_carry(gap: int, gamma: float, lam: float):
    inputs = dense_inputs()
    assert inputs.values_R is not None
    rewards, mask = padded(inputs.token_rewards_R, gap)
    values, _ = padded(inputs.values_R, gap)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros(len(LENGTHS))
    for t in reversed(range(values.shape[1])):
        error = rewards[:, t] + gamma * next_value - values[:, t]
        here, m = error + gamma * lam * next_advantage, mask[:, t]
        next_advantage = m * here + (1 - m) * next_advantage
        next_value = m * values[:, t] + (1 - m) * next_value
        advantages[:, t] = next_advantage
    result = ADVANTAGES["gae"](inputs, Settings(gamma=gamma, lam=lam))
    expected_returns = (advantages + values)[mask.bool()]
    torch.testing.assert_close(result.returns_R, expected_returns, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        result.advantages_R, whitened(advantages, mask), rtol=1e-5, atol=1e-5
    )


def test_reinforce_plus_plus_equals_the_padded_loop():
    inputs = dense_inputs()
    rewards, mask = padded(inputs.token_rewards_R, 0)
    returns, running = torch.zeros_like(rewards), torch.zeros(len(LENGTHS))
    for t in reversed(range(rewards.shape[1])):
        running = (rewards[:, t] + 0.9 * running) * mask[:, t]
        returns[:, t] = running
    result = ADVANTAGES["reinforce_plus_plus"](inputs, Settings(gamma=0.9))
    torch.testing.assert_close(result.returns_R, returns[mask.bool()], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.advantages_R, whitened(returns, mask), rtol=1e-5, atol=1e-5)


def test_reinforce_plus_plus_baseline_whitens_centred_scores_over_tokens():
    inputs = outcome_inputs([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], [2, 2, 1, 3])
    centred = torch.tensor([0.5, 0.5, -0.5, -0.5, 0, 0, 0, 0])
    expected = centred / (centred.var() + 1e-8).sqrt()
    actual = torch.tensor(estimate("reinforce_plus_plus_baseline", inputs))
    torch.testing.assert_close(actual, expected)


def test_remax_subtracts_the_greedy_reward_from_rewards_to_come():
    inputs = replace(
        outcome_inputs([1.0, 0.0], [0, 1], [3, 2]), greedy_scores_N=torch.tensor([0.25, 1.0])
    )
    assert estimate("remax", inputs) == pytest.approx([0.75] * 3 + [-1.0] * 2)


def test_remax_with_a_failed_greedy_reward_gives_zero():
    inputs = replace(
        outcome_inputs([1.0, 0.0], [0, 1]), greedy_scores_N=torch.tensor([float("nan"), 1.0])
    )
    assert estimate("remax", inputs) == [0, -1]


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"])
def test_equal_rewards_whiten_to_exactly_zero(name: str):
    inputs = outcome_inputs([0.1] * 6, [0, 0, 0, 1, 1, 1], [7, 3, 5, 2, 9, 4])
    parts_N = {"right": torch.full((6,), 0.1), "form": torch.full((6,), 0.7)}
    assert estimate(name, replace(inputs, parts_N=parts_N)) == [0.0] * 30


def naive_gdpo(inputs: AdvantageInputs, weights: tuple[float, ...], by_std: bool) -> list[float]:
    """Each part normalised over its group, added up, whitened over tokens; in Python's floats."""
    total = [0.0] * inputs.num_sequences
    groups = inputs.group_N.tolist()
    for part_N, weight in zip(inputs.parts_N.values(), weights, strict=True):
        part = part_N.tolist()
        for n in range(len(part)):
            mates = [part[m] for m in range(len(part)) if groups[m] == groups[n]]
            mean, std = (statistics.mean(mates), statistics.stdev(mates)) if mates[1:] else (0, 1)
            total[n] += weight * (part[n] - mean) / (std + 1e-6 if by_std else 1)
    flat = [total[n] for n in inputs.sequence_R.tolist()]
    mean, variance = statistics.mean(flat), statistics.variance(flat)
    return [(x - mean) / (variance + 1e-8) ** 0.5 for x in flat]


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("weights", [None, (2.0, -0.5)])
def test_gdpo_normalises_each_part_of_the_reward_apart(
    weights: tuple[float, ...] | None, by_std: bool
):
    inputs = dense_inputs()
    got = estimate("gdpo", inputs, gdpo_reward_weights=weights, norm_adv_by_std_in_grpo=by_std)
    assert got == pytest.approx(naive_gdpo(inputs, weights or (1.0, 1.0), by_std), abs=1e-5)


def test_gdpo_names_the_number_that_a_reward_lacks():
    inputs = dense_inputs()
    lacking = {"right": inputs.parts_N["right"], "style": torch.zeros(len(LENGTHS))}
    with pytest.raises(UserError, match="gdpo_reward_keys='form': .*it has: right, style"):
        estimate("gdpo", replace(inputs, parts_N=lacking))


def test_gdpo_counts_the_samples_that_lack_a_number():
    inputs = dense_inputs()
    form_N = torch.zeros(len(LENGTHS))
    form_N[:2] = math.nan
    parts = {"right": inputs.parts_N["right"], "form": form_N}
    num_valid = int(inputs.valid_N.sum())
    lacking = int((inputs.valid_N & form_N.isnan()).sum())
    fault = f"{lacking} of {num_valid} samples have no number of this name"
    with pytest.raises(UserError, match=f"gdpo_reward_keys='form': {fault}"):
        estimate("gdpo", replace(inputs, parts_N=parts))


def test_an_estimator_of_the_user_that_returns_no_tensor_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "estimator_of_one.py").write_text(
        "from tandem.algorithms.advantages import Advantages\n"
        "def own(inputs, settings): return Advantages(inputs.token_rewards_R, None)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = AlgorithmConfig(adv_estimator="estimator_of_one:own")
    with pytest.raises(UserError, match="returned returns_R of type NoneType"):
        estimate_advantages(dense_inputs(), settings)


def naive_token_baseline(inputs: AdvantageInputs) -> list[float]:
    """The optimal token baseline by loops over the tokens of each group, in Python's floats."""
    assert inputs.old_logp_R is not None and inputs.squares_R is not None
    weights_R = torch.ones_like(inputs.squares_R) if inputs.weights_R is None else inputs.weights_R
    columns = (inputs.token_rewards_R, inputs.old_logp_R, inputs.squares_R, weights_R)
    rows = list(zip(*([part.tolist() for part in c.split(LENGTHS)] for c in columns), strict=True))
    to_come, energies = [], []
    for rewards, logps, squares, weights in rows:
        to_come.append([sum(rewards[t:]) for t in range(len(rewards))])
        norms = [
            (1 - 2 * math.exp(p) + s) * w**2
            for p, s, w in zip(logps, squares, weights, strict=True)
        ]
        energies.append([sum(norms[: t + 1]) for t in range(len(norms))])
    found = []
    for n, group in enumerate(GROUPS):
        mates = [m for m, other in enumerate(GROUPS) if other == group]
        for t, value in enumerate(to_come[n]):
            alive = [m for m in mates if len(to_come[m]) > t]
            baseline = sum(to_come[m][t] * energies[m][t] for m in alive)
            baseline /= sum(energies[m][t] for m in alive) + 1e-8
            found.append(value - (baseline if len(alive) > 1 else 0.0))
    return found


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
@pytest.mark.parametrize("weighs", [False, True])
def test_each_token_has_the_baseline_of_least_variance(name: str, weighs: bool):
    inputs = dense_inputs()
    if weighs:
        inputs = replace(inputs, weights_R=torch.linspace(0.5, 2.0, sum(LENGTHS)))
    assert estimate(name, inputs) == pytest.approx(naive_token_baseline(inputs), abs=1e-5)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_results_are_fp32_of_the_shape_of_the_tokens(name: str):
    result = ADVANTAGES[name](dense_inputs(), Settings())
    assert result.advantages_R.dtype == result.returns_R.dtype == torch.float32
    assert result.advantages_R.shape == result.returns_R.shape == (sum(LENGTHS),)
