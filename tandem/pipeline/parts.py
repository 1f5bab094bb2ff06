# SPDX-License-Identifier: Apache-2.0
"""What the composition root hands to the pipeline, as one frozen value.

The pipeline builds none of these itself: engines, clock and outputs come in from outside, so that
the same program runs with real engines and with fakes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.api import MetricSink, ReferencePolicy, RolloutEngine, Runtime, TrainEngine
from tandem.checkpoint.store import CheckpointStore
from tandem.config.run import RunConfig
from tandem.config.schedule import Schedule
from tandem.data.prompts import PromptSource
from tandem.data.tokenizer import TextCodec
from tandem.metrics.records import RolloutRecorder
from tandem.metrics.throughput import ComputeFacts
from tandem.pipeline.microbatches import MemoryFit
from tandem.rewards.pool import RewardPool
from tandem.types import Prompt


@dataclass(frozen=True, slots=True)
class Engines:
    """The policy in training, the same policy generating and scoring (the trainer itself, unless
    that has devices of its own), and the frozen reference if one is needed.
    """

    train: TrainEngine
    rollout: RolloutEngine
    reference: ReferencePolicy | None
    scorer: ReferencePolicy


@dataclass(frozen=True, slots=True)
class PipelineParts:
    """Everything a run is made of.

    ``preferred_tokens`` is the micro-batch size the platform computes fastest, if it has one.
    ``memory`` remembers what micro-batches fit.
    ``clock`` gives seconds, of which only differences are used; ``allocated_bytes`` and
    ``reserved_bytes`` are the device allocator's peaks.
    """

    config: RunConfig
    schedule: Schedule
    runtime: Runtime
    engines: Engines
    source: PromptSource
    validation_prompts: Sequence[Prompt]
    codec: TextCodec
    rewards: RewardPool
    store: CheckpointStore
    sinks: Sequence[MetricSink]
    recorder: RolloutRecorder
    facts: ComputeFacts
    preferred_tokens: int | None
    clock: Callable[[], float]
    allocated_bytes: Callable[[], int]
    reserved_bytes: Callable[[], int]
    memory: MemoryFit = field(default_factory=MemoryFit)
