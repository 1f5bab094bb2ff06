# SPDX-License-Identifier: Apache-2.0
"""Dotted paths ``package.module:attribute``, by which a configuration names an object of the user.

A key annotated with ``ByName`` accepts its built-in names and such paths; ``import_dotted`` imports
the object, a class or a function. The working directory is searched after all other folders. A path
is imported only when the object or its traits are needed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, GetCoreSchemaHandler

from tandem.errors import UserError

DOTTED_FORM = "package.module:function"
Traits = TypeVar("Traits")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_dotted(name: str) -> bool:
    """Return whether ``name`` has the form ``package.module:attribute``."""
    return _DOTTED.fullmatch(name) is not None


def import_dotted(key: str, name: str) -> Callable[..., Any]:
    """Import the class or function that the dotted path ``name``, the value of ``key``, names.

    Raises:
        UserError: ``name`` has another form, its module cannot be imported, or it lacks the object.
    """
    if not is_dotted(name):
        raise UserError(key, name, rule=f"must have the form {DOTTED_FORM}")
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that a file there hides no installed module
    try:
        found = getattr(import_module(module_name), attribute)
    except ImportError as error:
        raise UserError(
            key,
            name,
            rule=f"module {module_name} cannot be imported ({error})",
            remedy="Install its package, or add its folder to PYTHONPATH.",
        ) from error
    except AttributeError as error:
        raise UserError(
            key,
            name,
            rule=f"module {module_name} has no attribute {attribute!r}",
            remedy=f"Define {attribute} there, or correct the name.",
        ) from error
    except (Exception, SystemExit) as error:  # SystemExit: a script without a __main__ guard
        raise UserError(
            key,
            name,
            rule=f"module {module_name} raises {type(error).__name__} when imported ({error})",
            remedy="Correct the module.",
        ) from error
    if not callable(found):
        raise UserError(
            key,
            name,
            rule="is neither a class nor a function",
            remedy=f"Define {attribute} as one, or correct the name.",
        )
    return found


def traits_of(key: str, name: str, *, known: Mapping[str, Traits]) -> Traits:
    """Return the traits of ``name``, the value of ``key``: those of the table ``known``, or the
    attribute ``traits`` of the user's object, or the defaults of their class if it has none.

    Raises:
        UserError: ``name`` is a dotted path that cannot be imported, or has other traits.
    """
    if name in known:
        return known[name]
    kind = type(next(iter(known.values())))
    traits = getattr(import_dotted(key, name), "traits", kind())
    if not isinstance(traits, kind):
        raise UserError(
            key,
            name,
            rule=f"its attribute 'traits' is no {kind.__module__}.{kind.__name__}",
            remedy="Make it one, or delete the attribute.",
        )
    return traits


class ByName:
    """An annotation of a text that must be a built-in name or a dotted path.

    Attributes:
        choices: the names and the form of a dotted path, for messages.

    Example:
        >>> LossName = Annotated[str, ByName(("vanilla", "gspo"))]
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self.choices = (*names, DOTTED_FORM)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(Annotated[source, AfterValidator(self._checked)])

    def _checked(self, name: str) -> str:
        if name not in self._names and not is_dotted(name):
            raise ValueError(f"must be one of {', '.join(self.choices)}")
        return name
