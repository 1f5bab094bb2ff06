# SPDX-License-Identifier: Apache-2.0
"""The types of the values in a model's config.json, checked once where the file is read.

A key that is missing is no error here: the readers of ``derived`` and ``models`` know which keys a
family needs. A value that no model of a family can have is refused, also where a decoder would
compute something with it. The file does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from tandem.config.derived.model_values import MOST_PARTS, wrong_value
from tandem.config.derived.vision import text_part
from tandem.config.schema.families import NATIVE_FAMILIES, SEEING_FAMILIES

_ROPE_KEYS = ("rope_scaling", "rope_parameters")
"""The keys of the settings of rotary positions, the first one wins."""
_MOST_NUMBERS = 10**9
"""The largest width of a matrix. The bytes of larger ones do not fit an integer of torch."""
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class _Kind:
    """The values that a key may have: the rule in words, and as a function."""

    rule: str
    holds: Callable[[Any], bool]

    @property
    def or_null(self) -> _Kind:
        """The same values, and null."""
        return _Kind(f"{self.rule} or null", lambda value: value is None or self.holds(value))


def rope_settings(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of rotary positions of a checked config.json; {} if there are none."""
    none: Mapping[str, Any] = {}
    return next((hf_config[key] for key in _ROPE_KEYS if hf_config.get(key)), none)


def rope_kind(hf_config: Mapping[str, Any]) -> str:
    """Return the name of the scaling of rotary positions of a checked config.json."""
    rope = rope_settings(hf_config)
    return rope.get("rope_type", rope.get("type", "default"))


def require_types(hf_config: Mapping[str, Any]) -> None:
    """Raise UserError for the first value of config.json that its key cannot have."""
    _require(hf_config, _OF_ALL)
    family = hf_config.get("model_type")
    if family in SEEING_FAMILIES:
        _require(hf_config, _OF_SEEING)
    own, is_native = text_part(hf_config), family in NATIVE_FAMILIES
    _require(own, _OF_ALL)
    _require(own, _OF_DECODERS if is_native else {})
    for key in _ROPE_KEYS:
        _require(own.get(key) or {}, _OF_ROPE if is_native else _OF_SCALING, above=f"{key}.")


def _require(values: Mapping[str, Any], kinds: Mapping[str, _Kind], *, above: str = "") -> None:
    for name, kind in kinds.items():
        if name in values and not kind.holds(values[name]):
            raise wrong_value(f"{above}{name}", values[name], rule=f"must be {kind.rule}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _is_list(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(holds, cast(list[Any], value)))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_layer_type(value: Any) -> bool:
    return value in _LAYER_TYPES


_TEXT = _Kind("text", _is_text)
_TEXTS = _Kind("a list of texts", lambda x: _is_list(x, _is_text)).or_null
_BOOLEAN = _Kind("true or false", lambda x: isinstance(x, bool) or x in (0, 1)).or_null
_MAPPING = _Kind("a mapping", lambda x: isinstance(x, dict)).or_null
_ROPE = _Kind("a mapping or null", lambda x: not x or isinstance(x, dict))
_INTEGER = _Kind("an integer", _is_integer).or_null
_SIZE = _Kind("a positive integer", lambda x: _is_integer(x) and x > 0)
_WIDTH = _Kind(
    f"a positive integer, at most {_MOST_NUMBERS}",
    lambda x: _is_integer(x) and 0 < x <= _MOST_NUMBERS,
)
_PARTS = _Kind(
    f"an integer from 1 to {MOST_PARTS}", lambda x: _is_integer(x) and 1 <= x <= MOST_PARTS
)
_FEW = _Kind(f"at most {MOST_PARTS}", lambda x: not _is_number(x) or x <= MOST_PARTS)
_COUNT = _Kind("an integer of at least 0", lambda x: _is_integer(x) and x >= 0).or_null
_INTEGERS = _Kind("a list of integers", lambda x: _is_list(x, _is_integer)).or_null
_NUMBER = _Kind("a number", _is_number).or_null
_NUMBERS = _Kind("a list of numbers", lambda x: _is_list(x, _is_number)).or_null
_SMALL = _Kind("a number of at least 0", lambda x: _is_number(x) and x >= 0)
_POSITIVE = _Kind("a number above 0", lambda x: _is_number(x) and x > 0).or_null
_BASE = _Kind("a number above 1", lambda x: _is_number(x) and x > 1).or_null
_SHARE = _Kind("a number above 0, at most 1", lambda x: _is_number(x) and 0 < x <= 1).or_null

_OF_ALL: Mapping[str, _Kind] = {
    "model_type": _TEXT.or_null,
    "architectures": _TEXTS,
    "id2label": _MAPPING,
    "num_labels": _COUNT,
    "vocab_size": _INTEGER,
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), _FEW),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), _NUMBER),
    **dict.fromkeys(_ROPE_KEYS, _ROPE),
}
"""The keys that are read of models of any family."""

_OF_SEEING: Mapping[str, _Kind] = dict.fromkeys(("text_config", "vision_config"), _MAPPING)

_OF_DECODERS: Mapping[str, _Kind] = {
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), _PARTS),
    "num_key_value_heads": _PARTS.or_null,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _PARTS.or_null),
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), _WIDTH),
    "max_position_embeddings": _SIZE,
    **dict.fromkeys(("head_dim", "original_max_position_embeddings"), _SIZE.or_null),
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_freq"), _SIZE),
    **dict.fromkeys(("n_group", "topk_group"), _SIZE.or_null),
    **dict.fromkeys(("n_shared_experts", "first_k_dense_replace", "max_window_layers"), _COUNT),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), _COUNT),
    "mlp_only_layers": _INTEGERS,
    **dict.fromkeys(("rms_norm_eps", "initializer_range"), _SMALL),
    "rope_theta": _BASE,
    "partial_rotary_factor": _SHARE,
    "routed_scaling_factor": _POSITIVE,
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "qkv_bias", "mlp_bias"), _BOOLEAN),
    **dict.fromkeys(("qk_layernorm", "use_qk_norm", "use_sliding_window"), _BOOLEAN),
    **dict.fromkeys(("norm_topk_prob", "rope_interleave"), _BOOLEAN),
    "layer_types": _Kind(
        f"a list of {' and '.join(_LAYER_TYPES)}", lambda x: _is_list(x, _is_layer_type)
    ).or_null,
    "hidden_act": _TEXT,
    "eos_token_id": _Kind(
        "an integer, a list of integers", lambda x: _is_integer(x) or _is_list(x, _is_integer)
    ).or_null,
    "quantization_config": _MAPPING,
}
"""The keys that our decoder reads, or transformers' class of the same family."""

_OF_SCALING: Mapping[str, _Kind] = {
    "factor": _POSITIVE,
    "original_max_position_embeddings": _POSITIVE,
}
"""The keys of the settings of rotary positions that are read of models of any family."""

_OF_ROPE: Mapping[str, _Kind] = {
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    "rope_theta": _BASE,
    "partial_rotary_factor": _SHARE,
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), _POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor"), _POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), _NUMBER),
    "original_max_position_embeddings": _SIZE.or_null,
    **dict.fromkeys(("short_factor", "long_factor"), _NUMBERS),
    "truncate": _BOOLEAN,
    "mrope_section": _INTEGERS,
}
"""The keys of the settings of rotary positions of one of our families."""
