# SPDX-License-Identifier: Apache-2.0
"""The weights that a run reads beside its checkpoint: of its reference and of its reward model.

A run that is resumed reads them again. If they have changed in the meantime, it would go on with
another KL or other scores, so ``origins.json`` in the folder of the run has their digests.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from tandem.checkpoint.store import Checkpoint
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError
from tandem.models.adapters import file_digest
from tandem.models.folder import ModelFolder
from tandem.report.run_folder import ORIGINS_FILE

Digests = dict[str, dict[str, str]]
"""Key of the configuration -> name of a file in its folder -> digest of the file."""

logger = logging.getLogger(__name__)


def origins_of(config: RunConfig | SftConfig, model: ModelFolder) -> Digests:
    """Return the digests of the weights that are read beside a checkpoint and are on this host.

    Args:
        model: the model to be trained.
    """
    if isinstance(config, SftConfig):
        return {}
    found: Digests = {}
    if config.needs_reference and model.start is not None and model.start.folder is not None:
        found[model.start.key] = _digests(model.start.folder)
    elif config.needs_reference and model.start is None:
        found[model.key] = _digests(model.path)
    if config.reward_model.enable:
        found["reward_model.model.path"] = _digests(Path(config.reward_model.model.path))
    return found


def require_same_origins(found: Digests, checkpoint: Checkpoint, *, is_wanted: bool) -> None:
    """Compare the digests with those of the run that a checkpoint belongs to.

    Files that were not on this host at one of the two times are not compared.

    Args:
        is_wanted: whether the user has named the checkpoint, so that a difference is a warning.

    Raises:
        UserError: a file has changed, and ``is_wanted`` is False.
    """
    earlier = _read(checkpoint.folder.parent / ORIGINS_FILE)
    for key, name in _changed(found, earlier):
        rule = f"{name} in its folder has changed since the run of {checkpoint.folder} began"
        if is_wanted:
            logger.warning("%s: %s", key, rule)
            continue
        raise UserError(
            key,
            rule=f"{rule}, and what is computed from it would differ",
            remedy="Put the file back, or choose another trainer.default_local_dir. If the change "
            "is meant, set trainer.resume_mode=resume_path and "
            f"trainer.resume_from_path={checkpoint.folder}.",
        )


def write_origins(found: Digests, folder: Path) -> None:
    """Write the digests into the folder of a run, beside those of files that are not here now."""
    earlier = _read(folder / ORIGINS_FILE)
    merged = earlier | {key: earlier.get(key, {}) | digests for key, digests in found.items()}
    if merged:
        (folder / ORIGINS_FILE).write_text(f"{json.dumps(merged, indent=2)}\n", encoding="utf-8")


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(folder.expanduser().glob("*.safetensors"))
    return {file.name: file_digest(file) for file in files}


def _read(file: Path) -> Digests:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a run of before, or a damaged file
        return {}


def _changed(found: Digests, earlier: Digests) -> Iterator[tuple[str, str]]:
    for key, digests in found.items():
        known = earlier.get(key, {})
        yield from ((key, name) for name in _common(digests, known) if digests[name] != known[name])


def _common(one: Iterable[str], other: Iterable[str]) -> list[str]:
    return sorted(set(one) & set(other))
