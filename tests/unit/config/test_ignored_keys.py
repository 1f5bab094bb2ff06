# SPDX-License-Identifier: Apache-2.0
"""No key is silently without effect."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from pydantic import BaseModel

from tandem.config.check.ignored_keys import ignored_keys as reasons_of
from tandem.config.check.read_conditions import RUN_EXCLUSIONS, SFT_EXCLUSIONS
from tandem.config.parse.keys import (
    Condition,
    Key,
    find_key,
    in_override_grammar,
    is_section,
    keys_of,
)
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"


def reasons(*arguments: str) -> Mapping[str, str]:
    return reasons_of(load_config(RunConfig, arguments))


def test_keys_that_nobody_set_are_not_named() -> None:
    assert reasons() == {}
    assert reasons("data.train_batch_size=512", f"{ACTOR}.optim.lr=1e-5") == {}


def test_every_key_that_nothing_reads_is_named_when_it_is_set() -> None:
    for name, key in keys_of(RunConfig).items():
        if key.ignored and key.default not in ({}, ""):
            found = reasons(f"{name}={in_override_grammar(key.default)}")
            assert found == {name: key.ignored}


def test_keys_are_named_as_they_were_spelt() -> None:
    found = reasons("+actor_rollout_ref.async_pipeline=True")
    assert list(found) == ["actor_rollout_ref.async_pipeline"]


PROPERTIES = {
    "calls_reward_functions": (
        "reward_model.enable=False",
        "reward_model.enable=True data.val_files=[]",
    ),
    "importance_level": ("rollout_is=token", "rollout_is=null"),
    "needs_old_log_probs": (
        f"{ACTOR}.ppo_mini_batch_size=512",
        f"{ACTOR}.ppo_mini_batch_size=1024",
    ),
    "has_environment": (
        "actor_rollout_ref.rollout.multi_turn.function_tool_path=tools.py",
        "actor_rollout_ref.rollout.multi_turn.function_tool_path=null",
    ),
    "needs_reference": (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.use_kl_loss=False"),
    "trainer.saves": ("trainer.save_freq=1", "trainer.save_freq=0"),
    "trainer.max_lag": (
        "trainer.async_pipeline=True trainer.generate_ahead_steps=1",
        "trainer.async_pipeline=False",
    ),
    "uses_critic": ("critic.enable=True", "critic.enable=False"),
    "actor_rollout_ref.rollout.val_kwargs.samples": (
        "actor_rollout_ref.rollout.val_kwargs.temperature=1",
        "actor_rollout_ref.rollout.val_kwargs.temperature=0",
    ),
}
"""Property in a condition -> overrides with which the condition holds, and does not."""


def overrides_of(schema: type[BaseModel], condition: Condition, *, holds: bool) -> list[str]:
    """Overrides with which a condition holds, or does not."""
    if condition.name in PROPERTIES:
        words = PROPERTIES[condition.name][not holds].split()
        return [
            w if "." in w.partition("=")[0] else f"algorithm.rollout_correction.{w}" for w in words
        ]
    return [f"{condition.name}={value_of(schema, condition, holds=holds)}"]


def value_of(schema: type[BaseModel], condition: Condition, *, holds: bool) -> str:
    """A value of the condition's key with which it holds, or does not."""
    key, value = keys_of(schema)[condition.name], condition.values[0]
    if condition.operator in (">", "<="):
        return "1" if holds == (condition.operator == ">") else "0"
    if holds == (condition.operator == "="):
        return value
    others = (
        *key.choices,
        *({"True": ["False"], "False": ["True"], "[]": ["[x]"], "null": ["1"]}.get(value, ["x"])),
    )
    return next(other for other in others if other not in condition.values)


CASES = [
    pytest.param(schema, key, condition, id=f"{schema.__name__}-{key.name}-{condition.name}")
    for schema in (RunConfig, SftConfig)
    for key in keys_of(schema).values()
    if not key.ignored
    for condition in key.read_if
]


@pytest.mark.parametrize(("schema", "key", "condition"), CASES)
def test_every_read_if_switches_its_key_on_and_off(
    schema: type[RunConfig] | type[SftConfig], key: Key, condition: Condition
) -> None:
    def reason(*, holds: bool) -> str | None:
        others = [other for other in key.read_if if other.name != condition.name]
        arguments = [text for other in others for text in overrides_of(schema, other, holds=True)]
        arguments += overrides_of(schema, condition, holds=holds)
        default = in_override_grammar(key.default)
        name = f"{key.name}.a" if key.is_open else key.name
        own = f"{name}={1 if key.is_open else default or 'x'}"
        loaded = load_config(schema, [own, *arguments])
        assert condition.holds(loaded.config) == holds
        return reasons_of(loaded).get(name)

    assert reason(holds=False) == condition.reason
    assert reason(holds=True) not in [other.reason for other in key.read_if]


