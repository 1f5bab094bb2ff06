# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a model, sharded over a pool by torch's FSDP2.

Each layer is an FSDP unit, and the remaining parameters are one more. Of our decoder, every rank
reads only its own slices of the weights. Gradients are sums over ranks, never means, because the
denominators of losses are global. The decoder implements tensor, sequence and expert parallelism;
this file only creates their process groups. A model that transformers' code computes has none of
them. Each rank reads it whole into the memory of its host, and keeps its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from tandem.api import Scores
from tandem.config.derived.pools import RankLayout
from tandem.config.schema.fsdp import FsdpConfig
from tandem.engines.megatron import use_megatron_layers
from tandem.engines.pipeline import Pipeline, StageGroups
from tandem.engines.shards import RankShardMap, regions_of_rank
from tandem.engines.steps import recorded_routes, score, score_of
from tandem.errors import UserError
from tandem.models.decoder import Decoder, DecoderConfig, DecoderLayer, Stage
from tandem.models.folder import ModelFolder, fill_slices, open_part, require_no_buffers
from tandem.models.hf import TransformersModel
from tandem.models.language_model import NativeModel
from tandem.models.operators import TORCH, Operators
from tandem.models.parallel import ALONE, WHOLE, ParallelLayout, Regions, peers_of, slices_of_rows
from tandem.models.vision import TOWER
from tandem.types import HeldSlice, PackedBatch, Segments

ShardedModel = NativeModel | TransformersModel


@dataclass(frozen=True, slots=True)
class FsdpSpec:
    """The settings of one rank's part of a model.

    Attributes:
        layout: the layout of the pool, whose default world this process has joined as ``rank``.
        stored: the precision of the trained weights, their gradients and the optimizer. The frozen
            base of adapters has that of the passes.
        compute: the precision of the forward and backward pass.
        megatron_adaptor: the package that lets megatron-core compute on the device; "" if it does
            by itself.
        section: the section of the keys of ``config``, for messages.
    """

    config: FsdpConfig
    layout: RankLayout
    rank: int
    device: torch.device
    stored: torch.dtype
    compute: torch.dtype
    megatron_adaptor: str = ""
    section: str = "actor_rollout_ref.actor.fsdp_config"


