# SPDX-License-Identifier: Apache-2.0
"""The exception for errors that a user can make and correct.

Every room may raise it. The command line prints it as one line and exits with code 2. Any other
exception that escapes is a defect of tandem and keeps its traceback.
"""

from __future__ import annotations


class _NoValue:
    """The value of an error that concerns no single value."""

    def __repr__(self) -> str:
        return "NO_VALUE"


NO_VALUE = _NoValue()


class UserError(ValueError):
    """A wrong input, described in one line: ``key=value: rule. Remedy.``

    Args:
        key: the configuration key, option, file or column that is wrong.
        value: its value; without it the message begins with the key alone. Text is shown by
            ``repr``, a list as an override would write it.
        rule: the rule that the value breaks, without its full stop.
        remedy: one or more full sentences that say what to change.

    Example:
        >>> raise UserError("data.train_batch_size", 0, rule="must be at least 1",
        ...                 remedy="Set data.train_batch_size=128.")
        UserError: data.train_batch_size=0: must be at least 1. Set data.train_batch_size=128.
    """

    def __init__(
        self, key: str, value: object = NO_VALUE, *, rule: str = "", remedy: str = ""
    ) -> None:
        shown = "" if value is NO_VALUE else f"={shown_value(value)}"
        statement = f"{key}{shown}: {rule}." if rule else key
        super().__init__(f"{statement} {remedy}".strip())
        self.key = key
        self.value = value
        self.rule = rule
        self.remedy = remedy


def shown_value(value: object) -> str:
    """Return a value as messages show it: a list as an override writes it, else by ``repr``."""
    return _listed(value) if isinstance(value, list | tuple) else repr(value)


def _listed(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_listed, value))}]"  # pyright: ignore[reportUnknownArgumentType]
    return str(value)


class RunFailure(Exception):
    """A process or a node of a run failed. The first line says in which step, which one, and why.

    The command line prints it and exits with code 1.
    """
