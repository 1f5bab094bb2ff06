# SPDX-License-Identifier: Apache-2.0
"""Makes Triton's interpreter run with numpy 2.4, which no longer turns an array of one element into
an int; triton 3.6 relies on that for the bounds of loops.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch_as_shipped = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    _patch_as_shipped(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def install() -> None:
    """Idempotent."""
    interpreter._patch_lang_tensor = _patch_lang_tensor
