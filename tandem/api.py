# SPDX-License-Identifier: Apache-2.0
"""The Protocols of the plug-in points.

Engines are plain synchronous objects that live inside one process. The ``Runtime`` turns a call on
one of them into an awaitable, so that the pipeline is the same program whether its engines are in
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


class ReferencePolicy(Protocol):
    """A model that scores tokens: a frozen policy, a reward model, or a model in training."""

    @property
    def data_parallel_size(self) -> int:
        """The number of micro-batches computed at the same time."""
        ...

    @property
    def sequence_parallel_size(self) -> int:
        """The number of devices that share the tokens of a micro-batch."""
        ...

    def score(self, batches: Sequence[PackedBatch], temperature: float) -> list[Tensor]:
        """Score the response tokens with the current weights: fp32 (R,) a batch, on the CPU.

        A policy's scores are log-probs. Other models' are values, which ignore ``temperature``.
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
        """Advance the learning-rate schedule. Called once a training step."""
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
        shares_weights: the engine computes with the weights of the model that it was built with,
            in their storage. Otherwise it has weights of its own, and takes new ones through
            ``RolloutEngine.sink``.
        draws_by_key: the tokens of a sample depend on weights, prompt, sampling parameters and
            (seed, sample id), up to rounding of logits, and not on the batch.
        stops_within_sequences: ``advance`` heeds ``max_steps``, and new weights come into use
            within sequences. Otherwise every sequence has one version.
        keeps_cache: cached keys and values stay when new weights come into use. Otherwise the
            engine computes them again.
    """

    shares_weights: bool
    draws_by_key: bool
    stops_within_sequences: bool
    keeps_cache: bool = False


@dataclass(frozen=True, slots=True)
class Capacity:
    """The amount of work that a rollout engine holds at once.

    Attributes:
        num_rows: sequences generated at once, each of which makes room for another when it ends.
            None where none does, because batches are generated to their ends.
        cache_tokens: tokens whose keys and values fit into the cache; None without a bound.
    """

    num_rows: int | None
    cache_tokens: int | None


class WeightSink(Protocol):
    """Takes the weights of a version, as whole tensors under their names in checkpoint files."""

    def manifest(self) -> Sequence[SliceSpec]:
        """Return the tensors that make up a version, in the order in which they must come. Each
        spec is of a whole tensor; its dtype is the one that the engine keeps.
        """
        ...

    def begin(self, version: int) -> None:
        """Begin to take ``version``. The engine computes nothing until ``end`` returns."""
        ...

    def take(self, name: str, tensor: Tensor) -> None:
        """Take one tensor, which may have another dtype.

        The tensor is valid only during the call. Its storage is freed afterwards, so that an export
        such as ``tensor.numpy()`` needs a copy first.
        """
        ...

    def end(self) -> None:
        """Return once all weights are loaded. Raise EngineFailure if one is missing."""
        ...


class Rollout(Protocol):
    """Generation as the pipeline drives it: add work, advance, collect what finished."""

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests. Cheap; nothing is computed yet."""
        ...

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """Generate until at least one sequence finishes, and return all that did. Return [] only
        if there is no work.

        With ``max_steps`` also stop after about so many decode steps, perhaps with []. An engine
        that only stops between sequences ignores it.
        """
        ...

    def settle(self) -> None:
        """Return once nothing is being computed, so that weights may be replaced in place. The next
        ``advance`` returns the sequences that finish meanwhile.
        """
        ...

    def set_weights_version(self, version: int) -> bool:
        """Use the trainer's weights in their present state as ``version``, and tag later tokens
        with it.

        Unfinished sequences keep their tokens and log-probs and continue under the new weights.
        Their cached keys and values are computed again, unless the engine keeps its cache.

        Returns:
            whether all of the engine uses them. Otherwise, because staged weights have not arrived
            or one of several engines is generating, the caller asks again after the next
            ``advance``.
        """
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return counters of the engine since its start, by name. A training step logs the growth
        of each as ``rollout/engine/NAME``.

        Any thread may call this at any time. It does not wait for ``advance``.
        """
        ...


class RolloutEngine(Rollout, Protocol):
    """A generation engine of one process, driven from outside. ``rollout.factory`` builds it.

    Calls come one at a time. A failure that the engine cannot recover from raises EngineFailure,
    after which only ``close`` is called.
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
        """Return where the engine takes weights of its own; None if it shares the model's.

        New weights come between ``settle`` and ``set_weights_version``, which names them.
        """
        ...

    def sleep(self) -> bool:
        """Free the memory of the device, unless there is something to generate: the cache, and
        weights of the engine's own. Return whether the engine sleeps. ``add`` ends the sleep of an
        engine that shares weights.
        """
        ...

    def wake(self) -> None:
        """Take memory back for weights of the engine's own, which the sink then receives anew. Does
        nothing in an engine that is awake.
        """
        ...

    def close(self) -> None:
        """End processes and free memory; idempotent."""
        ...


class EngineFailure(RuntimeError):
    """A rollout engine cannot go on. The message names the engine and the cause in one line."""


class WeightStage(Protocol):
    """Lets training continue while the rollout takes new weights."""

    def stage(self, version: int) -> None:
        """Keep the trainer's weights in their present state as ``version``. Return once the trainer
        may change them.

        ``RolloutEngine.set_weights_version`` then brings the version that was staged last into use.
        """
        ...


def _one_engine() -> tuple[EngineWork, ...]:
    return (EngineWork.NEXT,)


def _nothing_to_close() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a run.

    Attributes:
        train: the policy in training.
        rollout: the same policy, generating.
        reference: the frozen initial policy, if the run needs it.
        scorer: computes old log-probs: the trainer, or the same policy on devices of its own.
        stage: lets training continue while weights are sent, where the run does so.
        critic, reward_model: the models beside the policy, if the run has them.
        work: returns the state of each engine behind the rollout, for the trace. One engine alone
            counts as always busy.
        generates_apart: whether other devices generate than train.
        num_rows: sequences that all engines generate at once; see ``Capacity``.
        close: ends what the engines have started outside this process.
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
    num_rows: int | None = None
    close: Callable[[], object] = _nothing_to_close


class Runtime(Protocol):
    """Turns synchronous calls on engines into awaitables."""

    async def call(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one method of an engine where that engine lives. Raise the exceptions that it
        raises.
        """
        ...

    async def watch(self) -> None:
        """Raise as soon as a process of the run has ended, whether or not a call waits for it.
        Never return.
        """
        ...

    async def close(self) -> None:
        """Release processes and threads; idempotent."""
        ...


class WorkerGroup(Protocol):
    """Processes of one pool, each of which holds one object whose methods are called by name.

    Calls to one worker run one at a time, in the order of their submission. Every wait ends: with
    the results, or with the first cause as ``WorkerFailure``.
    """

    @property
    def size(self) -> int:
        """The number of workers."""
        ...

    def submit(self, rank: int, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Start a call on worker ``rank``. Return a handle for ``gather`` and ``first``."""
        ...

    def gather(self, calls: Sequence[Any]) -> list[Any]:
        """Wait for calls of any groups of this runtime, and return their results in order."""
        ...

    def first(self, calls: Sequence[Any]) -> int:
        """Wait until one of the calls has finished, and return the lowest index of those that
        have.
        """
        ...


class MetricSink(Protocol):
    """Receives the metrics of each step. A sink never stops a run because its display failed."""

    def write(self, report: StepReport) -> None: ...

    def close(self) -> None: ...
