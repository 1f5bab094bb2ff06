# SPDX-License-Identifier: Apache-2.0
"""The pytest plug-in: doubles of vendors' devices as fixtures, for tandem and for whoever develops
against it. A test suite asks for it in its top conftest, by
``pytest_plugins = ("tandem.testing.plugin",)``. It is no entry point: pytest would load it in every
project that has tandem installed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.errors import UserError
from tandem.platforms.record import Platform
from tandem.testing.doubles import DOUBLES, double_platform
from tandem.testing.extension import build_problem, built_extension


@pytest.fixture(scope="session")
def doubles() -> Callable[..., Platform]:
    """``double_platform``, once the doubles are built; the first use in a user's life takes a
    minute. Without a compiler the test is skipped, with the reason."""
    try:
        built_extension()
    except UserError as error:
        if build_problem():
            pytest.skip(str(error))
        raise
    return double_platform


@pytest.fixture(scope="session", params=DOUBLES)
def vendor_double(request: pytest.FixtureRequest, doubles: Callable[..., Platform]) -> Platform:
    """The record of a double of two devices, one vendor after the other."""
    return doubles(request.param)
