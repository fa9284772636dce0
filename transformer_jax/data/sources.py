"""Sentence pairs from parallel text files or TensorFlow Datasets.

All sources are streamed; files are never loaded into memory as a whole. Only "\\n" ends a line
(``str.splitlines`` would also split at control characters inside sentences). One "\\r" before it is
dropped.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, islice, zip_longest
from typing import Any, BinaryIO, cast

from transformer_jax.data.files import find_files
from transformer_jax.errors import UserError, needs_extra
from transformer_jax.settings.config import PairsConfig
from transformer_jax.storage.files import AnyPath, to_path


class ParallelText:
    """Sentence pairs of the dataset that a ``PairsConfig`` describes.

    File names are expanded once, on construction. Relative names and globs start from ``root``. For
    TFDS, ``root`` is the folder of prepared datasets. Files are hashed while they are read.

    Raises ``UserError`` if a file is missing.
    """

    def __init__(self, config: PairsConfig, root: str = "") -> None:
        self.config, self.root = config, root
        names = zip(config.source, config.target) if config.kind == "text" else ()
        self.files = find_files(names, root)
        """(source, target) files of kind text; otherwise empty."""
        self.hashes: dict[AnyPath, str] = {}
        """SHA-256 of each file's content, set once the file has been read to its end."""

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield the (source, target) sentences in order. Raises ``UserError`` on invalid UTF-8."""
        pairs = self._read_tfds() if self.config.kind == "tfds" else self._read_files()
        return islice(pairs, self.config.limit)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the settings and file contents that determine the pairs.

        File names and dates do not matter. Reads only files that have not already been read to the
        end.
        """
        config = self.config
        fields: list[Any] = [config.kind, config.source_field, config.target_field, config.split]
        fields += [config.limit]
        if config.kind == "tfds":
            examples = self._tfds_examples()
            fields += [examples.dataset_info.full_name, len(examples)]
        for file in chain.from_iterable(zip(*self.files)):
            if file not in self.hashes:
                with _opened(file) as stream:
                    self.hashes[file] = hashlib.file_digest(stream, "sha256").hexdigest()
            fields.append(self.hashes[file])
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()

    def _read_files(self) -> Iterator[tuple[str, str]]:
        """Yield corresponding lines of source and target, one pair of files after another."""
        for files in self.files:
            sides = [_decoded(_hashed(file, self.hashes), str(file)) for file in files]
            for number, (source, target) in enumerate(zip_longest(*sides), 1):
                if source is None or target is None:
                    counts = [
                        number - (line is None) + sum(1 for _ in side)
                        for line, side in zip((source, target), sides)
                    ]
                    raise UserError(
                        f"{str(files[0])!r} and {str(files[1])!r} have different numbers of lines "
                        f"({counts[0]:,} and {counts[1]:,}). Parallel files must match line by "
                        "line."
                    )
                yield source, target

    def _read_tfds(self) -> Iterator[tuple[str, str]]:
        config, examples = self.config, self._tfds_examples()
        for start in range(0, len(examples), 1024):
            block = range(start, min(start + 1024, len(examples)))
            for example in examples.__getitems__(block):
                sides = [example.get(field) for field in (config.source_field, config.target_field)]
                if not all(isinstance(side, bytes) for side in sides):
                    raise UserError(
                        f"{config.source[0]} ({config.split}) has no text fields "
                        f"{config.source_field!r} and {config.target_field!r}; expected "
                        f"source_field and target_field to be two of: {', '.join(example)}."
                    )
                source, target = (side.decode().replace("\n", " ") for side in sides)
                yield source, target

    def _tfds_examples(self) -> Any:
        with needs_extra("tfds"):
            import tensorflow_datasets as tfds  # slow to import, and few runs need it

        name, split = self.config.source[0], self.config.split
        try:
            # The array_record format can be read without TensorFlow.
            return tfds.data_source(
                name,
                split=split,
                data_dir=self.root or None,
                builder_kwargs={"file_format": "array_record"},
            )
        except (tfds.core.DatasetNotFoundError, ValueError, KeyError) as error:
            text = " ".join(str(error).split())
            raise UserError(
                f"TensorFlow Datasets cannot open {name!r}, split {split!r} (data.root = "
                f"{self.root!r}): {text}"
            ) from None


def read_pairs(config: PairsConfig, root: str = "") -> Iterator[tuple[str, str]]:
    """Yield the (source, target) sentences of a dataset, in order.

    Relative file names and globs start from ``root``. For TFDS, ``root`` is the folder of prepared
    datasets. Missing files raise an error immediately; invalid lines raise one when they are read.
    """
    return ParallelText(config, root).pairs()


def read_lines(source: str | AnyPath | BinaryIO) -> Iterator[str]:
    """Yield the lines of a file, URL or stream without line endings. Decompresses ``.gz`` files.

    Raises ``UserError`` with the file name and line number if a line is not UTF-8.
    """
    path = to_path(source) if isinstance(source, str) else source
    if hasattr(path, "open"):
        opened: AbstractContextManager[Iterable[bytes]] = _opened(cast("AnyPath", path))
        name = str(path)
    else:
        opened = nullcontext(cast(BinaryIO, path))
        name = str(getattr(path, "name", "the input"))
    with opened as stream:
        yield from _decoded(stream, name)


@contextmanager
def _opened(path: AnyPath) -> Iterator[io.BufferedIOBase]:
    """Open a file, and decompress it if its name ends in .gz."""
    name = str(path)
    try:
        with path.open("rb") as file:
            # Reading lines of files in object stores is slow without a buffer.
            buffered = io.BufferedReader(cast(Any, file), 2**20)
            yield gzip.GzipFile(fileobj=buffered) if name.endswith(".gz") else buffered
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(
            f"File {name!r} is corrupt or not a gzip file ({error}); expected gzip data, "
            "because its name ends in .gz."
        ) from None


def _hashed(path: AnyPath, hashes: dict[AnyPath, str]) -> Iterator[bytes]:
    """Yield the lines of a file, then store its hash in ``hashes``."""
    digest = hashlib.sha256()
    with _opened(path) as stream:
        for line in stream:
            digest.update(line)
            yield line
    hashes[path] = digest.hexdigest()


def _decoded(stream: Iterable[bytes], name: str) -> Iterator[str]:
    """Yield the lines of a stream as text, without line endings."""
    for number, line in enumerate(stream, 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        try:
            text = line.removesuffix(b"\n").removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name}, line {number}: byte {error.start + 1} is not valid UTF-8. Fix the line, "
                "or remove all invalid bytes with `iconv -c -t UTF-8`."
            ) from None
        yield text
