# SPDX-License-Identifier: Apache-2.0
"""The arguments of a command that takes keys, with platform aliases resolved.

Later code compares the names of platforms' records. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from tandem.config.check.platform_rules import known_platforms, placement_errors
from tandem.config.derived.pools import Placement, place_run
from tandem.config.parse.overrides import LoadedConfig, load_config
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError
from tandem.platforms.names import ALONE_IN_FLAGCX, AUTO, GPUS_OF_RAY, platform_name
from tandem.runtime.resources import require_told_apart

ConfigT = TypeVar("ConfigT", RunConfig, SftConfig)


def load_arguments(schema: type[ConfigT], arguments: Sequence[str]) -> LoadedConfig[ConfigT]:
    """Return the configuration of a command; see ``load_config``.

    Raises:
        UserError: an argument is wrong, or names a platform that does not exist.
    """
    loaded = load_config(schema, arguments)
    config = loaded.config
    device = _named(config.trainer.device, key="trainer.device")
    changes = {"trainer": config.trainer.model_copy(update={"device": device})}
    if isinstance(config, RunConfig):
        changes |= {"pools": _with_names(config)}
    return replace(loaded, config=config.model_copy(update=changes))


def check_platforms(config: RunConfig) -> None:
    """Raise UserError if platforms cannot share nodes, or FlagCX cannot connect them.

    Args:
        config: a configuration that ``check_run`` has accepted.
    """
    _check_placement(config, place_run(config))


def with_found(config: RunConfig, placement: Placement, *, found: Mapping[str, str]) -> Placement:
    """Return the placement with the platforms that ``auto`` resolved to.

    Args:
        found: the platform of each used pool, by the pool's name.

    Raises:
        UserError: ``check_run`` or ``check_platforms`` rejects these platforms.
    """
    pools = tuple(
        replace(pool, platform=found.get(pool.name, pool.platform)) for pool in placement.pools
    )
    known = replace(placement, pools=pools)
    for error in placement_errors(config, known):
        raise error
    _check_placement(config, known)
    return known


def _check_placement(config: RunConfig, placement: Placement) -> None:
    require_told_apart(
        (device.node, "GPU", pool.platform)
        for pool in placement.used_pools
        if pool.platform in GPUS_OF_RAY
        for device in placement.devices_of(pool)
    )
    platforms = list(dict.fromkeys(known_platforms(placement)))
    alone = ALONE_IN_FLAGCX.intersection(platforms)
    if config.pools.transport == "flagcx" and len(platforms) > 1 and alone:
        raise UserError(
            "pools.transport",
            "flagcx",
            rule=f"the pools have {' and '.join(platforms)}, and FlagCX connects {min(alone)} to "
            "no other vendor",
            remedy="Set pools.transport=staged.",
        )


def _with_names(config: RunConfig) -> object:
    pools, named = config.pools, config.pools.named
    changes = {
        task.replace("-", "_"): getattr(pools, task.replace("-", "_")).model_copy(
            update={"platform": _named(name, key=f"pools.{task}.platform")}
        )
        for task, name in named.items()
    }
    return pools.model_copy(update=changes)


def _named(name: str, *, key: str) -> str:
    return name if name == AUTO else platform_name(name, key=key)
