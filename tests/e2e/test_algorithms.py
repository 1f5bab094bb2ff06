# SPDX-License-Identifier: Apache-2.0
"""The algorithms of ``tandem train`` end to end: what each does to metrics, weights and rewards."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fakes.commands import Ended, run_command
from tests.fakes.tiny_run import Material, metrics_of, read_lines, repeatable, train_arguments

ACTOR = "actor_rollout_ref.actor"
DAPO = (
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=acc",
    f"{ACTOR}.clip_ratio_low=0.2",
    f"{ACTOR}.clip_ratio_high=0.28",
    f"{ACTOR}.loss_agg_mode=token-mean",
    "reward_model.reward_manager=dapo",
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
    "reward_model.reward_kwargs.overlong_buffer_cfg.len=4",
    "custom_reward_function.name=rarely_right",
)
TWO_STEPS = ("data.val_files=[]", "trainer.total_training_steps=2")


def run_train(material: Material, folder: Path, *overrides: str) -> Ended:
    """Train into ``folder/run``."""
    return run_command(train_arguments(material, folder / "run", *overrides), folder=folder)


def metrics_after(material: Material, folder: Path, *overrides: str) -> dict[int, dict[str, float]]:
    """The metrics of a run that must end well."""
    ended = run_train(material, folder, *overrides)
    assert ended.code == 0, ended.stderr
    return metrics_of(folder / "run")


def weights_after(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the run's only checkpoint."""
    (checkpoint,) = (folder / "run").glob("global_step_*")
    return load_file(checkpoint / "actor/model.safetensors")


def test_dapo_trains_on_groups_that_differ_and_shapes_long_responses(
    material: Material, tmp_path: Path
) -> None:
    logged = "reward_model.reward_kwargs.overlong_buffer_cfg.log=True"
    metrics = metrics_after(material, tmp_path, *DAPO, logged, *TWO_STEPS, "trainer.save_freq=2")
    rows = metrics.values()
    assert sum(row["training/dropped_groups"] for row in rows) > 0
    assert all(row["reward/zero_variance_group_ratio"] == 0 for row in rows)
    assert all(-1 <= row["reward/overlong_reward/mean"] < 0 for row in rows)
    assert metrics[1]["critic/score/mean"] == pytest.approx(
        metrics[1]["reward/acc/mean"] + metrics[1]["reward/overlong_reward/mean"]
    )


