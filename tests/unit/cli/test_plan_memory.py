# SPDX-License-Identifier: Apache-2.0
"""``tandem plan --memory``: the plan for devices of another machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.platforms.names import VARIABLE

SEVEN_BILLION = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
}
OFFLOAD = "actor_rollout_ref.actor.fsdp_config.param_offload"
ENABLE = "actor_rollout_ref.model.enable_gradient_checkpointing"


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Return the words of a plan of 7B with GRPO, on one device, without weights."""
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_BILLION))
    return [
        "plan",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={tmp_path}",
        "data.train_files=nowhere.jsonl",
        "data.val_files=[]",
        "data.train_batch_size=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.rollout.n=8",
        "data.max_prompt_length=128",
        "data.max_response_length=512",
    ]


def planned(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


def test_the_memory_keys_of_such_devices_are_chosen(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned([*words, "--memory", "139.8"], capsys)
    assert plan["run"]["devices"] == "1 of 139.8 GiB"
    assert f"{OFFLOAD}=True" in plan["run"]["memory keys"]
    actor = plan["config"]["actor_rollout_ref"]["actor"]
    assert actor["fsdp_config"]["param_offload"], "the configuration is the run's"
    (pool,) = plan["pools"]
    assert pool["memory_gib"]["total"] < 0.92 * 139.8
    assert pool["memory_gib"]["host"] > 80
    larger = planned([*words, "--memory=1000"], capsys)
    assert OFFLOAD not in larger["run"]["memory keys"]
    assert larger["pools"][0]["memory_gib"]["total"] > pool["memory_gib"]["total"]


def test_what_rests_on_the_host_is_told_after_the_total(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main([*words, "--memory", "139.8"]) == 0
    text = " ".join(re.sub("[\u2502\n]", " ", capsys.readouterr().out).split())
    assert re.search(r"total [0-9.]+, on the host [0-9.]+", text)


def test_a_run_that_fits_as_it_is_has_no_chosen_keys(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned([*words, "--memory=1000", f"{ENABLE}=False"], capsys)
    assert "memory keys" not in plan["run"]


def test_what_does_not_fit_is_refused_with_a_remedy(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "of 40 GiB" in refusal([*words, "--memory", "40"], capsys)
    share = "actor_rollout_ref.rollout.gpu_memory_utilization=0.5"
    assert f"{OFFLOAD}=True" in refusal([*words, "--memory=79", share], capsys)
    theirs = [f"{OFFLOAD}=True", "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True"]
    text = refusal([*words, "--memory=79", *theirs, share], capsys)
    assert "Set " in text and "ppo_max_token_len_per_gpu" in text


@pytest.mark.parametrize(
    "value", ["80GB", "0", "0.5", "-1", "nan", "inf", "1e9", "7_9", "200000", ""]
)
def test_what_is_no_size_is_refused(
    value: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = refusal([*words, f"--memory={value}"], capsys)
    assert text.startswith(f"error: --memory={value!r}: must be a number of GiB from 1 to")


def test_runs_without_such_devices_or_sizes_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for more, text in (
        (["trainer.device=cpu"], "--memory: a run plans the memory of accelerators of one kind"),
        (["actor_rollout_ref.model.path=nobody/nothing"], "--memory needs a folder"),
    ):
        assert text in refusal([*words, "--memory=79", *more], capsys)


def test_models_with_other_names_of_sizes_are_not_planned(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert "other names of sizes" in refusal([*words, "--memory=79"], capsys)


def test_the_environment_names_the_platform(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several devices of a platform without tandem's kernels choose no keys."""
    eight = [*words, "--memory=79", "trainer.n_gpus_per_node=8"]
    assert "memory keys" in planned(eight, capsys)["run"]
    monkeypatch.setenv(VARIABLE, "npu")
    assert "memory keys" not in planned(eight, capsys)["run"]
    monkeypatch.setenv(VARIABLE, "cpu")
    assert "and this one has cpu" in refusal(eight, capsys)


def test_it_excludes_the_times_of_a_run(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for options in (["--memory", "79", "--times", "run"], ["--times=run", "--memory=79"]):
        assert "cannot be given with --times" in refusal([*words, *options], capsys)


def test_fine_tuning_is_planned_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    model = next(word for word in words if "model.path" in word)
    sft = [f"model.path={model.split('=')[1]}", "data.train_files=nowhere.jsonl"]
    plan = planned(["plan", "sft", "--memory=139.8", *sft, "data.val_files=[]"], capsys)
    (pool,) = plan["pools"]
    assert 0 < pool["memory_gib"]["total"] <= 0.92 * 139.8
