# SPDX-License-Identifier: Apache-2.0
"""``actor_rollout_ref.rollout.*``: generation, and how new weights reach it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tandem.config.schema.dotted import ByName
from tandem.config.schema.fields import VALIDATES, Dtype, Section, Seed, Strings, read_if

ENGINES: Mapping[str, str] = {
    "auto": "tandem.rollout.factory:build_by_family",
    "native": "tandem.rollout.factory:build_native",
    "hf": "tandem.rollout.factory:build_hf",
    "vllm": "tandem.rollout.vllm.engine:build",
    "sglang": "tandem.rollout.sglang.engine:build",
}
"""The names of rollout engines, each with the dotted path of the function that builds one."""
ENGINES_NOT_BUILT: Mapping[str, str] = {"trtllm": "TensorRT-LLM"}
"""Engines that verl has besides: their names and their titles."""
FORMER_NAMES: Mapping[str, str] = {"sglang_async": "sglang"}
"""Names of engines in earlier versions of verl. Its ``sglang_async`` became ``sglang`` in 0.5."""
ENGINES_IN_PROCESS = ("auto", "native", "hf", "vllm")
"""The engines without processes of their own."""
NATIVE_NAMES = ("auto", "native")
"""The names by which the native engine may be chosen."""
VERLS_ENGINES = ("vllm", "sglang", *ENGINES_NOT_BUILT)
"""The engines that verl's scripts name."""

_SAMPLES = "do_sample=True"
TopK = Annotated[
    int,
    Field(
        ge=-1,
        description="Sample from the k most likely tokens; -1 or 0: from all tokens.",
    ),
]
TopP = Annotated[
    float,
    Field(
        gt=0,
        le=1,
        description="Sample from the most likely tokens of this total probability.",
    ),
]
_SCORES = (
    "needs_old_log_probs=True: the policy need not score the batch, as the update is strictly "
    "on-policy or in bypass_mode"
)
_APART = (
    "trainer.v1.trainer_mode=separate_async: trainer.nnodes and trainer.n_gpus_per_node count all "
    "devices, and trainer.separated_node_ratios gives shares of them"
)
_MAY_LAG = "trainer.max_lag>0: the largest lag is 0: each batch is generated and then trained on"


_VALIDATION_SAMPLES = (
    "actor_rollout_ref.rollout.val_kwargs.samples=True: validation is greedy with val_kwargs."
    "temperature=0 or val_kwargs.do_sample=False"
)


class ValKwargs(Section):
    """``val_kwargs.*``: sampling in validation, which is greedy by default."""

    n: int = Field(default=1, ge=1, description="Number of samples per validation prompt.")
    do_sample: bool | None = Field(
        default=None,
        description="Sample. False: greedy decoding. null: sample if temperature is positive, as "
        "verl does from 0.7 on, where it reads temperature alone.",
    )
    temperature: float = Field(
        default=0.0,
        ge=0,
        description="Sampling temperature; 0: greedy decoding.",
        json_schema_extra=read_if("do_sample!=False"),
    )
    top_k: TopK = Field(default=-1, json_schema_extra=read_if(_VALIDATION_SAMPLES))
    top_p: TopP = Field(default=1.0, json_schema_extra=read_if(_VALIDATION_SAMPLES))

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn at random."""
        return self.temperature > 0 and self.do_sample is not False


_TALKS = (
    "has_environment=True: there are no tools, no simulated users and no agents, as "
    "multi_turn.tool_config_path, function_tool_path, interaction_config_path and "
    "agent.agent_loop_config_path are null"
)
CallFormatName = Literal[
    "auto",
    "hermes",
    "gpt-oss",
    "qwen3_coder",
    "glm",
    "seed",
    "minimax",
    "kimi",
    "deepseek_v4",
    "gemma4",
]


class EngineKwargs(Section):
    """``engine_kwargs.*``: arguments of engines that are not tandem's own."""

    vllm: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="Arguments of vLLM's EngineArgs. allow_untested=True allows versions of vLLM "
        "that tandem was not tested with. urls names servers that generate instead "
        "(docs/servers.md); allow_public=True allows them addresses that are not private.",
        json_schema_extra=read_if("actor_rollout_ref.rollout.name=vllm"),
    )
    sglang: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="Arguments of SGLang's ServerArgs. python names the interpreter that has "
        "SGLang; allow_untested=True allows versions that tandem was not tested with.",
        json_schema_extra=read_if("actor_rollout_ref.rollout.name=sglang"),
    )


