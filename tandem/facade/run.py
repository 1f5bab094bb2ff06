# SPDX-License-Identifier: Apache-2.0
"""The handle of a run: its folder, read whenever something of it is asked for."""

from __future__ import annotations

import html
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.checkpoint.store import CheckpointStore
from tandem.engines.checkpoint import SHARDED_FILE
from tandem.engines.sharded_checkpoint import export_sharded
from tandem.errors import UserError
from tandem.models.adapters import is_adapter_folder, merge_adapter
from tandem.planner.advice import forecast_rows
from tandem.report.report import write_report
from tandem.report.run_folder import EXPORT_FOLDER, read_run


@dataclass(frozen=True, slots=True)
class Run:
    """A run on disk, finished or not.

    Example:
        >>> run = tandem.load_run("outputs/gsm8k")
        >>> run.metrics["critic/score/mean"][-1]
        0.84
    """

    folder: Path

    @property
    def steps(self) -> int:
        """The number of the last step on record."""
        return read_run(self.folder).num_steps

    @property
    def metrics(self) -> dict[str, list[float]]:
        """The values of each metric, in the order of the steps that have one."""
        return {name: [value for _, value in points] for name, points in self.points.items()}

    @property
    def points(self) -> dict[str, list[tuple[int, float]]]:
        """The pairs (step, value) of each metric. A validation has values at its steps only."""
        return {name: list(points) for name, points in read_run(self.folder).columns.items()}

    @property
    def config(self) -> dict[str, Any]:
        """All keys of the run with their values, nested by section."""
        return dict(read_run(self.folder).config)

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of the checkpoints, oldest step first."""
        folders = self.folder.glob("global_step_*")
        return sorted(folders, key=lambda folder: int(folder.name.rpartition("_")[2]))

    @property
    def model_folder(self) -> Path:
        """The Hugging Face folder of the latest checkpoint.

        A checkpoint of several devices, or of adapters, is exported beside it, once.

        Raises:
            UserError: the run has no checkpoint.
        """
        latest = CheckpointStore(self.folder).latest()
        if latest is None:
            raise UserError(
                "folder",
                str(self.folder),
                rule="the run has no checkpoint",
                remedy="Train without trainer.save_freq=0.",
            )
        model = latest.folder / "actor"
        has_adapters = is_adapter_folder(model)
        if not has_adapters and not (model / SHARDED_FILE).is_file():
            return model
        exported = self.folder / EXPORT_FOLDER.format(step=latest.step)
        if not exported.exists():
            partial = exported.with_name(f".{exported.name}.{os.getpid()}.partial")
            (merge_adapter if has_adapters else export_sharded)(model, partial)
            partial.rename(exported)
        return exported

    def report(self, output: str | os.PathLike[str] | None = None) -> Path:
        """Write the HTML report, by default as report.html in the folder, and return its path."""
        path = self.folder / "report.html" if output is None else Path(output)
        return write_report(self.folder, path, forecast=forecast_rows(self.folder))

    def _repr_html_(self) -> str:
        return f"tandem run in <code>{html.escape(str(self.folder))}</code>, step {self.steps}"


def load_run(folder: str | os.PathLike[str]) -> Run:
    """Return the handle of a run, finished or not. Raise UserError if the folder has none."""
    run = Run(absolute(folder))
    read_run(run.folder)
    return run


def absolute(folder: str | os.PathLike[str]) -> Path:
    """Return a path that means the same in every working directory, with ``~`` expanded.

    Raises:
        UserError: it is no path.
    """
    if not isinstance(folder, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError("folder", folder, rule="is not a path", remedy="Give a str or a Path.")
    return Path(os.path.abspath(os.path.expanduser(folder)))
