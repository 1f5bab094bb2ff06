# SPDX-License-Identifier: Apache-2.0
"""A decoder of ours spread over the ranks of a pool by torch's FSDP2, as one rank sees it.

The layers are a unit of sharding each, and what is left is one more. Every rank starts with its own
slices of the weights and reads no others. Gradients are sums over ranks, never means: the
denominators of losses are global. Tensor and sequence parallelism are the model's; here their ranks
only find each other. What is done with scores and gradients is the engines' business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
from torch import Tensor, distributed
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

from tandem.config.derived.pools import RankLayout
from tandem.config.schema.fsdp import FsdpConfig
from tandem.engines.sharding import ShardHolding
from tandem.engines.steps import score
from tandem.models.decoder import Decoder
from tandem.models.folder import ModelFolder, fill_slices, open_part, require_decoder
from tandem.models.language_model import NativeModel
from tandem.models.operators import TORCH, Operators
from tandem.models.parallel import ALONE, WHOLE, ParallelLayout, peers_of, slices_of_rows
from tandem.types import HeldSlice, PackedBatch, Segments


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one rank holds and computes its part of a model.

    Attributes:
        layout: of the pool, whose default world this process has joined as ``rank``.
        stored: precision of the weights, their gradients and the optimizer.
        compute: precision of forward and backward pass.
    """

    config: FsdpConfig
    layout: RankLayout
    rank: int
    device: torch.device
    stored: torch.dtype
    compute: torch.dtype


class ShardedModel:
    """What ``open_sharded`` returns. A frozen one is a reference policy by itself.

    Attributes:
        language_model: computes like any other; all ranks of a shard group call it together.
        holding: which boxes of the parameters this rank holds.
    """

    def __init__(self, model: NativeModel, folder: ModelFolder, *, sharding: Sharding) -> None:
        """``open_sharded`` makes these."""
        self.language_model = model
        self.folder = folder
        self.sharding = sharding
        self.holding = ShardHolding(
            model.config,
            sharding.layout,
            rank=sharding.rank,
            dtype=sharding.stored,
            group=_copy_group(sharding),
        )
        self._decoder = model.decoder

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """This rank's parts by parameter; in use, and valid until ``rest`` or ``wake``."""
        return {name: _local(parameter) for name, parameter in self._decoder.named_parameters()}

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """The gradients of ``weights()``, zero where there is none."""
        gradients = {name: p.grad for name, p in self._decoder.named_parameters()}
        return {
            name: torch.zeros_like(part) if gradients[name] is None else _local(gradients[name])
            for name, part in self.weights().items()
        }

    def drop_gradients(self) -> None:
        """Forget them."""
        for parameter in self._decoder.parameters():
            parameter.grad = None

    def held_slices(self) -> list[HeldSlice]:
        """All of ``weights()`` as boxes of the whole tensors."""
        boxes = self.holding.boxes
        return [
            x for name, part in self.weights().items() for x in slices_of_rows(boxes[name], part)
        ]

    def announce_backward(self, *, is_last: bool) -> None:
        """Before each forward pass that a backward pass follows.

        Gradients are summed over the ranks, and then sharded, after every backward pass; where
        memory is to be spent on less traffic, only after the last, and weights are gathered once
        a step.
        """
        root = cast(FSDPModule, self._decoder)
        is_frugal = self.sharding.config.reshard_after_forward
        root.set_requires_gradient_sync(is_last or is_frugal)
        root.set_reshard_after_backward(is_last, recurse=not is_frugal)

    def score(
        self, batches: Sequence[PackedBatch], *, temperature: float, num_rounds: int | None
    ) -> list[Tensor]:
        """What the model says of the response tokens of each batch, fp32 (R,), on the CPU.

        All ranks call it with the same ``num_rounds``, which is at least the number of batches;
        None if that is the same on all ranks.
        """
        self.wake()
        idle = [idle_batch()] * ((num_rounds or len(batches)) - len(batches))
        scores = [
            score(self.language_model, batch, temperature=temperature)
            for batch in (*batches, *idle)
        ]
        self._free_gathered()
        return scores[: len(batches)]

    def rest(self) -> None:
        """Move the weights to the host's memory if the config asks for it."""
        if self.sharding.config.param_offload:
            self._decoder.to("cpu")

    def wake(self) -> None:
        """Undo ``rest``; does nothing to weights that are where they belong."""
        if self.sharding.config.param_offload:
            self._decoder.to(_home(self.sharding))

    def _free_gathered(self) -> None:
        """Without a backward pass nobody else frees weights, nor the record of their order."""
        for module in self._decoder.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
                state = module._get_fsdp_state()
                group = state._fsdp_param_group
                if group is not None:
                    group._post_forward_indices.clear()
                    group.comm_ctx.post_forward_order.clear()


