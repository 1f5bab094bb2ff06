# SPDX-License-Identifier: Apache-2.0
"""The model that the servers of these tests have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.tiny_qwen2 import write_random_qwen2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random model."""
    folder = tmp_path_factory.mktemp("qwen2")
    write_random_qwen2(folder, tied=True)
    return folder
