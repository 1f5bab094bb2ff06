# SPDX-License-Identifier: Apache-2.0
"""Where the modes of updating weights have an effect, and what they take of a device's memory."""

from __future__ import annotations

import pytest

from tandem.config.check.ignored_keys import ignored_keys
from tandem.config.parse.overrides import load_config
from tandem.config.plan.memory import plan_memory
from tandem.config.schema.run import RunConfig
from tests.unit.config.test_memory import config, sizes

ROLLOUT = "actor_rollout_ref.rollout"
DUAL, ASYNC = f"{ROLLOUT}.enable_dual_buffer", f"{ROLLOUT}.enable_param_async"
REST = f"{ROLLOUT}.free_cache_engine"
FOUR = "trainer.n_gpus_per_node=4"
SPLIT = (FOUR, "actor_rollout_ref.hybrid_engine=False")
APART = (
    FOUR,
    "trainer.separated_node_tasks=[actor-train,logp,generate]",
    "trainer.separated_node_ratios=[0.25,0.25,0.5]",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
)


def without_effect(*arguments: str) -> set[str]:
    return set(ignored_keys(load_config(RunConfig, arguments)))


def test_weights_are_updated_beside_those_in_use_where_others_generate_than_train() -> None:
    keys = {DUAL, ASYNC}
    arguments = [f"{key}=True" for key in keys]
    assert without_effect(*arguments, *SPLIT) == set()
    assert without_effect(*arguments, FOUR) == keys
    assert without_effect(*arguments) == keys


def test_a_rollout_rests_where_several_devices_train_and_generate_in_turns() -> None:
    assert without_effect(f"{REST}=True", FOUR) == set()
    assert without_effect(f"{REST}=True", *SPLIT) == {REST}
    assert without_effect(f"{REST}=True") == {REST}


@pytest.mark.parametrize(
    ("dual", "staged", "copies"),
    [(False, False, 1), (True, False, 2), (False, True, 1), (True, True, 1)],
)
def test_a_second_copy_on_the_device_is_counted_where_weights_arrive(
    dual: bool, staged: bool, copies: int
) -> None:
    weights = 2 * sizes().num_parameters
    plans = plan_memory(config(*APART, f"{DUAL}={dual}", f"{ASYNC}={staged}"), sizes())
    assert plans["generate"].rollout == copies * weights
    assert plans["logp"].weights == copies * weights
    once = plan_memory(config(*APART), sizes())
    assert plans["actor-train"] == once["actor-train"]
    assert plans["generate"].cache == once["generate"].cache


def test_a_rollout_that_rests_takes_only_what_training_does_not() -> None:
    (resting,) = plan_memory(config(FOUR, f"{REST}=True"), sizes()).values()
    (staying,) = plan_memory(config(FOUR), sizes()).values()
    assert staying.rollout == 2 * sizes().num_parameters
    assert resting.rollout == resting.cache == 0
    assert resting.activations == staying.activations

    many = ("actor_rollout_ref.rollout.n=512", "actor_rollout_ref.rollout.max_num_seqs=65536")
    (resting,) = plan_memory(config(FOUR, *many, f"{REST}=True"), sizes()).values()
    (staying,) = plan_memory(config(FOUR, *many), sizes()).values()
    training = staying.gradients + staying.gathered + staying.activations + staying.logits
    assert resting.rollout == 0
    assert resting.cache == staying.rollout + staying.cache - training > 0