class MultiTurnConfig(Section):
    """``multi_turn.*``: conversations with tools and simulated users (docs/agents.md)."""

    enable: bool = Field(
        default=False,
        description="Let rows without agent_name be answered in several turns, with the tools and "
        "interactions below.",
    )
    max_assistant_turns: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of turns of the policy; calls of the last one are not "
        "executed. null: only data.max_response_length limits them.",
        json_schema_extra=read_if(_TALKS),
    )
    max_user_turns: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of answers by tools and users; the policy has one more turn "
        "after the last. null: no limit.",
        json_schema_extra=read_if(_TALKS),
    )
    max_parallel_calls: int = Field(
        default=1,
        ge=1,
        description="Number of calls of one turn that are executed; the others are answered so.",
        json_schema_extra=read_if(_TALKS),
    )
    max_tool_response_length: int = Field(
        default=256,
        ge=1,
        description="Maximum length of the result of a call in characters; longer ones are cut.",
        json_schema_extra=read_if(_TALKS),
    )
    tool_response_truncate_side: Literal["left", "middle", "right"] = Field(
        default="middle",
        description="Part of a long result that is cut away. left: the last characters remain; "
        "right: the first ones; middle: both ends. (verl before 0.8: left keeps the left end.)",
        json_schema_extra=read_if(_TALKS),
    )
    tool_config_path: str | None = Field(
        default=None,
        description="YAML file of tools: classes in the form of verl's BaseTool.",
    )
    function_tool_path: str | None = Field(
        default=None,
        description="Python file of tools: functions with the decorator @function_tool.",
    )
    interaction_config_path: str | None = Field(
        default=None,
        description="YAML file of simulated users: classes in the form of verl's BaseInteraction.",
    )
    format: CallFormatName = Field(
        default="hermes",
        description="Form in which the model writes calls. auto: that of the tokenizer's "
        "response_template, or the one of these that reads a call of the chat template.",
        json_schema_extra=read_if(_TALKS),
    )
    tokenization_sanity_check_mode: Literal["strict", "ignore_strippable", "disable"] = Field(
        default="strict",
        description="What happens if the chat template cannot carry calls and results. strict: an "
        "error before training; ignore_strippable: a warning; disable: nothing.",
        json_schema_extra=read_if(_TALKS),
    )
    use_inference_chat_template: bool = Field(
        default=False,
        description="Render the whole conversation again after a message of a simulated user. "
        "Where the template then changes earlier turns (it drops thoughts), the conversation "
        "forks, and earlier tokens are computed twice. False: the message is appended.",
        json_schema_extra=read_if(_TALKS),
    )
    tool_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Time limit of one call in seconds, unless the config of the tool has a "
        "timeout.",
        json_schema_extra=read_if(_TALKS),
    )


class AgentConfig(Section):
    """``agent.*``: the episodes of several turns."""

    num_workers: int = Field(
        default=8,
        ge=1,
        description="Maximum number of processes that run tools, simulated users and agents that "
        "are functions.",
        json_schema_extra=read_if(_TALKS),
    )
    default_agent_loop: str | None = Field(
        default=None,
        description="Agent of rows without agent_name: single_turn_agent, tool_agent, or a name of "
        "agent.agent_loop_config_path. null: tool_agent with multi_turn.enable=True, else "
        "single_turn_agent.",
    )
    agent_loop_config_path: str | None = Field(
        default=None,
        description="YAML file of agents of your own: commands or functions that call the policy "
        "by OpenAI's protocol, and environments of OpenEnv.",
    )
    endpoint: str | None = Field(
        default=None,
        description="HOST:PORT of this machine at which agents of your own call the policy. null: "
        "127.0.0.1 and any free port.",
        json_schema_extra=read_if("agent_loop_config_path!=null"),
    )
    timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Time in seconds that an episode may take after its first turn, and an agent "
        "before its first request. One that takes longer has no reward and does not count.",
        json_schema_extra=read_if(_TALKS),
    )
    isolation: Literal["strict", "best_effort"] = Field(
        default="strict",
        description="Treatment of a machine that cannot hold programs of the policy in their jail "
        "(docs/jail.md). strict: an error before training; best_effort: a warning that names what "
        "such a program could do.",
        json_schema_extra=read_if(_TALKS),
    )
    environment: Strings = Field(
        default=(),
        description="Names of environment variables that tools may read besides the usual ones, as "
        "in reward.environment.",
        json_schema_extra=read_if(_TALKS),
    )


def _present_name(name: object) -> object:
    return FORMER_NAMES.get(name, name) if isinstance(name, str) else name


EngineName = Annotated[str, ByName((*ENGINES, *ENGINES_NOT_BUILT)), BeforeValidator(_present_name)]


