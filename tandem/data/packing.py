# SPDX-License-Identifier: Apache-2.0
"""Packing of sequences into micro-batches without padding, with the flat columns of their tokens.

Adjacent sequences of one prompt share its tokens. ``in_sequence_order`` restores the order of the
sequences, so that no result depends on the plan. A sequence with branches stays in one micro-batch.

Shapes: N sequences, T packed tokens, R loss tokens.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from tandem.data.balance import GroupLengths, Measure, plan_evenly
from tandem.errors import UserError
from tandem.pictures import Picture
from tandem.types import LossColumns, PackedBatch, Segments

Plan = list[list[int]]
"""The micro-batches as lists of indices into the sequences; every index occurs once."""


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """A sequence to train on: a prompt and a response.

    Token ids are read fastest from ``array``s.

    Attributes:
        prompt_key: sequences with the same key have the same prompt.
        prompt_ids: the tokens of the prompt, at least one.
        response_ids: the tokens after the prompt, possibly none.
        loss_mask: whether each token of the response carries loss; None if all do.
        branches: the other rows of a conversation that forked. They count as tokens of this
            sequence, behind its own, and have no branches.
        pictures: the pictures that the tokens of the prompt name.
        routes: ``Completion.routes`` of all tokens but the last; None if they are not replayed.
    """

    prompt_key: int
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    loss_mask: tuple[bool, ...] | None = None
    branches: tuple[TrainSequence, ...] = ()
    pictures: tuple[Picture, ...] = ()
    routes: np.ndarray | None = None

    @property
    def num_response_tokens(self) -> int:
        """The number of tokens beside those of the prompt, with all tokens of the branches."""
        return len(self.response_ids) + sum(row.num_tokens for row in self.branches)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of prompt, response and branches."""
        return len(self.prompt_ids) + self.num_response_tokens

    @property
    def num_loss_tokens(self) -> int:
        """The number of tokens that carry loss."""
        own = len(self.response_ids) if self.loss_mask is None else sum(self.loss_mask)
        return own + sum(row.num_loss_tokens for row in self.branches)

    @property
    def longest_row(self) -> int:
        """The number of tokens of the longest row."""
        own = len(self.prompt_ids) + len(self.response_ids)
        return max([own, *(row.num_tokens for row in self.branches)])


def pack(sequences: Sequence[TrainSequence], columns: LossColumns | None = None) -> PackedBatch:
    """Pack all ``sequences``, in their order, into one micro-batch.

    A prompt with several responses is one segment, followed by a segment for each response with the
    prompt as prefix. A prompt with a single response shares its segment. The last token of a
    response predicts nothing and is left out. Branches stand behind all sequences, so that they do
    not part responses that share a prompt; their loss tokens are those of their sequence.

    Args:
        columns: the columns (R,) of exactly these sequences in this order.

    Raises:
        ValueError: there is no sequence, a prompt is empty, two prompts have one key, or a mask or
            the columns have another length.
    """
    branching = [i for i, sequence in enumerate(sequences) for _ in sequence.branches]
    owner_N = np.array([*range(len(sequences)), *branching])
    rows = [*sequences, *chain.from_iterable(sequence.branches for sequence in sequences)]
    first_N = _starts_group(rows)
    responses = [_ids(row.response_ids) for row in rows]
    prompt_N = np.array([len(row.prompt_ids) for row in rows])
    response_N = np.array([len(response) for response in responses])
    # Two chunks per sequence: its prompt (only where a group starts) and its response.
    fed_N = np.maximum(response_N - 1, 0)
    chunk_lengths = np.stack([prompt_N * first_N, fed_N], axis=1).ravel()
    chunk_starts = _exclusive_sum(chunk_lengths)
    response_start_N = chunk_starts[1::2]
    prompt_start_N = chunk_starts[::2][np.flatnonzero(first_N)][np.cumsum(first_N) - 1]

    num_tokens = int(chunk_lengths.sum())
    chunk_positions = np.stack([np.zeros_like(prompt_N), prompt_N], axis=1).ravel()
    position_T = np.arange(num_tokens) - np.repeat(chunk_starts - chunk_positions, chunk_lengths)
    token_T = np.concatenate(_fed_tokens(rows, responses, first_N=first_N), dtype=np.int64)

    source_R = _ranges(response_start_N - 1, response_N)
    target_R = np.concatenate(responses, dtype=np.int64)
    responds_N = response_N > 0
    first_token_N = _exclusive_sum(response_N)[responds_N]
    source_R[first_token_N] = (prompt_start_N + prompt_N - 1)[responds_N]
    sequence_R = np.repeat(owner_N, response_N)
    if (loss_R := _loss_order(rows, sequence_R, branches=bool(branching))) is not None:
        target_R, source_R, sequence_R = target_R[loss_R], source_R[loss_R], sequence_R[loss_R]
    _check_columns(columns, len(target_R))
    return PackedBatch(
        token_ids_T=torch.from_numpy(token_T),
        position_ids_T=torch.from_numpy(position_T),
        segments=_segments(
            first_N,
            chunk_starts,
            chunk_lengths=chunk_lengths,
            prompt_start_N=prompt_start_N,
            prompt_N=prompt_N,
        ),
        source_R=torch.from_numpy(source_R),
        target_R=torch.from_numpy(target_R),
        sequence_R=torch.from_numpy(sequence_R),
        num_sequences=len(sequences),
        columns=columns,
        pictures=_pictures(rows, first_N),
        routes_TLK=_routes(rows, first_N),
    )


