# SPDX-License-Identifier: Apache-2.0
"""The functions that RL and supervised runs share: resume, save a model, record metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tandem.api import MetricSink, Runtime, TrainEngine
from tandem.checkpoint.store import STATE_NAME, Checkpoint
from tandem.data.ledger import Source
from tandem.errors import UserError
from tandem.pipeline.context import Codec
from tandem.types import StepReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The result of a run.

    Attributes:
        validation: the last validation's metrics, {} without any.
        num_left: the number of prompts that the data ended with, too few for a batch. They stay
            open: a run that continues after more epochs draws them again.
    """

    last_step: int
    stopped_early: bool
    validation: Mapping[str, float]
    num_left: int = 0


def resume(
    source: Source[Any], checkpoint: Checkpoint, *, numbers: Sequence[str] = ()
) -> dict[str, Any]:
    """Continue the data of a run after a checkpoint, and return the state of the checkpoint.

    Args:
        numbers: the parts of the state, besides the metrics of its step, that are numbers.

    Raises:
        UserError: the checkpoint belongs to other data, or its state is not that of a run.
    """
    state = checkpoint.read_state()
    source.restore(state.get("data", {}))
    metrics = state.get("metrics")
    of_step = cast("dict[str, object]", metrics) if isinstance(metrics, dict) else {"": None}
    _check_numbers("metrics", of_step.values(), checkpoint=checkpoint)
    for name in numbers:
        _check_numbers(name, [state.get(name)], checkpoint=checkpoint)
    logger.info("resumed from %s", checkpoint.folder)
    return state


def _check_numbers(name: str, values: Iterable[object], *, checkpoint: Checkpoint) -> None:
    """Raise UserError, with the name of the values, unless each of them is a number."""
    if not all(isinstance(each, int | float) for each in values):
        raise UserError(
            "trainer.resume_from_path",
            str(checkpoint.folder),
            rule=f"{STATE_NAME} has no {name}, or they are not numbers",
            remedy="Name a folder global_step_N that tandem wrote, or set "
            "trainer.resume_mode=disable.",
        )


async def save_model(
    runtime: Runtime, engine: TrainEngine, *, folder: Path, codec: Codec | None = None
) -> None:
    """Save the weights and optimizer states of a model into a new folder.

    Args:
        codec: the codec whose chat template belongs to the model, if any does.
    """
    folder.mkdir()
    await runtime.call(engine.save, folder)
    if codec is not None:
        codec.save_own_template(folder)


def record(sinks: Sequence[MetricSink], step: int, *, metrics: Mapping[str, float]) -> None:
    """Write a record of a step to all sinks; none if there are no metrics."""
    for sink in sinks if metrics else ():
        sink.write(StepReport(step, metrics))
