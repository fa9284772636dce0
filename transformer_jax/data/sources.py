"""Sentence pairs from text, TSV, JSONL and Parquet files, or from TensorFlow Datasets.

All sources are streamed; files are never loaded into memory as a whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple

from transformer_jax.data.files import find_files
from transformer_jax.data.text_files import decoded_lines, hashed_lines, open_file
from transformer_jax.errors import UserError, needs_extra, one_line, short_repr
from transformer_jax.settings.config import PairsConfig
from transformer_jax.storage.files import AnyPath, parse_object
from transformer_jax.tokenization.languages import Languages

_Example = tuple[str, Mapping[str, Any]]  # name in messages, fields


class TextPair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str
    links: set[tuple[int, int]] | None = None
    """Links between their words, as pairs of indices, if the text is aligned."""
    languages: tuple[str, str] = ("", "")
    """Codes of source and target; "" for the model's default."""


class ParallelText:
    """Sentence pairs of the dataset that a ``PairsConfig`` describes.

    File names are expanded once, on construction. Relative names and globs start from ``root``. For
    TFDS, ``root`` is the folder of prepared datasets. Files are hashed while they are read.
    ``parts`` are the corpora of a mix, one for each item of ``config.source``.

    Raises ``UserError`` if a file is missing.
    """

    def __init__(self, config: PairsConfig, root: str = "") -> None:
        self.config = config
        self.root = root
        self.parts = [ParallelText(part, root) for part in config.parts]
        names: list[tuple[str, ...]] = []
        if config.kind not in ("tfds", "none") and not self.parts:
            sides = [config.source]
            if config.kind == "text":
                sides.append(config.target)
            if config.alignments:
                sides.append(config.alignments)
            names = list(zip(*sides))
        self.files = find_files(names, root, config.kind)
        """(source, target) files of kind text, with alignments if given; (file,) of other kinds."""
        self._fields = config.source_field or "1", config.target_field or "2"
        self._language_fields = config.source_language_field, config.target_language_field
        # All items of source that are not parts have the same.
        self._languages = next(iter(config.language_pairs), ("", ""))
        self.hashes: dict[AnyPath, str] = {}
        """SHA-256 of each file's content, set once the file has been read to its end."""

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield the (source, target) sentences in order. Raises ``UserError`` on invalid data."""
        return ((pair.source, pair.target) for pair in self.text_pairs())

    def text_pairs(self, languages: Languages | None = None) -> Iterator[TextPair]:
        """Yield the sentence pairs in order, with their languages and word alignments if given.

        Raises ``UserError`` on invalid data, and for a field with a code that a model with these
        ``languages`` does not have.
        """
        if self.parts:
            for part in self.parts:
                yield from part.text_pairs(languages)
            return
        tags = "".join(f"{tag} " for tag in self.config.tags if tag)
        for pair in islice(self._untagged_pairs(languages), self.config.limit):
            # An empty source stays empty, so the pair is filtered out later.
            yield pair._replace(source=tags + pair.source) if tags and pair.source.strip() else pair

    def _untagged_pairs(self, languages: Languages | None) -> Iterator[TextPair]:
        kind = self.config.kind
        if kind in ("text", "none"):
            yield from self._read_text()
            return
        if kind == "tfds":
            examples = self._read_tfds()
        else:
            read_file = FILE_READERS[kind]
            examples = chain.from_iterable(read_file(self, file) for [file] in self.files)
        for place, example in examples:
            yield self._pair(place, example, languages)

    def _pair(
        self, place: str, example: Mapping[str, Any], languages: Languages | None
    ) -> TextPair:
        """Return the text and the languages in the fields of an example."""
        source, target = _texts(place, example, self._fields, "source_field and target_field")
        if not any(self._language_fields):
            return TextPair(source, target, None, self._languages)
        codes = list(self._languages)
        for side, field in enumerate(self._language_fields):
            if field:
                name = ("source_language", "target_language")[side]
                [codes[side]] = _texts(place, example, [field], f"{name}_field")
                if languages is not None:
                    languages.token(codes[side], f"{place}: {name}")
        return TextPair(source, target, None, (codes[0], codes[1]))

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the settings and file contents that determine the pairs.

        File names and dates do not matter. Reads only files that have not already been read to the
        end.
        """
        config = self.config
        fields: list[Any] = [config.kind, config.source_field, config.target_field, config.split]
        fields += [config.limit, *config.tags]
        if config.alignments:
            fields.append("aligned")
        language_settings = (
            config.source_languages,
            config.target_languages,
            self._language_fields,
        )
        if any(map(any, language_settings)):  # fingerprints of other runs stay as they were
            fields.append(language_settings)
        fields += [part.fingerprint for part in self.parts]
        if config.kind == "tfds":
            examples = self._tfds_examples()
            fields += [examples.dataset_info.full_name, len(examples)]
        for file in chain.from_iterable(zip(*self.files)):
            if file not in self.hashes:
                with open_file(file) as stream:
                    self.hashes[file] = hashlib.file_digest(stream, "sha256").hexdigest()
            fields.append(self.hashes[file])
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()

    def _read_text(self) -> Iterator[TextPair]:
        """Yield corresponding lines of source and target, one pair of files after another, with
        their alignments if given.
        """
        for files in self.files:
            sides = [decoded_lines(hashed_lines(file, self.hashes), str(file)) for file in files]
            for number, lines in enumerate(zip_longest(*sides), 1):
                if None in lines:
                    counts = []
                    for line, side in zip(lines, sides):
                        lines_left = sum(1 for _ in side)
                        counts.append(f"{number - (line is None) + lines_left:,}")
                    raise UserError(
                        f"{' and '.join(repr(str(file)) for file in files)} have different "
                        f"numbers of lines ({' and '.join(counts)}). Parallel files must match "
                        "line by line."
                    )
                source, target, *alignment = lines
                links = None
                if alignment:
                    place = f"{files[2]}, line {number}"
                    links = self._read_word_alignment(place, source, target, alignment[0])
                yield TextPair(source, target, links, self._languages)

    def _read_word_alignment(
        self, place: str, source: str, target: str, alignment: str
    ) -> set[tuple[int, int]]:
        """Return the links in a line of alignments. A tag is one more source word."""
        num_source = len(source.split())
        num_target = len(target.split())
        num_tags = int(any(self.config.tags))
        links = set()
        for link in alignment.split():
            match = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", link)
            if not match or int(match[1]) >= num_source or int(match[2]) >= num_target:
                raise UserError(
                    f"{place}: link {short_repr(link)}; expected SOURCE-TARGET, two words counted "
                    f"from 0, in lines of {num_source} and {num_target} words. Correct the line, "
                    "or empty it for a pair without links."
                )
            links.add((int(match[1]) + num_tags, int(match[2])))
        return links

    def _read_tsv(self, file: AnyPath) -> Iterator[_Example]:
        """Yield the lines of a TSV file. Their fields are numbered from 1."""
        for place, line in self._named_lines(file):
            yield place, {str(i): text for i, text in enumerate(line.split("\t"), 1)}

    def _read_jsonl(self, file: AnyPath) -> Iterator[_Example]:
        """Yield the objects of a JSONL file."""
        for place, line in self._named_lines(file):
            yield place, parse_object(line, place)

    def _named_lines(self, file: AnyPath) -> Iterator[tuple[str, str]]:
        """Yield the lines of a file, each with its name in messages. Hashes the file."""
        lines = decoded_lines(hashed_lines(file, self.hashes), str(file))
        for number, line in enumerate(lines, 1):
            yield f"{file}, line {number}", line

    def _read_parquet(self, file: AnyPath) -> Iterator[_Example]:
        """Yield the rows of a Parquet file. Reads only the columns with the text."""
        with needs_extra("parquet"):
            import pyarrow as pa
            from pyarrow import parquet

        fields = [*self._fields, *filter(None, self._language_fields)]
        columns = [*fields, *(f"translation.{field}" for field in fields)]
        try:
            with open_file(file) as stream:
                # With a buffer and no pre-buffering, memory does not grow with the row groups.
                reader = parquet.ParquetFile(stream, buffer_size=2**23, pre_buffer=False)
                empty = {
                    column.name: {field.name: "" for field in column.type}
                    if pa.types.is_struct(column.type)
                    else ""
                    for column in reader.schema_arrow
                }
                self._pair(str(file), empty, None)  # the columns exist
                # It ignores the columns that do not exist.
                batches = reader.iter_batches(1024, columns=columns)
                rows = chain.from_iterable(batch.to_pylist() for batch in batches)
                for number, row in enumerate(rows, 1):
                    yield f"{file}, row {number}", row
                stream.seek(0)
                self.hashes[file] = hashlib.file_digest(stream, "sha256").hexdigest()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{str(file)!r} cannot be read as a Parquet file ({one_line(error)}). Expected a "
                "complete file; download or write it again."
            ) from None

    def _read_tfds(self) -> Iterator[_Example]:
        config = self.config
        examples = self._tfds_examples()
        for start in range(0, len(examples), 1024):
            block = range(start, min(start + 1024, len(examples)))
            for number, example in enumerate(examples.__getitems__(block), start + 1):
                yield f"{config.source[0]} ({config.split}), example {number}", example

    def _tfds_examples(self) -> Any:
        with needs_extra("tfds"):
            import tensorflow_datasets as tfds  # slow to import, and few runs need it

        name = self.config.source[0]
        split = self.config.split
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


