# SPDX-License-Identifier: Apache-2.0
"""One run on several nodes that were all given the same command.

The first drives the run and the others lend it their devices: they join the first one's Ray
cluster, wait for the end of the run and end as it did. A node's Ray processes end with it, however
it ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import IO, Any

from tandem.errors import UserError
from tandem.platforms.record import Platform
from tandem.runtime.cluster import ClusterPlan, node_resources
from tandem.runtime.die_with_parent import die_with_parent
from tandem.runtime.failure import NodeFailure
from tandem.runtime.probe_devices import own_devices
from tandem.runtime.ray_env import ray_environment
from tandem.runtime.rendezvous import Attendance, Meeting

_SHUTDOWN_S = 5.0
_LAST_LINES = 5


def run_on_nodes(
    plan: ClusterPlan,
    body: Callable[[Meeting | None], int],
    *,
    platforms: Collection[Platform],
) -> int:
    """Run ``body`` on the node that drives; the exit code is its on every node.

    Args:
        platforms: of the run's pools.
        body: gets the meeting that it hands to the runtime; None where no nodes are to come.

    Raises:
        UserError: the nodes do not find each other.
        NodeFailure: on a member: the first node vanished, or this node's Ray did.
    """
    if plan.role == "member":
        return _lend(plan, platforms)
    if plan.role != "head":
        return body(None)
    meeting = Meeting(plan)
    exit_code = 1
    try:
        exit_code = body(meeting)
    except UserError:
        exit_code = 2
        raise
    finally:
        meeting.close(exit_code)
    return exit_code


def _lend(plan: ClusterPlan, platforms: Collection[Platform]) -> int:
    """A member's part."""
    with closing(Attendance(plan)) as attendance:
        message = attendance.receive()
        if "exit" in message:
            return message["exit"]
        resources = node_resources(
            own_devices(platforms), num_cores=os.cpu_count() or 1, settings=plan.settings
        )
        with _ray_node(message["ray"], attendance.own_address, resources=resources) as (
            process,
            log,
        ):
            return _end_of_run(attendance, process, log=log)


def _end_of_run(attendance: Attendance, process: subprocess.Popen[bytes], *, log: IO[bytes]) -> int:
    """Wait for the head's last word or the end of this node's Ray, whichever is first."""
    ended = os.pidfd_open(process.pid)
    try:
        ready, _, _ = select.select([attendance.connection, ended], [], [])
        if attendance.connection not in ready:
            # A run that ends takes Ray's head with it just before it says so.
            ready, _, _ = select.select([attendance.connection], [], [], _SHUTDOWN_S)
    finally:
        os.close(ended)
    if ready:
        return attendance.receive()["exit"]
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
    raise NodeFailure("\n".join(["this node's Ray ended before the run did", *lines]))


@contextmanager
def _ray_node(
    head: str, own_address: str, *, resources: Mapping[str, Any]
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Ray's processes of this node, and the file of what they say."""
    flags = [f"--{name.replace('_', '-')}={_flag(value)}" for name, value in resources.items()]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={head}"]
    command += [f"--node-ip-address={own_address}", "--block", *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            env=os.environ | ray_environment("member"),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - it only makes one system call
        )
        try:
            yield process, log
        finally:
            # All at once: with the head gone there is nothing left that they could tell anybody.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _flag(value: Any) -> str:
    return json.dumps(value) if isinstance(value, Mapping) else str(value)
