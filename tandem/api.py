# SPDX-License-Identifier: Apache-2.0
"""The Protocols of the plug-in points.

Engines are plain synchronous objects that live inside one process. The ``Runtime`` turns a call on
an engine into an awaitable. The pipeline is therefore the same program whether its engines run in
this process, behind Ray, or simulated under a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from tandem.types import (
    Completion,
    EngineWork,
    GenerationRequest,
    LossInputs,
    LossOutputs,
    LossScale,
    PackedBatch,
    SliceSpec,
    StepReport,
    UpdateReport,
)

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class Loss(Protocol):
    """A picklable function from one micro-batch to its share of the loss; see ``LossOutputs``."""

    @property
    def needs_entropy(self) -> bool:
        """Whether ``LossInputs.entropy_R`` must be computed."""
        ...

    def __call__(self, inputs: LossInputs) -> LossOutputs: ...


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of a micro-batch by one model, on the CPU.

    Attributes:
        score_R: the log-prob or the value of each response token, fp32. With
            ``PackedBatch.with_squares`` it is (R, 2): the second column has the sums of the squared
            probabilities of all tokens in the places of the response tokens.
        routes_TLK: with ``PackedBatch.with_routes``, the experts that the routers chose for each
            packed token; None for a model whose routers tandem does not compute.
    """

    score_R: Tensor
    routes_TLK: Tensor | None = None


class ReferencePolicy(Protocol):
    """A model that scores tokens: a frozen policy, a reward model, or a model in training."""

    @property
    def data_parallel_size(self) -> int:
        """The number of micro-batches computed in parallel."""
        ...

    @property
    def sequence_parallel_size(self) -> int:
        """The number of devices that share the tokens of a micro-batch."""
        ...

    def score(self, batches: Sequence[PackedBatch], temperature: float) -> list[Scores]:
        """Score the response tokens of each batch with the current weights.

        A policy returns log-probs. Other models return values and ignore ``temperature``.
        """
        ...


class TrainEngine(ReferencePolicy, Protocol):
    """A policy or a critic with its optimizer, in one process or spread over several."""

    def update(
        self, batches: Sequence[PackedBatch], loss: Loss, *, scale: LossScale, temperature: float
    ) -> UpdateReport:
        """Take one optimizer step over all micro-batches, without advancing the schedule."""
        ...

    def advance_schedule(self) -> None:
        """Advance the learning-rate schedule; called once per training step."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimizer into an existing empty folder. The caller makes the write
        atomic.
        """
        ...

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote. Raise UserError if it belongs to another model."""
        ...


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The promises of a rollout engine, which its contract suite (``tandem.testing``) checks.

    Attributes:
        shares_weights: the engine reads the weights of the trainer's model in place. Otherwise it
            has its own copy, and receives new weights through ``RolloutEngine.sink``.
        draws_by_key: the tokens of a sample depend on weights, prompt, sampling parameters and
            (seed, sample id), up to rounding of logits, and not on the batch.
        stops_within_sequences: ``advance`` respects ``max_steps``, and the weights may change
            within a sequence. Otherwise every sequence has one version.
        keeps_cache: cached keys and values survive a change of weights. Otherwise the engine
            recomputes them.
    """

    shares_weights: bool
    draws_by_key: bool
    stops_within_sequences: bool
    keeps_cache: bool = False


@dataclass(frozen=True, slots=True)
class Capacity:
    """The amount of work that a rollout engine holds at once.

    Attributes:
        num_rows: the number of sequences generated at once, if the engine batches continuously;
            None if it finishes a whole batch before it starts another.
        cache_tokens: the number of tokens that fit into the KV cache; None without a limit.
    """

    num_rows: int | None
    cache_tokens: int | None


class WeightSink(Protocol):
    """A receiver of the weights of a version: whole tensors, named as in checkpoint files."""

    def manifest(self) -> Sequence[SliceSpec]:
        """Return the tensors of a version, in the order in which they must arrive. Each spec covers
        a whole tensor and has the dtype in which the engine stores it.
        """
        ...

    def begin(self, version: int) -> None:
        """Start to receive ``version``. The engine computes nothing until ``end`` returns."""
        ...

    def take(self, name: str, tensor: Tensor) -> None:
        """Receive one tensor, which may have another dtype.

        The tensor is valid during the call only: copy it before an export such as
        ``tensor.numpy()``.
        """
        ...

    def end(self) -> None:
        """Return once all weights are loaded. Raise EngineFailure if one is missing."""
        ...


class Rollout(Protocol):
    """The pipeline's view of generation: add requests, advance, collect finished completions."""

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; compute nothing yet."""
        ...

    def forget(self, sample_ids: Sequence[int]) -> None:
        """Free what is kept of samples that have ended, whose request said ``continues``. An engine
        that keeps nothing between turns does nothing.
        """
        ...

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """Generate until at least one sequence finishes, and return all finished sequences. Return
        [] only if there is no work.

        With ``max_steps``, also stop after about that many decode steps, perhaps with []. An engine
        that stops only between sequences ignores it.
        """
        ...

    def settle(self) -> None:
        """Wait until nothing is being computed, so that the weights can be replaced in place. The
        next ``advance`` returns the sequences that finish meanwhile.
        """
        ...

    def set_weights_version(self, version: int) -> bool:
        """Use the trainer's current weights as ``version``, and tag later tokens with it.

        Unfinished sequences keep their tokens and log-probs and continue under the new weights.
        Their cached keys and values are recomputed, unless the engine keeps its cache.

        Returns:
            whether every engine uses them. False if staged weights have not arrived or one of
            several engines is generating: call again after the next ``advance``.
        """
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return the counters of the engine since its start. Each training step logs their
        increase as ``rollout/engine/NAME``.

        Any thread may call this at any time; it does not wait for ``advance``.
        """
        ...


