# SPDX-License-Identifier: Apache-2.0
"""The size of micro-batches in each role of a model: the three keys that bound it, in one table.

A micro-batch holds a maximum number of sequences (the count key), or a maximum number of tokens per
device (the tokens key). Tokens decide if the dynamic key is True or the count key is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from tandem.config.derived.pools import CRITIC, REWARD_MODEL
from tandem.config.derived.trained_model import trained_model
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

CRITIC_VALUES = "critic_values"
"""The role of the critic in the forward pass that computes values before an update."""


@dataclass(frozen=True, slots=True)
class MicrobatchKeys:
    """The keys that bound the micro-batches of one role."""

    count: str
    dynamic: str
    tokens: str


@dataclass(frozen=True, slots=True)
class MicrobatchBounds:
    """The values of the keys of one role.

    Attributes:
        key: the tokens key, for messages.
        max_sequences: the maximum number of sequences, None if it is not set.
        max_tokens: the maximum number of tokens per device, None if sequences are counted.
        is_dynamic: whether the dynamic key is set.
    """

    key: str
    max_sequences: int | None
    max_tokens: int | None
    is_dynamic: bool


def _keys(section: str, names: tuple[str, str, str]) -> MicrobatchKeys:
    count, dynamic, tokens = (f"{section}.{name}" for name in names)
    return MicrobatchKeys(count, dynamic, tokens)


def _keys_of_log_probs(role: str) -> MicrobatchKeys:
    return _keys(
        f"actor_rollout_ref.{role}",
        (
            "log_prob_micro_batch_size_per_gpu",
            "log_prob_use_dynamic_bsz",
            "log_prob_max_token_len_per_gpu",
        ),
    )


_PPO = ("ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_max_token_len_per_gpu")

RUN_MICROBATCHES: Mapping[str, MicrobatchKeys] = {
    "actor-train": _keys("actor_rollout_ref.actor", _PPO),
    "logp": _keys_of_log_probs("rollout"),
    "ref_logp": _keys_of_log_probs("ref"),
    CRITIC: _keys("critic", _PPO),
    CRITIC_VALUES: _keys(
        "critic",
        ("forward_micro_batch_size_per_gpu", "use_dynamic_bsz", "forward_max_token_len_per_gpu"),
    ),
    REWARD_MODEL: _keys(
        "reward_model",
        ("micro_batch_size_per_gpu", "use_dynamic_bsz", "forward_max_token_len_per_gpu"),
    ),
}
SFT_MICROBATCHES: Mapping[str, MicrobatchKeys] = {
    "actor-train": _keys(
        "data", ("micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
    ),
}


def microbatch_keys(config: RunConfig | SftConfig, role: str) -> MicrobatchKeys:
    """Return the keys that bound the micro-batches of ``role``: a task, or an auxiliary model."""
    return (RUN_MICROBATCHES if isinstance(config, RunConfig) else SFT_MICROBATCHES)[role]


def limits(config: RunConfig | SftConfig, role: str) -> MicrobatchBounds:
    """Return the bounds of the micro-batches of ``role``; see ``microbatch_keys``."""
    keys = microbatch_keys(config, role)
    count, is_dynamic, tokens = attrgetter(keys.count, keys.dynamic, keys.tokens)(config)
    by_tokens = is_dynamic or count is None
    return MicrobatchBounds(keys.tokens, count, tokens if by_tokens else None, is_dynamic)


def training_tokens(config: RunConfig | SftConfig, role: str, *, ranks: int) -> int:
    """Return the largest number of tokens that one of the ``ranks`` of a micro-batch computes."""
    bounds = limits(config, role)
    if bounds.max_tokens is not None:
        return bounds.max_tokens
    return -(-(bounds.max_sequences or 1) * trained_model(config).max_tokens // ranks)
