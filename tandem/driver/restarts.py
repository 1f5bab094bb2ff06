# SPDX-License-Identifier: Apache-2.0
"""The restarts of a failed run: whether there is another one, from where, and their records.

A run is started again at most ``trainer.max_restarts`` times, and only if a checkpoint was written
since the last restart: a run that fails twice at one place would fail again. The caller starts it:
``cli.restarting`` in a new process, ``facade.start`` in this one. Nothing here imports torch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

from tandem.checkpoint.store import STATE_NAME, Checkpoint, CheckpointStore
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import RunFailure
from tandem.metrics.jsonl import METRICS_FILE, JsonLinesFile, last_step, read_records
from tandem.report.run_folder import RESTARTS_FILE

logger = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", RunConfig, SftConfig)

_FileState = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a run.

    Attributes:
        cause: the error in one line.
        step: the step that failed; None if the error does not name it.
        is_ordered: whether the node that drives the run starts it again, and this one follows.
    """

    cause: str
    step: int | None = None
    is_ordered: bool = False


def failure_of(error: Exception) -> Failure:
    """Return the failure that an exception ended a run with."""
    lines = str(error).splitlines()
    text = lines[0].strip() if lines else ""
    if isinstance(error, RunFailure):
        return Failure(text, error.step, is_ordered=error.restarts_elsewhere)
    return Failure(f"{type(error).__name__}: {text}".removesuffix(": "))


class Restarts(Generic[ConfigT]):
    """The restarts of one command.

    Attributes:
        records: one mapping for each restart: the number of the ``restart``, the ``step`` that
            failed, ``time`` (ISO 8601), ``cause``, and the step that the run ``continues_after``.
    """

    def __init__(self, config: ConfigT) -> None:
        """Note the checkpoints that exist before the first start."""
        self._config = config
        self._folder = config.trainer.run_folder
        self._store = CheckpointStore(self._folder)
        self._earlier = {_state_of(path / STATE_NAME) for path in _checkpoints(self._folder)}
        self._metrics_before = _state_of(self._folder / METRICS_FILE)
        self._saved_at_last = 0
        self.records: list[dict[str, Any]] = []

    @property
    def is_possible(self) -> bool:
        """Whether a failure at this moment would be followed by a restart."""
        return self._config.trainer.max_restarts > 0 and not self._refusal()

    def after(self, failure: Failure) -> ConfigT | None:
        """Return the configuration to start again with, None to give up; log which of the two.

        Raises:
            UserError: the run folder names a checkpoint that does not exist.
        """
        if self._config.trainer.max_restarts == 0 or failure.is_ordered:
            return self._config if failure.is_ordered else None
        if refusal := self._refusal():
            logger.error("the run is not started again: %s", refusal)
            return None
        own = self._own_checkpoint()
        config = self._config
        if own is not None:
            trainer = config.trainer.model_copy(update={"resume_mode": "auto"})
            config = config.model_copy(update={"trainer": trainer})
        step = self._continued_step(own)
        self._add_record(failure, step=step)
        self._saved_at_last = own.step if own is not None else 0
        self._metrics_before = _state_of(self._folder / METRICS_FILE)
        where = f"after step {step}" if step else "from the first step"
        number, limit = len(self.records), config.trainer.max_restarts
        logger.warning("restart %d of %d: the run continues %s", number, limit, where)
        return config

    def write_records(self) -> None:
        """Write the records that the run folder lacks, for instance because they were set aside.

        Raises:
            OSError: the folder cannot be written.
        """
        path = self._folder / RESTARTS_FILE
        known = read_records(path)
        missing = [record for record in self.records if record not in known]
        if missing:
            file = JsonLinesFile(path, keep_through_step=1 << 62)
            for record in missing:
                file.append(record)
            file.close()

    def _refusal(self) -> str:
        """Return why there is no other restart, "" if there is."""
        limit, own = self._config.trainer.max_restarts, self._own_checkpoint()
        if len(self.records) >= limit:
            return f"trainer.max_restarts={limit} restarts are used up"
        if self.records and (0 if own is None else own.step) <= self._saved_at_last:
            return f"no checkpoint was written since restart {len(self.records)}"
        return ""

    def _own_checkpoint(self) -> Checkpoint | None:
        """Return the latest checkpoint if this command wrote it."""
        latest = self._store.latest()
        if latest is None or _state_of(latest.folder / STATE_NAME) in self._earlier:
            return None
        return latest

    def _continued_step(self, own: Checkpoint | None) -> int:
        """Return the step of the checkpoint that the next start continues from, 0 without one."""
        trainer = self._config.trainer
        if own is None and trainer.resume_mode == "disable":
            return 0
        if own is None and trainer.resume_mode == "resume_path":
            return int(trainer.resume_folder.name.rpartition("_")[2])
        latest = own or self._store.latest()
        return 0 if latest is None else latest.step

    def _add_record(self, failure: Failure, *, step: int) -> None:
        metrics = self._folder / METRICS_FILE
        has_logged = _state_of(metrics) != self._metrics_before
        unfinished = (max(last_step(metrics), step) if has_logged else step) + 1
        self.records.append(
            {
                "restart": len(self.records) + 1,
                "step": unfinished if failure.step is None else failure.step,
                "time": datetime.now().astimezone().isoformat(timespec="seconds"),
                "cause": failure.cause,
                "continues_after": step,
            }
        )


def _checkpoints(folder: Path) -> Sequence[Path]:
    return list(folder.glob("global_step_*")) if folder.is_dir() else []


def _state_of(path: Path) -> _FileState | None:
    """Return the identity of a file, which changes if the file is replaced; None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
