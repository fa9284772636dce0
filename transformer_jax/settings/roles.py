"""Roles of settings: which ones a resumed run, a process or a fine-tuning run may set differently.

The role is a mark in a setting's type, beside its range: ``dropout: Changeable[Fraction] = 0.1``.
The mark of a section, ``mesh: Free[MeshConfig]``, holds for all settings in it.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

T = TypeVar("T")


class Role(NamedTuple):
    """Role of a setting."""

    on_resume: Literal["free", "changeable", "fixed"]
    differs_between_processes: bool = False
    changes_in_fine_tuning: bool = False


Free = Annotated[T, Role("free")]
"""A resumed run may have another value: it does not affect the result of a training step."""

PerProcess = Annotated[T, Role("free", differs_between_processes=True)]
"""Free, and each process of a run may have its own value."""

Changeable = Annotated[T, Role("changeable")]
"""A resumed run may have another value with --allow-changes. Its result differs from that of a run
that has the old or the new value throughout."""

Fixed = Annotated[T, Role("fixed")]
"""A resumed run, and a run that starts from another's model, must have the same value."""

FixedOnResume = Annotated[T, Role("fixed", changes_in_fine_tuning=True)]
"""A resumed run must have the same value. A run that starts from another's model may not."""


def setting_roles(
    section: Any, prefix: str = "", section_role: Role | None = None
) -> dict[str, Role]:
    """Return the roles of all settings in a settings dataclass, ``{"model.d_model": ...}``.

    Raises ``TypeError`` for a setting without a role.
    """
    roles: dict[str, Role] = {}
    types = typing.get_type_hints(section, include_extras=True)
    for field in dataclasses.fields(section):
        name = prefix + field.name
        role = section_role or _mark_of(types[field.name])
        if dataclasses.is_dataclass(field.default):
            roles |= setting_roles(type(field.default), f"{name}.", role)
        elif role is None:
            raise TypeError(f"{name} has no role; mark its type, as in Fixed[...].")
        else:
            roles[name] = role
    return roles


def _mark_of(annotated_type: Any) -> Role | None:
    for mark in getattr(annotated_type, "__metadata__", ()):
        if isinstance(mark, Role):
            return mark
    return None
