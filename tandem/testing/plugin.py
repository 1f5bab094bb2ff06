# SPDX-License-Identifier: Apache-2.0
"""A pytest plug-in with fixtures for doubles of vendors' devices and for a stub of FlagCX.

A test suite loads it in its top conftest by ``pytest_plugins = ("tandem.testing.plugin",)``. It is
not an entry point, because pytest would load it in every project that has tandem installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.comm.flagcx_library import Abi
from tandem.platforms.record import Platform
from tandem.testing.compiling import MissingToolError, built_extension
from tandem.testing.doubles import DOUBLES, double_platform
from tandem.testing.flagcx_stub import stub_library


@pytest.fixture(scope="session")
def doubles() -> Callable[..., Platform]:
    """Build the doubles, in a quarter of a minute the first time, and return ``double_platform``.

    The test is skipped if there is no compiler.
    """
    with _skipping():
        built_extension()
    return double_platform


@pytest.fixture(scope="session", params=DOUBLES)
def vendor_double(request: pytest.FixtureRequest, doubles: Callable[..., Platform]) -> Platform:
    """Return the record of a double with two devices, one vendor after the other."""
    return doubles(request.param)


@pytest.fixture(scope="session")
def flagcx_stub() -> Callable[..., Path]:
    """Build the stub with both interfaces and return ``stub_library``.

    The test is skipped if there is no compiler.
    """
    with _skipping():
        for abi in Abi:
            stub_library(abi)
    return stub_library


@contextmanager
def _skipping() -> Iterator[None]:
    try:
        yield
    except MissingToolError as error:
        pytest.skip(str(error))
