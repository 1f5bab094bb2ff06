# SPDX-License-Identifier: Apache-2.0
"""The loader of the user's reward function, by file and name (verl's ``custom_reward_function.*``).

It executes foreign code, and is therefore called inside reward processes only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.config.schema.imports import import_object
from tandem.errors import UserError

_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass(frozen=True, slots=True)
class CustomReward:
    """The keys ``custom_reward_function.*``; every call receives ``reward_kwargs``."""

    path: str
    name: str
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


def load_custom_reward(custom: CustomReward) -> Callable[..., Any]:
    """Import the file and return its function, which may be a coroutine function.

    Raises:
        UserError: the file is missing or does not import, or the function is missing or cannot be
            called with verl's four arguments.
    """
    function = import_object("custom_reward_function", custom.path, name=custom.name)
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
        pass  # a builtin without a signature
    return function
