# SPDX-License-Identifier: Apache-2.0
"""The reward model's keys: what they follow, what switches them off, where it is, what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.config.check.rules import check_run, unbuilt_run
from tandem.config.derived.microbatches import limits
from tandem.config.derived.pools import REWARD_MODEL, place_run
from tandem.config.derived.sizes import ModelSizes
from tandem.config.parse.overrides import load_config
from tandem.config.plan.memory import MemoryPlan, plan_memory
from tandem.config.plan.memory_remedy import require_memory
from tandem.config.plan.plan import make_plan
from tandem.config.schema.run import RunConfig
from tandem.errors import UserError
from tests.fakes.configured import SIZES, config, reasons

POLICY = "actor_rollout_ref.model.path=m"
JUDGE = ("reward_model.enable=True", "reward_model.model.path=j", POLICY)
LAYOUT = "reward_model.model.fsdp_config"


def test_what_is_not_set_follows_critic_and_policy() -> None:
    followed = (POLICY, "critic.ppo_max_token_len_per_gpu=9000", "critic.use_dynamic_bsz=True")
    found = config(*followed)
    assert found.reward_model.use_dynamic_bsz
    assert limits(found, REWARD_MODEL).max_tokens == 9000
    assert found.reward_model.model.input_tokenizer == "m"
    own = (
        "reward_model.forward_max_token_len_per_gpu=7",
        "reward_model.model.input_tokenizer=null",
    )
    found = config(*followed, *own)
    assert limits(found, REWARD_MODEL).max_tokens == 7
    assert found.reward_model.model.input_tokenizer is None
    counted = config("reward_model.micro_batch_size_per_gpu=2")
    assert limits(counted, REWARD_MODEL).max_tokens is None


def test_other_spellings_of_verl_are_known() -> None:
    keys = ("reward.reward_model.enable=True", "reward_model.ulysses_sequence_parallel_size=2")
    found = config(*keys).reward_model
    assert found.enable and found.model.fsdp_config.ulysses_sequence_parallel_size == 2


def test_without_a_reward_model_none_of_its_keys_has_an_effect() -> None:
    keys = ("reward_model.model.path=j", "reward_model.micro_batch_size_per_gpu=4")
    assert set(reasons(*keys).values()) == {"it is read only with reward_model.enable=True"}
    assert reasons(*keys, "reward_model.enable=True") == {}


@pytest.mark.parametrize(
    ("key", "needs"),
    [
        ("reward_model.micro_batch_size_per_gpu=4", "reward_model.use_dynamic_bsz=False"),
        ("reward_model.model.custom_chat_template=t", "reward_model.model.input_tokenizer=m"),
        ("custom_reward_function.path=f.py", "data.val_files=[v.parquet]"),
        ("reward.timeout_s=3", "data.val_files=[v.parquet]"),
        (f"{LAYOUT}.fsdp_size=1", "trainer.n_gpus_per_node=2"),
    ],
)
def test_keys_that_others_switch_on(key: str, needs: str) -> None:
    fixed = (
        *JUDGE,
        "reward_model.use_dynamic_bsz=True",
        "reward_model.model.input_tokenizer=null",
        "data.val_files=[]",
    )
    assert list(reasons(*fixed, key)) == [key.partition("=")[0]]
    assert key.partition("=")[0] not in reasons(*fixed, key, needs)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "algorithm.filter_groups.enable=True",
            r"algorithm\.filter_groups\.enable=True: must be False with reward_model\.enable=True",
        ),
        (
            "reward_model.model.input_tokenizer=j",
            r"reward_model\.model\.input_tokenizer='j': must be actor_rollout_ref\.model\.path='m'",
        ),
        (
            "reward_model.forward_max_token_len_per_gpu=50",
            r"reward_model\.forward_max_token_len_per_gpu=50: must hold one sequence of ",
        ),
        (
            f"{LAYOUT}.tensor_model_parallel_size=3",
            rf"{LAYOUT}\.tensor_model_parallel_size=3: must divide",
        ),
    ],
)
def test_what_cannot_be_is_refused(override: str, message: str) -> None:
    keys = (*JUDGE, "actor_rollout_ref.rollout.n=2")
    check_run(config(*keys))
    with pytest.raises(UserError, match=f"^{message}.* Set "):
        check_run(config(*keys, override))


def test_training_needs_its_folder() -> None:
    (error,) = unbuilt_run(config(POLICY, "reward_model.enable=True"))
    assert str(error).startswith("reward_model.model.path='': must name a model")


def test_it_is_where_the_policy_trains() -> None:
    split = (
        *JUDGE,
        "trainer.n_gpus_per_node=8",
        "trainer.separated_node_tasks=[[actor-train,logp],generate]",
        "trainer.separated_node_ratios=[0.5,0.5]",
        f"{LAYOUT}.ulysses_sequence_parallel_size=2",
    )
    layouts = place_run(config(*split)).layouts
    assert (layouts[REWARD_MODEL].num_ranks, layouts[REWARD_MODEL].data_parallel) == (4, 2)
    assert REWARD_MODEL not in place_run(config()).layouts
    plan = make_plan(load_config(RunConfig, split))
    pools = plan.to_dict()["pools"]
    assert [pool["data_parallel"].get(REWARD_MODEL) for pool in pools] == [2, None]
    assert not list(unbuilt_run(config(POLICY, *split)))


def memory(*arguments: str, judge: ModelSizes = SIZES) -> MemoryPlan:
    (plan,) = plan_memory(config(*arguments), SIZES, auxiliary={REWARD_MODEL: judge}).values()
    return plan


def test_its_weights_are_counted_as_a_reference_is() -> None:
    # A value head is one row, where the policy's is a second matrix of the embedding's size.
    parameters = SIZES.num_parameters - SIZES.vocabulary * SIZES.hidden
    assert memory(*JUDGE).reward_model == 2 * parameters
    assert memory().reward_model == 0
    sharded = memory(*JUDGE, "trainer.n_gpus_per_node=4")
    assert sharded.reward_model == 2 * (parameters // 4)
    assert memory(*JUDGE, f"{LAYOUT}.param_offload=True").reward_model == 0
    large = replace(SIZES, num_layers=48)
    assert memory(*JUDGE, judge=large).reward_model == 2 * (
        large.num_parameters - SIZES.vocabulary * SIZES.hidden
    )


def test_what_makes_room_is_set_for_it_too() -> None:
    keys = (
        *JUDGE,
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
        "reward_model.forward_max_token_len_per_gpu=1000000",
    )
    available = 40 << 30
    with pytest.raises(UserError, match="memory: this run needs about") as refusal:
        require_memory(config(*keys), SIZES, available_bytes=available)
    override = str(refusal.value).rpartition("Set ")[2].removesuffix(".").split()
    limit = "reward_model.forward_max_token_len_per_gpu="
    assert any(word.startswith(limit) for word in override)
    require_memory(config(*keys, *override), SIZES, available_bytes=available)
