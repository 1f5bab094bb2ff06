# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding and its scaling variants, equal to transformers'.

Angles are computed from the positions in each forward pass, without a table and therefore without a
maximum position. In transformers, two variants (dynamic, longrope) change their frequencies if the
longest sequence of a batch exceeds a limit. Here sequences beyond that limit are refused, because a
result must not depend on the other sequences of the batch.

Shapes: T tokens, M heads, E head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.config.derived.model_values import wrong_value
from tandem.errors import UserError


@dataclass(frozen=True)
class LinearScaling:
    """A division of the positions by ``factor``."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK scaling: plain rotary up to ``max_position_embeddings``."""

    max_position_embeddings: int


@dataclass(frozen=True)
class Llama3Scaling:
    """The scaling of Llama 3.1.

    Low frequencies are divided by ``factor``, high ones are kept, with a ramp in between.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling:
    """The scaling of YaRN (arXiv:2309.00071). ``attention_factor`` multiplies cos and sin."""

    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int
    truncate: bool


@dataclass(frozen=True)
class LongRopeScaling:
    """The short factors of LongRoPE (arXiv:2402.13753), up to the original maximum position."""

    short_factor: tuple[float, ...]
    attention_factor: float
    original_max_position_embeddings: int


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True)
class RopeConfig:
    """A base ``theta`` and an optional scaling."""

    theta: float
    scaling: RopeScaling | None = None
    # Not in ``repr``, which checkpoints hash.
    axes: tuple[int, ...] | None = field(default=None, repr=False)
    """The axis of positions (0 time, 1 row, 2 column) that turns each frequency, (E / 2,), of
    models that see; None for models of text."""
    share: float = field(default=1.0, repr=False)
    """The share of each head's dimensions, the first ones, that is rotated."""

    def num_rotated(self, head_dim: int) -> int:
        """Return the number of a head's dimensions that are rotated."""
        return int(head_dim * self.share)


class Rotary:
    """A function from positions to the cosines and sines for ``operators.rotate``."""

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        frequencies = _inverse_frequencies(config, config.num_rotated(head_dim))
        # cos(-a) = cos(a) and sin(-a) = -sin(a): negated frequencies give the signs of rotate_half.
        self._signed_frequencies_E = torch.cat((-frequencies, frequencies))
        self._axis_E = None if config.axes is None else torch.tensor(config.axes * 2, device="cpu")
        self.frequencies = frequencies.repeat(2)
        """The angle of one position, fp32 (E,), of each rotated dimension."""
        self.scale = _attention_factor(config.scaling)
        """The factor of cosines and sines."""
        self._max_positions = _max_positions(config.scaling)

    def require_length(self, num_tokens: int) -> None:
        """Raise UserError if the scaling is not defined for a sequence of this length."""
        if self._max_positions is not None and num_tokens > self._max_positions:
            raise UserError(
                "sequence length",
                num_tokens,
                rule=f"this model's rotary scaling is defined up to {self._max_positions} tokens",
                remedy="Lower data.max_prompt_length or data.max_response_length.",
            )

    def angles(self, position_ids_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines (T, 1, E), computed in fp32 and cast to ``dtype``.

        Positions may be (T, 3), for a model that sees. Three equal ones give the bits of one.
        """
        if self._signed_frequencies_E.device != position_ids_T.device:
            self._signed_frequencies_E = self._signed_frequencies_E.to(position_ids_T.device)
        position_TE = position_ids_T[:, None]
        if position_ids_T.dim() == 2:
            assert self._axis_E is not None, "positions with three axes, and a model of text"
            if self._axis_E.device != position_ids_T.device:
                self._axis_E = self._axis_E.to(position_ids_T.device)
            position_TE = position_ids_T[:, self._axis_E]
        angles_T1E = position_TE[:, None] * self._signed_frequencies_E
        cos_T1E, sin_T1E = angles_T1E.cos(), angles_T1E.sin()
        if self.scale != 1.0:
            cos_T1E, sin_T1E = cos_T1E * self.scale, sin_T1E * self.scale
        return cos_T1E.to(dtype), sin_T1E.to(dtype)


def _inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Return fp32 (E / 2,) on the CPU, even in a meta-device context."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    match config.scaling:
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling)
        case YarnScaling() as scaling:
            return _yarn(config.theta**exponents, scaling, theta=config.theta)
        case LongRopeScaling(short_factor):
            if len(short_factor) != len(exponents):
                rule = f"must have {len(exponents)} numbers, one for each rotary frequency"
                raise wrong_value("short_factor", short_factor, rule=rule)
            factors = torch.tensor(short_factor, dtype=torch.float32, device="cpu")
            return 1.0 / (factors * config.theta**exponents)
        case _:
            return frequencies


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    length = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    ramp = (length / wavelengths - low) / (high - low)
    blended = (1 - ramp) * frequencies / scaling.factor + ramp * frequencies
    scaled = torch.where(wavelengths > length / low, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < length / high, frequencies, scaled)


def _yarn(periods: Tensor, scaling: YarnScaling, *, theta: float) -> Tensor:
    dim = 2 * periods.numel()

    def dimension_of(rotations: float) -> float:
        length = scaling.original_max_position_embeddings
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    kept = 1 - ((steps - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _attention_factor(scaling: RopeScaling | None) -> float:
    match scaling:
        case YarnScaling() | LongRopeScaling():
            return scaling.attention_factor
        case _:
            return 1.0


def _max_positions(scaling: RopeScaling | None) -> int | None:
    match scaling:
        case DynamicScaling():
            return scaling.max_position_embeddings
        case LongRopeScaling():
            return scaling.original_max_position_embeddings
        case _:
            return None
