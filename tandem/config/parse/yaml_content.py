# SPDX-License-Identifier: Apache-2.0
"""The content of a YAML or JSON file of the user, in Python's values.

Each failure is one line with a short cause.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from yaml import YAMLError

from tandem.errors import UserError


def read_yaml(path: str, *, key: str | None = None, resolved: bool) -> Any:
    """Read a file.

    Args:
        path: the path of the file; ``~`` is expanded.
        key: the configuration key of ``path``, for messages; None if the file itself is an
            argument of the command.
        resolved: whether ``${...}`` is replaced by the value that it refers to.

    Raises:
        UserError: the file cannot be read, or its content is not YAML.
    """
    try:
        content = OmegaConf.load(Path(os.path.expanduser(path)))
        return OmegaConf.to_container(content, resolve=resolved)
    except FileNotFoundError as error:
        raise _refused(path, key, rule="no such file", remedy="Correct the path.") from error
    except InterpolationResolutionError as error:
        rule = f"has a ${{...}} without a value ({short_cause(error)})"
        remedy = "Export the variable that it names, or correct the file."
        raise _refused(path, key, rule=rule, remedy=remedy) from error
    except (OSError, ValueError, RecursionError, YAMLError, OmegaConfBaseException) as error:
        # OmegaConf raises OSError without a number for a file that holds a single value.
        unread = error.strerror if isinstance(error, OSError) and error.errno else ""
        rule = (
            f"cannot be read ({unread})" if unread else f"is not valid YAML ({short_cause(error)})"
        )
        raise _refused(path, key, rule=rule, remedy="Correct the file.") from error


def short_cause(error: Exception) -> str:
    """Describe in a clause why OmegaConf cannot read or resolve a value."""
    if isinstance(error, RecursionError):
        return "a value contains itself, or is nested too deeply"
    if isinstance(error, OmegaConfBaseException):
        return str(error).partition("\n")[0]  # the lines below tell its types
    return " ".join(str(error).split())[:160]


def _refused(path: str, key: str | None, *, rule: str, remedy: str) -> UserError:
    if key is None:
        return UserError(repr(path), rule=rule, remedy=remedy)
    return UserError(key, path, rule=rule, remedy=remedy)
