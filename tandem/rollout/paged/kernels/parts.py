# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false
"""Parts of attention: what a program found in some pages, for several query heads.

A part is three numbers of each head: the largest score, the sum of the weights relative to it, and
the sum of the values with these weights. Sums are fp32. Shapes: G query heads, E head dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_page(scores, v, top, total, weighted, PRECISION: tl.constexpr):
    """Return a part with the values of a page added."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp(scores - new_top[:, None])
    decay = tl.exp(top - new_top)
    update = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    weighted = weighted * decay[:, None] + update
    return new_top, total * decay + tl.sum(weights, 1), weighted


@triton.jit
def store_part(part_ptr, stats_ptr, part_G, top_G, weight_G, weighted_GE, valid_G):
    """Store a part for each head, in the places ``part_G``."""
    e = tl.arange(0, weighted_GE.shape[1])
    offset_GE = part_G[:, None] * weighted_GE.shape[1] + e[None, :]
    tl.store(part_ptr + offset_GE, weighted_GE, mask=valid_G[:, None])
    tl.store(stats_ptr + part_G * 2, top_G, mask=valid_G)
    tl.store(stats_ptr + part_G * 2 + 1, weight_G, mask=valid_G)


@triton.jit
def add_parts(top, total, weighted, part_ptr, stats_ptr, part_G, num_parts, stride, valid_G):
    """Return a part with stored ones added, whose places for each head are ``stride`` apart."""
    e = tl.arange(0, weighted.shape[1])
    for _ in range(0, num_parts):
        part_top = tl.load(stats_ptr + part_G * 2, mask=valid_G, other=-1e30)
        part_weight = tl.load(stats_ptr + part_G * 2 + 1, mask=valid_G, other=0.0)
        offset_GE = part_G[:, None] * weighted.shape[1] + e[None, :]
        part_weighted = tl.load(part_ptr + offset_GE, mask=valid_G[:, None], other=0.0)
        new_top = tl.maximum(top, part_top)
        decay, factor = tl.exp(top - new_top), tl.exp(part_top - new_top)
        weighted = weighted * decay[:, None] + part_weighted * factor[:, None]
        total = total * decay + part_weight * factor
        top = new_top
        part_G += stride
    return top, total, weighted
