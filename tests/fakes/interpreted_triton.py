# SPDX-License-Identifier: Apache-2.0
"""Makes Triton's interpreter run with numpy 2.4, which no longer turns an array of one element into
an int; triton relies on that for the bounds of loops. It rounds to fp8 as a device does; triton
loses the carry of a mantissa that is rounded up. And makes it several times faster: around
every call of a function it replaces all names of its language and puts them back; it makes a table
of all types whenever it asks for one, and describes the shape of each value anew; and it computes
whether integers overflow, which it tells only when it debugs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch


def install() -> None:
    """Skips the test that asks for it where triton is missing."""
    pytest.importorskip("triton", reason="the kernels need triton")
    _install()


@cache
def _install() -> None:
    from triton.runtime import interpreter

    triton: Any = interpreter
    stay_replaced(triton)
    find_types_once(triton)
    describe_shapes_once(triton.tl.core)
    round_fp8_to_nearest(triton)
    builder = triton.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def stay_replaced(interpreter: Any) -> None:
    """The names of the language, as soon as a function of a module that uses them is called."""
    replace_names, semantic = interpreter._patch_lang, interpreter.interpreter_semantic
    modules: set[str] = set()

    def replace_once(fn: Any) -> Any:
        if fn.__module__ not in modules:
            modules.add(fn.__module__)
            replace_names(fn)
            tensor = interpreter.tl.core.tensor
            tensor.__index__ = lambda self: int(self.handle.data.item())
        return interpreter._LangPatchScope()

    def replace_name(owner: Any, name: str, member: Any, *_: Any) -> None:
        # A check whether a semantic is given is wrapped around most of them.
        as_written = getattr(member, "__wrapped__", member)

        def interpreted(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return as_written(*args, _semantic=semantic, **kwargs)

        setattr(owner, name, interpreted)

    interpreter._patch_lang = replace_once
    interpreter._patch_attr = replace_name


def round_fp8_to_nearest(interpreter: Any) -> None:
    """Conversions from fp32 to e4m3 are those of torch."""
    convert_any, language = interpreter._convert_float, interpreter.tl

    def convert(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (language.float32, language.float8e4nv):
            return convert_any(numbers, source, target, rounding)
        wide = torch.from_numpy(np.frombuffer(numbers.tobytes(), dtype=np.float32).copy())
        bits = wide.to(torch.float8_e4m3fn).view(torch.uint8)
        return bits.numpy().reshape(numbers.shape)

    interpreter._convert_float = convert


def find_types_once(interpreter: Any) -> None:
    """Those of numpy for each of triton's."""
    numpy_type = interpreter._get_np_dtype
    of_number = cache(numpy_type)

    def of_any(dtype: Any) -> Any:
        return numpy_type(dtype) if dtype.scalar.is_ptr() else of_number(dtype.scalar)

    interpreter._get_np_dtype = of_any


def describe_shapes_once(core: Any) -> None:
    """Types of blocks, and the shapes that values show."""
    init_block, init_tensor = core.block_type.__init__, core.tensor.__init__
    is_same = core.dtype.__eq__
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init_known_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size if type(size) is int else size.value for size in shape]
        key = (element_ty.name, *sizes)
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key], element_ty=element_ty)

    @cache
    def shown(sizes: tuple[int, ...]) -> dict[str, Any]:
        tensor = core.tensor.__new__(core.tensor)
        init_tensor(tensor, None, core.block_type(core.float32, list(sizes)))
        return {"numel": tensor.numel, "shape": tensor.shape}

    def init_known_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else None
        if sizes is None:
            init_tensor(self, handle, type)
        else:
            vars(self).update(shown(sizes), handle=handle, type=type, dtype=type.scalar)

    core.block_type.__init__ = init_known_block
    core.tensor.__init__ = init_known_tensor
    core.dtype.__eq__ = lambda self, other: self is other or is_same(self, other)
