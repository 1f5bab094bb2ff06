# SPDX-License-Identifier: Apache-2.0
"""A command that starts its run again after a failure (``trainer.max_restarts``).

Each start of the run is a process of its own, so that nothing is left of a failed one, not even an
accelerator's context. This process reads the arguments and waits. It never loads torch.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from typing import Any

from tandem.driver.restarts import ConfigT, Failure, Restarts, failure_of
from tandem.errors import UserError
from tandem.runtime.child import ChildEnd, Send, run_in_child

Run = Callable[..., int]
_ASK_TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_restarting(
    config: ConfigT,
    load: Callable[[], Run],
    *,
    reported: Callable[[Callable[[], int]], int],
) -> int:
    """Run a command until it ends without a failure, or is not started again; return its code.

    Args:
        load: imports the function that runs the command.
        reported: calls a function, prints the error that it raises, and returns the exit code.
    """
    restarts = Restarts(config)
    while True:
        end = run_in_child(
            lambda send, config=config: reported(
                lambda: _start(config, load, restarts=restarts, send=send)
            )
        )
        failure = _failure(end)
        following = None if failure is None else restarts.after(failure)
        if following is None:
            return end.code
        restarts.write_records()
        config = following


def _start(config: Any, load: Callable[[], Run], *, restarts: Restarts[Any], send: Send) -> int:
    """Run the command in the child process. Tell the parent about a failure."""
    run = load()
    observer = import_module("tandem.driver.run").Observer(restarts=restarts)
    try:
        return run(config, observer=observer)
    except Exception as error:
        if not isinstance(error, UserError) and not observer.switch.is_pressed:
            send(json.dumps(asdict(failure_of(error))))
        raise


def _failure(end: ChildEnd) -> Failure | None:
    """Return the failure of the child; None after success, a user error or a request to stop."""
    if end.killed_by is not None and end.killed_by not in _ASK_TO_STOP:
        cause = f"the process of the run was killed by {end.killed_by.name}"
        print(f"error: {cause}", file=sys.stderr)
        return None if end.stopped_by is not None else Failure(cause)
    if end.stopped_by is not None or not end.message:
        return None
    return Failure(**json.loads(end.message))
