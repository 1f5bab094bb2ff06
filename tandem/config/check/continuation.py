# SPDX-License-Identifier: Apache-2.0
"""The settings that differ between a checkpoint and the run that continues from it."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.config.parse.keys import in_override_grammar, keys_of
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

ANOTHER_EXPERIMENT = frozenset(
    {
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        "actor_rollout_ref.actor.loss_agg_mode",
        "actor_rollout_ref.actor.use_kl_loss",
        "actor_rollout_ref.rollout.n",
        "algorithm.adv_estimator",
        "algorithm.use_kl_in_reward",
        "critic.enable",
        "critic.model.path",
        "custom_reward_function.path",
        "custom_reward_function.name",
        "reward_model.enable",
        "reward_model.model.path",
        "model.path",
        *(
            f"{section}.{key}"
            for section in ("actor_rollout_ref.model", "model")
            for key in ("lora_rank", "lora_alpha", "lora_adapter_path")
        ),
    }
)
"""The keys that say what is optimized. A run that changes one of them is another experiment."""

SAME_TRAINED = frozenset(
    {
        "actor_rollout_ref.actor.freeze_vision_tower",
        "actor_rollout_ref.actor.freeze_moe_router",
    }
)
"""The keys that say which weights of a model are trained. Its optimizer has the state of these
weights only, so that no run can go on with another value."""

_KEYS_OF_A_START = frozenset(
    {
        "trainer.default_local_dir",
        "trainer.max_restarts",
        "trainer.resume_mode",
        "trainer.resume_from_path",
        "trainer.val_only",
    }
)
"""The keys that concern a single start of a run."""

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Change:
    """A key with its earlier and its new value in the grammar of overrides."""

    key: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def settings_json(config: RunConfig | SftConfig) -> str:
    """Return the configuration as JSON under the names of its keys, for ``changed_settings``."""
    return config.model_dump_json(indent=2, by_alias=True)


def changed_settings(
    config: RunConfig | SftConfig, earlier: Mapping[str, Any]
) -> tuple[Change, ...]:
    """Return the keys whose values differ from those of an earlier configuration.

    A key that one of the two lacks, because another version of tandem wrote it, is left out. Two
    paths of one file or folder, such as a relative and an absolute one, do not differ.
    """
    return tuple(sorted(_changes(config, earlier), key=lambda change: change.key))


def _changes(config: RunConfig | SftConfig, earlier: Mapping[str, Any]) -> Iterator[Change]:
    current = json.loads(settings_json(config))
    names = keys_of(type(config)).keys() - _KEYS_OF_A_START
    for name in names:
        before, after = _value(earlier, name), _value(current, name)
        if _is_section(before, after, name=name, keys=names):
            continue  # its entries are compared themselves
        if not _are_same(before, after) and _MISSING not in (before, after):
            yield Change(name, in_override_grammar(before), in_override_grammar(after))


def _is_section(before: Any, after: Any, *, name: str, keys: Collection[str]) -> bool:
    """Return whether two values are mappings with the same entries, each of which is a key."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return False
    entries: set[str] = {f"{name}.{entry}" for entry in before}  # pyright: ignore
    return before.keys() == after.keys() and entries <= set(keys)  # pyright: ignore


def _are_same(before: Any, after: Any) -> bool:
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_are_same, before, after))  # pyright: ignore
    if not (isinstance(before, str) and isinstance(after, str)):
        return before == after
    paths = [os.path.expanduser(text) for text in (before, after)]
    return before == after or (all(map(os.path.exists, paths)) and os.path.samefile(*paths))


def _value(tree: Any, name: str) -> Any:
    for part in name.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return _MISSING
        tree = tree[part]  # pyright: ignore[reportUnknownVariableType]
    return tree  # pyright: ignore[reportUnknownVariableType]
