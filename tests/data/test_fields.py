"""Pairs in named fields: Parquet, JSONL and TSV give what the same pairs give as text."""

import dataclasses
import gzip
import importlib.util
import json
import os
import random
import socket
import time
from pathlib import Path

import chex
import fsspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from number_names import number_files
from pyarrow import parquet

from transformer_jax.data.batching import BatchPlan
from transformer_jax.data.corpus import build_corpus
from transformer_jax.data.sources import ParallelText, read_pairs
from transformer_jax.errors import UserError
from transformer_jax.settings.config import BatchConfig, DataConfig, PairsConfig, TokenizerConfig
from transformer_jax.tokenization.subword_sampling import BpeDropout
from transformer_jax.tokenization.tokenizer import Tokenizer

NUMBERS = number_files(3000)
PAIRS = list(read_pairs(NUMBERS))
KINDS = ["parquet", "jsonl", "tsv"]
DE_EN = {"source_field": "en", "target_field": "de"}


def config_of(kind, *names, **settings):
    fields = {} if kind == "tsv" else DE_EN
    return PairsConfig(kind, names, **(fields | settings))


def write(file, pairs, nested=False, **options):
    """Write (en, de) pairs in the format that the file's name ends in, and return its config."""
    kind = file.name.removesuffix(".gz").rpartition(".")[2]
    rows = [{"en": source, "de": target} for source, target in pairs]
    rows = [
        {"id": i, "translation": row} if nested else {"id": i} | row for i, row in enumerate(rows)
    ]
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), file, **options)
        return config_of(kind, str(file))
    lines = map(json.dumps, rows) if kind == "jsonl" else map("\t".join, pairs)
    data = "".join(f"{line}\n" for line in lines).encode()
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    return config_of(kind, str(file))


def read(config, root=""):
    return list(read_pairs(config, str(root)))


# Pairs


def sources(folder):
    """A config of every kind of source, by name."""
    write(folder / "a.tsv", PAIRS[:4])
    names = {}
    for side, text in enumerate(zip(*PAIRS[:4], strict=True)):
        data = "".join(f"{line}\n" for line in text).encode()
        for suffix, content in (("", data), (".gz", gzip.compress(data))):
            (folder / f"text.{side}{suffix}").write_bytes(content)
            names.setdefault(suffix, []).append((str(folder / f"text.{side}{suffix}"),))
    (folder / "links").write_text("0-0\n" * 4)
    text = names[""]
    yield "text", PairsConfig("text", *text)
    yield "gzip", PairsConfig("text", *names[".gz"])
    yield "limit", PairsConfig("text", *text, limit=2)
    yield "alignments", PairsConfig("text", *text, alignments=(str(folder / "links"),))
    two = [side * 2 for side in text]
    yield "mix", PairsConfig("text", *two, weights=(1.0, 3.0))
    yield "tags", PairsConfig("text", *two, tags=("", "<x>"))
    for name in ("b.parquet", "b.jsonl", "b.jsonl.gz", "b.tsv", "b.tsv.gz"):
        yield name, write(folder / name, PAIRS[:4])


def test_the_fingerprint_is_the_same_before_and_after_reading(tmp_path):
    """Files that are read to the end are hashed as they are read."""
    for name, config in sources(tmp_path):
        before = ParallelText(config).fingerprint
        text = ParallelText(config)
        assert list(text.pairs()), name
        assert text.fingerprint == before, name
        text = ParallelText(config)
        next(iter(text.pairs()))  # read in part
        assert text.fingerprint == before, name


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(PAIRS, TokenizerConfig(vocab_size=80))


def build(config, tokenizer, folder):
    """Build the corpus of these pairs, with copies of each in other segmentations."""
    data = DataConfig(workers=1)
    return build_corpus(config, tokenizer, data, folder, sampling=BpeDropout(0.1, 2))


@pytest.fixture(scope="module")
def as_text(tokenizer, tmp_path_factory):
    """The corpus of ``PAIRS`` as text files."""
    return build(NUMBERS, tokenizer, tmp_path_factory.mktemp("corpora"))


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.tsv", "a.tsv.gz"])
def test_a_corpus_is_that_of_the_same_pairs_as_text(tmp_path, name, tokenizer, as_text):
    config = write(tmp_path / name, PAIRS, row_group_size=700)
    assert read(config) == PAIRS
    as_rows = build(config, tokenizer, tmp_path / "corpora")
    assert as_text.fingerprint != as_rows.fingerprint
    chex.assert_trees_all_equal(as_text.sides, as_rows.sides)
    batches = BatchConfig(tokens=512)
    plans = [BatchPlan(corpus, batches, seed=3) for corpus in (as_text, as_rows)]
    for step in range(60):  # more than an epoch
        chex.assert_trees_all_equal(*(plan.batch(step) for plan in plans))


