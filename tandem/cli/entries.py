# SPDX-License-Identifier: Apache-2.0
"""verl's entry modules: each is a command with the defaults of one of verl's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Entry:
    """A module of ``tandem.trainer``.

    Attributes:
        command: the command that it runs.
        config_name: the configuration of verl whose defaults it has (``schema.verl_defaults``).
    """

    command: str
    config_name: str


ENTRIES: Mapping[str, Entry] = MappingProxyType(
    {
        "main_ppo": Entry("train", "ppo_trainer"),
        "fsdp_sft_trainer": Entry("sft", "sft_trainer"),
        "sft_trainer": Entry("sft", "sft_trainer_engine"),
    }
)


def spelled_out(words: Sequence[str]) -> list[str]:
    """Return a command line with the name of an entry module replaced by what it means.

    The name is the command, or stands behind ``plan``.

    Example:
        >>> spelled_out(["plan", "sft_trainer", "optim.lr=1e-5"])
        ['plan', 'sft', '--config-name=sft_trainer_engine', 'optim.lr=1e-5']
    """
    is_plan = words[:1] == ["plan"]
    for position, word in enumerate(words if is_plan else words[:1]):
        if word in ENTRIES:
            entry = ENTRIES[word]
            # Training is what is planned unless the line says otherwise.
            command = [] if is_plan and entry.command == "train" else [entry.command]
            option = f"--config-name={entry.config_name}"
            return [*words[:position], *command, option, *words[position + 1 :]]
    return list(words)
