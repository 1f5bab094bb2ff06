# SPDX-License-Identifier: Apache-2.0
"""The pytest plug-in: doubles of vendors' devices and a stub of FlagCX as fixtures, for tandem and
for whoever develops against it. A test suite asks for it in its top conftest, by
``pytest_plugins = ("tandem.testing.plugin",)``. It is no entry point: pytest would load it in every
project that has tandem installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.comm.flagcx_library import Abi
from tandem.platforms.record import Platform
from tandem.testing.compiling import MissingToolError
from tandem.testing.doubles import DOUBLES, double_platform
from tandem.testing.extension import built_extension
from tandem.testing.flagcx_stub import stub_library


@pytest.fixture(scope="session")
def doubles() -> Callable[..., Platform]:
    """``double_platform``, once the doubles are built; the first use in a user's life takes a
    minute. Without a compiler the test is skipped, with the reason."""
    with _skipping():
        built_extension()
    return double_platform


@pytest.fixture(scope="session", params=DOUBLES)
def vendor_double(request: pytest.FixtureRequest, doubles: Callable[..., Platform]) -> Platform:
    """The record of a double of two devices, one vendor after the other."""
    return doubles(request.param)


@pytest.fixture(scope="session")
def flagcx_stub() -> Callable[..., Path]:
    """``stub_library``, once it is built with both interfaces. Without a compiler the test is
    skipped, with the reason."""
    with _skipping():
        for abi in Abi:
            stub_library(abi)
    return stub_library


@contextmanager
def _skipping() -> Iterator[None]:
    """Skip the test where nothing can be compiled."""
    try:
        yield
    except MissingToolError as error:
        pytest.skip(str(error))
