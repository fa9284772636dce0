"""JSON files that other programs, older versions or disk errors can have changed."""

from __future__ import annotations

import json
from typing import Any

from transformer_jax.errors import UserError, one_line, short_repr
from transformer_jax.storage.files import AnyPath

_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}


def read_object(path: AnyPath, /, **fields: Any) -> dict[str, Any]:
    """Read a JSON file that contains an object. ``fields`` gives the types of required fields.

    Raises:
      FileNotFoundError: the file is missing.
      UserError: it is not JSON, not an object, or a field is missing or has another type.
    """
    return parse_object(path.read_bytes(), str(path), **fields)


def parse_object(text: str | bytes, name: str, /, **fields: Any) -> dict[str, Any]:
    """Parse a JSON object as ``read_object`` does. ``name`` is the file or line in messages.

    Each field's type is a class, or a union such as ``int | None``; numbers are ``int | float``.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not valid JSON: {one_line(error)}.") from None
    if not isinstance(content, dict):
        raise UserError(f"{name} contains {short_repr(content)}; expected a JSON object.")
    for field, kind in fields.items():
        value = content.get(field)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            found = short_repr(value) if field in content else "missing"
            expected = _NAMES.get(kind) or str(getattr(kind, "__name__", kind))
            raise UserError(f"{name}: {field} is {found}; expected {expected}.")
    return content
