# SPDX-License-Identifier: Apache-2.0
"""What the checkpoints of training engines have in common, and the file that one process writes
beside its Hugging Face folder. Those of several processes are in ``sharded.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch

from tandem.errors import UserError
from tandem.models.decoder import DecoderConfig
from tandem.types import SliceSpec

OPTIMIZER_FILE = "optimizer.pt"
"""Optimizer and schedule of a process that holds everything."""

SHARDED_FILE = "sharded.json"
"""Only checkpoints of several processes have it."""


def fingerprint(
    family: str, architecture: DecoderConfig | None, *, parameters: Iterable[SliceSpec]
) -> str:
    """Tells models apart, however they are sharded.

    Args:
        architecture: of the whole decoder, None for transformers' models.
        parameters: a box of each parameter, in order.
    """
    listed = [(box.name, box.shape, str(box.dtype)) for box in parameters]
    return hashlib.sha256(repr((family, architecture, listed)).encode()).hexdigest()


def read_state(
    folder: Path, device: torch.device, *, model: str, mapped: bool = False
) -> Mapping[str, Any]:
    """The content of ``OPTIMIZER_FILE``.

    Args:
        model: fingerprint of the model that is to take it over.
        mapped: only what is looked at is read; ``device`` must be the CPU.

    Raises:
        UserError: it is missing or cut short, or belongs to another model.
    """
    path = folder / OPTIMIZER_FILE
    if not is_zipfile(path):  # what torch writes, and what a file cut short no longer is
        raise incomplete(folder, f"it has no complete {OPTIMIZER_FILE}")
    try:
        state = torch.load(path, map_location=device, weights_only=True, mmap=mapped)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        cause = " ".join(str(error).split())[:120]
        raise incomplete(folder, f"{OPTIMIZER_FILE} cannot be read ({cause})") from error
    require_model(folder, model, saved=state["model"])
    return state


def require_model(folder: Path, model: str, *, saved: str) -> None:
    """Raise UserError if the fingerprints are not the same."""
    if saved != model:
        raise UserError(
            f"checkpoint={str(folder)!r}: it belongs to another model. "
            "Set actor_rollout_ref.model.path (of a critic: critic.model.path, of tandem sft: "
            "model.path) to the one it was trained from, or trainer.resume_mode=disable."
        )


def incomplete(folder: Path, reason: str) -> UserError:
    """The error for a checkpoint that cannot be loaded."""
    return UserError(
        f"checkpoint={str(folder)!r}: {reason}. "
        "Resume from a complete checkpoint or set trainer.resume_mode=disable."
    )
