# SPDX-License-Identifier: Apache-2.0
"""The check of arguments that a user sets for an engine of another package."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from tandem.errors import UserError

ALLOW_UNTESTED = "allow_untested"
"""An entry of tandem's own: whether any version of the package will do."""


@dataclass(frozen=True, slots=True)
class ArgumentRules:
    """The arguments that a user may not set.

    Attributes:
        section: the section of the configuration that they come from.
        title: what they are arguments of, for messages.
        has_key: argument -> the key of a run that sets it.
        is_tandems: argument -> why tandem sets it.
        own: entries of the section that are tandem's.
    """

    section: str
    title: str
    has_key: Mapping[str, str]
    is_tandems: Mapping[str, str]
    own: Collection[str]


def check_arguments(
    rules: ArgumentRules, given: Mapping[str, Any], *, known: Collection[str]
) -> None:
    """Raise UserError if an argument may not be set, or does not exist.

    Args:
        known: the arguments that exist; empty if that is unknown.
    """
    for name, value in given.items():
        if name in rules.has_key:
            rule, remedy = "has a key of its own", f"Set {rules.has_key[name]} instead."
        elif name in rules.is_tandems:
            rule, remedy = f"is set by tandem: {rules.is_tandems[name]}", "Leave it out."
        elif name == ALLOW_UNTESTED and not isinstance(value, bool):
            rule, remedy = "must be True or False", "Leave it out, or set it to True."
        elif name in rules.own or not known or name in known:
            continue
        else:
            rule, remedy = f"is no argument of {rules.title}", _nearest(name, known)
        raise UserError(f"{rules.section}.{name}", value, rule=rule, remedy=remedy)


def _nearest(name: str, known: Collection[str]) -> str:
    near = get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f"Nearest: {', '.join(near)}." if near else "Leave it out."
