# SPDX-License-Identifier: Apache-2.0
"""Makes Triton's interpreter run with numpy 2.4, which no longer turns an array of one element into
an int; triton relies on that for the bounds of loops. And makes it faster by a third: it looks
through all names of its language whenever a function is called, and makes a table of all types
whenever it asks for one.
"""

from __future__ import annotations

import inspect
from functools import cache, wraps
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

    is_builtin = interpreter.tl.core.is_builtin

    @cache
    def builtins(package: Any) -> list[str]:
        """Names, first asked for when none is replaced yet."""
        return [name for name, _ in inspect.getmembers(package, is_builtin)]

    def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins(package):
            member = getattr(package, name)
            if not is_builtin(member):
                return  # all are replaced: by the function that calls this one
            interpreter._patch_attr(package, name, member, builder, scope)

    numpy_type = interpreter._get_np_dtype
    of_number = cache(numpy_type)

    def of_any(dtype: Any) -> Any:
        return numpy_type(dtype) if dtype.scalar.is_ptr() else of_number(dtype.scalar)

    interpreter._patch_lang_tensor = patch
    interpreter._patch_builtin = patch_builtins
    interpreter._get_np_dtype = of_any