class FsdpModel:
    """A rank's part of a sharded model, made by ``open_fsdp_model``.

    Attributes:
        language_model: the model, which all ranks of a shard group call together.
        shard_map: the regions of the parameters that this rank holds.
        pipeline: the stages of layers; None if each rank computes all layers.
        config: what says which parameters the whole model has.
    """

    def __init__(self, model: ShardedModel, folder: ModelFolder, *, spec: FsdpSpec) -> None:
        self.language_model = model
        self.folder = folder
        self.spec = spec
        self.config = model.config
        self.shard_map = RankShardMap(
            self.config, spec.layout, rank=spec.rank, dtype=spec.stored, group=_copy_group(spec)
        )
        self._root = model.computing if isinstance(model, TransformersModel) else model.decoder
        self.pipeline = _pipeline_of(model, spec)
        self._initial: dict[str, Tensor] = {}

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """Return this rank's part of each trained parameter: views, valid until they are moved."""
        return {name: self._local(name, x) for name, x in self._trained().items()}

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of ``weights()``; zeros for missing ones."""
        gradients = {name: self._part_of_gradient(name, x) for name, x in self._trained().items()}
        if self._copies_embedding:
            self._add_gradient_of_head(gradients)
        return gradients

    def _part_of_gradient(self, name: str, parameter: Tensor) -> Tensor:
        """Return this rank's part of a gradient; zeros for a missing one."""
        if parameter.grad is None:
            return torch.zeros_like(self._local(name, parameter))
        return self._local(name, parameter.grad)

    def _add_gradient_of_head(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the last stage's gradient of a tied embedding to that of the first."""
        assert self.pipeline is not None, "there are stages"
        name = "embedding.weight"
        own = gradients.get(name)
        if own is None:  # the last stage
            own = self._part_of_gradient(name, self._embedding)
        received = self.pipeline.to_first(own)
        if received is not None:
            gradients[name].add_(received)

    def drop_gradients(self) -> None:
        for parameter in self.language_model.module.parameters():
            parameter.grad = None

    def held_slices(self) -> list[HeldSlice]:
        """Return ``weights()`` as slices of the whole tensors."""
        regions = self.shard_map.regions
        return [
            x for name, part in self.weights().items() for x in slices_of_rows(regions[name], part)
        ]

    @torch.no_grad()
    def received_slices(self) -> list[HeldSlice]:
        """Return all that the weight link fills: ``held_slices()``, and a tied head's embedding."""
        held = self.held_slices()
        name = "embedding.weight"
        if self._copies_embedding and name not in self.shard_map.regions:  # the last stage
            held += slices_of_rows(self._regions()[name], self._local(name, self._embedding))
        return held

    @torch.no_grad()
    def fill(self, *, random_seed: int | None) -> None:
        """Load or draw this rank's part of all parameters, the frozen ones too."""
        regions = self._regions()
        slices = [
            held
            for name, parameter in self.language_model.module.named_parameters()
            for held in slices_of_rows(regions[name], self._local(name, parameter))
        ]
        fill_slices(self.folder, slices, random_seed=random_seed)
        start = self.folder.start
        if start is not None and start.folder is not None:
            self._initial = {name: part.clone() for name, part in self.weights().items()}

    @contextmanager
    def initial_adapters(self) -> Iterator[None]:
        """Compute with the adapters that the run started from, for the duration of the context.

        New ones had no effect, because B was zero. Collective: all ranks enter it together.
        """
        self.onload()
        with torch.no_grad():
            trained = {name: part.clone() for name, part in self.weights().items()}
            for name, part in self.weights().items():
                if self._initial:
                    part.copy_(self._initial[name])
                elif name.endswith(".lora_b"):
                    part.zero_()
        yield
        with torch.no_grad():  # not after an error, which ends the run
            for name, part in self.weights().items():
                part.copy_(trained[name])

    def announce_backward(self, *, is_last: bool) -> None:
        """Prepare the forward and backward pass of a micro-batch.

        With ``reshard_after_forward``, gradients are summed over the ranks and sharded after every
        backward pass. Without it, and always in a stage of layers, more memory is used for less
        traffic: gradients are summed only after the last backward pass of a step, and weights are
        gathered once per step.
        """
        root = cast(FSDPModule, self._root)
        is_frugal = _is_frugal(self.spec)
        root.set_is_last_backward(is_last or is_frugal)
        root.set_requires_gradient_sync(is_last or is_frugal)
        root.set_reshard_after_backward(is_last, recurse=not is_frugal)

    def score(
        self, batches: Sequence[PackedBatch], *, temperature: float, num_rounds: int | None
    ) -> list[Scores]:
        """Return log-probs, or values, of the response tokens of each batch.

        Collective. Offloaded weights are onloaded and stay on the device.

        Args:
            num_rounds: the maximum of the ranks' numbers of batches; None if they are equal.

        Returns:
            scores of no token, with the routes of its layers, from a stage that is not the last.
        """
        self.onload()
        rounds = with_idle(batches, num_rounds)
        if self.pipeline is None:
            scores = [score(self.language_model, x, temperature=temperature) for x in rounds]
        else:
            scores = self._score_in_stages(self.pipeline, rounds, temperature=temperature)
        self._free_gathered()
        return scores[: len(batches)]

    @torch.no_grad()
    def _score_in_stages(
        self, pipeline: Pipeline, batches: Sequence[PackedBatch], *, temperature: float
    ) -> list[Scores]:
        model, scores = self.language_model, list[Scores]()

        def finish(index: int, h_LD: Tensor) -> None:
            batch = batches[index]
            if pipeline.stage.is_last:
                found = score_of(model, batch, h_LD=h_LD, temperature=temperature)
            else:
                found = Scores(torch.zeros(0), recorded_routes(model, batch))
            scores.append(found)

        pipeline.run(batches, finish)
        return scores

    @torch.no_grad()
    def share_embedding(self) -> None:
        """Give the last stage the first one's embedding if the head is tied to it. Collective."""
        if self._copies_embedding:
            assert self.pipeline is not None, "there are stages"
            part = self._local("embedding.weight", self._embedding)
            received = self.pipeline.to_last(part)
            if received is not None:
                part.copy_(received)

    @property
    def _copies_embedding(self) -> bool:
        """Whether this stage and another train one embedding."""
        if self.pipeline is None or "embedding.weight" not in self.shard_map.names:
            return False
        stage, config = self.pipeline.stage, self.config
        assert isinstance(config, DecoderConfig), "only our decoder has stages"
        is_tied = config.tie_embeddings and not config.has_value_head
        return is_tied and (stage.is_first or stage.is_last)

    @property
    def _embedding(self) -> Tensor:
        decoder = self.language_model.decoder
        assert decoder is not None, "only our decoder has stages"
        return decoder.embedding.weight

    def offload(self) -> None:
        """Move the weights to host memory if ``param_offload`` is set."""
        if self.spec.config.param_offload:
            self._root.to("cpu")

    def onload(self) -> None:
        """Move offloaded weights back."""
        if self.spec.config.param_offload:
            self._root.to(_home(self.spec))
            if self.language_model.decoder is not None:
                _move_tower(self.language_model.decoder, self.spec.device)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Onload the weights for the duration of the context."""
        self.onload()
        yield
        self.offload()  # not after an error, which ends the run

    def frozen_tower(self) -> dict[str, Tensor]:
        """Return the parameters of a frozen tower, which each rank holds whole; {} without one."""
        decoder = self.language_model.decoder
        tower = decoder.tower if decoder is not None and self.config.freezes_tower else None
        return {} if tower is None else {f"{TOWER}{x}": p.data for x, p in tower.named_parameters()}

    def _regions(self) -> dict[str, Regions]:
        """Return the regions of this rank of all parameters, those of other stages too."""
        spec = self.spec
        return regions_of_rank(self.config, spec.layout, rank=spec.rank, dtype=spec.stored)

    def _trained(self) -> dict[str, nn.Parameter]:
        named = dict(self.language_model.module.named_parameters())
        return {name: named[name] for name in self.shard_map.regions}

    def _local(self, name: str, tensor: Tensor | None) -> Tensor:
        """Return this rank's shard of a parameter or of its gradient."""
        if self.config.is_unsharded(name) and tensor is not None:
            return tensor
        assert isinstance(tensor, DTensor), "weights must be sharded here, not gathered"
        return tensor.to_local()

    def _free_gathered(self) -> None:
        # Without a backward pass FSDP frees neither gathered weights nor the record of their order.
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
                state = module._get_fsdp_state()
                group = state._fsdp_param_group
                if group is not None:
                    group._post_forward_indices.clear()
                    group.comm_ctx.post_forward_order.clear()


def open_fsdp_model(
    folder: ModelFolder,
    spec: FsdpSpec,
    *,
    random_seed: int | None = None,
    operators: Operators = TORCH,
    frozen: bool = False,
) -> FsdpModel:
    """Load this rank's slices of a model. Collective over the pool.

    Args:
        random_seed: if given, draw the random weights of ``open_model`` instead of loading.
        frozen: whether the weights have no gradients.

    Raises:
        UserError: see ``open_part``; the model has buffers in its files; or a stage of layers has
            nothing to train.
    """
    config = folder.decoder_config
    model = open_part(
        folder,
        _parallel_layout(spec, 0 if config is None else config.num_layers),
        dtype=spec.stored,
        device="cpu" if config is None else "meta",
        random_seed=random_seed,
        operators=operators,
        base_dtype=spec.compute,
    )
    if spec.config.backend == "mcore":
        assert isinstance(model, NativeModel), "models of transformers are refused before"
        key, adaptor = f"{spec.section}.backend", spec.megatron_adaptor
        use_megatron_layers(model.decoder, model.layout, key=key, adaptor=adaptor)
    if frozen:
        model.module.requires_grad_(False)
    if isinstance(model, TransformersModel):
        require_no_buffers(model, folder)
        _shard(model.computing, model.layers, spec=spec)
        model.device = spec.device
        return FsdpModel(model, folder, spec=spec)
    assert isinstance(model, NativeModel), "there are two kinds of models"
    _shard_decoder(model.decoder, spec)
    model.decoder.to_empty(device=_home(spec))
    _move_tower(model.decoder, spec.device)
    model.device = spec.device
    model.looks_always = True
    sharded = FsdpModel(model, folder, spec=spec)
    if not sharded.shard_map.regions:
        raise UserError(
            "pipeline_model_parallel_size",
            spec.layout.pipeline_parallel,
            rule=f"rank {spec.rank} has a stage of layers without adapters, so nothing to train",
            remedy="Use fewer stages, or adapters in all layers.",
        )
    sharded.fill(random_seed=random_seed)
    return sharded


def _pipeline_of(model: ShardedModel, spec: FsdpSpec) -> Pipeline | None:
    stage = model.layout.stage
    if stage is None:
        return None
    assert isinstance(model, NativeModel), "only our decoder has stages"
    return Pipeline(model, stage, groups=_stage_groups(spec))


def _settings(spec: FsdpSpec) -> dict[str, Any]:
    """Return the arguments of all units for torch's ``fully_shard``."""
    on_host = CPUOffloadPolicy(pin_memory=spec.device.type != "cpu")
    return {
        "mesh": _shard_mesh(spec),
        # The residual stream is fp32 on purpose: the inputs of a layer must not be cast.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=spec.compute, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        "offload_policy": on_host if spec.config.offload_policy else OffloadPolicy(),
    }


def _shard_decoder(decoder: Decoder, spec: FsdpSpec) -> None:
    is_unsharded = decoder.config.is_unsharded
    # They keep their precision and have no gradients. A frozen tower that every rank holds
    # remembers what it saw, and needs no collectives.
    ignored = {x for name, x in decoder.named_parameters() if is_unsharded(name)}
    if spec.layout.expert_parallel > 1:
        _shard_experts(decoder, spec, settings=_settings(spec) | {"ignored_params": ignored})
    tower = None if decoder.config.freezes_tower else decoder.tower
    layers = [*([] if tower is None else tower.blocks), *decoder.layers]
    _shard(decoder, layers, spec=spec, ignored=ignored)


def _shard(
    module: nn.Module,
    layers: Sequence[nn.Module],
    *,
    spec: FsdpSpec,
    ignored: AbstractSet[nn.Parameter] = frozenset(),
) -> None:
    """Shard a module in units: its layers, and what is left of it."""
    settings: dict[str, Any] = {**_settings(spec), "ignored_params": set(ignored)}
    is_freed = _is_frugal(spec)
    units = [fully_shard(layer, **settings, reshard_after_forward=is_freed) for layer in layers]
    # Log-probs are computed from the weight of the head after the forward pass.
    root = fully_shard(module, **settings, reshard_after_forward=False)
    for unit in (*units, root):
        _sum_gradients(unit)
    if spec.config.forward_prefetch:
        for unit, following in zip((root, *units), units, strict=False):
            unit.set_modules_to_forward_prefetch([following])


def _shard_experts(decoder: Decoder, spec: FsdpSpec, *, settings: Mapping[str, Any]) -> None:
    """Shard the experts of each layer over the ranks of a copy that hold the same ones."""
    layout = spec.layout
    shards, divided = layout.num_expert_shards, layout.expert_parallel
    copies = layout.ranks_per_stage // (shards * divided)
    mesh = _mesh(spec, {"copy": copies, "shard": shards, "expert": divided})
    own = {**settings, "mesh": mesh["shard"] if copies == 1 else mesh["copy", "shard"]}
    is_freed = _is_frugal(spec)
    for layer in cast(Iterable[DecoderLayer], decoder.layers):
        if layer.experts is not None:
            unit = fully_shard(layer.experts.routed, **own, reshard_after_forward=is_freed)
            _sum_gradients(unit)


def _sum_gradients(unit: FSDPModule) -> None:
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)


