# SPDX-License-Identifier: Apache-2.0
"""How a run ends that a process of it has brought down. Imports nothing, as the command table needs
it.
"""


class RunFailure(Exception):
    """A process or a node failed. The first line of the text says in which step, who, and why."""
