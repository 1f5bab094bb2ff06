# SPDX-License-Identifier: Apache-2.0
"""The number of steps of a run, and the steps that save and validate, with verl's meaning.

Only a negative ``save_freq`` differs: the last step is saved, so that no finished run loses its
model. The trainer and the plan share this file, so that the plan shows exactly the steps of the
run.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.config.schema.trainer import Frequency
from tandem.errors import UserError


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of a run, counted from 1. Step 0 is the time before training.

    Attributes:
        steps_per_epoch: the number of whole batches in the training rows; remaining rows of an
            epoch are dropped.
        total_training_steps: the number of training steps of the run; 0 with ``val_only``.
        save_freq, test_freq: the keys of ``trainer`` in steps; ``test_freq`` is 0 without
            validation files.
        validates_before_training: whether there is a validation at step 0.

    Example:
        >>> schedule_run(RunConfig.model_validate({"data": {"train_batch_size": 128}, ...}), 7473)
    """

    steps_per_epoch: int
    total_training_steps: int
    save_freq: int
    test_freq: int
    validates_before_training: bool

    def is_save_step(self, step: int) -> bool:
        """Return whether to save after ``step``; the last step is saved unless ``save_freq=0``."""
        is_last = step == self.total_training_steps and step > 0
        return self._is_due(step, self.save_freq) or (is_last and self.saves_at_end)

    @property
    def saves_at_end(self) -> bool:
        """Whether the last step is saved: ``save_freq != 0``."""
        return self.save_freq != 0

    def is_test_step(self, step: int) -> bool:
        """Return whether to validate after ``step``."""
        return self._is_due(step, self.test_freq)

    @property
    def validation_steps(self) -> tuple[int, ...]:
        """All steps with a validation; 0 stands for a validation before training."""
        before = (0,) if self.validates_before_training else ()
        steps = range(1, self.total_training_steps + 1)
        return before + tuple(step for step in steps if self.is_test_step(step))

    @property
    def save_steps(self) -> tuple[int, ...]:
        """All steps that are saved."""
        steps = range(1, self.total_training_steps + 1)
        return tuple(step for step in steps if self.is_save_step(step))

    def _is_due(self, step: int, frequency: int) -> bool:
        is_last = step == self.total_training_steps
        return frequency > 0 and step > 0 and (is_last or step % frequency == 0)


def _steps(frequency: Frequency, steps_per_epoch: int) -> int:
    return steps_per_epoch if frequency == "after_each_epoch" else frequency


def schedule_run(config: RunConfig | SftConfig, num_train_rows: int) -> Schedule:
    """Return the schedule of a run over ``num_train_rows`` rows (after filtering).

    Raises:
        UserError: the rows do not fill one batch.
    """
    trainer, batch_size = config.trainer, config.data.train_batch_size
    has_validation = bool(config.data.val_files)
    if num_train_rows < batch_size:
        raise UserError(
            "data.train_batch_size",
            batch_size,
            rule=f"must not exceed the number of training rows ({num_train_rows})",
            remedy=f"Set data.train_batch_size={max(num_train_rows, 1)} or lower, or add data.",
        )
    steps_per_epoch = num_train_rows // batch_size
    total = steps_per_epoch * trainer.total_epochs
    if trainer.total_training_steps is not None:
        total = min(total, trainer.total_training_steps)
    return Schedule(
        steps_per_epoch=steps_per_epoch,
        total_training_steps=0 if trainer.val_only else total,
        save_freq=_steps(trainer.save_freq, steps_per_epoch),
        test_freq=_steps(trainer.test_freq, steps_per_epoch) if has_validation else 0,
        validates_before_training=has_validation and trainer.val_before_train,
    )
