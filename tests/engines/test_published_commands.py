# SPDX-License-Identifier: Apache-2.0
"""The published commands in small, with the engines that they name: Ascend's with vLLM, split over
two devices, and dots.rl's with SGLang, which generates with red-moe's family.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tandem.cli.plan import plan_arguments
from tests.chaos.processes import MARK, none_left
from tests.engines.bench import MAX_ERROR
from tests.fakes.commands import Conditions, run_command
from tests.fakes.published_commands import ASCEND_COMMAND, RED_MOE_COMMAND, words_of
from tests.fakes.tiny_experts import write_tiny_red_moe
from tests.fakes.tiny_policy import TINY, write_tiny_policy
from tests.fakes.tiny_run import REWARDS, Material, metrics_of

PYTHON = os.environ.get("TANDEM_SGLANG_PYTHON", "")
TIMEOUT_S = 1800.0
ROLLOUT = "actor_rollout_ref.rollout"
SMALLER_ASCEND = {
    "data.train_batch_size": "4",
    "data.max_prompt_length": "96",
    "data.max_response_length": "12",
    "actor_rollout_ref.actor.optim.lr": "0.01",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "2",
    "trainer.n_gpus_per_node": "2",
    "trainer.device": "cpu",
}
SMALLER_RED_MOE = {
    "data.train_batch_size": "4",
    "actor_rollout_ref.actor.optim.lr": "0.01",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "4",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": "2",
    "actor_rollout_ref.rollout.n": "4",
    "trainer.n_gpus_per_node": "4",
    "trainer.total_epochs": "1",
}
"""Sizes and devices of the commands that are changed."""
REWARD = (f"custom_reward_function.path={REWARDS}", "custom_reward_function.name=graded")
"""Random models solve no problem of GSM8K, so that its reward would train nothing."""


def _smaller(words: Sequence[str], sizes: Mapping[str, str]) -> list[str]:
    names = [word.partition("=")[0] for word in words]
    return [
        f"{name}={sizes[name]}" if name in sizes else word
        for word, name in zip(words, names, strict=True)
    ]


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm: make test-engines")
def test_the_command_of_ascend_trains_with_vllm_over_two_devices(
    material: Material, tmp_path: Path
) -> None:
    """With the variable that it exports. No key that vLLM reads is without effect."""
    folder = tmp_path / "data/gsm8k"
    folder.mkdir(parents=True)
    shutil.copy(material.train, folder / "train.parquet")
    shutil.copy(material.test, folder / "test.parquet")
    policy = write_tiny_policy(tmp_path / "policy", size=replace(TINY, hidden=64, num_kv_heads=2))
    sizes = {**SMALLER_ASCEND, "actor_rollout_ref.model.path": str(policy)}
    words = _smaller(words_of(ASCEND_COMMAND, tmp_path, HOME=str(tmp_path)), sizes)
    words += ["trainer.total_training_steps=2", *REWARD]
    plan = plan_arguments(["--config-name=ppo_trainer", *words]).to_dict()
    assert {key for key in plan["keys_without_effect"] if key.startswith(ROLLOUT)} == set()
    mark = uuid.uuid4().hex
    exported = {"VLLM_ATTENTION_BACKEND": "XFORMERS", MARK: mark}
    ended = run_command(
        ["main_ppo", *words],
        folder=tmp_path,
        conditions=Conditions(environment=exported),
        timeout_s=TIMEOUT_S,
    )
    assert ended.code == 0, ended.stderr
    run = tmp_path / "checkpoints/verl_grpo_example_gsm8k/qwen2_7b_function_rm"
    rows = metrics_of(run)
    for row in (rows[1], rows[2]):
        assert row["training/rollout_logp_diff_max"] <= MAX_ERROR
        assert row["actor/grad_norm"] > 0
    assert rows[2]["rollout/engine/num_decoded_tokens"] > 0
    rollout = json.loads((run / "config.json").read_text())["actor_rollout_ref"]["rollout"]
    assert (rollout["name"], rollout["tensor_model_parallel_size"]) == ("vllm", 2)
    assert none_left(mark)


@pytest.mark.skipif(not PYTHON, reason="needs sglang: make test-engines")
def test_the_command_of_dots_rl_trains_red_moe_with_sglang(
    material: Material, tmp_path: Path
) -> None:
    """Asynchronously, over four processes: experts over two devices that train, the reference and
    SGLang on devices of their own, and staged weights.
    """
    policy = tmp_path / "red-moe"
    policy.mkdir()
    variables = {
        "ROOT_PATH": str(tmp_path),
        "TRAIN_DATA_PATH": str(material.train),
        "TEST_DATA_PATH": str(material.test),
        "MODEL_PATH": str(write_tiny_red_moe(policy)),
        "EXP_NAME": "run_1",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "max_prompt_length": "96",
        "max_response_length": "12",
    }
    words = [
        *_smaller(words_of(RED_MOE_COMMAND, tmp_path, **variables), SMALLER_RED_MOE),
        f"{ROLLOUT}.engine_kwargs.sglang.python={PYTHON}",
        "trainer.device=cpu",
        "trainer.total_training_steps=3",
        *REWARD,
    ]
    mark = uuid.uuid4().hex
    conditions = Conditions(environment={MARK: mark})
    ended = run_command(
        ["main_ppo", *words], folder=tmp_path, conditions=conditions, timeout_s=TIMEOUT_S
    )
    assert ended.code == 0, ended.stderr
    run = tmp_path / "checkpoints/verl_async_rl_redmoe16b/run_1"
    rows = metrics_of(run)
    assert list(rows) == [0, 1, 2, 3]
    assert rows[3]["training/lag/max"] <= 1
    # A row has what was drawn until its step ended. Ahead of training, the last batch may have been
    # drawn before the step of the last row began.
    assert sum(rows[step]["rollout/engine/num_decoded_tokens"] for step in (1, 2, 3)) > 0
    for row in (rows[step] for step in (1, 2, 3)):
        assert row["actor/grad_norm"] > 0
        assert row["actor/experts/max_over_mean"] >= 1
    rollout = json.loads((run / "config.json").read_text())["actor_rollout_ref"]["rollout"]
    assert rollout["name"] == "sglang"
    assert none_left(mark)
