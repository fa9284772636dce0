"""Data sources: text files, TFDS, number names; errors name the file and the line."""

import dataclasses
import gzip
import importlib
import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_jax.data.sources import ParallelText, read_pairs
from transformer_jax.data.text_files import read_lines
from transformer_jax.errors import UserError
from transformer_jax.settings.config import PairsConfig

# Characters at which str.splitlines() would also break a line.
ODD_LINES = ["a\x0bb\x0cc", "d\x1c\x1d\x1ee", "f\x85g\u2028h\u2029", "", "i\rj", " k "]


def text(tmp_path, source, target, name="train", **settings):
    """Write two parallel files with these bytes and return their config."""
    (tmp_path / f"{name}.en").write_bytes(source)
    (tmp_path / f"{name}.de").write_bytes(target)
    return PairsConfig(kind="text", source=(f"{name}.en",), target=(f"{name}.de",), **settings)


def read(config, root):
    return list(read_pairs(config, str(root)))


# Lines


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\ufeff"))),
    st.booleans(),
)
def test_only_a_newline_ends_a_line(lines, ended):
    data = "\n".join(lines).encode() + (b"\n" if ended and lines else b"")
    expected = lines if (ended or not lines or lines[-1]) else lines[:-1]
    assert list(read_lines(io.BytesIO(data))) == expected


def test_one_carriage_return_is_part_of_the_line_end():
    assert list(read_lines(io.BytesIO(b"a\r\nb\r\r\n\r\nc\rd"))) == ["a", "b\r", "", "c\rd"]


def test_lines_of_files(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfone\ntwo")  # with byte-order mark
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"one\ntwo\n"))
    assert (
        list(read_lines(tmp_path / "a"))
        == list(read_lines(str(tmp_path / "b.gz")))
        == ["one", "two"]
    )
    # only a byte-order mark at the start is removed, as in files
    assert list(read_lines(io.BytesIO(b"\xef\xbb\xbfone\n\xef\xbb\xbftwo"))) == ["one", "\ufefftwo"]
    with pytest.raises(
        UserError, match=r"the input, line 2: byte 3 is not valid UTF-8. If the file has"
    ):
        list(read_lines(io.BytesIO(b"ok\nab\xff\n")))


# Plain text


def test_text_in_several_files_some_compressed(tmp_path):
    text(tmp_path, "\n".join(ODD_LINES).encode(), "\n".join(reversed(ODD_LINES)).encode(), name="a")
    (tmp_path / "b.en.gz").write_bytes(gzip.compress(b"x\r\ny\r\n"))
    (tmp_path / "b.de").write_bytes(b"X\nY")
    config = PairsConfig(
        kind="text", source=("a.en", str(tmp_path / "b.en.gz")), target=("a.de", "b.de")
    )
    expected = [*zip(ODD_LINES, reversed(ODD_LINES), strict=True), ("x", "X"), ("y", "Y")]
    assert read(config, tmp_path) == expected
    limited = PairsConfig(kind="text", source=config.source, target=config.target, limit=7)
    assert read(limited, tmp_path) == expected[:7]


def test_a_file_named_twice_is_read_twice(tmp_path):
    config = text(tmp_path, b"a\nb\n", b"A\nB\n")
    twice = dataclasses.replace(config, source=config.source * 2, target=config.target * 2)
    assert read(twice, tmp_path) == [("a", "A"), ("b", "B")] * 2


def test_reading_streams(tmp_path):
    config = text(tmp_path, b"a\n" * 10 + b"\xff\n", b"b\n" * 11)
    pairs = read_pairs(config, str(tmp_path))
    # the invalid line 11 is not read yet
    assert [next(pairs) for _ in range(10)] == [("a", "b")] * 10


@pytest.mark.parametrize(("source", "target"), [(5, 3), (3, 5), (0, 2), (2, 0)])
def test_sides_of_different_length(tmp_path, source, target):
    config = text(tmp_path, b"a\n" * source, b"b\n" * target)
    with pytest.raises(
        UserError,
        match=r"train.en' and '.*train.de' have different numbers of lines "
        rf"\({source} and {target}\)",
    ):
        read(config, tmp_path)


def test_corrupt_gzip(tmp_path):
    for damaged in (b"no gzip", gzip.compress(b"line\n" * 1000)[:-9]):
        (tmp_path / "a.gz").write_bytes(damaged)
        with pytest.raises(UserError, match=r"a\.gz' is corrupt or not a gzip file"):
            list(read_lines(tmp_path / "a.gz"))


def test_invalid_utf8_names_the_line(tmp_path):
    config = text(tmp_path, b"a\nb\xff\nc\nd\n", b"A\nB\nC\n\xc3\x28\n")
    with pytest.raises(UserError, match=r"train\.en, line 2: byte 2 is not valid UTF-8"):
        read(config, tmp_path)


