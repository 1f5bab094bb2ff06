# SPDX-License-Identifier: Apache-2.0
"""The adapters (LoRA) that a model's keys ask for, and PEFT's description of saved ones.

A module is named as in Hugging Face's code, e.g. ``model.layers.0.self_attn.q_proj``, or in a model
that sees ``model.language_model.layers.0.self_attn.q_proj``. The vision tower has no adapters. This
file reads only JSON. Sizes and values of adapters are in the room ``models``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

from tandem.config.derived.sizes import ModelSizes
from tandem.config.derived.vision import TEXT_MODULES
from tandem.config.parse.json_content import read_object
from tandem.config.schema.model import ModelConfig
from tandem.errors import UserError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
_MODULES = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
"""The linear maps of a layer in the order of the decoder's parameters."""
_FUSED = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's names of fused maps, which ``lora.target_modules`` may have."""
_REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "use_dora": ("DoRA", (False, None)),
    "use_qalora": ("QA-LoRA", (False, None)),
    "modules_to_save": ("modules that are saved whole (modules_to_save)", ([], None)),
    "rank_pattern": ("a rank for some modules (rank_pattern)", ({}, None)),
    "alpha_pattern": ("an alpha for some modules (alpha_pattern)", ({}, None)),
    "bias": ("trained biases (bias)", ("none", None)),
    "lora_bias": ("biases of adapters (lora_bias)", (False, None)),
    "fan_in_fan_out": ("transposed weights (fan_in_fan_out)", (False, None)),
    "target_parameters": ("adapters of raw parameters (target_parameters)", ([], None)),
    "layers_to_transform": ("adapters of some layers (layers_to_transform)", ([], None)),
    "layer_replication": ("repeated layers (layer_replication)", ([], None)),
    "trainable_token_indices": ("trained tokens (trainable_token_indices)", ([], {}, None)),
    "alora_invocation_tokens": ("activated LoRA (alora_invocation_tokens)", ([], None)),
    "arrow_config": ("Arrow (arrow_config)", ({}, None)),
    "kasa_config": ("KaSA (kasa_config)", ({}, None)),
    "use_bdlora": ("block-diagonal LoRA (use_bdlora)", (False, None)),
    "velora_config": ("VeLoRA (velora_config)", ({}, None)),
    "monteclora_config": ("MonteCLoRA (monteclora_config)", ({}, None)),
    "init_lora_weights": (
        "initial values that change the base (init_lora_weights)",
        (True, False, None, "gaussian", "eva", "orthogonal"),
    ),
    "megatron_config": ("Megatron's layers (megatron_config)", ({}, None)),
}
"""PEFT's fields that ask for what is not built: the words for it, and the values that do not."""
_DROPOUT = "lora_dropout"
_NAME = "Name a folder that peft saved, or global_step_N/actor of a run that trained adapters."

