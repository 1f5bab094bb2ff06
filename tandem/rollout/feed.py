# SPDX-License-Identifier: Apache-2.0
"""Delivery of new weights to an engine that has its own copy.

A version reaches the engine whole or not at all: the engine's manifest and the model must name the
same tensors with the same shapes, and an engine is unusable after a failed delivery.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tandem.api import EngineFailure, Rollout, RolloutEngine, WeightSink
from tandem.models.file_tensors import is_kept
from tandem.models.hf import transformers_views
from tandem.models.language_model import LanguageModel
from tandem.models.weights import file_views, sums_with_adapters
from tandem.types import Completion, GenerationRequest, SliceSpec

logger = logging.getLogger(__name__)


class WeightFeed:
    """The delivery of a model's weights to an engine's sink, one tensor at a time.

    The products of adapters (LoRA) are added to the weights that are sent.
    """

    def __init__(self, model: LanguageModel, sink: WeightSink) -> None:
        """Check that the model has the tensors of the sink's manifest, and no others.

        Raises:
            EngineFailure: a tensor is missing, is unexpected, or has another shape.
        """
        self._sums = {} if model.decoder is None else sums_with_adapters(model.decoder)
        if self._sums and model.lm_head_weight.dtype != torch.float32:
            logger.warning(
                "adapters (LoRA) are added to the weights of the rollout engine. The sums are "
                "rounded to %s, so that the log-probs of generation and training differ more than "
                "with the native engine (training/rollout_probs_diff)",
                str(model.lm_head_weight.dtype).removeprefix("torch."),
            )
        self._model = model
        self._sink = sink
        self._names = [spec.name for spec in sink.manifest()]
        wanted = {spec.name: spec.shape for spec in sink.manifest()}
        offered = {name: tuple(tensor.shape) for name, tensor in checkpoint_views(model)}
        for name in wanted.keys() | offered.keys():
            if wanted.get(name) != offered.get(name):
                raise EngineFailure(
                    f"weight {name}: the rollout engine expects {wanted.get(name, 'none')}, "
                    f"the trainer has {offered.get(name, 'none')}"
                )

    def deliver(self, version: int) -> None:
        """Load the model's current weights into the engine as ``version``."""
        offered = dict(checkpoint_views(self._model))
        self._sink.begin(version)
        for name in self._names:
            tensor = self._sums[name]() if name in self._sums else offered[name]
            self._sink.take(name, tensor)
        self._sink.end()


def with_weights_of(model: LanguageModel, engine: RolloutEngine) -> Rollout:
    """Return an engine that has shared the weights of ``model``, or else receives them.

    Raises:
        EngineFailure: the engine cannot receive them; see ``WeightFeed``.
    """
    sink = engine.sink()
    return engine if sink is None else FedRollout(engine, WeightFeed(model, sink))


class FedRollout:
    """An ``api.Rollout`` over an engine with its own weights, in the training process."""

    def __init__(self, engine: RolloutEngine, feed: WeightFeed) -> None:
        self._engine = engine
        self._feed = feed
        self._version: int | None = None

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        self._engine.add(requests)

    def forget(self, sample_ids: Sequence[int]) -> None:
        """Free what the engine keeps of samples that have ended."""
        self._engine.forget(sample_ids)

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """Generate until a sequence finishes; see ``api.Rollout``."""
        return self._engine.advance(max_steps)

    def settle(self) -> None:
        """Wait until nothing is being computed."""
        self._engine.settle()

    def set_weights_version(self, version: int) -> bool:
        """Load the trainer's weights into the engine, unless it has this version already."""
        if version != self._version:
            self._engine.settle()
            self._feed.deliver(version)
            self._version = version
        return self._engine.set_weights_version(version)

    def metrics(self) -> Mapping[str, float]:
        """Return the engine's counters."""
        return self._engine.metrics()


def checkpoint_views(model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in checkpoint files, view of the tensor) of every weight of a model."""
    if model.decoder is not None:
        yield from file_views(model.decoder)
    else:
        yield from transformers_views(model.module)


def manifest_of(model: LanguageModel, dtype: torch.dtype) -> list[SliceSpec]:
    """Return the manifest of an engine that takes every weight of a model as a whole tensor.

    Args:
        dtype: the precision of the engine; tensors that files keep in fp32 come in fp32.
    """
    return [
        SliceSpec(
            name,
            view.dtype if is_kept(name) else dtype,
            tuple(view.shape),
            (0,) * view.ndim,
            tuple(view.shape),
        )
        for name, view in checkpoint_views(model)
    ]
