# SPDX-License-Identifier: Apache-2.0
"""Rules between keys: each error names the override that corrects it, and that one works."""

from __future__ import annotations

import re

import pytest

from tandem.config.check.rules import (
    check_run,
    check_sft,
    require_random_order,
    require_reader_of_critic,
    unbuilt_run,
    unbuilt_sft,
)
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.driver.arguments import load_arguments
from tandem.errors import UserError

MODEL = "actor_rollout_ref.model.path=m"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
LOSS = f"{ACTOR}.policy_loss"
GDPO = ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[right,form]")


def config(*arguments: str) -> RunConfig:
    return load_config(RunConfig, arguments).config


def test_defaults_and_dapo_fit() -> None:
    check_run(config())
    check_run(
        config(
            f"{ROLLOUT}.n=16",
            "algorithm.filter_groups.enable=True",
            "reward_model.reward_manager=dapo",
            "reward_model.overlong_buffer={enable:True,len:100}",
            f"{ACTOR}.clip_ratio_high=0.28",
        )
    )
    assert not list(unbuilt_run(config(MODEL)))
    assert not list(unbuilt_run(config(MODEL, "trainer.nnodes=2", "trainer.n_gpus_per_node=8")))


def test_greedy_samples_may_differ_by_their_environment_and_are_not_drawn_for_validation() -> None:
    greedy = ("algorithm.filter_groups.enable=True", f"{ROLLOUT}.do_sample=False")
    check_run(config(*greedy, "trainer.val_only=True"))
    check_run(config(*greedy, f"{ROLLOUT}.agent.agent_loop_config_path=agents.yaml"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["data.train_batch_size=100", f"{ACTOR}.ppo_mini_batch_size=256"],
            f"{ACTOR}.ppo_mini_batch_size=256: must not exceed data.trai",
        ),
        (
            [
                "algorithm.filter_groups={enable:True,max_num_gen_batches:10}",
                "data.gen_batch_size=1",
            ],
            "data.gen_batch_size=1: algorithm.filter_groups.max_num_gen_batches of these do not f",
        ),
        (
            ["data.train_batch_size=100", f"{ACTOR}.ppo_mini_batch_size=64"],
            f"{ACTOR}.ppo_mini_batch_size=64: must divide data.train_batch_size=100",
        ),
        (
            ["algorithm.adv_estimator=grpo_passk", f"{ROLLOUT}.n=1"],
            f"{ROLLOUT}.n=1: must be at least 2 for algorith",
        ),
        (
            ["algorithm.filter_groups.enable=True", f"{ROLLOUT}.n=1"],
            "for algorithm.filter_groups.enable=True",
        ),
        (
            ["algorithm.filter_groups.enable=True", f"{ROLLOUT}.n=4", f"{ROLLOUT}.do_sample=False"],
            f"{ROLLOUT}.do_sample=False: must be True for algorithm.filter_groups.enable=True",
        ),
        ([f"{ROLLOUT}.val_kwargs.do_sample=True"], "temperature=0.0: must be positive with"),
        (
            [
                f"{ROLLOUT}.do_sample=False",
                f"{ROLLOUT}.temperature=0.7",
                "algorithm.rollout_correction.bypass_mode=True",
            ],
            f"{ROLLOUT}.temperature=0.7: must be 1 with {ROLLOUT}.do_sample=False",
        ),
        ([f"{ACTOR}.clip_ratio_low=1.5"], f"{ACTOR}.clip_ratio_low=1.5: must be less than 1"),
        ([f"{LOSS}.loss_mode=dro"], f"{LOSS}.dro_beta=None: must be set with loss_mode=dro"),
        (["data.max_response_length=20000"], f"{ACTOR}.ppo_max_token_len_per_gpu=16384: must hold"),
        (
            ["data.max_response_length=20000", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"],
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu=16384: must hold one sequence",
        ),
        (
            ["reward_model.reward_manager=dapo", "reward_model.overlong_buffer.enable=True"],
            "overlong_buffer_cfg.len=0: must be at least 1 and at most the longest response, 512",
        ),
        (
            ["algorithm.adv_estimator=gdpo"],
            "algorithm.gdpo_reward_keys=[]: must name numbers of the reward with",
        ),
        (
            [*GDPO, "algorithm.gdpo_reward_weights=[1]"],
            "gdpo_reward_weights=[1.0]: must have a weight for each of gdpo_reward_keys",
        ),
        ([*GDPO, "algorithm.use_kl_in_reward=True"], "use_kl_in_reward=True: must be False with"),
        (
            [
                "algorithm.adv_estimator=optimal_token_baseline",
                "algorithm.rollout_correction.bypass_mode=True",
            ],
            "bypass_mode=True: leaves out the pass over the batch that",
        ),
        (
            [
                "algorithm.use_kl_in_reward=True",
                "algorithm.kl_ctrl.type=adaptive",
                "algorithm.kl_ctrl.horizon=1600",
                f"{ROLLOUT}.n=8",
                "data.train_batch_size=1024",
            ],
            "kl_ctrl.horizon=1600: must be more than a fifth of the 8192 sequences of a step",
        ),
        (["trainer.resume_mode=resume_path"], "trainer.resume_from_path=None: must name a folder"),
        (
            ["trainer.resume_mode=resume_path", "trainer.resume_from_path=checkpoints"],
            "trainer.resume_from_path='checkpoints': must name a folder global_step_N",
        ),
        (
            ["trainer.val_only=True", "data.val_files=[]"],
            "data.val_files=[]: must name a file with trainer.val_only=True",
        ),
        (
            ["trainer.val_only=True", "trainer.val_before_train=False"],
            "must be True with trainer.v",
        ),
    ],
)
def test_keys_that_do_not_fit_are_refused_and_the_remedy_works(
    arguments: list[str], message: str
) -> None:
    problem = first_problem(arguments)
    assert problem is not None and message in problem
    for _ in range(3):
        if problem is not None:
            remedies = re.findall(r"[\w.]+=[\w./]*\w", problem.partition("Set ")[2])
            arguments = [*arguments, remedies[0]]
            problem = first_problem(arguments)
    assert problem is None


