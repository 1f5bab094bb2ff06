# SPDX-License-Identifier: Apache-2.0
"""The effect of each key that was set, and the reasons why some keys have none.

No key is silently without effect. A key is ignored because it is in ``schema.ignored``, because a
``read_if`` of its field or of a section above does not hold, or because of ``read_conditions``.
"""

from __future__ import annotations

from collections.abc import Mapping

from tandem.config.check.read_conditions import RUN_EXCLUSIONS, SFT_EXCLUSIONS
from tandem.config.parse.keys import find_key
from tandem.config.parse.overrides import LoadedConfig
from tandem.config.schema.megatron import SPELLINGS
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

Loaded = LoadedConfig[RunConfig] | LoadedConfig[SftConfig]


def ignored_keys(loaded: Loaded) -> Mapping[str, str]:
    """Return the keys that were set without effect, as they were spelled, with the reason."""
    found = {spelling: _reason(loaded, name) for name, spelling in loaded.set_keys.items()}
    return {spelling: reason for spelling, reason in found.items() if reason}


def key_effects(loaded: Loaded) -> Mapping[str, str]:
    """Return the description of every set key, or why it has no effect, by its spelling."""
    effects: dict[str, str] = {}
    for name, spelling in loaded.set_keys.items():
        key = find_key(type(loaded.config), name)
        effects[spelling] = "" if key is None else key.description
        if spelling in SPELLINGS:
            effects[spelling] = f"read as {name}: {effects[spelling]}"
    return effects | {key: f"no effect: {reason}" for key, reason in ignored_keys(loaded).items()}


def _reason(loaded: Loaded, name: str) -> str:
    key = find_key(type(loaded.config), name)
    if key is not None and key.ignored:
        return key.ignored
    for condition in () if key is None else key.read_if:
        if not condition.holds(loaded.config):
            return condition.reason
    exclusions = SFT_EXCLUSIONS if isinstance(loaded.config, SftConfig) else RUN_EXCLUSIONS
    for exclusion in exclusions:
        is_covered = any(name == known or name.startswith(f"{known}.") for known in exclusion.keys)
        if is_covered and exclusion.holds(loaded.config):
            return exclusion.reason
    return ""
