# SPDX-License-Identifier: Apache-2.0
"""Configurations as verl resolves them: each key in two places, nulls for what is not given, and
values that its other engine reads.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.config.check.ignored_keys import ignored_keys
from tandem.config.parse.overrides import LoadedConfig, load_config
from tandem.config.schema.run import RunConfig
from tandem.errors import UserError

ROLES, ALGORITHM = "actor_rollout_ref", "algorithm"
ACTOR, ROLLOUT, MODEL = f"{ROLES}.actor", f"{ROLES}.rollout", f"{ROLES}.model"
OPTIMIZER = f"{ACTOR}.optim.override_optimizer_config"
RESOLVED = """
actor_rollout_ref:
  model:
    path: models/tiny
    lora_rank: 0
    lora_alpha: 16
    target_modules: all-linear
    lora: {rank: 0, alpha: 32, target_modules: [linear_qkv, linear_proj, linear_fc1, linear_fc2],
           exclude_modules: []}
  actor:
    grad_clip: 0.5
    optim: {warmup_style: null, lr_scheduler_type: cosine, min_lr_ratio: null,
            lr_warmup_steps: null, clip_grad: "${actor_rollout_ref.actor.grad_clip}"}
    ulysses_sequence_parallel_size: 2
  ref:
    ulysses_sequence_parallel_size: ${actor_rollout_ref.actor.ulysses_sequence_parallel_size}
algorithm: {filter_groups: {enable: false, metric: null}}
critic: {model: {tokenizer_path: models/tiny}}
custom_reward_function: {path: null, name: null}
reward:
  custom_reward_function: {path: null, name: score_it}
  num_workers: 8
  reward_manager: {source: register, name: dapo, module: {path: null, name: custom_reward_manager}}
  reward_model: {enable: false, rollout: {name: vllm}}
reward_model:
  enable: null
  num_workers: null
  reward_manager: null
  model: {path: null}
  rollout: {name: null}
  overlong_buffer: {enable: true, len: 4, penalty_factor: 1.0}
  reward_kwargs: {overlong_buffer_cfg: "${reward_model.overlong_buffer}"}
"""


def loaded(*arguments: str) -> LoadedConfig[RunConfig]:
    """The configuration of arguments."""
    return load_config(RunConfig, arguments)


def test_a_resolved_configuration_is_read_as_verl_reads_it(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").write_text(RESOLVED)
    config = loaded(f"--config-path={tmp_path}", "--config-name=resolved").config
    roles, actor = config.actor_rollout_ref, config.actor_rollout_ref.actor
    assert (roles.model.lora_rank, roles.model.lora_alpha) == (0, 16)
    assert roles.model.target_modules == "all-linear"
    assert (actor.optim.lr_scheduler_type, actor.optim.clip_grad) == ("cosine", 0.5)
    assert roles.ref.fsdp_config.ulysses_sequence_parallel_size == 2
    assert config.custom_reward_function.name == "score_it"
    assert config.reward.num_workers == 8
    assert config.reward_model.reward_manager == "dapo"
    assert not config.reward_model.enable
    assert config.reward_model.reward_kwargs.overlong_buffer_cfg.len == 4


def test_the_last_null_gives_the_default_back() -> None:
    key = f"{ACTOR}.optim.lr_scheduler_type"
    config = loaded(f"{key}=cosine", f"{key}=null").config
    assert config.actor_rollout_ref.actor.optim.lr_scheduler_type == "constant"


@pytest.mark.parametrize("rank", [8, 0])
def test_two_settings_of_adapters_on_the_command_line_may_not_differ(rank: int) -> None:
    message = rf"lora_rank={rank}: must not differ from .*lora\.rank=16"
    with pytest.raises(UserError, match=message):
        loaded(f"{MODEL}.lora_rank={rank}", f"{MODEL}.lora.rank=16")


@pytest.mark.parametrize(("rank", "expected"), [(0, 16), (8, None)])
def test_a_default_in_a_file_yields_to_the_other_setting(
    rank: int, expected: int | None, tmp_path: Path
) -> None:
    file = tmp_path / "own.yaml"
    model = f"model: {{lora_rank: {rank}, lora: {{rank: 16}}}}"
    file.write_text(f"actor_rollout_ref: {{{model}}}")
    if expected is None:
        with pytest.raises(UserError, match="must not differ"):
            loaded(str(file))
    else:
        assert loaded(str(file)).config.actor_rollout_ref.model.lora_rank == expected
        last = loaded(str(file), f"{MODEL}.lora_rank=0").config
        assert last.actor_rollout_ref.model.lora_rank == 0


def test_an_empty_section_gives_nothing() -> None:
    fsdp = f"{ACTOR}.fsdp_config"
    for words in (f"{fsdp}.mixed_precision=null", f"{fsdp}.mixed_precision.param_dtype=null"):
        assert loaded(words).config == RunConfig()


@pytest.mark.parametrize(("name", "alpha"), [("ppo_trainer", 16), ("ppo_megatron_trainer", 32)])
def test_adapters_have_the_scale_of_the_configuration(name: str, alpha: int) -> None:
    config = loaded(f"--config-name={name}", f"{MODEL}.lora.rank=16").config
    assert config.actor_rollout_ref.model.lora_alpha == alpha


def test_the_precision_of_the_passes_has_another_spelling() -> None:
    fsdp = f"{ACTOR}.fsdp_config"
    found = loaded(f"+{fsdp}.mixed_precision.param_dtype=fp32")
    assert found.config.actor_rollout_ref.actor.fsdp_config.dtype == "float32"


@pytest.mark.parametrize(
    "words",
    [
        f"+{OPTIMIZER}.optimizer_offload_fraction=1",
        f"+{OPTIMIZER}.optimizer_cpu_offload=True",
        f"+{OPTIMIZER}.decoupled_weight_decay=True",
        f"{ALGORITHM}.rollout_is=False",
        f"{ALGORITHM}.rollout_is_threshold=2.0",
        f"+{ROLLOUT}.repetition_penalty=1.0",
        f"{ROLLOUT}.skip.enable=False",
        f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype=bf16",
    ],
)
def test_what_changes_nothing_is_named_as_without_effect(words: str) -> None:
    found = loaded(words)
    name = words.lstrip("+").partition("=")[0]
    assert list(ignored_keys(found)) == [name]
    assert found.config == RunConfig()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"+{OPTIMIZER}.eps=1", r"another argument of the optimizer is not built\. Leave the key"),
        (f"{ALGORITHM}.rollout_is=True", r"Set algorithm\.rollout_correction\.rollout_is=token"),
        (f"+{ROLLOUT}.repetition_penalty=1.05", "a penalty for tokens that were drawn before is"),
        (f"{ROLLOUT}.skip.enable=True", "training on recorded rollouts is not built"),
        ("critic.model.tokenizer_path=models/other", "a tokenizer from another folder"),
    ],
)
def test_what_would_train_something_else_is_refused(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        loaded(words)
    assert "\n" not in str(caught.value) and not re.search(r"=\{\}", str(caught.value))


def test_clip_cov_may_have_no_lower_bound() -> None:
    loss = (f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.clip_ratio_low=1.0")
    assert loaded(*loss).config.actor_rollout_ref.actor.policy_loss.traits.accepts_any_low
