# SPDX-License-Identifier: Apache-2.0
"""The models of a run on one device, opened from their specs, and the precisions of all models.

Trained weights may be stored in a higher precision than they are computed with. Frozen weights are
stored in the compute precision.
"""

from __future__ import annotations

import logging

import torch

from tandem.config.schema.fsdp import FsdpConfig
from tandem.models.adapted import trained_parameters
from tandem.models.folder import (
    ModelFolder,
    adapt_folder,
    check_critic_folder,
    check_folder,
    check_reward_folder,
    fill_adapters,
    freeze_router,
    freeze_tower,
    open_part,
)
from tandem.models.language_model import LanguageModel, NativeModel
from tandem.models.operators import operators_for
from tandem.models.parallel import WHOLE
from tandem.platforms.record import Platform
from tandem.platforms.select import resolve_dtype
from tandem.workers.job import PolicySpec

logger = logging.getLogger(__name__)


def policy_folder(spec: PolicySpec, *, fetches_weights: bool = True) -> ModelFolder:
    """Return the folder of a model. Raise UserError if it does not hold such a model.

    Args:
        fetches_weights: whether weights that are only on the hub are downloaded.
    """
    model, loads = spec.model, spec.random_seed is None
    trusts = model.trust_remote_code
    if spec.is_reward_model:
        return check_reward_folder(
            model.path,
            trust_remote_code=trusts,
            fetches_weights=fetches_weights,
            key="reward_model.model.path",
        )
    if spec.value_head_seed is None:
        folder = check_folder(
            model.path,
            trust_remote_code=trusts,
            load_weight=loads,
            fetches_weights=fetches_weights,
        )
        if spec.freezes_tower:
            folder = freeze_tower(folder)
        if spec.freezes_router:
            folder = freeze_router(folder)
        if spec.adapters is None:
            return folder
        return adapt_folder(folder, spec.adapters, seed=spec.adapter_seed)
    return check_critic_folder(
        model.path,
        seed=spec.value_head_seed,
        trust_remote_code=trusts,
        load_weight=loads,
        fetches_weights=fetches_weights,
        key="critic.model.path",
    )


def open_policy(
    spec: PolicySpec,
    platform: Platform,
    *,
    dtype: torch.dtype,
    base_dtype: torch.dtype | None = None,
) -> LanguageModel:
    """Open a whole model in ``dtype`` on the device of this process.

    Args:
        base_dtype: the precision of the frozen base under adapters; None: ``dtype``.

    Raises:
        UserError: the model cannot be loaded.
    """
    return open_part(
        policy_folder(spec),
        WHOLE,
        dtype=dtype,
        device=platform.device_type,
        random_seed=spec.random_seed,
        operators=operators_for(platform),
        base_dtype=base_dtype,
    )


def open_initial(spec: PolicySpec, model: LanguageModel) -> NativeModel:
    """Return the policy that adapters start from, over the storage of a model with adapters.

    It is the base, with a frozen copy of the adapter that the run starts from if there is one. A
    resumed run has the same one.
    """
    assert isinstance(model, NativeModel), "a model with adapters has tandem's decoder"
    folder = policy_folder(spec)
    if folder.start is None or folder.start.folder is None:
        return model.base()
    initial = model.with_own_adapters(trained_parameters(model.decoder).popitem()[1].dtype)
    with torch.no_grad():
        fill_adapters(folder, initial.trained_slices())
    return initial


def trained_dtype(spec: PolicySpec, platform: Platform) -> torch.dtype:
    """Return the precision of trained weights, gradients and optimizer.

    Adapters are always float32, because a lower precision would round their updates away.

    Raises:
        UserError: the device cannot compute in it.
    """
    if spec.adapters is not None:
        return torch.float32
    return stored_dtype(spec.layout, platform, section=spec.section)


def stored_dtype(layout: FsdpConfig, platform: Platform, *, section: str) -> torch.dtype:
    """Return the configured precision of stored weights. Warn if it is low.

    Args:
        section: the section of the keys that ``layout`` came from, for messages.

    Raises:
        UserError: the device cannot compute in it.
    """
    stored = resolve_dtype(layout.model_dtype, platform, key=f"{section}.model_dtype")
    if stored != torch.float32:
        logger.warning(
            "%s.model_dtype=%s: weights, gradients and optimizer have only this precision, and "
            "small updates round to nothing. Prefer float32.",
            section,
            layout.model_dtype,
        )
    return stored


def compute_dtype(
    layout: FsdpConfig,
    platform: Platform,
    *,
    section: str = "actor_rollout_ref.actor.fsdp_config",
) -> torch.dtype:
    """Return the precision of computation and of frozen weights. Errors as ``stored_dtype``."""
    return resolve_dtype(layout.dtype, platform, key=f"{section}.dtype")


def require_precision(layout: FsdpConfig, platform: Platform, *, section: str) -> None:
    """Raise UserError unless the device supports the precisions of ``layout``."""
    for name, wanted in (("dtype", layout.dtype), ("model_dtype", layout.model_dtype)):
        resolve_dtype(wanted, platform, key=f"{section}.{name}")
