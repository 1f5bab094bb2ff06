# SPDX-License-Identifier: Apache-2.0
"""The reader of a run folder, whose run may still be active.

``metrics.jsonl`` is required; ``rollouts.jsonl``, ``trace.json``, ``config.json``,
``settings.jsonl``, ``restarts.jsonl`` and ``summary.json`` are optional.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from tandem.config.parse.json_content import read_object
from tandem.errors import UserError
from tandem.metrics.jsonl import METRICS_FILE, read_records
from tandem.metrics.records import ROLLOUTS_FILE
from tandem.metrics.trace import TRACE_FILE, read_trace

CONFIG_FILE = "config.json"
SETTINGS_FILE = "settings.jsonl"
RESTARTS_FILE = "restarts.jsonl"
SUMMARY_FILE = "summary.json"
ORIGINS_FILE = "origins.json"
REPORT_FILE = "report.html"
EXPORT_FOLDER = "model_step_{step}"
"""The folder of a model that was exported from the checkpoint of a step."""


@dataclass(frozen=True, slots=True)
class RunData:
    """A run as read from disk.

    Attributes:
        folder: the run folder.
        columns: ``{metric: [(step, value), ...]}`` with finite values only, steps ascending and
            unique.
        num_steps: the last training step.
        rollouts: the records of ``rollouts.jsonl``.
        trace: the events of ``trace.json``.
        settings: the records of ``settings.jsonl``, one for each start whose settings differ from
            those of the steps before: ``{"step": 4, "changed": {key: [before, after]}}``.
        restarts: the records of ``restarts.jsonl``, one for each time that the run started again by
            itself: ``{"restart": 1, "step": 4, "time": ..., "cause": ..., "continues_after": 2}``.
        config, summary: the contents of their files; {} for a missing file.
    """

    folder: Path
    columns: Mapping[str, Sequence[tuple[int, float]]]
    num_steps: int
    rollouts: Sequence[Mapping[str, Any]]
    trace: Sequence[Mapping[str, Any]]
    settings: Sequence[Mapping[str, Any]]
    restarts: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any]
    summary: Mapping[str, Any]


def read_run(folder: Path) -> RunData:
    """Read a run folder.

    Raises:
        UserError: there is no such folder, it has no metrics, or a file in it is damaged.
    """
    require_folder(folder)
    records = read_records(folder / METRICS_FILE)
    if not records:
        raise UserError(
            "RUN",
            str(folder),
            rule=f"has no {METRICS_FILE} with a finished step",
            remedy="Give the folder of a run that has finished a step (trainer.default_local_dir).",
        )
    columns = _columns(records)
    rollouts = _read_valid(folder / ROLLOUTS_FILE, _is_rollout, what="record of a rollout")
    return RunData(
        folder=folder,
        columns=columns,
        num_steps=max(int(record["step"]) for record in records),
        rollouts=[record for record in rollouts if "step" in record],
        trace=read_trace(folder / TRACE_FILE),
        settings=_read_valid(
            folder / SETTINGS_FILE, _is_setting, what="record of changed settings"
        ),
        restarts=_read_valid(folder / RESTARTS_FILE, _is_restart, what="record of a restart"),
        config=_read_object(folder / CONFIG_FILE),
        summary=_read_object(folder / SUMMARY_FILE),
    )


def require_folder(folder: Path) -> None:
    """Raise UserError unless the argument RUN is a folder."""
    if folder.is_dir():
        return
    rule = "is not a folder" if folder.exists() else "no such folder"
    remedy = "Give the folder of a run."
    stripped = Path(str(folder).strip())
    if stripped != folder and stripped.is_dir():
        # By the grammar of overrides, which is Hydra's, key=value has no space around the value.
        remedy = f"Give {str(stripped)!r}: spaces at the ends of a key's value are ignored."
    raise UserError("RUN", str(folder), rule=rule, remedy=remedy)


def _columns(records: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Convert rows to columns; the last of several values of a metric at one step counts."""
    columns: dict[str, dict[int, float]] = {}
    for number, record in enumerate(records, start=1):
        step = record.get("step")
        if not isinstance(step, int):
            raise UserError(
                METRICS_FILE,
                rule=f"line {number} has no integer step",
                remedy="Remove that line.",
            )
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float) and isfinite(value):
                columns.setdefault(name, {})[step] = float(value)
    return {name: sorted(values.items()) for name, values in columns.items()}


def _read_valid(
    path: Path, is_valid: Callable[[Mapping[str, Any]], bool], *, what: str
) -> list[dict[str, Any]]:
    """Read all records of a file. Raise UserError for one that is not ``what``."""
    records = read_records(path)
    for number, record in enumerate(records, start=1):
        if not is_valid(record):
            raise UserError(
                str(path), rule=f"line {number} is no {what}", remedy="Remove that line."
            )
    return records


def _is_rollout(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("step", 0), int)


def _is_restart(record: Mapping[str, Any]) -> bool:
    return {"restart", "step", "time", "cause", "continues_after"} <= record.keys()


def _is_setting(record: Mapping[str, Any]) -> bool:
    changed = record.get("changed")
    pairs = changed.values() if isinstance(changed, Mapping) else [None]
    return "step" in record and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return read_object(path)
    except ValueError as error:
        raise UserError(str(path), rule=str(error), remedy="Correct or remove it.") from error
