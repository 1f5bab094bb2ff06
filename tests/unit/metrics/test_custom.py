# SPDX-License-Identifier: Apache-2.0
"""Metrics of the user: what their functions may return."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tandem.errors import UserError
from tandem.metrics.custom import StepBatch, custom_metrics

_NONE = torch.zeros(0)
BATCH = StepBatch(
    step=1,
    groups=(),
    sequence_R=_NONE.long(),
    rewards_N=_NONE,
    advantages_R=_NONE,
    returns_R=_NONE,
    rollout_logp_R=_NONE,
    lag_R=_NONE.long(),
)


def numbers(batch: StepBatch) -> dict[str, object]:
    return {
        "my/step": batch.step,
        "my/tensor": torch.tensor(0.5),
        "my/array": np.float32(0.25),
    }


def a_list(batch: StepBatch) -> list[float]:
    return [float(batch.step)]


def a_text(batch: StepBatch) -> dict[str, object]:
    return {"my/words": f"step {batch.step}"}


def many_values(batch: StepBatch) -> dict[str, object]:
    return {"my/values": torch.zeros(2 + batch.step)}


def numbered(batch: StepBatch) -> dict[int, float]:
    return {batch.step: 1.0}


def taken(batch: StepBatch) -> dict[str, float]:
    return {"critic/score/mean": float(batch.step)}


def test_numbers_of_several_kinds() -> None:
    assert custom_metrics([f"{__name__}:numbers"], BATCH) == {
        "my/step": 1.0,
        "my/tensor": 0.5,
        "my/array": 0.25,
    }


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("a_list", "returned list, not a mapping. Return a dict"),
        ("a_text", "returned my/words='step 1', which is not a number. Return a float"),
        ("many_values", "returned my/values=tensor.*, which is not a number. Return a float"),
        ("numbered", "returned the name 1, which is not a string. Return a dict"),
        ("taken", "returned critic/score/mean, which is the name of another metric. Start"),
    ],
)
def test_other_values_are_refused(name: str, rule: str) -> None:
    with pytest.raises(UserError, match=f"^trainer.metrics=.*{name}.*: {rule}"):
        custom_metrics([f"{__name__}:{name}"], BATCH)