def plan_microbatches(
    sequences: Sequence[TrainSequence],
    *,
    max_sequences: int | None = None,
    max_tokens: int | None = None,
    key: str = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    multiple_of: int = 1,
    by_cost: bool = True,
) -> Plan:
    """Divide sequences into micro-batches, deterministically.

    With ``max_sequences``, micro-batches are consecutive slices of the sequences, ordered by group.
    With ``max_tokens``, the longest group goes first into the emptiest of few micro-batches: a
    shared prompt counts once, and a group stays whole unless it exceeds the limit. With neither
    there is one micro-batch. For several ranks, ``balance.plan_evenly`` makes micro-batches of
    similar cost within the same limits.

    Args:
        max_sequences: the largest number of sequences of a micro-batch.
        max_tokens: the largest number of packed tokens of a micro-batch.
        key: the configuration key of ``max_tokens``, for the message.
        multiple_of: the number of ranks. The number of micro-batches is a multiple of it if there
            are enough sequences.
        by_cost: whether to balance costs; else numbers of sequences.

    Raises:
        UserError: a single sequence is longer than ``max_tokens``.
        ValueError: both limits are given.
    """
    if max_sequences is not None and max_tokens is not None:
        raise ValueError("micro-batches are limited by max_sequences or by max_tokens, not by both")
    if not sequences:
        return []
    groups = _groups(sequences)
    if max_tokens is not None:
        _check_budget(sequences, max_tokens, key=key)
        # A sequence with branches may exceed the limit as a whole.
        max_tokens = max([max_tokens, *(sequence.num_tokens for sequence in sequences)])
    if multiple_of > 1:
        by_tokens = max_tokens is not None
        measure = Measure(max_tokens if by_tokens else max_sequences, by_tokens, by_cost)
        return plan_evenly(_group_lengths(sequences, groups), measure, multiple_of=multiple_of)
    if max_tokens is not None:
        items = [
            part for group in groups for part in _split(sequences, group, max_tokens=max_tokens)
        ]
        costs = [_num_tokens(sequences, item) for item in items]
        return _balance(items, costs, max_tokens=max_tokens)
    order = list(chain.from_iterable(groups))
    size = len(order) if max_sequences is None else max_sequences
    return [order[start : start + size] for start in range(0, len(order), size)]


def pack_microbatches(
    sequences: Sequence[TrainSequence], plan: Plan, *, columns: LossColumns | None = None
) -> list[PackedBatch]:
    """Pack each micro-batch of ``plan`` with its share of ``columns``, (R,) in sequence order."""
    counts_N = _loss_token_counts(sequences)
    _check_columns(columns, int(counts_N.sum()))
    batches: list[PackedBatch] = []
    for members in plan:
        share = None if columns is None else _take(columns, _spans(counts_N, members))
        batches.append(pack([sequences[i] for i in members], share))
    return batches


def in_sequence_order(
    parts: Sequence[Tensor], *, sequences: Sequence[TrainSequence], plan: Plan
) -> Tensor:
    """Return the results of a plan's micro-batches as one tensor (R,) in sequence order."""
    spans = _spans(_loss_token_counts(sequences), list(chain.from_iterable(plan)))
    joined_R = torch.cat(list(parts))
    ordered_R = torch.empty_like(joined_R)
    pieces = joined_R.split([end - start for start, end in spans])
    for (start, end), piece_R in zip(spans, pieces, strict=True):
        ordered_R[start:end] = piece_R
    return ordered_R


def with_packed_routes(
    routes: Sequence[Tensor], *, sequences: Sequence[TrainSequence], plan: Plan
) -> list[TrainSequence]:
    """Return sequences with the routes (T, L, K) of the tokens of a plan's micro-batches."""
    found = list(sequences)
    for members, routes_TLK in zip(plan, routes, strict=True):
        packed = [sequences[i] for i in members]
        rows = [*packed, *chain.from_iterable(sequence.branches for sequence in packed)]
        routed = iter(_with_routes(rows, routes_TLK.numpy()))
        own = [next(routed) for _ in members]
        for i, row in zip(members, own, strict=True):
            found[i] = replace(row, branches=tuple(next(routed) for _ in row.branches))
    return found


