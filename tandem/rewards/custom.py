# SPDX-License-Identifier: Apache-2.0
"""The loader of the user's reward function, by file and name (verl's ``custom_reward_function.*``).

It executes foreign code, and is therefore called inside reward processes only. Each error is a
``UserError`` that names the key: the file is missing or does not import, or the function is missing
or cannot be called with verl's four arguments.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.errors import UserError

PACKAGE_PREFIX = "pkg://"
"""``path=pkg://some.module`` names an importable module instead of a file."""
_MODULE_NAME = "tandem_custom_reward"
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass(frozen=True, slots=True)
class CustomReward:
    """The keys ``custom_reward_function.*``; every call is passed ``reward_kwargs``."""

    path: str
    name: str
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


def load_custom_reward(custom: CustomReward) -> Callable[..., Any]:
    """Import the file and return its function, which may be a coroutine function.

    Raises:
        UserError: the function cannot be loaded or called.
    """
    module = _import(custom.path)
    function = getattr(module, custom.name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(
            "custom_reward_function.name",
            custom.name,
            rule=f"{custom.path} defines no such function (it has: {', '.join(names) or 'none'})",
            remedy="Set custom_reward_function.name.",
        )
    arguments = dict.fromkeys(_ARGUMENTS) | dict(custom.reward_kwargs)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise UserError(
            "custom_reward_function.name",
            custom.name,
            rule=f"cannot be called with {', '.join(arguments)}: {error}",
            remedy="Change its parameters or reward_kwargs.",
        ) from error
    except ValueError:
        pass  # a builtin without a signature: its first call will show
    return function


def describe(error: BaseException) -> str:
    """Describe an error in one line: its class, its message, and the line that raised it."""
    message = " ".join(str(error).split())[:200]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message}{where}" if message else type(error).__name__ + where


def _import(path: str) -> ModuleType:
    try:
        if path.startswith(PACKAGE_PREFIX):
            return importlib.import_module(path.removeprefix(PACKAGE_PREFIX))
        return _import_file(path)
    except UserError:
        raise
    # SystemExit too: a script without a __main__ guard ends like that.
    except (Exception, SystemExit) as error:
        raise UserError(
            "custom_reward_function.path",
            path,
            rule=f"does not import: {describe(error)}",
            remedy="Correct the file.",
        ) from error


def _import_file(path: str) -> ModuleType:
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(
            "custom_reward_function.path", path, rule="no such file", remedy="Correct the path."
        )
    # The file may import its neighbours. They come last, so that they hide no other module.
    sys.path.append(str(file.parent.resolve()))
    loader = SourceFileLoader(_MODULE_NAME, str(file))
    spec = importlib.util.spec_from_file_location(_MODULE_NAME, file, loader=loader)
    assert spec is not None, "a spec with a loader of its own always exists"
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE_NAME] = module
    loader.exec_module(module)
    return module
