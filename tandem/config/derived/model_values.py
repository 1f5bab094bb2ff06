# SPDX-License-Identifier: Apache-2.0
"""Values of a model's config.json that are checked when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.errors import UserError

MOST_PARTS = 10_000
"""The most layers of a model, heads and experts of a layer, and numbers of a head. They are gone
through one by one, so that a number which is an error would take all the time and memory there is.
"""


def wrong_value(name: str, value: object, *, rule: str) -> UserError:
    """Return the error about a value of config.json."""
    remedy = "Use the config.json that belongs to the weights."
    return UserError(f"config.json: {name}", value, rule=rule, remedy=remedy)


def require_size(hf_config: Mapping[str, Any], name: str) -> int:
    """Return the value of a key.

    Raises:
        UserError: it is missing, or not a positive integer.
    """
    value = hf_config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise wrong_value(name, value, rule="must be a positive integer")
    return value
