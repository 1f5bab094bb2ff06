# SPDX-License-Identifier: Apache-2.0
"""Training of families that our decoder does not support, with transformers' modelling code.

A packed batch is unpacked into right-padded rows, one per sequence (a shared prompt is recomputed
for every response), and hidden states are gathered back into packed order. Dropout is off. A model
whose logits are not linear in its last hidden states is refused.

Shapes: T packed tokens, B rows, M padded tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tandem.config.derived.model_types import rope_kind
from tandem.config.derived.vision import text_part
from tandem.config.schema.families import SEEING_FAMILIES
from tandem.errors import UserError
from tandem.models.decoder import Granularity
from tandem.models.operators import TORCH
from tandem.models.parallel import WHOLE, PlainParameters, slices_of_rows, tensor_regions
from tandem.models.weights import KEY, copy_companions
from tandem.types import HeldSlice, PackedBatch, Segments

if TYPE_CHECKING:
    import transformers

_PROBE_IDS = (1, 2, 0, 3)


def load_transformers() -> Any:
    """Import and return the package transformers.

    Loading it takes 0.7 s, which processes need not spend whose models our decoder computes.
    """
    return importlib.import_module("transformers")


def is_known_family(model_type: str) -> bool:
    """Return whether transformers has a config class for this ``model_type``."""
    return model_type in load_transformers().CONFIG_MAPPING


def require_causal(hf_config: Mapping[str, Any], *, key: str, path: str) -> None:
    """Raise UserError if config.json names no class of a causal language model.

    A model without ``architectures``, or with code of its own, is judged when it is loaded.
    """
    named = hf_config.get("architectures") or ()
    if not named or "auto_map" in hf_config:
        return
    settings = load_transformers().CONFIG_MAPPING[hf_config["model_type"]]
    known: Any = load_transformers().MODEL_FOR_CAUSAL_LM_MAPPING.get(settings, ())
    classes = known if isinstance(known, tuple) else (known,)
    if any(one.__name__ in named for one in classes):
        return
    raise UserError(
        key,
        path,
        rule=f"{named[0]} (architectures in config.json) is not a causal language model of text",
        remedy="Use a model whose class ends in ForCausalLM, or one that sees: "
        f"{', '.join(SEEING_FAMILIES)}.",
    )


def require_known_functions(hf_config: Mapping[str, Any], *, key: str, path: str) -> None:
    """Raise UserError if transformers lacks the activation or the scaling of rotary positions.

    Args:
        hf_config: the content of config.json of one of our families.
    """
    own = text_part(hf_config)
    seeing = ("mrope",) if hf_config["model_type"] in SEEING_FAMILIES else ()
    activations = importlib.import_module("transformers.activations").ACT2FN
    scalings = importlib.import_module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    named = {
        "hidden_act": (own.get("hidden_act", "silu"), activations),
        "rope_type": (rope_kind(own), ("default", *seeing, *scalings)),
    }
    for name, (value, known) in named.items():
        if value not in known:
            raise UserError(
                key,
                path,
                rule=f"{name} {value!r} (config.json) is known neither to tandem nor to "
                "transformers",
                remedy="Use the config.json that belongs to the weights.",
            )


class TransformersModel:
    """A ``LanguageModel`` that transformers' modelling code computes.

    Attributes:
        computing: the module whose call returns the last hidden states. An engine that shards the
            parameters makes it and ``layers`` its units.
        device: the device of the computation. An engine that stores the weights elsewhere sets it.
    """

    decoder = None
    layout = WHOLE
    operators = TORCH
    value_head = None

    def __init__(self, model: transformers.PreTrainedModel, source: Path) -> None:
        """Wrap ``model``. Raise UserError unless its logits are linear in its hidden states."""
        self._model: Any = model  # its attributes depend on the family
        self._source = source
        self._scale = _logit_scale(model.config)
        self._head: nn.Linear = self._model.get_output_embeddings()
        self.computing: nn.Module = _Backbone(model)
        self.device = self._head.weight.device
        self._check_head()

    @property
    def module(self) -> nn.Module:
        return self._model

    @property
    def family(self) -> str:
        return self._model.config.model_type

    @property
    def config(self) -> PlainParameters:
        """The parameters of the unsharded model."""
        named = self._model.named_parameters()
        return PlainParameters({name: tuple(weight.shape) for name, weight in named})

    @property
    def layers(self) -> list[nn.Module]:
        """The layers, which are computed one after another."""
        names = self._model._no_split_modules or ()
        return [part for part in self._model.modules() if type(part).__name__ in names]

    @property
    def stored_buffers(self) -> list[str]:
        """The names of tensors in its files that are not parameters, in order."""
        known = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        return [name for name in self._model.state_dict() if name not in known]

    def held_slices(self) -> list[HeldSlice]:
        """Return the whole parameters, unless an engine has sharded them."""
        named = dict(self._model.named_parameters())
        dtype = self._head.weight.dtype
        regions = tensor_regions(self.config, rank=0, size=1, dtype=dtype)
        return [
            held for name, weight in named.items() for held in slices_of_rows(regions[name], weight)
        ]

    def trained_slices(self) -> list[HeldSlice]:
        """Return ``held_slices``: all parameters are trained."""
        return self.held_slices()

    def move(self, device: torch.device | str) -> None:
        """Move the parameters and the computation to a device."""
        self._model.to(device)
        self.device = torch.device(device)

    def in_dtype(self, dtype: torch.dtype) -> TransformersModel:
        if self._head.weight.dtype == dtype:
            return self
        return TransformersModel(copy.deepcopy(self._model).to(dtype), self._source)

    @property
    def lm_head_weight(self) -> Tensor:
        """The weight of the head, (V, D), or (V, D + 1) with its bias as the last column."""
        weight_VD, bias_V = self._head.weight, self._head.bias
        return weight_VD if bias_V is None else torch.cat((weight_VD, bias_V[:, None]), 1)

    def hidden(self, packed: PackedBatch) -> Tensor:
        """Return the final hidden states (T, D), scaled as the model scales its logits."""
        device = self.device
        rows = _unpack(packed.segments)
        ids_BM = packed.token_ids_T[rows.token_BM].to(device)
        h_BMD = self.computing(ids_BM, rows.valid_BM.to(device))
        return self._finish(h_BMD.flatten(0, 1).index_select(0, rows.place_T.to(device)))

    def router_metrics(self) -> Mapping[str, Tensor]:
        return {}

    def recorded_routes(self) -> Tensor | None:
        return None

    def set_gradient_checkpointing(self, enabled: bool, granularity: Granularity = "full") -> None:
        """Recompute whole layers in the backward pass. Raise UserError for parts of layers."""
        if enabled and granularity != "full":
            raise UserError(
                "model.recompute_granularity",
                granularity,
                rule=f"a model of type {self.family!r} can only recompute whole layers",
                remedy="Use full.",
            )
        if not enabled:
            self._model.gradient_checkpointing_disable()
            return
        self._model.gradient_checkpointing_enable({"use_reentrant": False})
        # transformers recomputes only in training mode, which does not differ without dropout.
        self._model.train()

    def save(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        state = self._model.state_dict()
        if dtype is not None:
            state = {name: tensor.to(dtype) for name, tensor in state.items()}
        self._model.save_pretrained(folder, state_dict=state)
        copy_companions(self._source, folder)

    def _finish(self, h_TD: Tensor) -> Tensor:
        if self._scale != 1.0:
            h_TD = h_TD * self._scale
        return h_TD if self._head.bias is None else F.pad(h_TD, (0, 1), value=1.0)

    @torch.no_grad()
    def _check_head(self) -> None:
        ids_1M = torch.tensor([_PROBE_IDS], device=self._head.weight.device)
        valid_1M = torch.ones_like(ids_1M, dtype=torch.bool)
        output = self._model(input_ids=ids_1M, attention_mask=valid_1M.long(), use_cache=False)
        theirs_MV = output.logits[0].float()
        ours_MV = (
            self._finish(self.computing(ids_1M, valid_1M)[0]) @ self.lm_head_weight.T
        ).float()
        tolerance = 1e-4 if self._head.weight.dtype == torch.float32 else 5e-2
        limit = tolerance * float(theirs_MV.abs().max())
        if ours_MV.shape != theirs_MV.shape or (ours_MV - theirs_MV).abs().max() > limit:
            reason = "its logits are not linear in its last hidden states"
            raise _unsupported(self._source, self.family, reason=reason)


class _Backbone(nn.Module):
    """All of a model but its head: tokens and their validity to hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, ids_BM: Tensor, valid_BM: Tensor) -> Tensor:
        output = self.model.base_model(
            input_ids=ids_BM, attention_mask=valid_BM.long(), use_cache=False
        )
        h_BMD = output.last_hidden_state
        # FSDP2 warns of units that return views, as GPT-2 does.
        return h_BMD.clone() if h_BMD._is_view() else h_BMD


