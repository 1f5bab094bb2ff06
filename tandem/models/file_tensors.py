# SPDX-License-Identifier: Apache-2.0
"""The tensors of Hugging Face files by name, and their places in the parameters of our decoder.

Hugging Face names occur here only. A fused parameter has several file tensors along its rows. The
experts of a layer are two parameters; a file has either three tensors for each expert, which is
what we write, or the two fused ones that transformers holds in memory. The same table serves both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from tandem.config.derived.experts import ExpertConfig
from tandem.config.derived.vision import VISION_FAMILIES
from tandem.models.decoder import DecoderConfig, parameter_shapes
from tandem.models.vision import TOWER, is_of_tower

FUSED_SUFFIX = ".experts.gate_up_proj"
"""The end of the names by which a file with fused experts is recognised."""


_TOWERS, _TEXTS = ("model.visual.", "visual."), ("model.language_model.", "model.")
"""The prefixes that files of models that see may have."""
_CORRECTION = "gate.e_score_correction_bias"


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a Hugging Face file: rows ``start .. start + rows`` of ``parameter``.

    Attributes:
        expert: the expert whose rows they are, in a parameter of all experts; None otherwise.
    """

    name: str
    parameter: str
    start: int
    rows: int
    expert: int | None = None

    def of(self, whole: Tensor) -> Tensor:
        """Return these rows of the parameter."""
        own = whole if self.expert is None else whole[self.expert]
        return own[self.start : self.start + self.rows]


@dataclass(frozen=True)
class _ExpertNames:
    """The names of a family's experts in files."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"


_EXPERT_NAMES = {
    "mixtral": _ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
    "qwen2_moe": _ExpertNames(shared="shared_expert"),
}
"""The names of families that differ from DeepSeek's."""
_HEAD_NORMS = {"XdgMoE": ("q_layernorm", "k_layernorm")}
"""The names of the norms of queries and keys of families that differ from Qwen3's."""


def file_tensors(config: DecoderConfig, *, are_fused: bool = False) -> Iterator[FileTensor]:
    """Yield the tensors of a model's files in the decoder's order, without a tied head.

    Args:
        are_fused: whether a file has all experts of a layer in two tensors.
    """
    text = _text_prefix(config)
    yield FileTensor(f"{text}embed_tokens.weight", "embedding.weight", 0, config.vocab_size)
    for index in range(config.num_layers):
        yield from _attention_tensors(config, index)
        experts = config.experts_at(index)
        if experts is None:
            yield from _dense_tensors(config, index)
        else:
            yield from _expert_tensors(config, index, experts=experts, are_fused=are_fused)
    yield FileTensor(f"{text}norm.weight", "final_norm.weight", 0, config.hidden_size)
    if config.has_value_head:
        yield FileTensor("score.weight", "lm_head.weight", 0, 1)
        if config.has_value_bias:
            yield FileTensor("score.bias", "lm_head.bias", 0, 1)
    elif not config.tie_embeddings:
        yield FileTensor("lm_head.weight", "lm_head.weight", 0, config.vocab_size)
    if config.vision is not None:
        prefix = VISION_FAMILIES[config.vision.family].tower_prefix
        for name, shape in parameter_shapes(config).items():
            if is_of_tower(name):
                yield FileTensor(prefix + name.removeprefix(TOWER), name, 0, shape[0])


def name_in_family(name: str, config: DecoderConfig) -> str:
    """Return the name that a file's tensor has in files of its family.

    Versions of transformers write models that see with other prefixes.
    """
    if config.vision is None:
        return name
    family = VISION_FAMILIES[config.vision.family]
    own = (*((x, family.tower_prefix) for x in _TOWERS), *((x, family.text_prefix) for x in _TEXTS))
    for prefix, wanted in own:
        if name.startswith(prefix):
            return wanted + name.removeprefix(prefix)
    return name


def is_ignored(name: str, config: DecoderConfig) -> bool:
    """Return whether a file tensor belongs to a layer behind the last one, which is not loaded."""
    if config.experts is None:
        return False
    first = config.num_layers
    behind = range(first, first + config.experts.num_ignored_layers)
    return any(name.startswith(f"model.layers.{index}.") for index in behind)


def is_kept(name: str) -> bool:
    """Return whether a file tensor keeps its precision when a folder is converted."""
    return name.endswith(_CORRECTION)


def _text_prefix(config: DecoderConfig) -> str:
    if config.vision is None:
        return "model."
    return VISION_FAMILIES[config.vision.family].text_prefix


