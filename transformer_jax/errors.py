"""Exception for errors that a user can fix, and helpers for messages."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class UserError(ValueError):
    """Invalid input, file or setting. The message gives the value, what is expected, and a remedy.

    The command-line programs print it as one line, without a traceback, and exit with status 2.
    """


def short_repr(value: object) -> str:
    """Return ``repr(value)`` for a message, with the middle cut out if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python cannot print integers with more than 4,300 digits
        return "a number too long to print"
    return text if len(text) <= 120 else f"{text[:60]}...{text[-60:]}"


def one_line(error: Exception) -> str:
    """Return a library's error message on one line, truncated if it is very long."""
    return " ".join(str(error).split())[:400] or type(error).__name__


class LossyStream:
    """A text stream for messages. Drops text that cannot be written, because the disk is full or
    the reader is gone: a message must never end the work that it reports.
    """

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # ValueError: it has been closed
            self._stream.write(text)
            self._stream.flush()

    def flush(self) -> None:
        self.write("")


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Context manager for importing packages from an optional extra in ``pyproject.toml``.

    Use it where the package is needed::

        with needs_extra("report"):
            import jinja2

    Raises:
        UserError: a package is not installed. The message gives the command to install the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "transformer_jax"):
            raise
        raise UserError(
            f"{package} is not installed. Install it with: pip install '.[{extra}]' (in a clone; "
            f"for a wheel: 'transformer-jax[{extra}]')."
        ) from None
