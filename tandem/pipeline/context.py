# SPDX-License-Identifier: Apache-2.0
"""What the composition root hands to the pipeline, as one frozen value.

The pipeline builds none of these itself: engines, clock and outputs come in from outside, so that
the same program runs with real engines and with fakes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tandem.api import Engines, MetricSink, Runtime
from tandem.config.derived.schedule import Schedule
from tandem.config.schema.run import RunConfig
from tandem.data.prompts import PromptSource
from tandem.metrics.throughput import ComputeFacts
from tandem.metrics.trace import TraceRecorder
from tandem.pipeline.microbatches import MemoryFit
from tandem.types import Group, Prompt, RewardOutcome, RewardRequest


class Codec(Protocol):
    """From token ids to text; see ``data.tokenizer.TextCodec``."""

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special: bool = True) -> list[str]: ...

    def save_own_template(self, folder: Path) -> None: ...


class Conversations(Protocol):
    """Tokens of whole conversations; see ``data.tokenizer.TextCodec``."""

    def encode_answered(
        self, chats: Sequence[Sequence[Mapping[str, Any]]], answers: Sequence[str]
    ) -> list[list[int]]: ...


class Rewards(Protocol):
    """Scores samples; see ``rewards.pool.RewardPool``."""

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]: ...


class Store(Protocol):
    """Takes checkpoints; see ``checkpoint.store.CheckpointStore``."""

    def writing(self, step: int, state: dict[str, Any]) -> AbstractContextManager[Path]: ...


class Recorder(Protocol):
    """Keeps rollouts for the report; see ``metrics.records.RolloutRecorder``."""

    def write(self, step: int, groups: Sequence[Group], *, advantages: Sequence[float]) -> None: ...

    def close(self) -> None: ...


def _no_trace() -> TraceRecorder:
    return TraceRecorder(lambda: 0.0, sink=None)


@dataclass(frozen=True, slots=True)
class RunContext:
    """Everything a run is made of.

    ``preferred_tokens`` is the micro-batch size the platform computes fastest, if it has one.
    ``conversations`` has what a reward model reads, None if that are the policy's own tokens.
    ``memory`` remembers what micro-batches fit. ``trace`` records who worked and who waited.
    ``clock`` gives seconds, of which only differences are used; ``allocated_bytes`` and
    ``reserved_bytes`` are the device allocator's peaks.
    """

    config: RunConfig
    schedule: Schedule
    runtime: Runtime
    engines: Engines
    source: PromptSource
    validation_prompts: Sequence[Prompt]
    codec: Codec
    rewards: Rewards
    store: Store
    sinks: Sequence[MetricSink]
    recorder: Recorder
    facts: ComputeFacts
    preferred_tokens: int | None
    clock: Callable[[], float]
    allocated_bytes: Callable[[], int]
    reserved_bytes: Callable[[], int]
    conversations: Conversations | None = None
    memory: MemoryFit = field(default_factory=MemoryFit)
    trace: TraceRecorder = field(default_factory=_no_trace)
