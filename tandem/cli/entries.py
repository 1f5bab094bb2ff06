# SPDX-License-Identifier: Apache-2.0
"""verl's entry modules: each is a command with the defaults of one of verl's files.

``tandem plan`` also takes the whole command line of a script of verl, with the program that starts
the module: ``tandem plan torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer optim.lr=1e-4``.
"""

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
        "fully_async_main": Entry("train", "fully_async_ppo_trainer"),
        "one_step_off_main": Entry("train", "one_step_off_ppo_trainer"),
        "fsdp_sft_trainer": Entry("sft", "sft_trainer"),
        "sft_trainer": Entry("sft", "sft_trainer_engine"),
    }
)


OTHER_MODULES = {
    f"{package}.fully_async_policy.fully_async_main": "fully_async_main"
    for package in ("verl.experimental", "recipe")
} | {
    f"{package}.one_step_off_policy.main_ppo": "one_step_off_main"
    for package in ("verl.experimental", "recipe")
}
"""The modules of verl that are not in ``verl.trainer``, and their names here."""
_STARTERS = ("python", "python3", "torchrun", "uv")
"""The programs that start a module."""
_PLACES = {"nproc_per_node": "trainer.n_gpus_per_node", "nnodes": "trainer.nnodes"}
"""The options of torchrun that say on how many devices a module runs, and our keys for them."""


def spelled_out(words: Sequence[str]) -> list[str]:
    """Return a command line with the name of an entry module replaced by what it means.

    The name is the command, or stands behind ``plan``, or is started there as in verl's scripts.

    Example:
        >>> spelled_out(["plan", "sft_trainer", "optim.lr=1e-5"])
        ['plan', 'sft', '--config-name=sft_trainer_engine', 'optim.lr=1e-5']
        >>> spelled_out(["plan", "torchrun", "--nnodes=2", "-m", "verl.trainer.sft_trainer"])
        ['plan', 'sft', '--config-name=sft_trainer_engine', 'trainer.nnodes=2']
    """
    is_plan = words[:1] == ["plan"]
    words = _without_starter(words) if is_plan else words
    for position, word in enumerate(words if is_plan else words[:1]):
        if word in ENTRIES:
            entry = ENTRIES[word]
            # Training is what is planned unless the line says otherwise.
            command = [] if is_plan and entry.command == "train" else [entry.command]
            option = f"--config-name={entry.config_name}"
            return [*words[:position], *command, option, *words[position + 1 :]]
    return list(words)


def _without_starter(words: Sequence[str]) -> list[str]:
    """Return a command line with the start of a module replaced by its name and keys."""
    start = next((place for place, word in enumerate(words) if word in _STARTERS), None)
    if start is None or "-m" not in words[start:]:
        return list(words)
    place = words.index("-m", start)
    module = "".join(words[place + 1 : place + 2])
    package, _, name = module.rpartition(".")
    name = OTHER_MODULES.get(module, name)
    is_known = module in OTHER_MODULES or package in ("verl.trainer", "tandem.trainer")
    if not is_known or name not in ENTRIES:
        return list(words)
    given = _options(words[start + 1 : place])
    keys = [
        f"{key}={given[name]}" for name, key in _PLACES.items() if given.get(name, "").isdigit()
    ]
    return [*words[:start], name, *keys, *words[place + 2 :]]


def _options(words: Sequence[str]) -> dict[str, str]:
    """Return the values of options, which stand behind ``=`` or in the next word."""
    found: dict[str, str] = {}
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("--"):
            found[name.replace("-", "_")] = value if equals else following
    return found
