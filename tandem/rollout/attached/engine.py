# SPDX-License-Identifier: Apache-2.0
"""Servers of vLLM that somebody else has started, as one rollout engine.

Tokens are drawn by the keyed draw of the native engines, in a logits processor of the servers
(``plugin``), so that a sample has the same tokens on every server. Weights come through vLLM's own
loader (``delivery``), and each server must pass the canary after each update. A server that does
not answer is left out, and its unfinished samples run again on the others, from their first token.
It takes part again once it has received the version in use.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tandem.api import Capacity, EngineFailure
from tandem.platforms.select import DTYPES
from tandem.rollout.attached.delivery import Version
from tandem.rollout.attached.fit import Misfit, fit_of
from tandem.rollout.attached.fleet import Fleet, Member
from tandem.rollout.attached.keys import Share, require_usable
from tandem.rollout.attached.samples import Answer, Sample, canary, finished_sample
from tandem.rollout.attached.server import ServerLost
from tandem.rollout.attached.sink import AttachedSink
from tandem.rollout.canary import expected_log_probs, require_equal
from tandem.rollout.factory import EngineSpec
from tandem.rollout.feed import WeightFeed, checkpoint_views
from tandem.rollout.keyed_random import stream_keys
from tandem.rollout.resting import Resting
from tandem.rollout.sampler import DrawRule
from tandem.types import Completion, GenerationRequest, SliceSpec

logger = logging.getLogger(__name__)

_WAIT_S = 1.0
"""How long the engine waits at most before it looks after silent and new servers."""
_FIRST_STEP_S = 0.02
"""The time of a decode step before one was measured."""


class AttachedRolloutEngine(Resting):
    """An ``api.RolloutEngine`` over a fleet of servers."""

    def __init__(self, spec: EngineSpec, fleet: Fleet) -> None:
        self._spec, self._fleet = spec, fleet
        config = spec.config
        self.facts = spec.own_facts
        self.capacity = Capacity(config.max_num_seqs * len(fleet.members), None)
        self._dtype = DTYPES[fleet.members[0].facts.dtype]
        self._manifest = [
            SliceSpec(name, self._dtype, tuple(view.shape), (0,) * view.ndim, tuple(view.shape))
            for name, view in checkpoint_views(spec.model)
        ]
        self._name = f"tandem-{secrets.token_hex(6)}"
        self._sink = AttachedSink(
            fleet,
            self._manifest,
            choose=self._choose,
            name=self._name,
            keeps_cache=self.facts.keeps_cache,
            on_end=self._expect,
        )
        self._queue: deque[Sample] = deque()
        self._num_unfinished = 0
        self._labels: dict[str, int] = {}
        self._expected_R: Tensor | None = None
        self._version: int | None = None
        self._step_s = _FIRST_STEP_S
        self._sent_s: dict[int, float] = {}
        self._num_prefilled_tokens = self._num_cached_tokens = self._num_decoded_tokens = 0

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, and send what the servers have room for."""
        for request in requests:
            sampling = request.sampling
            starts = [request.first_index] * len(request.sample_ids)
            keys = stream_keys(self._spec.config.seed, request.sample_ids, first_indices=starts)
            eos_ids = () if sampling.ignore_eos else tuple(self._spec.eos_ids)
            rule, length = DrawRule.of(sampling), sampling.max_new_tokens
            for sample_id, key in zip(request.sample_ids, keys.tolist(), strict=True):
                self._queue.append(
                    Sample(sample_id, tuple(request.prompt_ids), key, rule, eos_ids, length)
                )
                self._num_unfinished += 1

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """Generate until a sequence finishes; see ``api.Rollout``.

        While a server is in doubt, this goes on until it has answered or is left out, because a
        caller counts the calls that bring nothing.
        """
        finished: list[Completion] = []
        limit_s = None if max_steps is None else max_steps * self._step_s
        begun = time.monotonic()
        while self._num_unfinished and not finished:
            self._let_join()
            self._ask_canaries()
            self._deal()
            wait_s = _WAIT_S
            if limit_s is not None and not self._fleet.is_in_doubt:
                wait_s = min(_WAIT_S, max(0.0, limit_s - (time.monotonic() - begun)))
            for member, sample, answer in self._fleet.wait(wait_s):
                finished += self._take(member, sample, answer=answer)
            is_over = limit_s is not None and time.monotonic() - begun >= limit_s
            if is_over and not self._fleet.is_in_doubt:
                break
        self._measure(finished)
        return finished

    def set_weights_version(self, version: int) -> bool:
        """Use the weights that the sink has received as ``version``."""
        assert version == self._version, "each version comes through the sink"
        return True

    def metrics(self) -> Mapping[str, float]:
        """Return the tokens of finished sequences by their kind, and how often a server was lost.

        Cached tokens are counted if servers run with ``--enable-prompt-tokens-details``.
        """
        return {
            "num_prefilled_tokens": self._num_prefilled_tokens,
            "num_cached_tokens": self._num_cached_tokens,
            "num_decoded_tokens": self._num_decoded_tokens,
            "num_lost_servers": self._fleet.num_lost,
        }

    def sink(self) -> AttachedSink:
        """Return where new weights go."""
        return self._sink

    def sleep(self) -> bool:
        """Return whether there is nothing to generate. The servers' devices are their own."""
        return not self._num_unfinished

    def close(self) -> None:
        """Give up what is under way; idempotent. The servers go on without this run."""
        self._sink.close()
        self._fleet.close()

    def _choose(self) -> Sequence[Member]:
        """Return the servers that receive the version that begins, with those that came back."""
        for member in self._fleet.find_more():
            self._fleet.join(member)
        return self._fleet.members

    def _let_join(self) -> None:
        """Bring servers that came back or were added to the version in use."""
        for member in self._fleet.find_more():
            assert self._version is not None, "weights come before samples"
            self._fleet.join(member)
            sink = AttachedSink(
                self._fleet,
                self._manifest,
                choose=lambda member=member: [member],
                name=self._name,
                keeps_cache=self.facts.keeps_cache,
                on_end=self._expect,
            )
            try:
                WeightFeed(self._spec.model, sink).deliver(self._version)
            except EngineFailure:
                if member in self._fleet.members:
                    raise

    def _expect(self, version: Version) -> None:
        self._version = version.number
        self._labels[version.label] = version.number
        self._expected_R = expected_log_probs(self._spec.model, version.number)

    def _ask_canaries(self) -> None:
        """Let the servers with new weights generate the canary."""
        assert self._version is not None, "weights have come"
        known = canary(self._spec.model.lm_head_weight.shape[0], self._version)
        for member in [one for one in self._fleet.members if not one.is_checked]:
            if not any(sample.is_canary for sample in member.running.values()):
                self._fleet.send(member, known)
        if not self._fleet.members:
            raise EngineFailure(f"vLLM: no server is left; the last was {self._fleet.last_cause}")

    def _check(self, member: Member, answer: Answer) -> None:
        """Raise EngineFailure unless the canary has the log-probs of the trainer."""
        assert self._expected_R is not None and self._version is not None, "weights have come"
        require_equal(
            self._expected_R,
            torch.tensor(answer.log_probs),
            engine=f"vLLM at {member.server.url}",
            version=self._version,
            dtypes=(self._spec.model.lm_head_weight.dtype, self._dtype),
        )
        member.is_checked = True

    def _take(self, member: Member, sample: Sample, *, answer: Answer) -> list[Completion]:
        """Return the completions that an answer brings: none before its server is checked."""
        if sample.is_canary:
            self._check(member, answer)
        else:
            member.held.append((sample, answer))
        if not member.is_checked:
            return []
        try:
            found = [finished_sample(*one, labels=self._labels) for one in member.held]
        except ServerLost as loss:
            self._fleet.lose(member, str(loss))
            return []
        for one in member.held:
            self._count(*one)
        member.held = []
        return found

    def _deal(self) -> None:
        """Send queued samples to the servers with the fewest, if they have passed the canary."""
        self._requeue()
        room = self._spec.config.max_num_seqs
        while self._queue:
            able = [one for one in self._fleet.members if one.is_checked]
            member = min(able, key=lambda one: len(one.running), default=None)
            if member is None or len(member.running) >= room:
                return
            sample = self._queue.popleft()
            self._sent_s[sample.sample_id] = time.monotonic()
            if not self._fleet.send(member, sample):
                self._requeue()

    def _requeue(self) -> None:
        """Put the samples of lost servers before all others."""
        again = [one for one in self._fleet.take_unfinished() if not one.is_canary]
        self._queue.extendleft(reversed(again))

    def _count(self, sample: Sample, answer: Answer) -> None:
        self._num_unfinished -= 1
        self._num_prefilled_tokens += len(sample.prompt_ids) - answer.num_cached_tokens
        self._num_cached_tokens += answer.num_cached_tokens
        self._num_decoded_tokens += len(answer.token_ids)

    def _measure(self, finished: Sequence[Completion]) -> None:
        """Note the time of a decode step: at least that, because prompts and pauses are in it."""
        now = time.monotonic()
        steps_s = [
            (now - self._sent_s.pop(one.sample_id)) / max(len(one.token_ids), 1) for one in finished
        ]
        self._step_s = min([2 * self._step_s, *steps_s]) if steps_s else self._step_s


def build(spec: EngineSpec) -> AttachedRolloutEngine:
    """Attach this process's share of the servers that ``engine_kwargs.vllm.urls`` names.

    Raises:
        EngineFailure: one of them does not answer or does not fit the run.
    """
    given = spec.config.engine_kwargs.vllm
    fit = fit_of(spec.config, spec.folder, max_length=spec.max_length)
    share = Share(given, rank=spec.rank, num_ranks=spec.num_ranks)
    try:
        fleet = Fleet(
            share.urls,
            require_usable=lambda url: require_usable(url, given),
            check=fit,
        )
    except (ServerLost, Misfit) as problem:
        raise EngineFailure(f"vLLM: a server takes no part: {problem}") from problem
    for member in fleet.members:
        logger.info("The rollout server %s takes part: %s", member.server.url, member.facts)
    return AttachedRolloutEngine(spec, fleet)
