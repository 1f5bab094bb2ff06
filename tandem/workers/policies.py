# SPDX-License-Identifier: Apache-2.0
"""The models of a run, opened from their specs: whole on one device, or as one rank's part.

Trained weights may be stored in a higher precision than they are computed with. Frozen weights are
stored in the compute precision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch._C._distributed_c10d import Store

from tandem.config.schema.fsdp import FsdpConfig
from tandem.engines.fsdp_model import FsdpModel, FsdpSpec, ShardedModel, open_fsdp_model
from tandem.errors import UserError
from tandem.models.adapted import trained_parameters
from tandem.models.adapters import base_digest
from tandem.models.folder import (
    ModelFolder,
    adapt_folder,
    check_critic_folder,
    check_folder,
    check_reward_folder,
    fill_adapters,
    fill_slices,
    freeze_tower,
    open_part,
)
from tandem.models.hf import open_without_weights
from tandem.models.language_model import LanguageModel, NativeModel
from tandem.models.operators import operators_for
from tandem.models.parallel import WHOLE
from tandem.models.tensor_parallel import local_decoder
from tandem.models.weights import allocate
from tandem.platforms.record import Platform
from tandem.platforms.select import resolve_dtype
from tandem.types import HeldSlice
from tandem.workers.job import PolicySpec

logger = logging.getLogger(__name__)

_BASE = "tandem/base"
"""The key of the store for the base of the process that came first."""


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


def require_same_base(spec: PolicySpec, store: Store, *, host: str) -> None:
    """Compare the frozen weights on this host with those of the process that came first.

    They are the base of adapters, or a frozen vision tower. Each process reads them from its own
    disk, and the weight link does not carry them, so that other weights would show as a policy that
    lags behind without an end. ``base_digest`` says what is compared.

    Args:
        store: the store that all processes of the run share.
        host: the name of this host, for messages.

    Raises:
        UserError: the files differ.
    """
    folder = received_folder(spec)
    if not _keeps_weights(spec, folder):
        return
    own = f"{base_digest(folder.path)} {host}:{folder.path}"
    digest, _, place = store.compare_set(_BASE, "", own).decode().partition(" ")
    if own.partition(" ")[0] != digest:
        part = "frozen vision tower" if spec.adapters is None else "base of the adapters"
        raise UserError(
            folder.key if spec.adapters is None else f"{spec.adapters.section}.path",
            str(folder.path),
            rule=f"on {host} it has other weights, another config.json, or files of other names or "
            f"sizes than {place}, and each process reads the {part} from its own disk",
            remedy="Copy one folder to all hosts.",
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


def open_policy_part(
    spec: PolicySpec, platform: Platform, *, rank: int, device: torch.device, frozen: bool
) -> FsdpModel:
    """Open the part of ``rank``. All ranks of the pool call this together.

    Raises:
        UserError: the model cannot be loaded, or not sharded over the ranks.
    """
    compute = compute_dtype(spec.layout, platform, section=spec.section)
    stored = compute if frozen else trained_dtype(spec, platform)
    part = FsdpSpec(
        config=spec.layout,
        layout=spec.ranks,
        rank=rank,
        device=device,
        stored=stored,
        compute=compute,
        megatron_adaptor=platform.megatron_adaptor,
        section=spec.section,
    )
    return open_fsdp_model(
        policy_folder(spec),
        part,
        random_seed=spec.random_seed,
        operators=operators_for(platform),
        frozen=frozen,
    )


def received_folder(spec: PolicySpec) -> ModelFolder:
    """Return the folder of a policy that the weight link fills.

    Only a folder of weights that do not change needs them: of a base, or of a frozen tower.
    """
    model = spec.model
    trusts = model.trust_remote_code
    folder = check_folder(model.path, trust_remote_code=trusts, load_weight=False)
    return policy_folder(spec) if _keeps_weights(spec, folder) else folder


def _keeps_weights(spec: PolicySpec, folder: ModelFolder) -> bool:
    """Return whether the folder has weights that do not change and that the link does not carry."""
    config = folder.decoder_config
    sees = config is not None and config.vision is not None
    return spec.adapters is not None or (spec.freezes_tower and sees)


def changing_slices(model: ShardedModel | FsdpModel) -> Callable[[], list[HeldSlice]]:
    """Return the function that lists what the weight link changes in a policy."""
    return model.received_slices if isinstance(model, FsdpModel) else model.trained_slices


def open_received(
    spec: PolicySpec, folder: ModelFolder, *, platform: Platform, device: torch.device
) -> ShardedModel:
    """Open a whole policy with uninitialized weights, which the weight link fills.

    What the link does not bring is loaded: a frozen tower, or the base of adapters, which have
    their initial values.
    """
    config, dtype = folder.decoder_config, compute_dtype(spec.layout, platform)
    if config is None:
        return open_without_weights(
            folder.path,
            dtype=dtype,
            device=device,
            trust_remote_code=folder.trust_remote_code,
        )
    decoder = local_decoder(config, WHOLE, operators=operators_for(platform))
    allocate(decoder, dtype=dtype, device=device)
    decoder.requires_grad_(False)
    model = NativeModel(decoder, hf_config=folder.hf_config, source=folder.path)
    brought = set() if folder.start is not None else trained_parameters(decoder).keys()
    kept = [held for held in model.held_slices() if held.spec.name not in brought]
    if kept:
        with torch.no_grad():
            fill_slices(folder, kept, random_seed=spec.random_seed)
    return model


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
