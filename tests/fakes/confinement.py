# SPDX-License-Identifier: Apache-2.0
"""A launcher that gives up rights before it starts a command, as containers and old kernels do.

    python confinement.py container|no-landlock|no-seccomp COMMAND...

container: the capabilities that Docker leaves, without the calls that its filter refuses.
no-landlock, no-seccomp: these calls fail as on a kernel without them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
COLUMN = list(ARCHITECTURES).index(platform.machine())
DOCKER_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)
DOCKER_REFUSES = (
    *((165, 40), (166, 39), (155, 41), (272, 97), (308, 268), (321, 280), (298, 241), (246, 104)),
    *((175, 105), (313, 273), (176, 106), (169, 142), (167, 224), (168, 225), (304, 265)),
    *((250, 219), (248, 217), (249, 218), (323, 282), (425, 425), (430, 430), (432, 432)),
    *((429, 429), (428, 428), (442, 442), (163, 89), (179, 60), (170, 161)),
)
LANDLOCK = ((444, 444), (445, 445), (446, 446))
SECCOMP = ((317, 277),)
EPERM, ENOSYS = 1, 38
SET_SECCOMP = 22


def refuse(pairs: tuple[tuple[int, int], ...], error: int, *, prctl: int | None = None) -> None:
    """Let the kernel refuse calls, and one option of prctl, from now on."""
    program = [(0x20, 0, 0, 4), (0x15, 1, 0, ARCHITECTURES[platform.machine()]), (6, 0, 0, 1 << 31)]
    program += [(0x20, 0, 0, 0)]
    for pair in pairs:
        program += [(0x15, 0, 1, pair[COLUMN]), (6, 0, 0, 0x50000 | error)]
    if prctl is not None:
        program += [(0x15, 0, 3, (157, 167)[COLUMN]), (0x20, 0, 0, 16)]
        program += [(0x15, 0, 1, prctl), (6, 0, 0, 0x50000 | 22)]
    program += [(6, 0, 0, 0x7FFF0000)]
    raw = b"".join(struct.pack("=HBBI", *one) for one in program)
    buffer = ctypes.create_string_buffer(raw, len(raw))
    record = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    LIBC.prctl(38, 1, 0, 0, 0)
    assert LIBC.prctl(SET_SECCOMP, 2, record, 0, 0) == 0, "the kernel takes filters"


def keep_capabilities(kept: tuple[int, ...]) -> None:
    """Give up all other capabilities."""
    for capability in range(64):
        if capability not in kept:
            LIBC.prctl(24, capability, 0, 0, 0)
    mask = sum(1 << capability for capability in kept)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header, data = struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", low, low, 0, high, high, 0)
    assert LIBC.capset(header, data) == 0, "root may give up capabilities"


def main() -> None:
    """Give up rights, and become the command."""
    kind, command = sys.argv[1], sys.argv[2:]
    if kind == "container":
        keep_capabilities(DOCKER_CAPABILITIES)
        refuse(DOCKER_REFUSES, EPERM)
    elif kind == "no-landlock":
        refuse(LANDLOCK, ENOSYS)
    else:
        refuse(SECCOMP, ENOSYS, prctl=SET_SECCOMP)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