def _is_frugal(spec: FsdpSpec) -> bool:
    """Return whether gathered weights are freed after each pass.

    A stage would gather them for each of several micro-batches under way.
    """
    return spec.config.reshard_after_forward and spec.layout.pipeline_parallel == 1


def _home(spec: FsdpSpec) -> torch.device:
    """Return the device of the onloaded weights."""
    return torch.device("cpu") if spec.config.offload_policy else spec.device


def _move_tower(decoder: Decoder, device: torch.device) -> None:
    """Move a frozen tower, of which FSDP knows nothing, to the device of the computation."""
    if decoder.tower is not None and decoder.config.freezes_tower:
        decoder.tower.to(device)


def _shard_mesh(spec: FsdpSpec) -> DeviceMesh:
    layout = spec.layout
    shards, tensor = layout.num_shards, layout.tensor_parallel
    copies = layout.ranks_per_stage // (shards * tensor)
    mesh = _mesh(spec, {"copy": copies, "shard": shards, "tensor": tensor})
    return mesh["shard"] if copies == 1 else mesh["copy", "shard"]


def _copy_group(spec: FsdpSpec) -> ProcessGroup | None:
    layout = spec.layout
    members = layout.tensor_parallel * layout.num_shards
    copies = layout.ranks_per_stage // members
    if members == layout.num_ranks:
        return None
    return _mesh(spec, {"copy": copies, "shard": members})["shard"].get_group()