@pytest.mark.parametrize("loss_mode", ["cispo", "geo_mean", "dppo_tv", "dppo_kl"])
def test_a_loss_may_have_no_lower_bound(loss_mode: str) -> None:
    """verl's examples of CISPO set ``clip_ratio_low=10``."""
    check_run(config(f"{LOSS}.loss_mode={loss_mode}", f"{ACTOR}.clip_ratio_low=10"))


GEOMETRIC = (
    "rollout_is=sequence",
    "rollout_is_threshold=2.0",
    "rollout_is_batch_normalize=true",
    "rollout_rs=geometric",
    "rollout_rs_threshold=1.01",
    "rollout_rs_threshold_lower=0.99",
    "rollout_token_veto_threshold=1e-4",
)
SELF_NORMALIZED = (
    "rollout_is=sequence",
    "rollout_is_threshold=2.0",
    "rollout_is_batch_normalize=true",
    "rollout_rs=null",
    "rollout_rs_threshold=null",
    "bypass_mode=true",
    "loss_type=reinforce",
)


@pytest.mark.parametrize(
    "arguments",
    [
        [f"algorithm.rollout_correction.{key}" for key in GEOMETRIC],
        [
            "algorithm.adv_estimator=rloo",
            *(f"algorithm.rollout_correction.{key}" for key in SELF_NORMALIZED),
        ],
        [f"{LOSS}.loss_mode=sapo", f"+{LOSS}.tau_pos=1.0", f"+{LOSS}.tau_neg=1.05"],
        [
            "algorithm.adv_estimator=optimal_token_baseline",
            f"{ACTOR}.calculate_sum_pi_squared=True",
        ],
        [
            "algorithm.adv_estimator=gdpo",
            """+algorithm.gdpo_reward_keys=["accuracy_reward", "format_reward"]""",
        ],
    ],
)
def test_the_algorithms_of_verls_scripts_are_accepted(arguments: list[str]) -> None:
    """rollout_correction, dapo/run_dapo_qwen2.5_32b_rollout_corr.sh, sapo, otb and gdpo."""
    check_run(config(*arguments))


