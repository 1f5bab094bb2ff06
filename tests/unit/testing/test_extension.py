# SPDX-License-Identifier: Apache-2.0
"""The extension that doubles are made of: what is said where it cannot be built."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.errors import UserError
from tandem.testing import extension


def test_without_a_compiler_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert extension.build_problem().startswith("there is no C++ compiler (no-such-compiler")
    with pytest.raises(UserError, match="vendor doubles: there is no C"):
        extension.built_extension()


def test_a_failing_build_says_what_the_compiler_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="compiler failed: x.cpp:1: error: no such thing"):
        extension.built_extension()
    assert not list((tmp_path / "cache").rglob("*.so"))
