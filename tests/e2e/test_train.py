# SPDX-License-Identifier: Apache-2.0
"""``tandem train`` from command to files: what a GRPO run leaves behind, and how it ends."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import tandem
from tandem.config.schema.run import RunConfig
from tandem.platforms.record import Platform
from tandem.testing.doubles import write_vendor_package
from tests.fakes.commands import TIMEOUT_S, Ended, run_command
from tests.fakes.published_commands import ASCEND_COMMAND
from tests.fakes.tiny_run import (
    Material,
    metrics_of,
    read_lines,
    repeatable,
    train_arguments,
)

METRICS_OF_VERL = (
    "actor/entropy",
    "actor/grad_norm",
    "actor/lr",
    "actor/pg_clipfrac",
    "actor/pg_loss",
    "actor/ppo_kl",
    "critic/advantages/mean",
    "critic/rewards/mean",
    "critic/score/max",
    "perf/throughput",
    "perf/time_per_step",
    "perf/total_num_tokens",
    "prompt_length/mean",
    "response_length/clip_ratio",
    "response_length/mean",
    "timing_per_token_ms/gen",
    "timing_s/adv",
    "timing_s/lay_out",
    "timing_s/gen",
    "timing_s/step",
    "timing_s/update_actor",
    "training/epoch",
    "training/global_step",
    "actor/computed_sequences/share",
)
VALIDATION_METRIC = "val-core/openai/gsm8k/acc/mean@1"
ROLLOUT_FIELDS = {"step", "prompt", "response", "score", "advantage", "tokens", "log_probs"}


@dataclass(frozen=True)
class GrpoRun:
    """A finished run: its folder, its arguments, and how it ended."""

    folder: Path
    arguments: list[str]
    ended: Ended


@pytest.fixture(scope="module")
def grpo(material: Material, tmp_path_factory: pytest.TempPathFactory) -> GrpoRun:
    folder = tmp_path_factory.mktemp("grpo")
    schedule = (
        "trainer.save_freq=2",
        "trainer.test_freq=3",
        "trainer.logger=[console,tensorboard]",
    )
    names = ("trainer.project_name=apples", "trainer.experiment_name=first")
    arguments = train_arguments(material, folder / "run", *schedule, *names)
    return GrpoRun(folder / "run", arguments, run_command(arguments, folder=folder))


def test_run_ends_well_and_logs_verls_metrics_each_step(grpo: GrpoRun) -> None:
    assert grpo.ended.code == 0, grpo.ended.stderr
    metrics = metrics_of(grpo.folder)
    assert list(metrics) == [0, 1, 2, 3, 4]
    for step in range(1, 5):
        assert not set(METRICS_OF_VERL) - metrics[step].keys()
        assert all(math.isfinite(value) for value in metrics[step].values())
    assert metrics[4]["critic/score/mean"] == metrics[4]["reward/acc/mean"]
    assert metrics[4]["training/global_step"] == 4


def test_a_pipe_has_one_short_line_a_record(grpo: GrpoRun) -> None:
    """A validation is a record of its own, behind the record of its step."""
    lines = grpo.ended.stdout.splitlines()
    trained = [line for line in lines if re.search(r"  reward \d", line)]
    validated = [line for line in lines if "  val openai/gsm8k " in line]
    assert [line.split("  ")[0][9:] for line in trained] == [f"step {k}/4" for k in range(1, 5)]
    assert [line.split("  ")[0][9:] for line in validated] == ["step 0/4", "step 3/4", "step 4/4"]
    assert len(lines) == 7
    assert max(map(len, lines)) <= 160


def test_the_start_says_what_is_done(grpo: GrpoRun) -> None:
    assert f"tandem {tandem.__version__}: train\n" in grpo.ended.stderr
    assert "40 prompts to train on, 6 to validate with" in grpo.ended.stderr


def test_validation_happens_when_the_plan_says(grpo: GrpoRun) -> None:
    planned = run_command(["plan", "--json", *grpo.arguments[1:]], folder=grpo.folder / "plan")
    plan = json.loads(planned.stdout)
    validated = [s for s, row in metrics_of(grpo.folder).items() if VALIDATION_METRIC in row]
    assert validated == plan["validation_steps"] == [0, 3, 4]
    assert plan["total_training_steps"] == 4


def test_rollouts_are_recorded_with_log_probs(grpo: GrpoRun) -> None:
    rollouts = read_lines(grpo.folder / "rollouts.jsonl")
    assert {rollout["step"] for rollout in rollouts} == {1, 2, 3, 4}
    for rollout in rollouts:
        assert rollout.keys() >= ROLLOUT_FIELDS
        assert 0 < len(rollout["tokens"]) == len(rollout["log_probs"]) <= 12
        assert all(log_prob < 0 for log_prob in rollout["log_probs"])


def test_resolved_config_is_written(grpo: GrpoRun) -> None:
    written = (grpo.folder / "config.json").read_text()
    config = RunConfig.model_validate_json(written)
    assert config.actor_rollout_ref.rollout.n == 4
    assert config.trainer.experiment_name == "first"


def test_checkpoints_lie_where_verl_puts_them(grpo: GrpoRun) -> None:
    steps = sorted(path.name for path in grpo.folder.glob("global_step_*"))
    assert steps == ["global_step_2", "global_step_4"]
    assert (grpo.folder / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert not [path for path in grpo.folder.iterdir() if path.name.startswith(".")]


def test_export_is_a_folder_that_transformers_loads(grpo: GrpoRun, tmp_path: Path) -> None:
    ended = run_command(["export", str(grpo.folder), "--output", "model"], folder=tmp_path)
    assert ended.code == 0, ended.stderr
    ids = torch.arange(3, 40)[None]
    exported, trained = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        for folder in (tmp_path / "model", grpo.folder / "global_step_4/actor")
    )
    assert torch.equal(exported, trained)
    ours = load_file(tmp_path / "model/model.safetensors")
    theirs = load_file(grpo.folder / "global_step_4/actor/model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_training_has_changed_the_weights(grpo: GrpoRun, material: Material) -> None:
    before = load_file(material.policy / "model.safetensors")
    after = load_file(grpo.folder / "global_step_4/actor/model.safetensors")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_report_is_one_html_file(grpo: GrpoRun, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    ended = run_command(["report", str(grpo.folder), "--output", str(file)], folder=tmp_path)
    assert ended.code == 0, ended.stderr
    html = file.read_text()
    assert "critic/score/mean" in html
    assert not re.search(r"""(src|href)=["']https?:""", html)


