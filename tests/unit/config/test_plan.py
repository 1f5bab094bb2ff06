# SPDX-License-Identifier: Apache-2.0
"""What the plan says."""

from __future__ import annotations

import json

import pytest

from tandem.config.parse.overrides import load_config
from tandem.config.plan.plan import Plan, describe_run, make_plan
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError
from tests.fakes.configured import TINY

SMALL = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4")


def plan(*arguments: str, rows: int | None = 20) -> Plan:
    return make_plan(load_config(RunConfig, [*SMALL, *arguments]), num_train_rows=rows)


def test_the_dictionary_holds_at_least_what_is_promised_and_is_json() -> None:
    content = json.loads(json.dumps(plan().to_dict()))
    assert content["total_training_steps"] == 2 * 30
    assert content["steps_per_epoch"] == 2
    assert content["sequences_per_step"] == 8 * 8
    assert content["optimizer_steps_per_step"] == 2
    assert content["validation_steps"] == [0]
    assert content["checkpoint_steps"] == [content["total_training_steps"]]
    assert content["pools"] == [
        {
            "tasks": ["actor-train", "logp", "generate"],
            "unused_tasks": ["ref_logp"],
            "devices": 1,
            "platform": "auto",
            "nodes": [{"node": 0, "first": 0, "last": 0}],
            "data_parallel": {"actor-train": 1, "logp": 1, "generate": 1},
            "memory_gib": None,
        }
    ]
    assert content["keys_without_effect"] == {}
    assert content["unknown_keys"] == []
    assert content["config"]["data"]["train_batch_size"] == 8


def test_unknown_rows_leave_null_fields_and_the_rest_stands() -> None:
    content = plan(rows=None).to_dict()
    assert content["total_training_steps"] is None
    assert content["steps_per_epoch"] is None
    assert content["validation_steps"] is None
    assert content["optimizer_steps_per_step"] == 2


def test_ppo_epochs_multiply_optimizer_steps() -> None:
    content = plan("actor_rollout_ref.actor.ppo_epochs=3").to_dict()
    assert content["optimizer_steps_per_step"] == 3 * 2


def test_max_samples_count() -> None:
    assert plan("data.train_max_samples=9").schedule.steps_per_epoch == 1
    assert plan("data.train_max_samples=-1").schedule.steps_per_epoch == 2


def test_the_plan_says_that_a_loss_needs_a_pass_over_each_mini_batch() -> None:
    def algorithm(*arguments: str) -> str:
        keys = ["actor_rollout_ref.rollout.n=4", *arguments]
        return describe_run(load_config(RunConfig, keys).config)["algorithm"]

    loss, correction = "actor_rollout_ref.actor.policy_loss", "algorithm.rollout_correction"
    assert algorithm() == "grpo, policy loss vanilla, 4 samples of a prompt"
    surveyed = "policy loss kl_cov, each mini-batch scored first, 4 samples"
    assert surveyed in algorithm(f"{loss}.loss_mode=kl_cov")
    reinforce = (f"{correction}.bypass_mode=True", f"{correction}.loss_type=reinforce")
    assert "policy loss REINFORCE, 4 samples" in algorithm(*reinforce)
    normalised = (f"{correction}.rollout_is=token", f"{correction}.rollout_is_batch_normalize=True")
    assert "REINFORCE, each mini-batch scored" in algorithm(*reinforce, *normalised)