class RolloutConfig(Section):
    """Generation for training and, with ``val_kwargs``, for validation."""

    name: EngineName = Field(
        default="auto",
        description="Generation engine: a name, or the dotted path of a function that builds an "
        "engine. auto: native (tandem's decoder) if it computes the model, else vllm if it is "
        "installed and computes it, else hf (transformers' generate). sglang_async, a name of verl "
        "0.4, is sglang.",
    )
    n: int = Field(
        default=8,
        ge=1,
        description="Number of samples per prompt (the group of GRPO). (verl: 1.)",
    )
    temperature: float = Field(
        default=1.0, gt=0, description="Temperature of sampling and of log-probs."
    )
    top_k: TopK = Field(default=-1, json_schema_extra=read_if(_SAMPLES))
    top_p: TopP = Field(default=1.0, json_schema_extra=read_if(_SAMPLES))
    do_sample: bool = Field(default=True, description="Sample. False: greedy decoding.")
    ignore_eos: bool = Field(
        default=False, description="Generate max_response_length tokens even after the end token."
    )
    val_kwargs: ValKwargs = Field(
        default_factory=ValKwargs,
        description="Sampling in validation.",
        json_schema_extra=read_if(VALIDATES),
    )
    seed: Seed = Field(
        default=1,
        ge=0,
        description="Seed of sampling. A sampled token depends only on the seed, the id of its "
        "sample and its position.",
    )
    max_num_seqs: int = Field(
        default=1024, ge=1, description="Maximum number of sequences generated at the same time."
    )
    max_num_batched_tokens: int = Field(
        default=8192, ge=1, description="Maximum number of prompt tokens per prefill pass."
    )
    dtype: Dtype = Field(
        default="auto",
        description="Precision of generation. auto: that of the trainer's passes.",
        json_schema_extra=read_if(
            "name=vllm|sglang: the rollout uses the trainer's weights; "
            "actor.fsdp_config.dtype decides"
        ),
    )
    tensor_model_parallel_size: int = Field(
        default=1,
        ge=1,
        description="Number of consecutive devices over which each engine splits its weights and "
        "its cache. It must divide the devices that generate.",
        json_schema_extra=read_if(
            "name=vllm|sglang: each device of the pool that generates is a replica of the native "
            "engine"
        ),
    )
    expert_parallel_size: int = Field(
        default=1,
        ge=1,
        description="Number of consecutive devices over which generation divides the experts of "
        "each layer (docs/experts.md). It must divide the experts and the devices that generate. "
        "With the native engine, they generate in lock step, each its own sequences. With vLLM, it "
        "is tensor_model_parallel_size: an engine then divides the experts, and not their "
        "matrices.",
    )
    enable_chunked_prefill: bool = Field(
        default=True,
        description="Read long prompts in parts, between the decode steps of other sequences.",
        json_schema_extra=read_if("name=vllm|sglang: the native engine prefills whole prompts"),
    )
    enable_prefix_caching: bool = Field(
        default=True,
        description="Keep keys and values for later requests with the same beginning and weights: "
        "those of prompts (vLLM and SGLang), and those of a sample that waits for its next turn.",
    )
    nnodes: int = Field(
        default=0,
        ge=0,
        description="Number of nodes that generate beside those of the trainer.",
        json_schema_extra=read_if(_APART),
    )
    n_gpus_per_node: int | None = Field(
        default=None,
        ge=1,
        description="Number of devices on each of these nodes. null: trainer.n_gpus_per_node.",
        json_schema_extra=read_if(_APART),
    )
    load_format: str = Field(
        default="dummy",
        description="Where the engine's first weights come from. dummy: from the trainer alone; "
        "auto, safetensors: from the files of the model first.",
        json_schema_extra=read_if(
            "name=vllm|sglang: the rollout takes the trainer's weights before it generates"
        ),
    )
    disable_log_stats: bool = Field(
        default=True,
        description="False: vLLM's own counters are logged as rollout/engine/*.",
        json_schema_extra=read_if("name=vllm"),
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = Field(
        default=None,
        description="Numbers of sequences for which decode steps are captured. null: vLLM's.",
        json_schema_extra=read_if(
            "name=vllm|sglang: the native engine captures the sizes that it meets"
        ),
    )
    max_engine_restarts: int = Field(
        default=0,
        ge=0,
        description="Number of workers that only generate that are replaced when they end, and "
        "number of times that each worker starts its engine again when the engine's own processes "
        "end or stand still. 0: the run ends.",
    )
    engine_kwargs: EngineKwargs = Field(
        default_factory=EngineKwargs,
        description="Arguments of engines that are not tandem's own.",
    )
    log_prob_micro_batch_size_per_gpu: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of sequences per forward pass for old log-probs. null: "
        "micro-batches are filled up to log_prob_max_token_len_per_gpu tokens.",
        json_schema_extra=read_if(_SCORES),
    )
    log_prob_use_dynamic_bsz: bool = Field(
        default=False,
        description="Fill micro-batches by tokens. Not set: actor.use_dynamic_bsz.",
        json_schema_extra=read_if(_SCORES),
    )
    log_prob_max_token_len_per_gpu: int = Field(
        default=16384,
        ge=1,
        description="Maximum number of tokens per device in a micro-batch that is filled by "
        "tokens. Not set: actor.ppo_max_token_len_per_gpu.",
        json_schema_extra=read_if(_SCORES),
    )

    gpu_memory_utilization: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of an accelerator's memory for the weights and the key-value cache of "
        "the rollout. The cache is never larger than the sequences of a step need. No effect on "
        "CPUs.",
    )
    free_cache_engine: bool = Field(
        default=False,
        description="Free the cache and the weights of the rollout while the same devices train. "
        "Captured decode steps must then be captured again, so set it only to save memory.",
    )
    limit_images: int | None = Field(
        default=None,
        ge=0,
        description="Largest number of pictures of a row; a row with more is an error. null: any "
        "number.",
    )
    enforce_eager: bool = Field(
        default=False,
        description="Launch each operation of a decode step instead of replaying a captured graph; "
        "slower. No effect on platforms without graphs.",
    )
    quantization: Literal["fp8"] | None = Field(
        default=None,
        description="Precision of the large matrix products of generation. fp8: weights with a "
        "scale for each matrix and activations with a scale for each token; attention, its output "
        "projection, embedding and head keep the precision of the policy. With vLLM, its own "
        "quantization to fp8, which includes that projection. Training is not quantized, and "
        "algorithm.rollout_correction.rollout_is=auto corrects the difference.",
    )
    partial_rollout: Literal[True, False, "keep_cache"] = Field(
        default=True,
        description="Treatment of sequences that are being generated when new weights arrive. "
        "True: they continue with the new weights after their keys and values are recomputed; "
        "keep_cache: they continue without recomputing; False: they finish with the old weights "
        "first.",
        json_schema_extra=read_if(
            _MAY_LAG,
            "trainer.deterministic_async=False: with trainer.deterministic_async=True all "
            "sequences finish with the weights they started with",
        ),
    )
    enable_dual_buffer: bool = Field(
        default=False,
        description="Receive new weights into a second copy on the device, which generates "
        "meanwhile. With enable_param_async, the second copy is on the host.",
    )
    enable_param_async: bool = Field(
        default=False,
        description="Transfer weights from host to host while the devices train and generate. "
        "False: from device to device, while the trainer waits.",
    )
    param_update_preduce_bucket_size_mb: int = Field(
        default=512,
        ge=1,
        description="Size in MiB of the buckets of weights that the trainer sends.",
    )
    param_update_consume_bucket_size_mb: int = Field(
        default=128,
        ge=1,
        description="Size in MiB of the buckets of weights that a receiver loads.",
    )
    enable_rollout_routing_replay: bool = Field(
        default=False,
        description="Record the experts of each token, which actor.router_replay.mode=R3 replays.",
    )
    full_determinism: bool = Field(
        default=False,
        description="Draw the turns of episodes in waves: the next one begins when all episodes "
        "have the answer to their last turn, so that the times of tools decide nothing and a run "
        "can be repeated bit by bit. Each tool must be declared deterministic.",
        json_schema_extra=read_if(_TALKS),
    )
    multi_turn: MultiTurnConfig = Field(
        default_factory=MultiTurnConfig, description="Conversations with tools."
    )
    agent: AgentConfig = Field(
        default_factory=AgentConfig, description="Episodes of several turns."
    )

    @property
    def ranks_per_engine(self) -> int:
        """The number of processes of one engine: vLLM and SGLang split matrices, the native one
        experts.
        """
        splits = self.name in ("vllm", "sglang")
        return self.tensor_model_parallel_size if splits else self.expert_peers

    @property
    def expert_peers(self) -> int:
        """The number of processes of the native engine that generate in lock step, because each has
        a part of the experts.
        """
        return 1 if self.name == "vllm" else self.expert_parallel_size

    def answers(self, rank: int) -> bool:
        """Return whether a process returns completions: each one that has sequences of its own."""
        return self.expert_peers > 1 or rank % self.ranks_per_engine == 0

    @property
    def is_in_process(self) -> bool:
        """Whether the engine has no processes of its own."""
        return self.name in ENGINES_IN_PROCESS

    @property
    def attaches_servers(self) -> bool:
        """Whether servers of vLLM generate that somebody else has started."""
        return self.name == "vllm" and self.engine_kwargs.vllm.get("urls") is not None

    @property
    def restarts_engine(self) -> bool:
        """Whether an engine whose processes have ended is started again."""
        return self.max_engine_restarts > 0 and not self.is_in_process
