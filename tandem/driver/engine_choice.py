# SPDX-License-Identifier: Apache-2.0
"""``rollout.name``: ``auto`` becomes an engine, and a named engine must be there.

verl's scripts all name vLLM or SGLang. With verl's defaults such a name is a preference: if the
package is missing, another engine generates, and a warning says so. In tandem's own commands a
missing engine is an error.
Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from tandem.config.derived.experts import is_expert_family
from tandem.config.derived.pools import place_run
from tandem.config.derived.trained_model import trained_model
from tandem.config.parse.overrides import LoadedConfig
from tandem.config.schema.rollout import VERLS_ENGINES
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.driver.model_checks import max_positions, read_local_config
from tandem.errors import UserError
from tandem.rollout.argument_check import ALLOW_UNTESTED
from tandem.rollout.attached.choice import require_servers
from tandem.rollout.choice import (
    EngineChoice,
    Problem,
    choose_engine,
    hf_warning,
    problem_of,
)
from tandem.rollout.sglang.keys import PYTHON, SECTION, check_sglang_arguments
from tandem.rollout.vllm.keys import check_arguments

ConfigT = TypeVar("ConfigT", RunConfig, SftConfig)

_KEY = "actor_rollout_ref.rollout.name"
_SPLIT = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_DIVIDE = "actor_rollout_ref.rollout.expert_parallel_size"
_AUTO = "auto"
_GENERATORS = {"native": "tandem's native engine", "vllm": "vLLM", "hf": "transformers' generate"}
_CHECKS = {"vllm": check_arguments, "sglang": check_sglang_arguments}
_TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
"""Engines of other packages."""


def with_engine(loaded: LoadedConfig[ConfigT]) -> LoadedConfig[ConfigT]:
    """Return ``loaded`` with the name of an engine in place of ``auto``.

    ``auto`` stays if config.json is not on this machine; the process that generates then chooses. A
    warning says that transformers generates, or what replaces the engine that verl's script names.
    """
    config = loaded.config
    if not isinstance(config, RunConfig):
        return loaded
    named = config.actor_rollout_ref.rollout.name
    hf_config = read_local_config(config.actor_rollout_ref.model.path)
    is_wish = loaded.follows_verl and named in VERLS_ENGINES
    problem = _problem(config, hf_config) if is_wish else None
    if named != _AUTO and problem is None:
        return loaded
    choice = choose_engine(hf_config) if "model_type" in hf_config else EngineChoice(_AUTO)
    told: tuple[str, ...] = ()
    if problem is not None:
        told = (_replaced(named, problem, by=choice.name),)
    elif choice.name == "hf":
        told = (hf_warning(choice.reason),)
    roles = config.actor_rollout_ref
    rollout = roles.rollout.model_copy(update={"name": choice.name})
    changes = {"actor_rollout_ref": roles.model_copy(update={"rollout": rollout})}
    return replace(
        loaded,
        config=config.model_copy(update=changes),
        warnings=(*loaded.warnings, *told),
    )


def require_engine(config: RunConfig, hf_config: Mapping[str, Any] | None = None) -> None:
    """Raise UserError if the named engine is missing, does not compute the model, or does not take
    an argument that was set for it.

    Args:
        hf_config: the content of the model's config.json, if it is known.
    """
    rollout = config.actor_rollout_ref.rollout
    problem = _problem(config, hf_config)
    if problem is None:
        if config.actor_rollout_ref.rollout.attaches_servers:
            require_servers(
                rollout,
                hf_config or {},
                max_length=trained_model(config).max_tokens,
                num_ranks=place_run(config).pool_of("generate").num_devices,
            )
        elif rollout.name in _CHECKS:
            _CHECKS[rollout.name](_arguments(config))
        return
    remedy = "Leave the key out, and tandem chooses an engine."
    if problem.install:
        remedy = f"Install it with {problem.install}, or leave the key out."
    raise UserError(_KEY, rollout.name, rule=problem.reason, remedy=remedy)


def _problem(config: RunConfig, hf_config: Mapping[str, Any] | None) -> Problem | None:
    """Return why the named engine cannot be used; None if no such reason is known."""
    name = config.actor_rollout_ref.rollout.name
    given = _arguments(config)
    problem = problem_of(
        name,
        hf_config,
        allows_untested=given.get(ALLOW_UNTESTED) is True,
        interpreter=_interpreter(given) if name == "sglang" else None,
        is_elsewhere=config.actor_rollout_ref.rollout.attaches_servers,
    )
    if name not in _TITLES or problem is not None:
        return problem
    title = _TITLES[name]
    num_ranks = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    is_elsewhere = config.actor_rollout_ref.rollout.attaches_servers
    split = "" if is_elsewhere else _split_problem(config, hf_config or {})
    if split:
        return Problem(f"{_SPLIT}={num_ranks}: {split}")
    if config.actor_rollout_ref.rollout.attaches_servers and _is_staged(config):
        return Problem(
            "with enable_param_async or enable_dual_buffer, servers (engine_kwargs.vllm.urls) do "
            "not generate"
        )
    if is_elsewhere and config.actor_rollout_ref.model.trains_adapters:
        return Problem("servers (engine_kwargs.vllm.urls) with adapters (LoRA) are not built")
    model, limit = trained_model(config), max_positions(hf_config or {})
    if limit is not None and model.max_tokens > limit:
        return Problem(
            f"{model.max_tokens_key} = {model.max_tokens}, and {title} computes at most "
            f"the {limit} positions that the model is made for"
        )
    return None


def _interpreter(given: Mapping[str, Any]) -> str | None:
    """Return the interpreter that is named for SGLang. Raise UserError if it is not text."""
    named = given.get(PYTHON)
    if named is not None and not isinstance(named, str):
        raise UserError(
            f"{SECTION}.{PYTHON}",
            named,
            rule="must be the path of an interpreter",
            remedy="Write e.g. .venv-sglang/bin/python.",
        )
    return named


def _split_problem(config: RunConfig, hf_config: Mapping[str, Any]) -> str:
    """Return why the model or the devices cannot be divided into engines; "" if they can."""
    rollout, placement = config.actor_rollout_ref.rollout, place_run(config)
    num_ranks, pool = rollout.tensor_model_parallel_size, placement.pool_of("generate")
    if num_ranks == 1:
        return ""
    if pool.num_devices % num_ranks:
        return f"it must divide the {pool.num_devices} device(s) that generate"
    nodes = [device.node for device in placement.devices_of(pool)]
    if nodes[::num_ranks] != nodes[num_ranks - 1 :: num_ranks]:
        return "the devices of an engine must be on one node"
    if _is_staged(config):
        return "with enable_param_async or enable_dual_buffer an engine must be on one device"
    if rollout.name == "sglang":
        if config.trainer.device != "cpu":
            return "an engine of SGLang over several devices is built for trainer.device=cpu"
        if is_expert_family(hf_config.get("model_type")):
            return "with experts, an engine of SGLang must be on one device"
    return _size_problem(config, hf_config)


def _size_problem(config: RunConfig, hf_config: Mapping[str, Any]) -> str:
    """Return why the sizes of the model cannot be divided over an engine; "" if they can."""
    rollout = config.actor_rollout_ref.rollout
    num_ranks = rollout.tensor_model_parallel_size
    experts = () if rollout.expert_parallel_size > 1 else ("moe_intermediate_size",)
    shared = ("intermediate_size", "shared_expert_intermediate_size")
    for name in ("num_attention_heads", *shared, *experts):
        size = hf_config.get(name)
        if isinstance(size, int) and size % num_ranks:
            remedy = "" if name not in experts else f"; {_DIVIDE}={num_ranks} divides the experts"
            return f"it must divide the model's {name}, which is {size}{remedy}"
    num_kv_heads = hf_config.get("num_key_value_heads")
    if isinstance(num_kv_heads, int) and num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        return f"it must divide num_key_value_heads={num_kv_heads}, or be a multiple of it"
    return ""


def _is_staged(config: RunConfig) -> bool:
    """Return whether weights arrive while an engine on another device generates."""
    rollout = config.actor_rollout_ref.rollout
    is_asked = rollout.enable_param_async or rollout.enable_dual_buffer
    return is_asked and place_run(config).generates_apart


def _arguments(config: RunConfig) -> Mapping[str, Any]:
    """Return ``engine_kwargs`` of the named engine."""
    rollout = config.actor_rollout_ref.rollout
    kwargs = rollout.engine_kwargs
    return {"vllm": kwargs.vllm, "sglang": kwargs.sglang}.get(rollout.name, {})


def _replaced(named: str, problem: Problem, *, by: str) -> str:
    generator = _GENERATORS.get(by, "the engine that suits the model's family")
    install = f". To use it: {problem.install}" if problem.install else ""
    return f"{_KEY}={named}: {problem.reason}, so {generator} generates{install}"
