# SPDX-License-Identifier: Apache-2.0
"""The keyed draw in vLLM: tokens are drawn as the native engines do, keyed by (seed, sample id,
position). Log-probs are those of the temperature-scaled distribution before top-k and top-p.

In vLLM's first model runner, the draw is a logits processor. vLLM is asked for greedy tokens, and
the processor leaves only the drawn token, with its log-prob, which a server returns. The second
runner has a sampler instead (``second_runner``).

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tandem.models.operators import upload
from tandem.rollout.keyed_random import uniforms
from tandem.rollout.sampler import Draw, DrawRows, DrawRule, draw_rows
from tandem.rollout.vllm.library import of_vllm
from tandem.types import TokenIds

GREEDY = DrawRule(temperature=0.0, top_k=-1, top_p=1.0)
NOT_FINITE = -9999.0
"""What stands for a log-prob that is NaN. vLLM's servers replace NaN by it too."""


@dataclass(slots=True)
class Stream:
    """The draws of one sequence.

    Attributes:
        key: the key of its random numbers.
        forced: tokens that are taken instead of drawn ones, with their log-probs; empty for
            samples.
        token_ids: the tokens so far, which vLLM appends to, or something else as long.
        log_probs: the log-prob of each. The last one may belong to a token that vLLM discards and
            draws again, because its prompt was cut into chunks.
        versions: (index, version) of the first token of each weights version, as in ``complete``.
    """

    key: int
    rule: DrawRule
    forced: TokenIds = ()
    token_ids: Sized = ()
    log_probs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)

    def use_version(self, version: int) -> None:
        """Tag the tokens after those so far with ``version``."""
        num_tokens = len(self.token_ids)
        if self.versions and self.versions[-1][0] == num_tokens:
            self.versions.pop()
        self.versions.append((num_tokens, version))


