# SPDX-License-Identifier: Apache-2.0
"""``tandem plan --memory GIB ARGUMENTS``: the plan for devices that have so much memory each.

The plan is one for another machine. It has the memory keys that a run sets itself on such devices,
and is refused where the run would not fit them. Nothing is started.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tandem.cli.plan import auxiliary_sizes, describe_memory_keys, parse, take_option
from tandem.config.check.device_rules import mcore_key
from tandem.config.derived.pools import Pool
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
from tandem.planner.task_times import TIMES_OPTION
from tandem.platforms.names import AUTO, VARIABLE, platform_name
from tandem.platforms.registry import platform_named

MEMORY_OPTION = "--memory"
_RULE = "must be a number of GiB from 1 to 100000"
_REMEDY = "Write the GiB of one device, such as 79 for a card of 80 GB."


def run(arguments: Sequence[str]) -> int:
    """Print the plan; return the exit code."""
    if any(word.split("=")[0] == TIMES_OPTION for word in arguments):
        raise UserError(
            MEMORY_OPTION,
            rule=f"cannot be given with {TIMES_OPTION}, whose plan has no memory of devices",
            remedy="Leave one of them out.",
        )
    values, words = take_option(arguments, MEMORY_OPTION, rule=_RULE, remedy=_REMEDY)
    available_bytes = int(_gib(values[-1]) * GIB)
    request = parse(words)
    plan = request.plan
    return request.show(plan if plan.refusals else _fitted(plan, available_bytes))


def _gib(text: str) -> float:
    is_number = re.fullmatch(r"[0-9]+(\.[0-9]*)?", text) is not None
    if not is_number or not 1 <= float(text) <= 100_000:
        raise UserError(MEMORY_OPTION, text, rule=_RULE, remedy=_REMEDY)
    return float(text)


def _fitted(plan: Plan, available_bytes: int) -> Plan:
    """Return the plan with the chosen memory keys and the memory with them."""
    config, placement = plan.config, plan.placement
    named = {_platform(pool) for pool in placement.used_pools}
    named = named - {AUTO} or named
    if len(named) > 1 or not all(map(_has_own_memory, named)):
        raise UserError(
            MEMORY_OPTION,
            rule="a run plans the memory of accelerators of one kind, and this one has "
            f"{' and '.join(sorted(named))}",
            remedy=f"Use --elsewhere instead of {MEMORY_OPTION}.",
        )
    hf_config, sizes = _read_model(config)
    found = auxiliary_sizes(config)
    auxiliary = {name: own for name, own in found.items() if own is not None}
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
    num_devices = sum(pool.num_devices for pool in placement.used_pools)
    return replace(
        plan,
        config=config,
        memory=plan_memory(config, sizes, auxiliary=auxiliary, available_bytes=available_bytes),
        run={
            **plan.run,
            "devices": f"{num_devices} of {available_bytes / GIB:g} GiB",
            **describe_memory_keys(chosen),
        },
    )


def _read_model(config: RunConfig | SftConfig) -> tuple[Mapping[str, Any], ModelSizes]:
    """Return the config.json of the trained model, and the sizes in it."""
    model = trained_model(config)
    hf_config = read_local_config(model.config.path)
    if not hf_config:
        raise UserError(
            model.key,
            model.config.path,
            rule=f"{MEMORY_OPTION} needs a folder with the model's config.json",
            remedy="Name such a folder. The weights need not be there.",
        )
    sizes = ModelSizes.of(hf_config)
    if sizes is None:
        raise UserError(
            model.key,
            model.config.path,
            rule="its config.json has other names of sizes than the plan knows, so that a run does "
            "not plan its memory",
            remedy=f"Use --elsewhere instead of {MEMORY_OPTION}.",
        )
    return hf_config, sizes


def _platform(pool: Pool) -> str:
    """Return the platform of a pool; for ``auto``, that of the environment if it names one."""
    wanted = os.environ.get(VARIABLE, "")
    return (
        platform_name(wanted, key=VARIABLE) if wanted and pool.platform == AUTO else pool.platform
    )


def _has_own_memory(platform: str) -> bool:
    return platform == AUTO or platform_named(platform).has_own_memory


def _has_kernels(platform: str) -> bool:
    """Return whether a platform has tandem's kernels, as ``auto`` is planned to have."""
    return platform == AUTO or platform_named(platform).kernels == "triton"