Rule = str | tuple[str, ...]
"""A rule for names of modules: a regular expression of the whole name, or a list of last parts."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a model.

    Attributes:
        rank: the inner dimension r of the product B A.
        alpha: the numerator of the scale.
        has_root_scale: whether the scale is alpha / sqrt(r) (rsLoRA) instead of alpha / r.
        targets: the adapted modules; ``ALL_LINEAR`` means all linear maps of the layers.
        excludes: the modules that are not adapted although ``targets`` matches them.
        folder: the folder of PEFT's form that they start from; None draws them.
        section: the section of the model's keys, for messages.
    """

    rank: int
    alpha: float
    has_root_scale: bool
    targets: Rule
    excludes: Rule
    folder: Path | None
    section: str

    @property
    def scale(self) -> float:
        """The factor of the products B A."""
        return self.alpha / (math.sqrt(self.rank) if self.has_root_scale else self.rank)

    def includes(self, module: str) -> bool:
        """Return whether a module of the layers is adapted."""
        if _matches(self.excludes, module):
            return False
        return self.targets == ALL_LINEAR or _matches(self.targets, module)

    def modules(self, num_layers: int, *, sees: bool) -> tuple[str, ...]:
        """Return the names of the adapted modules in order.

        Args:
            sees: whether the model sees.

        Raises:
            UserError: no module is adapted, or a name of the keys is that of no module.
        """
        names = list(_layer_modules(num_layers, TEXT_MODULES if sees else "model."))
        self._require_known(names)
        found = tuple(name for name in names if self.includes(name))
        if not found:
            rule = f"no linear map of the model's {num_layers} layers matches it and not "
            raise self._unmatched(
                _shown(self.targets), f"{rule}exclude_modules={_shown(self.excludes)}"
            )
        return found

    def warnings(self, num_layers: int, *, model: str, sees: bool) -> Iterator[str]:
        """Yield a warning, one line each, for what is rarely intended.

        Args:
            model: the path or name of the model that gets the adapters.
            sees: whether the model sees. Its tower has no adapters, so a rule may exclude it.
        """
        names = () if sees else _layer_modules(num_layers, "model.")
        if self.excludes and not sees and not any(_matches(self.excludes, x) for x in names):
            yield (
                f"{self.section}.exclude_modules={_shown(self.excludes)}: it excludes nothing, "
                "because no linear map of the layers matches it"
            )
        base = "" if self.folder is None else base_of(self.folder)
        if base and Path(base).name != Path(model).name and not os.path.isdir(base):
            yield (
                f"{self.section}.lora_adapter_path={self.folder}: it says that its base is {base}, "
                f"and the model is {model}; whether their weights are the same is not checked"
            )

    def num_parameters(self, sizes: ModelSizes) -> int:
        """Return the number of trained parameters: rank x (inputs + outputs) of each module."""
        heads, kv_heads = (n * sizes.head_dim for n in (sizes.num_heads, sizes.num_kv_heads))
        widths = {
            "q_proj": sizes.hidden + heads,
            "k_proj": sizes.hidden + kv_heads,
            "v_proj": sizes.hidden + kv_heads,
            "o_proj": heads + sizes.hidden,
            "gate_proj": sizes.hidden + sizes.inner,
            "up_proj": sizes.hidden + sizes.inner,
            "down_proj": sizes.inner + sizes.hidden,
        }
        modules = self.modules(sizes.num_layers, sees=sizes.tower > 0)
        return self.rank * sum(widths[name.rpartition(".")[2]] for name in modules)

    def _require_known(self, names: Sequence[str]) -> None:
        """Raise UserError for an entry of ``targets`` that is the name of no module."""
        for entry in () if isinstance(self.targets, str) else self.targets:
            if not any(_matches((entry,), name) for name in names):
                rule = "no linear map of the layers has this name"
                raise self._unmatched(entry, f"{rule} (embedding and head are not adapted)")

    def _unmatched(self, targets: str, rule: str) -> UserError:
        """Return the error about targets that the model does not have."""
        if self.folder is None:
            remedy = (
                f"List some of {', '.join(_suffixes())}, as [q_proj,v_proj], or set {ALL_LINEAR}."
            )
            return UserError(f"{self.section}.target_modules", targets, rule=rule, remedy=remedy)
        return _error(
            self.folder,
            f"{ADAPTER_CONFIG}: target_modules={targets}: {rule}",
            key=f"{self.section}.lora_adapter_path",
            remedy="Use an adapter of this model.",
        )


def adapters_of(model: ModelConfig, *, section: str) -> Adapters | None:
    """Return the adapters of a model; None if all its weights are trained.

    Args:
        section: the section of the model's keys, for messages.

    Raises:
        UserError: the adapter to start from cannot be read, has another rank, or has what is not
            built.
    """
    if model.lora_adapter_path is not None:
        return _saved(model, section=section)
    if not model.lora_rank:
        return None
    if not model.lora_alpha:
        raise UserError(
            f"{section}.lora_alpha",
            model.lora_alpha,
            rule="must be above 0: adapters are multiplied by lora_alpha / lora_rank",
            remedy=f"Set {section}.lora_alpha=16 (the default).",
        )
    return Adapters(
        model.lora_rank,
        float(model.lora_alpha),
        has_root_scale=False,
        targets=_checked(model.target_modules, f"{section}.target_modules"),
        excludes=_checked(model.exclude_modules or (), f"{section}.exclude_modules"),
        folder=None,
        section=section,
    )


def _saved(model: ModelConfig, *, section: str) -> Adapters:
    """Return the adapters of the folder ``lora_adapter_path``."""
    key = f"{section}.lora_adapter_path"
    folder = Path(os.path.expanduser(model.lora_adapter_path or ""))
    found = read_adapters(folder, key=key, section=section)
    if model.lora_rank not in (0, found.rank):
        raise UserError(
            f"{section}.lora_rank",
            model.lora_rank,
            rule=f"the adapter in {folder} has rank {found.rank}",
            remedy=f"Leave {section}.lora_rank out, or set it to {found.rank}.",
        )
    return found