def _with_routes(rows: Sequence[TrainSequence], routes_TLK: np.ndarray) -> list[TrainSequence]:
    """Return the rows of a packed batch with their routes: the inverse of ``_routes``."""
    routed: list[TrainSequence] = []
    shared, start = routes_TLK[:0], 0
    for row, first in zip(rows, _starts_group(rows), strict=True):
        if first:
            shared = routes_TLK[start : start + len(row.prompt_ids)]
            start += len(shared)
        own = routes_TLK[start : start + max(0, len(row.response_ids) - 1)]
        start += len(own)
        routed.append(replace(row, routes=np.concatenate((shared, own))))
    assert start == len(routes_TLK), "a packed token has one row of routes"
    return routed


def _starts_group(sequences: Sequence[TrainSequence]) -> np.ndarray:
    """Return whether each sequence has a different prompt from the one before it, bool (N,)."""
    if not sequences:
        raise ValueError("a packed batch needs at least one sequence")
    first_N = np.ones(len(sequences), dtype=bool)
    for i, sequence in enumerate(sequences):
        if not sequence.prompt_ids:
            raise ValueError(f"sequence {i} has an empty prompt: nothing predicts its first token")
        before = sequences[i - 1]
        if i > 0 and sequence.prompt_key == before.prompt_key:
            first_N[i] = False
            if sequence.prompt_ids is not before.prompt_ids:
                _check_same_prompt(sequence, before)
    return first_N


def _check_same_prompt(one: TrainSequence, other: TrainSequence) -> None:
    if one.prompt_ids != other.prompt_ids:
        raise ValueError(f"two different prompts have the key {one.prompt_key}")


def _pictures(sequences: Sequence[TrainSequence], first_N: np.ndarray) -> tuple[Picture, ...]:
    """Return the pictures of all prompts, each once."""
    found = {
        picture.first_id: picture
        for sequence, first in zip(sequences, first_N, strict=True)
        if first
        for picture in sequence.pictures
    }
    return tuple(found.values())


def _routes(rows: Sequence[TrainSequence], first_N: np.ndarray) -> Tensor | None:
    """Return the routes of the fed tokens in their order; None unless all rows have them."""
    chunks: list[np.ndarray] = []
    for row, first in zip(rows, first_N, strict=True):
        if row.routes is None:
            return None
        chunks.append(row.routes if first else row.routes[len(row.prompt_ids) :])
    return torch.from_numpy(np.concatenate(chunks))


def _ids(numbers: Sequence[int]) -> np.ndarray:
    return np.asarray(numbers, dtype=np.int32)


def _exclusive_sum(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths) - lengths


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenate the ranges ``start .. start + length``."""
    return np.repeat(starts - _exclusive_sum(lengths), lengths) + np.arange(lengths.sum())


def _fed_tokens(
    sequences: Sequence[TrainSequence], responses: Sequence[np.ndarray], *, first_N: np.ndarray
) -> list[np.ndarray]:
    """Return the prompt of each group and the responses without their last tokens."""
    chunks: list[np.ndarray] = []
    for sequence, response, first in zip(sequences, responses, first_N, strict=True):
        if first:
            chunks.append(_ids(sequence.prompt_ids))
        chunks.append(response[:-1])
    return chunks


def _segments(
    first_N: np.ndarray,
    chunk_starts: np.ndarray,
    *,
    chunk_lengths: np.ndarray,
    prompt_start_N: np.ndarray,
    prompt_N: np.ndarray,
) -> Segments:
    """Return the segments: no empty chunk, and a single response in the segment of its prompt."""
    lengths = chunk_lengths.copy()
    alone_N = first_N & np.append(first_N[1:], True)
    lengths[::2][alone_N] += lengths[1::2][alone_N]
    lengths[1::2][alone_N] = 0
    zero_N = np.zeros_like(prompt_N)
    keep = lengths > 0
    return Segments(
        start_S=torch.from_numpy(chunk_starts[keep]),
        length_S=torch.from_numpy(lengths[keep]),
        prefix_start_S=torch.from_numpy(np.stack([zero_N, prompt_start_N], axis=1).ravel()[keep]),
        prefix_length_S=torch.from_numpy(np.stack([zero_N, prompt_N], axis=1).ravel()[keep]),
    )


def _loss_order(
    rows: Sequence[TrainSequence], sequence_R: np.ndarray, *, branches: bool
) -> np.ndarray | None:
    """Return the response tokens that carry loss, those of branches after their sequence's own.

    None stands for all tokens in their order.
    """
    keep_R = _loss_mask(rows)
    if keep_R is None and not branches:
        return None
    kept = np.arange(len(sequence_R)) if keep_R is None else np.flatnonzero(keep_R)
    return kept[np.argsort(sequence_R[kept], kind="stable")] if branches else kept


def _loss_mask(sequences: Sequence[TrainSequence]) -> np.ndarray | None:
    """Return whether each response token carries loss; None if all do."""
    if all(sequence.loss_mask is None for sequence in sequences):
        return None
    masks: list[np.ndarray] = []
    for i, sequence in enumerate(sequences):
        length = len(sequence.response_ids)
        mask = np.ones(length, bool) if sequence.loss_mask is None else np.array(sequence.loss_mask)
        if len(mask) != length:
            raise ValueError(f"sequence {i}: loss_mask has {len(mask)} entries for {length} tokens")
        masks.append(mask.astype(bool))
    return np.concatenate(masks)


def _check_columns(columns: LossColumns | None, num_loss_tokens: int) -> None:
    if columns is not None and len(columns.advantages_R) != num_loss_tokens:
        raise ValueError(
            f"columns have {len(columns.advantages_R)} entries for {num_loss_tokens} loss tokens"
        )


def _loss_token_counts(sequences: Sequence[TrainSequence]) -> np.ndarray:
    return np.array([sequence.num_loss_tokens for sequence in sequences], dtype=np.int64)


def _spans(counts_N: np.ndarray, members: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ranges of the members' loss tokens in the flat columns, adjacent ones joined."""
    ends_N = np.cumsum(counts_N)
    ends = ends_N[list(members)]
    starts = ends - counts_N[list(members)]
    breaks = np.flatnonzero(starts[1:] != ends[:-1])
    return list(
        zip(
            [*starts[:1].tolist(), *starts[breaks + 1].tolist()],
            [*ends[breaks].tolist(), *ends[-1:].tolist()],
            strict=True,
        )
    )


