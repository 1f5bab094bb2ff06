# SPDX-License-Identifier: Apache-2.0
"""The state of a checkpoint that a run continues after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoint.store import CheckpointStore, open_checkpoint
from tandem.data.ledger import Ledger, LedgerOrder, Source
from tandem.errors import UserError
from tandem.pipeline.progress import resume

NUMBERS = ("kl_coefficient",)


def resume_after(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Continue a run of three rows after a checkpoint with this state."""
    order = LedgerOrder(num_rows=3, batch_size=3, shuffle=False, seed=0, fingerprint="")
    ledger = Ledger(order, total_epochs=2)
    whole = {"data": ledger.state(), "metrics": {"a": 1.0}, "kl_coefficient": 0.1}
    kept = {name: value for name, value in (whole | state).items() if value is not ...}
    with CheckpointStore(folder).writing(1, kept):
        pass
    source: Source[int] = Source(lambda _: (), ledger)
    return resume(source, open_checkpoint(folder / "global_step_1"), numbers=NUMBERS)


@pytest.mark.parametrize(
    ("state", "rule"),
    [
        ({"data": ...}, "data state"),
        ({"metrics": ...}, "pipeline.json has no metrics, or they are not numbers"),
        ({"metrics": {"a": "1"}}, "pipeline.json has no metrics"),
        ({"metrics": 3}, "pipeline.json has no metrics"),
        ({"kl_coefficient": ...}, "pipeline.json has no kl_coefficient"),
        ({"kl_coefficient": [1]}, "pipeline.json has no kl_coefficient"),
        ({"kl_coefficient": {"a": 1}}, "pipeline.json has no kl_coefficient"),
    ],
)
def test_a_state_without_its_parts_is_refused(
    state: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=rule):
        resume_after(state, tmp_path)


def test_a_whole_state_is_returned(tmp_path: Path) -> None:
    state = resume_after({"kl_coefficient": 1}, tmp_path)
    assert (state["metrics"], state["kl_coefficient"]) == ({"a": 1.0}, 1)
