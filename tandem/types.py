# SPDX-License-Identifier: Apache-2.0
"""The frozen values that travel between rooms. No behaviour beyond derived sizes; no torch at run
time.

Shape letters: N sequences, S segments, T packed tokens, R response tokens (those that carry loss),
n samples of one prompt. Identities: ``Prompt.uid`` is the number of the draw within the run
(monotone from 0 and never reused); ``sample_id = uid * n + k``; ``weights_version`` counts
optimizer phases (0 = the initial weights).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import chain, dropwhile, takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TokenIds = tuple[int, ...]
VALIDATION_SAMPLE_ID_BASE = 1 << 60
"""Sample ids from here on belong to validation, so that their random streams never meet those of
training.
"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One drawn prompt.

    Attributes:
        uid: number of the draw within the run.
        row: row of the data set it came from.
        token_ids: the rendered chat template, generation prompt included.
        text: the rendered chat template before tokenisation (for dumps and the report).
        data_source: routes the reward and groups validation metrics.
        ground_truth: what the reward compares with.
        extra_info: passed to the reward as it is.
        messages: the prompt as the row has it, before the chat template.

    Example:
        >>> Prompt(uid=0, row=17, token_ids=(1, 2), text="hi", data_source="openai/gsm8k",
        ground_truth="72")
    """

    uid: int
    row: int
    token_ids: TokenIds
    text: str
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    messages: Sequence[Mapping[str, Any]] | str = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. ``temperature == 0`` is greedy; ``top_k <= 0`` and ``top_p == 1``
    switch those off.

    Log-probs are always those of the temperature-scaled distribution before top-k and top-p (for
    greedy: of the unscaled one), because that is what training differentiates.
    """

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """All samples of one prompt, which share its prefill. ``sample_ids`` has one entry a sample."""

    sample_ids: tuple[int, ...]
    prompt_ids: TokenIds
    sampling: SamplingParams


