# SPDX-License-Identifier: Apache-2.0
"""The critic's keys: what they follow, what switches them off, what they cost."""

from __future__ import annotations

import pytest

from tandem.config.check.rules import check_run, unbuilt_run
from tandem.config.derived.microbatches import CRITIC_VALUES, limits
from tandem.config.derived.pools import CRITIC, place_run
from tandem.config.derived.sizes import ModelSizes
from tandem.config.parse.overrides import load_config
from tandem.config.plan.memory import MemoryPlan, plan_memory
from tandem.config.plan.memory_remedy import require_memory
from tandem.config.plan.plan import make_plan
from tandem.config.schema.run import RunConfig
from tandem.errors import UserError
from tests.fakes.configured import SIZES, config, reasons

ACTOR = "actor_rollout_ref.actor"
GAE = "algorithm.adv_estimator=gae"
ONE_SAMPLE = "actor_rollout_ref.rollout.n=1"


def test_a_run_has_a_critic_if_its_advantages_need_one_or_it_is_asked_for() -> None:
    assert not config().uses_critic
    assert config(GAE).uses_critic
    assert config("critic.enable=True").uses_critic
    assert not config(GAE, "critic.enable=False").uses_critic
    with pytest.raises(UserError, match="critic.enable=False: must be True or null with"):
        check_run(config(GAE, "critic.enable=False"))


def test_what_is_not_set_follows_the_actor() -> None:
    followed = (
        "actor_rollout_ref.model.path=m",
        f"{ACTOR}.ppo_mini_batch_size=32",
        f"{ACTOR}.ppo_epochs=3",
        f"{ACTOR}.shuffle=True",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum",
        "trainer.seed=9",
    )
    critic = config(*followed).critic
    assert (critic.model.path, critic.ppo_mini_batch_size, critic.ppo_epochs) == ("m", 32, 3)
    assert critic.shuffle and critic.data_loader_seed == 9
    assert critic.loss_agg_mode == "seq-mean-token-sum"
    assert (critic.optim.lr, critic.ppo_max_token_len_per_gpu) == (1e-5, 32768)
    own = config(*followed, "critic.ppo_epochs=1", "critic.model.path=c").critic
    assert (own.model.path, own.ppo_mini_batch_size, own.ppo_epochs) == ("c", 32, 1)


def test_values_are_packed_as_updates_are_unless_told_otherwise() -> None:
    def tokens(*arguments: str) -> list[int | None]:
        run = config(*arguments)
        return [limits(run, role).max_tokens for role in (CRITIC, CRITIC_VALUES)]

    assert tokens("critic.ppo_max_token_len_per_gpu=50000") == [50000, 50000]
    counted = "critic.ppo_micro_batch_size_per_gpu=4"
    assert tokens(counted) == [None, None]
    assert limits(config(counted), CRITIC_VALUES).max_sequences == 4
    assert tokens("critic.forward_max_token_len_per_gpu=60000") == [32768, 60000]


def test_other_spellings_of_verl_are_known() -> None:
    critic = config(
        "critic.grad_clip=0.5",
        "critic.ulysses_sequence_parallel_size=2",
        "critic.fsdp.param_offload=True",
        "critic.optim.warmup_style=cosine",
    ).critic
    assert critic.optim.clip_grad == 0.5
    assert critic.model.fsdp_config.ulysses_sequence_parallel_size == 2
    assert critic.model.fsdp_config.param_offload
    assert critic.optim.lr_scheduler_type == "cosine"


def test_without_a_critic_none_of_its_keys_has_an_effect() -> None:
    keys = ("critic.optim.lr=1e-4", "critic.model.path=m", "critic.ppo_epochs=2")
    assert len(reasons(*keys)) == 3
    assert all("there is no critic" in reason for reason in reasons(*keys).values())
    assert reasons(*keys, GAE) == {}


