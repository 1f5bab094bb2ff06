# SPDX-License-Identifier: Apache-2.0
"""Imports of the user's classes and functions by the names that a configuration gives them.

A name is a dotted path ``package.module:attribute``, or verl's pair of keys ``path`` and ``name``.
The working directory is searched after all other folders. This file imports no third-party package,
so that small processes can use it.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.errors import UserError

DOTTED_FORM = "package.module:function"
PICKLE_SUFFIX = ".pickle"
"""The suffix of a file that holds one pickled function, which the Python API writes."""
PACKAGE_PREFIX = "pkg://"
"""The prefix of an importable module where a file is expected."""
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_dotted(name: str) -> bool:
    """Return whether ``name`` has the form ``package.module:attribute``."""
    return _DOTTED.fullmatch(name) is not None


def import_dotted(key: str, name: str) -> Callable[..., Any]:
    """Import the class or function that the dotted path ``name``, the value of ``key``, names.

    Raises:
        UserError: ``name`` has another form, or its module cannot be imported or lacks the object.
    """
    if not is_dotted(name):
        raise UserError(key, name, rule=f"must have the form {DOTTED_FORM}")
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that a file there hides no installed module
    try:
        found = getattr(import_module(module_name), attribute)
    except ImportError as error:
        raise UserError(
            key,
            name,
            rule=f"module {module_name} cannot be imported ({error})",
            remedy="Install its package, or add its folder to PYTHONPATH.",
        ) from error
    except AttributeError as error:
        raise UserError(
            key,
            name,
            rule=f"module {module_name} has no attribute {attribute!r}",
            remedy=f"Define {attribute} there, or correct the name.",
        ) from error
    except (Exception, SystemExit) as error:  # SystemExit: a script without a __main__ guard
        raise UserError(
            key,
            name,
            rule=f"module {module_name} does not import: {describe(error)}",
            remedy="Correct the module.",
        ) from error
    if not callable(found):
        raise UserError(
            key,
            name,
            rule="is neither a class nor a function",
            remedy=f"Define {attribute} as one, or correct the name.",
        )
    return found


def import_function(key: str, name: str, *, arguments: Sequence[str]) -> Callable[..., Any]:
    """Import what ``import_dotted`` does, and check that it can be called with ``arguments``.

    Raises:
        UserError: see ``import_dotted``; or it takes other arguments.
    """
    found = import_dotted(key, name)
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # some functions of C have none
        return found
    try:
        signature.bind(*arguments)
    except TypeError as error:
        called = f"({', '.join(arguments)})"
        raise UserError(
            key,
            name,
            rule=f"cannot be called with {called}: {error}",
            remedy=f"Define it as {name.partition(':')[2]}{called}.",
        ) from error
    return found


def import_object(section: str, path: str, *, name: str | None) -> Callable[..., Any]:
    """Import the class or function that verl's keys ``<section>.path`` and ``.name`` name.

    Args:
        path: a Python file, ``pkg://package.module``, or a dotted path or the file of a pickled
            function, which need no name.

    Raises:
        UserError: the file is missing or does not import, or it lacks the object.
    """
    if is_dotted(path):
        return import_dotted(f"{section}.path", path)
    if path.endswith(PICKLE_SUFFIX):
        return _unpickle(section, path)
    module = _import_path(section, path)
    found = getattr(module, name or "", None)
    if not callable(found):
        kinds = (inspect.isfunction, inspect.isclass)
        names = [key for key, value in vars(module).items() if any(is_(value) for is_ in kinds)]
        raise UserError(
            f"{section}.name",
            name,
            rule=f"{path} defines no such class or function (it has: {', '.join(names) or 'none'})",
            remedy=f"Set {section}.name.",
        )
    return found


def describe(error: BaseException, files: Collection[str] = ()) -> str:
    """Describe an error in one line: its class, its message, and the line that raised it.

    Args:
        files: the files of the user. If one of them is in the traceback, its last line is named
            instead of the line of the library that it called.
    """
    message = " ".join(str(error).split())[:200]
    # Lone surrogates can be written to few files.
    message = message.encode(errors="backslashreplace").decode()
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if frame.filename in files] or frames
    # A module that is missing is reported by Python's own importer, which tells the user nothing.
    is_known = bool(frames) and not frames[-1].filename.startswith("<frozen ")
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if is_known else ""
    return f"{type(error).__name__}: {message}{where}" if message else type(error).__name__ + where


def _unpickle(section: str, path: str) -> Callable[..., Any]:
    try:
        return pickle.loads(Path(path).read_bytes())
    except Exception as error:
        is_of_script = isinstance(error, AttributeError) and "__main__" in str(error)
        remedy = (
            "Define in a module what the script itself defines and the function only names."
            if is_of_script
            else "Call tandem.train again, with the same version of Python and where the modules "
            "of the function can be imported."
        )
        raise UserError(
            f"{section}.path",
            path,
            rule=f"holds no function that can be loaded here: {describe(error)}",
            remedy=remedy,
        ) from error


def _import_path(section: str, path: str) -> ModuleType:
    try:
        if path.startswith(PACKAGE_PREFIX):
            return import_module(path.removeprefix(PACKAGE_PREFIX))
        return _import_file(section, path)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # SystemExit: a script without a __main__ guard
        raise UserError(
            f"{section}.path",
            path,
            rule=f"does not import: {describe(error, [str(Path(os.path.expanduser(path)))])}",
            remedy="Correct the file.",
        ) from error


@cache  # two functions of one file share its module
def _import_file(section: str, path: str) -> ModuleType:
    file = Path(os.path.expanduser(path))
    if not file.is_file():
        raise UserError(f"{section}.path", path, rule="no such file", remedy="Correct the path.")
    # The file may import its neighbours. They come last, so that they hide no other module.
    sys.path.append(str(file.parent.resolve()))
    module_name = "_".join(("tandem", *section.split("."), file.stem))
    loader = SourceFileLoader(module_name, str(file))
    spec = importlib.util.spec_from_file_location(module_name, file, loader=loader)
    assert spec is not None, "a spec with a loader of its own always exists"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    loader.exec_module(module)
    return module
