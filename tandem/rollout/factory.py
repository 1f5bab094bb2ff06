# SPDX-License-Identifier: Apache-2.0
"""The choice among rollout engines, and the functions that build those of this package.

An engine is one function from an ``EngineSpec`` to an ``api.RolloutEngine``. The names of engines
are in ``config.schema.rollout.ENGINES``. Any other engine is named by its dotted path.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from tandem.api import EngineFacts, RolloutEngine
from tandem.config.schema.imports import import_dotted
from tandem.config.schema.rollout import ENGINES, NATIVE_NAMES, RolloutConfig
from tandem.errors import UserError
from tandem.models.decoder import Decoder, DecoderConfig
from tandem.models.expert_parallel import compute_for_peers
from tandem.models.language_model import LanguageModel
from tandem.models.quantized import KEY, QuantizedDecoder, require_quantizable
from tandem.platforms.capture import eager
from tandem.platforms.record import Platform
from tandem.rollout.choice import choose_engine, hf_warning
from tandem.rollout.divided import DividedEngine
from tandem.rollout.hf import HfRolloutConfig, HfRolloutEngine, ModuleSink, empty_model
from tandem.rollout.joint import JointMember
from tandem.rollout.lock_step import LockStep
from tandem.rollout.native.engine import NativeRolloutEngine
from tandem.rollout.paged.cache import HEAD_DIMS
from tandem.rollout.restarts import RestartingEngine
from tandem.rollout.settings import NativeRolloutConfig
from tandem.types import TokenIds

logger = logging.getLogger(__name__)

QUANTIZED_FROM = ("bfloat16", "float16")
"""The precisions of models that vLLM quantizes."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The arguments of a rollout engine's constructor.

    Attributes:
        model: the policy. The trainer in the same process or the weight link changes its weights in
            place. An engine that shares weights computes with it. Any other must not read it,
            because its memory may be freed between two updates.
        folder: the model's folder with config.json and tokenizer. Its weights are the initial ones.
            The sink also receives them, as version 0.
        config: the keys ``actor_rollout_ref.rollout.*``.
        eos_ids: the tokens that end a response.
        platform: the platform of the device.
        max_length: the length of the longest sequence, prompt and response, in tokens; None if it
            is not known.
        joint: the passes of several policies that this one takes part in; None computes alone.
        rank: the number of this process among those that generate.
        num_ranks: the number of processes that generate.
    """

    model: LanguageModel
    folder: Path
    config: RolloutConfig
    eos_ids: TokenIds
    platform: Platform
    max_length: int | None = None
    joint: JointMember | None = None
    rank: int = 0
    num_ranks: int = 1

    @property
    def own_facts(self) -> EngineFacts:
        """The promises of another package's engine, which has weights of its own."""
        return EngineFacts(
            shares_weights=False,
            draws_by_key=True,
            stops_within_sequences=True,
            keeps_cache=self.config.partial_rollout == "keep_cache",
        )

    def warn_of_precision(self) -> None:
        """Log a warning if an engine with weights of its own has another precision."""
        own = str(self.model.lm_head_weight.dtype).removeprefix("torch.")
        if self.config.dtype not in ("auto", own):
            logger.warning(
                "actor_rollout_ref.rollout.dtype=%s: the trainer computes in %s, so that the "
                "log-probs of generation and training differ more than by rounding "
                "(training/rollout_probs_diff)",
                self.config.dtype,
                own,
            )

    def warn_of_unread_files(self, engine: str) -> None:
        """Log a warning if the engine should read the model's files and cannot.

        An engine that computes the model under another name does not know the names in its files,
        and starts with random weights.
        """
        if not self.config.load_format.startswith("dummy"):
            logger.warning(
                "actor_rollout_ref.rollout.load_format=%s: %s computes models of type %r under "
                "another name and does not read their files. Its weights come from the trainer "
                "alone",
                self.config.load_format,
                engine,
                self.model.family,
            )


def build_engine(spec: EngineSpec) -> RolloutEngine:
    """Build the engine that ``spec.config.name`` names.

    Raises:
        UserError: a dotted path does not name a function, or the engine cannot serve the model.
    """
    build, config = _function_of(spec.config.name), spec.config
    engine = build(spec)
    if not config.restarts_engine or engine.facts.shares_weights:
        return engine
    return RestartingEngine(
        engine,
        lambda: build(spec),
        model=spec.model,
        max_restarts=config.max_engine_restarts,
    )


def _function_of(name: str) -> Callable[[EngineSpec], RolloutEngine]:
    """Return the function that builds the engine ``name``."""
    if name in ENGINES:
        return resolve_name(ENGINES[name])
    return import_dotted("actor_rollout_ref.rollout.name", name)


