# SPDX-License-Identifier: Apache-2.0
"""The common parts of the checkpoints of training engines.

One process writes ``OPTIMIZER_FILE`` into its Hugging Face folder. Several processes write the
files of ``sharded_checkpoint``.
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
"""The file with optimizer and schedule of a process that holds all parameters."""

SHARDED_FILE = "sharded.json"
"""The file that tells a checkpoint of several processes from one of a single process."""


def fingerprint(
    family: str, architecture: DecoderConfig | None, *, parameters: Iterable[SliceSpec]
) -> str:
    """Return a hash that differs between models but not between shardings of one model.

    Args:
        architecture: the configuration of the whole decoder, None for transformers' models.
        parameters: one region of each parameter, in order.
    """
    listed = [(region.name, region.shape, str(region.dtype)) for region in parameters]
    return hashlib.sha256(repr((family, architecture, listed)).encode()).hexdigest()


def read_state(
    folder: Path, device: torch.device, *, model: str, mapped: bool = False
) -> Mapping[str, Any]:
    """Return the content of ``OPTIMIZER_FILE``.

    Args:
        model: the fingerprint of the model that the state is for.
        mapped: whether to read lazily through a memory map. Requires the CPU as ``device``.

    Raises:
        UserError: the file is missing, is cut short, or belongs to another model.
    """
    path = folder / OPTIMIZER_FILE
    if not is_zipfile(path):  # torch writes a zip file, and one that is cut short is none
        raise incomplete(folder, f"it has no complete {OPTIMIZER_FILE}")
    try:
        state = torch.load(path, map_location=device, weights_only=True, mmap=mapped)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        cause = " ".join(str(error).split())[:120]
        raise incomplete(folder, f"{OPTIMIZER_FILE} cannot be read ({cause})") from error
    require_model(folder, model, saved=state["model"])
    return state


def require_model(folder: Path, model: str, *, saved: str) -> None:
    """Raise UserError unless the fingerprints ``model`` and ``saved`` are equal."""
    if saved != model:
        raise UserError(
            "checkpoint",
            str(folder),
            rule="it belongs to another model",
            remedy="Set actor_rollout_ref.model.path (of a critic: critic.model.path, of tandem "
            "sft: model.path) to the one it was trained from, or trainer.resume_mode=disable.",
        )


def incomplete(folder: Path, reason: str) -> UserError:
    """Return the error for a checkpoint that cannot be loaded."""
    return UserError(
        "checkpoint",
        str(folder),
        rule=reason,
        remedy="Resume from a complete checkpoint or set trainer.resume_mode=disable.",
    )
