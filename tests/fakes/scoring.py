# SPDX-License-Identifier: Apache-2.0
"""The log-probs of a packed batch by a model, in one call."""

from __future__ import annotations

from tandem.models.language_model import LanguageModel, TokenScores, score_hidden
from tandem.types import PackedBatch


def score_batch(
    model: LanguageModel, batch: PackedBatch, *, temperature: float, with_entropy: bool
) -> TokenScores:
    """Return log-probs of the response tokens, and the entropies if requested."""
    h_LD = model.hidden(batch)
    return score_hidden(model, batch, h_LD=h_LD, temperature=temperature, with_entropy=with_entropy)