def read_adapters(folder: Path, *, key: str, section: str) -> Adapters:
    """Read the description of a saved adapter.

    Args:
        key: the configuration key of the folder, for messages.

    Raises:
        UserError: it is missing or damaged, or has what is not built.
    """
    content = _read_description(folder, key=key)
    for name, (capability, harmless) in _REFUSED.items():
        if content.get(name) not in harmless:
            raise _error(folder, f"{ADAPTER_CONFIG}: {capability}: not built", key=key)
    if content.get(_DROPOUT):
        raise _error(
            folder,
            f"{ADAPTER_CONFIG}: {_DROPOUT}={content[_DROPOUT]}: dropout is not built, because "
            "generation and training would compute different policies",
            key=key,
            remedy=f"Set {_DROPOUT} to 0 in a copy of the folder.",
        )
    rank, alpha = content.get("r"), content.get("lora_alpha")
    if not _is_positive(rank) or not isinstance(rank, int) or not _is_positive(alpha):
        rule = f"{ADAPTER_CONFIG} must have r of 1 or more and a positive lora_alpha"
        raise _error(folder, f"{rule}, not r={rank} and lora_alpha={alpha}", key=key)
    has_root_scale = content.get("use_rslora")
    if has_root_scale not in (True, False, None):
        rule = f"{ADAPTER_CONFIG}: use_rslora={has_root_scale}: must be true or false"
        raise _error(folder, rule, key=key)
    return Adapters(
        rank,
        float(alpha),
        has_root_scale=bool(has_root_scale),
        targets=_saved_rule(content, "target_modules", folder=folder, key=key),
        excludes=_saved_rule(content, "exclude_modules", folder=folder, key=key),
        folder=folder,
        section=section,
    )


def base_of(folder: Path) -> str:
    """Return the path or name of an adapter's base model; "" if it does not say one."""
    try:
        content = read_object(folder / ADAPTER_CONFIG)
    except (OSError, ValueError):
        content = {}
    return str(content.get("base_model_name_or_path") or "")


def _read_description(folder: Path, *, key: str) -> dict[str, Any]:
    if not folder.is_dir():
        raise _error(folder, "no such folder", key=key, remedy=_NAME)
    try:
        content = read_object(folder / ADAPTER_CONFIG)
    except FileNotFoundError as error:
        raise _error(folder, f"it has no {ADAPTER_CONFIG}", key=key, remedy=_NAME) from error
    except OSError as error:
        raise _error(folder, f"{ADAPTER_CONFIG} cannot be read ({error})", key=key) from error
    except ValueError as error:
        raise _error(folder, f"{ADAPTER_CONFIG} {error}", key=key) from error
    if content.get("peft_type") != "LORA":
        kind = content.get("peft_type")
        raise _error(folder, f"{ADAPTER_CONFIG}: peft_type={kind}: only LORA is built", key=key)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        remedy = "Save it as safetensors."
        raise _error(folder, f"it has no {ADAPTER_WEIGHTS}", key=key, remedy=remedy)
    return content


def _is_positive(value: Any) -> TypeGuard[int | float]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf


def _saved_rule(content: Mapping[str, Any], name: str, *, folder: Path, key: str) -> Rule:
    """Return a rule of PEFT's description; raise UserError if it is none."""
    value: Any = content.get(name)
    names = cast(list[Any], value if isinstance(value, list) else [])
    is_list = value is None or isinstance(value, list)
    if not isinstance(value, str) and not (is_list and all(isinstance(x, str) for x in names)):
        rule = f"{ADAPTER_CONFIG}: {name}={value}: must be an expression or a list of names"
        raise _error(folder, rule, key=key)
    try:
        return _checked(value if isinstance(value, str) else tuple(names), key)
    except UserError as error:
        rule = f"{ADAPTER_CONFIG}: {name}={value}: is no regular expression"
        raise _error(folder, rule, key=key) from error


def _checked(rule: Rule, key: str) -> Rule:
    """Replace Megatron's names by Hugging Face's; raise UserError for a broken expression."""
    if rule in (ALL_LINEAR, (ALL_LINEAR,)):
        return ALL_LINEAR
    if isinstance(rule, tuple):
        return tuple(part for entry in rule for part in _FUSED.get(entry, (entry,)))
    try:
        re.compile(rule)
    except re.error as error:
        reason = f"is no regular expression ({error})"
        remedy = "Give an expression that matches whole names, or a list of names."
        raise UserError(key, rule, rule=reason, remedy=remedy) from error
    return rule


def _matches(rule: Rule, module: str) -> bool:
    if isinstance(rule, str):
        return re.fullmatch(rule, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in rule)


def _layer_modules(num_layers: int, prefix: str) -> Iterator[str]:
    for index in range(num_layers):
        for part, names in _MODULES.items():
            for name in names:
                yield f"{prefix}layers.{index}.{part}.{name}"


def _suffixes() -> tuple[str, ...]:
    return tuple(name for names in _MODULES.values() for name in names)


def _shown(rule: Rule) -> str:
    return rule if isinstance(rule, str) else f"[{','.join(rule)}]"


def _error(folder: Path, rule: str, *, key: str, remedy: str = "") -> UserError:
    return UserError(
        key, str(folder), rule=rule, remedy=remedy or "Use a plain LoRA adapter, as peft saves it."
    )
