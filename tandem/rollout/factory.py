# SPDX-License-Identifier: Apache-2.0
"""Which rollout engine serves a model in this process."""

from __future__ import annotations

import logging

from tandem.api import RolloutEngine
from tandem.config.rollout import RolloutConfig
from tandem.models.language_model import LanguageModel
from tandem.rollout.hf import HfRolloutConfig, HfRolloutEngine
from tandem.rollout.native.engine import NativeRolloutConfig, NativeRolloutEngine
from tandem.types import TokenIds

logger = logging.getLogger(__name__)


def make_rollout(
    model: LanguageModel, config: RolloutConfig, *, eos_ids: TokenIds, memory_bytes: int
) -> RolloutEngine:
    """The native engine where our decoder computes the model, else transformers' generate.

    ``config.name`` has no say: engines of other names are not built yet, and the family decides
    between these two.

    Args:
        eos_ids: tokens that end a response.
        memory_bytes: all memory of the device; what is free now must not decide how large batches
            are, because rounding depends on that, and a resumed run must repeat it.
    """
    if model.decoder is not None:
        return NativeRolloutEngine(
            model.decoder,
            NativeRolloutConfig(
                seed=config.seed,
                eos_ids=eos_ids,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_cache_bytes=memory_bytes // 4,
            ),
        )
    logger.info("rollout by transformers' generate: family %s has no decoder here", model.family)
    settings = HfRolloutConfig(config.seed, eos_ids, max_num_seqs=config.max_num_seqs)
    return HfRolloutEngine(model.module, settings)