def open_sharded(
    folder: ModelFolder,
    sharding: Sharding,
    *,
    random_seed: int | None = None,
    operators: Operators = TORCH,
    frozen: bool = False,
) -> ShardedModel:
    """Load this rank's slices of a model. Collective: all ranks of the pool call it.

    Args:
        random_seed: draws random weights, those of ``open_model``, instead of loading them.
        frozen: without gradients.

    Raises:
        UserError: as ``open_part``, or it is not a decoder of ours.
    """
    require_decoder(folder)
    model = open_part(
        folder,
        _parallel_layout(sharding),
        dtype=sharding.stored,
        device="meta",
        operators=operators,
    )
    assert isinstance(model, NativeModel), "a model with a decoder config is our own"
    model.decoder.requires_grad_(not frozen)
    _shard(model.decoder, sharding)
    model.decoder.to_empty(device=_home(sharding))
    model.device = sharding.device
    sharded = ShardedModel(model, folder, sharding=sharding)
    with torch.no_grad():
        fill_slices(folder, sharded.held_slices(), random_seed=random_seed)
    return sharded


def _shard(decoder: Decoder, sharding: Sharding) -> None:
    config = sharding.config
    on_host = CPUOffloadPolicy(pin_memory=sharding.device.type != "cpu")
    settings = {
        "mesh": _shard_mesh(sharding),
        # The residual stream is fp32 on purpose: what a layer is given is not cast.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=sharding.compute, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        "offload_policy": on_host if config.offload_policy else OffloadPolicy(),
    }
    layers = list(decoder.layers)
    units = [
        fully_shard(layer, **settings, reshard_after_forward=config.reshard_after_forward)
        for layer in layers
    ]
    # What the model says is taken from its head after the forward pass.
    root = fully_shard(decoder, **settings, reshard_after_forward=False)
    for unit in (*units, root):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    if config.forward_prefetch:
        for unit, following in zip((root, *units), units, strict=False):
            unit.set_modules_to_forward_prefetch([following])


def _home(sharding: Sharding) -> torch.device:
    """Where the weights are while they are in use."""
    return torch.device("cpu") if sharding.config.offload_policy else sharding.device


def _local(tensor: Tensor | None) -> Tensor:
    """What of a parameter or its gradient is here."""
    assert isinstance(tensor, DTensor), "weights are looked at while they are sharded"
    return tensor.to_local()


def _shard_mesh(sharding: Sharding) -> DeviceMesh:
    layout = sharding.layout
    shards, tensor = layout.num_shards, layout.tensor_parallel
    copies = layout.num_ranks // (shards * tensor)
    mesh = _mesh(sharding, {"copy": copies, "shard": shards, "tensor": tensor})
    return mesh["shard"] if copies == 1 else mesh["copy", "shard"]


def _copy_group(sharding: Sharding) -> ProcessGroup | None:
    layout = sharding.layout
    members = layout.tensor_parallel * layout.num_shards
    copies = layout.num_ranks // members
    if copies == 1:
        return None
    return _mesh(sharding, {"copy": copies, "shard": members})["shard"].get_group()


def _parallel_layout(sharding: Sharding) -> ParallelLayout:
    layout = sharding.layout
    sequence, tensor = layout.sequence_parallel, layout.tensor_parallel
    if sequence == tensor == 1:
        return WHOLE
    sizes = {"shard": layout.data_parallel, "sequence": sequence, "tensor": tensor}
    mesh = _mesh(sharding, sizes)
    return ParallelLayout(
        tensor=peers_of(mesh["tensor"]) if tensor > 1 else ALONE,
        sequence=peers_of(mesh["sequence"]) if sequence > 1 else ALONE,
    )


def _default_world() -> ProcessGroup:
    world = distributed.group.WORLD
    assert world is not None, "a rank of a pool has joined its world"
    return world


def _mesh(sharding: Sharding, sizes: Mapping[str, int]) -> DeviceMesh:
    """The ranks of the pool as a grid; ways of only one rank are left out, but for ``shard``."""
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    names, device = tuple(kept), sharding.device
    mesh = init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=names)
    # Groups of a mesh start out with torch's own timeout, not with that of their world, which the
    # host's backend can tell on every platform.
    timeout = _default_world()._get_backend(torch.device("cpu")).options._timeout
    for group in mesh.get_all_groups():
        _set_pg_timeout(timeout, group)
    return mesh


@cache
def idle_batch() -> PackedBatch:
    """What a rank computes in a round without a micro-batch for it, so that collectives match."""
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
