# SPDX-License-Identifier: Apache-2.0
"""The distribution of work over ranks that compute in lockstep, by lengths and costs only.

Everything is deterministic. No result may depend on the distribution.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.types import PackedBatch

LINEAR_COST = 24576
"""The cost of a token without attention; attending to one position costs 2. It is six widths of a
7B model, as in verl's ``calculate_workload``."""
SLACK = 0.02
"""The relative excess over an even distribution above which groups are split further."""
_GRAINS = (0.0, 1.0, 2.0, 4.0, 8.0, math.inf)
"""The numbers of parts per even share into which groups are split, in order; 0 splits none."""


def token_cost(num_tokens: int, prefix: int = 0) -> int:
    """Return the relative cost of tokens with causal attention to a prefix and themselves.

    Example:
        >>> token_cost(5) == token_cost(2) + token_cost(3, prefix=2)
        True
    """
    return num_tokens * (LINEAR_COST + num_tokens + 2 * prefix)


def batch_cost(batch: PackedBatch) -> int:
    """Return the relative cost of a micro-batch; a shared prompt counts once."""
    length_S, prefix_S = batch.segments.length_S, batch.segments.prefix_length_S
    return int((length_S * (LINEAR_COST + length_S + 2 * prefix_S)).sum())


def deal(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Deal micro-batches to ranks, one each per round; costs within a round are similar.

    If the last round is incomplete, it goes to the ranks with the least work so far.

    Example:
        >>> deal([10, 50, 40, 20], 2)
        [[1, 0], [2, 3]]
    """
    costliest_first = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for start in range(0, len(costs), num_ranks):
        least_loaded_first = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, index in zip(
            least_loaded_first, costliest_first[start : start + num_ranks], strict=False
        ):
            dealt[rank].append(index)
            totals[rank] += costs[index]
    return dealt


def seqlen_metrics(lengths: Sequence[int], shares: Sequence[Sequence[int]]) -> dict[str, float]:
    """Compute verl's metrics ``global_seqlen/*``: the tokens per rank with balancing
    (``balanced_*``), and without it, if the sequences were split in order.

    Args:
        lengths: the number of tokens of each sequence.
        shares: the sequences of each rank.
    """
    num_ranks = len(shares)
    bounds = [len(lengths) * rank // num_ranks for rank in range(num_ranks + 1)]
    in_order = [sum(lengths[bounds[rank] : bounds[rank + 1]]) for rank in range(num_ranks)]
    dealt = [sum(lengths[i] for i in share) for share in shares]
    values = {
        "min": min(in_order),
        "max": max(in_order),
        "minmax_diff": max(in_order) - min(in_order),
        "balanced_min": min(dealt),
        "balanced_max": max(dealt),
        "mean": sum(lengths) / num_ranks,
    }
    return {f"global_seqlen/{name}": float(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class GroupLengths:
    """The lengths of sequences that share a prompt; ``members`` are their indices."""

    members: tuple[int, ...]
    prompt_tokens: int
    response_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measure:
    """The measures of micro-batches: their size is bounded, their cost is balanced.

    Attributes:
        max_size: the largest size of a micro-batch; None without a bound.
        by_tokens: whether the size is the number of tokens, counting a shared prompt once; else it
            is the number of sequences.
        by_cost: whether the cost is ``token_cost``; else it is the number of sequences.
    """

    max_size: int | None
    by_tokens: bool
    by_cost: bool

    def fits(self, size: int) -> bool:
        return self.max_size is None or size <= self.max_size

    def size_of(self, group: GroupLengths, chosen: Sequence[int]) -> int:
        """Return the total size of the chosen members of a group."""
        if not self.by_tokens:
            return len(chosen)
        return group.prompt_tokens + sum(group.response_tokens[i] for i in chosen)

    def cost_of(self, group: GroupLengths, chosen: Sequence[int]) -> int:
        """Return the total cost of the chosen members of a group."""
        if not self.by_cost:
            return len(chosen)
        prompt = group.prompt_tokens
        responses = (token_cost(group.response_tokens[i], prefix=prompt) for i in chosen)
        return token_cost(prompt) + sum(responses)


@dataclass(frozen=True, slots=True)
class _Part:
    """Members of one group that stay together; ``chosen`` are their indices in the group."""

    group: int
    chosen: tuple[int, ...]
    size: int
    cost: int


def plan_evenly(
    groups: Sequence[GroupLengths], measure: Measure, *, multiple_of: int
) -> list[list[int]]:
    """Plan few micro-batches of similar cost for ranks in lockstep.

    Their number is a multiple of ``multiple_of`` if there are enough sequences. Groups stay whole
    if the costs are within ``SLACK``. Otherwise they are split further and further, which computes
    their prompts repeatedly, and the plan with the shortest rounds is chosen.
    """
    work = _Work(groups, measure)
    wholes = [work.part(number, range(len(group.members))) for number, group in enumerate(groups)]
    fewest = _fewest(sum(whole.size for whole in wholes), measure, multiple_of=multiple_of)
    even_share = sum(whole.cost for whole in wholes) / fewest
    found: list[tuple[int, int, list[list[int]]]] = []
    for grain in _GRAINS:
        parts: list[_Part] = []
        for whole in wholes:
            num_parts = math.ceil(min(grain * whole.cost / even_share, len(whole.chosen)))
            stays = num_parts <= 1 and measure.fits(whole.size)
            parts += [whole] if stays else work.split(whole.group, max(num_parts, 1))
        bins = _fill(parts, measure, fewest=fewest, step=multiple_of)
        if bins is None:
            continue
        costs = [work.joint_cost(members) for members in bins]
        slowest = _lock_step_cost(costs, num_ranks=multiple_of)
        found.append((slowest, len(bins), sorted(work.sequences(members) for members in bins)))
        if slowest * multiple_of <= (1 + SLACK) * even_share * fewest:
            break
    return min(found, key=lambda entry: entry[:2])[2]


@dataclass(frozen=True, slots=True)
class _Work:
    """All groups and their measure."""

    groups: Sequence[GroupLengths]
    measure: Measure

    def part(self, number: int, chosen: Iterable[int]) -> _Part:
        """Return the chosen members of group ``number`` as a part."""
        group, places = self.groups[number], tuple(sorted(chosen))
        size, cost = self.measure.size_of(group, places), self.measure.cost_of(group, places)
        return _Part(number, places, size, cost)

    def split(self, number: int, num_parts: int) -> list[_Part]:
        """Split group ``number`` into at least ``num_parts`` parts of similar cost that fit."""
        group = self.groups[number]
        places = range(len(group.members))
        longest_first = sorted(places, key=lambda i: (-group.response_tokens[i], i))
        for count in range(num_parts, len(places) + 1):
            loads = [(0, part) for part in range(count)]
            chosen: list[list[int]] = [[] for _ in range(count)]
            for place in longest_first:
                load, part = heapq.heappop(loads)
                chosen[part].append(place)
                heapq.heappush(loads, (load + self.measure.cost_of(group, [place]), part))
            parts = [self.part(number, part) for part in chosen]
            if all(self.measure.fits(part.size) for part in parts):
                return parts
        raise AssertionError("a single sequence always fits")

    def joint_cost(self, parts: Sequence[_Part]) -> int:
        """Return the cost of a micro-batch, in which parts of one group share their prompt."""
        joined = _by_group(parts).items()
        return sum(self.measure.cost_of(self.groups[n], places) for n, places in joined)

    def sequences(self, parts: Sequence[_Part]) -> list[int]:
        """Return the members of a micro-batch, grouped by prompt."""
        joined = _by_group(parts).items()
        return [self.groups[n].members[i] for n, places in joined for i in places]


def _by_group(parts: Sequence[_Part]) -> dict[int, list[int]]:
    joined: dict[int, list[int]] = defaultdict(list)
    for part in sorted(parts, key=lambda part: (part.group, part.chosen)):
        joined[part.group].extend(part.chosen)
    return joined


def _fewest(size: int, measure: Measure, *, multiple_of: int) -> int:
    """Return the lower bound of the number of micro-batches, a multiple of ``multiple_of``."""
    least = 1 if measure.max_size is None else math.ceil(size / measure.max_size)
    return math.ceil(least / multiple_of) * multiple_of


def _fill(
    parts: Sequence[_Part], measure: Measure, *, fewest: int, step: int
) -> list[list[_Part]] | None:
    """Put the parts into as few bins as possible, the costliest first into the cheapest with room.

    Return None if bins stay empty that smaller parts could fill.
    """
    costliest_first = sorted(parts, key=lambda part: (-part.cost, part.group, part.chosen))
    for num_bins in range(fewest, len(parts) + 1, step):
        bins = _filled(costliest_first, measure, num_bins=num_bins)
        if bins is not None:
            return bins
    return [[part] for part in parts] if all(len(part.chosen) == 1 for part in parts) else None


def _filled(
    costliest_first: Sequence[_Part], measure: Measure, *, num_bins: int
) -> list[list[_Part]] | None:
    """Fill ``num_bins`` bins; return None if no bin has room for a part."""
    bins: list[list[_Part]] = [[] for _ in range(num_bins)]
    sizes = [0] * num_bins
    loads = [(0, number) for number in range(num_bins)]
    for part in costliest_first:
        full: list[tuple[int, int]] = []
        while loads and not measure.fits(sizes[loads[0][1]] + part.size):
            full.append(heapq.heappop(loads))
        if not loads:
            return None
        load, number = heapq.heappop(loads)
        bins[number].append(part)
        sizes[number] += part.size
        for entry in (*full, (load + part.cost, number)):
            heapq.heappush(loads, entry)
    return bins


def _lock_step_cost(costs: Sequence[int], *, num_ranks: int) -> int:
    """Return the cost of the rounds of ``deal``: each lasts as long as its costliest batch."""
    return sum(sorted(costs, reverse=True)[::num_ranks])