def test_a_condition_without_a_reason_says_which_value_the_key_is_read_with() -> None:
    found = reasons("algorithm.kl_ctrl.horizon=5", "algorithm.use_kl_in_reward=True")
    assert found == {
        "algorithm.kl_ctrl.horizon": "it is read only with algorithm.kl_ctrl.type=adaptive"
    }
    found = reasons("algorithm.kl_ctrl.horizon=5")
    assert found == {
        "algorithm.kl_ctrl.horizon": "it is read only with algorithm.use_kl_in_reward=True"
    }


@pytest.mark.parametrize(
    ("argument", "reason", "switch"),
    [
        (
            "algorithm.norm_adv_by_std_in_grpo=False",
            "only algorithm.adv_estimator=grpo|grpo_vectorized|grpo_passk|gdpo reads it",
            "algorithm.adv_estimator=grpo",
        ),
        (
            "algorithm.gamma=0.9",
            "only algorithm.adv_estimator=gae|reinforce_plus_plus reads it",
            "algorithm.adv_estimator=reinforce_plus_plus",
        ),
        ("algorithm.lam=0.9", "only algorithm.adv_estimator=gae", "algorithm.adv_estimator=gae"),
        (
            f"{ACTOR}.clip_ratio_c=4",
            "policy_loss.loss_mode=vanilla|dppo_tv|dppo_kl reads it",
            f"{ACTOR}.policy_loss.loss_mode=vanilla",
        ),
        (
            f"{ACTOR}.policy_loss.tau_neg=1.1",
            "policy_loss.loss_mode=sapo reads it",
            f"{ACTOR}.policy_loss.loss_mode=sapo",
        ),
        (
            f"{ACTOR}.policy_loss.dro_beta=0.5",
            "policy_loss.loss_mode=dro reads it",
            f"{ACTOR}.policy_loss.loss_mode=dro",
        ),
        (
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=5",
            "use_dynamic_bsz=True",
            f"{ACTOR}.use_dynamic_bsz=False",
        ),
    ],
)
def test_what_switches_a_key_off_is_the_reason_until_it_is_switched_on(
    argument: str, reason: str, switch: str
) -> None:
    key, switched = argument.partition("=")[0], switch.partition("=")[0]
    off = {
        f"{ACTOR}.use_dynamic_bsz": "True",
        f"{ACTOR}.policy_loss.loss_mode": "gspo",
        "algorithm.adv_estimator": "rloo",
    }
    assert reason in reasons(argument, f"{switched}={off[switched]}")[key]
    assert key not in reasons(argument, switch)


def test_gamma_is_not_read_by_remax() -> None:
    assert "algorithm.gamma" in reasons("algorithm.gamma=0.9", "algorithm.adv_estimator=remax")