def build_by_family(spec: EngineSpec) -> RolloutEngine:
    """Build the engine that suits the model's family (``choice.choose_engine``)."""
    if spec.model.decoder is not None:
        return build_native(spec)
    hf_config = {"model_type": spec.model.family, **_hf_config(spec.folder)}
    choice = choose_engine(hf_config, has_decoder=False)
    if choice.name == "hf":
        logger.warning("%s", hf_warning(choice.reason))
    return resolve_name(ENGINES[choice.name])(spec)


def build_native(spec: EngineSpec) -> RolloutEngine:
    """Build the engine of this package for the platform. The model must have our decoder.

    The dense engine serves models with latent attention on every platform: the paged one has no
    kernels for their heads.
    """
    is_dense = _is_dense(_decoder(spec).config, spec.platform)
    return build_dense(spec) if is_dense else build_paged(spec)


def _is_dense(config: DecoderConfig, platform: Platform) -> bool:
    return platform.kernels == "torch" or config.latent is not None


def require_kernels(config: DecoderConfig | None, platform: Platform, *, key: str) -> None:
    """Raise UserError if the paged engine would serve a model for which it has no kernel.

    Args:
        config: None for a model that transformers computes, which needs no kernels.
        key: the configuration key and value that the model came from, for the message.
    """
    if config is None or _is_dense(config, platform) or config.head_dim in HEAD_DIMS:
        return
    raise UserError(
        key,
        rule=f"its head dimension {config.head_dim} has no attention kernel for {platform.name} "
        f"(supported: {', '.join(map(str, HEAD_DIMS))})",
        remedy="Set trainer.device=cpu or use another model.",
    )


def require_decoder(config: RolloutConfig, decoder: DecoderConfig | None, *, model: str) -> None:
    """Raise UserError if the native engine is named for a model that tandem does not compute.

    Args:
        decoder: None for a model that transformers computes.
        model: the folder of the model.
    """
    if config.name == "native" and decoder is None:
        raise UserError(
            "actor_rollout_ref.rollout.name",
            config.name,
            rule=f"config.json of {model} has an activation, rotary positions or a form of weights "
            "that tandem's decoder does not compute",
            remedy="Set it to hf, and transformers generates.",
        )


def require_quantization(
    config: RolloutConfig,
    decoder: DecoderConfig | None,
    *,
    platform: Platform,
    dtype: torch.dtype,
) -> None:
    """Raise UserError if the engine cannot generate in ``config.quantization``.

    Args:
        decoder: None for a model that transformers computes.
        dtype: the precision of the trainer's passes.
    """
    if config.quantization is None:
        return
    if config.attaches_servers:
        rule = "servers are attached (engine_kwargs.vllm.urls), which get weights in 16 or 32 bits"
    elif config.name == "vllm":
        used = str(dtype).removeprefix("torch.") if config.dtype == "auto" else config.dtype
        if used in QUANTIZED_FROM:
            return
        key = "actor_rollout_ref.rollout.dtype"
        rule = f"vLLM quantizes a model in 16 bits only, and it would be in {used} ({key})"
        raise UserError(KEY, config.quantization, rule=rule, remedy=f"Set {key}=bfloat16.")
    elif config.name not in NATIVE_NAMES:
        rule = f"vLLM and the native engine generate in it, not rollout.name={config.name}"
    elif decoder is None:
        rule = "transformers generates with this model, in the precision of its weights"
    elif not platform.has_fp8():
        rule = f"the {platform.name} device does not multiply fp8 matrices"
    else:
        require_quantizable(decoder)
        return
    raise UserError(KEY, config.quantization, rule=rule, remedy=f"Leave out {KEY}.")


def require_recording(config: RolloutConfig) -> None:
    """Raise UserError if routes are to be recorded by an engine that does not record them."""
    if not config.enable_rollout_routing_replay:
        return
    key, name = "actor_rollout_ref.rollout.enable_rollout_routing_replay", config.name
    keys = f"{key} and actor_rollout_ref.actor.router_replay.mode"
    if name in ENGINES and name not in NATIVE_NAMES:
        rule = f"rollout.name={name} does not record the experts of tokens"
        remedy = f"Set actor_rollout_ref.rollout.name=native, or leave out {keys}."
        raise UserError(key, True, rule=rule, remedy=remedy)


def require_devices(config: RolloutConfig, platform: Platform) -> None:
    """Raise UserError if an engine has to be on more devices than its package can use here."""
    size = config.ranks_per_engine
    if config.name == "sglang" and size > 1 and platform.device_type != "cpu":
        raise UserError(
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            size,
            rule="with SGLang, an engine over several devices is built for CPUs: on others, the "
            "process that holds it sees its own device alone",
            remedy="Set it to 1, or actor_rollout_ref.rollout.name=vllm.",
        )


