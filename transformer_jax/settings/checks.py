"""Validation of settings against the ranges in their field types."""

from __future__ import annotations

import operator
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from transformer_jax.errors import UserError, short_repr

# The type of a field gives its range, as a predicate, and the expectation for its error message.
Positive = Annotated[int, lambda n: 1 <= n < 2**31, "a positive number below 2^31"]
# Larger values have no use and would run for hours or exhaust the memory without a message.
Few = Annotated[int, lambda n: 1 <= n <= 512, "a positive number up to 512"]
Size = Annotated[int, lambda n: 1 <= n <= 2**16, "a number from 1 to 65,536"]
Count = Annotated[int, lambda n: 0 <= n < 2**31, "a number from 0 to 2^31 - 1"]
PositiveFloat = Annotated[float, lambda x: x > 0, "a positive number"]
NonNegative = Annotated[float, lambda x: x >= 0, "0 or more"]
Fraction = Annotated[float, lambda x: 0 <= x < 1, "a value in [0, 1)"]
PositiveFraction = Annotated[float, lambda x: 0 < x <= 1, "a value in (0, 1]"]
LineLength = Annotated[int, lambda n: 3 <= n <= 2**16, "a number from 3 to 65,536"]

Rule = tuple[str, bool, str]
"""A constraint across fields: the field to report, the condition, the expectation."""


class Section:
    """Base class for settings dataclasses. Checks the fields, then ``rules``, on construction.

    Raises ``UserError`` that names the invalid field, preceded by the class's ``prefix``.
    """

    _prefix = ""

    def __init_subclass__(cls, prefix: str = "") -> None:
        cls._prefix = prefix

    def __post_init__(self) -> None:
        for name, allowed in typing.get_type_hints(type(self), include_extras=True).items():
            if expected := _expected(getattr(self, name), allowed):
                raise self._error(name, expected)
        for name, holds, expected in self.rules():
            if not holds:
                raise self._error(name, expected)

    def rules(self) -> Iterator[Rule]:
        """Yield constraints that involve more than one field."""
        yield from ()

    def _error(self, name: str, expected: str) -> UserError:
        value = short_repr(operator.attrgetter(name)(self))
        if self._prefix == "--":  # as on the command line
            name = name.replace("_", "-")
        return UserError(f"{self._prefix}{name} is {value}; expected {expected}.")


def _expected(value: Any, allowed: Any) -> str | None:
    """Return a description of the allowed values, or None if ``value`` is valid."""
    origin, arguments = typing.get_origin(allowed), typing.get_args(allowed)
    if origin is Annotated:
        kind, is_valid, words = arguments
        return _expected(value, kind) or (None if is_valid(value) else words)
    if origin in (typing.Union, types.UnionType):
        problems = [_expected(value, each) for each in arguments]
        return None if None in problems else " or ".join(map(str, problems))
    if origin is Literal:
        choices = ", ".join(map(repr, arguments))
        words = f"one of {choices}" if len(arguments) > 1 else choices
        return None if value in arguments else words
    if origin is tuple:
        fits = isinstance(value, tuple) and not any(_expected(v, arguments[0]) for v in value)
        words = [arguments[0].__name__, *typing.get_args(arguments[0])][-1]
        return None if fits else f"a tuple with each item {words}"
    if allowed is float and type(value) in (int, float):
        return None if abs(value) <= 1e38 else "a finite number (float32)"
    return None if type(value) is allowed else allowed.__name__.replace("NoneType", "None")
