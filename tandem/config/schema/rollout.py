# SPDX-License-Identifier: Apache-2.0
"""``actor_rollout_ref.rollout.*``: how responses are generated."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from tandem.config.schema.dotted import ByName
from tandem.config.schema.fields import (
    ENGINE_ONLY,
    NOT_BUILT,
    SECTION,
    Dtype,
    Seed,
    no_effect,
)

_MULTI_TURN = "not built yet: multi-turn rollouts"
_ONE_DEVICE = "each device of the pool that generates is a replica of the native engine"
_SKIP = "not built yet: rollouts are always generated"


class ValKwargs(BaseModel):
    """``val_kwargs.*``: sampling of validation; greedy unless ``do_sample``."""

    model_config = SECTION

    n: int = Field(default=1, ge=1, description="Samples per validation prompt.")
    do_sample: bool = Field(default=False, description="Sample; False is greedy.")
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature; 0 is greedy.")
    top_k: int = Field(
        default=-1, ge=-1, description="Sample among the k likeliest tokens; -1 or 0: all."
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Sample within this probability mass."
    )


class MultiTurnConfig(BaseModel):
    """``multi_turn.*``: conversations with tools."""

    model_config = SECTION

    enable: bool = Field(default=False, description="Multi-turn rollouts.")
    max_assistant_turns: int | None = Field(default=None, description="Most turns of the policy.")
    max_user_turns: int | None = Field(default=None, description="Most turns of the user.")
    max_parallel_calls: int = Field(default=1, description="Most tool calls at once.")
    max_tool_response_length: int = Field(default=256, description="Longest tool response.")
    tool_response_truncate_side: str = Field(default="middle", description="Where it is cut.")
    tool_config_path: str | None = Field(default=None, description="YAML of the tools.")
    interaction_config_path: str | None = Field(
        default=None, description="YAML of the interaction."
    )
    use_inference_chat_template: bool = Field(default=False, description="Which chat template.")
    tokenization_sanity_check_mode: str = Field(
        default="strict", description="Check of the tokens."
    )
    format: str = Field(default="hermes", description="Format of tool calls.")


class RolloutConfig(BaseModel):
    """Generation for training and, with ``val_kwargs``, for validation."""

    model_config = SECTION

    name: Annotated[str, ByName(("native", "hf", "vllm", "sglang", "trtllm"))] = Field(
        default="native",
        description="Generation engine: the dotted path of a function that builds one, or a name. "
        "Of the names the model's family decides: native for the families of our decoder, else hf "
        "(transformers' generate); the others are not built yet.",
    )
    n: int = Field(default=1, ge=1, description="Samples per prompt (the group of GRPO).")
    temperature: float = Field(
        default=1.0, gt=0, description="Sampling temperature, also of log-probs."
    )
    top_k: int = Field(
        default=-1, ge=-1, description="Sample among the k likeliest tokens; -1 or 0: all."
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Sample within this probability mass."
    )
    do_sample: bool = Field(default=True, description="Sample; False is greedy.")
    ignore_eos: bool = Field(
        default=False, description="Go on to max_response_length after the end token."
    )
    val_kwargs: ValKwargs = Field(default_factory=ValKwargs, description="Sampling of validation.")
    seed: Seed = Field(
        default=1,
        ge=0,
        description="Seed of sampling; a sample depends on it, its id and position only.",
    )
    max_num_seqs: int = Field(default=1024, ge=1, description="Most sequences generated at once.")
    max_num_batched_tokens: int = Field(
        default=8192, ge=1, description="Most prompt tokens of one prefill pass."
    )
    log_prob_micro_batch_size_per_gpu: int | None = Field(
        default=None,
        ge=1,
        description="Most sequences of one forward pass for old log-probs; null packs up to "
        "log_prob_max_token_len_per_gpu.",
    )
    log_prob_use_dynamic_bsz: bool = Field(
        default=False,
        description="Fill micro-batches by tokens; follows actor.use_dynamic_bsz if not set.",
    )
    log_prob_max_token_len_per_gpu: int = Field(
        default=16384,
        ge=1,
        description="A device's most tokens of a micro-batch that is filled by tokens; follows "
        "actor.ppo_max_token_len_per_gpu if not set.",
    )

    dtype: Dtype = no_effect(
        "auto",
        "Precision of generation.",
        why="the rollout takes the trainer's weights as they are; actor.fsdp_config.dtype decides",
    )
    mode: Literal["sync", "async"] = no_effect(
        "async",
        "How verl calls its engine.",
        why="one pipeline serves both; the lag is trainer.generate_ahead_steps",
    )
    calculate_log_probs: bool = no_effect(
        False,
        "Return log-probs of sampled tokens.",
        why="log-probs of sampled tokens are always returned",
    )
    gpu_memory_utilization: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of an accelerator's memory for the rollout's weights and cache. No more "
        "is taken than the sequences of a step need; without effect on CPUs.",
    )
    max_model_len: int | None = no_effect(
        None, "Longest sequence.", why="it is data.max_prompt_length + data.max_response_length"
    )
    prompt_length: int | None = no_effect(
        None, "Longest prompt.", why="it is data.max_prompt_length"
    )
    response_length: int | None = no_effect(
        None, "Longest response.", why="it is data.max_response_length"
    )
    enable_chunked_prefill: bool = no_effect(
        True,
        "Cut long prompts over several passes.",
        why="the native engine prefills whole prompts",
    )
    enable_prefix_caching: bool = no_effect(
        True, "Reuse cached prefixes.", why="samples of one prompt always share it"
    )
    load_format: str = no_effect(
        "dummy",
        "How an engine loads weights.",
        why="the rollout takes the trainer's weights before it generates",
    )
    layered_summon: bool = no_effect(
        False, "Gather by layer.", why="weights are transferred in buckets of a fixed size"
    )
    free_cache_engine: bool = Field(
        default=False,
        description="Free the rollout's cache and weights while the same devices train; steps that "
        "were captured are captured again then, so only where memory asks for it.",
    )
    enforce_eager: bool = Field(
        default=False,
        description="Launch each operation of a decode step instead of replaying a captured step; "
        "slower, without effect where there are no graphs.",
    )
    tensor_model_parallel_size: int = no_effect(1, "Devices per replica.", why=_ONE_DEVICE, ge=1)
    data_parallel_size: int = no_effect(1, "Replicas.", why=_ONE_DEVICE, ge=1)
    expert_parallel_size: int = no_effect(1, "Devices of experts.", why=_ONE_DEVICE, ge=1)
    pipeline_model_parallel_size: int = no_effect(1, "Stages.", why=_ONE_DEVICE, ge=1)
    log_prob_micro_batch_size: int | None = no_effect(
        None,
        "Micro-batch over all devices.",
        why="deprecated in verl; use log_prob_micro_batch_size_per_gpu",
    )
    disable_log_stats: bool = no_effect(True, "Engine's statistics.", why=ENGINE_ONLY)
    skip_tokenizer_init: bool = no_effect(True, "Engine's tokenizer.", why=ENGINE_ONLY)
    engine_kwargs: dict[str, Any] = no_effect(
        dict[str, Any], "Further arguments of an engine.", why=ENGINE_ONLY
    )
    multi_turn: MultiTurnConfig = no_effect(
        MultiTurnConfig, "Conversations with tools.", why=_MULTI_TURN
    )
    agent: dict[str, Any] = no_effect(dict[str, Any], "Agent loops.", why=_MULTI_TURN)
    trace: dict[str, Any] = no_effect(dict[str, Any], "Traces of rollouts.", why=NOT_BUILT)
    skip_rollout: bool = no_effect(False, "Reuse dumped rollouts.", why=_SKIP)
    skip_dump_dir: str = no_effect("/tmp/rollout_dump", "Where.", why=_SKIP)
    partial_rollout: Literal[True, False, "keep_cache"] = Field(
        default=True,
        description="With trainer.async_pipeline sequences under way go on under new weights as "
        "soon as these arrive, their keys and values computed again, or with 'keep_cache' as they "
        "are; False: they end under the weights they began with, which are waited for.",
    )
    enable_dual_buffer: bool = Field(
        default=False,
        description="Weights arrive in one copy more: a second one on the device, so that it "
        "generates during the transfer; with enable_param_async a second one on the host.",
    )
    enable_param_async: bool = Field(
        default=False,
        description="Weights go from host to host while devices train and generate; False: from "
        "device to device, which the trainer waits for.",
    )
    param_update_preduce_bucket_size_mb: int = Field(
        default=512,
        ge=1,
        description="MiB of weights that the trainer puts together and sends at once.",
    )
    param_update_consume_bucket_size_mb: int = Field(
        default=128,
        ge=1,
        description="MiB of weights that a receiver takes in at once.",
    )

    @property
    def microbatch_tokens(self) -> int | None:
        """A device's most tokens of a micro-batch, None where those are bounded by count."""
        by_tokens = self.log_prob_use_dynamic_bsz or self.log_prob_micro_batch_size_per_gpu is None
        return self.log_prob_max_token_len_per_gpu if by_tokens else None
