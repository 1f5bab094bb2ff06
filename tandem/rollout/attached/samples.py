# SPDX-License-Identifier: Apache-2.0
"""Samples as requests to a server (``POST /inference/v1/generate``), and its answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.rollout.attached.protocol import STREAM
from tandem.rollout.attached.server import ServerLost
from tandem.rollout.canary import NUM_TOKENS, canary_tokens
from tandem.rollout.completion import complete
from tandem.rollout.sampler import DrawRule
from tandem.rollout.vllm.draw import GREEDY, NOT_FINITE
from tandem.types import Completion, TokenIds

GENERATE = "/inference/v1/generate"
_ENDED = ("stop", "length")
"""The reasons for which a sample is finished. Another one is that somebody aborted it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample that is to be generated.

    Attributes:
        key: the key of its random numbers.
        eos_ids: tokens that end it; empty if it ignores them.
        length: the largest number of tokens.
        forced: tokens that are taken instead of drawn ones; empty but for a canary.
    """

    sample_id: int
    prompt_ids: TokenIds
    key: int
    rule: DrawRule
    eos_ids: TokenIds
    length: int
    forced: TokenIds = ()

    @property
    def is_canary(self) -> bool:
        """Whether it is the check of new weights."""
        return bool(self.forced)

    def request(self, salt: str) -> dict[str, Any]:
        """Return the body of the request.

        Args:
            salt: the name of the weights in use, by which the prefix cache is keyed.
        """
        rule = (self.rule.temperature, self.rule.top_k, self.rule.top_p)
        stream = {"key": self.key, "rule": rule, "forced": self.forced}
        return {
            "token_ids": self.prompt_ids,
            "cache_salt": salt,
            "sampling_params": {
                "temperature": 0.0,
                "max_tokens": self.length,
                "detokenize": False,
                "logprobs": 0,
                "ignore_eos": True,  # those of the server's files
                "stop_token_ids": self.eos_ids,
                "extra_args": {STREAM: stream},
            },
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of a finished sample.

    Attributes:
        log_probs: the log-prob of each; NaN if the logits were not finite.
        versions: (index, label) of the first token of each version of weights.
        num_cached_tokens: how much of the prompt was in the prefix cache, if the server says so.
    """

    token_ids: list[int]
    log_probs: list[float]
    versions: list[tuple[int, str]]
    num_cached_tokens: int


def read_answer(content: Mapping[str, Any], sample: Sample) -> Answer:
    """Read the answer to a request.

    Raises:
        ServerLost: the sample was aborted, or the answer is not one of vLLM.
    """
    try:
        (choice,) = content["choices"]
        entries = choice["logprobs"]["content"]
        token_ids = list(choice["token_ids"])
        log_probs = [float(entry["logprob"]) for entry in entries]
        spans = [(span["start"], span["version"]) for span in choice["weight_versions"]]
        usage = content["usage"]
        num_prompt_tokens = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details") or {}
    except (KeyError, TypeError, ValueError) as error:
        raise ServerLost(f"its answer to {GENERATE} is not vLLM's ({error!r})") from error
    if choice["finish_reason"] not in _ENDED or not token_ids:
        raise ServerLost(f"it ended a sample early ({choice['finish_reason']})")
    if num_prompt_tokens != len(sample.prompt_ids) or len(log_probs) != len(token_ids):
        raise ServerLost("its answer belongs to another prompt or has other log-probs")
    return Answer(
        token_ids,
        [math.nan if logp == NOT_FINITE else logp for logp in log_probs],
        spans,
        details.get("cached_tokens") or 0,
    )


def finished_sample(sample: Sample, answer: Answer, *, labels: Mapping[str, int]) -> Completion:
    """Return the completion of a sample.

    Args:
        labels: the versions that its tokens may have, by their labels.

    Raises:
        ServerLost: a token was drawn with weights that this run has not sent.
    """
    unknown = [label for _, label in answer.versions if label not in labels]
    if unknown or not answer.versions:
        raise ServerLost(f"it generates with weights of another origin ({unknown or 'unnamed'})")
    return complete(
        sample.sample_id,
        answer.token_ids,
        log_probs=answer.log_probs,
        eos_ids=sample.eos_ids,
        versions=[(start, labels[label]) for start, label in answer.versions],
    )


def canary(vocabulary: int, version: int) -> Sample:
    """Return the known tokens of a version's canary as a sample."""
    prompt, forced = canary_tokens(vocabulary, version)
    return Sample(-1, prompt, 0, GREEDY, (), NUM_TOKENS, forced)
