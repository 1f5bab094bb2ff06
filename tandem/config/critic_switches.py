# SPDX-License-Identifier: Apache-2.0
"""Which keys of ``critic.*`` other keys switch off, and why: a table as in ``switches``."""

from __future__ import annotations

from tandem.config.run import RunConfig
from tandem.config.switches import Condition, model_conditions, optimizer_conditions

CRITIC_CONDITIONS: tuple[Condition, ...] = (
    Condition(
        ("critic",),
        lambda c: not c.uses_critic,
        "there is no critic: algorithm.adv_estimator is not gae, or critic.enable=False",
    ),
    *model_conditions("critic.model", lambda c: c.critic.model),
    *optimizer_conditions("critic.optim", lambda c: c.critic.optim),
    Condition(
        ("critic.ppo_micro_batch_size_per_gpu", "critic.forward_micro_batch_size_per_gpu"),
        lambda c: c.critic.use_dynamic_bsz,
        "critic.use_dynamic_bsz=True fills micro-batches by tokens",
    ),
    Condition(
        ("critic.ppo_max_token_len_per_gpu",),
        lambda c: c.critic.ppo_max_token_len_per_gpu not in _critics_limits(c),
        "critic.*micro_batch_size_per_gpu bounds micro-batches by count",
    ),
    Condition(
        ("critic.forward_max_token_len_per_gpu",),
        lambda c: c.critic.forward_tokens is None,
        "critic.forward_micro_batch_size_per_gpu bounds micro-batches by count",
    ),
    Condition(("critic.data_loader_seed",), lambda c: not c.critic.shuffle, "critic.shuffle=False"),
    Condition(
        ("critic.loss_scale_factor",),
        lambda c: c.critic.loss_agg_mode != "seq-mean-token-sum-norm",
        "only loss_agg_mode=seq-mean-token-sum-norm reads it",
    ),
)


def _critics_limits(config: RunConfig) -> tuple[int | None, int | None]:
    return config.critic.microbatch_tokens, config.critic.forward_tokens
