# SPDX-License-Identifier: Apache-2.0
"""All engines of a run in one process on one device.

The rollout generates with the trainer's module: an update takes effect at once, without a copy. If
that module has a lower precision than the stored weights, the update ends by rounding into it. A
rollout engine with its own weights receives them after each update instead. Reference, critic and
reward model are separate models; the reference of adapters shares the storage of their base.
"""

from __future__ import annotations

import logging

from tandem.api import Engines
from tandem.config.derived.pools import CRITIC, REWARD_MODEL, Placement
from tandem.config.derived.trained_model import trained_model
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.engines.single import ReferenceModel, SingleDeviceEngine
from tandem.models.language_model import LanguageModel
from tandem.platforms.record import Platform
from tandem.rollout.factory import EngineSpec, build_engine
from tandem.rollout.feed import with_weights_of
from tandem.types import TokenIds
from tandem.workers.deployment import policy_spec, trainer_spec
from tandem.workers.job import PolicySpec, TrainerSpec
from tandem.workers.policies import (
    compute_dtype,
    open_initial,
    open_policy,
    policy_folder,
    stored_dtype,
    trained_dtype,
)
from tandem.workers.shared_base import RunOverBase

logger = logging.getLogger(__name__)


def build_colocated(
    config: RunConfig,
    placement: Placement,
    *,
    platform: Platform,
    eos_ids: TokenIds,
    total_steps: int,
    over: RunOverBase | None = None,
) -> Engines:
    """Load the models and build the engines.

    Args:
        over: the base that the run shares with others; None loads one.

    Raises:
        UserError: a model cannot be loaded, or not used on this platform.
    """
    policy = trainer_spec(config, placement, task="actor-train", total_steps=total_steps)
    train, model = _open_trainer(policy, platform, over=over)
    spec = EngineSpec(
        model=model,
        folder=policy_folder(policy.policy).path,
        config=config.actor_rollout_ref.rollout,
        eos_ids=eos_ids,
        platform=platform,
        max_length=trained_model(config).max_tokens,
        joint=None if over is None else over.member,
    )
    engine = build_engine(spec)
    rollout = with_weights_of(model, engine)
    reference = critic = reward_model = None
    if config.needs_reference and policy.policy.adapters is not None:
        reference = ReferenceModel(open_initial(policy.policy, model))
    elif config.needs_reference:
        frozen = policy_spec(config, placement, task="ref_logp")
        # The initial weights are read again: a resumed run must have the same reference.
        stored = stored_dtype(policy.policy.layout, platform, section=policy.policy.section)
        initial = open_policy(frozen, platform, dtype=stored)
        dtype = compute_dtype(frozen.layout, platform, section=frozen.section)
        reference = _frozen(initial.in_dtype(dtype), frozen)
    if config.uses_critic:
        critic, _ = _open_trainer(
            trainer_spec(config, placement, task=CRITIC, total_steps=total_steps), platform
        )
    if config.reward_model.enable:
        judge = policy_spec(config, placement, task=REWARD_MODEL)
        dtype = compute_dtype(judge.layout, platform, section=judge.section)
        reward_model = _frozen(open_policy(judge, platform, dtype=dtype), judge)
    return Engines(
        train,
        rollout,
        reference,
        scorer=train,
        critic=critic,
        reward_model=reward_model,
        num_rows=engine.capacity.num_rows,
        close=engine.close,
    )


def build_trainer(
    config: SftConfig, placement: Placement, *, platform: Platform, total_steps: int
) -> SingleDeviceEngine:
    """Load the model for supervised fine-tuning. Errors as ``build_colocated``."""
    spec = trainer_spec(config, placement, task="actor-train", total_steps=total_steps)
    return _open_trainer(spec, platform)[0]


def _open_trainer(
    spec: TrainerSpec, platform: Platform, *, over: RunOverBase | None = None
) -> tuple[SingleDeviceEngine, LanguageModel]:
    policy, layout, settings = spec.policy, spec.policy.layout, spec.policy.model
    dtype = compute_dtype(layout, platform, section=policy.section)
    opens = open_policy if over is None else over.base.open_policy
    stored = opens(policy, platform, dtype=trained_dtype(policy, platform), base_dtype=dtype)
    model = stored.in_dtype(dtype)
    model.set_gradient_checkpointing(
        settings.enable_gradient_checkpointing, settings.recompute_granularity
    )
    engine = SingleDeviceEngine(
        stored,
        spec.optim,
        total_training_steps=spec.total_steps,
        compute=model,
        offload_optimizer=layout.optimizer_offload,
        offload_weights=layout.param_offload and _can_offload(stored, model),
    )
    return engine, model


def _can_offload(stored: LanguageModel, model: LanguageModel) -> bool:
    """Return whether trained weights can leave the device between steps. Warn if they cannot."""
    if not _is_on_accelerator(stored, "param_offload"):
        return False
    if stored is model:
        logger.warning(
            "param_offload=True: the weights stay on the device, because they are stored in the "
            "compute precision. Set model_dtype=float32 and dtype=bfloat16 to offload them."
        )
        return False
    return True


def _is_on_accelerator(model: LanguageModel, key: str) -> bool:
    is_on_host = model.lm_head_weight.device.type == "cpu"
    if is_on_host:
        logger.warning("%s=True has no effect: the weights are already in host memory", key)
    return not is_on_host


def _frozen(model: LanguageModel, spec: PolicySpec) -> ReferenceModel:
    key = f"{spec.section}.param_offload"
    offloads = spec.layout.param_offload and _is_on_accelerator(model, key)
    return ReferenceModel(model, offload_weights=offloads)
