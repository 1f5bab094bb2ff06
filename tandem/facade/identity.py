# SPDX-License-Identifier: Apache-2.0
"""The identity of a function: a digest that an unchanged function has in every start of a program.

The bytes of a pickle differ between two starts, as they hold line numbers, the names that a
notebook gives its cells, random names of classes, and sets in an order that changes. These bytes
are hashed without them. A function with other code, defaults or globals has another digest. That of
an importable module is known by its name alone.
"""

from __future__ import annotations

import functools
import io
from hashlib import sha256
from types import CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

import cloudpickle

MAIN_MODULES = ("__main__", "__mp_main__")
"""The names of the program itself; the second one is that in processes of multiprocessing."""
_PROTOCOL = 5
_CACHED = type(functools.cache(len))
_PLACES = ("__module__", "__firstlineno__", "__static_attributes__", "_cloudpickle_submodules")
"""The attributes of functions and classes that tell where they stand, or have a random order."""
_PARAMETERS = (TypeVar, ParamSpec, TypeVarTuple)
_PLAIN = (str, bytes, int, float, bool, type(None))


class CachedInScript(Exception):
    """The error of a function with ``functools.lru_cache`` in a script, which pickle only names."""


def identity_of(value: Any) -> tuple[str, bool]:
    """Return the digest of a value, and whether its pickle holds code instead of names only.

    Raises:
        CachedInScript: the value needs a cached function of the program itself.
    """
    return _identity_within(value, ())


def _identity_within(value: Any, outer: tuple[Any, ...]) -> tuple[str, bool]:
    content = io.BytesIO()
    pickler = _IdentityPickler(content, (*outer, value))
    pickler.dump(value)
    return sha256(content.getvalue()).hexdigest(), pickler.holds_code


class _IdentityPickler(cloudpickle.Pickler):
    """A pickler whose result is compared only, and never loaded.

    ``outer`` are the values that are being pickled, each an element of a set in the one before.
    """

    holds_code = False

    def __init__(self, file: io.BytesIO, outer: tuple[Any, ...]) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self._outer = outer

    def persistent_id(self, obj: Any) -> Any:
        """Return the elements of a set in an order of their own; None for all other values."""
        if type(obj) is set or type(obj) is frozenset:
            return type(obj).__name__, tuple(sorted(map(self._element, obj)))
        return None

    def _element(self, value: Any) -> str:
        if type(value) in _PLAIN:
            return repr(value)
        depth = next((i for i, one in enumerate(self._outer) if one is value), None)
        return _identity_within(value, self._outer)[0] if depth is None else f"outer {depth}"

    def reducer_override(self, obj: Any) -> Any:
        """Return what counts of code, functions and classes that are stored whole."""
        if isinstance(obj, CodeType):
            self.holds_code = True
            return _identity, _parts_of(obj)
        if isinstance(obj, _CACHED) and getattr(obj, "__module__", None) in MAIN_MODULES:
            raise CachedInScript(getattr(obj, "__qualname__", "a function"))
        if isinstance(obj, _PARAMETERS):
            return _identity, (type(obj).__name__, obj.__name__, getattr(obj, "__bound__", None))
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented or len(reduced) == 2:  # a name, or a type of Python's own
            return reduced
        state, attributes = reduced[2]
        kept = (_without_places(state), _without_places(attributes))
        if isinstance(obj, FunctionType):
            return _identity, (obj.__code__,), kept
        *arguments, _random_name, _extra = reduced[1]
        return _identity, tuple(arguments), kept


def _identity(*parts: Any) -> None:
    """Stand for what makes an object of its parts."""


def _parts_of(code: CodeType) -> tuple[Any, ...]:
    """Return all of a code object but its file and its line numbers."""
    return (
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
        (code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        (code.co_code, code.co_consts, code.co_exceptiontable),
    )


def _without_places(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return attributes without places, and without the text that ``dataclass`` makes of them."""
    left_out = (*_PLACES, "__doc__") if "__dataclass_fields__" in attributes else _PLACES
    return {name: value for name, value in attributes.items() if name not in left_out}
