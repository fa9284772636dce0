"""Validation of settings and arguments against the ranges in their types."""

from __future__ import annotations

import dataclasses
import inspect
import operator
import re
import types
import typing
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from transformer_jax.errors import UserError, short_repr


class Range(NamedTuple):
    """Allowed values of a number, as a mark in its type: ``Annotated[int, Range(...)]``."""

    contains: Callable[[Any], bool]
    expectation: str  # for the error message

    def __repr__(self) -> str:  # in tyro's messages
        return self.expectation


PositiveInt = Annotated[int, Range(lambda n: 1 <= n < 2**31, "a positive number below 2^31")]
# Larger values have no use and would run for hours or exhaust the memory without a message.
SmallCount = Annotated[int, Range(lambda n: 1 <= n <= 512, "a positive number up to 512")]
Size = Annotated[int, Range(lambda n: 1 <= n <= 2**16, "a number from 1 to 65,536")]
Count = Annotated[int, Range(lambda n: 0 <= n < 2**31, "a number from 0 to 2^31 - 1")]
PositiveFloat = Annotated[float, Range(lambda x: x > 0, "a positive number")]
NonNegative = Annotated[float, Range(lambda x: x >= 0, "0 or more")]
Fraction = Annotated[float, Range(lambda x: 0 <= x < 1, "a value in [0, 1)")]
PositiveFraction = Annotated[float, Range(lambda x: 0 < x <= 1, "a value in (0, 1]")]
# of characters, in SentencePiece
CharacterCoverage = Annotated[float, Range(lambda x: 0.98 <= x <= 1, "a value in [0.98, 1]")]
LineLength = Annotated[int, Range(lambda n: 3 <= n <= 2**16, "a number from 3 to 65,536")]

# Dtypes of arrays by name. Segment ids can also be bool.
_DTYPES = {"mask": "bool", "source|target|tokens|segments|positions": "integer"}
# Arrays whose axes can have size 1: "name:number of axes".
_BROADCASTS = re.compile("mask:4|bias:4|positions:")
F = TypeVar("F", bound=Callable[..., Any])
P = TypeVar("P", bound="Section")

Rule = tuple[str, bool, str]
"""A constraint across fields: the field to report, the condition, the expectation."""


@cache
def _types_of_fields(section: type) -> dict[str, Any]:
    """Evaluate the annotations of a class once: it takes longer than checking all values."""
    return typing.get_type_hints(section, include_extras=True)


class Section:
    """Base class for settings dataclasses. Checks the fields, then ``rules``, on construction.

    Raises ``UserError`` that names the invalid field, preceded by the class's ``prefix``.
    """

    _prefix = ""

    def __init_subclass__(cls, prefix: str = "") -> None:
        cls._prefix = prefix

    def __post_init__(self) -> None:
        types = _types_of_fields(type(self))  # type: ignore[arg-type]  # classes are hashable
        for name, allowed in types.items():
            if expected := _expected(getattr(self, name), allowed):
                raise self._error(name, expected)
        self.check(self.rules())

    def rules(self) -> Iterator[Rule]:
        """Yield constraints that involve more than one field."""
        yield from ()

    def check(self, rules: Iterator[Rule]) -> None:
        """Raise ``UserError`` for the first rule that does not hold."""
        for name, holds, expected in rules:
            if not holds:
                raise self._error(name, expected)

    def part(self, base: type[P]) -> P:
        """Return the settings that come from one of the base classes."""
        names = [field.name for field in dataclasses.fields(base)]  # type: ignore[arg-type]
        return base(**{name: getattr(self, name) for name in names})

    def _error(self, name: str, expected: str) -> UserError:
        value = short_repr(operator.attrgetter(name)(self))
        if self._prefix == "--":  # as on the command line
            name = name.replace("_", "-")
        return UserError(f"{self._prefix}{name} is {value}; expected {expected}.")


