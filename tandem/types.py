# SPDX-License-Identifier: Apache-2.0
"""The immutable values that rooms exchange. Importing them does not import torch.

Shape letters: N sequences, S segments, T packed tokens, R loss tokens (of a policy: the tokens that
it drew), n samples of one prompt. A name ends in the letters of its tensor's shape.

Identifiers: ``Prompt.uid`` numbers the drawn prompts of a run from 0 and is never reused.
``sample_id = uid * n + k`` identifies sample k of that prompt. A weights version counts training
steps; the initial weights are version 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import chain, dropwhile, takewhile
from typing import TYPE_CHECKING, Any

from tandem.pictures import Picture

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TokenIds = tuple[int, ...]
VALIDATION_SAMPLE_ID_BASE = 1 << 60
"""The first sample id of validation. Training ids are smaller, so the random streams differ."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt drawn from the data set.

    Attributes:
        uid: the number of the draw within the run.
        row: its row in the data set.
        token_ids: the tokens of ``text``.
        text: the rendered chat template with its generation prompt.
        data_source: the name that selects the reward and groups the validation metrics.
        ground_truth: the value that the reward compares the response with.
        extra_info: further columns of the row, passed to the reward unchanged.
        messages: the prompt before the chat template, as the row holds it.
        agent: the agent that answers it; "" for a single turn.
        pictures: the pictures that its tokens name, in their order.
    """

    uid: int
    row: int
    token_ids: TokenIds
    text: str
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    messages: Sequence[Mapping[str, Any]] | str = ()
    agent: str = ""
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of sampling.

    ``temperature == 0`` is greedy decoding; ``top_k <= 0`` and ``top_p == 1`` switch these filters
    off. Log-probs come from the temperature-scaled distribution before top-k and top-p, because
    training differentiates that distribution. Greedy decoding does not scale them.

    Attributes:
        ignore_eos: whether generation goes on after an end-of-sequence token.
    """

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for all samples of one prompt, which share its prefill.

    Attributes:
        first_index: the number of tokens at the end of ``prompt_ids`` that belong to the response:
            earlier turns of the sample. Random numbers go on behind them, so none is used twice.
        continues: whether the caller may ask for another turn of a sample when one is finished.
        pictures: the pictures that the tokens of the prompt name.
    """

    sample_ids: tuple[int, ...]
    prompt_ids: TokenIds
    sampling: SamplingParams
    first_index: int = 0
    continues: bool = False
    pictures: tuple[Picture, ...] = ()


class FinishReason(Enum):
    """The reason why the generation of a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    FAILED = "failed"
    """The model's logits were not finite."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished response of a rollout engine.

    ``token_ids`` and ``log_probs`` should be ``array``s ("i" and "f"): lists are slow to pickle.

    Attributes:
        sample_id: the id of the sample.
        token_ids: the drawn tokens, with the end-of-sequence token if one was drawn.
        log_probs: the log-prob of each token under the weights version that drew it.
        weights_version: the version that drew the first token; no token has an older one.
        switches: (index, version) pairs in ascending order: that version drew the tokens from
            ``index`` on.
        routes: the experts of all tokens but the last, an array (tokens, layers, experts), or None.
    """

    sample_id: int
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: FinishReason
    weights_version: int
    switches: tuple[tuple[int, int], ...] = ()
    routes: Any = None

    @property
    def version_runs(self) -> tuple[tuple[int, int], ...]:
        """The (version, number of tokens) pairs that cover the tokens, in their order.

        Example: 5 tokens, weights_version=3, switches=((2, 4),): ((3, 2), (4, 3)).
        """
        if not self.switches:
            return ((self.weights_version, len(self.token_ids)),)
        starts = ((0, self.weights_version), *self.switches)
        ends = [*(index for index, _ in self.switches), len(self.token_ids)]
        runs = zip(starts, ends, strict=True)
        return tuple((version, end - start) for (start, version), end in runs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Several times faster than the default of dataclasses with slots.
        others = (self.finish_reason, self.weights_version, self.switches, self.routes)
        return Completion, (self.sample_id, self.token_ids, self.log_probs, *others)


class EngineWork(Enum):
    """The state of one engine behind a rollout."""

    NONE = "none"
    NEXT = "next"
    """The engine will generate in the next ``advance``."""
    UNDER_WAY = "under way"
    """The engine is generating, although no ``advance`` is awaited."""


class RewardStatus(Enum):
    """The state of a reward computation."""

    VALUE = "value"
    PENDING = "pending"
    """A reward model has yet to score the sample."""
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """The outcome of a reward computation. A failure is never a silent score of 0.

    Attributes:
        status: whether there is a score, and if not, why.
        score: the score if ``status`` is VALUE, else NaN.
        extra: the other numbers that the reward function returned, and the scores of its parts.
        detail: the cause of a failure in one line.
        prediction: the answer found in the response, for majority votes; verl's key ``pred``.
        texts: the values that the reward function returned and that are not numbers, as text.
    """

    status: RewardStatus
    score: float
    extra: Mapping[str, float] = field(default_factory=dict[str, float])
    detail: str = ""
    prediction: str | None = None
    texts: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """The arguments of a reward: plain values that are cheap to pickle.

    Attributes:
        data_source, ground_truth, extra_info: as in ``Prompt``.
        solution: the text of the response.
        num_tokens: the length of the response, for the penalty of overlong responses.
        prompt: the prompt as the row holds it: messages, or text.
    """

    data_source: str
    solution: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    num_tokens: int
    prompt: Sequence[Mapping[str, Any]] | str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        others = (self.ground_truth, self.extra_info, self.num_tokens, self.prompt)
        return RewardRequest, (self.data_source, self.solution, *others)


class ToolStatus(Enum):
    """The outcome of a call of a tool. Only FAILED is the fault of the environment."""

    OK = "ok"
    MODEL_ERROR = "model_error"
    TIMEOUT = "timeout"
    LIMIT = "limit"
    FAILED = "failed"


class EpisodeEnd(Enum):
    """The reason why an episode ended; DONE if its environment ended it."""

    ANSWER = "answer"
    DONE = "done"
    TURNS = "turns"
    LENGTH = "length"
    DEADLINE = "deadline"
    FAILED = "failed"

    @property
    def is_fault(self) -> bool:
        """Whether the episode is no evidence about the policy, so that it has no reward."""
        return self in (EpisodeEnd.DEADLINE, EpisodeEnd.FAILED)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a turn asks for; ``arguments`` is an object in JSON."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """A turn of the policy as its environment sees it.

    ``text`` is without calls; ``malformed`` has a line for each part that looked like a call.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """The answer of an environment to a turn.

    Attributes:
        messages: the messages that the policy reads next.
        done: whether the environment ends the episode.
        rewards: the rewards of the turn, if tools or the environment give any.
        statuses: the outcome of each call, with one entry for each malformed call.
        detail: the cause in one line if a status is FAILED.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    done: bool = False
    rewards: tuple[float, ...] = ()
    statuses: tuple[ToolStatus, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """The course of an episode beside its tokens.

    Attributes:
        detail: the cause of a failure in one line.
        messages: all but the prompt.
        rewards, statuses: as in ``Observation``, of all turns.
        num_turns: the number of turns as verl counts them: of policy and environment, and 1.
        waits_s, forks: the seconds of each wait for the environment, and the reason of each fork.
        outcome: the reward that an agent gave itself; None if the reward function decides.
    """

    end: EpisodeEnd
    detail: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    rewards: tuple[float, ...] = ()
    statuses: tuple[ToolStatus, ...] = ()
    num_turns: int = 2
    waits_s: tuple[float, ...] = ()
    forks: tuple[str, ...] = ()
    outcome: RewardOutcome | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one origin: drawn by the policy, or given to it.

    Attributes:
        completion: the completion with exactly these tokens; None for given tokens.
    """

    token_ids: Sequence[int]
    completion: Completion | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """All tokens of one sample, in order.

    It begins with given tokens and holds a completion. A single turn has two spans and no record.

    Attributes:
        parents: the index of the span before each one, -1 for none; () if each follows the last.
            Two spans with one parent are a fork (``data.span_tree``).

    Example:
        The prompt (1, 2) is given, a call (3, 4) is drawn, its result (5,) is given and an answer
        (6, 7) is drawn: ``prompt_ids`` is (1, 2), ``response_ids`` is (3, 4, 5, 6, 7) and
        ``loss_mask`` is (True, True, False, True, True).

    Raises:
        ValueError: the first span is drawn, or none is.
    """

    sample_id: int
    spans: tuple[Span, ...]
    episode: EpisodeRecord | None = None
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.spans or self.spans[0].completion is not None or not self.completions:
            raise ValueError(
                f"sample {self.sample_id}: the first span must be given, and a later one drawn"
            )

    @classmethod
    def of_single_turn(cls, prompt_ids: TokenIds, completion: Completion) -> Trajectory:
        """Return the trajectory of a prompt and its response."""
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
        """The first drawn span and all spans after it."""
        return tuple(dropwhile(_is_given, self.spans))

    @property
    def response_ids(self) -> Sequence[int]:
        """The tokens after the prompt, drawn and given."""
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
        baseline: the greedy response to the same prompt, for ``remax`` only.
        generated_s: the time when the last sample was finished, in seconds of the run's clock.
    """

    prompt: Prompt
    samples: tuple[Sample, ...]
    baseline: Sample | None = None
    generated_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Segments:
    """The attention structure of T packed tokens: S segments that tile 0..T in order.

    Token i of a segment attends to tokens 0..i of that segment and to its whole prefix. A prompt
    that several samples share is one segment, and each response is a segment with the prompt as
    prefix. Without gradients, a prefix may also be a range of cached keys after the T tokens.

    Attributes:
        start_S, length_S: the range of each segment, int64 on the CPU.
        prefix_start_S, prefix_length_S: the range of each prefix, int64 on the CPU; length 0
            without a prefix.

    Example: a prompt of 3 tokens has responses of 2 and 4 tokens. The last of a response predicts
        nothing and is left out: start [0, 3, 4], length [3, 1, 3], prefix_start [0, 0, 0],
        prefix_length [0, 3, 3].
    """

    start_S: Tensor
    length_S: Tensor
    prefix_start_S: Tensor
    prefix_length_S: Tensor


@dataclass(frozen=True, slots=True)
class LossColumns:
    """The inputs of a loss for each loss token, fp32 (R,); None for those that it does not read.

    Attributes:
        old_logp_R: the log-probs before the update; None if strictly on-policy, when the loss uses
            the current log-probs, detached.
        ref_logp_R: the log-probs under the reference; None without KL.
        weights_R: the importance weights, if they were computed before the update.
        rollout_logp_R: the log-probs under the policy that drew the tokens, if the loss compares
            that policy with the current one.
        lag_R: the number of weights versions between those two policies, int64; None if it is
            always 0.
        values_R, returns_R: the critic's values before the update, and the returns it learns.
        marked_R: whether the loss treats a token apart, bool; None for a loss that marks none.
    """

    advantages_R: Tensor
    old_logp_R: Tensor | None = None
    ref_logp_R: Tensor | None = None
    weights_R: Tensor | None = None
    rollout_logp_R: Tensor | None = None
    lag_R: Tensor | None = None
    values_R: Tensor | None = None
    returns_R: Tensor | None = None
    marked_R: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> LossColumns:
        """Return columns with ``function`` applied to each column that is not None."""
        present = ((f.name, getattr(self, f.name)) for f in fields(self))
        mapped = {name: function(column) for name, column in present if column is not None}
        return LossColumns(**mapped)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A micro-batch: N sequences packed into T tokens without padding, with R loss tokens.

    Attributes:
        token_ids_T: the tokens, int64.
        position_ids_T: their positions, int64, from 0; a response continues those of its prompt.
        source_R: the index into T of the token whose hidden state predicts loss token r, int64.
        target_R: the id of loss token r, int64.
        sequence_R: the index of its sequence, int64, ascending.
        num_sequences: N.
        columns: the inputs of the loss; None for a forward pass only.
        with_squares, with_routes: what a scoring pass returns beside the scores: see ``Scores``.
        pictures: the pictures that its tokens name; positions do not know of them yet.
        routes_TLK: the experts that each token is sent to, by layer; None lets routers choose.
    """

    token_ids_T: Tensor
    position_ids_T: Tensor
    segments: Segments
    source_R: Tensor
    target_R: Tensor
    sequence_R: Tensor
    num_sequences: int
    columns: LossColumns | None = None
    with_squares: bool = False
    with_routes: bool = False
    pictures: tuple[Picture, ...] = ()
    routes_TLK: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossScale:
    """The denominators of one optimizer step over all its micro-batches and ranks.

    They make the gradient independent of the split into micro-batches. They count every drawn token
    and sequence whose reward has a value, also those that are rejected or skipped: the gradient
    does not grow with the share that is rejected, and is the same if the loss itself rejects.
    """

    num_tokens: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The inputs of a loss for one micro-batch.

    Attributes:
        score_R: the log-probs of a policy or the values of a critic, differentiable.
        entropy_R: the entropy of the policy at each token, if ``Loss.needs_entropy``.
        sequence_R, num_sequences, columns: as in ``PackedBatch``.
        kept_R: whether rejection by the loss keeps a token, bool; None if all tokens are kept.
    """

    score_R: Tensor
    entropy_R: Tensor | None
    sequence_R: Tensor
    num_sequences: int
    columns: LossColumns | None
    scale: LossScale
    kept_R: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """The share of one micro-batch in the loss and the metrics of an optimizer step.

    Each is a scalar, already divided by its global denominator: the shares of the micro-batches add
    up. Metrics are detached.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The report of one optimizer step.

    Attributes:
        metrics, grad_norm: the metrics of the loss, and the norm of the gradient before clipping.
        skipped: whether the step was skipped because loss or gradient was not finite.
    """

    metrics: Mapping[str, float]
    grad_norm: float
    learning_rate: float
    skipped: bool


@dataclass(frozen=True, slots=True)
class SliceSpec:
    """The region of a named tensor that one process holds.

    Attributes:
        shape: the shape of the whole tensor.
        offset, size: the first index and the shape of the region.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeldSlice:
    """A region with its storage: a view of the weights in use, of shape ``spec.size``."""

    spec: SliceSpec
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class StepReport:
    """The metrics logged for a training step; step 0 is the validation before training."""

    step: int
    metrics: Mapping[str, float]
