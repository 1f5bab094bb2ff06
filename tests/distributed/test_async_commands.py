# SPDX-License-Identifier: Apache-2.0
"""Asynchronous commands of several processes that only have to run: dots.rl's own in small
(acceptance tests 1 and 3 with it), validation alone (14), a critic and a reward model (24).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.fakes.commands import Conditions, run_command
from tests.fakes.published_commands import RED_MOE_COMMAND, words_of
from tests.fakes.tiny_experts import write_tiny_red_moe
from tests.fakes.tiny_reward_model import write_random_judge
from tests.fakes.tiny_run import Material, metrics_of, read_lines, repeatable, train_arguments

ASYNCHRONOUS = (
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.async_pipeline=True",
    "trainer.generate_ahead_steps=1",
)
SMALLER = {
    "data.train_batch_size": "4",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "4",
    "actor_rollout_ref.rollout.n": "4",
    "trainer.n_gpus_per_node": "4",
    "trainer.total_epochs": "1",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": "2",
}
"""Sizes of dots.rl's command that are changed."""

BESIDES = (
    "trainer.device=cpu",
    "trainer.total_training_steps=3",
)


def test_01_the_red_moe_command_trains_a_small_model_on_the_devices_it_names(
    material: Material, tmp_path: Path
) -> None:
    """Train red-moe's family with experts over two devices, as the name of its file implies (MO20).

    The reference holds its experts whole, as the command says.
    """
    policy = tmp_path / "red-moe"
    policy.mkdir()
    write_tiny_red_moe(policy)
    variables = {
        "ROOT_PATH": str(tmp_path),
        "TRAIN_DATA_PATH": str(material.train),
        "TEST_DATA_PATH": str(material.test),
        "MODEL_PATH": str(policy),
        "EXP_NAME": "run_1",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "max_prompt_length": "96",
        "max_response_length": "12",
    }
    words = words_of(RED_MOE_COMMAND, tmp_path, **variables)
    ended = run_command(["main_ppo", *map(smaller, words), *BESIDES], folder=tmp_path)
    assert ended.code == 0, ended.stderr
    run = tmp_path / "checkpoints/verl_async_rl_redmoe16b/run_1"
    rows = metrics_of(run)
    assert sorted(rows) == [0, 1, 2, 3]
    assert rows[3]["training/lag/max"] <= 1
    places = [tuple(record["tasks"]) for record in json.loads((run / "placement.json").read_text())]
    assert places == [("actor-train",), ("actor-train",), ("ref_logp",), ("generate",)]
    roles = json.loads((run / "config.json").read_text())["actor_rollout_ref"]
    layouts = [roles[role]["fsdp_config"] for role in ("actor", "ref")]
    assert [layout["expert_model_parallel_size"] for layout in layouts] == [2, 1]
    assert all(rows[step]["actor/experts/max_over_mean"] >= 1 for step in (1, 2, 3))


def smaller(word: str) -> str:
    """The word of the command with the value of ``SMALLER``, if its key stands there."""
    key = word.partition("=")[0]
    return f"{key}={SMALLER[key]}" if key in SMALLER else word


def test_03_nobody_holds_a_reference_that_no_kl_asks_for_though_it_has_a_group(
    material: Material, cluster: Conditions, tmp_path: Path
) -> None:
    """Also 14: validation alone trains nothing, is logged and ends well."""
    run = tmp_path / "run"
    keys = (
        *ASYNCHRONOUS,
        "trainer.n_gpus_per_node=3",
        "trainer.separated_node_tasks=[[logp,actor-train],ref_logp,generate]",
        "trainer.separated_node_ratios=[0.34,0.33,0.33]",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.val_only=True",
    )
    arguments = train_arguments(material, run, *keys)
    ended = run_command(arguments, folder=tmp_path, conditions=cluster)
    assert ended.code == 0, ended.stderr
    places = json.loads((run / "placement.json").read_text())
    assert [place["tasks"] for place in places] == [["logp", "actor-train"], ["generate"]]
    rows = metrics_of(run)
    assert list(rows) == [0]
    assert any(name.startswith("val-core/") for name in rows[0])
    assert " step 0  val " in ended.stdout
    assert not list(run.glob("global_step_*"))


