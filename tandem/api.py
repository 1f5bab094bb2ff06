# SPDX-License-Identifier: Apache-2.0
"""The Protocols of the plug-in points. Engines are plain synchronous objects that live inside one
process; the ``Runtime`` turns a call on one of them into an awaitable, so that the pipeline is the
same program whether its engines are in this process, behind Ray, or fakes under a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from tandem.types import (
    Completion,
    GenerationRequest,
    LossInputs,
    LossOutputs,
    LossScale,
    PackedBatch,
    StepReport,
    UpdateReport,
)

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class Loss(Protocol):
    """A picklable callable from one micro-batch to its share of the loss; see ``LossOutputs``."""

    @property
    def needs_entropy(self) -> bool:
        """Whether ``LossInputs.entropy_R`` must be computed."""
        ...

    def __call__(self, inputs: LossInputs) -> LossOutputs: ...


class ReferencePolicy(Protocol):
    """What scores: a policy or a reward model that stays as it is, or what is trained."""

    @property
    def data_parallel_size(self) -> int:
        """How many micro-batches are computed at the same time."""
        ...

    @property
    def sequence_parallel_size(self) -> int:
        """How many devices share the tokens of a micro-batch."""
        ...

    def score(self, batches: Sequence[PackedBatch], temperature: float) -> list[Tensor]:
        """What the current weights say of the response tokens, fp32 (R,) a batch, on the CPU: a
        policy's log-probs, else values, which have no temperature.
        """
        ...


class TrainEngine(ReferencePolicy, Protocol):
    """Holds a policy or a critic (and its optimizer) in one process or spread over several."""

    def update(
        self, batches: Sequence[PackedBatch], loss: Loss, *, scale: LossScale, temperature: float
    ) -> UpdateReport:
        """One optimizer step over all micro-batches; the learning-rate schedule stays."""
        ...

    def advance_schedule(self) -> None:
        """Step the learning-rate schedule; called once a training step."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimizer into an existing empty folder (atomicity is the caller's)."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote. Raises UserError if it belongs to another model."""
        ...


class RolloutEngine(Protocol):
    """A generation engine as a state machine driven from outside: add work, advance, collect what
    finished.
    """

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests. Cheap; nothing is computed yet."""
        ...

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """Generate until at least one sequence finishes, return all that did; [] only if there is
        no work.

        With ``max_steps`` also stop after about so many decode steps: [] may then come although
        there is work. An engine that only stops between sequences need not heed it.
        """
        ...

    def settle(self) -> None:
        """Return once nothing is being computed, so that weights may be replaced in place. What has
        finished meanwhile comes with the next ``advance``.
        """
        ...

    def release_cache(self) -> bool:
        """Free what is kept for the next generation, if there is nothing to generate. Returns
        whether that is so."""
        ...

    def set_weights_version(self, version: int) -> bool:
        """Use the trainer's weights as they are now, ``version``, and tag later tokens with it.

        Where trainer and rollout do not share storage, this is when the weights are sent. Sequences
        under way keep their tokens and log-probs; what was computed of them under other weights is
        computed again, and they go on under these.

        Returns whether all of the engine uses them: staged weights may still be on their way, or
        one of several engines generating, while there is work to go on with. Then ask again after
        the next ``advance``.
        """
        ...


class WeightStage(Protocol):
    """Lets training go on while the rollout takes weights over."""

    def stage(self, version: int) -> None:
        """Keep the trainer's weights as they are now, as ``version``; returns when they may change.

        ``RolloutEngine.set_weights_version`` then brings into use what was staged last.
        """
        ...


class Runtime(Protocol):
    """Turns synchronous calls on engines into awaitables."""

    async def call(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one method of an engine where that engine lives. Exceptions come back as they were
        raised.
        """
        ...

    async def watch(self) -> None:
        """Never returns; raises as soon as a process of the run has ended, whoever waits for it."""
        ...

    async def close(self) -> None:
        """Release processes and threads; idempotent."""
        ...


class WorkerGroup(Protocol):
    """Processes of one pool, each holding one object; calls name a method of it.

    Calls to one worker run one at a time, in the order of their submission. Every wait ends: with
    the results, or with the first cause as ``WorkerFailure``.
    """

    @property
    def size(self) -> int:
        """How many workers."""
        ...

    def submit(self, rank: int, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Start a call on worker ``rank``; returns what ``gather`` and ``first`` take."""
        ...

    def gather(self, calls: Sequence[Any]) -> list[Any]:
        """The results of all calls (of any group of this runtime), in order. Blocks."""
        ...

    def first(self, calls: Sequence[Any]) -> int:
        """Index of a call that has finished, the lowest of several. Blocks until there is one."""
        ...


class MetricSink(Protocol):
    """Receives the metrics of each step. A sink never stops a run because its display failed."""

    def write(self, report: StepReport) -> None: ...

    def close(self) -> None: ...
