# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false
"""Log-probs of given tokens and entropies from hidden states, with reductions in Triton.

A chunk of fp32 logits is read once for all its statistics, and once for its gradient in the
backward pass. Chunks are kept for it where the device has memory, and others are computed again,
with the same results. ``logprob`` defines the results.

Shapes: R response tokens, C rows of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from tandem.models.gradient_sum import GradientSum, sum_of
from tandem.models.kernels.sums import add_product
from tandem.models.logprob import TokenLogProbs

CHUNK_BYTES = 2**31
"""The maximum size of the fp32 logits of one chunk."""
SPARED_SHARE = 1 / 16
"""The share of the device's memory that kept chunks leave free."""
_BLOCK = 8192
_LANES, _EACH = 512, 8


@dataclass(frozen=True)
class _Settings:
    temperature: float
    chunk_rows: int
    kept_chunks: int


class _Logits:
    """The chunks of logits of a pass, some of which are kept until they are used again."""

    def __init__(self, weight_VD: Tensor, *, num_kept: int) -> None:
        self._weight_VD = weight_VD
        self._num_kept = num_kept
        self._kept: dict[int, Tensor] = {}

    def compute(self, h_CD: Tensor, start: int) -> Tensor:
        """Return the logits of the rows from ``start`` on, and keep them if there is room.

        If memory runs out, all kept chunks are freed.
        """
        try:
            logits_CV = logits(h_CD, self._weight_VD)
        except torch.OutOfMemoryError:
            if not self._kept:
                raise
            self._kept, self._num_kept = {}, 0
            logits_CV = logits(h_CD, self._weight_VD)
        if len(self._kept) < self._num_kept:
            self._kept[start] = logits_CV
        return logits_CV

    def take(self, h_CD: Tensor, start: int) -> Tensor:
        """Return the logits of these rows again, kept or recomputed, and keep them no longer."""
        kept_CV = self._kept.pop(start, None)
        return logits(h_CD, self._weight_VD) if kept_CV is None else kept_CV


def token_log_probs(
    h_RD: Tensor, weight_VD: Tensor, *, target_R: Tensor, temperature: float, with_entropy: bool
) -> TokenLogProbs:
    """See ``logprob.token_log_probs``."""
    rows = max(1, CHUNK_BYTES // (4 * weight_VD.shape[0]))
    settings = _Settings(
        max(temperature, 1e-8),
        chunk_rows=rows,
        kept_chunks=spare_chunks(h_RD.device) if torch.is_grad_enabled() else 0,
    )
    logp_R, entropy_R = _TokenLogProbs.apply(h_RD, weight_VD, target_R, settings)
    return TokenLogProbs(logp_R, entropy_R if with_entropy else None)


def logits(h_RD: Tensor, weight_VD: Tensor) -> Tensor:
    """Return (R, V) in fp32 without intermediate rounding, and without gradients."""
    if h_RD.dtype == torch.float32 or h_RD.device.type == "cpu":
        return torch.mm(h_RD, weight_VD.T).float()
    return torch.mm(h_RD, weight_VD.T, out_dtype=torch.float32)


def spare_chunks(device: torch.device) -> int:
    """Return how many chunks of logits a device can keep."""
    if device.type == "cpu":
        return 0
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    # The allocator can use this again for any tensor, but for unused pieces of blocks in use.
    unused = module.memory_reserved(device) - module.memory_allocated(device)
    unused -= module.memory_stats(device).get("inactive_split_bytes.all.current", 0)
    # A chunk that is not kept, its gradient, and what stays free.
    needed = 2 * CHUNK_BYTES + int(SPARED_SHARE * total)
    return max(0, free + unused - needed) // CHUNK_BYTES


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_RD: Tensor, weight_VD: Tensor, target_R: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        results_3R = torch.empty((3, len(h_RD)), dtype=torch.float32, device=h_RD.device)
        rows, vocabulary = settings.chunk_rows, weight_VD.shape[0]
        chunks = _Logits(weight_VD, num_kept=settings.kept_chunks)
        for start in range(0, len(h_RD), rows):
            logits_CV = chunks.compute(h_RD[start : start + rows], start)
            _statistics[(len(logits_CV),)](
                logits_CV,
                target_R[start : start + rows],
                results_3R[:, start:],
                vocabulary,
                results_3R.stride(0),
                1.0 / settings.temperature,
                LANES=_LANES,
                EACH=_EACH,
                num_warps=16,
            )
        logp_R, entropy_R, log_sum_R = results_3R
        ctx.settings, ctx.chunks = settings, chunks
        ctx.gradients = sum_of(weight_VD)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h_RD, weight_VD, target_R, entropy_R, log_sum_R)
        return logp_R.clone(), entropy_R.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp_R: Tensor | None, grad_entropy_R: Tensor | None) -> Any:
        h_RD, weight_VD, target_R, entropy_R, log_sum_R = ctx.saved_tensors
        settings: _Settings = ctx.settings
        gradients: GradientSum | None = ctx.gradients
        rows, vocabulary = settings.chunk_rows, weight_VD.shape[0]
        zero_R = torch.zeros_like(entropy_R)
        columns = torch.stack(
            [
                zero_R if grad_logp_R is None else grad_logp_R,
                zero_R if grad_entropy_R is None else grad_entropy_R,
                entropy_R,
                log_sum_R,
            ]
        )
        grad_h_RD = torch.empty_like(h_RD)
        total_VD: Tensor | None = None
        for start in range(0, len(h_RD), rows):
            h_CD = h_RD[start : start + rows]
            logits_CV = ctx.chunks.take(h_CD, start)
            grad_CV = logits_CV.new_empty(logits_CV.shape, dtype=weight_VD.dtype)
            _gradient[(len(logits_CV), triton.cdiv(vocabulary, _BLOCK))](
                logits_CV,
                target_R[start : start + rows],
                columns[:, start:],
                grad_CV,
                vocabulary,
                columns.stride(0),
                1.0 / settings.temperature,
                THROUGH_ENTROPY=grad_entropy_R is not None,
                BLOCK=_BLOCK,
                num_warps=8,
            )
            del logits_CV
            torch.mm(grad_CV, weight_VD, out=grad_h_RD[start : start + rows])
            if ctx.needs_input_grad[1]:
                if gradients is not None:
                    gradients.add_product(grad_CV, h_CD)
                else:
                    total_VD = _accumulate(total_VD, grad_CV, h_CD=h_CD)
        grad_weight_VD = None if total_VD is None else total_VD.to(weight_VD.dtype)
        return grad_h_RD, grad_weight_VD, None, None