@given(st.lists(st.tuples(*[st.text(st.characters(exclude_categories=["Cs"]))] * 2)))
def test_any_text_is_read_back_with_newlines_as_spaces(tmp_path_factory, pairs):
    folder = tmp_path_factory.mktemp("text")
    expected = [tuple(side.replace("\n", " ") for side in pair) for pair in pairs]
    for name in ("a.parquet", "a.jsonl") if pairs else ["a.jsonl"]:
        assert read(write(folder / name, pairs)) == expected


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_fields_of_the_field_translation(tmp_path, name):
    """As in Hugging Face's translation datasets. Fields at the top level come first."""
    config = write(tmp_path / name, PAIRS[:9], nested=True)
    assert read(config) == PAIRS[:9]
    swapped = dataclasses.replace(config, source_field="de", target_field="en")
    assert read(swapped) == [(target, source) for source, target in PAIRS[:9]]
    both = [{"en": "a", "de": "b", "translation": {"en": "c", "de": "d", "fr": "e"}}]
    parquet.write_table(pa.Table.from_pylist(both), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps(both[0]))
    assert read(config) == [("a", "b")]
    assert read(dataclasses.replace(config, target_field="fr")) == [("c", "e")]
    one = dataclasses.replace(config, source_field="translation", target_field="en")
    with pytest.raises(UserError, match="field 'translation' is {'.*}; expected Unicode text"):
        read(one)


def test_columns_of_tsv_are_counted_from_1_and_nothing_is_quoted(tmp_path):
    (tmp_path / "a.tsv").write_bytes(b'\xef\xbb\xbf7\t"Hi\\t\tSalut"\t\r\n8\t\tx\ty\n')
    assert read(config_of("tsv", "a.tsv"), tmp_path) == [("7", '"Hi\\t'), ("8", "")]
    fields = {"source_field": "3", "target_field": "2"}
    assert read(config_of("tsv", "a.tsv", **fields), tmp_path) == [('Salut"', '"Hi\\t'), ("x", "")]


def test_columns_with_other_representations_of_text(tmp_path):
    texts = ["eins", "zwei", "eins"]
    for column in (
        pa.array(texts, pa.large_string()),
        pa.array(texts).dictionary_encode(),
        pa.array(texts).cast(pa.string_view()),
        pa.array([text.encode() for text in texts]),  # old writers do not mark text as such
    ):
        table = pa.table({"de": column, "en": texts})
        parquet.write_table(table, tmp_path / "a.parquet")
        assert read(config_of("parquet", "a.parquet"), tmp_path) == [*zip(texts, texts)][::1]


# Several files, and files that change


@pytest.mark.parametrize("kind", KINDS)
def test_several_files_and_globs(tmp_path, kind):
    for i, part in enumerate(("b", "c", "a")):
        write(tmp_path / f"part-{part}.{kind}", PAIRS[i : i + 2])
    expected = [*PAIRS[2:4], *PAIRS[0:2], *PAIRS[1:3]]
    config = config_of(kind, f"part-*.{kind}")
    assert read(config, tmp_path) == expected
    again = dataclasses.replace(config, source=(*config.source, f"part-b.{kind}"))
    assert read(again, tmp_path) == expected + PAIRS[:2]
    assert read(dataclasses.replace(again, limit=7), tmp_path) == (expected + PAIRS[:2])[:7]
    store = fsspec.filesystem("memory")
    store.store.clear()
    for file in tmp_path.iterdir():
        store.pipe_file(f"/bucket/data/{file.name}", file.read_bytes())
    remote = "memory://bucket/data"
    assert read(config, remote) == read(config_of(kind, f"{remote}/part-*.{kind}")) == expected
    assert (
        ParallelText(config, remote).fingerprint == ParallelText(config, str(tmp_path)).fingerprint
    )
    if kind == "parquet":
        assert read(config_of(kind, remote)) == read(config_of(kind, "data/"), "memory://bucket")
    store.store.clear()


def test_a_folder_of_parquet_files(tmp_path):
    folder = tmp_path / "data[1]"
    folder.mkdir()
    for part in (2, 0, 1):
        write(folder / f"train-0000{part}-of-00003.parquet", PAIRS[part : part + 1])
    (folder / "README.md").write_text("not data")
    for name, root in (("data[1]", tmp_path), (f"{folder}/", "elsewhere"), (".", folder)):
        assert read(config_of("parquet", name), root) == PAIRS[:3]
    write(folder / "test-00000-of-00001.parquet", PAIRS[:1])
    with pytest.raises(
        UserError,
        match=r"'data\[1\]' contains several splits \(test, train\); choose one with a glob",
    ):
        read(config_of("parquet", "data[1]"), tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"'none/\*\.parquet' does not match any files"):
        read(config_of("parquet", "none"), tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ["train", "validation", "test"],
        ["train", "valid"],
        ["my_Training.0", "my_dev.0"],
        ["train-00000-of-00001-3f2a", "validation-00000-of-00001-aa17"],
        ["wmt_train_0000", "newstest2014-00000-of-00001"],
    ],
)
def test_a_folder_of_several_splits_is_an_error(tmp_path, names):
    for name in names:
        write(tmp_path / f"{name}.parquet", PAIRS[:1])
    with pytest.raises(UserError, match=r"contains several splits \(.*train.*\); choose one with"):
        read(config_of("parquet", str(tmp_path)))