def _stage_groups(spec: FsdpSpec) -> StageGroups:
    sizes = {"shard": spec.layout.ranks_per_stage}
    forward, backward = (_mesh(spec, sizes)["stage"].get_group() for _ in range(2))
    return StageGroups(forward, backward)


def _parallel_layout(spec: FsdpSpec, num_layers: int) -> ParallelLayout:
    layout = spec.layout
    sequence, tensor = layout.sequence_parallel, layout.tensor_parallel
    divided, stages = layout.expert_parallel, layout.pipeline_parallel
    if sequence == tensor == divided == stages == 1:
        return WHOLE
    sizes = {"shard": layout.data_parallel, "sequence": sequence, "tensor": tensor}
    mesh = _mesh(spec, sizes)
    expert = ALONE
    if divided > 1:
        grid = {"shard": layout.ranks_per_stage // divided, "expert": divided}
        expert = peers_of(_mesh(spec, grid)["expert"])
    stage = None
    if stages > 1:
        rank = spec.rank // layout.ranks_per_stage
        layers = layout.layers_of_stages(num_layers)[rank]
        stage = Stage(rank, stages, layers, compute=spec.compute)
    return ParallelLayout(
        tensor=peers_of(mesh["tensor"]) if tensor > 1 else ALONE,
        sequence=peers_of(mesh["sequence"]) if sequence > 1 else ALONE,
        expert=expert,
        stage=stage,
    )


def _default_world() -> ProcessGroup:
    world = distributed.group.WORLD
    assert world is not None, "a rank of a pool has joined its world"
    return world


def _mesh(spec: FsdpSpec, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return the ranks of the pool as a grid, without dimensions of size 1 other than ``shard``.

    Each stage of layers has a grid of ``sizes``.
    """
    sizes = {"stage": spec.layout.pipeline_parallel, **sizes}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    names, device = tuple(kept), spec.device
    mesh = init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=names)
    # Groups of a mesh have torch's default timeout instead of their world's, which the backend of
    # the host knows on every platform.
    timeout = _default_world()._get_backend(torch.device("cpu")).options._timeout
    for group in mesh.get_all_groups():
        _set_pg_timeout(timeout, group)
    return mesh


def with_idle(batches: Sequence[PackedBatch], num_rounds: int | None) -> list[PackedBatch]:
    """Return ``num_rounds`` batches: the given ones, and dummies after them."""
    return [*batches, *[idle_batch()] * ((num_rounds or len(batches)) - len(batches))]


@cache
def idle_batch() -> PackedBatch:
    """Return the dummy batch of a rank without a micro-batch in a round."""
    zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    return PackedBatch(
        token_ids_T=zero,
        position_ids_T=zero,
        segments=Segments(zero, one, prefix_start_S=zero, prefix_length_S=zero),
        source_R=zero,
        target_R=zero,
        sequence_R=zero,
        num_sequences=1,
    )
