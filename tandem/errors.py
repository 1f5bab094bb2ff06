# SPDX-License-Identifier: Apache-2.0
"""The exceptions that the command line prints without a traceback.

It exits with code 2 after a ``UserError`` and with code 1 after a ``RunFailure``. Any other
exception is a defect of tandem and keeps its traceback.
"""

from __future__ import annotations


class _NoValue:
    def __repr__(self) -> str:
        return "NO_VALUE"


NO_VALUE = _NoValue()


class UserError(ValueError):
    """A wrong input, described in one line: ``key=value: rule. Remedy.``

    Args:
        key: the configuration key, option, file or column that is wrong.
        value: its value, if there is one.
        rule: the rule that the value breaks, without a full stop.
        remedy: one or more sentences that say what to change.

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
    """Format a value for a message: a list as in a command-line override, else by ``repr``."""
    return _listed(value) if isinstance(value, list | tuple) else repr(value)


def _listed(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_listed, value))}]"  # pyright: ignore[reportUnknownArgumentType]
    return str(value)


class RunFailure(Exception):
    """A failure of a process or a node. Its first line names the step, the place and the cause.

    Attributes:
        step: the step that failed; None outside of steps.
        restarts_elsewhere: whether the node that drives the run starts it again.
    """

    def __init__(
        self, text: str, *, step: int | None = None, restarts_elsewhere: bool = False
    ) -> None:
        super().__init__(text)
        self.step = step
        self.restarts_elsewhere = restarts_elsewhere