def test_a_folder_of_other_names_is_read_whole(tmp_path):
    for name in ("0000", "0001", "part-a", "retrain", "contest"):
        write(tmp_path / f"{name}.parquet", PAIRS[:1])
    assert read(config_of("parquet", str(tmp_path))) == 5 * PAIRS[:1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [None, 3])
def test_a_changed_file_gives_another_corpus(tmp_path, kind, limit):
    file = tmp_path / f"a.{kind}"
    config = dataclasses.replace(write(file, PAIRS[:200]), limit=limit)
    tokenizer = Tokenizer.train(PAIRS, TokenizerConfig(vocab_size=80))

    def build(text):
        return build_corpus(
            text, tokenizer, DataConfig(workers=1), tmp_path / "corpora"
        ).fingerprint

    text, state = ParallelText(config), file.stat()
    first = build(text)
    assert build(ParallelText(config)) == first
    assert build(dataclasses.replace(config, limit=2)) != first
    write(file, PAIRS[:100] + PAIRS[101:200])
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    second = build(config)
    assert second != first and len(list((tmp_path / "corpora").iterdir())) == 3
    if limit is None:  # a text that was opened before notices when it is read
        list(text.pairs())
        assert build(text) == second
    write(file, PAIRS[:200])
    assert build(config) == first


# Streaming


@pytest.fixture
def large(tmp_path):
    """120,000 pairs that hardly compress: 40 MB."""
    draw = random.Random(0)
    pairs = [(f"{i} {draw.randbytes(80).hex()}", draw.randbytes(80).hex()) for i in range(120_000)]
    return pairs, tmp_path / "large.parquet"


class Counting:
    """A file that counts the bytes that are read."""

    def __init__(self, file):
        self._file, self.count = file, 0

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def readinto(self, buffer):
        size = self._file.readinto(buffer)
        self.count += size
        return size


@pytest.mark.parametrize("row_group_size", [3000, 120_000])
def test_parquet_is_streamed(large, monkeypatch, row_group_size):
    """A few pairs need a few pages, and all pairs never need the memory of a whole file."""
    pairs, file = large
    config = write(file, pairs, row_group_size=row_group_size)
    opened, open_ = [], Path.open

    def counted(self, *arguments):
        opened.append(Counting(open_(self, *arguments)))
        return opened[-1]

    monkeypatch.setattr(Path, "open", counted)
    size = file.stat().st_size
    assert read(dataclasses.replace(config, limit=10)) == pairs[:10]
    assert 0 < opened[0].count < (0.1 if row_group_size == 3000 else 0.5) * size
    before, most = pa.total_allocated_bytes(), 0
    for pair, expected in zip(read_pairs(config), pairs, strict=True):
        assert pair == expected
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 0.7 * size


@pytest.mark.parametrize("kind", ["jsonl", "tsv"])
def test_lines_are_read_when_they_are_needed(tmp_path, kind):
    config = write(tmp_path / f"a.{kind}", PAIRS[:10])
    with (tmp_path / f"a.{kind}").open("ab") as file:
        file.write(b"\xff\n")
    pairs = read_pairs(config)
    assert [next(pairs) for _ in range(10)] == PAIRS[:10]
    with pytest.raises(UserError, match=rf"a\.{kind}, line 11: byte 1 is not valid UTF-8"):
        next(pairs)


# Invalid data

FIX = r"; expected Unicode text\. Correct it, or set source_field and .* two of the fields"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"en": ["a"], "fr": ["b"]}, rf"a\.parquet: field 'de' is missing{FIX}: en, fr\."),
        ({"translation": [{"en": "a", "fr": "b"}]}, rf": field 'de' is missing{FIX}: en, fr\."),
        ({"translation": ["a"], "en": ["b"]}, rf": field 'de' is missing{FIX}: translation, en\."),
        ({"en": ["a", "b"], "de": ["c", None]}, rf"a\.parquet, row 2: field 'de' is None{FIX}"),
        ({"translation": [{"en": "a", "de": "b"}, None]}, "row 2: field 'en' is missing"),
        ({"en": ["a"], "de": [7]}, rf"row 1: field 'de' is 7{FIX}"),
        ({"en": ["a"], "de": [["b", "c"]]}, rf"row 1: field 'de' is \['b', 'c'\]{FIX}"),
        ({"en": ["a"], "de": [{"x": "b"}]}, rf"a\.parquet: field 'de' is {{'x': ''}}{FIX}"),
        ({"en": [b"a"], "de": [b"b\xff"]}, rf"row 1: field 'de' is b'b\\xff'{FIX}"),
    ],
)
def test_parquet_without_the_fields(tmp_path, columns, message):
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=message):
        read(config_of("parquet", "a.parquet"), tmp_path)