def test_verls_fully_asynchronous_trainer_begins_a_share_of_a_batch_ahead(
    material: Material, tmp_path: Path
) -> None:
    """Train with ``fully_async_main``: mini-batches of two prompts, two of them between transfers
    of weights, and a threshold of staleness of half of such a batch.
    """
    run = tmp_path / "run"
    keys = (
        "algorithm.adv_estimator=grpo",
        "trainer.device=cpu",
        "data.train_batch_size=0",
        "data.gen_batch_size=1",
        "data.val_files=[]",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.n_gpus_per_node=1",
        "rollout.n_gpus_per_node=1",
        "rollout.total_rollout_steps=20",
        "async_training.staleness_threshold=0.5",
        "async_training.trigger_parameter_sync_step=2",
        "async_training.partial_rollout=True",
        "trainer.total_training_steps=null",
    )
    arguments = ["fully_async_main", *train_arguments(material, run, *keys)[1:]]
    ended = run_command(arguments, folder=tmp_path)
    assert ended.code == 0, ended.stderr
    assert "are read as data.train_batch_size=4 trainer.total_training_steps=5" in ended.stderr
    places = json.loads((run / "placement.json").read_text())
    assert [place["tasks"] for place in places] == [["actor-train"], ["generate"]]
    rows = metrics_of(run)
    assert list(rows) == [1, 2, 3, 4, 5]
    late = {step: set[int]() for step in rows}
    for record in read_lines(run / "rollouts.jsonl"):
        assert record["weights_version"] >= record["step"] - 2
        if record["weights_version"] < record["step"] - 1:
            late[record["step"]].add(record["sample_id"] // 4)  # the prompt of four samples
    assert all(len(prompts) <= 2 for prompts in late.values())
    assert len(late[2]) == 2  # six prompts are begun before the first step


def test_14_validation_without_a_reward_is_refused(material: Material, tmp_path: Path) -> None:
    strange = tmp_path / "strange.jsonl"
    strange.write_text(
        json.dumps(
            {
                "data_source": "mine/own",
                "prompt": [{"role": "user", "content": "Who speaks?"}],
                "reward_model": {"style": "rule", "ground_truth": "5"},
            }
        )
    )
    keys = (*ASYNCHRONOUS, f"data.val_files={strange}", "~custom_reward_function.path")
    ended = run_command(train_arguments(material, tmp_path / "run", *keys), folder=tmp_path)
    assert ended.code == 2
    (line,) = ended.errors
    assert "mine/own" in line and "custom_reward_function.path" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.deep
def test_24_a_kl_penalty_in_the_reward_trains_three_steps_behind(
    material: Material, tmp_path: Path
) -> None:
    keys = ("algorithm.use_kl_in_reward=True", "trainer.total_training_steps=3")
    run = tmp_path / "run"
    arguments = train_arguments(material, run, *ASYNCHRONOUS, *keys, "data.val_files=[]")
    ended = run_command(arguments, folder=tmp_path)
    assert ended.code == 0, ended.stderr
    rows = metrics_of(run)
    assert list(rows) == [1, 2, 3]
    assert all("actor/reward_kl_penalty" in row for row in rows.values())
    assert {record["step"] for record in read_lines(run / "rollouts.jsonl")} == {1, 2, 3}


def test_24_a_critic_and_kl_in_the_reward_take_asynchronous_steps(
    material: Material, cluster: Conditions, tmp_path: Path
) -> None:
    """The critic on the trainer's devices, two of them, whatever else has devices of its own."""
    run = tmp_path / "run"
    keys = (
        *ASYNCHRONOUS,
        "trainer.n_gpus_per_node=4",
        "trainer.separated_node_tasks=[[actor-train],[logp,ref_logp],generate]",
        "trainer.separated_node_ratios=[0.5,0.25,0.25]",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.kl_coef=0.1",
        "critic.optim.lr=0.01",
        "critic.model.fsdp_config.param_offload=True",
        "critic.model.fsdp_config.ulysses_sequence_parallel_size=2",
        "data.val_files=[]",
        "trainer.total_training_steps=3",
        "trainer.save_freq=3",
    )
    arguments = train_arguments(material, run, *keys)
    ended = run_command(arguments, folder=tmp_path, conditions=cluster)
    assert ended.code == 0, ended.stderr
    rows = metrics_of(run)
    assert list(rows) == [1, 2, 3]
    assert rows[3]["training/lag/max"] <= 1
    assert all(row["critic/grad_norm"] > 0 and row["actor/grad_norm"] > 0 for row in rows.values())
    assert rows[3]["critic/vf_loss"] < rows[1]["critic/vf_loss"]
    assert rows[1]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)
    assert abs(rows[3]["actor/reward_kl_penalty"]) > 1e-5
    folder = tmp_path / "critic"
    export = ["export", str(run), "--critic", "--output", str(folder)]
    assert run_command(export, folder=tmp_path).code == 0
    assert load_file(folder / "model.safetensors")["score.weight"].shape[0] == 1

    again = train_arguments(material, run, *keys, "trainer.total_training_steps=4")
    assert run_command(again, folder=tmp_path, conditions=cluster).code == 0
    assert list(metrics_of(run)) == [1, 2, 3, 4]


