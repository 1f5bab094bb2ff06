# SPDX-License-Identifier: Apache-2.0
"""Processes of these tests are forked from one that has imported vLLM, which takes seven seconds of
processor time. Those of commands with conditions import it themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.fakes.preloading import PRELOADED


@pytest.fixture(scope="package", autouse=True)
def imported_vllm() -> Iterator[None]:
    """Name the module that imports vLLM, if it is installed."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("vllm") is not None:
            patch.setenv(PRELOADED, "tests.engines.imported_vllm")
        yield