def checked(function: F) -> F:
    """Decorate a public function to check its arrays, sizes and dropout keys.

    The end of an array's name gives its axes. Axes with the same letter have the same size. Masks
    are bool; token ids, segment ids and positions are integers. A size has one of the types above.
    Raises ``UserError``.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def checking(*args: Any, **kwargs: Any) -> Any:
        arrays = {}
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if value is not None:
                _check(name, value, signature.parameters[name].annotation)
                if name.rpartition("_")[2].isupper():
                    arrays[name] = value
        check_sizes(arrays)
        return function(*args, **kwargs)

    return typing.cast(F, checking)


def check_sizes(arrays: dict[str, Any]) -> None:
    """Raise ``UserError`` if axes with the same letter differ in size.

    ``arrays`` are arrays by name; the end of a name gives the axes. Masks with four axes, biases
    and positions can have size 1 instead, and values can be wider (K) than queries and keys.
    Sizes that are not numbers, as in ``jax.export`` with symbolic shapes, are not compared.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for name, array in arrays.items():
        stem, _, axes = name.rpartition("_")
        for axis, size in zip(axes, array.shape):
            broadcasts = size == 1 and _BROADCASTS.search(f"{stem}:{len(axes)}") is not None
            if not isinstance(size, int) or broadcasts or (stem, axis) == ("v", "K"):
                continue
            expected, other = sizes.setdefault(axis, (size, name))
            if size != expected:
                raise UserError(
                    f"{stem} has shape {list(array.shape)}, axes {', '.join(axes)}; expected "
                    f"{axis} = {expected}, as in {other.rpartition('_')[0]} with shape "
                    f"{list(arrays[other].shape)}."
                )


def _check(name: str, value: Any, annotation: str) -> None:
    stem, _, axes = name.rpartition("_")
    dtype = str(getattr(value, "dtype", ""))
    if axes.isupper():
        kind = next((kind for names, kind in _DTYPES.items() if re.search(names, stem)), "")
        if dtype and len(axes) == value.ndim and (kind[:3] in dtype or dtype == "bool"):
            return
        actual = f"{dtype} with {value.ndim} axes" if dtype else f"a {type(value).__name__}"
        raise UserError(f"{stem} is {actual}; expected {kind or 'an'} array [{', '.join(axes)}].")
    expected = _expected(value, globals().get(str(annotation).removesuffix(" | None"), Any))
    is_key = type(value).__name__ == "DropoutKeys" or dtype.startswith(("key<", "uint32"))
    if name == "dropout_key" and not is_key:
        expected = "None or a random key, such as jax.random.key(0)"
    if expected:
        raise UserError(f"{name} is {short_repr(value)}; expected {expected}.")


def _expected(value: Any, allowed: Any) -> str | None:
    """Return a description of the allowed values, or None if ``value`` is valid."""
    origin = typing.get_origin(allowed)
    arguments = typing.get_args(allowed)
    if allowed is Any:
        return None
    if origin is Annotated:
        kind, *marks = arguments
        if expected := _expected(value, kind):
            return expected
        ranges = [mark for mark in marks if isinstance(mark, Range)]  # others: see roles.py
        return next((x.expectation for x in ranges if not x.contains(value)), None)
    if origin in (typing.Union, types.UnionType):
        problems = [_expected(value, each) for each in arguments]
        return None if None in problems else " or ".join(map(str, problems))
    if origin is Literal:
        choices = ", ".join(map(repr, arguments))
        words = f"one of {choices}" if len(arguments) > 1 else choices
        return None if value in arguments else words
    if origin is tuple:
        fits = isinstance(value, tuple) and not any(_expected(v, arguments[0]) for v in value)
        item, *marks = typing.get_args(arguments[0]) or arguments
        words = marks[0].expectation if isinstance(marks[0], Range) else item.__name__
        return None if fits else f"a tuple with each item {words}"
    if allowed is float and type(value) in (int, float):
        return None if abs(value) <= 1e38 else "a finite number (float32)"
    return None if type(value) is allowed else allowed.__name__.replace("NoneType", "None")
