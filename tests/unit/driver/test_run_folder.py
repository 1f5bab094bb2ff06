# SPDX-License-Identifier: Apache-2.0
"""What a resumed run finds on record of the step it goes on from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.checkpoint.store import Checkpoint
from tandem.driver.run_folder import is_logged, is_validated
from tandem.metrics.jsonl import METRICS_FILE

LOGGED = {"step": 4, "actor/loss": 1.0}
VALIDATED = {"step": 4, "val-core/some/reward/mean@1": 0.5, "timing_s/testing": 2.0}


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([{**VALIDATED, "step": 3}], (False, False)),
        ([{**VALIDATED, "step": 3}, LOGGED], (True, False)),
        ([LOGGED, VALIDATED], (True, True)),
        ([LOGGED | VALIDATED], (True, True)),
    ],
)
def test_a_step_may_be_logged_without_its_validation(
    tmp_path: Path, records: list[dict[str, float]], expected: tuple[bool, bool]
) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / METRICS_FILE).write_text(lines)
    checkpoint = Checkpoint(tmp_path / "global_step_4", step=4)
    assert (is_logged(checkpoint, tmp_path), is_validated(checkpoint, tmp_path)) == expected
    assert is_validated(checkpoint, tmp_path / "another")
