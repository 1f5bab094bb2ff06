# SPDX-License-Identifier: Apache-2.0
"""The experts of a model, read from config.json: their sizes, their router, their layers.

One dataclass describes the routers of all families. A family is one function and one line of
``_READERS``. The file does not import torch; ``models.experts`` computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tandem.config.derived.model_values import require_size, wrong_value
from tandem.errors import UserError

Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen"]
"""The function from logits to scores. ``softmax_of_chosen`` is the softmax over the chosen experts
only, which are those with the largest logits."""

_SCORING_OF_XDG: Mapping[str, Scoring] = {
    "softmax": "softmax",
    "aux_loss_post_softmax": "softmax_of_chosen",
    "noaux_tc": "sigmoid",
}
_METHODS_OF_V2 = ("greedy", "group_limited_greedy")
_NAMES_OF_SCORING: Mapping[Scoring, tuple[str, ...]] = {
    "softmax": ("softmax",),
    "sigmoid": ("sigmoid", "noaux_tc"),
}
"""The values of ``scoring_func`` in files of families that have one function each."""

_NUMBERS = ("num_experts", "n_routed_experts", "num_local_experts")
"""The names of the number of experts: on the hub, of DeepSeek's families, and of transformers 5."""

_WIDTH_MULTIPLE = 8
"""The numbers in 16 bytes of bf16."""

_FURTHER = ("num_nextn_predict_layers", "num_mtp_layers")
"""The names of the number of layers that predict further tokens: on the hub, and of transformers 5.
"""


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """The feed-forward with experts of a decoder.

    Attributes:
        num_chosen: the number of experts that compute a token.
        inner: the width of an expert.
        dense_layers: the indices of the layers with an ordinary feed-forward.
        is_renormalized: whether the weights of a token's experts are divided by their sum.
        scale: the factor of the weights after that.
        num_groups, num_kept_groups: experts are chosen among those of the best groups only; 1 and 1
            are no limit.
        num_group_scores: how many of the best scores of a group are added up to its score.
        has_correction: whether a fixed number for each expert is added to its score for the choice,
            and not for its weight.
        shared_inner: the width of the expert that computes all tokens; 0 without one.
        has_shared_gate: whether its output is multiplied by a sigmoid.
        num_ignored_layers: the number of layers in the files behind the last one, which predict
            further tokens and are not loaded.
        freezes_router: whether training leaves the routers, and the gates of shared experts, as
            they are.
    """

    num_experts: int
    num_chosen: int
    inner: int
    dense_layers: tuple[int, ...] = ()
    scoring: Scoring = "softmax"
    is_renormalized: bool = False
    scale: float = 1.0
    num_groups: int = 1
    num_kept_groups: int = 1
    # Not in ``repr``, which checkpoints hash: the family decides it.
    num_group_scores: int = field(default=2, repr=False)
    has_correction: bool = False
    shared_inner: int = 0
    has_shared_gate: bool = False
    num_ignored_layers: int = 0
    # Not in ``repr`` either: it is a key of the run, and no fact of the model.
    freezes_router: bool = field(default=False, repr=False)


def is_expert_family(model_type: str | None) -> bool:
    """Return whether our decoder computes the family with experts."""
    return model_type in _READERS


def experts_of(hf_config: Mapping[str, Any]) -> ExpertConfig | None:
    """Return the experts of a model; None if no layer has experts.

    Args:
        hf_config: the content of config.json.

    Raises:
        UserError: a size is missing, or the sizes contradict each other.
    """
    read = _READERS.get(str(hf_config.get("model_type")))
    if read is None:
        return None
    experts = read(hf_config)
    _require_consistent(experts)
    if len(experts.dense_layers) == hf_config["num_hidden_layers"]:
        return None
    _require_widths(hf_config, experts)
    return experts


