# SPDX-License-Identifier: Apache-2.0
"""The rules for models with experts or latent attention, which need the content of config.json."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.derived.pools import Placement, RankLayout, place_run
from tandem.config.derived.sizes import ModelSizes
from tandem.config.derived.trained_model import ModelOfTask, trained_model
from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError

ROLLOUT_KEY = "actor_rollout_ref.rollout.expert_parallel_size"
"""The number of devices over which generation divides experts."""
_SPLIT = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_MODE = "actor_rollout_ref.actor.router_replay.mode"
_RECORDS = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
_FREEZES = "actor_rollout_ref.actor.freeze_moe_router"
_BYPASSES = "algorithm.rollout_correction.bypass_mode"
_ATTENTION = "[q_proj,k_proj,v_proj,o_proj]"


def replay_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield errors in the keys of routing replay."""
    mode = config.actor_rollout_ref.actor.router_replay.mode
    records = config.actor_rollout_ref.rollout.enable_rollout_routing_replay
    if mode == "R2" and config.algorithm.rollout_correction.bypass_mode:
        rule = f"replays the pass that computes old log-probs, and {_BYPASSES}=True leaves it out"
        yield UserError(_MODE, mode, rule=rule, remedy=f"Set {_BYPASSES}=False or {_MODE}=R3.")
    if mode == "R3" and not records:
        rule = f"replays what the rollout records, and {_RECORDS}=False"
        yield UserError(_MODE, mode, rule=rule, remedy=f"Set {_RECORDS}=True.")
    elif mode != "R3" and records:
        rule = f"nothing reads the experts that it records, as {_MODE}={mode}"
        yield UserError(_RECORDS, True, rule=rule, remedy=f"Set {_MODE}=R3 or {_RECORDS}=False.")


def rollout_division_errors(config: RunConfig, placement: Placement) -> Iterator[UserError]:
    """Yield the error in dividing experts in generation that config.json does not decide."""
    rollout = config.actor_rollout_ref.rollout
    size, pool = rollout.expert_parallel_size, placement.pool_of("generate")
    if size == 1:
        return
    remedy = f"Leave out {ROLLOUT_KEY}."
    if rollout.name == "vllm":
        split = rollout.tensor_model_parallel_size
        if size == split:
            return
        rule = f"with vLLM, it must be the devices of an engine ({_SPLIT}={split})"
        remedy = f"Set {_SPLIT}={size}, or leave out {ROLLOUT_KEY}."
    elif rollout.name not in ("auto", "native"):
        rule = f"only vLLM and the native engine divide experts, not rollout.name={rollout.name}"
        remedy = "Set actor_rollout_ref.rollout.name=native, or leave it out."
    elif placement.generates_apart:
        rule = "it is built for devices that train and generate, and generation has its own"
    elif pool.num_devices % size:
        largest = max(n for n in range(1, size) if pool.num_devices % n == 0)
        rule = f"must divide the {pool.num_devices} device(s) that generate"
        remedy = f"Set {ROLLOUT_KEY}={largest}."
    elif config.trainer.max_lag > 0:
        rule = "it is built for generation and training that follow each other in every step"
        remedy = f"Set trainer.async_pipeline=False, or leave out {ROLLOUT_KEY}."
    elif config.has_environment:
        rule = "it is built for responses of one turn, and there are tools, users or agents"
    elif config.actor_rollout_ref.model.trains_adapters:
        rule = "it is not built for adapters (LoRA)"
    else:
        return
    yield UserError(ROLLOUT_KEY, size, rule=rule, remedy=remedy)


def require_built(config: RunConfig | SftConfig, sizes: ModelSizes | None) -> None:
    """Raise UserError if a key asks for what is not built for models with experts, or for those
    with latent attention.

    Args:
        sizes: the sizes of the trained model; None for an unknown model, which is not checked.
    """
    if sizes is None:
        return
    if isinstance(config, RunConfig):
        _require_rollout_division(config, sizes)
    adapters = trained_model(config).adapters
    if sizes.latent is not None and adapters is not None:
        drawn = adapters.folder is None
        key = f"{adapters.section}.{'lora_rank' if drawn else 'lora_adapter_path'}"
        value = adapters.rank if drawn else str(adapters.folder)
        rule = "adapters (LoRA) are not built for models with latent attention"
        raise UserError(key, value, rule=rule, remedy=f"Leave out {key}.")
    if sizes.experts is None:
        _require_no_replay(config)
        _require_no_frozen_router(config)
        return
    adapted = () if adapters is None else adapters.modules(sizes.num_layers, sees=False)
    if adapters is not None and any(".mlp." in name for name in adapted):
        raise UserError(
            f"{adapters.section}.target_modules",
            adapters.targets if isinstance(adapters.targets, str) else list(adapters.targets),
            rule="adapters (LoRA) of the feed-forward are not built for models with experts",
            remedy=f"Set {adapters.section}.target_modules={_ATTENTION}.",
        )
    if isinstance(config, RunConfig):
        quantization = config.actor_rollout_ref.rollout.quantization
        if quantization is not None:
            key = "actor_rollout_ref.rollout.quantization"
            rule = "it is not built for models with experts"
            raise UserError(key, quantization, rule=rule, remedy=f"Leave out {key}.")


