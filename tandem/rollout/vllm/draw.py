# SPDX-License-Identifier: Apache-2.0
"""The keyed draw as a logits processor of vLLM (the interface of its model runner V1).

vLLM is asked for greedy tokens without log-probs. The processor draws as the native engines do, and
leaves only the drawn token. Tokens are therefore keyed by (seed, sample id, position). Log-probs
are those of the temperature-scaled distribution before top-k and top-p.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tandem.rollout.keyed_random import uniforms
from tandem.rollout.sampler import DrawRule, draw_rows
from tandem.rollout.vllm.library import of_vllm
from tandem.types import TokenIds

GREEDY = DrawRule(temperature=0.0, top_k=-1, top_p=1.0)


@dataclass(slots=True)
class Stream:
    """The draws of one sequence.

    Attributes:
        key: the key of its random numbers.
        forced: tokens that are taken instead of drawn ones, with their log-probs; empty for
            samples.
        token_ids: the tokens so far, which vLLM appends to.
        log_probs: the log-prob of each. The last one may belong to a token that vLLM discards and
            draws again, because its prompt was cut into chunks.
        versions: (index, version) of the first token of each weights version, as in ``complete``.
    """

    key: int
    rule: DrawRule
    forced: TokenIds = ()
    token_ids: Sequence[int] = ()
    log_probs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)

    def use_version(self, version: int) -> None:
        """Tag the tokens after those so far with ``version``."""
        num_tokens = len(self.token_ids)
        if self.versions and self.versions[-1][0] == num_tokens:
            self.versions.pop()
        self.versions.append((num_tokens, version))


class Rows:
    """The streams of the rows of vLLM's batch."""

    def __init__(self, streams: Mapping[str, Stream], device: torch.device) -> None:
        self._streams = streams
        self._device = device
        self._rows: dict[int, Stream] = {}

    def add(self, index: int, name: str, *, token_ids: Sequence[int]) -> None:
        """Put a stream into a row. ``token_ids`` are its tokens so far, which vLLM appends to."""
        stream = self._streams[name]
        stream.token_ids = token_ids
        self._rows[index] = stream

    def remove(self, index: int) -> None:
        """Empty a row."""
        self._rows.pop(index, None)

    def move(self, source: int, target: int, *, swaps: bool) -> None:
        """Move a stream to another row, or swap the streams of two rows."""
        moved, replaced = self._rows.pop(source), self._rows.pop(target, None)
        self._rows[target] = moved
        if swaps and replaced is not None:
            self._rows[source] = replaced

    def draw(self, logits_BV: Tensor) -> Tensor:
        """Draw a token per row. Return minus infinity except at these tokens."""
        rows = [self._rows[index] for index in range(len(logits_BV))]
        positions = [len(row.token_ids) for row in rows]
        keys_B = torch.tensor([row.key for row in rows], device=self._device)
        position_B1 = torch.tensor(positions, device=self._device)[:, None]
        forced = {
            index: row.forced[min(position, len(row.forced) - 1)]
            for index, (row, position) in enumerate(zip(rows, positions, strict=True))
            if row.forced
        }
        uniform_B = uniforms(keys_B, position_B1)[:, 0]
        rules = [row.rule for row in rows]
        draw = draw_rows(logits_BV, uniform_B, rules=rules, forced=forced)
        logps = draw.logp_B.tolist()
        for row, position, logp in zip(rows, positions, logps, strict=True):
            row.log_probs[position:] = [logp]
        return logits_BV.fill_(float("-inf")).scatter_(1, draw.token_B[:, None], 0.0)


def processor_class(streams: Mapping[str, Stream]) -> type:
    """Return the class of a logits processor for vLLM that draws for ``streams``.

    A request names its stream by ``extra_args["stream"]``.
    """
    base = of_vllm("v1.sample.logits_processor", "LogitsProcessor")
    moves = of_vllm("v1.sample.logits_processor", "MoveDirectionality")

    class KeyedDraw(base):
        """A logits processor that leaves only the token of the keyed draw."""

        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            self._rows = Rows(streams, device)

        def is_argmax_invariant(self) -> bool:
            """Return False: the likeliest token changes."""
            return False

        def update_state(self, batch_update: Any) -> None:
            """Follow the rows of vLLM's batch."""
            if batch_update is None:
                return
            for index in batch_update.removed:
                self._rows.remove(index)
            for index, params, _, token_ids in batch_update.added:
                self._rows.add(index, params.extra_args["stream"], token_ids=token_ids)
            for source, target, direction in batch_update.moved:
                self._rows.move(source, target, swaps=direction == moves.SWAP)

        def apply(self, logits: Tensor) -> Tensor:
            """Draw the tokens of a step."""
            return self._rows.draw(logits)

    return KeyedDraw
