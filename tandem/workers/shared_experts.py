# SPDX-License-Identifier: Apache-2.0
"""The experts that the trainer and the rollout of one process both compute with, in one storage.

They are those that both hold whole and in the same precision: if training and generation divide
the experts alike, and FSDP2 does not shard them further. An update then reaches the rollout without
a copy, as in a run of one process.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tandem.engines.fsdp_model import FsdpModel
from tandem.models.decoder import Decoder, DecoderConfig
from tandem.models.experts import is_of_all_experts
from tandem.models.parallel import ParallelLayout, tensor_regions


def shared_experts(
    trained: FsdpModel, layout: ParallelLayout, *, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the experts that a rollout can compute with, by the names of its parameters.

    Weights that leave the device between steps are not shared.

    Args:
        layout: the processes that generate together.
        dtype: the precision of generation.
    """
    config, offloads = trained.config, trained.spec.config
    leaves = offloads.param_offload or offloads.offload_policy
    if not isinstance(config, DecoderConfig) or leaves:
        return {}
    held = {one.spec: one.tensor for one in trained.held_slices()}
    needed = tensor_regions(config, rank=0, size=1, dtype=dtype, experts=layout.expert)
    return {
        name: held[regions[0]]
        for name, regions in needed.items()
        if is_of_all_experts(name) and regions[0] in held
    }


def assign(decoder: Decoder, shared: Mapping[str, Tensor]) -> None:
    """Let a decoder compute with tensors in place of its parameters of these names."""
    for name, tensor in shared.items():
        module, _, own = name.rpartition(".")
        parameter = nn.Parameter(tensor, requires_grad=False)
        decoder.get_submodule(module).register_parameter(own, parameter)