def _read_qwen(hf_config: Mapping[str, Any]) -> ExpertConfig:
    step = hf_config.get("decoder_sparse_step", 1)
    only = hf_config.get("mlp_only_layers") or ()
    layers = range(require_size(hf_config, "num_hidden_layers"))
    return ExpertConfig(
        _number(hf_config),
        require_size(hf_config, "num_experts_per_tok"),
        inner=require_size(hf_config, "moe_intermediate_size"),
        dense_layers=tuple(index for index in layers if index in only or (index + 1) % step),
        is_renormalized=bool(hf_config.get("norm_topk_prob", False)),
    )


def _read_qwen2(hf_config: Mapping[str, Any]) -> ExpertConfig:
    shared = require_size(hf_config, "shared_expert_intermediate_size")
    return replace(_read_qwen(hf_config), shared_inner=shared, has_shared_gate=True)


def _read_olmoe(hf_config: Mapping[str, Any]) -> ExpertConfig:
    inner = require_size(hf_config, "intermediate_size")
    return _read_qwen({**hf_config, "moe_intermediate_size": inner})


def _read_glm(hf_config: Mapping[str, Any]) -> ExpertConfig:
    defaults: dict[str, Any] = {"norm_topk_prob": True}
    defaults |= dict.fromkeys(("first_k_dense_replace", "n_shared_experts", "num_mtp_layers"), 1)
    if "num_nextn_predict_layers" in hf_config:
        del defaults["num_mtp_layers"]
    return _read_deepseek({**defaults, **hf_config})


def _read_moonlight(hf_config: Mapping[str, Any]) -> ExpertConfig:
    """Read a configuration of DeepSeek-V3 or Moonlight."""
    defaults: dict[str, Any] = {"norm_topk_prob": True, "first_k_dense_replace": 3}
    defaults |= {"routed_scaling_factor": 2.5}
    defaults |= {"n_group": 8, "topk_group": 4, "n_shared_experts": 1}
    return _read_deepseek({**defaults, **hf_config})


def _read_softmax_deepseek(hf_config: Mapping[str, Any]) -> ExpertConfig:
    """Read a configuration of DeepSeek-V2. transformers ignores its ``norm_topk_prob``, too."""
    method = hf_config.get("topk_method", "greedy")
    _require_one_of("topk_method", method, names=_METHODS_OF_V2)
    if hf_config.get("mlp_bias"):
        raise UserError(
            "config.json: mlp_bias",
            True,
            rule="experts with biases are not built",
            remedy="Use another model.",
        )
    content = {"n_shared_experts": 2, **hf_config, "norm_topk_prob": False}
    if method == "greedy":
        content |= {"n_group": 1, "topk_group": 1}
    return replace(_read_deepseek(content, scoring="softmax"), num_group_scores=1)


def _read_mixtral(hf_config: Mapping[str, Any]) -> ExpertConfig:
    return ExpertConfig(
        _number(hf_config),
        require_size(hf_config, "num_experts_per_tok"),
        inner=require_size(hf_config, "intermediate_size"),
        is_renormalized=True,
    )


def _read_deepseek(
    hf_config: Mapping[str, Any], *, scoring: Scoring = "sigmoid", is_renormalized: bool = False
) -> ExpertConfig:
    inner = require_size(hf_config, "moe_intermediate_size")
    has_correction = scoring == "sigmoid"
    if hf_config["model_type"] != "XdgMoE":
        names = _NAMES_OF_SCORING[scoring]
        _require_one_of("scoring_func", hf_config.get("scoring_func", names[0]), names=names)
    return ExpertConfig(
        _number(hf_config),
        require_size(hf_config, "num_experts_per_tok"),
        inner=inner,
        dense_layers=_first_dense(hf_config),
        scoring=scoring,
        is_renormalized=is_renormalized or bool(hf_config.get("norm_topk_prob", False)),
        scale=float(hf_config.get("routed_scaling_factor") or 1.0),
        num_groups=hf_config.get("n_group") or 1,
        num_kept_groups=hf_config.get("topk_group") or 1,
        has_correction=has_correction,
        shared_inner=inner * (hf_config.get("n_shared_experts") or 0),
        num_ignored_layers=next((n for n in map(hf_config.get, _FURTHER) if n is not None), 0),
    )