def first_problem(arguments: list[str]) -> str | None:
    try:
        check_run(config(*arguments))
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return None


def test_token_limits_matter_only_for_passes_that_are_made() -> None:
    on_policy = [
        "data.max_response_length=20000",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
        f"{ACTOR}.ppo_mini_batch_size=1024",
    ]
    check_run(config(*on_policy))
    with pytest.raises(UserError, match="actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"):
        check_run(config(*on_policy, f"{ACTOR}.use_kl_loss=True"))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("reward_model={enable:True,model:{lora_rank:8}}", "reward_model.model.lora_rank=8: adapt"),
        ("critic={enable:True,model:{lora_rank:8}}", "critic.model.lora_rank=8: adapters of this"),
        ("critic={enable:True,model:{lora_adapter_path:a}}", "critic.model.lora_adapter_path='a'"),
    ],
)
def test_what_is_not_built_passes_the_plan_and_stops_training(argument: str, message: str) -> None:
    checked = config(MODEL, argument)
    check_run(checked)
    assert any(message in str(error) for error in unbuilt_run(checked))
    assert any("not built yet" in str(error) for error in unbuilt_run(checked))


def test_training_needs_a_model() -> None:
    (error,) = unbuilt_run(config())
    assert str(error).startswith("actor_rollout_ref.model.path='': must name a model")


def test_sft_has_its_own_rules() -> None:
    def sft(*arguments: str) -> SftConfig:
        return load_config(SftConfig, arguments).config

    check_sft(sft())
    assert not list(unbuilt_sft(sft("model.partial_pretrain=m")))
    with pytest.raises(UserError, match="data.max_token_len_per_gpu=8: must hold one row of"):
        check_sft(sft("data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=8"))
    (error,) = unbuilt_sft(sft())
    assert str(error).startswith("model.path='': must name a model")


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt"])
def test_what_rendering_decides_itself_is_refused_as_a_template_setting(name: str) -> None:
    override = f"data.apply_chat_template_kwargs={{{name}:False,enable_thinking:False}}"
    with pytest.raises(UserError, match=rf"apply_chat_template_kwargs\.{name}=False.*Remove it"):
        check_run(config(override))
    with pytest.raises(UserError, match=name):
        check_sft(load_config(SftConfig, [override]).config)
    check_run(config("data.apply_chat_template_kwargs={enable_thinking:False}"))


@pytest.mark.parametrize(
    ("arguments", "is_refused"),
    [
        (["critic.optim.lr=1e-5"], True),
        (["critic.model.use_remove_padding=True"], True),
        (["critic.optim.lr=1e-5", "algorithm.adv_estimator=gae"], False),
        (["critic.optim.lr=1e-5", "algorithm.adv_estimator=grpo"], False),
        (["critic.optim.lr=1e-5", "--config-name=ppo_trainer"], False),
        (["critic.enable=False"], False),
        (["critic.enable=True"], False),
        ([], False),
    ],
)
def test_a_critic_that_no_named_estimator_reads_is_refused(
    arguments: list[str], is_refused: bool
) -> None:
    loaded = load_config(RunConfig, arguments)
    if not is_refused:
        require_reader_of_critic(loaded.config, loaded.set_keys)
        return
    message = f"^{arguments[0].partition('=')[0]}: sets up a critic, .*Set .*adv_estimator=gae"
    with pytest.raises(UserError, match=message):
        require_reader_of_critic(loaded.config, loaded.set_keys)


def test_a_class_of_random_order_is_refused_without_a_random_order() -> None:
    named = "data.sampler.class_name=RandomCurriculumSampler"
    message = (
        r"^data\.sampler\.class_name='RandomCurriculumSampler': draws rows in random order, and "
        r"data\.shuffle=False .*Set data\.shuffle=True"
    )
    with pytest.raises(UserError, match=message):
        load_arguments(RunConfig, [named, "data.shuffle=False"])
    allowed = [named], [named, "data.shuffle=True"], ["data.sampler.class_name=null"]
    for arguments in (*allowed, [named, "data.sampler.class_name=null", "data.shuffle=False"]):
        loaded = load_config(RunConfig, arguments)
        require_random_order(loaded.config, loaded.unread)
