# SPDX-License-Identifier: Apache-2.0
"""Which keys of rewards other keys switch off, and why: a table as in ``switches``."""

from __future__ import annotations

from tandem.config.run import RunConfig
from tandem.config.switches import Condition

_NEURAL = tuple(
    f"reward_model.{key}"
    for key in (
        "model",
        "micro_batch_size_per_gpu",
        "use_dynamic_bsz",
        "forward_max_token_len_per_gpu",
    )
)
_KWARGS = "reward_model.reward_kwargs"


def _calls_no_function(config: RunConfig) -> bool:
    return config.reward_model.enable and not config.data.val_files


REWARD_CONDITIONS: tuple[Condition, ...] = (
    Condition(_NEURAL, lambda c: not c.reward_model.enable, "reward_model.enable=False"),
    Condition(
        ("reward_model.micro_batch_size_per_gpu",),
        lambda c: c.reward_model.use_dynamic_bsz,
        "reward_model.use_dynamic_bsz=True fills micro-batches by tokens",
    ),
    Condition(
        ("reward_model.forward_max_token_len_per_gpu",),
        lambda c: c.reward_model.microbatch_tokens is None,
        "reward_model.micro_batch_size_per_gpu bounds micro-batches by count",
    ),
    Condition(
        ("reward_model.model.custom_chat_template",),
        lambda c: c.reward_model.model.input_tokenizer is None,
        "reward_model.model.input_tokenizer=null: the policy's tokens are taken as they are",
    ),
    Condition(
        ("reward", "custom_reward_function"),
        _calls_no_function,
        "the reward model scores training, and there is no validation",
    ),
    Condition(
        (f"{_KWARGS}.overlong_buffer_cfg",),
        lambda c: c.reward_model.reward_manager != "dapo",
        "only reward_model.reward_manager=dapo shapes overlong responses",
    ),
    Condition(
        tuple(
            f"{_KWARGS}.{name}"
            for name in (
                "max_resp_len",
                "overlong_buffer_cfg.len",
                "overlong_buffer_cfg.penalty_factor",
                "overlong_buffer_cfg.log",
            )
        ),
        lambda c: not c.reward_model.reward_kwargs.overlong_buffer_cfg.enable,
        "overlong_buffer_cfg.enable=False",
    ),
    Condition(
        ("custom_reward_function.name", "custom_reward_function.reward_kwargs"),
        lambda c: c.custom_reward_function.path is None,
        "custom_reward_function.path is not set",
    ),
)
"""The first that holds gives the reason."""