def _read_xdg(hf_config: Mapping[str, Any]) -> ExpertConfig:
    """Read red-moe's configuration, whose router is one of three.

    A single expert keeps its score as its weight, as in the code of the family.
    """
    name = hf_config.get("scoring_func", "softmax")
    _require_one_of("scoring_func", name, names=tuple(_SCORING_OF_XDG))
    scoring = _SCORING_OF_XDG[name]
    experts = _read_deepseek(
        {**hf_config, "n_group": 1, "topk_group": 1},
        scoring=scoring,
        is_renormalized=scoring == "sigmoid",
    )
    return replace(experts, is_renormalized=experts.is_renormalized and experts.num_chosen > 1)


_READERS: Mapping[str, Callable[[Mapping[str, Any]], ExpertConfig]] = {
    "qwen3_moe": _read_qwen,
    "qwen2_moe": _read_qwen2,
    "mixtral": _read_mixtral,
    "dots1": _read_deepseek,
    "XdgMoE": _read_xdg,
    "glm4_moe": _read_glm,
    "olmoe": _read_olmoe,
    "deepseek_v2": _read_softmax_deepseek,
    "deepseek_v3": _read_moonlight,
}


def _first_dense(hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    first = hf_config.get("first_k_dense_replace") or 0
    frequency = hf_config.get("moe_layer_freq") or 1
    layers = range(require_size(hf_config, "num_hidden_layers"))
    return tuple(index for index in layers if index < first or index % frequency)


def _require_one_of(name: str, value: object, *, names: tuple[str, ...]) -> None:
    if value not in names:
        raise wrong_value(name, value, rule=f"must be one of {', '.join(names)}")


def _require_consistent(experts: ExpertConfig) -> None:
    wrong = None
    number, kept = experts.num_experts, experts.num_kept_groups
    if experts.num_chosen > number:
        wrong = ("num_experts_per_tok", experts.num_chosen, f"at most {number}")
    elif number % experts.num_groups:
        wrong = ("n_group", experts.num_groups, f"a divisor of {number} experts")
    elif kept > experts.num_groups:
        wrong = ("topk_group", kept, f"at most {experts.num_groups}")
    elif experts.num_chosen > kept * (number // experts.num_groups):
        held = f"at most {kept * (number // experts.num_groups)}, the experts of {kept} group(s)"
        wrong = ("num_experts_per_tok", experts.num_chosen, held)
    if wrong is not None:
        name, value, rule = wrong
        raise wrong_value(name, value, rule=f"must be {rule}")


def _require_widths(hf_config: Mapping[str, Any], experts: ExpertConfig) -> None:
    """Raise UserError unless rows of experts' matrices begin at multiples of 16 bytes in bf16.

    The product of tokens sorted by expert (torch's ``grouped_mm``) takes no other ones.
    """
    names = ("moe_intermediate_size", "intermediate_size")
    inner = next(name for name in names if hf_config.get(name) == experts.inner)
    for name in ("hidden_size", inner):
        width = require_size(hf_config, name)
        if width % _WIDTH_MULTIPLE:
            nearest = max(1, round(width / _WIDTH_MULTIPLE)) * _WIDTH_MULTIPLE
            raise UserError(
                f"config.json: {name}",
                width,
                rule=f"a model with experts needs a multiple of {_WIDTH_MULTIPLE}",
                remedy=f"Use a model with another width, such as {name}={nearest}.",
            )


def _number(hf_config: Mapping[str, Any]) -> int:
    name = next((name for name in _NUMBERS if hf_config.get(name) is not None), _NUMBERS[0])
    return require_size(hf_config, name)