def test_a_null_is_found_in_its_row_of_a_long_file(tmp_path):
    pairs = [("a", "b")] * 5000
    pairs[3210] = ("a", None)
    with pytest.raises(UserError, match="row 3211: field 'de' is None"):
        read(write(tmp_path / "a.parquet", pairs, row_group_size=1500))


def test_corrupt_parquet(tmp_path):
    file, draw = tmp_path / "a.parquet", random.Random(0)
    config = write(file, [(draw.randbytes(50).hex(), "b") for _ in range(5000)])
    content = file.read_bytes()
    middle = bytearray(content)
    middle[100_000:200_000] = draw.randbytes(100_000)
    for data in (b"", b"one\ttwo\n" * 9, content[:-9], content[: len(content) // 2], bytes(middle)):
        file.write_bytes(data)
        with pytest.raises(UserError, match=r"a\.parquet' cannot be read as a Parquet .* Expected"):
            read(config)
    invalid = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
    parquet.write_table(pa.table({"en": invalid, "de": ["b"]}), file)
    with pytest.raises(UserError, match=r"a\.parquet' cannot be read as a Parquet .*utf-8"):
        read(config)


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [
        ("jsonl", "", "line 2 is not valid JSON: Expecting value"),
        ("jsonl", "{'en': 1}", "line 2 is not valid JSON: .*"),
        ("jsonl", "[" * 99_999, "line 2 is not valid JSON: .*"),
        ("jsonl", '["a", "b"]', r"line 2 contains \['a', 'b'\]; expected a JSON object"),
        ("jsonl", '{"en": "a"}', rf"line 2: field 'de' is missing{FIX}: en\."),
        ("jsonl", '{"en": "a", "de": null}', rf"line 2: field 'de' is None{FIX}: en, de\."),
        ("jsonl", '{"en": "a", "de": ["b"]}', rf"line 2: field 'de' is \['b'\]{FIX}: en, de\."),
        ("jsonl", r'{"en": "\ud800", "de": "b"}', rf"line 2: field 'en' is '\\ud800'{FIX}"),
        ("jsonl", '{"translation": "a"}', rf"line 2: field 'en' is missing{FIX}: translation\."),
        ("tsv", "", rf"line 2: field '2' is missing{FIX}: 1\."),
        ("tsv", "one two", rf"line 2: field '2' is missing{FIX}: 1\."),
    ],
)
def test_lines_without_the_fields(tmp_path, kind, line, message):
    config = write(tmp_path / f"a.{kind}", PAIRS[:1])
    with (tmp_path / f"a.{kind}").open("a") as file:
        file.write(f"{line}\nmore\n")
    with pytest.raises(UserError, match=rf"a\.{kind}, {message}"):
        read(config)


def test_columns_of_tsv_that_do_not_exist(tmp_path):
    write(tmp_path / "a.tsv", PAIRS[:1])
    for number in ("0", "3", "en"):
        with pytest.raises(UserError, match=f"line 1: field '{number}' is missing{FIX}: 1, 2"):
            read(config_of("tsv", "a.tsv", source_field=number), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_files(tmp_path, kind):
    with pytest.raises(UserError, match=f"'.*none' is not a file; expected a {kind} file"):
        read_pairs(config_of(kind, "none"), str(tmp_path))
    with pytest.raises(UserError, match=r"'none\*' does not match any files"):
        read_pairs(config_of(kind, "none*"), str(tmp_path))


@pytest.mark.parametrize("name", ["train-*.parquet", "train-00000-of-00001.parquet", ""])
def test_hugging_face_without_a_network(monkeypatch, name):
    pytest.importorskip("huggingface_hub")

    def fail(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    start = time.monotonic()
    with pytest.raises(
        UserError, match="'hf://datasets/.*' cannot be read: (Cannot reach|.* not known)"
    ):
        read(config_of("parquet", f"hf://datasets/no-owner/no-name/data/{name}"))
    assert time.monotonic() - start < 30


def test_a_url_whose_package_is_not_installed():
    if importlib.util.find_spec("adlfs"):
        pytest.skip("adlfs is installed")
    with pytest.raises(
        UserError, match="'abfs://a/b' cannot be opened: Install adlfs .* Expected a"
    ):
        read(config_of("parquet", "abfs://a/b"))
