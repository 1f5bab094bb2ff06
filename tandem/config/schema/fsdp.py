# SPDX-License-Identifier: Apache-2.0
"""``*.fsdp_config.*`` and ``*.megatron.*``: how weights are laid out over devices."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from tandem.config.schema.fields import SECTION, Dtype, no_effect


class FsdpConfig(BaseModel):
    """Precision, sharding and offloading."""

    model_config = SECTION

    dtype: Dtype = Field(
        default="auto",
        description="Precision of forward and backward; auto: bfloat16, on CPU float32.",
    )
    model_dtype: Dtype = Field(
        default="float32", description="Precision in which the trained weights are stored."
    )

    param_offload: bool = Field(
        default=False,
        description="Weights rest in the host's memory while they are not computed with.",
    )
    optimizer_offload: bool = Field(
        default=False,
        description="The optimizer's state rests in the host's memory between steps.",
    )
    offload_policy: bool = Field(
        default=False,
        description="Weights, gradients and optimizer stay in the host's memory; each layer's "
        "weights visit the device to be computed with (FSDP2's CPU offload).",
    )
    fsdp_size: int = Field(
        default=-1,
        ge=-1,
        description="Devices over which the weights are sharded; groups of that many hold copies "
        "of each other. -1 is all devices of the pool.",
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="Free gathered weights after the forward pass and gather them again for the "
        "backward pass: less memory, more traffic.",
    )
    forward_prefetch: bool = Field(
        default=False, description="Gather the next layer's weights while one computes."
    )
    tensor_model_parallel_size: int = Field(
        default=1, ge=1, description="Devices over which each matrix is split."
    )
    ulysses_sequence_parallel_size: int = Field(
        default=1,
        ge=1,
        description="Devices over which the tokens of a micro-batch are split. A micro-batch that "
        "is filled by tokens holds that many times as many.",
    )
    use_orig_params: bool = no_effect(
        False, "Keep parameters apart.", why="FSDP2 never flattens parameters into one"
    )
    wrap_policy: dict[str, Any] = no_effect(
        dict[str, Any],
        "Which modules are sharded together.",
        why="each layer of the model is sharded as one unit",
    )


class FrozenFsdpConfig(FsdpConfig):
    """Of a model that only scores."""

    model_dtype: Dtype = no_effect(
        "float32",
        "Precision of the weights.",
        why="frozen weights are kept as they are computed with: dtype",
    )
    optimizer_offload: bool = no_effect(
        False, "The optimizer rests on the CPU.", why="a frozen model has no optimizer"
    )


class MegatronConfig(BaseModel):
    """Megatron's layout; accepted for ``strategy=megatron``, which is not built yet."""

    model_config = SECTION

    param_offload: bool = Field(default=False, description="Weights rest on the CPU.")
    grad_offload: bool = Field(default=False, description="Gradients rest on the CPU.")
    optimizer_offload: bool = Field(default=False, description="Optimizer rests on the CPU.")
    tensor_model_parallel_size: int = Field(default=1, ge=1, description="Devices per layer.")
    pipeline_model_parallel_size: int = Field(
        default=1, ge=1, description="Stages of the pipeline."
    )
    virtual_pipeline_model_parallel_size: int | None = Field(
        default=None, ge=1, description="Virtual stages per stage."
    )
    expert_model_parallel_size: int = Field(
        default=1, ge=1, description="Devices over which experts spread."
    )
    expert_tensor_parallel_size: int | None = Field(
        default=None, ge=1, description="Devices per expert."
    )
    context_parallel_size: int = Field(default=1, ge=1, description="Devices per sequence.")
    sequence_parallel: bool = Field(
        default=True, description="Split activations along with tensors."
    )
    use_distributed_optimizer: bool = Field(default=True, description="Shard the optimizer.")
    use_dist_checkpointing: bool = Field(
        default=False, description="Megatron's own checkpoint format."
    )
    dist_checkpointing_path: str | None = Field(
        default=None, description="Folder of such a checkpoint."
    )
    use_mbridge: bool = Field(default=True, description="Convert weights through the bridge.")
    vanilla_mbridge: bool = Field(default=True, description="Which bridge.")
    load_weight: bool = Field(default=True, description="Load weights instead of random ones.")
    seed: int = Field(default=42, description="Seed of Megatron's generators.")
    dtype: Dtype = Field(default="auto", description="Precision of forward and backward.")
    override_ddp_config: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Free-form settings of data parallelism."
    )
    override_transformer_config: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Free-form settings of Megatron's transformer."
    )
    override_mcore_model_config: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Free-form settings of Megatron's model."
    )