def _attention_tensors(config: DecoderConfig, index: int) -> Iterator[FileTensor]:
    heads, kv_heads = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    hidden = config.hidden_size
    qkv = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads, "self_attn.v_proj": kv_heads}
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    file, decoder = f"{_text_prefix(config)}layers.{index}", f"layers.{index}"
    for norm, name in norms.items():
        yield FileTensor(f"{file}.{name}.weight", f"{decoder}.{norm}.weight", 0, hidden)
    names = _HEAD_NORMS.get(config.family, ("q_norm", "k_norm"))
    for norm, theirs in zip(("q_norm", "k_norm"), names, strict=True) if config.qk_norm else ():
        name = f"{file}.self_attn.{theirs}.weight"
        width = config.head_dim
        if config.norm_spans_heads:
            width = heads if norm == "q_norm" else kv_heads
        yield FileTensor(name, f"{decoder}.{norm}.weight", 0, width)
    o = {"self_attn.o_proj": hidden}
    if config.latent is None:
        yield from _linear_tensors(file, f"{decoder}.qkv", parts=qkv, has_bias=config.qkv_bias)
    else:
        yield from _latent_tensors(config, f"{file}.self_attn", decoder=f"{decoder}.qkv")
    yield from _linear_tensors(file, f"{decoder}.o", parts=o, has_bias=config.o_bias)


def _latent_tensors(config: DecoderConfig, file: str, *, decoder: str) -> Iterator[FileTensor]:
    """Yield the tensors of latent attention, whose maps have files of their own."""
    latent, heads = config.latent, config.num_heads
    assert latent is not None, "the model has ordinary attention"
    rank, has_bias = latent.query_rank, config.qkv_bias
    query = "q_proj" if rank is None else "q_b_proj"
    if rank is not None:
        parts = {"q_a_proj": rank}
        yield from _linear_tensors(file, f"{decoder}.query_latent", parts=parts, has_bias=has_bias)
        yield FileTensor(f"{file}.q_a_layernorm.weight", f"{decoder}.query_norm.weight", 0, rank)
    rows = heads * latent.query
    yield FileTensor(f"{file}.{query}.weight", f"{decoder}.query.weight", 0, rows)
    parts = {"kv_a_proj_with_mqa": latent.key_rank + latent.rotated}
    yield from _linear_tensors(file, f"{decoder}.latent", parts=parts, has_bias=has_bias)
    norm = f"{decoder}.latent_norm.weight"
    yield FileTensor(f"{file}.kv_a_layernorm.weight", norm, 0, latent.key_rank)
    rows = heads * (latent.plain + latent.value)
    yield FileTensor(f"{file}.kv_b_proj.weight", f"{decoder}.heads.weight", 0, rows)


def _dense_tensors(config: DecoderConfig, index: int) -> Iterator[FileTensor]:
    file, decoder = f"{_text_prefix(config)}layers.{index}", f"layers.{index}"
    inner, has_bias = config.intermediate_size, config.mlp_bias
    gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    down = {"mlp.down_proj": config.hidden_size}
    yield from _linear_tensors(file, f"{decoder}.gate_up", parts=gate_up, has_bias=has_bias)
    yield from _linear_tensors(file, f"{decoder}.down", parts=down, has_bias=has_bias)


def _linear_tensors(
    file: str, linear: str, *, parts: Mapping[str, int], has_bias: bool
) -> Iterator[FileTensor]:
    for kind in ("weight", "bias") if has_bias else ("weight",):
        start = 0
        for name, rows in parts.items():
            yield FileTensor(f"{file}.{name}.{kind}", f"{linear}.{kind}", start, rows)
            start += rows


def _expert_tensors(
    config: DecoderConfig, index: int, *, experts: ExpertConfig, are_fused: bool
) -> Iterator[FileTensor]:
    names = _EXPERT_NAMES.get(config.family, _ExpertNames())
    block = _ExpertNames.block if are_fused else names.block
    file, decoder = f"model.layers.{index}.{block}", f"layers.{index}.experts"
    routed = f"{decoder}.routed"
    number, hidden = experts.num_experts, config.hidden_size
    yield FileTensor(f"{file}.gate.weight", f"{decoder}.router", 0, number)
    if experts.has_correction:
        name = f"{file}.{_CORRECTION}"
        yield FileTensor(name, f"{decoder}.correction", 0, number)
    if are_fused:
        yield FileTensor(f"{file}{FUSED_SUFFIX}", f"{routed}.gate_up", 0, number)
        yield FileTensor(f"{file}.experts.down_proj", f"{routed}.down", 0, number)
    for expert in () if are_fused else range(number):
        own, inner = f"{file}.experts.{expert}", experts.inner
        yield FileTensor(f"{own}.{names.gate}.weight", f"{routed}.gate_up", 0, inner, expert)
        yield FileTensor(f"{own}.{names.up}.weight", f"{routed}.gate_up", inner, inner, expert)
        yield FileTensor(f"{own}.{names.down}.weight", f"{routed}.down", 0, hidden, expert)
    shared, name = experts.shared_inner, f"{file}.{names.shared}"
    if shared:
        yield FileTensor(f"{name}.gate_proj.weight", f"{decoder}.shared_gate_up", 0, shared)
        yield FileTensor(f"{name}.up_proj.weight", f"{decoder}.shared_gate_up", shared, shared)
        yield FileTensor(f"{name}.down_proj.weight", f"{decoder}.shared_down", 0, hidden)
    if experts.has_shared_gate:
        yield FileTensor(f"{name}_gate.weight", f"{decoder}.shared_gate", 0, 1)
