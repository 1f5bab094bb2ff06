# SPDX-License-Identifier: Apache-2.0
"""Keys whose value is a built-in name or the dotted path of an object of the user.

A key annotated with ``ByName`` accepts both. A path is imported only when the object or its traits
are needed (``imports``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, GetCoreSchemaHandler

from tandem.config.schema.imports import DOTTED_FORM, import_function, is_dotted
from tandem.errors import UserError

Traits = TypeVar("Traits")


def traits_of(
    key: str, name: str, *, known: Mapping[str, Traits], arguments: Sequence[str]
) -> Traits:
    """Return the traits of ``name``, the value of ``key``.

    They are an entry of ``known``, or the attribute ``traits`` of the user's object. An object
    without this attribute has the default traits.

    Args:
        arguments: the names of the arguments with which the user's object is called.

    Raises:
        UserError: ``name`` is a dotted path that cannot be imported, takes other arguments or has
            other traits.
    """
    if name in known:
        return known[name]
    kind = type(next(iter(known.values())))
    traits = getattr(import_function(key, name, arguments=arguments), "traits", kind())
    if not isinstance(traits, kind):
        raise UserError(
            key,
            name,
            rule=f"its attribute 'traits' must be a {kind.__module__}.{kind.__name__}",
            remedy="Make it one, or delete the attribute.",
        )
    return traits


class ByName:
    """An annotation for a string that must be a built-in name or a dotted path.

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