# Readers of one file with both sides, by its kind (``PairsConfig.kind``). They yield each pair as a
# name for messages and its fields, and put the file's SHA-256 into ``hashes``.
FILE_READERS: dict[str, Callable[[ParallelText, AnyPath], Iterator[_Example]]] = {
    "tsv": ParallelText._read_tsv,
    "jsonl": ParallelText._read_jsonl,
    "parquet": ParallelText._read_parquet,
}


def _texts(
    place: str, example: Mapping[str, Any], fields: Sequence[str], settings: str
) -> list[str]:
    """Return the text in these fields of an example, or of its field ``translation``.

    ``settings`` have the names of the fields, for messages.
    """
    inner = example.get("translation")
    if isinstance(inner, dict) and not example.keys() >= set(fields):
        example = inner
    texts = []
    for field in fields:
        value: Any = example.get(field)
        try:
            text = (value if isinstance(value, bytes) else value.encode()).decode()
        except (AttributeError, UnicodeError):  # not text; a lone surrogate or invalid UTF-8
            shown = short_repr(value) if field in example else "missing"
            count = "two" if len(fields) > 1 else "one"
            raise UserError(
                f"{place}: field {field!r} is {shown}; expected Unicode text. Correct it, or set "
                f"{settings} to {count} of the fields: {', '.join(example)}."
            ) from None
        texts.append(text.replace("\n", " "))
    return texts


def read_pairs(config: PairsConfig, root: str = "") -> Iterator[tuple[str, str]]:
    """Yield the (source, target) sentences of a dataset, in order.

    Relative file names and globs start from ``root``. For TFDS, ``root`` is the folder of prepared
    datasets. Missing files raise an error immediately; invalid lines raise one when they are read.
    """
    return ParallelText(config, root).pairs()


def first_pairs(pairs: Iterable[TextPair], limit: int) -> list[TextPair]:
    """Return the first ``limit`` pairs. Of several pairs of languages, each has the same
    part, rounded up.
    """
    by_languages: dict[tuple[str, str], list[TextPair]] = {}
    for pair in pairs:
        by_languages.setdefault(pair.languages, []).append(pair)
    part = -(-limit // max(len(by_languages), 1))
    return [pair for same_languages in by_languages.values() for pair in same_languages[:part]]
