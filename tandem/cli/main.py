# SPDX-License-Identifier: Apache-2.0
"""``tandem``: names the commands and runs the one that is asked for.

A command's module is loaded only when its command is chosen, so that help needs no torch. A mistake
of the user ends in one line on stderr and exit code 2; anything else keeps its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType

from tandem.errors import UserError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


@dataclass(frozen=True, slots=True)
class Command:
    """Where a command lives (``run(arguments) -> exit code``) and what it does."""

    module: str
    summary: str


COMMANDS = MappingProxyType(
    {
        "quickstart": Command(
            "tandem.cli.quickstart.command", "train a small model on this machine"
        ),
        "train": Command("tandem.cli.train", "reinforcement learning: [RECIPE.yaml] key=value ..."),
        "sft": Command("tandem.cli.sft", "supervised fine-tuning: [RECIPE.yaml] key=value ..."),
        "plan": Command("tandem.cli.plan", "check train's arguments, start nothing: [--json] ..."),
        "report": Command("tandem.cli.report", "make the HTML report of a run: RUN_FOLDER"),
        "export": Command("tandem.cli.export", "write a checkpoint as a Hugging Face model folder"),
        "doctor": Command("tandem.cli.doctor", "show devices, packages and what is missing"),
    }
)


COMMANDS_WITH_KEYS = ("train", "sft", "plan")
"""Their help lists keys, and needs nothing that they need."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default with the arguments of the process; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0 if words else EXIT_USER_ERROR
    try:
        if words[0] in COMMANDS_WITH_KEYS and {"-h", "--help"} & set(words[1:]):
            import_module("tandem.cli.keys").print_help(words[0])
            return 0
        return _load(words[0])(words[1:])
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USER_ERROR
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "tandem":
            raise
        print(
            f"error: import {error.name}: the package is missing. Install tandem's requirements "
            "(pip install tandem); tandem doctor lists what is missing and what it is for.",
            file=sys.stderr,
        )
        return EXIT_USER_ERROR
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def help_text() -> str:
    """What ``tandem --help`` prints."""
    lines = ["usage: tandem COMMAND ...", "", "commands:"]
    lines += [f"  {name:<12}{command.summary}" for name, command in COMMANDS.items()]
    lines += [
        "",
        "Keys are verl's: tandem train data.train_files=FILE actor_rollout_ref.model.path=M ...",
        "tandem plan with the same arguments tells what a run would do.",
        "tandem plan --help lists all keys.",
    ]
    return "\n".join(lines)


def _load(name: str) -> Callable[[Sequence[str]], int]:
    command = COMMANDS.get(name)
    if command is None:
        raise UserError(f"{name!r}: no such command. Choose among {', '.join(COMMANDS)}.")
    run: Callable[[Sequence[str]], int] = import_module(command.module).run
    return run


if __name__ == "__main__":
    sys.exit(main())