def _require_rollout_division(config: RunConfig, sizes: ModelSizes) -> None:
    size = config.actor_rollout_ref.rollout.expert_parallel_size
    if size == 1:
        return
    if sizes.experts is None:
        rule, remedy = "the model has no experts to divide", f"Leave out {ROLLOUT_KEY}."
        raise UserError(ROLLOUT_KEY, size, rule=rule, remedy=remedy)
    number = sizes.experts.num_experts
    if number % size:
        devices = place_run(config).pool_of("generate").num_devices
        largest = max(n for n in range(1, size) if not (number % n or devices % n))
        rule = f"must divide the {number} experts of a layer"
        raise UserError(ROLLOUT_KEY, size, rule=rule, remedy=f"Set {ROLLOUT_KEY}={largest}.")


def require_own_routers(config: RunConfig, *, has_decoder: bool) -> None:
    """Raise UserError if a model that transformers' code computes is to record its routes, or to
    leave its routers as they are.
    """
    if config.actor_rollout_ref.actor.freeze_moe_router and not has_decoder:
        rule = "transformers' code computes this model, and trains all of its weights"
        raise UserError(_FREEZES, True, rule=rule, remedy=f"Leave out {_FREEZES}.")
    mode = config.actor_rollout_ref.actor.router_replay.mode
    if mode != "disabled" and not has_decoder:
        rule = "transformers' code computes this model, and does not record or replay its experts"
        raise UserError(_MODE, mode, rule=rule, remedy=f"Leave out {_MODE} and {_RECORDS}.")


def expert_parallel_errors(
    layout: RankLayout, sizes: ModelSizes, *, model: ModelOfTask
) -> Iterator[UserError]:
    """Yield the error in dividing the experts of ``model`` over devices."""
    divided, config = layout.expert_parallel, model.layout
    if divided == 1:
        return
    if sizes.experts is None:
        sizes_of_keys = {
            "expert_model_parallel_size": config.expert_model_parallel_size,
            "expert_tensor_parallel_size": config.expert_tensor_parallel_size or 1,
        }
        name, size = next((name, size) for name, size in sizes_of_keys.items() if size > 1)
        key, rule = f"{model.section}.{name}", "the model has no experts to divide"
        yield UserError(key, size, rule=rule, remedy=f"Leave out {key}.")
        return
    number, ranks = sizes.experts.num_experts, layout.ranks_per_copy
    if number % divided or ranks % divided:
        largest = max(n for n in range(1, divided + 1) if not (number % n or ranks % n))
        whole = (
            f"the {number} experts of a layer and the {ranks} device(s) that hold the weights once"
        )
        yield expert_division_error(config, whole, section=model.section, largest=largest)


def expert_division_error(
    config: FsdpConfig, whole: str, *, section: str, largest: int
) -> UserError:
    """Return the error about experts whose number of devices does not divide ``whole``.

    Args:
        largest: the largest number of devices that does.
    """
    key, times = f"{section}.expert_model_parallel_size", config.expert_tensor_parallel_size or 1
    rule, remedy = f"must divide {whole}", f"Set {key}={largest}."
    if times > 1:
        other = f"{section}.expert_tensor_parallel_size"
        rule = f"times {other}={times} {rule}"
        remedy = f"Set {key}={largest} and {other}=1."
    return UserError(key, config.expert_model_parallel_size, rule=rule, remedy=remedy)


def _require_no_frozen_router(config: RunConfig | SftConfig) -> None:
    if isinstance(config, RunConfig) and config.actor_rollout_ref.actor.freeze_moe_router:
        rule = "the model has no experts, so there is no router to freeze"
        raise UserError(_FREEZES, True, rule=rule, remedy=f"Leave out {_FREEZES}.")


def _require_no_replay(config: RunConfig | SftConfig) -> None:
    if isinstance(config, RunConfig):
        mode = config.actor_rollout_ref.actor.router_replay.mode
        if mode != "disabled":
            rule = "the model has no experts, so there is no choice to replay"
            remedy = f"Leave out {_MODE} and {_RECORDS}."
            raise UserError(_MODE, mode, rule=rule, remedy=remedy)
