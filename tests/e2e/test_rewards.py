# SPDX-License-Identifier: Apache-2.0
"""Reward functions end to end: several with weights, batches, TRL's signature, and what happens to
a run whose rewards fail or teach nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.commands import Ended, check_refusal, run_command
from tests.fakes.tiny_run import Material, metrics_of, read_lines, train_arguments

REWARDS = '''
import json, zlib

def correct(data_source, solution_str, ground_truth, extra_info):
    """1 for one response in three."""
    right = zlib.crc32(solution_str.encode()) % 3 == 0
    return {"score": float(right), "acc": right, "found": solution_str[:3]}

def brief(prompts, completions, **columns):
    """1 for the shorter half of the responses to a prompt."""
    lengths = [len(completion[0]["content"]) for completion in completions]
    print(f"{len(completions)} responses to {prompts[0][0]['role']}")
    return [float(length <= sorted(lengths)[len(lengths) // 2]) for length in lengths]

async def ranked(data_sources, solution_strs, ground_truths, extra_infos, best=1.0):
    """The rank of each response to a prompt."""
    order = sorted(solution_strs)
    return [best * order.index(solution) for solution in solution_strs]

def forgetful(data_source, solution_str, ground_truth, extra_info):
    float(solution_str == ground_truth)

def stale(data_source, solution_str, ground_truth, extra_info):
    """Fails for all but the ground truth once there is a checkpoint or a second step."""
    if solution_str != ground_truth and open("steps").read():
        return parse(solution_str)
    return float(zlib.crc32(solution_str.encode()) % 5)

def parse(text):
    return json.loads("{" + text)
'''
TWO_STEPS = ("data.val_files=[]", "trainer.total_training_steps=2")


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    """The functions above in a file."""
    file = tmp_path / "my_rewards.py"
    file.write_text(REWARDS)
    return file


def run_train(material: Material, folder: Path, *overrides: str) -> Ended:
    """Train into ``folder/run``."""
    return run_command(train_arguments(material, folder / "run", *overrides), folder=folder)


def test_two_weighted_functions_have_a_metric_each_and_their_text_is_recorded(
    material: Material, tmp_path: Path, rewards: Path
) -> None:
    keys = (
        f"custom_reward_function.path=[{rewards}:correct,{rewards}:brief]",
        "custom_reward_function.weights=[1.0,0.5]",
        "trainer.rollout_data_dir=rollouts",
    )
    ended = run_train(material, tmp_path, *keys, *TWO_STEPS)
    assert ended.code == 0, ended.stderr
    for step, row in metrics_of(tmp_path / "run").items():
        whole = row["reward/correct/mean"] + 0.5 * row["reward/brief/mean"]
        assert row["critic/score/mean"] == pytest.approx(whole)
        assert row["reward/acc/mean"] == row["reward/correct/mean"]
        samples = read_lines(tmp_path / f"rollouts/{step}.jsonl")
        assert all(one["correct/found"] == one["output"][:3] for one in samples)
    printed = (tmp_path / "run/rewards.log").read_text().splitlines()
    assert printed == ["4 responses to user"] * 8
    assert ended.stderr.count("tandem.rewards.log: 4 responses to user") == 8


def test_the_parts_reach_the_estimator_that_normalises_them_separately(
    material: Material, tmp_path: Path, rewards: Path
) -> None:
    keys = (
        f"custom_reward_function.path=[{rewards}:correct,{rewards}:brief]",
        "reward.reward_manager.name=gdpo",
        "algorithm.adv_estimator=gdpo",
        "algorithm.gdpo_reward_keys=[correct,brief]",
    )
    ended = run_train(material, tmp_path, *keys, *TWO_STEPS)
    assert ended.code == 0, ended.stderr
    assert all(row["critic/advantages/max"] > 0 for row in metrics_of(tmp_path / "run").values())


@pytest.mark.parametrize("manager", ["batch", "rate_limited"])
def test_a_batch_function_that_is_awaited_gets_the_responses_to_a_prompt(
    manager: str, material: Material, tmp_path: Path, rewards: Path
) -> None:
    keys = (
        f"custom_reward_function.path={rewards}",
        "custom_reward_function.name=ranked",
        "+custom_reward_function.reward_kwargs.best=2.0",
        f"reward.reward_manager.name={manager}",
    )
    ended = run_train(material, tmp_path, *keys, *TWO_STEPS)
    assert ended.code == 0, ended.stderr
    highest = [row["critic/score/max"] for row in metrics_of(tmp_path / "run").values()]
    assert max(highest) == 6.0


def test_a_function_is_tried_on_the_first_row_before_the_start(
    material: Material, tmp_path: Path, rewards: Path
) -> None:
    keys = (f"custom_reward_function.path={rewards}", "custom_reward_function.name=forgetful")
    says = ("my_rewards.py", "returned None (NoneType)", "(data_source, solution_str, ground_truth")
    check_refusal(run_train(material, tmp_path, *keys), *says)


def test_a_step_of_failed_rewards_ends_the_run_and_keeps_what_was_trained(
    material: Material, tmp_path: Path, rewards: Path
) -> None:
    (tmp_path / "steps").touch()
    hook = f"trainer.rollout_data_dir={tmp_path / 'rollouts'}"
    keys = (
        f"custom_reward_function.path={rewards}",
        "custom_reward_function.name=stale",
        "trainer.save_freq=-1",
        "data.val_files=[]",
    )
    (tmp_path / "my_metrics.py").write_text(METRICS)
    keys = (*keys, hook, "trainer.metrics=[my_metrics:count]")
    ended = run_train(material, tmp_path, *keys, "trainer.max_restarts=5")
    assert ended.code == 2, ended.stderr
    assert not (tmp_path / "run/restarts.jsonl").exists()  # a mistake of the user would come again
    (error,) = ended.errors
    assert "the last 16 rewards all failed, the latest: JSONDecodeError" in error
    line = REWARDS.split("\n").index('    return json.loads("{" + text)') + 1
    assert f"(my_rewards.py:{line})" in error and "run/rewards.log" in error
    log = (tmp_path / "run/rewards.log").read_text()
    assert "in stale" in log and "in parse" in log and "JSONDecodeError" in log
    assert list(metrics_of(tmp_path / "run")) == [1, 2]
    assert (tmp_path / "run/global_step_2").is_dir()
    (tmp_path / "steps").write_text("")  # the function works again
    assert run_train(material, tmp_path, *keys).code == 0
    assert list(metrics_of(tmp_path / "run")) == [1, 2, 3, 4]


def test_steps_that_teach_nothing_are_warned_of_and_reported(
    material: Material, tmp_path: Path
) -> None:
    keys = ("custom_reward_function.name=constant", "data.val_files=[]")
    ended = run_train(material, tmp_path, *keys)
    assert ended.code == 0, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "nothing was learnt" in line]
    assert "step 3: in 3 steps in a row" in line and "every response scores 1" in line
    reported = run_command(["report", str(tmp_path / "run")], folder=tmp_path)
    assert reported.code == 0, reported.stderr
    (page,) = (tmp_path / "run").glob("*.html")
    assert "Nothing was learnt from the reward in 4 steps in a row, 1 to 4" in page.read_text()


METRICS = '''
def count(batch):
    """Say in a file that step 2 has begun, which ``stale`` reads."""
    if batch.step == 2:
        open("steps", "w").write("2")
    return {}
'''
