# SPDX-License-Identifier: Apache-2.0
"""The arguments of a command that takes keys, checked, with platform aliases resolved.

Later code compares the names of platforms' records. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tandem.config.check.platform_rules import known_platforms, placement_errors
from tandem.config.check.rules import (
    check_run,
    check_sft,
    require_random_order,
    require_reader_of_critic,
    unbuilt_run,
    unbuilt_sft,
)
from tandem.config.derived.pools import Placement, place_run
from tandem.config.parse.overrides import LoadedConfig, load_config
from tandem.config.plan.plan import run_warnings
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.driver.engine_choice import require_engine, with_engine
from tandem.errors import UserError
from tandem.platforms.names import ALONE_IN_FLAGCX, AUTO, GPUS_OF_RAY, platform_name
from tandem.runtime.resources import require_told_apart

ConfigT = TypeVar("ConfigT", RunConfig, SftConfig)


def load_arguments(
    schema: type[ConfigT], arguments: Sequence[str], *, values: Mapping[str, Any] | None = None
) -> LoadedConfig[ConfigT]:
    """Return the configuration of a command after all checks of its keys but ``refusals``.

    Args:
        values: keys with Python values, which win over ``arguments``.

    Raises:
        UserError: an argument is wrong, names a platform that does not exist, or contradicts
            another one; or a critic is set up, and the estimator that would need it is not named.
    """
    loaded = with_engine(
        _named_platforms(_validated(load_config(schema, arguments, values=values)))
    )
    config = loaded.config
    if isinstance(config, SftConfig):
        check_sft(config)
        return loaded
    require_reader_of_critic(config, loaded.set_keys)
    require_random_order(config, loaded.unread)
    check_run(config)
    check_platforms(config, place_run(config))
    return with_engine(loaded)


def refusals(config: RunConfig | SftConfig) -> Iterator[UserError]:
    """Yield the errors about features that are not built, which a plan can show nevertheless."""
    yield from unbuilt_sft(config) if isinstance(config, SftConfig) else unbuilt_run(config)


def _validated(loaded: LoadedConfig[ConfigT]) -> LoadedConfig[ConfigT]:
    """Return ``loaded`` without the default validation file if that does not exist."""
    data = loaded.config.data
    missing = [name for name in data.val_files if not os.path.exists(os.path.expanduser(name))]
    if "data.val_files" in loaded.set_keys or not missing:
        return loaded
    changes = {"data": data.model_copy(update={"val_files": ()})}
    note = f"data.val_files is not set, and its default {missing[0]} does not exist: no validation"
    return replace(
        loaded,
        config=loaded.config.model_copy(update=changes),
        warnings=(*loaded.warnings, note),
    )


def _named_platforms(loaded: LoadedConfig[ConfigT]) -> LoadedConfig[ConfigT]:
    """Return ``loaded`` with the names of platforms' records in place of their aliases."""
    config = loaded.config
    device = _named(config.trainer.device, key="trainer.device")
    changes = {"trainer": config.trainer.model_copy(update={"device": device})}
    if isinstance(config, RunConfig):
        changes |= {"pools": _with_names(config)}
    return replace(loaded, config=config.model_copy(update=changes))


def load_runnable(
    schema: type[ConfigT], arguments: Sequence[str], *, values: Mapping[str, Any] | None = None
) -> LoadedConfig[ConfigT]:
    """Return the configuration of a command that runs: ``load_arguments`` without refusals.

    Raises:
        UserError: as ``load_arguments``, or the rollout engine that is named is missing.
    """
    loaded = load_arguments(schema, arguments, values=values)
    for error in refusals(loaded.config):
        raise error
    config = loaded.config
    if isinstance(config, RunConfig):
        require_engine(config)
    return replace(loaded, warnings=(*loaded.warnings, *run_warnings(config)))


def with_found(config: RunConfig, placement: Placement, *, found: Mapping[str, str]) -> Placement:
    """Return the placement with the platforms that ``auto`` resolved to.

    Args:
        found: the platform of each used pool, by the pool's name.

    Raises:
        UserError: platforms cannot share nodes, or cannot be connected.
    """
    pools = tuple(
        replace(pool, platform=found.get(pool.name, pool.platform)) for pool in placement.pools
    )
    known = replace(placement, pools=pools)
    for error in placement_errors(config, known):
        raise error
    check_platforms(config, known)
    return known


def check_platforms(config: RunConfig, placement: Placement) -> None:
    """Raise UserError if platforms cannot share nodes, or FlagCX cannot connect them."""
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