class RolloutEngine(Rollout, Protocol):
    """A generation engine inside one process, built by ``rollout.factory``.

    Calls never overlap. A fatal failure raises EngineFailure; only ``close`` is called after it.
    """

    @property
    def facts(self) -> EngineFacts:
        """The promises of the engine."""
        ...

    @property
    def capacity(self) -> Capacity:
        """The amount of work that the engine holds at once."""
        ...

    def sink(self) -> WeightSink | None:
        """Return the receiver of new weights; None if the engine shares the trainer's.

        New weights arrive between ``settle`` and ``set_weights_version``.
        """
        ...

    def sleep(self) -> bool:
        """Free the cache and the engine's own weights on the device, unless requests are pending.
        Return whether the engine sleeps. ``add`` wakes an engine that shares weights.
        """
        ...

    def wake(self) -> None:
        """Allocate memory for the engine's own weights, which the sink then receives again. Do
        nothing if the engine is awake.
        """
        ...

    def close(self) -> None:
        """End processes and free memory; idempotent."""
        ...


class EngineFailure(RuntimeError):
    """A fatal failure of a rollout engine. The message names engine and cause in one line."""


class EngineDied(EngineFailure):
    """The end of an engine's processes, or their standstill. Another engine may be started with the
    weights in use, if ``rollout.max_engine_restarts`` allows it.
    """


class WeightStage(Protocol):
    """A staging area for weights: training continues while the rollout receives a copy."""

    def stage(self, version: int) -> None:
        """Copy the trainer's current weights as ``version``. Return once the trainer may change
        them.

        ``RolloutEngine.set_weights_version`` then switches to the version staged last.
        """
        ...


def _one_engine() -> tuple[EngineWork, ...]:
    return (EngineWork.NEXT,)


def _never() -> bool:
    return False


def _nothing_to_close() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a run.

    Attributes:
        train: the policy in training.
        rollout: the same policy, generating.
        reference: the frozen initial policy, if the run needs it.
        scorer: the model that computes old log-probs: the trainer, or a copy on its own devices.
        stage: the staging area for weights, if training continues while they are sent.
        critic, reward_model: the auxiliary models, if the run has them.
        work: returns the state of each engine behind the rollout, for the trace. A single engine
            counts as always busy.
        generates_apart: whether generation has its own devices.
        lacks_weights: returns whether the rollout lost all weights with its processes, and waits
            for new ones. ``set_weights_version`` may then repeat the version in use.
        num_rows: the number of sequences that all engines generate at once; see ``Capacity``.
        close: ends the processes that the engines have started.
    """

    train: TrainEngine
    rollout: Rollout
    reference: ReferencePolicy | None
    scorer: ReferencePolicy
    stage: WeightStage | None = None
    critic: TrainEngine | None = None
    reward_model: ReferencePolicy | None = None
    work: Callable[[], Sequence[EngineWork]] = _one_engine
    generates_apart: bool = False
    lacks_weights: Callable[[], bool] = _never
    num_rows: int | None = None
    close: Callable[[], object] = _nothing_to_close


class Runtime(Protocol):
    """Turns synchronous calls on engines into awaitables."""

    async def call(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a method of an engine in the engine's process, and raise its exceptions here."""
        ...

    async def watch(self) -> None:
        """Raise as soon as a process of the run has ended, even if no call waits for it. Never
        return.
        """
        ...

    async def close(self) -> None:
        """Release processes and threads; idempotent."""
        ...


class WorkerLost(Exception):
    """The end of a worker that ``WorkerGroup.start_again`` can replace. Its calls have ended.

    Attributes:
        rank: the rank of the worker in its group.
        failure: the error to raise if the worker is not replaced.
    """

    def __init__(self, rank: int, failure: Exception) -> None:
        super().__init__(rank, failure)
        self.rank = rank
        self.failure = failure


class WorkerGroup(Protocol):
    """The processes of one pool. Each holds one object, whose methods are called by name.

    Calls to one worker run one at a time, in the order of submission. Every wait ends with the
    results, or with a ``WorkerFailure`` that names the first cause. If the workers of a pool can be
    replaced, the end of one of them is noticed only by waits for its calls, which raise
    ``WorkerLost``.
    """

    @property
    def size(self) -> int:
        """The number of workers."""
        ...

    def submit(self, rank: int, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Start a call on worker ``rank``. Return a handle for ``gather`` and ``first``."""
        ...

    def gather(self, calls: Sequence[Any]) -> list[Any]:
        """Wait for calls to any groups of this runtime, and return their results in order."""
        ...

    def first(self, calls: Sequence[Any]) -> int:
        """Wait until a call has finished, and return the lowest index of a finished call."""
        ...

    def start_again(self, rank: int) -> None:
        """Start a process in place of the lost worker ``rank``, without waiting for it.

        Later calls go to the new worker, which builds its object first.
        """
        ...

    def until_started(self, rank: int) -> None:
        """Wait until a worker that was started again has built its object.

        Raises:
            WorkerLost: the new worker has ended too.
            UserError: it did not start in time.
        """
        ...


class MetricSink(Protocol):
    """A receiver of each step's metrics. A failing display must not stop the run."""

    def write(self, report: StepReport) -> None: ...

    def close(self) -> None: ...