class DrawnLogProbs:
    """The log-probs of steps, on their way from the device into the streams.

    vLLM prepares the next step while the device computes one, so that a draw must not wait for it.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[Sequence[Stream], Sequence[int], Tensor, torch.Event]] = deque()

    def note(self, rows: Sequence[Stream], positions: Sequence[int], *, logp_B: Tensor) -> None:
        """Take the log-probs of a step, one for the given position of each row."""
        if logp_B.device.type == "cpu":
            return _write(rows, positions, logp_B=logp_B)
        self.read()
        copied_B, event = logp_B.to("cpu", non_blocking=True), torch.Event(logp_B.device)
        event.record()
        self._steps.append((rows, positions, copied_B, event))

    def read(self) -> None:
        """Write the log-probs that have been computed into their streams."""
        while self._steps and self._steps[0][-1].query():
            rows, positions, copied_B, _ = self._steps.popleft()
            _write(rows, positions, logp_B=copied_B)


def _write(rows: Sequence[Stream], positions: Sequence[int], *, logp_B: Tensor) -> None:
    for row, position, logp in zip(rows, positions, logp_B.tolist(), strict=True):
        assert position <= len(row.log_probs), "a step before this one was not written"
        if position < len(row.log_probs):
            del row.log_probs[position:]
        row.log_probs.append(logp)


@dataclass(frozen=True, slots=True)
class Batch:
    """Streams whose tokens are drawn together, and what does not change between such draws.

    Attributes:
        key_B: int64 on the host, the key of each stream.
        rules: the same tuple in each draw, by which ``DrawRows`` knows it again.
    """

    streams: Sequence[Stream]
    key_B: Tensor
    rules: tuple[DrawRule, ...]
    is_forced: bool

    @classmethod
    def of(cls, streams: Sequence[Stream]) -> Batch:
        """Return the batch of the streams."""
        return cls(
            streams,
            torch.tensor([stream.key for stream in streams], dtype=torch.int64),
            tuple(stream.rule for stream in streams),
            any(stream.forced for stream in streams),
        )

    def draw(self, logits_BV: Tensor, position_B: Tensor, *, draw_rows: DrawRows) -> Draw:
        """Draw a token of each stream, on the device of the logits.

        Args:
            position_B: int64 on the host, the index of the drawn token in its response.
        """
        # On the host: a dozen operations on a few numbers take a device longer to start.
        uniform_B = uniforms(self.key_B, position_B[:, None])[:, 0]
        return draw_rows(
            logits_BV,
            upload(uniform_B, logits_BV.device),
            rules=self.rules,
            forced=_forced(self.streams, position_B.tolist()) if self.is_forced else {},
        )


class Rows:
    """The streams of the rows of vLLM's batch, whose tokens ``draw_rows`` draws."""

    def __init__(self, draw_rows: DrawRows, *, log_probs: DrawnLogProbs | None) -> None:
        self._draw_rows = draw_rows
        self._log_probs = log_probs
        self._rows: dict[int, Stream] = {}
        self._num_rows = 0
        self._places: list[int] = []
        self._batch = Batch.of(())

    def add(self, index: int, stream: Stream | None, *, token_ids: Sequence[int]) -> None:
        """Put a stream into a row; None: vLLM draws the tokens of the row.

        Args:
            token_ids: the tokens of the stream so far, which vLLM appends to.
        """
        self.remove(index)
        if stream is not None:
            stream.token_ids = token_ids
            self._rows[index] = stream

    def remove(self, index: int) -> None:
        """Empty a row."""
        self._rows.pop(index, None)
        self._forget_batch()

    def move(self, source: int, target: int, *, swaps: bool) -> None:
        """Move a stream to another row, or swap the streams of two rows."""
        moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
        if moved is not None:
            self._rows[target] = moved
        if swaps and replaced is not None:
            self._rows[source] = replaced
        self._forget_batch()

    def _forget_batch(self) -> None:
        self._num_rows = 0

    def draw(self, logits_BV: Tensor) -> Tensor:
        """Draw a token per row with a stream. Return minus infinity except at these tokens, which
        have their log-prob there. All other rows stay as they are.
        """
        if self._num_rows != len(logits_BV):
            self._num_rows = len(logits_BV)
            self._places = [index for index in range(self._num_rows) if index in self._rows]
            self._batch = Batch.of([self._rows[index] for index in self._places])
        if len(self._places) == len(logits_BV):
            return self._draw(logits_BV)
        if self._places:
            place_R = upload(torch.tensor(self._places), logits_BV.device)
            logits_BV[place_R] = self._draw(logits_BV[place_R])
        return logits_BV

    def _draw(self, logits_BV: Tensor) -> Tensor:
        streams = self._batch.streams
        positions = [len(stream.token_ids) for stream in streams]
        draw = self._batch.draw(logits_BV, torch.tensor(positions), draw_rows=self._draw_rows)
        if self._log_probs is not None:
            self._log_probs.note(streams, positions, logp_B=draw.logp_B)
        # Not NaN, of which vLLM's greedy choice may pick another token.
        shown_B1 = draw.logp_B[:, None].nan_to_num(nan=NOT_FINITE)
        return logits_BV.fill_(float("-inf")).scatter_(1, draw.token_B[:, None], shown_B1)


def _forced(streams: Sequence[Stream], positions: Sequence[int]) -> dict[int, int]:
    """Return the token of each row whose tokens are not drawn."""
    return {
        index: stream.forced[min(position, len(stream.forced) - 1)]
        for index, (stream, position) in enumerate(zip(streams, positions, strict=True))
        if stream.forced
    }


def processor_class(
    stream_of: Callable[[Any], Stream | None],
    *,
    log_probs: DrawnLogProbs | None,
    draw_rows: DrawRows = draw_rows,
) -> type:
    """Return the class of a logits processor for vLLM that draws the tokens of streams.

    Args:
        stream_of: returns the stream of a request by its sampling parameters; None: vLLM draws.
        log_probs: gets the log-probs of the drawn tokens; None if vLLM itself returns them.
        draw_rows: draws the tokens of a step.
    """
    base = of_vllm("v1.sample.logits_processor", "LogitsProcessor")
    moves = of_vllm("v1.sample.logits_processor", "MoveDirectionality")

    class KeyedDraw(base):
        """A logits processor that leaves only the token of the keyed draw."""

        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            self._rows = Rows(draw_rows, log_probs=log_probs)

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
                self._rows.add(index, stream_of(params), token_ids=token_ids)
            for source, target, direction in batch_update.moved:
                self._rows.move(source, target, swaps=direction == moves.SWAP)

        def apply(self, logits: Tensor) -> Tensor:
            """Draw the tokens of a step."""
            return self._rows.draw(logits)

    return KeyedDraw
