"""Lines of text files, compressed or not.

Only "\\n" ends a line (``str.splitlines`` would also split at control characters inside sentences).
One "\\r" before it is dropped.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from transformer_jax.errors import UserError
from transformer_jax.storage.files import AnyPath, to_path


def read_lines(source: str | AnyPath | BinaryIO) -> Iterator[str]:
    """Yield the lines of a file, URL or stream without line endings. Decompresses ``.gz`` files.

    Raises ``UserError`` with the file name and line number if a line is not UTF-8.
    """
    return _read(source)


def read_text(source: str | AnyPath | BinaryIO) -> str:
    """Return the text of a file, URL or stream exactly, with its line endings and byte order mark.

    Raises the same errors as ``read_lines``.
    """
    return "".join(_read(source, exact=True))


def _read(source: str | AnyPath | BinaryIO, *, exact: bool = False) -> Iterator[str]:
    """Yield lines; ``exact`` keeps their endings and a byte order mark."""
    path = to_path(source) if isinstance(source, str) else source
    if hasattr(path, "open"):
        with open_file(cast("AnyPath", path)) as stream:
            yield from decoded_lines(stream, str(path), exact=exact)
    else:
        name = str(getattr(path, "name", "the input"))
        yield from decoded_lines(cast(BinaryIO, path), name, exact=exact)


COMPRESSED_SUFFIX = ".gz"
"""End of the names of compressed files."""


@contextmanager
def open_file(path: AnyPath) -> Iterator[io.BufferedIOBase]:
    """Open a file, and decompress it if its name ends in ``COMPRESSED_SUFFIX``."""
    with path.open("rb") as file:
        # Reading lines of files in object stores is slow without a buffer.
        buffered = io.BufferedReader(cast(Any, file), 2**20)
        if not str(path).endswith(COMPRESSED_SUFFIX):
            yield buffered
            return
        try:
            yield gzip.GzipFile(fileobj=cast(BinaryIO, buffered))
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise UserError(
                f"File {str(path)!r} is corrupt or not a gzip file ({error}); expected gzip data, "
                f"because its name ends in {COMPRESSED_SUFFIX}."
            ) from None


def hashed_lines(path: AnyPath, hashes: dict[AnyPath, str]) -> Iterator[bytes]:
    """Yield the lines of a file, then store its hash in ``hashes``."""
    digest = hashlib.sha256()
    with open_file(path) as stream:
        for line in stream:
            digest.update(line)
            yield line
    hashes[path] = digest.hexdigest()


def _likely_encoding(line: bytes) -> str:
    """Name the encoding of a line that is not UTF-8: UTF-16 by its mark, or a single-byte one."""
    is_utf_16 = line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return "UTF-16" if is_utf_16 else "WINDOWS-1252"


def decoded_lines(stream: Iterable[bytes], name: str, *, exact: bool = False) -> Iterator[str]:
    """Yield the lines of a stream as text. Unless ``exact``, without their endings and without a
    byte order mark.
    """
    for number, line in enumerate(stream, 1):
        if not exact:
            line = line.removesuffix(b"\n").removesuffix(b"\r")
        if number == 1 and not exact:
            line = line.removeprefix(codecs.BOM_UTF8)
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name}, line {number}: byte {error.start + 1} is not valid UTF-8. If the file "
                f"has another encoding, convert it: iconv -f {_likely_encoding(line)} -t UTF-8. "
                "Otherwise, fix the line."
            ) from None
        yield text
