# SPDX-License-Identifier: Apache-2.0
"""``*.fsdp_config.*`` and ``engine.*``: the layout of weights over devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.config.schema.fields import Dtype, Section


class FsdpConfig(Section):
    """Precision, sharding and offloading."""

    dtype: Dtype = Field(
        default="auto",
        description="Precision of forward and backward passes. auto: bfloat16 on accelerators, "
        "float32 on CPUs.",
    )
    model_dtype: Dtype = Field(
        default="float32", description="Precision in which trained weights are stored."
    )

    param_offload: bool = Field(
        default=False,
        description="Keep the weights in host memory while no pass uses them. Not set, on one "
        "accelerator: chosen to fit its memory.",
    )
    optimizer_offload: bool = Field(
        default=False,
        description="Keep the optimizer state in host memory between steps. Not set, on one "
        "accelerator: chosen to fit its memory.",
    )
    offload_policy: bool = Field(
        default=False,
        description="Keep weights, gradients and optimizer state in host memory; the weights of a "
        "layer are copied to the device for its computation (FSDP2's CPU offload).",
    )
    fsdp_size: int = Field(
        default=-1,
        ge=-1,
        description="Number of devices over which the weights are sharded; each such group of "
        "devices holds a full copy. -1, or more than there are: all devices of the pool.",
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="Free gathered weights after the forward pass and gather them again for the "
        "backward pass: less memory, more communication.",
    )
    forward_prefetch: bool = Field(
        default=False, description="Gather the weights of the next layer while a layer is computed."
    )
    tensor_model_parallel_size: int = Field(
        default=1, ge=1, description="Number of devices over which each weight matrix is split."
    )
    expert_model_parallel_size: int = Field(
        default=1,
        ge=1,
        description="Number of devices over which the experts of each layer are divided. Tokens "
        "travel to the devices of their experts and back. 1: FSDP2 gathers the experts of a layer.",
    )
    expert_tensor_parallel_size: int | None = Field(
        default=None,
        ge=1,
        description="In Megatron, the number of devices over which the matrices of an expert are "
        "split. Here the experts are divided over expert_model_parallel_size times as many devices "
        "instead: each holds the same share. null: 1.",
    )
    ulysses_sequence_parallel_size: int = Field(
        default=1,
        ge=1,
        description="Number of devices over which the tokens of a micro-batch are split. A "
        "micro-batch that is filled by tokens holds that many times more tokens.",
    )
    pipeline_model_parallel_size: int = Field(
        default=1,
        ge=1,
        description="Number of stages of layers. Each stage has its own devices, and micro-batches "
        "pass through the stages one after another (1F1B).",
    )
    num_layers_in_first_pipeline_stage: int | None = Field(
        default=None,
        ge=1,
        description="Number of layers of the first stage. null: an equal share.",
    )
    num_layers_in_last_pipeline_stage: int | None = Field(
        default=None,
        ge=1,
        description="Number of layers of the last stage. null: an equal share.",
    )
    backend: Literal["native", "mcore"] = Field(
        default="native",
        description="What computes the layers. native: tandem. mcore: megatron-core's own modules.",
    )

    @property
    def num_expert_devices(self) -> int:
        """The number of devices over which the experts of each layer are divided."""
        return self.expert_model_parallel_size * (self.expert_tensor_parallel_size or 1)
