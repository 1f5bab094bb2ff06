# SPDX-License-Identifier: Apache-2.0
"""ReTool's rows, its reward, and verl's scripts of it in the plan (M8)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.retool import retool
from tandem.agents.code_tool import CODE_TOOL, take_over
from tandem.agents.tool_files import read_tool_file
from tandem.cli.plan import plan_arguments, plan_sft_arguments
from tandem.errors import UserError

FOLDER = Path(retool.__file__).parent
QUESTION = "Solve it with code.\n*user question:*\n<answer>How much is 2 + 3?</answer>"
ANSWER = (
    "First I add.\n<code>\n```python\nprint(2 + 3)\n```\n</code>\n"
    "<interpreter>\n5\n</interpreter>\nDone.\n<answer>\\boxed{5}</answer>"
)
# The arguments of recipe/retool/run_qwen2_7b_dapo.sh as its shell expands them.
DAPO = """
algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0
data.train_files=['/d/dataset/BytedTsinghua-SIA/DAPO-Math-17k']
data.val_files=['/d/dataset/yentinglin/aime_2025','/d/dataset/Maxwell-Jia/AIME_2024']
data.return_raw_chat=True data.train_batch_size=64 data.max_prompt_length=2048
data.max_response_length=16384 data.filter_overlong_prompts=True data.truncation='error'
data.custom_cls.path=recipe/retool/retool.py data.custom_cls.name=CustomRLHFDataset
custom_reward_function.path=recipe/retool/retool.py custom_reward_function.name=compute_score
actor_rollout_ref.model.path=/d/checkpoint/multiturn-sft-qwen-2.5-7b-instruct/global_step_372
actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.0
actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_mini_batch_size=16
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=18432
actor_rollout_ref.actor.ulysses_sequence_parallel_size=4
actor_rollout_ref.actor.fsdp_config.param_offload=True
actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=73728 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.tensor_model_parallel_size=4
actor_rollout_ref.rollout.multi_turn.enable=True
actor_rollout_ref.rollout.multi_turn.max_user_turns=16
actor_rollout_ref.rollout.multi_turn.max_assistant_turns=16
actor_rollout_ref.rollout.multi_turn.tool_config_path=recipe/retool/sandbox_fusion_tool_config.yaml
actor_rollout_ref.rollout.multi_turn.format=hermes
actor_rollout_ref.rollout.gpu_memory_utilization=0.9 actor_rollout_ref.rollout.n=16
actor_rollout_ref.rollout.val_kwargs.top_p=0.6 actor_rollout_ref.rollout.val_kwargs.temperature=1.0
actor_rollout_ref.rollout.val_kwargs.n=30 trainer.logger=['console','wandb']
trainer.project_name=retool trainer.experiment_name=qwen2.5-7b_dapo trainer.n_gpus_per_node=8
trainer.val_before_train=True trainer.log_val_generations=20 trainer.nnodes=1 trainer.save_freq=20
trainer.default_local_dir=/d/checkpoint/qwen2.5-7b_dapo trainer.test_freq=10 trainer.total_epochs=1
"""
# The arguments of recipe/retool/run_qwen2_7b_sft.sh after its module.
SFT = """
data.train_files=/d/dataset/wuxibin/ReTool-SFT/data/train-00000-of-00001.parquet
data.val_files=/d/dataset/wuxibin/ReTool-SFT/data/train-00000-of-00001.parquet
data.max_length=16384 data.train_batch_size=32 data.multiturn.enable=true
data.multiturn.messages_key=messages data.multiturn.tools_key=tools data.micro_batch_size_per_gpu=4
model.partial_pretrain=/d/model/Qwen2.5-7B-Instruct model.strategy=fsdp
trainer.default_local_dir=/d/checkpoint/sft trainer.project_name=retool
trainer.experiment_name=multiturn-sft-qwen-2.5-7b-instruct trainer.logger=["console","wandb"]
trainer.total_epochs=6 trainer.save_freq=62 ulysses_sequence_parallel_size=4
use_remove_padding=true trainer.n_gpus_per_node=8
"""


def resolved(plan: Any) -> dict[str, Any]:
    return plan.to_dict()["config"]


def test_m8_the_script_of_reinforcement_is_planned_and_the_recipe_means_the_same() -> None:
    script = resolved(plan_arguments(DAPO.split()))
    recipe = resolved(plan_arguments([str(FOLDER / "dapo_qwen2_5_7b.yaml")]))
    turns = script["actor_rollout_ref"]["rollout"]["multi_turn"]
    assert turns["tool_config_path"] == "recipe/retool/sandbox_fusion_tool_config.yaml"
    same = {
        "data": ("train_batch_size", "max_prompt_length", "max_response_length"),
        "algorithm": ("adv_estimator", "use_kl_in_reward"),
    }
    for section, names in same.items():
        for name in names:
            assert script[section][name] == recipe[section][name], name
    ours = recipe["actor_rollout_ref"]
    for name, value in script["actor_rollout_ref"]["actor"].items():
        assert ours["actor"][name] == value, name
    del turns["tool_config_path"], ours["rollout"]["multi_turn"]["tool_config_path"]
    assert ours["rollout"]["multi_turn"] == turns
    greedy = script["actor_rollout_ref"]["rollout"]["val_kwargs"]
    assert ours["rollout"]["val_kwargs"] == {**greedy, "do_sample": True}


def test_m8_the_script_of_fine_tuning_is_planned_and_the_recipe_means_the_same() -> None:
    script = resolved(plan_sft_arguments(SFT.split()))
    recipe = resolved(plan_sft_arguments([str(FOLDER / "sft_qwen2_5_7b.yaml")]))
    for name in ("max_length", "train_batch_size", "micro_batch_size_per_gpu", "multiturn"):
        assert script["data"][name] == recipe["data"][name], name
    assert script["engine"] == recipe["engine"] and script["optim"] == recipe["optim"]


def test_the_tool_of_the_recipe_is_the_interpreter_with_the_schema_of_its_rows() -> None:
    (spec,) = read_tool_file(str(FOLDER / "code_interpreter.yaml")).classes
    assert take_over(spec).class_name == CODE_TOOL
    assert [spec.schema] == retool.TOOLS


def test_a_conversation_becomes_calls_and_results(tmp_path: Path) -> None:
    row = {"messages": [{"content": QUESTION}, {"content": ANSWER}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (read,) = retool.Conversations([str(tmp_path / "rows.jsonl")], None)
    call = {"name": "code_interpreter", "arguments": {"code": "print(2 + 3)"}}
    assert read["messages"] == [
        {"role": "user", "content": "How much is 2 + 3?"},
        {
            "role": "assistant",
            "content": "First I add.",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "Done.\n\\boxed{5}"},
    ]


@pytest.mark.parametrize(("question", "answer"), [("How much?", ANSWER), (QUESTION, "no answer")])
def test_a_conversation_of_another_form_is_refused(question: str, answer: str) -> None:
    with pytest.raises(UserError, match="data.train_files=3: the row has no"):
        retool.split_conversation(question, answer, row=3)


@pytest.mark.parametrize(
    ("row", "source", "truth"),
    [
        ({"Problem": "p", "Answer": 204}, "aime_2024", "204"),
        ({"problem": "p", "answer": "70"}, "aime_2024", "70"),
        (
            {
                "prompt": [{"role": "user", "content": "p"}],
                "data_source": "math_dapo",
                "reward_model": {"ground_truth": "34"},
            },
            "math_dapo",
            "34",
        ),
    ],
)
def test_problems_of_each_data_set(row: dict[str, Any], source: str, truth: str) -> None:
    read = retool.read_problem(row, name="aime_2024", index=2)
    assert read["data_source"] == source and read["agent_name"] == "tool_agent"
    assert read["reward_model"]["ground_truth"] == truth
    assert read["prompt"][0]["content"].startswith("p\nThe answer format must be: \\boxed{")


@pytest.mark.parametrize(
    ("answer", "num_turns", "score"),
    [("\\boxed{5}", 2, 1.0), ("\\boxed{6}", 2, -1.0), ("none", 6, -0.8), ("none", 40, -0.6)],
)
def test_calls_make_a_wrong_answer_less_bad(answer: str, num_turns: int, score: float) -> None:
    scored = retool.compute_score("math_dapo", answer, "5", {"num_turns": num_turns})
    assert scored["score"] == pytest.approx(score)