@pytest.mark.parametrize(
    ("encoding", "name"), [("utf-16", "UTF-16"), ("cp1252", "WINDOWS-1252")], ids=["mark", "byte"]
)
def test_another_encoding_is_converted_without_loss(tmp_path, encoding, name):
    line = "ein Übel\n"
    (tmp_path / "a.txt").write_bytes(line.encode(encoding))
    with pytest.raises(UserError, match=f"convert it: iconv -f {name} -t UTF-8"):
        list(read_lines(tmp_path / "a.txt"))
    assert line.encode(encoding).decode(name) == line


def test_no_source_is_set():
    assert list(read_pairs(PairsConfig())) == []


# TFDS

BUILDER = '''
import tensorflow_datasets as tfds

class {camel}(tfds.core.GeneratorBasedBuilder):
    """Two sentences."""
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.Translation(languages=("de", "en"))
        return self.dataset_info_from_configs(features=features, supervised_keys=("de", "en"))

    def _split_generators(self, manager):
        return {{"train": self._generate_examples(2000), "validation": self._generate_examples(3)}}

    def _generate_examples(self, count):
        for i in range(count):
            yield i, {{"de": f"{{i}} \\u00fc", "en": f"{{i}} u"}}
'''


@pytest.fixture
def tfds_name(tmp_path, monkeypatch):
    """Name of a small dataset with an importable builder, not prepared yet."""
    name = "tiny_translate_for_tests"
    package = tmp_path / "builders" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / f"{name}.py").write_text(BUILDER.format(camel="TinyTranslateForTests"))
    monkeypatch.syspath_prepend(tmp_path / "builders")
    importlib.import_module(f"{name}.{name}")
    return name


@pytest.mark.filterwarnings("ignore")  # TFDS's and its dependencies' own
def test_tfds_without_tensorflow(tmp_path, tfds_name):
    def config(source_field="en", target_field="de", split="train", **settings):
        fields = {"source_field": source_field, "target_field": target_field, "split": split}
        return PairsConfig(kind="tfds", source=(tfds_name,), **fields, **settings)

    root = tmp_path / "prepared"
    pairs = read(config(), root)
    assert len(pairs) == 2000
    assert set(pairs) == {(f"{i} u", f"{i} \u00fc") for i in range(2000)}
    assert pairs == read(config(), root)
    assert read(config("de", "en", limit=5), root) == [
        (target, source) for source, target in pairs[:5]
    ]
    assert len(read(config(split="validation"), root)) == 3
    assert (
        ParallelText(config(), str(root)).fingerprint
        != ParallelText(config(split="validation"), str(root)).fingerprint
    )
    assert "tensorflow" not in sys.modules
    with pytest.raises(
        UserError,
        match=r"\(train\), example 1: field 'fr' is missing; .* two of the fields: de, en",
    ):
        read(config(target_field="fr"), root)
    with pytest.raises(UserError, match=r"TensorFlow Datasets cannot open .*, split 'nowhere'"):
        read(config(split="nowhere"), root)
    with pytest.raises(
        UserError, match=r"TensorFlow Datasets cannot open 'no_such_dataset_at_all'"
    ):
        missing = dataclasses.replace(config(), source=("no_such_dataset_at_all",))
        read(missing, root)


# Fingerprint


def test_fingerprint_depends_on_contents_not_names(tmp_path):
    first = text(tmp_path, b"a\n", b"b\n")
    same = text(tmp_path, b"a\n", b"b\n", name="copy")
    other = text(tmp_path, b"a\n", b"c\n", name="other")
    swapped = text(tmp_path, b"b\n", b"a\n", name="swapped")
    limited = text(tmp_path, b"a\n", b"b\n", name="limited", limit=1)
    prints = [
        ParallelText(config, str(tmp_path)).fingerprint
        for config in (first, same, other, swapped, limited)
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 99, None])
def test_a_limit_counts_pairs_over_all_files(tmp_path, limit):
    """From the start. Blank lines count, because filters come later."""
    expected = []
    for name, size in (("a", 2), ("b", 3)):
        for side in ("en", "de"):
            lines = [f"{name} {side} {i}" if i != 1 else "" for i in range(size)]
            (tmp_path / f"{name}.{side}").write_text("".join(f"{line}\n" for line in lines))
        expected += [
            (f"{name} en {i}", f"{name} de {i}") if i != 1 else ("", "") for i in range(size)
        ]
    files = {side: (f"a.{side}", f"b.{side}") for side in ("en", "de")}
    config = PairsConfig("text", files["en"], files["de"], limit=limit)
    assert list(read_pairs(config, str(tmp_path))) == expected[:limit]


def test_a_byte_order_mark_is_removed_from_the_first_line_of_each_file_only(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\r\r\n")
    config = PairsConfig("text", ("a", "b"), ("b", "a"))
    line = "\ufefftwo\r"
    assert list(read_pairs(config, str(tmp_path))) == [("one", "one"), (line, line)] * 2
