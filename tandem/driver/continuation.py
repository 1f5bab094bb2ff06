# SPDX-License-Identifier: Apache-2.0
"""The comparison of a run's settings with those of the checkpoint that it continues from."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from tandem.checkpoint.store import Checkpoint
from tandem.config.check.continuation import (
    ANOTHER_EXPERIMENT,
    SAME_TRAINED,
    Change,
    changed_settings,
)
from tandem.config.derived.vision import vision_config
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError

logger = logging.getLogger(__name__)


def require_same_experiment(
    config: RunConfig | SftConfig, checkpoint: Checkpoint, *, total_steps: int
) -> tuple[Change, ...]:
    """Return the settings that changed since a checkpoint, and log them.

    Raises:
        UserError: the run trains, and they make another experiment without
            ``trainer.resume_mode=resume_path``, or no step is left to train with them.
    """
    trainer, earlier = config.trainer, checkpoint.read_config()
    if earlier is None:
        logger.warning("%s has no configuration to compare with this one", checkpoint.folder)
        return ()
    changes = changed_settings(config, earlier)
    untrained = [
        change
        for change in changes
        if change.key in SAME_TRAINED and _has_what_is_frozen(checkpoint, key=change.key)
    ]
    if untrained and not trainer.val_only:
        raise UserError(
            untrained[0].key,
            rule=f"{checkpoint.folder} was trained with {untrained[0].before} and not with "
            f"{untrained[0].after}; its optimizer has the state of other weights",
            remedy="Set it back, or start anew from these weights: trainer.resume_mode=disable and "
            f"actor_rollout_ref.model.path={checkpoint.folder / 'actor'}.",
        )
    others = [change for change in changes if change.key in ANOTHER_EXPERIMENT]
    if others and trainer.resume_mode != "resume_path" and not trainer.val_only:
        raise UserError(
            "trainer.resume_mode",
            trainer.resume_mode,
            rule=f"{checkpoint.folder} belongs to another experiment ({_listed(others)})",
            remedy="Set these keys back, choose another trainer.default_local_dir, or set "
            "trainer.resume_mode=disable, which keeps the earlier run in a folder of its own. If "
            "the change is meant, set trainer.resume_mode=resume_path and "
            f"trainer.resume_from_path={checkpoint.folder}.",
        )
    _require_critic(config, checkpoint)
    if changes and checkpoint.step >= total_steps and not trainer.val_only:
        raise UserError(
            "trainer.total_training_steps",
            total_steps,
            rule=f"step {checkpoint.step} is trained already, and nothing would be trained with "
            f"the settings that changed ({_listed(changes)})",
            remedy="Raise it, or trainer.total_epochs, to train further steps; choose another "
            "trainer.default_local_dir; or set trainer.resume_mode=disable to train anew, which "
            "keeps the earlier run in a folder of its own.",
        )
    if changes:
        logger.warning("settings changed since step %d: %s", checkpoint.step, _listed(changes))
    return changes


def _require_critic(config: RunConfig | SftConfig, checkpoint: Checkpoint) -> None:
    """Raise UserError if a critic shall be trained on that the checkpoint does not have."""
    if isinstance(config, SftConfig) or config.trainer.val_only or not config.uses_critic:
        return
    if not (checkpoint.folder / "critic").is_dir():
        raise UserError(
            "algorithm.adv_estimator",
            str(config.algorithm.adv_estimator),
            rule=f"it needs a critic, and {checkpoint.folder} has none",
            remedy="Set it back, or start anew from its policy: trainer.resume_mode=disable and "
            f"actor_rollout_ref.model.path={checkpoint.folder / 'actor'}.",
        )


def _has_what_is_frozen(checkpoint: Checkpoint, *, key: str) -> bool:
    """Return whether the checkpoint is of a whole model with the part that a key freezes."""
    file = checkpoint.folder / "actor" / "config.json"
    if not file.is_file():  # it has adapters only
        return False
    # A router is asked for only where there are experts: other models have been refused.
    is_of_router = key == "actor_rollout_ref.actor.freeze_moe_router"
    return is_of_router or vision_config(json.loads(file.read_text(encoding="utf-8"))) is not None


def _listed(changes: Sequence[Change]) -> str:
    return ", ".join(map(str, changes))
