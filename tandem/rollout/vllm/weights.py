# SPDX-License-Identifier: Apache-2.0
"""The delivery of weights to vLLM through its own loader, by their names in checkpoint files.

vLLM handles fused, padded and packed layouts. The sink checks names in both directions: each tensor
of the manifest must arrive and be loaded, and each parameter of vLLM's model must be written. vLLM
itself only logs a parameter that is skipped. If the processes of an engine divide the experts, an
expert is loaded by one of them.

The first version is loaded tensor by tensor, which shows what each of them writes. Later versions
are loaded in groups of tensors, each of which must write what its tensors wrote: each call of
vLLM's loader searches the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.api import EngineFailure
from tandem.rollout.glm_network import name_in_glm
from tandem.rollout.vllm.library import of_vllm
from tandem.types import SliceSpec

_RELOAD = "model_executor.model_loader.reload"
_GROUP_BYTES = 1 << 28
"""A group is loaded when it holds so much. Its copies are beside what vLLM holds itself."""
_EXPERT = ".experts."
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_CACHE_SCALES = (".q_scale", ".k_scale", ".v_scale", ".prob_scale")
"""Parameters for a quantized cache, which an fp8 model of vLLM 0.26 opens with. The trainer has
none, and vLLM puts back those in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """The model of a vLLM worker in this process.

    Attributes:
        get_model: returns the module.
        device: the device of its weights.
        vllm_config: vLLM's ``VllmConfig``.
        family: the ``model_type`` of the trainer's model.
    """

    get_model: Callable[[], Any]
    device: torch.device
    vllm_config: Any
    family: str = ""


