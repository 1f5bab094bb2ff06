# SPDX-License-Identifier: Apache-2.0
"""All roles of a policy in one process on one device: trainer and rollout share the same weights.

Sharing is by storage: the rollout generates with the very module the trainer updates, so that an
update is in use as soon as it is made, and nothing is copied. The reference is a frozen copy, and
only exists if something reads it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from tandem.api import ReferencePolicy, RolloutEngine, TrainEngine
from tandem.config.layout import FsdpConfig
from tandem.config.model import ModelConfig
from tandem.config.optim import OptimConfig
from tandem.config.run import RunConfig
from tandem.config.sft import SftConfig
from tandem.engines.single import ReferenceModel, SingleDeviceEngine
from tandem.errors import UserError
from tandem.metrics.throughput import ModelShape
from tandem.models.decoder import DecoderConfig
from tandem.models.folder import open_model
from tandem.models.language_model import LanguageModel
from tandem.platforms.record import Platform
from tandem.platforms.select import resolve_dtype
from tandem.rollout.factory import make_rollout
from tandem.types import TokenIds

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ColocatedEngines:
    """The engines of a run, and the model's sizes if its flops are known."""

    train: TrainEngine
    rollout: RolloutEngine
    reference: ReferencePolicy | None
    shape: ModelShape | None


def build_colocated(
    config: RunConfig, *, platform: Platform, eos_ids: TokenIds, total_steps: int
) -> ColocatedEngines:
    """Load the model and put the engines together.

    Raises:
        UserError: the model cannot be loaded or not be used in the precision asked for.
    """
    roles = config.actor_rollout_ref
    model = _open(
        roles.model,
        roles.actor.fsdp_config,
        load_weight=roles.actor.load_weight,
        platform=platform,
    )
    return ColocatedEngines(
        train=_trainer(model, roles.model, optim=roles.actor.optim, total_steps=total_steps),
        rollout=make_rollout(
            model,
            roles.rollout,
            eos_ids=eos_ids,
            memory_bytes=platform.total_memory_bytes(),
        ),
        reference=_reference(config, platform) if config.needs_reference else None,
        shape=None if model.decoder is None else _shape(model.decoder.config),
    )


def build_trainer(config: SftConfig, *, platform: Platform, total_steps: int) -> TrainEngine:
    """Load the model for supervised fine-tuning. Errors as ``build_colocated``."""
    model = _open(config.model, config.engine, load_weight=True, platform=platform)
    return _trainer(model, config.model, optim=config.optim, total_steps=total_steps)


def _open(
    model: ModelConfig, layout: FsdpConfig, *, load_weight: bool, platform: Platform
) -> LanguageModel:
    """The model in the one precision it is stored, trained and generated with."""
    stored = resolve_dtype(layout.model_dtype, platform)
    if resolve_dtype(layout.dtype, platform) != stored:
        if layout.dtype != "auto":
            raise UserError(
                f"fsdp_config.dtype={layout.dtype!r}: mixed precision is not built yet, it must "
                f"equal fsdp_config.model_dtype={layout.model_dtype!r}. Set both alike."
            )
        logger.warning("mixed precision is not built yet: computing in %s", layout.model_dtype)
    if stored != torch.float32:
        logger.warning(
            "fsdp_config.model_dtype=%s: weights, gradients and optimizer are kept in it alone, so "
            "that small updates round to nothing. Prefer float32.",
            layout.model_dtype,
        )
    return open_model(
        model.path,
        dtype=stored,
        device=platform.device_type,
        trust_remote_code=model.trust_remote_code,
        load_weight=load_weight,
    )


def _trainer(
    model: LanguageModel, config: ModelConfig, *, optim: OptimConfig, total_steps: int
) -> SingleDeviceEngine:
    model.set_gradient_checkpointing(config.enable_gradient_checkpointing)
    return SingleDeviceEngine(model, optim, total_training_steps=total_steps)


def _reference(config: RunConfig, platform: Platform) -> ReferenceModel:
    """The initial weights, always read anew: a resumed run has the same reference."""
    roles = config.actor_rollout_ref
    layout, load_weight = roles.actor.fsdp_config, roles.actor.load_weight
    return ReferenceModel(_open(roles.model, layout, load_weight=load_weight, platform=platform))


def _shape(config: DecoderConfig) -> ModelShape:
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
    )
