# SPDX-License-Identifier: Apache-2.0
"""What the plan says."""

from __future__ import annotations

import json

import pytest

from tandem.config.overrides import load_config
from tandem.config.plan import Plan, make_plan
from tandem.config.run import RunConfig
from tandem.errors import UserError

SMALL = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4")


def plan(*arguments: str, rows: int | None = 20) -> Plan:
    return make_plan(load_config(RunConfig, [*SMALL, *arguments]), num_train_rows=rows)


def test_the_dictionary_holds_at_least_what_is_promised_and_is_json() -> None:
    content = json.loads(json.dumps(plan().to_dict()))
    assert content["total_training_steps"] == 2 * 30
    assert content["steps_per_epoch"] == 2
    assert content["sequences_per_step"] == 8
    assert content["optimizer_steps_per_step"] == 2
    assert content["validation_steps"] == [0]
    assert content["pools"] == [
        {"tasks": ["actor-train", "logp", "ref_logp", "generate"], "devices": 1}
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


def test_max_samples_count() -> None:
    assert plan("data.train_max_samples=9").steps_per_epoch == 1
    assert plan("data.train_max_samples=-1").steps_per_epoch == 2


@pytest.mark.parametrize(
    ("arguments", "warning"),
    [
        (["data.filter_overlong_prompts=True"], "steps are counted before overlong prompts"),
        (["trainer.device=npu"], "trainer.device=npu: not looked for by the plan"),
        (["actor_rollout_ref.rollout.val_kwargs.n=4"], "all samples are the same"),
        (["actor_rollout_ref.rollout.n=1"], "grpo has no baseline"),
        (["trainer.critic_warmup=5"], "there is no critic to warm up"),
        (["trainer.nnodes=2"], "train would refuse: trainer.nnodes=2: only one device"),
        (["actor_rollout_ref.hybrid_engine=False", "trainer.nnodes=2"], "half generate"),
        (["actor_rollout_ref.hybrid_engine=False"], "gets none of 1 devices"),
        (
            [
                "trainer.separated_node_tasks=[actor-train,generate]",
                "trainer.separated_node_ratios=[0.5,0.25]",
                "trainer.n_gpus_per_node=8",
            ],
            "2 of 8 devices stay idle",
        ),
        (["+new.key=1"], "new.key: unknown, has no effect"),
    ],
)
def test_what_deserves_a_look_is_a_warning(arguments: list[str], warning: str) -> None:
    calm = ("actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.n=4")
    found = plan(*calm, *arguments).warnings
    assert any(warning in line for line in found)
    assert not plan(*calm).warnings


def test_keys_that_do_not_fit_are_errors_of_the_plan_too() -> None:
    with pytest.raises(UserError, match="must divide"):
        plan("actor_rollout_ref.actor.ppo_mini_batch_size=3")
    with pytest.raises(UserError, match="must not exceed the number of training rows"):
        plan(rows=7)
