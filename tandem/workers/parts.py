# SPDX-License-Identifier: Apache-2.0
"""The models of a worker, opened from their specs: one rank's part, or what the link fills."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from tandem.engines.fsdp_model import FsdpModel, FsdpSpec, ShardedModel, open_fsdp_model
from tandem.errors import UserError
from tandem.models.adapted import trained_parameters
from tandem.models.adapters import base_digest
from tandem.models.folder import ModelFolder, check_folder, fill_slices
from tandem.models.hf import open_without_weights
from tandem.models.language_model import NativeModel
from tandem.models.operators import operators_for
from tandem.models.parallel import WHOLE, ParallelLayout
from tandem.models.tensor_parallel import local_decoder
from tandem.models.weights import allocate
from tandem.platforms.record import Platform
from tandem.types import HeldSlice
from tandem.workers.job import PolicySpec
from tandem.workers.policies import compute_dtype, policy_folder, trained_dtype
from tandem.workers.shared_experts import assign

_BASE = "tandem/base"
"""The key of the store for the base of the process that came first."""


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
    spec: PolicySpec,
    folder: ModelFolder,
    *,
    platform: Platform,
    device: torch.device,
    layout: ParallelLayout = WHOLE,
    shared: Mapping[str, Tensor] | None = None,
) -> ShardedModel:
    """Open a policy with uninitialized weights, which the weight link fills.

    What the link does not bring is loaded: a frozen tower, or the base of adapters, which have
    their initial values.

    Args:
        layout: the processes that generate together.
        shared: weights of the trainer that the policy computes with, by name.
    """
    config, dtype = folder.decoder_config, compute_dtype(spec.layout, platform)
    if config is None:
        return open_without_weights(
            folder.path,
            dtype=dtype,
            device=device,
            trust_remote_code=folder.trust_remote_code,
        )
    decoder = local_decoder(config, layout, operators=operators_for(platform))
    assign(decoder, shared or {})
    allocate(decoder, dtype=dtype, device=device)
    decoder.requires_grad_(False)
    model = NativeModel(decoder, hf_config=folder.hf_config, source=folder.path, layout=layout)
    brought = set() if folder.start is not None else trained_parameters(decoder).keys()
    kept = [held for held in model.held_slices() if held.spec.name not in brought]
    if kept:
        with torch.no_grad():
            fill_slices(folder, kept, random_seed=spec.random_seed)
    return model


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
