# SPDX-License-Identifier: Apache-2.0
"""A folder with a random Qwen2 whose log-probs depend strongly on every weight."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tandem.models.folder import open_model
from tandem.testing.contracts.rollout import TINY_QWEN2


def write_random_qwen2(folder: Path, *, tied: bool) -> None:
    """Write a model of two layers with head dimension 32."""
    config = TINY_QWEN2 | {"tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))
    open_model(str(folder), dtype=torch.float32, device="cpu", random_seed=7).save(folder)
