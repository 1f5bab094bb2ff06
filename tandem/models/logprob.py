# SPDX-License-Identifier: Apache-2.0
"""Log-probs of given tokens, and entropies, computed from hidden states.

The (R, V) logits exist only one chunk of rows at a time. The backward pass recomputes each chunk;
if there is only one, its softmax is kept instead. Both results are differentiable once. Reductions
are fp32 for every dtype of the hidden states (fp64 for fp64).

Shapes: R response tokens, C rows of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from tandem.models.gradient_sum import GradientSum, sum_of

CHUNK_BYTES = 256 * 2**20
"""The maximum size of the fp32 logits of one chunk."""


@dataclass(frozen=True)
class TokenLogProbs:
    """Log-probs and entropies, fp32 (R,). ``entropy_R`` is None unless requested."""

    logp_R: Tensor
    entropy_R: Tensor | None


def token_log_probs(
    h_RD: Tensor,
    weight_VD: Tensor,
    *,
    target_R: Tensor,
    temperature: float,
    with_entropy: bool,
    chunk_bytes: int = CHUNK_BYTES,
) -> TokenLogProbs:
    """Return log-probs of ``target_R`` under softmax(h W^T / temperature), and its entropies.

    ``temperature`` is at least 1e-8, as in verl. Pass 1 for greedy decoding.
    """
    settings = _Settings(
        temperature=max(temperature, 1e-8),
        with_entropy=with_entropy,
        chunk_rows=max(1, chunk_bytes // (4 * weight_VD.shape[0])),
        differentiable=torch.is_grad_enabled(),
    )
    logp_R, entropy_R = _TokenLogProbs.apply(h_RD, weight_VD, target_R, settings)
    return TokenLogProbs(logp_R, entropy_R if with_entropy else None)


@torch.no_grad()
def squared_probabilities(
    h_RD: Tensor, weight_VD: Tensor, *, temperature: float, chunk_bytes: int = CHUNK_BYTES
) -> Tensor:
    """Return the sums of the squared probabilities of softmax(h W^T / temperature), fp32 (R,)."""
    rows = max(1, chunk_bytes // (4 * weight_VD.shape[0]))
    softmaxes = (
        _softmax(h_CD, weight_VD, temperature=max(temperature, 1e-8))[1]
        for h_CD in h_RD.split(rows)
    )
    return torch.cat([prob_CV.square_().sum(-1) for prob_CV in softmaxes])


@dataclass(frozen=True)
class _Settings:
    temperature: float
    with_entropy: bool
    chunk_rows: int
    differentiable: bool

    def chunks(self, tensors: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the rows of the tensors, ``chunk_rows`` at a time."""
        return zip(*(tensor.split(self.chunk_rows) for tensor in tensors), strict=True)


class _TokenLogProbs(torch.autograd.Function):
    """The log-probs and entropies of a chunked softmax, with their gradients.

    With l the log-softmax, p = exp(l), H = -sum p l: dlogp = onehot - p and dH = -p (l + H).

    A single chunk keeps p - onehot. A gradient through logp alone only scales its rows, so the
    scale is applied to the smaller factors of the matrix products instead.
    """

    @staticmethod
    def forward(
        ctx: Any, h_RD: Tensor, weight_VD: Tensor, target_R: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        logp, entropy, excess_CV = [], [], None
        for h_CD, target_C in settings.chunks((h_RD, target_R)):
            shifted_CV, excess_CV = _softmax(h_CD, weight_VD, temperature=settings.temperature)
            log_total_C = excess_CV.amax(-1).log_().neg_()  # the likeliest token has shifted 0
            logp.append(shifted_CV.gather(1, target_C[:, None])[:, 0] - log_total_C)
            if settings.with_entropy:
                entropy.append(log_total_C - shifted_CV.mul_(excess_CV).sum(-1))
            _subtract_one_hot(excess_CV, target_C)
        logp_R = torch.cat(logp)
        entropy_R = torch.cat(entropy) if settings.with_entropy else torch.zeros_like(logp_R)
        kept_RV = excess_CV if settings.differentiable and len(logp) == 1 else None
        ctx.settings = settings
        ctx.gradients = sum_of(weight_VD)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h_RD, weight_VD, target_R, logp_R, entropy_R, kept_RV)
        return logp_R, entropy_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp_R: Tensor | None, grad_entropy_R: Tensor | None) -> Any:
        settings: _Settings = ctx.settings
        gradients: GradientSum | None = ctx.gradients
        h_RD, weight_VD, target_R, logp_R, entropy_R, kept_RV = ctx.saved_tensors
        through_entropy = grad_entropy_R is not None  # None if the entropy is only reported
        grad_logp_R, grad_entropy_R = (
            torch.zeros_like(logp_R) if grad_R is None else grad_R / settings.temperature
            for grad_R in (grad_logp_R, grad_entropy_R)
        )
        grad_h, grad_weight_VD = [], None
        for h_CD, target_C, logp_C, entropy_C, grad_logp_C, grad_entropy_C in settings.chunks(
            (h_RD, target_R, logp_R, entropy_R, grad_logp_R, grad_entropy_R)
        ):
            grad_CV, scale_C1 = kept_RV, -grad_logp_C[:, None]
            if grad_CV is None:
                _, grad_CV = _softmax(h_CD, weight_VD, temperature=settings.temperature)
                _subtract_one_hot(grad_CV, target_C)
            if through_entropy:
                prob_CV = grad_CV.scatter(1, target_C[:, None], logp_C.exp()[:, None])
                slope_CV = torch.addcmul(prob_CV.xlogy(prob_CV), prob_CV, entropy_C[:, None])
                grad_CV = (grad_CV * scale_C1).addcmul_(slope_CV, -grad_entropy_C[:, None])
                scale_C1 = torch.ones_like(scale_C1)
            grad_CV = grad_CV.to(weight_VD.dtype)
            grad_h.append(((grad_CV @ weight_VD) * scale_C1).to(h_CD.dtype))
            if ctx.needs_input_grad[1]:
                scaled_CD = (h_CD * scale_C1).to(h_CD.dtype)
                if gradients is not None:
                    gradients.add_product(grad_CV, scaled_CD)
                else:
                    grad_weight_VD = _accumulate(grad_weight_VD, grad_CV.T @ scaled_CD)
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return torch.cat(grad_h), grad_weight_VD, None, None


def _softmax(h_CD: Tensor, weight_VD: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the logits minus the maximum of their row, and their softmax, (C, V) each."""
    logits_CV = F.linear(h_CD, weight_VD)
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    if temperature != 1:
        logits_CV = logits_CV.div_(temperature)
    logits_CV = logits_CV.sub_(logits_CV.amax(-1, keepdim=True))
    return logits_CV, torch.softmax(logits_CV, -1)


def _subtract_one_hot(prob_CV: Tensor, target_C: Tensor) -> None:
    minus_one = torch.tensor(-1.0, dtype=prob_CV.dtype, device=prob_CV.device)
    prob_CV.scatter_add_(1, target_C[:, None], minus_one.expand(len(target_C), 1))


def _accumulate(total: Tensor | None, part: Tensor) -> Tensor:
    """Sum over chunks in at least fp32. A single chunk is not converted."""
    if total is None:
        return part
    return total.to(torch.promote_types(part.dtype, torch.float32)).add_(part)