def open_transformers_model(
    folder: Path, *, dtype: torch.dtype, trust_remote_code: bool, random_seed: int | None
) -> TransformersModel:
    """Load a folder's weights onto the CPU, or draw them from ``random_seed``.

    Raises:
        UserError: transformers cannot build a causal language model from the folder, tensors are
            missing, or logits are not linear in hidden states.
    """
    trust = {"trust_remote_code": trust_remote_code}
    try:
        hf_config = load_transformers().AutoConfig.from_pretrained(
            folder, local_files_only=True, **trust
        )
        _refuse_softcapping(folder, hf_config)
        _switch_off_dropout(hf_config)
        if random_seed is None:
            model = _load(folder, hf_config, dtype=dtype, **trust)
        else:
            model = _draw(hf_config, random_seed, dtype=dtype, **trust)
    except UserError:
        raise
    except Exception as error:  # transformers' code, or the model's own, may raise anything
        raise UserError(
            KEY,
            str(folder),
            rule=f"transformers cannot load it ({' '.join(str(error).split())[:200]})",
            remedy="Use a causal language model that it supports.",
        ) from error
    return TransformersModel(model, folder)


def open_without_weights(
    folder: Path, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> TransformersModel:
    """Return the model of a folder's config.json with frozen random weights, to be filled."""
    model = open_transformers_model(
        folder, dtype=dtype, trust_remote_code=trust_remote_code, random_seed=0
    )
    model.move(device)
    model.module.requires_grad_(False)
    return model


def transformers_views(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in checkpoint files, tensor) of every weight of transformers' model.

    Modules may hold several tensors of a file as one, for instance all experts of a layer. Tied
    weights come once. Tensors are views where the file has parts of a parameter.
    """
    conversion = importlib.import_module("transformers.core_model_loading")
    parameters = {name: weight.detach() for name, weight in module.named_parameters()}
    yield from conversion.revert_weight_conversion(module, parameters).items()


def _load(folder: Path, hf_config: Any, *, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    loaded: Any = load_transformers().AutoModelForCausalLM.from_pretrained(
        folder,
        config=hf_config,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        local_files_only=True,
        output_loading_info=True,
    )
    model, report = loaded
    # transformers only warns, and keeps random values for missing tensors.
    if report["missing_keys"]:
        raise UserError(
            KEY,
            str(folder),
            rule=f"tensor {min(report['missing_keys'])!r} is missing from the weights",
            remedy="Use a complete Hugging Face folder.",
        )
    return model


def _draw(hf_config: Any, seed: int, *, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return load_transformers().AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, trust_remote_code=trust_remote_code
        )


def _switch_off_dropout(hf_config: transformers.PretrainedConfig) -> None:
    for name, value in hf_config.to_dict().items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(hf_config, name, 0.0)


def _refuse_softcapping(folder: Path, hf_config: transformers.PretrainedConfig) -> None:
    if hf_config.to_dict().get("final_logit_softcapping") is not None:
        raise _unsupported(folder, hf_config.model_type, reason="it soft-caps its logits")


def _unsupported(folder: Path, family: str, *, reason: str) -> UserError:
    return UserError(
        KEY,
        str(folder),
        rule=f"a model of type {family!r} cannot be trained here: {reason}",
        remedy="Use a model of another family, such as qwen3.",
    )


def _logit_scale(hf_config: transformers.PretrainedConfig) -> float:
    # Cohere multiplies its logits, Granite divides them.
    values: dict[str, Any] = hf_config.to_dict()
    return float(values.get("logit_scale") or 1.0) / float(values.get("logits_scaling") or 1.0)


@dataclass(frozen=True)
class _Rows:
    """B right-padded rows of M tokens: the packed token of each place, and the inverse."""

    token_BM: Tensor
    valid_BM: Tensor
    place_T: Tensor


def _unpack(segments: Segments) -> _Rows:
    """Make a row of each segment that is not a prefix, after its own prefix."""
    has_prefix_S = segments.prefix_length_S > 0
    is_prefix_S = torch.isin(segments.start_S, segments.prefix_start_S[has_prefix_S])
    leaves = (~is_prefix_S).nonzero()[:, 0]
    start = segments.start_S[leaves, None]
    prefix_start = segments.prefix_start_S[leaves, None]
    prefix_length = segments.prefix_length_S[leaves, None]
    length = prefix_length + segments.length_S[leaves, None]
    column = torch.arange(int(length.max()))
    valid_BM = column < length
    in_prefix_BM = column < prefix_length
    token_BM = torch.where(in_prefix_BM, prefix_start, start - prefix_length) + column
    token_BM = token_BM.where(valid_BM, start)
    place = valid_BM.flatten().nonzero()[:, 0]
    place_T = torch.empty(int(segments.length_S.sum()), dtype=torch.int64)
    # A shared prompt is in several rows with equal hidden states: any row will do.
    place_T[token_BM.flatten()[place]] = place
    return _Rows(token_BM, valid_BM, place_T)
