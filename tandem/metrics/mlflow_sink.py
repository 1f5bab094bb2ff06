# SPDX-License-Identifier: Apache-2.0
"""The sink of MLflow, which itself reads MLFLOW_TRACKING_URI and so on."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from tandem.errors import UserError
from tandem.metrics.recorded_config import read_recorded_config
from tandem.types import StepReport

_FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)
_MAX_PARAMETERS, _MAX_METRICS = 100, 1000  # of one call
_MAX_LENGTH = 500  # of a parameter's value, in all versions


class MlflowSink:
    """A ``tandem.api.MetricSink`` that logs to a run of MLflow."""

    def __init__(self, run_folder: Path, *, project: str, experiment: str) -> None:
        """Start a run called ``experiment`` in MLflow's experiment ``project``.

        Its parameters are those of the ``config.json`` of ``run_folder``.

        Raises:
            UserError: MLflow cannot start, for example because its server does not answer.
        """
        import mlflow  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

        self._mlflow: Any = mlflow
        config = read_recorded_config(run_folder)
        try:
            self._client = mlflow.MlflowClient()
            found = self._client.get_experiment_by_name(project)
            number = found.experiment_id if found else self._client.create_experiment(project)
            self._run = self._client.create_run(number, run_name=experiment).info.run_id
            self._log_parameters(dict(_flat(config)))
        except mlflow.MlflowException as error:
            raise UserError(
                "trainer.logger",
                "mlflow",
                rule=f"MLflow cannot start ({' '.join(str(error).split())})",
                remedy="Correct MLFLOW_TRACKING_URI, or remove it from trainer.logger.",
            ) from error

    def write(self, report: StepReport) -> None:
        """Log the metrics of a step. Raise OSError if MLflow fails."""
        now_ms = int(time.time() * 1000)
        metrics = [
            self._mlflow.entities.Metric(allowed_name(name), value, now_ms, report.step)
            for name, value in report.metrics.items()
        ]
        try:
            for i in range(0, len(metrics), _MAX_METRICS):
                self._client.log_batch(self._run, metrics=metrics[i : i + _MAX_METRICS])
        except self._mlflow.MlflowException as error:
            raise OSError(f"MLflow: {error}") from error

    def close(self) -> None:
        """End the run. Raise OSError if MLflow fails."""
        try:
            self._client.set_terminated(self._run)
        except self._mlflow.MlflowException as error:
            raise OSError(f"MLflow: {error}") from error

    def _log_parameters(self, values: Mapping[str, Any]) -> None:
        parameters = [
            self._mlflow.entities.Param(name, str(value)[:_MAX_LENGTH])
            for name, value in values.items()
        ]
        for i in range(0, len(parameters), _MAX_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[i : i + _MAX_PARAMETERS])


def allowed_name(name: str) -> str:
    """Return the name of a metric as MLflow takes it: ``acc/mean_at_4`` for ``acc/mean@4``."""
    return _FORBIDDEN.sub("_", name.replace("@", "_at_"))


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            yield allowed_name(f"{prefix}{name}"), value
