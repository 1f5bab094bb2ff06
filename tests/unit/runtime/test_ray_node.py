# SPDX-License-Identifier: Apache-2.0
"""The end of Ray's processes, as ``ray start`` reports it."""

from __future__ import annotations

import pytest

from tandem.runtime.ray_node import describe_end

REPORT = "Some Ray subprocesses exited unexpectedly:"
REST = "Remaining processes will be killed."


@pytest.mark.parametrize(
    ("lines", "code", "end"),
    [
        ([REPORT, "  raylet [exit code=-9]", REST], 1, "its raylet was killed by SIGKILL"),
        ([REPORT, "  gcs_server [exit code=1]", REST], 1, "its gcs_server ended with exit code 1"),
        ([REPORT, "  raylet [exit code=-40]", REST], 1, "its raylet was killed by signal 40"),
        ([], -15, "its raylet or head was killed by SIGTERM"),
    ],
)
def test_the_first_lost_process_is_named(lines: list[str], code: int, end: str) -> None:
    assert describe_end(lines, code) == end