def _take(columns: LossColumns, spans: Sequence[tuple[int, int]]) -> LossColumns:
    return columns.map(lambda column_R: torch.cat([column_R[a:b] for a, b in spans]))


def _groups(sequences: Sequence[TrainSequence]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        groups.setdefault(sequence.prompt_key, []).append(i)
    return list(groups.values())


def _group_lengths(
    sequences: Sequence[TrainSequence], groups: list[list[int]]
) -> list[GroupLengths]:
    return [
        GroupLengths(
            members=tuple(group),
            prompt_tokens=len(sequences[group[0]].prompt_ids),
            response_tokens=tuple(sequences[i].num_response_tokens for i in group),
        )
        for group in groups
    ]


def _num_tokens(sequences: Sequence[TrainSequence], members: Sequence[int]) -> int:
    """Return the number of packed tokens of ``members``, which share a prompt."""
    responses = sum(sequences[i].num_response_tokens for i in members)
    return len(sequences[members[0]].prompt_ids) + responses


def _check_budget(sequences: Sequence[TrainSequence], max_tokens: int, *, key: str) -> None:
    longest = max(sequence.longest_row for sequence in sequences)
    if longest > max_tokens:
        raise UserError(
            key,
            max_tokens,
            rule=f"must hold the longest sequence, which has {longest} tokens",
            remedy=f"Set {key}={longest} or more, such as max_prompt_length + max_response_length.",
        )


def _split(
    sequences: Sequence[TrainSequence], group: list[int], *, max_tokens: int
) -> list[list[int]]:
    """Split a group in order into parts of at most ``max_tokens``, or return it whole."""
    parts: list[list[int]] = []
    room = 0
    for i in group:
        length = sequences[i].num_response_tokens
        if not parts or length > room:
            parts.append([])
            room = max_tokens - len(sequences[i].prompt_ids)
        parts[-1].append(i)
        room -= length
    return parts


def _balance(items: list[list[int]], costs: list[int], *, max_tokens: int) -> Plan:
    """Put the longest item first into the emptiest bin, with as few bins as possible."""
    longest_first = sorted(range(len(items)), key=lambda item: (-costs[item], item))
    for num_bins in range(math.ceil(sum(costs) / max_tokens), len(items) + 1):
        bins = _fill(longest_first, costs, num_bins=num_bins)
        if all(sum(costs[item] for item in members) <= max_tokens for members in bins):
            return sorted(_members(items, bin_) for bin_ in bins)
    raise AssertionError("one item per bin always fits")


def _members(items: list[list[int]], chosen: list[int]) -> list[int]:
    return list(chain.from_iterable(sorted(items[item] for item in chosen)))


def _fill(longest_first: list[int], costs: list[int], *, num_bins: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, number) for number in range(num_bins)]
    for item in longest_first:
        load, number = heapq.heappop(loads)
        bins[number].append(item)
        heapq.heappush(loads, (load + costs[item], number))
    return bins
