# SPDX-License-Identifier: Apache-2.0
"""All roles of a policy in one process on one device: trainer and rollout share the same weights.

Sharing is by storage: the rollout generates with the very module the trainer computes with, so that
an update is in use as soon as it is made, and nothing is copied. Where that module is of lower
precision than the weights are kept in, the update itself ends by rounding into it. The reference is
a frozen copy, and only exists if something reads it; so do critic and reward model, models of their
own.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tandem.api import ReferencePolicy, RolloutEngine, TrainEngine
from tandem.config.derived.sizes import ModelSizes
from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.model import ModelConfig
from tandem.config.schema.optim import OptimConfig
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.engines.single import ReferenceModel, SingleDeviceEngine
from tandem.models.decoder import DecoderConfig
from tandem.models.folder import (
    ModelFolder,
    check_critic_folder,
    check_reward_folder,
    open_model,
    open_part,
)
from tandem.models.language_model import LanguageModel
from tandem.models.operators import operators_for
from tandem.models.parallel import WHOLE
from tandem.platforms.record import Platform
from tandem.rollout.factory import make_rollout
from tandem.types import TokenIds
from tandem.workers.precision import compute_dtype, stored_dtype

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ColocatedEngines:
    """The engines of a run, and the model's sizes if its flops are known. ``num_rows``: see
    ``pipeline.context.Engines``.
    """

    train: TrainEngine
    rollout: RolloutEngine
    reference: ReferencePolicy | None
    critic: TrainEngine | None
    reward_model: ReferencePolicy | None
    sizes: ModelSizes | None
    num_rows: int | None


def build_colocated(
    config: RunConfig, *, platform: Platform, eos_ids: TokenIds, total_steps: int
) -> ColocatedEngines:
    """Load the model and put the engines together.

    Raises:
        UserError: the model cannot be loaded or not be used on this platform.
    """
    roles = config.actor_rollout_ref
    layout = roles.actor.fsdp_config
    stored = _open(roles.model, layout, random_seed=_random_seed(config), platform=platform)
    model = stored.in_dtype(compute_dtype(layout, platform))
    optim = roles.actor.optim
    return ColocatedEngines(
        train=_trainer(
            stored, model, config=roles.model, layout=layout, optim=optim, total_steps=total_steps
        ),
        rollout=make_rollout(model, roles.rollout, eos_ids=eos_ids, platform=platform),
        reference=_reference(config, platform) if config.needs_reference else None,
        critic=_critic(config, platform, total_steps=total_steps) if config.uses_critic else None,
        reward_model=_reward_model(config, platform) if config.reward_model.enable else None,
        sizes=None if model.decoder is None else sizes_of(model.decoder.config),
        num_rows=None if model.decoder is None else roles.rollout.max_num_seqs,
    )


def build_trainer(config: SftConfig, *, platform: Platform, total_steps: int) -> TrainEngine:
    """Load the model for supervised fine-tuning. Errors as ``build_colocated``."""
    stored = _open(config.model, config.engine, random_seed=None, platform=platform)
    return _trainer(
        stored,
        stored.in_dtype(compute_dtype(config.engine, platform)),
        config=config.model,
        layout=config.engine,
        optim=config.optim,
        total_steps=total_steps,
    )


def _open(
    model: ModelConfig, layout: FsdpConfig, *, random_seed: int | None, platform: Platform
) -> LanguageModel:
    """The model in the precision its weights are kept in."""
    return open_model(
        model.path,
        dtype=stored_dtype(layout, platform),
        device=platform.device_type,
        trust_remote_code=model.trust_remote_code,
        random_seed=random_seed,
        operators=operators_for(platform),
    )


def _random_seed(config: RunConfig) -> int | None:
    """Of random weights, None to load them."""
    return None if config.actor_rollout_ref.actor.load_weight else config.trainer.seed


def _trainer(
    stored: LanguageModel,
    model: LanguageModel,
    *,
    config: ModelConfig,
    layout: FsdpConfig,
    optim: OptimConfig,
    total_steps: int,
) -> SingleDeviceEngine:
    model.set_gradient_checkpointing(
        config.enable_gradient_checkpointing, config.recompute_granularity
    )
    return SingleDeviceEngine(
        stored,
        optim,
        total_training_steps=total_steps,
        compute=model,
        offload_optimizer=layout.optimizer_offload,
        offload_weights=layout.param_offload and _can_rest(stored, model),
    )


def _can_rest(stored: LanguageModel, model: LanguageModel) -> bool:
    """Whether trained weights can leave the device between steps; says why not."""
    if not _is_on_accelerator(stored, "param_offload"):
        return False
    if stored is model:
        logger.warning(
            "param_offload=True: the weights stay on the device, as they are computed with in the "
            "precision they are kept in. Set model_dtype=float32 and dtype=bfloat16 to change that."
        )
        return False
    return True


def _is_on_accelerator(model: LanguageModel, key: str) -> bool:
    """Says so if it is not, as ``key`` then changes nothing."""
    is_on_host = model.lm_head_weight.device.type == "cpu"
    if is_on_host:
        logger.warning("%s=True: the weights are in the host's memory anyway", key)
    return not is_on_host


def _reference(config: RunConfig, platform: Platform) -> ReferenceModel:
    """The initial weights, always read anew: a resumed run has the same reference."""
    roles = config.actor_rollout_ref
    layout = roles.actor.fsdp_config
    own = roles.ref.fsdp_config
    stored = _open(roles.model, layout, random_seed=_random_seed(config), platform=platform)
    model = stored.in_dtype(compute_dtype(own, platform))
    return _frozen(model, own, section="actor_rollout_ref.ref.fsdp_config")


def _reward_model(config: RunConfig, platform: Platform) -> ReferenceModel:
    layout, section = config.reward_model.model.fsdp_config, "reward_model.model.fsdp_config"
    model = open_part(
        reward_folder(config),
        WHOLE,
        dtype=compute_dtype(layout, platform, section=section),
        device=platform.device_type,
        operators=operators_for(platform),
    )
    return _frozen(model, layout, section=section)


def _frozen(model: LanguageModel, layout: FsdpConfig, *, section: str) -> ReferenceModel:
    rests = layout.param_offload and _is_on_accelerator(model, f"{section}.param_offload")
    return ReferenceModel(model, offload_weights=rests)


def _critic(config: RunConfig, platform: Platform, *, total_steps: int) -> SingleDeviceEngine:
    critic = config.critic
    layout = critic.model.fsdp_config
    section = "critic.model.fsdp_config"
    random_seed = _random_seed(config)
    stored = open_part(
        critic_folder(config),
        WHOLE,
        dtype=stored_dtype(layout, platform, section=section),
        device=platform.device_type,
        random_seed=random_seed,
        operators=operators_for(platform),
    )
    return _trainer(
        stored,
        stored.in_dtype(compute_dtype(layout, platform, section=section)),
        config=critic.model,
        layout=layout,
        optim=critic.optim,
        total_steps=total_steps,
    )


def critic_folder(config: RunConfig) -> ModelFolder:
    """The folder of the critic. Raises UserError if it cannot be one."""
    model = config.critic.model
    return check_critic_folder(
        model.path,
        seed=config.trainer.seed,
        trust_remote_code=model.trust_remote_code,
        load_weight=_random_seed(config) is None,
        key="critic.model.path",
    )


def reward_folder(config: RunConfig) -> ModelFolder:
    """The folder of the reward model. Raises UserError if it cannot be one."""
    model = config.reward_model.model
    trusts, key = model.trust_remote_code, "reward_model.model.path"
    return check_reward_folder(model.path, trust_remote_code=trusts, key=key)


def sizes_of(config: DecoderConfig) -> ModelSizes:
    """The sizes that flops follow from."""
    return ModelSizes(
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocabulary=config.vocab_size,
        tied=config.tie_embeddings,
    )