@pytest.mark.parametrize(
    ("arguments", "warning"),
    [
        (["data.filter_overlong_prompts=True"], "steps are counted before overlong prompts"),
        (["trainer.device=npu"], "trainer.device=npu: the plan does not check whether"),
        (
            ["pools.actor-train.platform=npu", "pools.generate.platform=npu"],
            "pools.actor-train.platform=npu: the plan does not check whether",
        ),
        (["actor_rollout_ref.rollout.val_kwargs.n=4"], "all samples are the same"),
        (
            ["actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.do_sample=False"],
            "all samples of a prompt are the same",
        ),
        (["actor_rollout_ref.rollout.n=1"], "grpo has no baseline"),
        (["trainer.critic_warmup=5"], "there is no critic to warm up"),
        (["actor_rollout_ref.hybrid_engine=False", "trainer.nnodes=2"], "half generate"),
        (
            [
                "trainer.separated_node_tasks=[[logp,actor-train],generate]",
                "trainer.separated_node_ratios=[0.5,0.25]",
                "trainer.n_gpus_per_node=8",
            ],
            "2 of 8 devices stay idle",
        ),
        (
            [
                "trainer.separated_node_tasks=[[logp,actor-train],ref_logp,generate]",
                "trainer.separated_node_ratios=[0.5,0.25,0.25]",
                "trainer.n_gpus_per_node=8",
            ],
            "pool ref_logp: its 2 device(s) stay idle, as no KL term needs a reference",
        ),
        (
            [
                "trainer.separated_node_tasks=[logp,actor-train,generate]",
                "trainer.separated_node_ratios=[0.25,0.5,0.25]",
                "trainer.n_gpus_per_node=4",
                "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            ],
            "pool logp: its 1 device(s) stay idle, as the update is strictly on-policy",
        ),
        (["+new.key=1"], "new.key: unknown, has no effect"),
        (["trainer.max_restarts=2"], "max_restarts=2: a restart begins with the first step"),
    ],
)
def test_what_deserves_a_look_is_a_warning(arguments: list[str], warning: str) -> None:
    calm = ("actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.n=4")
    found = plan(*calm, *arguments).warnings
    assert any(warning in line for line in found)
    assert not plan(*calm).warnings
    assert not plan(*calm, "trainer.device=cpu").warnings


@pytest.mark.parametrize(
    ("tasks", "ratios", "devices"),
    [
        ("[logp,ref_logp,actor-train,generate]", "[0.25,0.25,0.25,0.25]", [4, 4, 4, 4]),
        ("[[logp,actor-train],ref_logp,generate]", "[0.5,0.25,0.25]", [8, 4, 4]),
        ("[[logp,actor-train,ref_logp],generate]", "[0.5,0.5]", [8, 8]),
    ],
)
def test_01_the_examples_of_dots_rl_at_16_devices(
    tasks: str, ratios: str, devices: list[int]
) -> None:
    """Every task has its own group, logp included; pools follow each other over both nodes."""
    found = plan(
        f"+trainer.sperated_node_tasks={tasks}",
        f"+trainer.sperated_node_ratios={ratios}",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=8",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.rollout.n=8",
        "data.train_batch_size=16",
    )
    pools = json.loads(json.dumps(found.to_dict()))["pools"]
    assert [pool["devices"] for pool in pools] == devices
    named = sorted(task for pool in pools for task in pool["tasks"])
    assert named == ["actor-train", "generate", "logp", "ref_logp"]
    assert all(pool["unused_tasks"] == [] for pool in pools)
    taken = [
        8 * part["node"] + index
        for pool in pools
        for part in pool["nodes"]
        for index in range(part["first"], part["last"] + 1)
    ]
    assert taken == list(range(16))


def test_supervised_runs_have_a_plan_too() -> None:
    arguments = ["data.train_batch_size=8", "trainer.n_gpus_per_node=2", "model.path=m"]
    found = make_plan(load_config(SftConfig, arguments), num_train_rows=20, sizes=TINY)
    content = json.loads(json.dumps(found.to_dict()))
    assert content["steps_per_epoch"] == 2
    assert (content["sequences_per_step"], content["optimizer_steps_per_step"]) == (8, 1)
    (pool,) = content["pools"]
    assert pool["tasks"] == ["actor-train"]
    assert pool["data_parallel"] == {"actor-train": 2}
    assert pool["memory_gib"]["total"] > 0
    assert content["warnings"] == []
    with pytest.raises(UserError, match="must give each of 2 data-parallel ranks a row"):
        make_plan(load_config(SftConfig, [*arguments, "data.train_batch_size=1"]))


def test_keys_that_do_not_fit_are_errors_of_the_plan_too() -> None:
    with pytest.raises(UserError, match="must divide"):
        plan("actor_rollout_ref.actor.ppo_mini_batch_size=3")
    with pytest.raises(UserError, match="must not exceed the number of training rows"):
        plan(rows=7)
