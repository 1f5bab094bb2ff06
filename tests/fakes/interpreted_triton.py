# SPDX-License-Identifier: Apache-2.0
"""Makes Triton's interpreter run with numpy 2.4, which no longer turns an array of one element into
an int; triton relies on that for the bounds of loops.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import pytest


def install() -> None:
    """Idempotent. Skips the test that asks for it where triton is missing."""
    reason = "the kernels need triton"
    interpreter: Any = pytest.importorskip("triton.runtime.interpreter", reason=reason)
    as_shipped = interpreter._patch_lang_tensor
    if hasattr(as_shipped, "__wrapped__"):
        return

    @wraps(as_shipped)
    def patch(tensor: Any, scope: Any) -> None:
        as_shipped(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
