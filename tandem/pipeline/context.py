# SPDX-License-Identifier: Apache-2.0
"""The collaborators of the pipeline, which the composition root hands to it as one frozen value.

The pipeline builds none of them itself, so that the same program runs with real engines and with
fakes.
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
from tandem.metrics.activity import Activity
from tandem.metrics.throughput import ComputeFacts
from tandem.metrics.trace import TraceRecorder
from tandem.pipeline.conversing import Conversing
from tandem.pipeline.microbatches import MemoryFit
from tandem.types import Group, Prompt, RewardOutcome, RewardRequest


class Codec(Protocol):
    """A decoder of token ids; see ``data.tokenizer.TextCodec``."""

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special: bool = True) -> list[str]: ...

    def save_own_template(self, folder: Path) -> None: ...


class Conversations(Protocol):
    """An encoder of whole conversations; see ``data.tokenizer.TextCodec``."""

    def encode_answered(
        self, chats: Sequence[Sequence[Mapping[str, Any]]], answers: Sequence[str]
    ) -> list[list[int]]: ...


class Rewards(Protocol):
    """A scorer of samples; see ``rewards.pool.RewardPool``."""

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]: ...


class Store(Protocol):
    """A store of checkpoints; see ``checkpoint.store.CheckpointStore``."""

    def writing(self, step: int, state: dict[str, Any]) -> AbstractContextManager[Path]: ...


class Recorder(Protocol):
    """A recorder of rollouts for the report; see ``metrics.records.RolloutRecorder``."""

    def write(self, step: int, groups: Sequence[Group], *, advantages: Sequence[float]) -> None: ...

    def close(self) -> None: ...


def _no_trace() -> TraceRecorder:
    return TraceRecorder(lambda: 0.0, sink=None)


@dataclass(frozen=True, slots=True)
class RunContext:
    """The collaborators of a run.

    Attributes:
        validation_prompts: draws the prompts of a validation, whose pictures are decoded then.
        preferred_tokens: the micro-batch size that the platform computes fastest; None if unknown.
        clock: returns seconds; only differences are used.
        allocated_bytes, reserved_bytes: return the peaks of the device allocator.
        conversations: encodes text for a reward model; None if it reads the policy's tokens.
        conversing: what episodes of several turns need; None if there are none.
        memory: remembers which micro-batches fit the device.
        trace: records which role worked and which waited.
        activity: tells the console which phase the run is in.
    """

    config: RunConfig
    schedule: Schedule
    runtime: Runtime
    engines: Engines
    source: PromptSource
    validation_prompts: Callable[[], Sequence[Prompt]]
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
    conversing: Conversing | None = None
    memory: MemoryFit = field(default_factory=MemoryFit)
    trace: TraceRecorder = field(default_factory=_no_trace)
    activity: Activity = field(default_factory=Activity)