@pytest.mark.deep
def test_24_a_reward_model_scores_three_asynchronous_steps(
    material: Material, tmp_path: Path
) -> None:
    """On the trainer's two devices, spread over both; no function is called."""
    judge = write_random_judge(material.policy, tmp_path / "judge", task="Token")
    run = tmp_path / "run"
    keys = (
        *ASYNCHRONOUS,
        "trainer.n_gpus_per_node=3",
        "trainer.separated_node_tasks=[[actor-train,logp,ref_logp],generate]",
        "trainer.separated_node_ratios=[0.67,0.33]",
        "algorithm.use_kl_in_reward=True",
        "reward_model.enable=True",
        f"reward_model.model.path={judge}",
        "reward_model.model.fsdp_config.param_offload=True",
        "reward_model.model.fsdp_config.ulysses_sequence_parallel_size=2",
        "custom_reward_function.name=broken",
        "data.val_files=[]",
        "trainer.total_training_steps=3",
    )
    ended = run_command(train_arguments(material, run, *keys), folder=tmp_path)
    assert ended.code == 0, ended.stderr
    rows = metrics_of(run)
    assert list(rows) == [1, 2, 3]
    assert rows[3]["training/lag/max"] <= 1
    assert all(row["reward/failures"] == 0 and row["timing_s/reward"] > 0 for row in rows.values())
    assert all(row["actor/grad_norm"] > 0 for row in rows.values())
    recorded = {(r["step"], r["sample_id"]): r for r in read_lines(run / "rollouts.jsonl")}
    assert {step for step, _ in recorded} == {1, 2, 3}
    assert len({record["score"] for record in recorded.values()}) == len(recorded)


@pytest.mark.deep
def test_24_scores_of_a_reward_model_do_not_depend_on_the_number_of_devices(
    material: Material, tmp_path: Path
) -> None:
    judge = write_random_judge(material.policy, tmp_path / "judge")
    keys = (
        "trainer.device=cpu",
        "reward_model.enable=True",
        f"reward_model.model.path={judge}",
        "reward_model.forward_max_token_len_per_gpu=108",
        "data.val_files=[]",
        "trainer.total_training_steps=3",
    )
    one, two = (
        train_arguments(material, tmp_path / f"on_{n}", *keys, f"trainer.n_gpus_per_node={n}")
        for n in (1, 2)
    )
    for arguments in (one, two):
        ended = run_command(arguments, folder=tmp_path)
        assert ended.code == 0, ended.stderr
    others = repeatable(metrics_of(tmp_path / "on_2"))
    for step, row in repeatable(metrics_of(tmp_path / "on_1")).items():
        assert row == pytest.approx(others[step], rel=1e-5, abs=1e-5)
        assert row["critic/score/max"] > row["critic/score/min"]
