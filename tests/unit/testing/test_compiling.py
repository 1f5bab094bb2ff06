# SPDX-License-Identifier: Apache-2.0
"""The compiled parts of the doubles: what is said where they cannot be built, and what is kept."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.comm.flagcx_library import Abi
from tandem.errors import UserError
from tandem.testing.compiling import Build, MissingToolError, built, built_extension
from tandem.testing.flagcx_stub import stub_library


def build_stub() -> Path:
    return stub_library(Abi.DEVICE_HANDLE)


both_parts = pytest.mark.parametrize("build", [built_extension, build_stub])


@both_parts
def test_without_a_compiler_the_reason_is_said(
    build: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(MissingToolError, match=r"there is no C\+\+ compiler \(no-such-compiler"):
        build()


@both_parts
def test_a_failing_build_says_what_the_compiler_said(
    build: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="compiler failed: x.cpp:1: error: no such thing") as raised:
        build()
    assert not isinstance(raised.value, MissingToolError), "a fault of ours skips no test"
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.usefixtures("flagcx_stub")  # there is a compiler
def test_what_decides_the_result_decides_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source, header = tmp_path / "answer.c", tmp_path / "answer.h"
    source.write_text('#include "answer.h"\nint answer(void) { return ANSWER; }\n')

    def answer(value: int, *, needed: Path = source) -> tuple[Path, int]:
        header.write_text(f"#define ANSWER {value}\n")
        path = built(
            Build("lib/answer.so", (source,), ("-x", "c"), (), (header,), {"headers": needed})
        )
        return path, ctypes.CDLL(str(path)).answer()

    first, other = answer(1), answer(2)
    assert (first[1], other[1]) == (1, 2)
    with pytest.raises(MissingToolError, match=r"headers are missing \(absent\.h\)"):
        answer(3, needed=Path("absent.h"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert answer(1, needed=Path("absent.h")) == first, "what is kept needs nothing any more"
