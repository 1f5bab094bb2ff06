# SPDX-License-Identifier: Apache-2.0
"""``algorithm.rollout_correction.*``: the correction of rollouts whose policy differs from the one
in training, because it is older or because another engine computed it. Keys and meanings are
verl's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from tandem.config.schema.fields import Section, read_if
from tandem.errors import UserError

_KEY = "algorithm.rollout_correction"
_WEIGHTS = (
    "importance_level!=null: no importance weights are applied; see rollout_is and bypass_mode"
)
REJECTION_OPTIONS = (
    *(f"token_k{k}" for k in (1, 2, 3)),
    *(f"seq_sum_k{k}" for k in (1, 2, 3)),
    *(f"seq_mean_k{k}" for k in (1, 2, 3)),
    *(f"seq_max_k{k}" for k in (2, 3)),
)
"""The measures that ``rollout_rs`` may name."""
NAMES_OF_0_6 = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""The values of ``rollout_rs`` in verl 0.6, and what they are called since."""
VETO = "seq_max_k1"
"""The measure of ``rollout_token_veto_threshold``: the largest k1 of a sequence."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """An interval; without a lower bound if ``lower`` is None."""

    lower: float | None
    upper: float


class RolloutCorrectionConfig(Section):
    """``rollout_correction.*``: importance weights and rejection."""

    bypass_mode: bool = Field(
        default=False,
        description="Use the log-probs of the rollout as old log-probs, which saves one forward "
        "pass.",
    )
    loss_type: Literal["ppo_clip", "reinforce"] = Field(
        default="ppo_clip",
        description="Loss with bypass_mode. ppo_clip: the clipped ratio to the rollout policy; "
        "reinforce: REINFORCE with importance weights.",
        json_schema_extra=read_if("bypass_mode=True"),
    )
    use_policy_gradient: bool = Field(
        default=False,
        description="The name of loss_type=reinforce in verl 0.6.",
        json_schema_extra=read_if("bypass_mode=True"),
    )
    rollout_is: Literal["auto", "token", "sequence"] | None = Field(
        default="auto",
        description="Level of importance weights. auto: token if rollouts may lag behind or are "
        "quantized, else null (verl: null).",
    )
    rollout_is_threshold: float | str = Field(
        default=2.0,
        description="Upper bound of importance weights, which are truncated to it. A quoted string "
        "LOW_HIGH sets weights outside of these bounds to 0 instead.",
        json_schema_extra=read_if(_WEIGHTS),
    )
    rollout_is_batch_normalize: bool = Field(
        default=False,
        description="Divide importance weights by their mean over the batch. With bypass_mode, "
        "over the mini-batch, which the policy then scores before each optimizer step.",
        json_schema_extra=read_if(_WEIGHTS),
    )
    rollout_rs: str | None = Field(
        default=None,
        description="Measure of divergence by which tokens or sequences are rejected, such as "
        "token_k1 or seq_mean_k3; several are separated by commas. The names of verl 0.6, token, "
        "sequence and geometric, mean token_k1, seq_sum_k1 and seq_mean_k1.",
    )
    rollout_rs_threshold: float | str | None = Field(
        default=None,
        description="Bound of rollout_rs: one for all of its measures, or one for each, separated "
        "by commas. For k1: bounds LOW_HIGH of the ratio, or HIGH, which means 1/HIGH_HIGH.",
        json_schema_extra=read_if("rollout_rs!=null"),
    )

    rollout_rs_threshold_lower: float | None = Field(
        default=None,
        gt=0,
        description="Lower bound with the names of verl 0.6 in rollout_rs. With them, bounds are "
        "those of the ratio of trainer to rollout, the inverse of k1's. null: the inverse of "
        "rollout_rs_threshold.",
        json_schema_extra=read_if("rollout_rs=token|sequence|geometric"),
    )
    rollout_token_veto_threshold: float | None = Field(
        default=None,
        gt=0,
        description="Reject a sequence with a token whose probability under the trainer is less "
        "than this times that under the rollout (verl 0.6).",
    )

    @property
    def reinforces(self) -> bool:
        """Whether REINFORCE replaces the policy loss."""
        return self.bypass_mode and (self.loss_type == "reinforce" or self.use_policy_gradient)

    @property
    def rejects(self) -> bool:
        """Whether tokens or sequences may be rejected."""
        return self.rollout_rs is not None or self.rollout_token_veto_threshold is not None

    def level(self, *, may_differ: bool) -> Literal["token", "sequence"] | None:
        """Return ``rollout_is`` with ``auto`` resolved.

        Args:
            may_differ: whether the rollout's policy is older than the trainer's, or quantized.

        None also in ``bypass_mode`` with ``ppo_clip``, where the ratio in the loss is the weight.
        """
        if self.bypass_mode and not self.reinforces:
            return None
        if self.rollout_is == "auto":
            return "token" if may_differ else None
        return self.rollout_is

    @property
    def importance_bounds(self) -> Bounds:
        """The bounds in ``rollout_is_threshold``; ``lower`` is None for a single number."""
        return _bounds(str(self.rollout_is_threshold))

    @property
    def rejections(self) -> tuple[tuple[str, Bounds], ...]:
        """The measures by which tokens and sequences are rejected, with their bounds, in order."""
        if self.rollout_token_veto_threshold is None:
            return self._listed_rejections
        veto = (VETO, Bounds(None, -math.log(self.rollout_token_veto_threshold)))
        return (*self._listed_rejections, veto)

    @property
    def _listed_rejections(self) -> tuple[tuple[str, Bounds], ...]:
        """The measures of ``rollout_rs`` with their bounds, in order; empty if it is null."""
        if self.rollout_rs is None:
            return ()
        if self.rollout_rs in NAMES_OF_0_6:
            return ((NAMES_OF_0_6[self.rollout_rs], self._bounds_of_0_6),)
        options = _words(self.rollout_rs)
        texts = _words(str(self.rollout_rs_threshold))
        if len(texts) == 1:
            texts = texts * len(options)
        pairs = zip(options, texts, strict=True)
        return tuple((option, _rejection_bounds(option, text)) for option, text in pairs)

    @property
    def _bounds_of_0_6(self) -> Bounds:
        """The bounds of verl 0.6 as bounds of the ratio of rollout to trainer.

        Without a threshold of its own, rejection has that of the importance weights.
        """
        upper = self.rollout_rs_threshold
        upper = float(self.rollout_is_threshold if upper is None else upper)
        lower = self.rollout_rs_threshold_lower
        lower = 1 / upper if lower is None else lower
        if not 0 < lower <= upper < math.inf:
            raise ValueError(f"{lower} to {upper} is no range")
        return Bounds(1 / upper, 1 / lower)


def correction_errors(config: RolloutCorrectionConfig) -> Iterator[UserError]:
    """Yield an error for each key that cannot be parsed or contradicts another.

    If there is none, the properties of ``config`` can be read.
    """
    try:
        is_readable = config.importance_bounds.upper >= 1
    except ValueError:
        is_readable = False
    if not is_readable:
        # An unquoted 0.5_2 is the number 0.52 in the grammar of overrides, as in Python.
        key = f"{_KEY}.rollout_is_threshold"
        yield UserError(
            key,
            config.rollout_is_threshold,
            rule="must be a number of at least 1, or a quoted string LOW_HIGH with 0 <= LOW <= "
            "HIGH and HIGH of at least 1",
            remedy=f"Set {key}=2.0 or {key}=\\'0.5_5\\'.",
        )
    yield from _rejection_errors(config)


def _rejection_errors(config: RolloutCorrectionConfig) -> Iterator[UserError]:
    if config.rollout_rs is None:
        return
    options = _words(config.rollout_rs)
    known = (*NAMES_OF_0_6,) if config.rollout_rs in NAMES_OF_0_6 else REJECTION_OPTIONS
    unknown = [option for option in options if option not in known]
    if unknown or not options or len(set(options)) < len(options):
        key = f"{_KEY}.rollout_rs"
        yield UserError(
            key,
            unknown[0] if unknown else config.rollout_rs,
            rule=f"must list some of {', '.join(REJECTION_OPTIONS)}, each once",
            remedy=f"Set {key}=seq_mean_k1 or null.",
        )
        return
    try:
        fits = bool(config.rejections)
    except (ValueError, ZeroDivisionError):
        fits = False
    if not fits and config.rollout_rs in NAMES_OF_0_6:
        key = f"{_KEY}.rollout_rs_threshold"
        yield UserError(
            key,
            config.rollout_rs_threshold,
            rule="must be one positive bound, not below rollout_rs_threshold_lower="
            f"{config.rollout_rs_threshold_lower}, with rollout_rs={config.rollout_rs!r}",
            remedy=f"Set {key}=1.01 or another bound, or {_KEY}.rollout_rs_threshold_lower=null.",
        )
    elif not fits:
        key = f"{_KEY}.rollout_rs_threshold"
        yield UserError(
            key,
            config.rollout_rs_threshold,
            rule=f"must be one positive bound, or one for each of rollout_rs={config.rollout_rs!r}"
            "; only k1 takes LOW_HIGH with 0 < LOW <= HIGH, or HIGH of at least 1",
            remedy=f"Set {key}=2.0.",
        )


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _bounds(text: str) -> Bounds:
    """Parse HIGH or LOW_HIGH. Raise ValueError unless 0 <= LOW <= HIGH and 0 < HIGH < inf."""
    numbers = [float(part) for part in text.split("_")]
    lower, upper = (numbers[0] if len(numbers) > 1 else None), numbers[-1]
    if len(numbers) > 2 or not (0 < upper < math.inf and 0 <= (lower or 0) <= upper):
        raise ValueError(f"{text!r} is no bound")
    return Bounds(lower, upper)


def _rejection_bounds(option: str, text: str) -> Bounds:
    """Parse the bounds of a measure. Raise ValueError unless they fit it.

    k1 has two positive bounds, because logarithms are taken. The other measures have one.
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