def test_tensorboard_events_lie_in_the_folder_of_the_run_which_is_named(grpo: GrpoRun) -> None:
    folder = grpo.folder / "tensorboard"
    assert f"tensorboard --logdir {folder}" in grpo.ended.stderr
    assert [path.name for path in folder.iterdir() if "events.out.tfevents" in path.name]


def test_same_command_twice_gives_the_same_run(
    grpo: GrpoRun, material: Material, tmp_path: Path
) -> None:
    again = train_arguments(
        material, tmp_path / "run", "trainer.save_freq=4", "trainer.test_freq=3"
    )
    assert run_command(again, folder=tmp_path).code == 0
    assert repeatable(metrics_of(tmp_path / "run")) == repeatable(metrics_of(grpo.folder))
    weights = "global_step_4/actor/model.safetensors"
    assert (tmp_path / "run" / weights).read_bytes() == (grpo.folder / weights).read_bytes()


def test_val_only_validates_once_and_stops(material: Material, tmp_path: Path) -> None:
    arguments = train_arguments(
        material, tmp_path / "run", "trainer.val_only=True", "trainer.save_freq=1"
    )
    assert run_command(arguments, folder=tmp_path).code == 0
    metrics = metrics_of(tmp_path / "run")
    assert list(metrics) == [0]
    assert VALIDATION_METRIC in metrics[0]
    assert not list((tmp_path / "run").glob("global_step_*"))


