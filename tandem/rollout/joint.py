# SPDX-License-Identifier: Apache-2.0
"""Rollout engines of several policies that compute their passes together.

Each engine runs on a thread of its own and keeps its requests, its cache and its random numbers. A
pass begins when every engine that has not left asks for one. The k-th pass has thus the k-th pass
of each policy, whatever the threads' speeds, and no policy changes its weights meanwhile.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch import Tensor

from tandem.api import EngineFailure
from tandem.models.decoder import Decoder
from tandem.models.joint import JointDecoder, PolicyTokens
from tandem.models.operators import Attention


class JointPasses:
    """The meeting point of the engines of ``num_policies`` policies with one base.

    Waits for: every engine that has not left. Unblocked by: the last of them that asks for a pass,
    by one that leaves, and by ``abort``.
    """

    def __init__(self, num_policies: int) -> None:
        self.num_policies = num_policies
        self._condition = threading.Condition()
        self._present = set(range(num_policies))
        self._decoders: dict[int, Decoder] = {}
        self._asked: dict[int, PolicyTokens] = {}
        self._computed: dict[int, Tensor] = {}
        self._joint: JointDecoder | None = None
        self._failure = ""

    def join(self, policy: int, decoder: Decoder) -> JoinedDecoder:
        """Return what computes in place of the decoder of a policy."""
        with self._condition:
            self._decoders[policy] = decoder
        return JoinedDecoder(self, policy)

    def leave(self, policy: int) -> None:
        """Let the others go on without a policy; idempotent."""
        with self._condition:
            self._present.discard(policy)
            self._condition.notify_all()

    def abort(self, reason: str) -> None:
        """Fail all passes from now on, and those that wait."""
        with self._condition:
            self._failure = reason
            self._condition.notify_all()

    def compute(self, own: PolicyTokens) -> Tensor:
        """Return the hidden states (T, D) of the tokens of one policy.

        Raises:
            EngineFailure: the passes were aborted, or the pass failed on another thread.
        """
        with self._condition:
            self._asked[own.policy] = own
            while own.policy not in self._computed:
                if self._failure:
                    raise EngineFailure(self._failure)
                if self._present <= self._asked.keys():
                    self._compute_all()
                else:
                    self._condition.wait()
            return self._computed.pop(own.policy)

    def _compute_all(self) -> None:
        """Compute the pass that all have asked for. The others wait for it."""
        asked = [self._asked[policy] for policy in sorted(self._asked)]
        try:
            found = self._decoder()(asked)
        except RuntimeError as error:
            self._failure = f"a joint pass of several policies failed: {error}"
            self._condition.notify_all()
            raise
        self._asked.clear()
        self._computed = {part.policy: h for part, h in zip(asked, found, strict=True)}
        self._condition.notify_all()

    def _decoder(self) -> JointDecoder:
        """Return the joint decoder, made when all policies are loaded."""
        if self._joint is None:
            # A policy that left before it was loaded asks for no pass.
            last = max(self._decoders)
            some = next(iter(self._decoders.values()))
            decoders = [self._decoders.get(policy, some) for policy in range(last + 1)]
            self._joint = JointDecoder(decoders)
        return self._joint


@dataclass(frozen=True, slots=True)
class JointMember:
    """The part of one policy, given by its index, in joint passes."""

    passes: JointPasses
    policy: int

    def join(self, decoder: Decoder) -> JoinedDecoder:
        """Return what computes in place of the policy's decoder."""
        return self.passes.join(self.policy, decoder)

    def leave(self) -> None:
        """Let the others go on without this policy; idempotent."""
        self.passes.leave(self.policy)


class JoinedDecoder:
    """A substitute for the decoder of an engine, which computes with those of all policies."""

    def __init__(self, passes: JointPasses, policy: int) -> None:
        self._passes = passes
        self._policy = policy

    def __call__(self, token_ids_T: Tensor, position_ids_T: Tensor, attention: Attention) -> Tensor:
        """Return the hidden states (T, D)."""
        return self._passes.compute(
            PolicyTokens(self._policy, token_ids_T, position_ids_T, attention)
        )

    def outdate(self) -> None:
        """Do nothing: the policy's adapters are read in place."""

    def update(self) -> None:
        """Do nothing."""

    def free(self) -> None:
        """Do nothing: the base belongs to all."""
