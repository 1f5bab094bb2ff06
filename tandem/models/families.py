# SPDX-License-Identifier: Apache-2.0
"""The conversion of a Hugging Face config.json to a ``DecoderConfig``.

It reads the old keys (``rope_theta``, ``rope_scaling``) and the new one (``rope_parameters``). A
missing key has transformers' default for the family. If the decoder lacks a feature of a model,
there is no ``DecoderConfig``, and transformers' code computes the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.config.derived.experts import experts_of
from tandem.config.derived.latent import latent_of
from tandem.config.derived.model_types import rope_kind, rope_settings
from tandem.config.derived.model_values import MOST_PARTS, require_size, wrong_value
from tandem.config.derived.vision import (
    VISION_FAMILIES,
    VisionFamily,
    seeing_family,
    text_part,
    vision_config,
)
from tandem.config.schema.families import CRITIC_CLASS, REWARD_CLASS, value_head
from tandem.errors import UserError
from tandem.models.decoder import DecoderConfig
from tandem.models.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)

HfConfig = Mapping[str, Any]


@dataclass(frozen=True)
class _Key:
    """A key of config.json with its default."""

    name: str
    default: bool


@dataclass(frozen=True)
class _Traits:
    """The properties that a family fixes in code.

    Attributes:
        qkv_bias, o_bias, qk_norm: a boolean; or the key of config.json that decides, with its
            default.
        has_mlp_bias: whether ``mlp_bias`` of config.json is read.
        head_dim, rms_norm_eps, theta: the values if config.json has none. None for ``head_dim``:
            the hidden size divided by the number of heads.
        rotary_share: the share of each head that is rotated if config.json has none; None for a
            family that always rotates whole heads.
        norm_spans_heads: whether ``qk_norm`` is over all heads together.
        is_windowed: returns whether config.json limits attention to a window in a way of the
            family's own.
    """

    qkv_bias: bool | _Key
    o_bias: bool | _Key
    qk_norm: bool | _Key = False
    has_mlp_bias: bool = False
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    theta: float = 10000.0
    rotary_share: float | None = None
    norm_spans_heads: bool = False
    is_windowed: Callable[[HfConfig], bool] = lambda _: False


def _is_windowed_behind(hf_config: HfConfig) -> bool:
    """Return whether layers from ``max_window_layers`` on have a window, as in dots.llm1."""
    first = hf_config.get("max_window_layers", 62)
    return bool(hf_config.get("sliding_window")) and hf_config["num_hidden_layers"] > first


_BIAS = _Key("attention_bias", default=False)

_TRAITS = {
    "qwen2": _Traits(qkv_bias=True, o_bias=False),
    "qwen3": _Traits(qkv_bias=_BIAS, o_bias=_BIAS, qk_norm=True, head_dim=128),
    "llama": _Traits(qkv_bias=_BIAS, o_bias=_BIAS, has_mlp_bias=True),
    "qwen3_moe": _Traits(qkv_bias=_BIAS, o_bias=_BIAS, qk_norm=True),
    "qwen2_moe": _Traits(qkv_bias=_Key("qkv_bias", default=True), o_bias=False),
    "mixtral": _Traits(
        qkv_bias=False,
        o_bias=False,
        rms_norm_eps=1e-5,
        theta=1e6,
        is_windowed=lambda hf_config: bool(hf_config.get("sliding_window")),
    ),
    "dots1": _Traits(qkv_bias=_BIAS, o_bias=_BIAS, qk_norm=True, is_windowed=_is_windowed_behind),
    "XdgMoE": _Traits(
        qkv_bias=_BIAS, o_bias=False, qk_norm=_Key("qk_layernorm", default=False), head_dim=128
    ),
    "glm4_moe": _Traits(
        qkv_bias=_BIAS,
        o_bias=False,
        qk_norm=_Key("use_qk_norm", default=False),
        rms_norm_eps=1e-5,
        rotary_share=0.5,
    ),
    "olmoe": _Traits(
        qkv_bias=_BIAS, o_bias=_BIAS, qk_norm=True, rms_norm_eps=1e-5, norm_spans_heads=True
    ),
    "deepseek_v2": _Traits(qkv_bias=_BIAS, o_bias=_BIAS),
    "deepseek_v3": _Traits(qkv_bias=_BIAS, o_bias=_BIAS),
}

FAMILIES = {**_TRAITS, **{name: _TRAITS[x.text] for name, x in VISION_FAMILIES.items()}}
"""The families that our decoder computes, by ``model_type`` in config.json."""


def decoder_config(hf_config: HfConfig) -> DecoderConfig | None:
    """Return the decoder's configuration, or None if our decoder does not support the model.

    Args:
        hf_config: the content of config.json, or ``to_dict()`` of a transformers config.

    Raises:
        UserError: the model has sliding-window attention, or a size is missing.
    """
    family = seeing_family(hf_config)
    vision = vision_config(hf_config)
    if family is not None:
        hf_config = text_part(hf_config)
    traits = FAMILIES.get(str(hf_config.get("model_type")))
    if traits is None or not _is_plain(hf_config):
        return None
    _refuse_sliding_window(hf_config, traits)
    heads = require_size(hf_config, "num_attention_heads")
    hidden = require_size(hf_config, "hidden_size")
    latent, kv_heads = latent_of(hf_config), hf_config.get("num_key_value_heads") or heads
    head_dim = hf_config.get("head_dim") or traits.head_dim or hidden // heads
    if latent is not None:
        head_dim, kv_heads = latent.head_dim, heads
    if not 1 <= head_dim <= MOST_PARTS:
        rule = f"a head has {head_dim} numbers, and must have 1 to {MOST_PARTS}"
        raise wrong_value("hidden_size", hidden, rule=rule)
    rope = _rope_config(hf_config, head_dim, traits=traits)
    if rope is None:
        return None
    head = value_head(hf_config)
    return DecoderConfig(
        family=hf_config["model_type"],
        vocab_size=require_size(hf_config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=require_size(hf_config, "intermediate_size"),
        num_layers=require_size(hf_config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=hf_config.get("rms_norm_eps", traits.rms_norm_eps),
        rope=rope,
        max_position_embeddings=require_size(hf_config, "max_position_embeddings"),
        tie_embeddings=bool(hf_config.get("tie_word_embeddings", False)) and head is None,
        qkv_bias=_decided(traits.qkv_bias, hf_config),
        o_bias=_decided(traits.o_bias, hf_config),
        mlp_bias=traits.has_mlp_bias and bool(hf_config.get("mlp_bias", False)),
        qk_norm=_decided(traits.qk_norm, hf_config),
        initializer_range=hf_config.get("initializer_range", 0.02),
        has_value_head=head is not None,
        has_value_bias=head != REWARD_CLASS,
        vision=vision,
        experts=experts_of(hf_config),
        norm_spans_heads=traits.norm_spans_heads,
        latent=latent,
    )


def critic_config(hf_config: HfConfig) -> dict[str, Any]:
    """Return the config.json of a critic that is initialised from this language model."""
    architectures = hf_config.get("architectures") or [f"{hf_config['model_type']}ForCausalLM"]
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {
        **hf_config,
        **labels,
        "architectures": [architectures[0].rpartition("For")[0] + CRITIC_CLASS],
        "tie_word_embeddings": False,
    }


def _is_plain(hf_config: HfConfig) -> bool:
    """Return whether the activation is silu, and weights and attention are as usual."""
    others = ("quantization_config", "clip_qkv")
    is_silu = hf_config.get("hidden_act", "silu") == "silu"
    return is_silu and not any(hf_config.get(name) for name in others)


def _decided(trait: bool | _Key, hf_config: HfConfig) -> bool:
    return trait if isinstance(trait, bool) else bool(hf_config.get(trait.name, trait.default))


def _refuse_sliding_window(hf_config: HfConfig, traits: _Traits) -> None:
    layers = hf_config.get("layer_types") or []
    is_windowed = not layers and traits.is_windowed(hf_config)
    if hf_config.get("use_sliding_window") or "sliding_attention" in layers or is_windowed:
        raise UserError(
            "config.json: use_sliding_window",
            True,
            rule="sliding-window attention is not supported",
            remedy="Set use_sliding_window to false and remove layer_types if all sequences fit "
            "the window.",
        )


def _rope_config(hf_config: HfConfig, head_dim: int, *, traits: _Traits) -> RopeConfig | None:
    parameters = dict(rope_settings(hf_config))
    theta = parameters.get("rope_theta") or hf_config.get("rope_theta") or traits.theta
    kind = rope_kind(hf_config)
    family, axes = seeing_family(hf_config), None
    if family is not None:
        kind = "default" if kind == "mrope" else kind
        named = parameters.get("mrope_section")
        axes = _axes(family, family.sections if named is None else named, head_dim=head_dim)
    share = parameters.get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
    if share is not None and traits.rotary_share is None:
        return None
    share = share or traits.rotary_share or 1.0
    if kind == "default":
        return RopeConfig(theta, axes=axes, share=share)
    if kind not in _SCALINGS:
        return None
    longest = require_size(hf_config, "max_position_embeddings")
    parameters["original_max_position_embeddings"] = hf_config.get(
        "original_max_position_embeddings"
    ) or parameters.get("original_max_position_embeddings", longest)
    parameters["max_position_embeddings"] = longest
    try:
        return RopeConfig(theta, _SCALINGS[kind](parameters), axes=axes, share=share)
    except KeyError as error:
        rule = f"the key {error} is missing"
        raise wrong_value("rope_parameters", kind, rule=rule) from error


def _axes(family: VisionFamily, sections: Sequence[int], *, head_dim: int) -> tuple[int, ...]:
    """Return which axis turns each rotary frequency, for ``sections`` frequencies of each axis.

    Interleaved: frequency i is of the row if i % 3 is 1 and of the column if it is 2, while the
    axis has frequencies left; all others are of time.
    """
    if len(sections) != 3 or 2 * sum(sections) != head_dim:
        rule = f"must be three numbers with the sum {head_dim // 2}, half of head_dim"
        raise wrong_value("mrope_section", list(sections), rule=rule)
    if not family.interleaves:
        return tuple(axis for axis in range(3) for _ in range(sections[axis]))
    axes = [0] * sum(sections)
    for axis in (1, 2):
        places = range(axis, 3 * sections[axis], 3)
        for place in places:
            axes[place] = axis
    return tuple(axes)


def _given(parameters: HfConfig, name: str) -> Any:
    """Return a setting; raise KeyError if it is missing or null."""
    if parameters.get(name) is None:
        raise KeyError(name)
    return parameters[name]


def _linear(parameters: HfConfig) -> RopeScaling:
    return LinearScaling(_given(parameters, "factor"))


def _dynamic(parameters: HfConfig) -> RopeScaling:
    return DynamicScaling(parameters["max_position_embeddings"])


def _llama3(parameters: HfConfig) -> RopeScaling:
    return Llama3Scaling(
        factor=_given(parameters, "factor"),
        low_freq_factor=_given(parameters, "low_freq_factor"),
        high_freq_factor=_given(parameters, "high_freq_factor"),
        original_max_position_embeddings=parameters["original_max_position_embeddings"],
    )


def _yarn(parameters: HfConfig) -> RopeScaling:
    original = parameters["original_max_position_embeddings"]
    factor = parameters["factor"] or parameters["max_position_embeddings"] / original
    mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None and mscale and mscale_all:
        attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
    elif attention_factor is None:
        attention_factor = _yarn_mscale(factor, 1.0)
    return YarnScaling(
        factor=factor,
        attention_factor=attention_factor,
        beta_fast=parameters.get("beta_fast") or 32,
        beta_slow=parameters.get("beta_slow") or 1,
        original_max_position_embeddings=original,
        truncate=parameters.get("truncate", True),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(parameters: HfConfig) -> RopeScaling:
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or parameters["max_position_embeddings"] / original
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        stretched = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original))
        attention_factor = stretched if factor > 1.0 else 1.0
    return LongRopeScaling(
        short_factor=tuple(_given(parameters, "short_factor")),
        attention_factor=attention_factor,
        original_max_position_embeddings=original,
    )


_SCALINGS = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
