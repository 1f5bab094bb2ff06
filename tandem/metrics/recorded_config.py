# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run, which sinks show beside its metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_recorded_config(run_folder: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a run folder; {} if there is none."""
    path = run_folder / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
