# SPDX-License-Identifier: Apache-2.0
"""The common parts of the engines' checkpoints: fingerprint, optimizer file and errors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast
from zipfile import is_zipfile

import torch

from tandem.errors import UserError
from tandem.models.decoder import DecoderConfig
from tandem.types import SliceSpec

OPTIMIZER_FILE = "optimizer.pt"
"""The file with optimizer and schedule in a checkpoint of a single process."""

SHARDED_FILE = "sharded.json"
"""The file that marks a checkpoint of several processes."""


def fingerprint(
    family: str, architecture: DecoderConfig | None, *, parameters: Iterable[SliceSpec]
) -> str:
    """Return a hash that identifies a model, independent of its sharding.

    Args:
        architecture: the configuration of the whole decoder; None for transformers' models.
        parameters: any region of each parameter, in order.
    """
    listed = [(region.name, region.shape, str(region.dtype)) for region in parameters]
    identity: tuple[object, ...] = (family, architecture, listed)
    if architecture is not None and architecture.adapters is not None:
        identity = (*identity, architecture.adapters)
    if architecture is not None and architecture.experts is not None:
        identity = (*identity, architecture.experts)
    return hashlib.sha256(repr(identity).encode()).hexdigest()


def read_state(
    folder: Path, device: torch.device, *, model: str, mapped: bool = False
) -> Mapping[str, Any]:
    """Return the content of ``OPTIMIZER_FILE``.

    Args:
        model: the fingerprint of the model to restore.
        mapped: whether to read lazily through a memory map; requires the CPU as ``device``.

    Raises:
        UserError: the file is missing or incomplete, or belongs to another model.
    """
    path = folder / OPTIMIZER_FILE
    if not is_zipfile(path):  # torch writes a zip file, which is invalid if it is truncated
        raise incomplete(folder, f"it has no complete {OPTIMIZER_FILE}")
    try:
        state = torch.load(path, map_location=device, weights_only=True, mmap=mapped)
    except (OSError, RuntimeError, ValueError, LookupError, EOFError, UnpicklingError) as error:
        cause = " ".join(str(error).split())[:120]
        raise incomplete(folder, f"{OPTIMIZER_FILE} cannot be read ({cause})") from error
    if not isinstance(state, dict) or not _is_state(cast("dict[object, object]", state)):
        raise incomplete(folder, f"{OPTIMIZER_FILE} is not one that tandem wrote")
    require_model(folder, model, saved=state["model"])
    return state


def _is_state(state: Mapping[object, object]) -> bool:
    """Return whether the content of ``OPTIMIZER_FILE`` has its parts."""
    are_moments = isinstance(state.get("optimizer"), dict)
    return are_moments and "model" in state and isinstance(state.get("schedule_step"), int)


def require_model(folder: Path, model: str, *, saved: str) -> None:
    """Raise UserError unless the fingerprints ``model`` and ``saved`` are equal."""
    if saved != model:
        raise UserError(
            "checkpoint",
            str(folder),
            rule="it belongs to another model",
            remedy="Set actor_rollout_ref.model.path (critic.model.path for a critic, model.path "
            "in tandem sft) to the model it was trained from, or trainer.resume_mode=disable.",
        )


def incomplete(folder: Path, reason: str) -> UserError:
    """Return the error for a checkpoint that cannot be loaded."""
    return UserError(
        "checkpoint",
        str(folder),
        rule=reason,
        remedy="Resume from a complete checkpoint or set trainer.resume_mode=disable.",
    )
