# SPDX-License-Identifier: Apache-2.0
"""``tandem plan --memory GIB ARGUMENTS``: the plan for devices that have so much memory each.

The plan is one for another machine. It has the memory keys that a run sets itself on such devices,
and is refused where the run would not fit them. Nothing is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tandem.cli.plan import describe_memory_keys, parse, take_option
from tandem.config.check.device_rules import mcore_key
from tandem.config.derived.pools import CRITIC, REWARD_MODEL
from tandem.config.derived.sizes import ModelSizes
from tandem.config.derived.trained_model import trained_model
from tandem.config.plan.memory import GIB, plan_memory
from tandem.config.plan.memory_choice import choose_memory
from tandem.config.plan.memory_remedy import require_cache, require_memory
from tandem.config.plan.plan import Plan
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.driver.model_checks import read_local_config
from tandem.errors import UserError
from tandem.models.families import decoder_config
from tandem.platforms.names import AUTO
from tandem.platforms.registry import platform_named

MEMORY_OPTION = "--memory"
_REMEDY = "Write the GiB of one device, such as 79 for a card of 80 GB."


def run(arguments: Sequence[str]) -> int:
    """Print the plan; return the exit code."""
    values, words = take_option(
        arguments, MEMORY_OPTION, rule="must be a number above 0", remedy=_REMEDY
    )
    available_bytes = int(_gib(values[-1]) * GIB)
    request = parse(words)
    plan = request.plan
    return request.show(plan if plan.refusals else _fitted(plan, available_bytes))


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise UserError(MEMORY_OPTION, text, rule="must be a number above 0", remedy=_REMEDY)
    return value


def _fitted(plan: Plan, available_bytes: int) -> Plan:
    """Return the plan with the chosen memory keys and the memory with them."""
    config, placement = plan.config, plan.placement
    named = {pool.platform for pool in placement.used_pools}
    if placement.is_mixed or "cpu" in named:
        raise UserError(
            MEMORY_OPTION,
            rule="a run plans the memory of accelerators of one kind, and this one has "
            f"{' and '.join(sorted(named))}",
            remedy=f"Use --elsewhere instead of {MEMORY_OPTION}.",
        )
    model = trained_model(config)
    hf_config = read_local_config(model.config.path)
    sizes = ModelSizes.of(hf_config)
    if sizes is None:
        raise UserError(
            model.key,
            model.config.path,
            rule=f"{MEMORY_OPTION} needs a folder with the model's config.json, and its sizes in "
            "it",
            remedy="Name such a folder. The weights need not be there.",
        )
    auxiliary = _auxiliary_sizes(config)
    recomputes_parts = decoder_config(hf_config) is not None
    has_pages = recomputes_parts and all(map(_has_kernels, named))
    config, chosen = choose_memory(
        config,
        sizes,
        auxiliary=auxiliary,
        available_bytes=available_bytes,
        recomputes_parts=recomputes_parts,
        has_own_kernels=has_pages and mcore_key(config, placement) is None,
    )
    require_memory(
        config,
        sizes,
        auxiliary=auxiliary,
        available_bytes=available_bytes,
        recomputes_parts=recomputes_parts,
    )
    if has_pages and isinstance(config, RunConfig):
        require_cache(config, sizes, available_bytes=available_bytes)
    return replace(
        plan,
        config=config,
        memory=plan_memory(config, sizes, auxiliary=auxiliary, available_bytes=available_bytes),
        run={
            **plan.run,
            "devices": f"{placement.num_devices} of {available_bytes / GIB:g} GiB",
            **describe_memory_keys(chosen),
        },
    )


def _has_kernels(platform: str) -> bool:
    """Return whether a platform has tandem's kernels, as ``auto`` is planned to have."""
    return platform == AUTO or platform_named(platform).kernels == "triton"


def _auxiliary_sizes(config: RunConfig | SftConfig) -> dict[str, ModelSizes]:
    """Return the known sizes of a critic and a reward model that are other models."""
    if isinstance(config, SftConfig):
        return {}
    paths = {CRITIC: config.critic.model.path, REWARD_MODEL: config.reward_model.model.path}
    found = {name: ModelSizes.of(read_local_config(path)) for name, path in paths.items() if path}
    return {name: sizes for name, sizes in found.items() if sizes is not None}