def _accumulate(total_VD: Tensor | None, grad_CV: Tensor, *, h_CD: Tensor) -> Tensor:
    """Sum over chunks in fp32. A single chunk is not converted."""
    if total_VD is None:
        return torch.mm(grad_CV.T, h_CD)
    total_VD = total_VD.float()
    add_product(total_VD, grad_CV, x_TI=h_CD)
    return total_VD


@triton.jit
def _statistics(
    logits_ptr,
    target_ptr,
    results_ptr,
    vocabulary,
    results_stride,
    scale,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
):
    """Compute the target's log-prob, the entropy and the log-sum-exp of one row, in one pass.

    Each lane reads ``EACH`` neighbours at a time, and has a maximum and sums of its own.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * vocabulary
    top = tl.full([LANES], -1e30, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    weighted = tl.zeros([LANES], tl.float32)
    place = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    for start in range(0, vocabulary, LANES * EACH):
        v = start + place
        inside = v < vocabulary
        x = tl.load(base + v, mask=inside, other=-1e30) * scale
        new_top = tl.maximum(top, tl.max(x, 1))
        decay = tl.exp(top - new_top)
        weight = tl.where(inside, tl.exp(x - new_top[:, None]), 0.0)
        total = total * decay + tl.sum(weight, 1)
        weighted = weighted * decay + tl.sum(weight * x, 1)
        top = new_top
    row_top = tl.max(top, 0)
    factor = tl.exp(top - row_top)
    row_total = tl.sum(total * factor, 0)
    log_sum = row_top + tl.log(row_total)
    mean = tl.sum(weighted * factor, 0) / row_total
    target = tl.load(target_ptr + row)
    logp = tl.load(base + target) * scale - log_sum
    tl.store(results_ptr + row, logp)
    tl.store(results_ptr + results_stride + row, log_sum - mean)
    tl.store(results_ptr + 2 * results_stride + row, log_sum)


@triton.jit
def _gradient(
    logits_ptr,
    target_ptr,
    columns_ptr,
    grad_ptr,
    vocabulary,
    columns_stride,
    scale,
    THROUGH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of a block of logits.

    With l the log-softmax and p = exp(l): dlogp = onehot - p and dH = -p (l + H), scaled.
    """
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < vocabulary
    column = columns_ptr + row
    grad_logp = tl.load(column)
    log_sum = tl.load(column + 3 * columns_stride)
    x = tl.load(logits_ptr + row * vocabulary + v, mask=inside, other=0.0) * scale - log_sum
    p = tl.exp(x)
    grad = tl.where(v == tl.load(target_ptr + row), grad_logp, 0.0) - grad_logp * p
    if THROUGH_ENTROPY:
        grad_entropy = tl.load(column + columns_stride)
        entropy = tl.load(column + 2 * columns_stride)
        grad -= grad_entropy * p * (x + entropy)
    grad = (grad * scale).to(grad_ptr.dtype.element_ty)
    tl.store(grad_ptr + row * vocabulary + v, grad, mask=inside)