def test_val_only_validates_the_checkpoint_and_keeps_the_records(
    material: Material, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    trained = train_arguments(material, run, "trainer.save_freq=2", "data.val_files=[]")
    assert run_command(trained, folder=tmp_path).code == 0
    before = read_lines(run / "metrics.jsonl")
    rollouts = (run / "rollouts.jsonl").read_bytes()
    earlier = (
        "trainer.val_only=True",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={run / 'global_step_2'}",
    )
    assert run_command(train_arguments(material, run, *earlier), folder=tmp_path).code == 0
    *kept, validated = read_lines(run / "metrics.jsonl")
    assert kept == before
    assert (run / "rollouts.jsonl").read_bytes() == rollouts
    assert validated["step"] == 2 and VALIDATION_METRIC in validated


def test_a_run_that_is_over_says_so(material: Material, tmp_path: Path) -> None:
    arguments = train_arguments(
        material, tmp_path / "run", "trainer.save_freq=4", "data.val_files=[]"
    )
    assert run_command(arguments, folder=tmp_path).code == 0
    before = read_lines(tmp_path / "run/metrics.jsonl")
    ended = run_command(arguments, folder=tmp_path)
    assert ended.code == 0
    assert "step 4 of 4: nothing is left to train" in ended.stderr
    assert read_lines(tmp_path / "run/metrics.jsonl") == before


def test_majority_votes_of_built_in_rewards_are_validated(
    material: Material, tmp_path: Path
) -> None:
    kwargs = [f"actor_rollout_ref.rollout.val_kwargs.{k}" for k in ("n=4", "do_sample=True")]
    keys = (
        *kwargs,
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "trainer.val_only=True",
        "~custom_reward_function.path",
        "~custom_reward_function.name",
        "trainer.validation_data_dir=validation",
    )
    arguments = train_arguments(material, tmp_path / "run", *keys)
    assert run_command(arguments, folder=tmp_path).code == 0
    metrics = metrics_of(tmp_path / "run")[0]
    assert "val-core/openai/gsm8k/acc/maj@4/mean" in metrics
    assert "val-aux/openai/gsm8k/acc/maj@2/mean" in metrics
    assert all("pred" in row for row in read_lines(tmp_path / "validation/0.jsonl"))


def test_a_chat_template_of_the_user_is_used_and_goes_with_the_model(
    material: Material, tmp_path: Path
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}Q: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    keys = (
        f"actor_rollout_ref.model.custom_chat_template={template}",
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
    )
    ended = run_command(train_arguments(material, tmp_path / "run", *keys), folder=tmp_path)
    assert ended.code == 0, ended.stderr
    assert "without effect" not in ended.stderr
    for rollout in read_lines(tmp_path / "run/rollouts.jsonl"):
        assert rollout["prompt"].startswith("Q: ") and rollout["prompt"].endswith("\nA:")
    assert run_command(["export", str(tmp_path / "run"), "--output", "model"], folder=tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template == template.read_text()


def test_what_deserves_a_look_is_said_at_the_start_too(material: Material, tmp_path: Path) -> None:
    keys = (
        "data.max_prompt_length=250",
        "actor_rollout_ref.rollout.n=1",
        "trainer.total_training_steps=1",
        "data.val_files=[]",
    )
    ended = run_command(train_arguments(material, tmp_path / "run", *keys), folder=tmp_path)
    assert ended.code == 0
    longest = "data.max_prompt_length + data.max_response_length = 262 tokens"
    assert f"{longest}: actor_rollout_ref.model.path=" in ended.stderr
    assert "is made for 256 positions" in ended.stderr
    assert "warning: actor_rollout_ref.rollout.n=1: with a single sample" in ended.stderr


def test_the_runs_seed_stands_for_all_others(material: Material, tmp_path: Path) -> None:
    shuffled = (
        "actor_rollout_ref.actor.shuffle=True",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.total_training_steps=2",
        "data.val_files=[]",
    )
    each = [f"{key}=9" for key in ("data.seed", "actor_rollout_ref.rollout.seed")]
    loader = "actor_rollout_ref.actor.data_loader_seed=9"
    runs = {"one": ("trainer.seed=9",), "each": (*each, loader), "none": ()}
    metrics = {}
    for name, keys in runs.items():
        arguments = train_arguments(material, tmp_path / name, *shuffled, *keys)
        assert run_command(arguments, folder=tmp_path).code == 0
        metrics[name] = repeatable(metrics_of(tmp_path / name))
    assert metrics["one"] == metrics["each"] != metrics["none"]


def test_epochs_end_a_run_that_wants_more_steps(material: Material, tmp_path: Path) -> None:
    limits = ("data.train_max_samples=10", "trainer.total_epochs=2", "trainer.save_freq=100")
    steps = ("trainer.total_training_steps=100", "trainer.test_freq=100")
    ended = run_command(
        train_arguments(material, tmp_path / "run", *limits, *steps), folder=tmp_path
    )
    assert ended.code == 0
    metrics = metrics_of(tmp_path / "run")
    assert list(metrics) == [0, 1, 2, 3, 4]
    assert [metrics[step]["training/epoch"] for step in (2, 3)] == [0, 1]
    assert VALIDATION_METRIC in metrics[4]
    assert (tmp_path / "run/global_step_4").is_dir()


def test_old_checkpoints_retire(material: Material, tmp_path: Path) -> None:
    keep = ("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2")
    assert (
        run_command(train_arguments(material, tmp_path / "run", *keep), folder=tmp_path).code == 0
    )
    steps = sorted(path.name for path in (tmp_path / "run").glob("global_step_*"))
    assert steps == ["global_step_3", "global_step_4"]


def test_dumps_hold_all_samples(material: Material, tmp_path: Path) -> None:
    folders = ("trainer.rollout_data_dir=rollouts", "trainer.validation_data_dir=validation")
    arguments = train_arguments(
        material, tmp_path / "run", *folders, "trainer.total_training_steps=2"
    )
    assert run_command(arguments, folder=tmp_path).code == 0
    assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == ["1.jsonl", "2.jsonl"]
    assert len(read_lines(tmp_path / "rollouts/2.jsonl")) == 16
    assert len(read_lines(tmp_path / "validation/0.jsonl")) == 6


def test_the_published_ascend_command_runs_on_the_double_of_its_device(
    material: Material, tmp_path: Path, doubles: Callable[..., Platform]
) -> None:
    write_vendor_package(tmp_path / "path", doubles("ascend").name)
    small = {
        "python3 -m verl.trainer": f"{sys.executable} -m tandem.trainer",
        "$HOME/data/gsm8k": str(material.train.parent),
        "Qwen/Qwen2.5-0.5B-Instruct": str(material.policy),
        "n_gpus_per_node=8": "n_gpus_per_node=1",
        "tensor_model_parallel_size=2": "tensor_model_parallel_size=1",
        "$@": "trainer.total_training_steps=2",
        "train_batch_size=128": "train_batch_size=16",
        "ppo_mini_batch_size=64": "ppo_mini_batch_size=8",
    }
    command = ASCEND_COMMAND
    for printed, changed in small.items():
        assert printed in command
        command = command.replace(printed, changed)
    ended = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "path")},
    )
    assert ended.returncode == 0, ended.stderr
    metrics = metrics_of(tmp_path / "checkpoints/verl_grpo_example_gsm8k/qwen2_7b_function_rm")
    assert list(metrics) == [0, 1, 2]
    assert metrics[2]["perf/throughput"] > 0
    assert metrics[2]["perf/max_memory_allocated_gb"] > 0
    assert [step for step, row in metrics.items() if VALIDATION_METRIC in row] == [0, 2]
