# SPDX-License-Identifier: Apache-2.0
"""From keys to weights, masks and metrics of a batch."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch

from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.pipeline.batch import lay_out
from tandem.pipeline.experience import Experience, assign_credit
from tandem.pipeline.loop import initial_kl_controller
from tandem.pipeline.phases import policy_loss
from tandem.pipeline.step_metrics import token_lag_metrics
from tandem.types import (
    Completion,
    FinishReason,
    Group,
    Prompt,
    RewardOutcome,
    RewardStatus,
    Sample,
    Trajectory,
)

KEY = "algorithm.rollout_correction"
LAG = ("trainer.async_pipeline=True", "trainer.generate_ahead_steps=2")
BATCH = (
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
)
OLD_LOGP_R = torch.tensor([-0.5, -0.1, -0.5, -0.5, -0.5, -2.0, -0.5, -0.5])
"""Two tokens of each of four samples; the rollout's are all -0.5."""


def sample(k: int, score: float, version: int, switches: tuple[tuple[int, int], ...]) -> Sample:
    reward = RewardOutcome(RewardStatus.VALUE, score)
    completion = Completion(k, (k, 9), (-0.5, -0.5), FinishReason.STOP, version, switches)
    return Sample(Trajectory.of_single_turn((4,), completion), "", reward)


def groups() -> list[Group]:
    """Versions 3 and 3 with 4; 4 and 5."""
    first = (sample(0, 1.0, 3, ()), sample(1, 0.0, 3, ((1, 4),)))
    second = (sample(2, 0.0, 4, ()), sample(3, 1.0, 5, ()))
    return [
        Group(Prompt(uid, uid, (4,), "", "", ""), samples)
        for uid, samples in enumerate((first, second))
    ]


def experience(*arguments: str, old_logp_R: torch.Tensor | None = OLD_LOGP_R) -> Experience:
    config = load_config(RunConfig, [*BATCH, *arguments]).config
    return assign_credit(
        replace(lay_out(groups(), version=5), old_logp_R=old_logp_R),
        config=config,
        controller=initial_kl_controller(config),
    )


def config_of(*arguments: str) -> RunConfig:
    return load_config(RunConfig, [*BATCH, *arguments]).config


def test_every_token_knows_its_lag() -> None:
    batch = lay_out(groups(), version=5)
    assert batch.lag_R.tolist() == [2, 2, 2, 1, 1, 1, 0, 0]
    assert token_lag_metrics(batch) == {
        "training/lag/mean": 1.125,
        "training/lag/max": 2.0,
        "training/lag/share/lag_0": 0.25,
        "training/lag/share/lag_1": 0.25,
        "training/lag/share/lag_2": 0.5,
    }


def test_without_a_lag_nothing_is_added() -> None:
    made = experience()
    columns = made.columns
    assert (columns.weights_R, columns.rollout_logp_R, columns.lag_R) == (None, None, None)
    assert made.kept_R is None and made.correction_metrics == {}
    assert policy_loss(config_of()).correction is None


def test_a_lag_truncates_weights_by_default_and_reports_them_by_lag() -> None:
    made = experience(*LAG)
    ratios = [math.exp(value + 0.5) for value in OLD_LOGP_R.tolist()]
    assert made.columns.weights_R is not None
    assert made.columns.weights_R.tolist() == pytest.approx([min(r, 2.0) for r in ratios])
    metrics = made.correction_metrics
    assert metrics["rollout_corr/kl/lag_2"] == pytest.approx(-0.4 / 3)
    assert metrics["rollout_corr/kl/lag_1"] == pytest.approx(1.5 / 3)
    assert metrics["rollout_corr/kl/lag_0"] == 0
    assert metrics["rollout_corr/rollout_is_eff_sample_size/lag_0"] == pytest.approx(1.0)
    assert metrics["rollout_corr/rollout_is_eff_sample_size/lag_1"] < 0.85
    assert metrics["rollout_corr/rollout_is_min"] == pytest.approx(math.exp(-1.5))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_described_by_sequence_as_verl_does(level: str) -> None:
    rows = [(1.0, math.exp(0.4)), (1.0, 1.0), (1.0, math.exp(-1.5)), (1.0, 1.0)]
    raw = rows if level == "token" else [(first * last,) * 2 for first, last in rows]
    applied = [tuple(min(weight, 1.2) for weight in row) for row in raw]
    means = [sum(row) / 2 for row in applied]
    made = experience(*LAG, f"{KEY}.rollout_is={level}", f"{KEY}.rollout_is_threshold=1.2")
    found = made.correction_metrics
    name = "rollout_corr/rollout_is"
    extremes = [x for row in (applied if level == "token" else raw) for x in row]
    wanted = {
        f"{name}_max": max(extremes),
        f"{name}_min": min(extremes),
        f"{name}_seq_mean": statistics.mean(means),
        f"{name}_seq_std": statistics.stdev(means),
        f"{name}_seq_max": max(means),
        f"{name}_seq_min": min(means),
        f"{name}_seq_max_deviation": max(abs(x - 1) for x in means),
        f"{name}_seq_fraction_high": sum(sum(row) / 2 > 1.2 for row in raw) / 4,
        f"{name}_seq_fraction_low": sum(sum(row) / 2 < 1 / 1.2 for row in raw) / 4,
        "rollout_corr/training_log_ppl": -sum(OLD_LOGP_R.tolist()) / 8,
        "rollout_corr/rollout_log_ppl": 0.5,
        "rollout_corr/log_ppl_diff_max": 0.75,
        "rollout_corr/log_ppl_diff_min": -0.2,
    }
    assert {key: found[key] for key in wanted} == pytest.approx(wanted, rel=1e-5)
    normalised = experience(*LAG, f"{KEY}.rollout_is_batch_normalize=True").correction_metrics
    weights = [weight for row in rows for weight in row]
    factor = normalised["rollout_corr/rollout_is_batch_norm_factor"]
    assert factor == pytest.approx(statistics.mean(weights))