class FinishReason(Enum):
    """Why generation of a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    FAILED = "failed"
    """The model's logits were not finite."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished response. ``token_ids`` includes the end-of-sequence token when there is one.

    Numbers are best ``array``s ("i" and "f"), as our engines give them: an object for every number
    takes as long to pickle and to pack as its generation.

    Attributes:
        log_probs: one float a token, under the version that drew it.
        weights_version: the one that drew the first token, and hence the oldest.
        switches: (index, version) pairs, ascending: tokens from ``index`` on are of that version.
    """

    sample_id: int
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: FinishReason
    weights_version: int
    switches: tuple[tuple[int, int], ...] = ()

    @property
    def version_runs(self) -> tuple[tuple[int, int], ...]:
        """(version, number of tokens) pairs in the order of the tokens, which they cover.

        Example:
            5 tokens, weights_version=3, switches=((2, 4),): ((3, 2), (4, 3)).
        """
        if not self.switches:
            return ((self.weights_version, len(self.token_ids)),)
        starts = ((0, self.weights_version), *self.switches)
        ends = [*(index for index, _ in self.switches), len(self.token_ids)]
        return tuple(
            (version, end - start) for (start, version), end in zip(starts, ends, strict=True)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """What dataclasses with slots do by themselves takes several times as long."""
        others = (self.finish_reason, self.weights_version, self.switches)
        return Completion, (self.sample_id, self.token_ids, self.log_probs, *others)


class EngineWork(Enum):
    """What one of the engines behind a rollout has to do."""

    NONE = "none"
    NEXT = "next"
    """It generates from the next ``advance`` on."""
    UNDER_WAY = "under way"
    """It generates, although no ``advance`` is waited for."""


class RewardStatus(Enum):
    """What became of a reward computation."""

    VALUE = "value"
    PENDING = "pending"
    """A reward model scores it with its batch."""
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """A typed outcome: ``score`` is a number only if ``status`` is VALUE, and NaN otherwise (never
    a silent 0).

    ``extra`` holds further numbers a reward returned beside ``score`` (verl: the other keys of its
    dict); ``detail`` is the one-line cause of a failure; ``prediction`` the answer that the reward
    found in the response (verl's key ``pred``), for majority votes.
    """

    status: RewardStatus
    score: float
    extra: Mapping[str, float] = field(default_factory=dict[str, float])
    detail: str = ""
    prediction: str | None = None


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """What a reward sees of a sample: plain values that cross a process boundary cheaply.

    ``num_tokens`` is the response length, ``finish_reason`` why it ended (for length shaping).
    """

    data_source: str
    solution: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    num_tokens: int

    def __reduce__(self) -> tuple[Any, ...]:
        """As ``Completion``'s."""
        others = (self.ground_truth, self.extra_info, self.num_tokens)
        return RewardRequest, (self.data_source, self.solution, *others)


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one origin: drawn by the policy, or given to it.

    Attributes:
        token_ids: the tokens.
        completion: the generation that drew exactly these tokens, with their log-probs and weights
            versions; None for given tokens, which carry no loss.
    """

    token_ids: Sequence[int]
    completion: Completion | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """All tokens of one sample in the order in which the policy saw them.

    It begins with given tokens and holds at least one completion. A trajectory of a single turn is
    one given span, the prompt, and one drawn span, the response.

    Example:
        The prompt (1, 2) is given, a call (3, 4) is drawn, its result (5,) is given and an answer
        (6, 7) is drawn: ``prompt_ids`` is (1, 2), ``response_ids`` is (3, 4, 5, 6, 7) and
        ``loss_mask`` is (True, True, False, True, True).

    Raises:
        ValueError: the first span is drawn, or no span is.
    """

    sample_id: int
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        if not self.spans or self.spans[0].completion is not None or not self.completions:
            raise ValueError(
                f"sample {self.sample_id}: the first span must be given, and one must be drawn"
            )

    @classmethod
    def of_single_turn(cls, prompt_ids: TokenIds, completion: Completion) -> Trajectory:
        """Return the trajectory of a prompt and the response to it."""
        spans = (Span(prompt_ids), Span(completion.token_ids, completion))
        return cls(completion.sample_id, spans)

    @property
    def completions(self) -> tuple[Completion, ...]:
        """The completions of the drawn spans, in order."""
        return tuple(span.completion for span in self.spans if span.completion is not None)

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The tokens given before the first drawn one."""
        return _joined(tuple(takewhile(_is_given, self.spans)))

    @property
    def response_spans(self) -> tuple[Span, ...]:
        """The spans behind the prompt: the first drawn span and all that follow it."""
        return tuple(dropwhile(_is_given, self.spans))

    @property
    def response_ids(self) -> Sequence[int]:
        """The tokens behind the prompt, drawn and given."""
        return _joined(self.response_spans)

    @property
    def loss_mask(self) -> tuple[bool, ...] | None:
        """Whether each token of ``response_ids`` was drawn; None if all of them were."""
        spans = self.response_spans
        if all(span.completion is not None for span in spans):
            return None
        drawn = ((span.completion is not None, len(span.token_ids)) for span in spans)
        return tuple(flag for flag, length in drawn for _ in range(length))

    @property
    def num_drawn_tokens(self) -> int:
        """The number of tokens that the policy drew."""
        return sum(len(completion.token_ids) for completion in self.completions)


def _is_given(span: Span) -> bool:
    return span.completion is None


def _joined(spans: tuple[Span, ...]) -> Sequence[int]:
    if len(spans) == 1:
        return spans[0].token_ids
    return array("i", chain.from_iterable(span.token_ids for span in spans))


@dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory with the text of its drawn tokens and its reward."""

    trajectory: Trajectory
    text: str
    reward: RewardOutcome


@dataclass(frozen=True, slots=True)
class Group:
    """The n samples of one prompt, in the order of their sample ids.

    Attributes:
        prompt: the prompt.
        samples: the samples, of which a reward model may still have to score all.
        baseline: the greedy answer to the same prompt, for ``remax`` only.
        generated_s: when the last sample was generated, in seconds by the clock of the run.
    """

    prompt: Prompt
    samples: tuple[Sample, ...]
    baseline: Sample | None = None
    generated_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Segments:
    """How T packed tokens attend, as S segments; int64 tensors of shape (S,) on the CPU.

    Token i of segment s attends to the whole of its prefix (``prefix_start .. + prefix_length``,
    another segment of the same batch, or without gradients keys behind its T; length 0 if it has
    none) and to tokens 0..i of s. Segments tile 0..T in order. A prompt shared by its samples is
    one segment and each response is another one that names it as prefix.

    Example:
        prompt of 3 tokens with responses of 2 and 4, whose last tokens predict nothing and are left
        out: start [0, 3, 4], length [3, 1, 3], prefix_start [0, 0, 0], prefix_length [0, 3, 3].
    """

    start_S: Tensor
    length_S: Tensor
    prefix_start_S: Tensor
    prefix_length_S: Tensor


@dataclass(frozen=True, slots=True)
class LossColumns:
    """Per response token, fp32 (R,). Absent columns are None: no old log-probs when strictly
    on-policy (the loss then uses the current ones, detached), no reference without KL.

    Attributes:
        values_R, returns_R: for a critic's loss: its values before the update, and what it is to
            predict.
        weights_R: importance weights that were computed before the update.
        rollout_logp_R: of the policy that sampled the tokens, where the loss compares it with the
            current one.
        lag_R: int64, weights versions between those two; only if it can be above 0.
    """

    advantages_R: Tensor
    old_logp_R: Tensor | None = None
    ref_logp_R: Tensor | None = None
    weights_R: Tensor | None = None
    rollout_logp_R: Tensor | None = None
    lag_R: Tensor | None = None
    values_R: Tensor | None = None
    returns_R: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> LossColumns:
        """Every column that is there through ``function``."""
        present = ((f.name, getattr(self, f.name)) for f in fields(self))
        return LossColumns(
            **{name: function(column) for name, column in present if column is not None}
        )


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch: N sequences packed into T tokens without padding, R of them carrying loss.

    Attributes:
        token_ids_T, position_ids_T: int64 (T,); positions restart in each sequence (a response
        continues its prompt's).
        segments: the attention structure.
        source_R: index into T of the token whose hidden state predicts response token r.
        target_R: id of response token r.
        sequence_R: which of the N sequences it belongs to, ascending.
        num_sequences: N.
        columns: what the loss needs beside log-probs, None for a forward pass only.
    """

    token_ids_T: Tensor
    position_ids_T: Tensor
    segments: Segments
    source_R: Tensor
    target_R: Tensor
    sequence_R: Tensor
    num_sequences: int
    columns: LossColumns | None = None


@dataclass(frozen=True, slots=True)
class LossScale:
    """Global denominators of one optimizer step, over all micro-batches and ranks, so that the
    gradient does not depend on how the mini-batch was cut."""

    num_tokens: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss sees of one micro-batch. ``score_R`` is what the model says of its response
    tokens: a policy's log-probs, a critic's values. ``entropy_R`` is None unless the loss asked for
    it."""

    score_R: Tensor
    entropy_R: Tensor | None
    sequence_R: Tensor
    num_sequences: int
    columns: LossColumns | None
    scale: LossScale


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """``loss`` is a scalar; every metric is a detached scalar already divided by its global
    denominator, so that loss and metrics of the micro-batches of one optimizer step simply add
    up."""

    loss: Tensor
    metrics: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One optimizer step. ``skipped`` is set when loss or gradient was not finite and no step was
    taken.
    """

    metrics: Mapping[str, float]
    grad_norm: float
    learning_rate: float
    skipped: bool


@dataclass(frozen=True, slots=True)
class SliceSpec:
    """Where one process's part of a named tensor lies in the whole: a box, one entry a dimension.

    ``shape`` is the whole tensor's, ``offset`` and ``size`` the box's. Plain values, picklable.

    Example:
        rows 2 and 3 of a matrix of 4 rows: shape (4, 8), offset (2, 0), size (2, 8).
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeldSlice:
    """A slice together with its storage: ``tensor`` is a view of shape ``spec.size``, in use."""

    spec: SliceSpec
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class StepReport:
    """Everything logged for one training step (step 0: validation before training)."""

    step: int
    metrics: Mapping[str, float]
