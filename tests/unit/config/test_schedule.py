# SPDX-License-Identifier: Apache-2.0
"""Steps, saves and validations as verl counts them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tandem.config.derived.schedule import Schedule, schedule_run
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError


def schedule(num_rows: int, batch_size: int = 128, **trainer: Any) -> Schedule:
    tree = {
        "data": {"train_batch_size": batch_size},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 64}},
        "trainer": {"total_epochs": 1, **trainer},
    }
    return schedule_run(RunConfig.model_validate(tree), num_rows)


def test_gsm8k_with_batches_of_128_has_58_steps() -> None:
    plan = schedule(7473, test_freq=5)
    assert (plan.steps_per_epoch, plan.total_training_steps) == (58, 58)
    assert plan.validation_steps == (*range(0, 56, 5), 58)


def test_total_training_steps_shortens_but_never_extends() -> None:
    assert schedule(7473, total_epochs=2).total_training_steps == 116
    assert schedule(7473, total_epochs=2, total_training_steps=7).total_training_steps == 7
    assert schedule(7473, total_epochs=2, total_training_steps=999).total_training_steps == 116


def test_after_each_epoch_is_a_frequency_in_steps() -> None:
    plan = schedule(256, total_epochs=3, save_freq="after_each_epoch", test_freq="after_each_epoch")
    assert plan.save_steps == (2, 4, 6)
    assert plan.validation_steps == (0, 2, 4, 6)
    with pytest.raises(ValidationError, match="save_freq"):
        schedule(256, save_freq="after_each_step")


@pytest.mark.parametrize(("frequency", "saved"), [(-1, (10,)), (0, ())])
def test_without_a_positive_frequency_at_most_the_last_step_is_saved(
    frequency: int, saved: tuple[int, ...]
) -> None:
    plan = schedule(1280, save_freq=frequency, test_freq=frequency)
    assert plan.save_steps == saved
    assert not plan.is_save_step(0)
    assert plan.validation_steps == (0,)


def test_the_last_step_is_always_due() -> None:
    plan = schedule(1280, save_freq=4, test_freq=100, val_before_train=False)
    assert plan.save_steps == (4, 8, 10)
    assert plan.validation_steps == (10,)


def test_val_only_validates_once_and_trains_no_step() -> None:
    plan = schedule(1280, val_only=True, test_freq=5)
    assert (plan.total_training_steps, plan.validation_steps) == (0, (0,))


def test_without_validation_files_there_is_no_validation() -> None:
    tree = {"data": {"train_batch_size": 256, "val_files": []}, "trainer": {"test_freq": 1}}
    assert schedule_run(RunConfig.model_validate(tree), 512).validation_steps == ()


def test_rows_that_do_not_fill_a_batch_are_an_error_with_the_remedy() -> None:
    with pytest.raises(UserError) as caught:
        schedule(100)
    assert str(caught.value) == (
        "data.train_batch_size=128: must not exceed the number of training rows (100). "
        "Set data.train_batch_size=100 or lower, or add data."
    )


def test_sft_does_not_validate_first() -> None:
    tree = {"data": {"val_files": "v.parquet"}, "trainer": {"test_freq": 3, "total_epochs": 2}}
    plan = schedule_run(SftConfig.model_validate(tree), 1024)
    assert plan.total_training_steps == 8
    assert plan.validation_steps == (3, 6, 8)