def require_divided_experts(config: RolloutConfig, decoder: DecoderConfig | None) -> None:
    """Raise UserError if experts are to be divided by an engine that does not divide them.

    Args:
        decoder: None for a model that transformers computes.
    """
    size = config.expert_parallel_size
    if config.expert_peers == 1 or decoder is not None:
        return
    key = "actor_rollout_ref.rollout.expert_parallel_size"
    rule = "transformers generates with this model, and divides no experts"
    raise UserError(key, size, rule=rule, remedy=f"Leave out {key}.")


def build_hf(spec: EngineSpec) -> RolloutEngine:
    """Build the engine over transformers' generate.

    It shares the weights of a model that transformers computes, and copies those of another.
    """
    config = HfRolloutConfig(spec.config.seed, spec.eos_ids, max_num_seqs=spec.config.max_num_seqs)
    if spec.model.decoder is None:
        return HfRolloutEngine(spec.model.module, config)
    weight = spec.model.lm_head_weight
    module = empty_model(spec.folder, dtype=weight.dtype, device=weight.device)
    return HfRolloutEngine(module, config, sink=ModuleSink(module))


def build_dense(spec: EngineSpec) -> RolloutEngine:
    """Build the engine of platforms without our kernels."""
    decoder, joint = _decoder(spec), spec.joint
    cache_bytes = _dense_cache_bytes(spec)
    if joint is not None:
        settings = _settings(spec, cache_bytes=cache_bytes // joint.passes.num_policies)
        return NativeRolloutEngine(decoder, settings, substitute=joint.join(decoder))
    settings = _settings(spec, cache_bytes=cache_bytes)
    peers = spec.model.layout.expert
    if peers.size > 1:
        lock_step = LockStep(peers, partial(compute_for_peers, decoder))
        engine = NativeRolloutEngine(decoder, settings, lock_step=lock_step)
        return DividedEngine(engine, peers, lock_step=lock_step)
    return NativeRolloutEngine(decoder, settings, substitute=_quantized(spec, decoder))


def _dense_cache_bytes(spec: EngineSpec) -> int:
    """Return a bound on keys and values: a quarter of a host's memory, or what the weights leave of
    an accelerator's share.
    """
    # Not the free memory: the batch size affects rounding, and a resumed run must repeat both.
    total = spec.platform.total_memory_bytes()
    if spec.platform.kernels == "torch":
        return total // 4
    weights = sum(weight.nbytes for weight in _decoder(spec).parameters())
    return max(0, int(total * spec.config.gpu_memory_utilization) - weights)


def build_paged(spec: EngineSpec) -> RolloutEngine:
    """Build the engine of platforms with our kernels."""
    from tandem.rollout.paged.engine import PagedRolloutEngine

    decoder, platform, config = _decoder(spec), spec.platform, spec.config
    quantized = _quantized(spec, decoder)
    weights_bytes = sum(weight.nbytes for weight in decoder.parameters())
    weights_bytes += 0 if quantized is None else quantized.num_bytes
    share_bytes = int(platform.total_memory_bytes() * config.gpu_memory_utilization)
    peers = spec.model.layout.expert
    lock_step = LockStep(peers, partial(compute_for_peers, decoder)) if peers.size > 1 else None
    engine = PagedRolloutEngine(
        decoder,
        _settings(spec, cache_bytes=max(0, share_bytes - weights_bytes)),
        make_capturer=eager if config.enforce_eager else platform.make_capturer,
        num_multiprocessors=platform.num_multiprocessors(),
        quantized=quantized,
        lock_step=lock_step,
    )
    return engine if lock_step is None else DividedEngine(engine, peers, lock_step=lock_step)


def _decoder(spec: EngineSpec) -> Decoder:
    decoder = spec.model.decoder
    assert decoder is not None, "the dense and the paged engine need tandem's decoder"
    return decoder


def _quantized(spec: EngineSpec, decoder: Decoder) -> QuantizedDecoder | None:
    return None if spec.config.quantization is None else QuantizedDecoder(decoder)


def _settings(spec: EngineSpec, *, cache_bytes: int) -> NativeRolloutConfig:
    config = spec.config
    return NativeRolloutConfig(
        seed=config.seed,
        eos_ids=spec.eos_ids,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_cache_bytes=cache_bytes,
        keeps_cache=config.partial_rollout == "keep_cache",
        records_routes=config.enable_rollout_routing_replay,
        keeps_turns=config.enable_prefix_caching,
    )


def _hf_config(folder: Path) -> dict[str, Any]:
    """Return the content of a model's config.json; {} if there is none."""
    path = folder / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