def test_the_actors_token_limit_has_no_effect_if_no_pass_is_packed_by_tokens() -> None:
    key = f"{ACTOR}.ppo_max_token_len_per_gpu"
    by_count = (f"{key}=9000", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2")
    assert reasons(*by_count) == {}, "old log-probs follow it, and are packed by tokens"
    on_policy = f"{ACTOR}.ppo_mini_batch_size=1024"
    assert "bounded by the number of sequences" in reasons(*by_count, on_policy)[key]
    assert key not in reasons(*by_count, on_policy, f"{ACTOR}.use_dynamic_bsz=True")
    assert key not in reasons(*by_count, on_policy, f"{ACTOR}.use_kl_loss=True")


def test_the_runs_seed_has_no_effect_once_every_other_is_set() -> None:
    seeds = ("data.seed=2", f"{ROLLOUT}.seed=2")
    assert reasons("trainer.seed=5", seeds[0]) == {}
    assert list(reasons("trainer.seed=5", *seeds)) == ["trainer.seed"]
    assert reasons("trainer.seed=5", *seeds, f"{ACTOR}.shuffle=True") == {}
    loaded = load_config(SftConfig, ["trainer.seed=5", "data.seed=2"])
    assert list(reasons_of(loaded)) == ["trainer.seed"]


def test_a_chat_template_of_the_data_replaces_the_models() -> None:
    both = ["data.chat_template=a", "model.custom_chat_template=b"]
    assert list(reasons_of(load_config(SftConfig, both))) == ["model.custom_chat_template"]
    assert reasons_of(load_config(SftConfig, both[1:])) == {}
    assert load_config(SftConfig, both).config.chat_template == "a"
    assert load_config(SftConfig, both[1:]).config.chat_template == "b"


def test_clip_ratio_loses_its_effect_only_to_both_sides() -> None:
    one = (f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_low=0.2")
    assert reasons(*one) == {}
    assert list(reasons(*one, f"{ACTOR}.clip_ratio_high=0.2")) == [f"{ACTOR}.clip_ratio"]


def test_more_keys_that_others_switch_off() -> None:
    dynamic = ("algorithm.filter_groups.enable=True", "data.gen_batch_size=9")
    assert list(reasons(*dynamic)) == ["data.gen_batch_size"]
    assert reasons(*dynamic, "algorithm.filter_groups.max_num_gen_batches=2") == {}

    assert list(reasons(f"{ACTOR}.strategy=fsdp2")) == [f"{ACTOR}.strategy"]
    assert reasons(f"{ACTOR}.strategy=fsdp") == {}

    greedy = (f"{ROLLOUT}.seed=3", f"{ROLLOUT}.do_sample=False")
    sampled = (f"{ROLLOUT}.val_kwargs.do_sample=True", f"{ROLLOUT}.val_kwargs.temperature=1")
    assert list(reasons(*greedy)) == [f"{ROLLOUT}.seed"]
    assert reasons(*greedy, *sampled) == {}

    trained = ("trainer.save_freq=3", f"{ACTOR}.optim.lr=1e-5", "trainer.total_epochs=2")
    assert reasons(*trained) == {}
    assert len(reasons(*trained, "trainer.val_only=True")) == len(trained)


def test_sft_names_keys_of_reinforcement_learning() -> None:
    loaded = load_config(SftConfig, ["trainer.critic_warmup=3", "data.max_token_len_per_gpu=4096"])
    found = reasons_of(loaded)
    assert found["trainer.critic_warmup"] == "only tandem train reads it"
    assert "bounded by the number of sequences" in found["data.max_token_len_per_gpu"]


def test_conditions_speak_of_keys_that_exist() -> None:
    for schema, exclusions in (
        (RunConfig, RUN_EXCLUSIONS),
        (SftConfig, SFT_EXCLUSIONS),
    ):
        names = [name for exclusion in exclusions for name in exclusion.keys]
        assert not [n for n in names if find_key(schema, n) is None and not is_section(schema, n)]


def test_the_aggregation_of_sequence_losses_is_their_own_unless_other_terms_follow_it() -> None:
    gspo = (f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=token-mean")
    assert list(reasons(*gspo)) == [f"{ACTOR}.loss_agg_mode"]
    assert reasons(*gspo, f"{ACTOR}.entropy_coeff=0.01") == {}


def test_the_aggregation_of_the_actor_has_an_effect_on_a_critic_that_follows_it() -> None:
    mode = f"{ACTOR}.loss_agg_mode"
    gspo = (f"{ACTOR}.policy_loss.loss_mode=gspo", f"{mode}=token-sum")
    critic = "algorithm.adv_estimator=gae"
    assert reasons(*gspo, critic) == {}
    assert list(reasons(*gspo, critic, "critic.loss_agg_mode=token-mean")) == [mode]


@pytest.mark.parametrize(
    ("key", "switch"),
    [
        ("data_loader_seed=7", "shuffle=True"),
        ("loss_scale_factor=7", "loss_agg_mode=seq-mean-token-sum-norm"),
    ],
)
def test_a_key_of_the_actor_has_an_effect_on_a_critic_that_follows_it(
    key: str, switch: str
) -> None:
    name, gae = f"{ACTOR}.{key.partition('=')[0]}", "algorithm.adv_estimator=gae"
    own = f"critic.{key.replace('7', '8')}"
    assert reasons(f"{ACTOR}.{key}") == {name: f"it is read only with {ACTOR}.{switch}"}
    assert reasons(f"{ACTOR}.{key}", f"{ACTOR}.{switch}") == {}
    assert reasons(f"{ACTOR}.{key}", gae, f"critic.{switch}") == {}
    assert list(reasons(f"{ACTOR}.{key}", gae, f"critic.{switch}", own)) == [name]


def test_the_aggregation_has_an_effect_on_the_loss_that_reinforce_puts_in_place() -> None:
    correction = "algorithm.rollout_correction"
    reinforce = (f"{correction}.bypass_mode=True", f"{correction}.loss_type=reinforce")
    mode = f"{ACTOR}.loss_agg_mode"
    gspo = (f"{ACTOR}.policy_loss.loss_mode=gspo", f"{mode}=token-sum")
    assert mode not in reasons(*gspo, *reinforce)


def test_the_length_of_a_schedule_without_slope_has_no_effect() -> None:
    length = f"{ACTOR}.optim.total_training_steps=9"
    assert list(reasons(length)) == [f"{ACTOR}.optim.total_training_steps"]
    assert reasons(length, f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1") == {}
    assert reasons(length, f"{ACTOR}.optim.lr_scheduler_type=cosine") == {}


LAYOUT = f"{ACTOR}.fsdp_config"
KL = f"{ACTOR}.use_kl_loss=True"


@pytest.mark.parametrize(
    "key",
    [
        f"{LAYOUT}.fsdp_size=1",
        f"{LAYOUT}.reshard_after_forward=False",
        f"{LAYOUT}.forward_prefetch=True",
        f"{LAYOUT}.offload_policy=True",
        f"{REF}.fsdp_config.forward_prefetch=True",
        "actor_rollout_ref.nccl_timeout=60",
        f"{ROLLOUT}.param_update_preduce_bucket_size_mb=64",
        f"{ROLLOUT}.param_update_consume_bucket_size_mb=64",
        "ray_kwargs.ray_init.num_cpus=4",
        "trainer.ray_wait_register_center_timeout=60",
        "trainer.balance_batch=False",
    ],
)
def test_what_only_several_devices_read_has_no_effect_on_one(key: str) -> None:
    name = key.partition("=")[0]
    assert list(reasons(key, KL)) == [name]
    assert reasons(key, KL, "trainer.n_gpus_per_node=2") == {}


@pytest.mark.parametrize(
    "key",
    [
        "engine.fsdp_size=1",
        "nccl_timeout=60",
        "ray_kwargs.ray_init.num_cpus=4",
        "data.balance_dp_token=False",
    ],
)
def test_of_supervised_runs_too(key: str) -> None:
    def found(*arguments: str) -> Mapping[str, str]:
        return reasons_of(load_config(SftConfig, arguments))

    assert list(found(key)) == [key.partition("=")[0]]
    assert found(key, "trainer.nnodes=2") == {}
    resting = found("engine.param_offload=True", "trainer.nnodes=2")
    assert "engine.offload_policy" in resting["engine.param_offload"]
    groups = "trainer.separated_node_tasks=[[actor-train,generate]]"
    assert "tandem train" in found(groups)["trainer.separated_node_tasks"]


def test_weights_of_one_device_rest_unless_they_are_needed_there() -> None:
    """On an accelerator the trained ones rest between steps, those that generate never."""
    own, ref = f"{LAYOUT}.param_offload", f"{REF}.fsdp_config.param_offload"
    both = (f"{own}=True", f"{ref}=True", KL)
    assert reasons(*both) == {}
    assert list(reasons(*both, f"{LAYOUT}.dtype=float32")) == [own]
    assert set(reasons(*both, "trainer.device=cpu")) == {own, ref}
    assert reasons(*both, "trainer.device=cpu", "trainer.n_gpus_per_node=2") == {}
    halves = [f"engine.{key}=bfloat16" for key in ("dtype", "model_dtype")]
    for arguments, expected in (((), []), (halves, ["engine.param_offload"])):
        found = reasons_of(load_config(SftConfig, ["engine.param_offload=True", *arguments]))
        assert list(found) == expected


def test_shards_and_balance_need_a_pool_with_several_ranks() -> None:
    """Two pools of one device each transfer weights, and neither shards nor deals."""
    halves = ("actor_rollout_ref.hybrid_engine=False", "trainer.n_gpus_per_node=2")
    keys = (
        f"{LAYOUT}.fsdp_size=1",
        "trainer.balance_batch=False",
        f"{LAYOUT}.param_offload=True",
        f"{ROLLOUT}.param_update_preduce_bucket_size_mb=64",
    )
    assert set(reasons(*halves, *keys)) == {f"{LAYOUT}.fsdp_size", "trainer.balance_batch"}
    together = ("trainer.n_gpus_per_node=2", f"{LAYOUT}.tensor_model_parallel_size=2")
    assert list(reasons(*together, "trainer.balance_batch=False")) == ["trainer.balance_batch"]


def test_what_always_rests_on_the_host_need_not_be_moved_there() -> None:
    two = ("trainer.n_gpus_per_node=2", f"{LAYOUT}.optimizer_offload=True")
    assert reasons(*two) == {}
    found = reasons(*two, f"{LAYOUT}.offload_policy=True")
    assert list(found) == [f"{LAYOUT}.optimizer_offload"]
    alone = reasons(f"{LAYOUT}.optimizer_offload=True", f"{LAYOUT}.offload_policy=True")
    assert list(alone) == [f"{LAYOUT}.offload_policy"]


def test_named_groups_decide_against_a_hybrid_engine() -> None:
    groups = (
        "trainer.separated_node_tasks=[[actor-train,logp],generate]",
        "trainer.separated_node_ratios=[0.5,0.5]",
        "trainer.n_gpus_per_node=2",
    )
    hybrid = "actor_rollout_ref.hybrid_engine"
    assert list(reasons(*groups, f"{hybrid}=True")) == [hybrid]
    assert reasons(*groups, f"{hybrid}=False") == {}
    together = (groups[2], "trainer.separated_node_tasks=[[actor-train,logp,generate]]")
    ratios = "trainer.separated_node_ratios=[1.0]"
    assert list(reasons(*together, ratios, f"{hybrid}=False")) == [hybrid]
    ahead = ("trainer.async_pipeline=True", "trainer.generate_ahead_steps=1")
    assert hybrid not in reasons(*together, ratios, f"{hybrid}=False", *ahead)


def test_a_device_that_no_pool_has_is_named() -> None:
    halves = ("actor_rollout_ref.hybrid_engine=False", "trainer.n_gpus_per_node=2")
    trains, generates = "pools.actor-train.platform=mlu", "pools.generate.platform=mlu"
    found = reasons(*halves, "trainer.device=cpu", trains, generates)
    assert found == {"trainer.device": "pools.*.platform names the platform of every pool"}
    assert reasons(*halves, "trainer.device=cpu", generates) == {}
    assert reasons(*halves, "trainer.device=mlu", trains, generates) == {}
    assert reasons("trainer.device=mlu", "pools.generate.platform=mlu") == {}


def test_the_reference_is_laid_out_as_the_actor_unless_it_is_told_otherwise() -> None:
    def layouts(*arguments: str) -> tuple[int, bool]:
        ref = load_config(RunConfig, arguments).config.actor_rollout_ref.ref.fsdp_config
        return ref.tensor_model_parallel_size, ref.param_offload

    actor = (f"{LAYOUT}.tensor_model_parallel_size=2", f"{LAYOUT}.param_offload=True")
    assert layouts() == (1, False)
    assert layouts(*actor) == (2, True)
    assert layouts(*actor, f"{REF}.fsdp_config.param_offload=False") == (2, False)
    assert layouts(f"{REF}.fsdp_config.tensor_model_parallel_size=4") == (4, False)
    assert "no optimizer" in reasons(f"{REF}.fsdp_config.optimizer_offload=True", KL).popitem()[1]


@pytest.mark.parametrize(
    "argument",
    [
        "data.sampler.class_path=mine.py",
        "data.video_key=clips",
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class=pkg.Manager",
        "algorithm.use_pf_ppo=True",
        "actor_rollout_ref.model.external_lib=mine",
        "actor_rollout_ref.model.tokenizer_path=other",
        "actor_rollout_ref.model.override_config.rope_theta=64",
        "actor_rollout_ref.model.override_config.attention_dropout=0.1",
        "actor_rollout_ref.actor.optim.override_optimizer_config.eps=0.1",
        "actor_rollout_ref.rollout.skip_rollout=True",
        "reward_model.sandbox_fusion.url=http://somewhere",
    ],
)
def test_a_key_that_would_change_what_is_trained_is_refused(argument: str) -> None:
    with pytest.raises(UserError, match="is not built") as caught:
        load_config(RunConfig, [argument])
    assert caught.value.key == argument.split("=", maxsplit=1)[0]


@pytest.mark.parametrize(
    "argument",
    [
        "data.video_key=videos",
        "data.sampler.class_path=null",
        "algorithm.use_pf_ppo=False",
        "+actor_rollout_ref.model.override_config.attention_dropout=0.",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.model.use_shm=True",
        "reward_model.sandbox_fusion.max_concurrent=8",
    ],
)
def test_an_ignored_key_that_changes_nothing_is_only_told(argument: str) -> None:
    assert list(reasons(argument)) == [argument.split("=", maxsplit=1)[0].lstrip("+")]
