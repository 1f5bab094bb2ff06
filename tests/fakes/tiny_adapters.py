# SPDX-License-Identifier: Apache-2.0
"""Tiny models with adapters, by our decoder and by the released peft."""

from __future__ import annotations

from pathlib import Path

import torch

from tandem.config.derived.adapters import Adapters
from tandem.models.folder import AdapterStart, adapt_folder, check_folder, open_part
from tandem.models.language_model import NativeModel
from tandem.models.parallel import WHOLE

SECTION = "actor_rollout_ref.model"
ALL = Adapters(4, 8.0, False, "all-linear", (), folder=None, section=SECTION)
"""Rank 4 and alpha 8 for all linear maps, drawn."""


def open_adapted(
    folder: Path,
    adapters: Adapters = ALL,
    *,
    dtype: torch.dtype = torch.float32,
    base_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> NativeModel:
    """Open a base with adapters whole on the CPU."""
    checked = adapt_folder(check_folder(str(folder)), adapters, seed=seed)
    assert isinstance(checked.start, AdapterStart)
    model = open_part(checked, WHOLE, dtype=dtype, device="cpu", base_dtype=base_dtype)
    assert isinstance(model, NativeModel)
    return model


def spread_b(model: NativeModel, seed: int = 1) -> None:
    """Replace the zeros of B by random values, so that the adapters have an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.decoder.named_parameters():
            if name.endswith("lora_b"):
                parameter.normal_(0.0, 0.05, generator=generator)
