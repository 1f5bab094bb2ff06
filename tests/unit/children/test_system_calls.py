# SPDX-License-Identifier: Apache-2.0
"""The filter of kernel calls, interpreted here for both machines (M19)."""

from __future__ import annotations

import pytest

from tandem.children.system_calls import (
    CLONE,
    CLONE3,
    FIRST_UNKNOWN,
    MACHINES,
    PRLIMIT,
    REFUSED,
    REFUSED_VALUES,
    SOCKETPAIR,
    TO_ITSELF,
    build_filter,
)

ALLOW, KILL, REFUSE, MISSING = 0x7FFF0000, 0x80000000, 0x50001, 0x50026
OWN = 4321


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """Interpret the filter for a call, as the kernel does."""
    words = {0: number, 4: MACHINES[machine] if architecture is None else architecture}
    for index in range(6):
        value = arguments[index] if index < len(arguments) else 0
        words[16 + 8 * index] = value & 0xFFFFFFFF
    program, place, loaded = build_filter(machine, own_pid=OWN), 0, 0
    for _ in range(len(program)):
        code, if_true, if_false, constant = program[place]
        place += 1
        if code == 0x20:
            loaded = words[constant]
        elif code == 0x54:
            loaded &= constant
        elif code == 0x06:
            return constant
        else:
            holds = {
                0x15: loaded == constant,
                0x35: loaded >= constant,
                0x45: bool(loaded & constant),
            }[code]
            place += if_true if holds else if_false
    raise AssertionError("the filter does not end")


@pytest.fixture(params=list(MACHINES))
def machine(request: pytest.FixtureRequest) -> str:
    return request.param


def number(machine: str, pair: tuple[int | None, int | None]) -> int | None:
    return pair[list(MACHINES).index(machine)]


def test_each_named_call_is_refused(machine: str) -> None:
    for name, pair in REFUSED.items():
        call = number(machine, pair)
        assert call is None or verdict(machine, call) == REFUSE, name


@pytest.mark.parametrize(("x86_64", "aarch64"), [(0, 63), (1, 64), (9, 222), (202, 98), (257, 56)])
def test_reading_writing_and_memory_pass(machine: str, x86_64: int, aarch64: int) -> None:
    assert verdict(machine, x86_64 if machine == "x86_64" else aarch64) == ALLOW


def test_signals_reach_the_process_itself_only(machine: str) -> None:
    for name, pair in TO_ITSELF.items():
        call = number(machine, pair)
        assert call is not None
        assert verdict(machine, call, OWN, 9) == ALLOW, name
        for other in (0, 1, -1, OWN + 1, -OWN):
            assert verdict(machine, call, other, 9) == REFUSE, name


def test_some_values_of_arguments_are_refused(machine: str) -> None:
    for name, (pair, index, values) in REFUSED_VALUES.items():
        call = number(machine, pair)
        assert call is not None
        for value in values:
            assert verdict(machine, call, *[0] * index, value) == REFUSE, (name, value)
        assert verdict(machine, call, *[0] * index, 3) == ALLOW, name


def test_new_threads_pass_and_new_processes_do_not(machine: str) -> None:
    clone, clone3 = number(machine, CLONE), number(machine, CLONE3)
    assert clone is not None and clone3 is not None
    thread_of_libc = 0x3D0F00
    assert verdict(machine, clone, thread_of_libc) == ALLOW
    assert verdict(machine, clone, 17) == REFUSE, "fork"
    assert verdict(machine, clone, 0x4111) == REFUSE, "vfork"
    for namespace in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(machine, clone, 0x10000 | namespace) == REFUSE
    assert verdict(machine, clone3) == MISSING, "then the C library uses clone"


def test_pairs_of_sockets_are_streams(machine: str) -> None:
    call = number(machine, SOCKETPAIR)
    assert call is not None
    assert verdict(machine, call, 1, 1 | 0x80000) == ALLOW
    for family, kind in ((1, 2), (1, 5), (2, 1), (30, 1)):
        assert verdict(machine, call, family, kind) == REFUSE


def test_limits_of_others_are_out_of_reach(machine: str) -> None:
    call = number(machine, PRLIMIT)
    assert call is not None
    assert [verdict(machine, call, pid) for pid in (0, OWN, 1)] == [ALLOW, ALLOW, REFUSE]


def test_calls_of_later_kernels_and_other_machines(machine: str) -> None:
    assert verdict(machine, FIRST_UNKNOWN) == MISSING
    assert verdict(machine, 0, architecture=0x40000003) == KILL
    if machine == "x86_64":
        assert verdict(machine, 0x40000000 | 41) == KILL