class VllmSink:
    """An ``api.WeightSink`` over the model of a vLLM worker in this process."""

    def __init__(
        self,
        target: LoadedModel,
        manifest: Sequence[SliceSpec],
        *,
        on_end: Callable[[int], None],
        loaded_by_any: Callable[[Sequence[bool]], Sequence[bool]] | None = None,
    ) -> None:
        """Take the model of this process.

        Args:
            on_end: is called with each version that has come.
            loaded_by_any: returns which of some tensors a process of the engine has loaded, if its
                processes divide the experts.
        """
        self._target = target
        self._loaded_by_any = loaded_by_any
        self._manifest = manifest
        self._on_end = on_end
        self._is_tied = not any(spec.name == _HEAD for spec in manifest)
        self._missing: dict[str, None] = {}
        self._group: dict[str, Tensor] = {}
        self._group_bytes = 0
        self._written: dict[str, frozenset[str]] = {}
        self._unwritten: set[str] = set()
        self._first_names: dict[str, str] = {}
        self._opened: int | None = None

    def manifest(self) -> Sequence[SliceSpec]:
        """Return the tensors of a version."""
        return self._manifest

    def begin(self, version: int) -> None:
        """Open vLLM's model for new weights. It cannot compute until ``end`` returns."""
        model = self._model()
        self._opened = version
        self._missing = dict.fromkeys(spec.name for spec in self._manifest)
        self._group, self._group_bytes = {}, 0
        # A tied head is listed apart from its embedding once the model is open.
        self._first_names = _first_names(model)
        with self._context(), self._target.device:
            of_vllm(_RELOAD, "initialize_layerwise_reload")(model)
        # Without what vLLM computes from weights, such as the scales of matrices in fp8.
        opened: list[str] = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        self._unwritten = {
            self._first_names.get(name, name) for name in opened if not name.endswith(_CACHE_SCALES)
        }

    def take(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor, and load it or the group of those that have come."""
        if name not in self._missing:
            raise EngineFailure(f"vLLM: weight {name} came twice, or is not in the manifest")
        del self._missing[name]
        self._group[name] = copy = tensor.to(self._target.device, copy=True)
        self._group_bytes += copy.nbytes
        if self._group_bytes >= _GROUP_BYTES or name not in self._written:
            self._load_group()

    def _load_group(self) -> None:
        """Load the tensors that have come. vLLM holds them until their layers are whole."""
        group, self._group, self._group_bytes = self._group, {}, 0
        pairs = [(each, copy) for name, copy in group.items() for each in self._names_of(name)]
        with self._context(), self._target.device:
            try:
                written = frozenset(self._model().load_weights(pairs) or ())
            except RuntimeError as error:
                first = (str(error).splitlines() or [""])[0]
                raise EngineFailure(f"vLLM does not load {_some(set(group))}: {first}") from error
        for name in group:
            if not self._written.setdefault(name, written) <= written:
                raise EngineFailure(f"vLLM dropped {name}, or another tensor of its group")
        self._unwritten -= {self._first_names.get(each, each) for each in written}

    def end(self) -> None:
        """Close the model, and recompute derived tensors that vLLM's reload leaves unchanged."""
        if self._missing:
            raise EngineFailure(f"vLLM: weights are missing: {_some(self._missing)}")
        self._load_group()
        self._require_loaded()
        if self._unwritten:
            raise EngineFailure(f"vLLM: parameters were not written: {_some(self._unwritten)}")
        model, version = self._model(), self._opened
        assert version is not None, "begin() comes first"
        with self._context(), self._target.device:
            finalize = of_vllm(_RELOAD, "finalize_layerwise_reload")
            finalize(model, self._target.vllm_config.model_config)
            _refresh_tied_head(model)
            _repack_experts(model)
        self._opened = None
        self._on_end(version)

    def _require_loaded(self) -> None:
        """Raise EngineFailure if vLLM dropped a tensor. Collective where experts are divided."""
        names = [spec.name for spec in self._manifest]
        loaded: Sequence[bool] = [bool(self._written[name]) for name in names]
        if self._loaded_by_any is not None:
            anywhere = self._loaded_by_any(loaded)
            loaded = [
                any_has if _EXPERT in name else has
                for name, has, any_has in zip(names, loaded, anywhere, strict=True)
            ]
        dropped = {name for name, has in zip(names, loaded, strict=True) if not has}
        if dropped:
            raise EngineFailure(f"vLLM dropped {_some(dropped)}")

    def require_whole(self) -> None:
        """Raise EngineFailure if a version was begun and not ended: vLLM's model is open."""
        if self._opened is not None:
            raise EngineFailure(f"vLLM: version {self._opened} was not loaded whole")

    def _names_of(self, name: str) -> Sequence[str]:
        """Return the names under which vLLM gets a tensor of the trainer.

        vLLM unties a head from its embedding if the files have one, even if the model is tied.
        """
        if name.endswith(_EMBEDDING) and self._is_tied and _HEAD in self._unwritten:
            return name, _HEAD
        return (name_in_glm(name, self._target.family),)

    def _model(self) -> Any:
        return self._target.get_model()

    def _context(self) -> Any:
        return of_vllm("config", "set_current_vllm_config")(self._target.vllm_config)


def _first_names(model: Any) -> dict[str, str]:
    """Return the first name of each parameter by all of its names.

    Routers and shared experts have several: their modules are part of two others.
    """
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in named}


def _some(names: Sequence[str] | dict[str, None] | set[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > len(shown) else "")


def _refresh_tied_head(model: Any) -> None:
    """Make the tied head from the new embedding.

    Checkpoints name the embedding only, and vLLM keeps what it derived from the old weight, which
    on CPUs is a packed copy.
    """
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is None or embedding is None:
        return
    if getattr(head, "weight", None) is embedding.weight:
        head.quant_method.process_weights_after_loading(head)


def _repack_experts(model: Any) -> None:
    """Pack experts for their kernel on CPUs, which vLLM does at the first load only."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        is_plain = type(method).__name__ == "UnquantizedFusedMoEMethod"
        if kernel is not None and is_plain and module.w13_weight.device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(module)
