# SPDX-License-Identifier: Apache-2.0
"""What the keys that were set do, and why some change nothing: no key is silently without effect.

Two kinds: keys that nothing reads (marked at their field), and keys that other keys switch off
(``switches``, ``device_switches``).
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from tandem.config.check.device_conditions import RUN_DEVICE_CONDITIONS, SFT_DEVICE_CONDITIONS
from tandem.config.check.read_conditions import (
    RUN_CONDITIONS,
    SFT_CONDITIONS,
    SHARED_CONDITIONS,
    Condition,
)
from tandem.config.check.section_conditions import (
    CORRECTION_CONDITIONS,
    CRITIC_CONDITIONS,
    REWARD_CONDITIONS,
)
from tandem.config.parse.keys import find_key
from tandem.config.parse.overrides import LoadedConfig
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig


def keys_without_effect(
    loaded: LoadedConfig[RunConfig] | LoadedConfig[SftConfig],
) -> Mapping[str, str]:
    """The keys that were set in vain, as they were spelt -> why."""
    config = loaded.config
    conditions = (
        *CORRECTION_CONDITIONS,
        *CRITIC_CONDITIONS,
        *REWARD_CONDITIONS,
        *RUN_CONDITIONS,
        *RUN_DEVICE_CONDITIONS,
    )
    if isinstance(config, SftConfig):
        conditions = SFT_CONDITIONS + SFT_DEVICE_CONDITIONS
    active = [c for c in (*conditions, *SHARED_CONDITIONS) if c.holds(config)]
    found = {
        spelling: _reason(type(config), name, active=active)
        for name, spelling in loaded.set_keys.items()
    }
    return {spelling: reason for spelling, reason in found.items() if reason}


def key_effects(
    loaded: LoadedConfig[RunConfig] | LoadedConfig[SftConfig],
) -> Mapping[str, str]:
    """Every key that was set, as it was spelt -> what it does, or ``no effect: `` and why."""
    in_vain = keys_without_effect(loaded)
    schema = type(loaded.config)
    effects: dict[str, str] = {}
    for name, spelling in loaded.set_keys.items():
        key = find_key(schema, name)
        described = "" if key is None else key.description
        reason = in_vain.get(spelling)
        effects[spelling] = described if reason is None else f"no effect: {reason}"
    return effects


def _reason(schema: type[BaseModel], name: str, *, active: list[Condition]) -> str:
    key = find_key(schema, name)
    if key is not None and key.no_effect:
        return key.no_effect
    for condition in active:
        if any(name == known or name.startswith(f"{known}.") for known in condition.keys):
            return condition.reason
    return ""
