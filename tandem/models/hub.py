# SPDX-License-Identifier: Apache-2.0
"""Models on the Hugging Face hub and in its cache."""

from __future__ import annotations

from pathlib import Path

from httpx import HTTPError
from huggingface_hub import model_info, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from tandem.errors import UserError


def cached_snapshot(path: str, *, key: str) -> Path | None:
    """Return the folder of model ``path`` in the hub's cache, or None.

    Raises:
        UserError: ``path`` cannot be the name of a model.
    """
    try:
        validate_repo_id(path)
        return Path(snapshot_download(path, local_files_only=True))
    except HFValidationError as error:
        raise UserError(key, path, rule="no such folder", remedy="Check the path.") from error
    except LocalEntryNotFoundError:
        return None


def download(path: str, key: str, *, files: list[str]) -> Path:
    """Download the files of model ``path`` that match ``files`` and return their folder.

    Raises:
        UserError: there is no such model, or the hub cannot be reached.
    """
    try:
        # This request fails quickly. A download from an unreachable hub retries for 30 s.
        model_info(path, timeout=10)
        return Path(snapshot_download(path, allow_patterns=files))
    except (OSError, ValueError, HTTPError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            key,
            path,
            rule="neither a local folder, nor in the Hugging Face cache, nor available from the "
            f"hub ({reason})",
            remedy="Give a folder, or download the model on a machine with network access: "
            f"hf download {path}",
        ) from error
