# SPDX-License-Identifier: Apache-2.0
"""The ``tandem`` command: the table of its subcommands, and the run of one.

A subcommand's module is loaded only when it is chosen, and training code only after the arguments
have been checked: help and wrong arguments need no torch. A user error ends in one line on stderr
and exit code 2; any other error keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

from tandem import __version__
from tandem.cli.entries import spelled_out
from tandem.driver.streams import open_closed_streams
from tandem.errors import RunFailure, UserError
from tandem.runtime.os_settings import no_collection
from tandem.runtime.torchrun import run_as_launched, with_launched_devices

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
_LIMITS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS),
    *(errno.EIO, errno.EMFILE, errno.ENFILE),
)
"""Errors of the machine, such as a full disk or too few descriptors, which are no defect."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the table.

    Attributes:
        module: the module with ``run(arguments) -> exit code``.
        parser: a module with ``parse(arguments)``, whose result is passed to ``run``; "" if ``run``
            takes the arguments themselves.
        restarts: whether ``run`` may be started again, as ``trainer.max_restarts`` says.
    """

    module: str
    summary: str
    parser: str = ""
    restarts: bool = False


COMMANDS = MappingProxyType(
    {
        "quickstart": Command("tandem.quickstart.command", "train a small model on this machine"),
        "train": Command(
            "tandem.driver.train",
            "reinforcement learning: [RECIPE.yaml] key=value ...",
            parser="tandem.cli.train",
            restarts=True,
        ),
        "sweep": Command(
            "tandem.driver.sweep",
            "several runs of train over one base: [RECIPE.yaml] key=a,b,c ...",
            parser="tandem.cli.sweep",
        ),
        "sft": Command(
            "tandem.driver.sft",
            "supervised fine-tuning: [RECIPE.yaml] key=value ...",
            parser="tandem.cli.sft",
            restarts=True,
        ),
        "plan": Command(
            "tandem.cli.plan_here",
            "check what train or sft would do, start nothing: [--json] [--elsewhere] [sft] ...",
            parser="tandem.cli.plan",
        ),
        "keys": Command("tandem.cli.keys", "list keys with their meaning: [sft] [WORD ...]"),
        "prepare": Command(
            "tandem.cli.prepare", "write a data set: gsm8k or geo3k --output FOLDER"
        ),
        "sample": Command(
            "tandem.cli.sample_here",
            "print what a trained model answers: RUN_FOLDER PROMPT",
            parser="tandem.cli.sample",
        ),
        "report": Command("tandem.cli.report", "make the HTML report of a run: RUN_FOLDER"),
        "compare": Command("tandem.cli.compare", "compare two runs of one recipe: RUN_A RUN_B"),
        "export": Command("tandem.cli.export", "write a checkpoint as a Hugging Face model folder"),
        "doctor": Command("tandem.cli.doctor", "show devices and packages, or check a run: [RUN]"),
        "certify": Command("tandem.cli.certify", "test the platform of this machine"),
    }
)


PLANS = MappingProxyType(
    {
        "--memory": Command("tandem.cli.plan_memory", "the plan for devices of so many GiB"),
        "--times": Command("tandem.cli.plan_times", "the plan, and a better split of the devices"),
        "--elsewhere": Command("tandem.cli.plan", "the plan for another machine"),
    }
)
"""The commands behind options of ``plan``, the first one that is given. None reads the data."""

COMMANDS_WITH_KEYS = ("train", "sft", "plan")
"""The commands whose help lists keys, without loading their modules."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default with the arguments of the process; return the exit code."""
    open_closed_streams()
    words = spelled_out(sys.argv[1:] if arguments is None else arguments)
    takes_keys = bool(words) and words[0] in COMMANDS_WITH_KEYS
    if not takes_keys:
        return _run_reported(words)
    return _reported(lambda: run_as_launched(_run_reported, words))


def _run_reported(words: Sequence[str]) -> int:
    """Run one command. Return the exit code; print an error of the user as one line."""
    return _reported(lambda: _dispatch(words))


def _reported(body: Callable[[], int]) -> int:
    try:
        code = body()
        sys.stdout.flush()  # here, where errors of writing are still caught
        return code
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USER_ERROR
    except RunFailure as failure:
        print(f"error: {failure}", file=sys.stderr)
        return EXIT_FAILURE
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "tandem":
            raise
        print(
            f"error: import {error.name}: the package is missing. Install tandem's requirements "
            "(pip install . in a checkout); tandem doctor lists missing packages and their uses.",
            file=sys.stderr,
        )
        return EXIT_USER_ERROR
    except BrokenPipeError:
        _discard_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in _LIMITS:
            raise
        remedy = " (ulimit -n sets how many)" if error.errno == errno.EMFILE else ""
        print(f"error: {_place(error)}{os.strerror(error.errno)}{remedy}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _place(error: OSError) -> str:
    """Return the file of an error with a colon, "" for an error that has none."""
    if error.filename is not None:
        return f"{error.filename}: "
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ""
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
        return "standard output: "
    return "a file or the standard output: "


def _discard_output() -> None:
    """Send the rest of the output nowhere: at its end the interpreter writes it once more."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, sys.stdout.fileno())
    os.close(sink)


def help_text() -> str:
    """Return the text of ``tandem --help``."""
    lines = ["usage: tandem COMMAND ...", "", "commands:"]
    lines += [f"  {name:<12}{command.summary}" for name, command in COMMANDS.items()]
    lines += [
        "",
        "Keys are verl's: tandem train data.train_files=FILE actor_rollout_ref.model.path=M ...",
        "tandem plan with the same arguments shows what a run would do.",
        "tandem keys WORD lists the keys with a word; tandem --version tells the version.",
    ]
    return "\n".join(lines)


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0 if words else EXIT_USER_ERROR
    name, *arguments = words
    if name == "--version":
        print(f"tandem {__version__}")
        return 0
    if name not in COMMANDS_WITH_KEYS:
        return _run(name, arguments)
    if {"-h", "--help"} & set(arguments):
        import_module("tandem.cli.keys").print_help(name, arguments)
        return 0
    return _run(name, with_launched_devices(arguments))


def _run(name: str, arguments: Sequence[str]) -> int:
    command = COMMANDS.get(name)
    if name == "plan":
        given = {word.split("=")[0] for word in arguments}
        command = next((PLANS[option] for option in PLANS if option in given), command)
    if command is None:
        raise UserError(
            repr(name), rule="no such command", remedy=f"Choose among {', '.join(COMMANDS)}."
        )
    # Otherwise torch's C++ warns on stderr about host names without an address.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with no_collection():
        parser = import_module(command.parser) if command.parser else None
        parsed: Any = arguments if parser is None else parser.parse(arguments)
    if command.parser:  # show that the command has started: the imports that follow take seconds
        print(f"tandem {__version__}: {name}", file=sys.stderr, flush=True)
    if command.restarts and parsed.trainer.max_restarts > 0:
        restarting = import_module("tandem.cli.restarting")
        return restarting.run_restarting(parsed, lambda: _load(command), reported=_reported)
    return _load(command)(parsed)


def _load(command: Command) -> Callable[..., int]:
    """Import the function that runs a command."""
    with no_collection():
        return import_module(command.module).run


if __name__ == "__main__":
    sys.exit(main())
