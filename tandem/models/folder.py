# SPDX-License-Identifier: Apache-2.0
"""Finding, checking and loading the models of policy, critic and reward model.

A path is a local folder, or the id of a model in the hub's cache or on the hub. ``check_folder``
finds errors without building a model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tandem.config.derived.adapters import Adapters, read_adapters
from tandem.config.derived.latent import LATENT_FAMILIES
from tandem.config.derived.vision import read_normalisation
from tandem.config.schema.families import (
    NATIVE_FAMILIES,
    TEXT_FAMILIES,
    require_family,
    require_value_head,
)
from tandem.errors import NO_VALUE, UserError
from tandem.models.adapted import AdapterConfig, is_adapter
from tandem.models.adapters import (
    check_adapter,
    draw_adapters,
    is_adapter_folder,
    load_adapter,
    require_base,
    require_own_base,
    with_adapters,
)
from tandem.models.decoder import DecoderConfig
from tandem.models.families import FAMILIES, critic_config, decoder_config
from tandem.models.hf import (
    TransformersModel,
    is_known_family,
    open_transformers_model,
    require_causal,
    require_known_functions,
)
from tandem.models.language_model import LanguageModel, NativeModel
from tandem.models.operators import TORCH, Operators
from tandem.models.parallel import WHOLE, ParallelLayout, check_layout
from tandem.models.tensor_parallel import local_decoder
from tandem.models.weights import (
    KEY,
    TORCH_FILES,
    allocate,
    check_weights,
    draw_slices,
    load_slices,
    read_config,
    weight_files,
)
from tandem.types import HeldSlice

_WEIGHTS = "*.safetensors"
_DOWNLOADED = ("*.json", _WEIGHTS, "*.jinja", "*.txt", "*.model", "*.py")
_HEAD = ("lm_head.weight", "lm_head.bias")
_REMEDY = "Set the keys of the model back, or trainer.resume_mode=disable."


@dataclass(frozen=True)
class ModelFolder:
    """A checked model folder.

    Attributes:
        decoder_config: None if transformers' modelling code computes the model.
        value_head_seed: the seed of the value head, for a critic that starts from a language model;
            None if the folder has all weights.
        start: the adapters that the decoder's configuration has, None without any.
        key: the configuration key of the path, for messages.
    """

    path: Path
    hf_config: dict[str, Any]
    decoder_config: DecoderConfig | None
    trust_remote_code: bool
    value_head_seed: int | None = None
    key: str = KEY
    start: AdapterStart | None = None


@dataclass(frozen=True, slots=True)
class AdapterStart:
    """The initial values of adapters.

    Attributes:
        folder: the folder of PEFT's form that has them; None draws them.
        seed: the seed of drawn values.
        key: the configuration key of ``folder``, for messages.
    """

    folder: Path | None
    seed: int
    key: str


def check_folder(
    path: str,
    *,
    trust_remote_code: bool = False,
    load_weight: bool = True,
    fetches_weights: bool = True,
    key: str = KEY,
) -> ModelFolder:
    """Find the folder of a language model and check it without loading weights.

    The model is downloaded if it is not on this host.

    Args:
        load_weight: whether the folder must have weights.
        fetches_weights: whether they are downloaded too. If not, only weights that are on this
            host are checked.
        key: the configuration key of ``path``, for messages.

    Raises:
        UserError: there is no such folder or hub model, config.json cannot be read, the family is
            unknown, the model is a critic or a reward model, or weights are missing.
    """
    checked = _found(path, trust_remote_code, fetches_weights=fetches_weights, key=key)
    config = checked.decoder_config
    if config is not None and config.has_value_head:
        raise UserError(
            key,
            str(checked.path),
            rule="it is a critic or a reward model (see architectures in config.json) without a "
            "language-model head",
            remedy="Use a causal language model.",
        )
    if load_weight:
        _require_weights(checked, fetches_weights or is_local(path))
    return checked


def adapt_folder(folder: ModelFolder, adapters: Adapters, *, seed: int) -> ModelFolder:
    """Return a checked folder whose decoder has adapters. A vision tower is then frozen.

    Args:
        seed: the seed of the adapters' initial values, if they have no folder.

    Raises:
        UserError: our decoder does not compute the model, no module is adapted, or the adapters of
            a folder are of another base.
    """
    if folder.decoder_config is None and folder.hf_config.get("quantization_config"):
        raise UserError(
            folder.key,
            str(folder.path),
            rule="adapters over quantized weights (see quantization_config in config.json) are "
            "not built",
            remedy="Use the model with its weights in bf16, fp16 or fp32.",
        )
    if folder.decoder_config is None:
        model_type = folder.hf_config["model_type"]
        raise UserError(
            folder.key,
            str(folder.path),
            rule=f"adapters of a model of type {model_type!r} are not built",
            remedy=f"Use a model of {', '.join(sorted(FAMILIES.keys() - LATENT_FAMILIES))}.",
        )
    folder = freeze_tower(folder)
    assert folder.decoder_config is not None, "it stays"
    config = with_adapters(folder.decoder_config, adapters)
    key = f"{adapters.section}.lora_adapter_path"
    if adapters.folder is not None:
        check_adapter(config, adapters.folder, key=key)
        require_own_base(adapters.folder, folder.path, key=key)
    start = AdapterStart(adapters.folder, seed, key)
    return replace(folder, decoder_config=config, start=start)


def freeze_tower(folder: ModelFolder) -> ModelFolder:
    """Return a checked folder whose vision tower is not trained; a model of text is returned."""
    config = folder.decoder_config
    if config is None or config.vision is None:
        return folder
    frozen = replace(config, vision=replace(config.vision, is_frozen=True))
    return replace(folder, decoder_config=frozen)


def freeze_router(folder: ModelFolder) -> ModelFolder:
    """Return a checked folder whose routers are not trained; other models are returned."""
    config = folder.decoder_config
    if config is None or config.experts is None:
        return folder
    frozen = replace(config, experts=replace(config.experts, freezes_router=True))
    return replace(folder, decoder_config=frozen)


def require_same_adapters(saved: Path, model: ModelFolder, *, key: str) -> None:
    """Raise UserError unless a checkpoint has the adapters of ``model``, trained on its base.

    Args:
        saved: the folder of the trained model in the checkpoint.
        key: the configuration key of the model's path.
    """
    if not is_adapter_folder(saved) or model.start is None or model.decoder_config is None:
        kinds = ("adapters", "all weights")
        found, wanted = kinds if model.start is None else kinds[::-1]
        rule = f"the checkpoint {saved.parent} has {found}, and {wanted} would be trained"
        raise UserError(key, str(model.path), rule=rule, remedy=_REMEDY)
    section = key.removesuffix(".path")
    adapters = read_adapters(saved, key="trainer.resume_from_path", section=section)
    found = with_adapters(model.decoder_config, adapters).adapters
    own = model.decoder_config.adapters
    assert found is not None and own is not None, "both have adapters"
    if found != own:
        raise _contradiction(found, own, start=model.start, place=str(saved.parent))
    require_base(saved, model.path, key=key, value=model.path)


def _contradiction(
    found: AdapterConfig, own: AdapterConfig, *, start: AdapterStart, place: str
) -> UserError:
    """Return the error about adapters of a checkpoint that are not those of the keys."""
    name, value, has = "target_modules", NO_VALUE, "adapters of other modules"
    if found.has_root_scale != own.has_root_scale:
        name, value, has = "lora_adapter_path", None, f"use_rslora={found.has_root_scale}"
    if found.alpha != own.alpha:
        name, value, has = "lora_alpha", own.alpha, f"adapters with alpha {found.alpha:g}"
    if found.rank != own.rank:
        name, value, has = "lora_rank", own.rank, f"adapters of rank {found.rank}"
    if start.folder is not None:
        name, value = "lora_adapter_path", str(start.folder)
    key = f"{start.key.rpartition('.')[0]}.{name}"
    return UserError(key, value, rule=f"the checkpoint {place} has {has}", remedy=_REMEDY)


def check_critic_folder(
    path: str,
    *,
    seed: int,
    trust_remote_code: bool = False,
    load_weight: bool = True,
    fetches_weights: bool = True,
    key: str,
) -> ModelFolder:
    """Find and check the folder of a critic, as ``check_folder`` does for a language model.

    It may be the folder of a critic, a reward model, or a language model, whose head is then
    replaced by a value head.

    Args:
        seed: the seed of the value head if the folder has none.

    Raises:
        UserError: see ``check_folder``; or our decoder does not support the model.
    """
    checked = _found(path, trust_remote_code, fetches_weights=fetches_weights, key=key)
    if not _own_config(checked, "a critic").has_value_head:
        hf_config = critic_config(checked.hf_config)
        checked = replace(
            checked,
            hf_config=hf_config,
            decoder_config=decoder_config(hf_config),
            value_head_seed=seed,
        )
    if load_weight:
        _require_weights(checked, fetches_weights or is_local(path))
    return checked


def check_reward_folder(
    path: str, *, trust_remote_code: bool = False, fetches_weights: bool = True, key: str
) -> ModelFolder:
    """Find and check the folder of a reward model, as ``check_folder`` does for a language model.

    Raises:
        UserError: see ``check_folder``; or our decoder does not support the model, or it has no
            value head.
    """
    checked = _found(path, trust_remote_code, fetches_weights=fetches_weights, key=key)
    _own_config(checked, "a reward model")
    require_value_head(checked.hf_config, key=key, path=str(checked.path))
    _require_weights(checked, fetches_weights or is_local(path))
    return checked


def _own_config(checked: ModelFolder, role: str) -> DecoderConfig:
    if checked.decoder_config is None:
        model_type = checked.hf_config["model_type"]
        raise UserError(
            checked.key,
            str(checked.path),
            rule=f"a model of type {model_type!r} cannot be {role}",
            remedy=f"Use a model of {', '.join(TEXT_FAMILIES)}.",
        )
    if checked.decoder_config.vision is not None:
        raise UserError(
            checked.key,
            str(checked.path),
            rule=f"a model that sees cannot be {role}",
            remedy=f"Use a model of {', '.join(TEXT_FAMILIES)}.",
        )
    return checked.decoder_config


def is_local(path: str) -> bool:
    """Return whether a path is a folder of this host, not a name on the hub."""
    return bool(path) and os.path.isdir(os.path.expanduser(path))


def _found(path: str, trust_remote_code: bool, *, fetches_weights: bool, key: str) -> ModelFolder:
    """Return the folder of a model of a known family; its weights are not checked."""
    folder = resolve_folder(path, key=key, fetches_weights=fetches_weights)
    hf_config = read_config(folder, key=key)
    own_config = decoder_config(hf_config)
    if own_config is None:
        require_family(
            hf_config,
            key=key,
            path=str(folder),
            is_known=is_known_family(hf_config["model_type"]),
            trust_remote_code=trust_remote_code,
        )
        require_causal(hf_config, key=key, path=str(folder))
        if hf_config["model_type"] in NATIVE_FAMILIES:
            require_known_functions(hf_config, key=key, path=str(folder))
    elif own_config.vision is not None:
        colours = read_normalisation(folder)
        if colours is not None:
            vision = replace(own_config.vision, mean=colours[0], std=colours[1])
            own_config = replace(own_config, vision=vision)
    return ModelFolder(folder, hf_config, own_config, trust_remote_code, key=key)


def _require_weights(folder: ModelFolder, are_all_here: bool) -> None:
    """Check the weights of a folder; if some may still be on the hub, only those that are here."""
    if not (are_all_here or _has_weights(folder.path)):
        return
    if folder.decoder_config is not None:
        check_weights(_config_of_files(folder), folder.path, key=folder.key)
    elif not _has_any(folder.path, TORCH_FILES):
        weight_files(folder.path, key=folder.key)


def _config_of_files(folder: ModelFolder) -> DecoderConfig:
    """Return the decoder whose tensors the folder has."""
    config = folder.decoder_config
    assert config is not None, "transformers' models are not compared with files"
    if folder.value_head_seed is None:
        return config
    # Expect the critic's weights without a head, as in a language model with a tied head.
    return replace(config, has_value_head=False, tie_embeddings=True)


def open_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    random_seed: int | None = None,
    operators: Operators = TORCH,
) -> LanguageModel:
    """Load a whole model onto ``device`` in ``dtype``.

    Args:
        random_seed: if given, draw random weights, the same on every device, instead of loading.
        operators: the operators of our decoder; transformers' models ignore them.

    Raises:
        UserError: see ``check_folder``; or the weights do not match config.json.
    """
    loads = random_seed is None
    folder = check_folder(path, load_weight=loads)
    return open_part(
        folder, WHOLE, dtype=dtype, device=device, random_seed=random_seed, operators=operators
    )


def open_part(
    folder: ModelFolder,
    layout: ParallelLayout,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    random_seed: int | None = None,
    operators: Operators = TORCH,
    base_dtype: torch.dtype | None = None,
) -> LanguageModel:
    """Load only the part of a model that one process of ``layout`` holds.

    Args:
        device: on "meta", our decoder uses no memory and loads no weights. A caller that shards it
            further allocates its part and calls ``fill_slices``.
        base_dtype: the precision of the frozen base of a decoder with adapters; None: ``dtype``.

    Raises:
        UserError: the layout does not fit the model, or the weights do not match config.json.
    """
    config = folder.decoder_config
    check_layout(config, tensor=layout.tensor.size, sequence=layout.sequence.size)
    if config is None:
        model = open_transformers_model(
            folder.path,
            dtype=dtype,
            trust_remote_code=folder.trust_remote_code,
            random_seed=random_seed,
        )
        model.move(device)
        return model
    decoder = local_decoder(config, layout, operators=operators)
    allocate(decoder, dtype=dtype, device=device, base_dtype=base_dtype)
    model = NativeModel(decoder, hf_config=folder.hf_config, source=folder.path, layout=layout)
    if torch.device(device).type != "meta":
        fill_slices(folder, model.held_slices(), random_seed=random_seed)
    return model


def require_no_buffers(model: TransformersModel, folder: ModelFolder) -> None:
    """Raise UserError if a model has tensors that neither shards nor the weight link carry."""
    if model.stored_buffers:
        raise UserError(
            folder.key,
            str(folder.path),
            rule=f"{model.stored_buffers[0]} is a buffer, and a model of type {model.family!r} "
            "with buffers in its files is not trained on several devices",
            remedy="Set trainer.nnodes=1 and trainer.n_gpus_per_node=1.",
        )


def fill_slices(
    folder: ModelFolder, slices: Sequence[HeldSlice], *, random_seed: int | None = None
) -> None:
    """Load or draw slices of our decoder, as ``open_part`` does for a whole part."""
    config = folder.decoder_config
    assert config is not None, "transformers' models are not read in slices"
    fill_adapters(folder, [held for held in slices if is_adapter(held.spec.name)])
    slices = [held for held in slices if not is_adapter(held.spec.name)]
    if random_seed is not None:
        draw_slices(config, slices, seed=random_seed)
        return
    if folder.value_head_seed is not None:
        head = [held for held in slices if held.spec.name in _HEAD]
        draw_slices(config, head, seed=folder.value_head_seed, names=_HEAD)
        slices = [held for held in slices if held.spec.name not in _HEAD]
    load_slices(_config_of_files(folder), folder.path, slices=slices, key=folder.key)


def fill_adapters(folder: ModelFolder, slices: Sequence[HeldSlice]) -> None:
    """Load or draw the initial values of slices of adapters."""
    config, start = folder.decoder_config, folder.start
    if config is None or start is None:
        return
    if start.folder is None:
        draw_adapters(config, slices, seed=start.seed)
    else:
        load_adapter(config, start.folder, slices=slices, key=start.key)


def resolve_folder(path: str, *, key: str = KEY, fetches_weights: bool = True) -> Path:
    """Return the local folder of a model; download it if it is not on this host.

    Args:
        fetches_weights: whether its weights are downloaded too.

    Raises:
        UserError: there is neither such a folder nor such a model on the hub, or the hub cannot be
            reached.
    """
    if is_local(path):
        return Path(os.path.expanduser(path))
    # Most folders are local, and the client of the hub takes a while to load.
    from tandem.models.hub import cached_snapshot, download

    wanted = [name for name in _DOWNLOADED if fetches_weights or name != _WEIGHTS]
    cached = cached_snapshot(path, key=key)
    if cached is not None and _has_weights(cached):  # and not the tokenizer only
        return cached
    return download(path, key, files=wanted)


def _has_weights(folder: Path) -> bool:
    return any(folder.glob(_WEIGHTS)) or _has_any(folder, TORCH_FILES)


def _has_any(folder: Path, names: tuple[str, ...]) -> bool:
    return any((folder / name).is_file() for name in names)
