# SPDX-License-Identifier: Apache-2.0
"""The console that prints the tables of a command."""

from __future__ import annotations

from rich.console import Console


class TableConsole(Console):
    """A console that leaves a reader who has gone to the command.

    Rich's console ends the process with exit code 1, which ``tandem compare`` has for runs that
    differ.
    """

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, as ``print`` does."""
        raise BrokenPipeError("the reader of the standard output has gone")
