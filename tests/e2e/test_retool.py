# SPDX-License-Identifier: Apache-2.0
"""ReTool's recipes train in a tiny form: fine-tuning, and then reinforcement with jailed Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.retool.retool import ANSWER_FORMAT
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.driver import sft, train
from tandem.driver.launch import local_site
from tandem.driver.run import run_prepared
from tandem.quickstart import materials as module
from tandem.quickstart.materials import Materials, prepare
from tandem.quickstart.python_code import PYTHON
from tests.fakes.tiny_run import metrics_of

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples/retool"
ANSWER = "<code>\nprint(6*7)\n</code>\n<interpreter>\n42\n</interpreter>\n<answer>#### 42</answer>"
PROBLEM = "How much is 6 times 7?"
ONE_PROCESS = ("trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.logger=[]")


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NUM_DEMONSTRATIONS", "NUM_TRAIN", "NUM_TEST", "NUM_UNSEEN"):
            patch.setattr(module, name, 16)
        patch.setattr(module, "NUM_TOKENIZER_TEXTS", 200)
        return prepare(tmp_path_factory.mktemp("retool"), seed=0, task=PYTHON)


@pytest.fixture(scope="module")
def tuned(materials: Materials, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that the recipe of fine-tuning has trained on one conversation."""
    folder = tmp_path_factory.mktemp("tuned")
    conversations = folder / "conversations.jsonl"
    asked = f"*user question:*\n{PROBLEM}{ANSWER_FORMAT}"
    row = {"messages": [{"content": asked}, {"content": ANSWER}]}
    conversations.write_text((json.dumps(row) + "\n") * 8)
    keys = (
        f"model.path={materials.model}",
        f"data.train_files={conversations}",
        "data.val_files=null",
        f"data.custom_cls.path={RECIPES / 'retool.py'}",
        "data.max_length=256",
        "data.train_batch_size=8",
        "data.micro_batch_size_per_gpu=8",
        "engine.ulysses_sequence_parallel_size=1",
        f"trainer.default_local_dir={folder / 'sft'}",
        # Fine-tuned until the model calls the tool by itself.
        "trainer.total_training_steps=60",
        "trainer.total_epochs=60",
        "trainer.save_freq=-1",
        "optim.lr=0.01",
        *ONE_PROCESS,
    )
    tuning = load_config(SftConfig, [str(RECIPES / "sft_qwen2_5_7b.yaml"), *keys]).config
    assert run_prepared(local_site(tuning), sft.prepare(tuning)).exit_code == 0
    return folder / "sft/global_step_60/actor"


@pytest.mark.parametrize("tool", ["ours", "verl's"])
def test_the_recipe_of_reinforcement_trains_with_calls(
    tuned: Path, tmp_path: Path, tool: str
) -> None:
    problems = tmp_path / "aime_2025" / "train.jsonl"
    problems.parent.mkdir()
    problems.write_text(json.dumps({"problem": PROBLEM, "answer": "42"}) + "\n")
    tools = RECIPES / "code_interpreter.yaml"
    if tool == "verl's":
        tools = tmp_path / "sandbox_fusion_tool_config.yaml"
        written = (RECIPES / "code_interpreter.yaml").read_text()
        name = "recipe.retool.retool.CustomSandboxFusionTool"
        written = written.replace("tandem.agents.code_tool.CodeInterpreter", name)
        tools.write_text(written.replace("[numpy, sympy]", "[]"))
    run = tmp_path / "dapo"
    keys = (
        f"actor_rollout_ref.model.path={tuned}",
        f"data.train_files=[{problems}]",
        f"data.val_files=[{problems}]",
        f"data.custom_cls.path={RECIPES / 'retool.py'}",
        f"custom_reward_function.path={RECIPES / 'retool.py'}",
        "data.train_batch_size=1",
        "data.max_prompt_length=96",
        "data.max_response_length=96",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tools}",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        f"trainer.default_local_dir={run}",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        *ONE_PROCESS,
    )
    config = load_config(RunConfig, [str(RECIPES / "dapo_qwen2_5_7b.yaml"), *keys]).config
    assert run_prepared(local_site(config), train.prepare(config)).exit_code == 0
    step = metrics_of(run)[1]
    assert step["agent/calls/ok"] >= 1 and step["agent/failed"] == 0