@pytest.mark.parametrize(
    ("key", "needs"),
    [
        ("critic.data_loader_seed=3", "critic.shuffle=True"),
        ("critic.loss_scale_factor=10", "critic.loss_agg_mode=seq-mean-token-sum-norm"),
        ("critic.optim.muon_lr=0.1", "critic.optim.optimizer=Muon"),
        ("critic.model.fsdp_config.fsdp_size=1", "trainer.n_gpus_per_node=2"),
        ("critic.ppo_max_token_len_per_gpu=9000", "critic.ppo_micro_batch_size_per_gpu=null"),
    ],
)
def test_keys_that_others_switch_on(key: str, needs: str) -> None:
    fixed = (GAE, "critic.ppo_micro_batch_size_per_gpu=2")
    assert list(reasons(*fixed, key)) == [key.partition("=")[0]]
    assert key.partition("=")[0] not in reasons(*fixed, key, needs)


def test_the_critic_is_where_the_policy_trains() -> None:
    split = (
        GAE,
        "trainer.n_gpus_per_node=8",
        "trainer.separated_node_tasks=[[actor-train,logp],generate]",
        "trainer.separated_node_ratios=[0.5,0.5]",
        "critic.ulysses_sequence_parallel_size=2",
    )
    layouts = place_run(config(*split)).layouts
    assert (layouts[CRITIC].num_ranks, layouts[CRITIC].data_parallel) == (4, 2)
    assert CRITIC not in place_run(config()).layouts
    plan = make_plan(load_config(RunConfig, split))
    pools = plan.to_dict()["pools"]
    assert [pool["data_parallel"].get(CRITIC) for pool in pools] == [2, None]
    assert not list(unbuilt_run(config("actor_rollout_ref.model.path=m", *split)))
    with pytest.raises(UserError, match="critic.model.fsdp_config.tensor_model_parallel_size=3"):
        check_run(config(*split, "critic.model.fsdp_config.tensor_model_parallel_size=3"))


def test_small_mini_batches_of_the_critic_are_refused_on_many_devices() -> None:
    few = ("trainer.n_gpus_per_node=8", "critic.ppo_mini_batch_size=4", ONE_SAMPLE, GAE)
    with pytest.raises(UserError, match=r"critic\.ppo_mini_batch_size=4: times .* Set critic\."):
        check_run(config(*few))


def memory(*arguments: str, critic: ModelSizes | None = None) -> MemoryPlan:
    auxiliary = {} if critic is None else {CRITIC: critic}
    (plan,) = plan_memory(config(*arguments), SIZES, auxiliary=auxiliary).values()
    return plan


def test_its_weights_and_moments_are_counted_and_the_larger_gradients() -> None:
    kept = ("critic.ppo_max_token_len_per_gpu=16384", f"{ACTOR}.use_dynamic_bsz=True")
    alone, both = memory(), memory(GAE, *kept)
    # A value head is one row, where the policy's is a second matrix of the embedding's size.
    parameters = SIZES.num_parameters - SIZES.vocabulary * SIZES.hidden
    # fp32 weights, bf16 ones to compute with, two fp32 moments.
    assert both.critic == (4 + 2 + 8) * parameters
    assert (both.gradients, both.activations) == (alone.gradients, alone.activations)
    assert both.total > alone.total and alone.critic == 0
    sharded = memory(GAE, "trainer.n_gpus_per_node=4")
    assert sharded.critic == (4 + 8) * (parameters // 4)


def test_what_makes_room_is_set_for_both_models() -> None:
    keeps = "model.enable_gradient_checkpointing=False"
    arguments = (
        GAE,
        f"actor_rollout_ref.{keeps}",
        f"critic.{keeps}",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
    )
    available = 60 << 30
    with pytest.raises(UserError, match="memory: this run needs about") as refusal:
        require_memory(config(*arguments), SIZES, available_bytes=available)
    override = str(refusal.value).rpartition("Set ")[2].removesuffix(".").split()
    assert any(word.startswith("critic.ppo_max_token_len_per_gpu=") for word in override)
    require_memory(config(*arguments, *override), SIZES, available_bytes=available)