@pytest.mark.parametrize(
    "keys",
    [
        (f"{ACTOR}.policy_loss.loss_mode=kl_cov", f"{ACTOR}.policy_loss.kl_cov_ratio=0.1"),
        ("algorithm.adv_estimator=optimal_token_baseline",),
    ],
)
def test_statistics_of_a_mini_batch_do_not_depend_on_micro_batches(
    material: Material, tmp_path: Path, keys: tuple[str, ...]
) -> None:
    two_updates = f"{ACTOR}.ppo_mini_batch_size=2"
    whole, cut = (
        metrics_after(material, tmp_path, *keys, two_updates, *TWO_STEPS, *more)
        for more, tmp_path in (
            ((), tmp_path / "whole"),
            ((f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",), tmp_path / "cut"),
        )
    )
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "critic/advantages/max"):
        assert cut[2][name] == pytest.approx(whole[2][name], abs=1e-5), name
    assert whole[2]["actor/ppo_kl"] != 0


def test_overlong_penalty_is_logged_only_on_request(material: Material, tmp_path: Path) -> None:
    metrics = metrics_after(material, tmp_path, *DAPO, *TWO_STEPS)
    assert "reward/overlong_reward/mean" not in metrics[1]
    assert metrics[1]["critic/score/mean"] < metrics[1]["reward/acc/mean"]


def test_dapo_gives_up_when_all_groups_are_equal(material: Material, tmp_path: Path) -> None:
    limit = "algorithm.filter_groups.max_num_gen_batches=3"
    equal = (*DAPO, "custom_reward_function.name=constant")
    ended = run_train(material, tmp_path, *equal, limit, *TWO_STEPS)
    assert ended.code == 2
    (error,) = ended.errors
    assert error.startswith("error: algorithm.filter_groups.max_num_gen_batches=3: ")
    assert "algorithm.filter_groups.enable=False" in error


def test_dapo_ends_when_the_data_are_used_up(material: Material, tmp_path: Path) -> None:
    few = ("data.train_max_samples=8", "trainer.total_epochs=1", "trainer.save_freq=10")
    ended = run_train(material, tmp_path, *DAPO, *few, "data.val_files=[]")
    assert ended.code == 0, ended.stderr
    steps = list(metrics_of(tmp_path / "run"))
    assert len(steps) < 2
    assert "without effect" not in ended.stderr


def test_an_early_end_of_the_data_is_validated_and_saved_like_any_last_step(
    material: Material, tmp_path: Path
) -> None:
    keys = (*DAPO, "trainer.total_epochs=1", "trainer.total_training_steps=10")
    ended = run_train(material, tmp_path, *keys, "trainer.test_freq=100", "trainer.save_freq=100")
    assert ended.code == 0, ended.stderr
    assert "dynamic sampling: " in ended.stderr
    records = read_lines(tmp_path / "run/metrics.jsonl")
    last = records[-1]["step"]
    assert 1 <= last < 10
    assert "the data ended at step" in ended.stderr
    training, validation = (record for record in records if record["step"] == last)
    assert "actor/grad_norm" in training
    assert "val-core/openai/gsm8k/acc/mean@1" in validation
    assert [path.name for path in (tmp_path / "run").glob("global_step_*")] == [
        f"global_step_{last}"
    ]


def test_dynamic_sampling_does_not_use_up_the_data_for_a_reward_that_always_fails(
    material: Material, tmp_path: Path
) -> None:
    dynamic = "algorithm.filter_groups.enable=True"
    broken = ("custom_reward_function.name=broken", "data.val_files=[]")
    ended = run_train(material, tmp_path, dynamic, *broken)
    assert ended.code == 2, ended.stderr
    (error,) = ended.errors
    assert "the last 16 rewards all failed" in error and "out of order" in error


def test_remax_compares_each_sample_with_the_greedy_answer(
    material: Material, tmp_path: Path
) -> None:
    """The greedy answers at step 0 are known from a validation of the same prompts."""
    keys = (
        "algorithm.adv_estimator=remax",
        "actor_rollout_ref.rollout.n=2",
        f"data.val_files={material.train}",
        "trainer.validation_data_dir=validation",
        "trainer.total_training_steps=2",
    )
    metrics = metrics_after(material, tmp_path, *keys)
    assert all(metrics[step]["actor/grad_norm"] > 0 for step in (1, 2))
    greedy = {row["input"]: row["score"] for row in read_lines(tmp_path / "validation/0.jsonl")}
    first = [row for row in read_lines(tmp_path / "run/rollouts.jsonl") if row["step"] == 1]
    assert len(first) == 8
    for row in first:
        assert row["advantage"] == pytest.approx(row["score"] - greedy[row["prompt"]])
    assert len({row["advantage"] for row in first}) > 2


def test_remax_of_greedy_samples_has_nothing_to_learn(material: Material, tmp_path: Path) -> None:
    keys = (
        "algorithm.adv_estimator=remax",
        "actor_rollout_ref.rollout.do_sample=False",
        *TWO_STEPS,
    )
    metrics = metrics_after(material, tmp_path, *keys)
    for row in metrics.values():
        assert row["critic/advantages/max"] == row["critic/advantages/min"] == 0


def test_the_share_of_sequences_that_are_computed_is_logged(
    material: Material, tmp_path: Path
) -> None:
    """With rewards of 0 and 1 a sample has no signal only if its group has none."""
    share, entropy = "actor/computed_sequences/share", "actor/entropy"
    keys = ("custom_reward_function.name=rarely_right", "data.val_files=[]")
    skipping = metrics_after(material, tmp_path / "skipping", *keys)
    for row in skipping.values():
        assert row[share] == 1 - row["reward/zero_variance_group_ratio"]
    assert 0 < min(row[share] for row in skipping.values()) < 1
    whole = metrics_after(material, tmp_path / "all", *keys, f"{ACTOR}.entropy_coeff=0.001")
    assert [row[share] for row in whole.values()] == [1, 1, 1, 1]
    for step, row in skipping.items():
        assert row[entropy] == pytest.approx(whole[step][entropy], rel=0.1), (
            "a mean of the computed"
        )


def test_kl_in_the_loss_grows_from_zero(material: Material, tmp_path: Path) -> None:
    kl = (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.1")
    metrics = metrics_after(material, tmp_path, *kl, "data.val_files=[]")
    assert metrics[1]["actor/kl_loss"] == pytest.approx(0, abs=1e-9)
    assert metrics[4]["actor/kl_loss"] > 1e-6
    assert metrics[4]["actor/kl_coef"] == 0.1


def test_kl_in_the_reward_adapts_its_coefficient(material: Material, tmp_path: Path) -> None:
    control = ("type=adaptive", "kl_coef=0.5", "horizon=50", "target_kl=0.001")
    keys = [f"algorithm.kl_ctrl.{setting}" for setting in control]
    metrics = metrics_after(
        material, tmp_path, "algorithm.use_kl_in_reward=True", *keys, "data.val_files=[]"
    )
    coefficients = [metrics[step]["actor/reward_kl_penalty_coeff"] for step in (1, 2, 3, 4)]
    assert len(set(coefficients)) == 4
    assert metrics[4]["actor/reward_kl_penalty"] != 0
    assert metrics[4]["critic/rewards/mean"] != metrics[4]["critic/score/mean"]
    assert metrics[1]["critic/rewards/mean"] == pytest.approx(metrics[1]["critic/score/mean"])


def test_several_optimizer_steps_a_batch_recompute_or_bypass_old_log_probs(
    material: Material, tmp_path: Path
) -> None:
    keys = (
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.ppo_epochs=2",
        "trainer.save_freq=2",
        *TWO_STEPS,
    )
    recomputed = metrics_after(material, tmp_path / "recomputed", *keys)
    bypass = "algorithm.rollout_correction.bypass_mode=True"
    bypassed = metrics_after(material, tmp_path / "bypassed", *keys, bypass)
    for row in recomputed.values():
        assert row["training/rollout_probs_diff_max"] < 1e-5
        assert row["training/rollout_logp_diff_mean"] < 1e-6
        assert row["actor/ppo_kl"] != 0
    assert "training/rollout_probs_diff_max" not in bypassed[1]
    ours, theirs = weights_after(tmp_path / "recomputed"), weights_after(tmp_path / "bypassed")
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=2e-3)


def test_results_do_not_depend_on_micro_batches(material: Material, tmp_path: Path) -> None:
    runs = {
        "by_tokens": (),
        "by_count": (f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",),
        "recomputing": ("actor_rollout_ref.model.enable_gradient_checkpointing=False",),
    }
    metrics = {
        name: repeatable(metrics_after(material, tmp_path / name, *keys, *TWO_STEPS))
        for name, keys in runs.items()
    }
    for name in ("by_count", "recomputing"):
        for step, row in metrics["by_tokens"].items():
            assert metrics[name][step] == pytest.approx(row, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "keys",
    [
        ("algorithm.adv_estimator=rloo",),
        ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.99"),
        ("algorithm.adv_estimator=reinforce_plus_plus_baseline",),
        (
            "algorithm.norm_adv_by_std_in_grpo=False",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
        ),
        (f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.entropy_coeff=0.01"),
        (f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.shuffle=True"),
    ],
    ids=["rloo", "reinforce++", "reinforce++-baseline", "dr.grpo", "gspo", "cispo"],
)
def test_estimators_and_losses_train(
    keys: tuple[str, ...], material: Material, tmp_path: Path
) -> None:
    mini = (f"{ACTOR}.ppo_mini_batch_size=2", *TWO_STEPS)
    metrics = metrics_after(material, tmp_path, *keys, *mini)
    assert all(row["actor/grad_norm"] > 0 for row in metrics.values())
    assert metrics[2]["actor/skipped_updates"] == 0


def test_a_reward_that_fails_is_counted_and_never_a_zero(
    material: Material, tmp_path: Path
) -> None:
    keys = (
        "custom_reward_function.name=unreliable",
        "reward.timeout_s=3",
        "trainer.rollout_data_dir=rollouts",
        "trainer.total_training_steps=3",
        "data.val_files=[]",
    )
    metrics = metrics_after(material, tmp_path, *keys)
    assert list(metrics) == [1, 2, 3]
    assert sum(row["reward/timeouts"] for row in metrics.values()) > 0
    assert sum(row["reward/errors"] for row in metrics.values()) > 0
    for step, row in metrics.items():
        scores = [sample["score"] for sample in read_lines(tmp_path / f"rollouts/{step}.jsonl")]
        assert scores.count(None) == row["reward/failures"]
        assert row["critic/score/mean"] == statistics.fmean(s for s in scores if s is not None) == 1


def test_equal_rewards_leave_no_holes_in_the_metrics(material: Material, tmp_path: Path) -> None:
    metrics = metrics_after(material, tmp_path, "custom_reward_function.name=constant", *TWO_STEPS)
    assert metrics[1]["actor/pg_loss"] == metrics[1]["actor/grad_norm"] == 0
    assert metrics[1]["actor/entropy"] > 0


def test_the_actor_waits_until_the_step_of_critic_warmup(
    material: Material, tmp_path: Path
) -> None:
    warmup = ("trainer.critic_warmup=3", "data.val_files=[]")
    metrics = metrics_after(material, tmp_path, *warmup)
    assert [step for step, row in metrics.items() if "actor/grad_norm" in row] == [3, 4]


def test_a_policy_that_diverges_ends_the_run(material: Material, tmp_path: Path) -> None:
    diverging = (f"{ACTOR}.optim.lr=1.0", f"{ACTOR}.optim.weight_decay=1e30")
    keys = (*diverging, "trainer.total_training_steps=20", "data.val_files=[]")
    ended = run_train(material, tmp_path, *keys)
    assert ended.code == 2
    expected = "optim.lr=1.0: loss or gradient was not finite in 5 training steps in a row"
    assert expected in ended.errors[0]


def test_a_model_starts_from_random_weights_on_request(material: Material, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(material.policy, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    model = (f"actor_rollout_ref.model.path={folder}", f"{ACTOR}.load_weight=False")
    metrics = metrics_after(material, tmp_path, *model, *TWO_STEPS)
    assert metrics[2]["actor/grad_norm"] > 0


def test_other_families_train_through_transformers(material: Material, tmp_path: Path) -> None:
    from tests.fakes.tiny_policy import write_tiny_gpt2

    policy = write_tiny_gpt2(tmp_path / "gpt2")
    keys = (
        f"actor_rollout_ref.model.path={policy}",
        "actor_rollout_ref.rollout.name=hf",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.use_kl_loss=True",
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
    )
    metrics = metrics_after(material, tmp_path, *keys)
    assert list(metrics) == [0, 1]
    assert metrics[1]["actor/grad_norm"] > 0
    assert metrics[1]["training/rollout_probs_diff_max"] < 1e-5
    before, after = load_file(policy / "model.safetensors"), weights_after(tmp_path)
    assert any(not torch.equal(before[name], after[name]) for name in before)
