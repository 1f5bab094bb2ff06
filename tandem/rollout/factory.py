# SPDX-License-Identifier: Apache-2.0
"""Which rollout engine serves a model in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tandem.api import RolloutEngine
from tandem.config.schema.families import foreign_rollout
from tandem.config.schema.rollout import RolloutConfig
from tandem.errors import UserError
from tandem.models.decoder import Decoder, DecoderConfig
from tandem.models.language_model import LanguageModel
from tandem.platforms.capture import Capturer, eager
from tandem.platforms.record import Platform
from tandem.rollout.hf import HfRolloutConfig, HfRolloutEngine
from tandem.rollout.native.engine import NativeRolloutEngine
from tandem.rollout.paged.cache import HEAD_DIMS
from tandem.rollout.settings import NativeRolloutConfig
from tandem.types import TokenIds

logger = logging.getLogger(__name__)


def make_rollout(
    model: LanguageModel, config: RolloutConfig, *, eos_ids: TokenIds, platform: Platform
) -> RolloutEngine:
    """A native engine where our decoder computes the model, else transformers' generate.

    ``config.name`` has no say: engines of other names are not built yet, and the family decides
    between these two; ``hf`` says no more than that the latter is meant. What is free of the
    device's memory now must not decide how large batches are, because rounding depends on that, and
    a resumed run must repeat it.

    Args:
        model: one that ``require_kernels`` accepts.
        eos_ids: tokens that end a response.
    """
    if model.decoder is None:
        is_meant = config.name == "hf"
        level = logging.INFO if is_meant else logging.WARNING
        logger.log(level, "%s", foreign_rollout(model.family, is_meant=is_meant))
        hf_settings = HfRolloutConfig(config.seed, eos_ids, max_num_seqs=config.max_num_seqs)
        return HfRolloutEngine(model.module, hf_settings)
    total_bytes = platform.total_memory_bytes()
    if platform.kernels == "torch":
        settings = _settings(config, eos_ids, cache_bytes=total_bytes // 4)
        return NativeRolloutEngine(model.decoder, settings)
    weights_bytes = sum(weight.nbytes for weight in model.decoder.parameters())
    cache_bytes = max(0, int(total_bytes * config.gpu_memory_utilization) - weights_bytes)
    settings = _settings(config, eos_ids, cache_bytes=cache_bytes)
    make_capturer = eager if config.enforce_eager else platform.make_capturer
    return _paged(model.decoder, settings, make_capturer=make_capturer, platform=platform)


def require_kernels(config: DecoderConfig | None, platform: Platform, *, key: str) -> None:
    """Raise UserError if a model would be generated with by kernels, and they do not compute it.

    Args:
        config: None for a model of transformers', which needs no kernels.
        key: the configuration key and value that the model came from, for the message.
    """
    if config is None or platform.kernels == "torch" or config.head_dim in HEAD_DIMS:
        return
    raise UserError(
        f"{key}: its head dimension {config.head_dim} has no attention kernel for "
        f"{platform.name} (there are {', '.join(map(str, HEAD_DIMS))}). "
        "Set trainer.device=cpu or use another model."
    )


def _settings(config: RolloutConfig, eos_ids: TokenIds, *, cache_bytes: int) -> NativeRolloutConfig:
    return NativeRolloutConfig(
        seed=config.seed,
        eos_ids=eos_ids,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_cache_bytes=cache_bytes,
        keeps_cache=config.partial_rollout == "keep_cache",
    )


def _paged(
    decoder: Decoder,
    settings: NativeRolloutConfig,
    *,
    make_capturer: Callable[[], Capturer],
    platform: Platform,
) -> RolloutEngine:
    from tandem.rollout.paged.engine import PagedRolloutEngine

    return PagedRolloutEngine(
        decoder,
        settings,
        make_capturer=make_capturer,
        num_multiprocessors=platform.num_multiprocessors(),
    )