def test_each_option_changes_what_it_should() -> None:
    def weights(*arguments: str) -> list[float] | None:
        found = experience(*LAG, *arguments).columns.weights_R
        return None if found is None else [round(value, 4) for value in found.tolist()]

    usual = [1.0, round(math.exp(0.4), 4), 1, 1, 1, round(math.exp(-1.5), 4), 1, 1]
    assert weights() == usual
    assert weights(f"{KEY}.rollout_is=null") is None
    assert weights(f"{KEY}.rollout_is_threshold=1.1") == [1, 1.1, *usual[2:]]
    assert weights(f"{KEY}.rollout_is_threshold=0.5_1.1") == [1, 0, 1, 1, 1, 0, 1, 1]
    whole = weights(f"{KEY}.rollout_is=sequence")
    assert whole == [usual[1], usual[1], 1, 1, usual[5], usual[5], 1, 1]
    normalised = weights(f"{KEY}.rollout_is_batch_normalize=True")
    assert normalised is not None and sum(normalised) / 8 == pytest.approx(1, abs=1e-3)


def test_rejection_leaves_tokens_out_of_the_loss() -> None:
    keys = (f"{KEY}.rollout_rs=token_k1", f"{KEY}.rollout_rs_threshold=1.2")
    made = experience(*keys)
    assert [row.num_loss_tokens for row in made.sequences] == [1, 2, 1, 2]
    assert len(made.columns.advantages_R) == 6
    assert made.columns.weights_R is None
    name = "rollout_corr/rollout_rs_token_k1_masked_fraction"
    assert made.correction_metrics[name] == 0.25
    assert made.correction_metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 0.5

    keys = (f"{KEY}.rollout_rs=seq_max_k2", f"{KEY}.rollout_rs_threshold=0.01")
    made = experience(*keys)
    assert made.batch.valid_N.tolist() == [True, True, True, True]
    assert made.computed_N.tolist() == [False, True, False, True]


def test_the_loss_corrects_where_the_batch_is_not_scored_before() -> None:
    made = experience(*LAG, old_logp_R=None)
    assert made.columns.weights_R is None and made.correction_metrics == {}
    assert made.columns.rollout_logp_R is made.batch.rollout_logp_R
    assert made.columns.lag_R is not None
    loss = policy_loss(config_of(*LAG))
    assert loss.correction is not None and loss.correction.importance is not None
    assert loss.max_lag == 2


def test_bypass_mode_takes_the_rollout_as_the_old_policy() -> None:
    keys = (*LAG, f"{KEY}.bypass_mode=True")
    rollout_R = lay_out(groups()).rollout_logp_R
    made = experience(*keys, old_logp_R=rollout_R)
    assert made.columns.weights_R is None and made.columns.rollout_logp_R is not None
    clipped = policy_loss(config_of(*keys))
    assert clipped.correction is not None and clipped.correction.importance is None
    reinforced = policy_loss(config_of(*keys, f"{KEY}.loss_type=reinforce"))
    assert reinforced.loss_mode == "gpg" and reinforced.correction is not None
    assert reinforced.correction.importance is not None
