"""Input: text and JSONL, errors by line, shards, lazy reading."""

from __future__ import annotations

import gzip
import io
import json

import pytest

from transformer_jax.errors import UserError
from transformer_jax.translation.input_file import Record, read_records
from transformer_jax.translation.requests import batched


def stream(*lines):
    return io.BytesIO(
        b"".join(line.encode() + b"\n" if isinstance(line, str) else line + b"\n" for line in lines)
    )


def objects(*values, **options):
    return read_records(stream(*map(json.dumps, values)), "jsonl", **options)


def test_text_lines_are_unchanged():
    lines = ("one", "", '{"text": "two"}')
    expected = [Record(text, line_number=number) for number, text in enumerate(lines, 1)]
    assert list(read_records(stream(*lines))) == expected


def test_objects_have_text_and_prefix():
    [plain, forced] = objects({"text": "one\ntwo"}, {"id": 7, "text": "two", "prefix": "Z"})
    assert (plain.line_number, plain.text, plain.prefix) == (1, "one two", "")
    assert (forced.line_number, forced.text, forced.prefix) == (2, "two", "Z")
    fields = {name: json.loads(value) for name, value in forced.fields}
    assert fields == {"id": 7, "text": "two", "prefix": "Z"}
    assert [record.text for record in objects({"en": "one", "text": 3}, text_field="en")] == ["one"]
    [null] = objects({"text": "x", "prefix": None})  # as in tables where each line has all fields
    assert (null.text, null.prefix) == ("x", "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3 is not valid JSON"),
        ("", "line 3 is not valid JSON"),
        ("[" * 100_000, "line 3 is not valid JSON"),
        ("9" * 5000, "line 3 is a JSON float; expected an object"),
        (f'{{"text": {"9" * 10**6}}}', "line 3: field 'text' is inf; expected text"),
        ("[1]", "line 3 is a JSON list; expected an object with a 'text' field"),
        ('{"id": 1}', "line 3 has no 'text' field.*--text-field.*Fields of this line: id"),
        ('{"source": "x", "id": 1}', "Fields of this line: source, id"),
        ("{}", "Fields of this line: none"),
        ('{"text": 5}', "line 3: field 'text' is 5; expected text"),
        ('{"text": "x", "y": [NaN]}', "line 3 is not valid JSON .*'NaN'"),
        ('{"text": "x", "y": -Infinity}', "line 3 is not valid JSON .*'-Infinity'"),
        ('{"text": "x", "prefix": 7}', "line 3: field 'prefix' is 7"),
        ('{"text": null}', "line 3: field 'text' is None; expected text"),
        (r'{"text": "\ud800"}', "line 3: field 'text' is not valid Unicode"),
        (b"\xff", "line 3: byte 1 is not valid UTF-8"),
        (json.dumps({"text": [0] * 9000}), r"line 3: field 'text' is .{50,150}; expected text"),
    ],
)
def test_errors_name_the_line_and_keep_the_lines_before_it(line, message):
    good = json.dumps({"text": "x"})
    for size in (1, 2, 3, 9):
        found = batched(read_records(stream(good, good, line, good), "jsonl"), size)
        given = []
        with pytest.raises(UserError, match=message):
            given.extend(record.line_number for block in found for record in block)
        assert given == [1, 2]


def test_shards_share_the_lines():
    lines = [f"line {i}" for i in range(11)]
    shards = [
        [(r.line_number, r.text) for r in read_records(stream(*lines), shard=(i, 3))]
        for i in range(3)
    ]
    assert sorted(line for shard in shards for line in shard) == list(enumerate(lines, 1))
    assert [number for number, _ in shards[1]] == [2, 5, 8, 11]


def test_a_shard_does_not_parse_the_lines_of_others():
    good = json.dumps({"text": "x"})
    assert len(list(read_records(stream(good, "{", good), "jsonl", shard=(0, 2)))) == 2


def test_gzip_input(tmp_path):
    path = tmp_path / "in.gz"
    path.write_bytes(gzip.compress(b"one\ntwo\n"))
    assert [r.text for r in read_records(path)] == ["one", "two"]
    path.write_bytes(gzip.compress(b"one\n\xff\n"))
    with pytest.raises(UserError, match="line 2"):
        list(read_records(path))


def test_streams_are_read_lazily():
    file = stream("one", "two", "three")
    records = read_records(file)
    assert file.tell() == 0
    assert next(records).text == "one" and [r.text for r in records] == ["two", "three"]


@pytest.mark.parametrize("size", [1, 6, 9, 32])
def test_blocks_do_not_read_ahead(size):
    """A client may wait for answers before it writes more lines."""
    read = 0

    def records():
        nonlocal read
        for i in range(20):
            read += 1
            yield Record(str(i), line_number=i)

    done = 0
    for block in batched(records(), size):
        assert [record.line_number for record in block] == list(range(done, min(done + size, 20)))
        assert read == done + len(block)
        done += len(block)
    assert done == 20


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_targets_belong_to_lines(tmp_path, kind):
    lines, targets = tmp_path / "in", tmp_path / "targets"
    lines.write_text("one\ntwo\nthree\n")
    targets.write_text("eins\nzwei\ndrei\n")

    def read(**options):
        source = lines if kind == "file" else io.BytesIO(lines.read_bytes())
        for r in read_records(source, targets=targets, **options):
            given.append((r.line_number, r.text, r.target))

    given = []
    read()
    assert given == [(1, "one", "eins"), (2, "two", "zwei"), (3, "three", "drei")]
    given = []
    read(shard=(1, 2))
    assert given == [(2, "two", "zwei")]
    for text, options, message in [
        ("eins\nzwei\n", {}, "targets has no line 3, but .* does; both files must have the same"),
        ("eins\n" * 9, {}, "has no line 4, but .*targets does; both files must have the same"),
        ("eins\n" * 9, {"shard": (1, 2)}, "has no line 4, but .*targets does"),
        ("eins\n", {"shard": (0, 2)}, "targets has no line 3, but"),
    ]:
        targets.write_text(text)
        given = []
        with pytest.raises(UserError, match=message):
            read(**options)
        lines_there = range(1, min(4, 1 + text.count("\n")))
        first, step = options.get("shard", (0, 1))
        assert [number for number, *_ in given] == list(lines_there)[first::step]


@pytest.mark.parametrize("scored", [False, True])
def test_an_ignored_prefix_is_not_checked(tmp_path, scored):
    (tmp_path / "targets").write_text("y\n")
    text, options = ("x", {"targets": tmp_path / "targets"}) if scored else (" ", {})
    for prefix in ("zz", 7, "\ud800"):
        [record] = objects({"text": text, "prefix": prefix}, **options)
        assert record.prefix == ""
