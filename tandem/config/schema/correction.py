# SPDX-License-Identifier: Apache-2.0
"""``algorithm.rollout_correction.*``: what to do about rollouts of another policy than the one in
training, be it older or computed otherwise. The keys and their meanings are verl's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field

from tandem.config.schema.fields import SECTION

_KEY = "algorithm.rollout_correction"
REJECTION_OPTIONS = (
    *(f"token_k{k}" for k in (1, 2, 3)),
    *(f"seq_sum_k{k}" for k in (1, 2, 3)),
    *(f"seq_mean_k{k}" for k in (1, 2, 3)),
    *(f"seq_max_k{k}" for k in (2, 3)),
)
"""The values of ``rollout_rs``, several separated by commas."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may count: up to ``upper``, and from ``lower`` if there is one."""

    lower: float | None
    upper: float


class RolloutCorrectionConfig(BaseModel):
    """``rollout_correction.*``: weights and rejection between rollout and trainer."""

    model_config = SECTION

    bypass_mode: bool = Field(
        default=False, description="Take the rollout's log-probs as old log-probs: one pass less."
    )
    loss_type: Literal["ppo_clip", "reinforce"] = Field(
        default="ppo_clip",
        description="Loss of bypass_mode: clipped ratio to the rollout, or REINFORCE with "
        "importance weights.",
    )
    rollout_is: Literal["auto", "token", "sequence"] | None = Field(
        default="auto",
        description="Importance weights; auto: token if rollouts may lag behind, else null "
        "(verl: null).",
    )
    rollout_is_threshold: float | str = Field(
        default=2.0,
        description="Largest weight; a quoted string LOW_HIGH sets weights outside to 0 instead.",
    )
    rollout_is_batch_normalize: bool = Field(
        default=False, description="Divide weights by their mean over the batch."
    )
    rollout_rs: str | None = Field(
        default=None,
        description="Leave out what diverges, such as token_k1 or seq_mean_k3; several with "
        "commas.",
    )
    rollout_rs_threshold: float | str | None = Field(
        default=None,
        description="One bound for all of rollout_rs or one each with commas; k1: LOW_HIGH of the "
        "ratio, or HIGH for 1/HIGH_HIGH.",
    )

    def level(self, *, may_lag: bool) -> Literal["token", "sequence"] | None:
        """``rollout_is`` with ``auto`` decided; None where the ratio of the loss is the weight."""
        if self.bypass_mode and self.loss_type == "ppo_clip":
            return None
        if self.rollout_is == "auto":
            return "token" if may_lag else None
        return self.rollout_is

    @property
    def importance_bounds(self) -> Bounds:
        """``rollout_is_threshold`` read; ``lower`` only if it is given."""
        return _bounds(str(self.rollout_is_threshold))

    @property
    def rejections(self) -> tuple[tuple[str, Bounds], ...]:
        """``rollout_rs`` with the bounds of each, in order; empty without."""
        if self.rollout_rs is None:
            return ()
        options = _words(self.rollout_rs)
        texts = _words(str(self.rollout_rs_threshold))
        if len(texts) == 1:
            texts = texts * len(options)
        pairs = zip(options, texts, strict=True)
        return tuple((option, _rejection_bounds(option, text)) for option, text in pairs)


def correction_problems(config: RolloutCorrectionConfig) -> Iterator[str]:
    """Keys that cannot be read, or do not fit each other; the others hold if none is found."""
    try:
        is_readable = config.importance_bounds.upper >= 1
    except ValueError:
        is_readable = False
    if not is_readable:
        # An unquoted 0.5_2 is the number 0.52 in the grammar of overrides, as in Python.
        yield (
            f"{_KEY}.rollout_is_threshold={config.rollout_is_threshold!r}: must be a number from 1 "
            "on, or a quoted string LOW_HIGH with 0 <= LOW <= HIGH and HIGH from 1 on. "
            f"Set {_KEY}.rollout_is_threshold=2.0 or {_KEY}.rollout_is_threshold=\\'0.5_5\\'."
        )
    if config.bypass_mode and config.rollout_is_batch_normalize and config.rollout_is is not None:
        yield (
            f"{_KEY}.rollout_is_batch_normalize=True: needs the weights of the whole batch before "
            "the update, which bypass_mode does not compute. "
            f"Set {_KEY}.rollout_is_batch_normalize=False or {_KEY}.bypass_mode=False."
        )
    yield from _rejection_problems(config)


def _rejection_problems(config: RolloutCorrectionConfig) -> Iterator[str]:
    if config.rollout_rs is None:
        return
    options = _words(config.rollout_rs)
    unknown = [option for option in options if option not in REJECTION_OPTIONS]
    if unknown or not options or len(set(options)) < len(options):
        wrong = unknown[0] if unknown else config.rollout_rs
        yield (
            f"{_KEY}.rollout_rs={wrong!r}: must name each once of {', '.join(REJECTION_OPTIONS)}. "
            f"Set {_KEY}.rollout_rs=seq_mean_k1 or null."
        )
        return
    try:
        fits = bool(config.rejections)
    except ValueError:
        fits = False
    if not fits:
        yield (
            f"{_KEY}.rollout_rs_threshold={config.rollout_rs_threshold!r}: must be one positive "
            f"bound, or one for each of rollout_rs={config.rollout_rs!r}; only k1 takes LOW_HIGH "
            "with 0 < LOW <= HIGH, or HIGH from 1 on. "
            f"Set {_KEY}.rollout_rs_threshold=2.0."
        )


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _bounds(text: str) -> Bounds:
    """Of HIGH or LOW_HIGH. Raises ValueError unless 0 <= LOW <= HIGH and 0 < HIGH < inf."""
    numbers = [float(part) for part in text.split("_")]
    lower, upper = (numbers[0] if len(numbers) > 1 else None), numbers[-1]
    if len(numbers) > 2 or not (0 < upper < math.inf and 0 <= (lower or 0) <= upper):
        raise ValueError(f"{text!r} is no bound")
    return Bounds(lower, upper)


def _rejection_bounds(option: str, text: str) -> Bounds:
    """k1 has two bounds, of which logarithms are taken, the others one. Raises ValueError for
    anything else.
    """
    bounds = _bounds(text)
    if not option.endswith("_k1"):
        if bounds.lower is not None:
            raise ValueError(f"{option} takes one bound")
        return bounds
    lower = 1 / bounds.upper if bounds.lower is None else bounds.lower
    if not 0 < lower <= bounds.upper:
        raise ValueError(f"{option} keeps nothing, or has no lower bound: {text!r}")
    return Bounds(lower, bounds.upper)
