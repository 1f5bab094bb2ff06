# SPDX-License-Identifier: Apache-2.0
"""A reward model in one process: the policy learns what it likes, a resumed run is the same bit by
bit, rules score validations alone, and what is wrong with it is said before anything begins.
"""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from tests.fakes.commands import Ended, check_refusal, run_command
from tests.fakes.tiny_policy import write_tiny_gpt2
from tests.fakes.tiny_reward_model import (
    write_random_judge,
    write_sevens_judge,
    write_small_vocabulary,
)
from tests.fakes.tiny_run import Material, metrics_of, read_lines, repeatable, train_arguments

OWN_TOKENS = "reward_model.model.input_tokenizer=null"
NO_VALIDATION = "data.val_files=[]"
LEARNING = (
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.optim.lr=0.008",
    "actor_rollout_ref.rollout.n=8",
    "trainer.total_epochs=20",
    "trainer.total_training_steps=32",
)


@pytest.fixture(scope="module")
def judge(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one. Do not write into it."""
    return write_random_judge(material.policy, tmp_path_factory.mktemp("judge") / "judge")


def run_judged(material: Material, judge: Path, run: Path, *overrides: str) -> Ended:
    """Train into ``run`` by a reward model; a function that is called always fails."""
    keys = (
        "reward_model.enable=True",
        f"reward_model.model.path={judge}",
        "custom_reward_function.name=broken",
    )
    return run_command(train_arguments(material, run, *keys, *overrides), folder=run.parent)


def metrics_after(
    material: Material, judge: Path, run: Path, *overrides: str
) -> dict[int, dict[str, float]]:
    """The metrics of a run that must end well."""
    ended = run_judged(material, judge, run, *overrides)
    assert ended.code == 0, ended.stderr
    return metrics_of(run)


def edit_rows(file: Path, target: Path, **columns: Any) -> Path:
    """The rows of a parquet file with other columns, as JSON lines."""
    rows = pq.read_table(file).to_pylist()
    target.write_text("\n".join(json.dumps({**row, **columns}) for row in rows))
    return target


@pytest.mark.parametrize("tokens", ["reward_model.use_dynamic_bsz=True", OWN_TOKENS])
def test_the_policy_learns_what_the_model_likes(
    material: Material, tmp_path: Path, tokens: str
) -> None:
    sevens = write_sevens_judge(material.policy, tmp_path / "sevens")
    rows = metrics_after(material, sevens, tmp_path / "run", *LEARNING, NO_VALIDATION, tokens)
    scores = [row["critic/score/mean"] for row in rows.values()]
    assert statistics.fmean(scores[:8]) < 0.15
    assert statistics.fmean(scores[-4:]) > 2
    assert all(row["timing_s/reward"] > 0 and row["reward/failures"] == 0 for row in rows.values())
    late = [r for r in read_lines(tmp_path / "run/rollouts.jsonl") if r["step"] == 32]
    liked = max(late, key=lambda record: record["score"])
    assert liked["response"].count("7") >= 6 and liked["ground_truth"] is not None


def test_a_resumed_run_is_the_same_bit_by_bit(
    material: Material, judge: Path, tmp_path: Path
) -> None:
    keys = ("trainer.save_freq=2", "algorithm.use_kl_in_reward=True", NO_VALIDATION)
    whole = metrics_after(material, judge, tmp_path / "whole", *keys)
    short = "trainer.total_training_steps=2"
    assert list(metrics_after(material, judge, tmp_path / "run", *keys, short)) == [1, 2]
    again = metrics_after(material, judge, tmp_path / "run", *keys)
    assert repeatable(again) == repeatable(whole)
    assert {folder.name for folder in (tmp_path / "run/global_step_4").iterdir()} == {
        folder.name for folder in (tmp_path / "whole/global_step_4").iterdir()
    }
    assert not list((tmp_path / "run/global_step_4").glob("*reward*"))


@pytest.mark.parametrize("estimator", ["gae", "remax", "rloo", "reinforce_plus_plus"])
def test_every_estimator_takes_its_scores(
    material: Material, judge: Path, tmp_path: Path, estimator: str
) -> None:
    keys = (f"algorithm.adv_estimator={estimator}", "algorithm.use_kl_in_reward=True")
    steps = "trainer.total_training_steps=2"
    rows = metrics_after(material, judge, tmp_path / "run", *keys, steps, NO_VALIDATION)
    for row in rows.values():
        assert row["critic/score/max"] > row["critic/score/min"]
        assert row["actor/grad_norm"] > 0


def test_rules_score_validations_and_rows_left_to_a_model_are_left_out(
    material: Material, judge: Path, tmp_path: Path
) -> None:
    style = {"reward_model": {"style": "model"}}
    unscored = edit_rows(material.test, tmp_path / "unscored.jsonl", **style)
    train = edit_rows(material.train, tmp_path / "train.jsonl", **style)
    keys = (
        f"data.train_files={train}",
        f"data.val_files=[{material.test},{unscored}]",
        "custom_reward_function.name=graded",
        "trainer.test_freq=4",
    )
    ended = run_judged(material, judge, tmp_path / "run", *keys)
    assert ended.code == 0, ended.stderr
    assert ended.stderr.count("skipped 6 of 12 rows, which have reward_model.style=model") == 1
    rows = metrics_of(tmp_path / "run")
    assert all(any(name.startswith("val-core/") for name in rows[step]) for step in (0, 4))

    only = (*keys, f"data.val_files={unscored}", "custom_reward_function.name=broken")
    rows = metrics_after(material, judge, tmp_path / "other", *only)
    assert list(rows) == [0, 1, 2, 3, 4]
    assert not any(name.startswith("val-") for name in rows[4])


def test_its_own_tokenizer_and_template_say_what_it_reads(
    material: Material, judge: Path, tmp_path: Path
) -> None:
    """A template that leaves out what is asked, and a policy of other tokens."""
    blind = "{% for m in messages %}{{ m.role if m.role == 'user' else m.content }}{% endfor %}"
    template = tmp_path / "blind.jinja"
    template.write_text(blind)
    key = f"reward_model.model.custom_chat_template={template}"
    rows = metrics_after(material, judge, tmp_path / "run", key, NO_VALIDATION)
    seeing = metrics_after(material, judge, tmp_path / "seeing", NO_VALIDATION)
    native = metrics_after(material, judge, tmp_path / "native", OWN_TOKENS, NO_VALIDATION)
    scores = [run[1]["critic/score/mean"] for run in (rows, seeing, native)]
    assert len(set(scores)) == 3, "with a line end after the turn, without one, and without prompt"


def test_what_cannot_be_a_reward_model(material: Material, judge: Path, tmp_path: Path) -> None:
    key = "reward_model.model.path"
    run = tmp_path / "run"
    ended = run_judged(material, material.policy, run)
    check_refusal(ended, f"{key}='{material.policy}'", "'Qwen2ForCausalLM'", "one label", "Use")
    gpt2 = write_tiny_gpt2(tmp_path / "gpt2")
    check_refusal(run_judged(material, gpt2, run), f"{key}='{gpt2}'", "cannot be a reward model")
    check_refusal(run_judged(material, tmp_path / "no", run), f"{key}=", "no such folder")
    small = write_small_vocabulary(judge, tmp_path / "small", num_tokens=20)
    ended = run_judged(material, small, run, OWN_TOKENS)
    check_refusal(ended, f"{key}='{small}'", "20 tokens", "Use a model with the policy's tokenizer")
    check_refusal(run_judged(material, small, run), f"{key}='{small}'", "only 20 tokens")
    assert not run.exists()
    ended = run_judged(material, material.policy, run, f"actor_rollout_ref.model.path={judge}")
    check_refusal(ended, "actor_rollout_ref.model.path=", "a critic or a reward model")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("algorithm.filter_groups.enable=True", ("filter_groups.enable=True", "too late")),
        ("reward_model.model.input_tokenizer=x", ("input_tokenizer='x'", "null")),
        ("reward_model.model.paht=x", ("reward_model.model.paht", "reward_model.model.path")),
        ("reward_model.micro_batch_size_per_gpu=0", ("micro_batch_size_per_gpu=0", "Set")),
        ("reward_model.forward_max_token_len_per_gpu=50", ("per_gpu=50", "108", "Set")),
        ("reward_model.model.lora_rank=4", ("reward_model.model.lora_rank=4", "not built yet")),
        ("reward_model.model.custom_chat_template='{{no'", ("reward_model.model.path", "Jinja")),
    ],
)
def test_keys_that_cannot_be(
    material: Material, judge: Path, tmp_path: Path, override: str, says: tuple[str, ...]
) -> None:
    check_refusal(run_judged(material, judge, tmp_path / "run", override), *says)
    assert not (tmp_path / "run").exists()


def test_prompts_that_no_template_can_render_are_named(
    material: Material, judge: Path, tmp_path: Path
) -> None:
    plain = edit_rows(material.train, tmp_path / "plain.jsonl", prompt="How many?")
    ended = run_judged(material, judge, tmp_path / "run", f"data.train_files={plain}")
    check_refusal(ended, "reward_model.model.input_tokenizer=", "plain text", "Set")
    keys = (f"data.train_files={plain}", OWN_TOKENS, NO_VALIDATION)
    assert list(metrics_after(material, judge, tmp_path / "run", *keys)) == [1, 2, 3, 4]
    strict = "{{ raise_exception('no user') }}"
    template = tmp_path / "strict.jinja"
    template.write_text(strict)
    key = f"reward_model.model.custom_chat_template={template}"
    ended = run_judged(material, judge, tmp_path / "other", key)
    check_refusal(ended, "reward_model.model.path=", "row 0 of data.train_files", "no user")


def test_scores_that_are_not_finite_end_the_run(
    material: Material, judge: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(judge, broken)
    weights = load_file(broken / "model.safetensors")
    weights["score.weight"] = weights["score.weight"] * float("inf")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    ended = run_judged(material, broken, tmp_path / "run", NO_VALIDATION)
    check_refusal(ended, f"reward_model.model.path='{broken}'", "none of its 16 scores", "Use")
