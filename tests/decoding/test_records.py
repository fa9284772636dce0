"""Lines and objects in, with every fault reported by its line; parts of an input; nothing is read
ahead of its need.
"""

from __future__ import annotations

import gzip
import io
import json
from itertools import islice

import pytest

from transformer_jax.decoding.records import Record, UntilFault, open_records, paired, read_records
from transformer_jax.decoding.translator import Translation
from transformer_jax.errors import UserError


def stream(*lines):
    return io.BytesIO(
        b"".join(line.encode() + b"\n" if isinstance(line, str) else line + b"\n" for line in lines)
    )


def objects(*values, **options):
    return read_records(stream(*map(json.dumps, values)), format="jsonl", **options)


def test_plain_lines_are_taken_as_they_are():
    records = list(read_records(stream("one", "", '{"text": "two"}')))
    assert records == [Record(0, "one"), Record(1, ""), Record(2, '{"text": "two"}')]


def test_objects_give_text_and_prefix():
    [plain, forced] = objects({"text": "one\ntwo"}, {"id": 7, "text": "two", "prefix": "Z"})
    assert (plain.number, plain.text, plain.prefix) == (0, "one two", "")
    assert (forced.number, forced.text, forced.prefix) == (1, "two", "Z")
    assert json.loads(forced.json) == {"id": 7, "text": "two", "prefix": "Z"}
    request = forced.request()
    assert (request.text, request.prefix, request.number) == ("two", "Z", 2)
    assert [record.text for record in objects({"en": "one", "text": 3}, text_field="en")] == ["one"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3 is not JSON"),
        ("", "line 3 is not JSON"),
        ("[" * 100_000, "line 3 is not JSON"),
        ("9" * 5000, "line 3 is not JSON"),
        ("[1]", "line 3 is a JSON list; expected an object with the field 'text'"),
        (
            '{"source": "x", "id": 1}',
            "line 3 has no field 'text'.*--text-field.*Fields of this line: source, id",
        ),
        ("{}", "Fields of this line: none"),
        ('{"text": 5}', "line 3 has 5 in field 'text'; expected text"),
        ('{"text": "x", "prefix": 7}', "line 3 has 7 in field 'prefix'"),
        ('{"text": null}', "line 3 has None in field 'text'; expected text"),
        (r'{"text": "\ud800"}', "line 3: field 'text' is not valid Unicode"),
        (b"\xff", "line 3: byte 1 is not valid UTF-8"),
    ],
)
def test_a_faulty_line_is_named_and_loses_nothing_before_it(line, message):
    good = json.dumps({"text": "x"})
    records = UntilFault(read_records(stream(good, good, line, good), format="jsonl"))
    assert [record.number for record in records] == [0, 1]
    assert next(records, None) is None  # nor is anything after it
    with pytest.raises(UserError, match=message):
        raise records.fault


def test_a_prefix_of_null_is_none():
    """As tables have it that give every line all fields."""
    [record] = read_records(io.BytesIO(b'{"text": "x", "prefix": null}\n'), format="jsonl")
    assert (record.text, record.prefix) == ("x", "")


def test_a_field_that_the_output_needs_cannot_be_the_text():
    for name in ("translation", "prefix"):
        with pytest.raises(UserError, match=f"text_field is '{name}'"):  # before anything is read
            open_records(stream("{}"), format="jsonl", text_field=name)


def test_parts_share_the_lines():
    lines = [f"line {i}" for i in range(11)]
    parts = [
        [(r.number, r.text) for r in read_records(stream(*lines), part=(i, 3))] for i in range(3)
    ]
    assert sorted(line for part in parts for line in part) == list(enumerate(lines))
    assert [number for number, _ in parts[1]] == [1, 4, 7, 10]


def test_a_part_does_not_parse_what_it_does_not_have():
    good = json.dumps({"text": "x"})
    assert len(list(read_records(stream(good, "{", good), format="jsonl", part=(0, 2)))) == 2


def test_a_file_is_checked_first_and_read_again(tmp_path):
    path = tmp_path / "in.gz"
    path.write_bytes(gzip.compress(b"one\ntwo\n"))
    read = open_records(path)
    assert [r.text for r in read()] == [r.text for r in read()] == ["one", "two"]
    path.write_bytes(gzip.compress(b"one\n\xff\n"))
    with pytest.raises(UserError, match="line 2"):
        open_records(path)


def test_a_stream_is_read_as_far_as_it_is_asked_for():
    file = stream("one", "two", "three")
    read = open_records(file)
    assert file.tell() == 0
    assert next(read()).text == "one" and [r.text for r in read()] == ["two", "three"]
    held = open_records(stream("one", "two"), hold=True)
    assert len(list(held())) == len(list(held())) == 2


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_targets_go_with_their_lines(tmp_path, kind):
    lines, targets = tmp_path / "in", tmp_path / "targets"
    lines.write_text("one\ntwo\nthree\n")
    targets.write_text("eins\nzwei\ndrei\n")

    def read(**options):
        source = lines if kind == "file" else io.BytesIO(lines.read_bytes())
        return [
            (r.number, r.text, r.target) for r in open_records(source, targets=targets, **options)()
        ]

    assert read() == [(0, "one", "eins"), (1, "two", "zwei"), (2, "three", "drei")]
    assert read(part=(1, 2)) == [(1, "two", "zwei")]
    targets.write_text("eins\nzwei\n")
    with pytest.raises(UserError, match="has 3 lines and .*targets has 2; expected as many"):
        read()


def test_results_find_their_records_and_no_more_are_held_than_needed():
    alive = 0

    def records():
        nonlocal alive
        for i in range(100):
            alive += 1
            yield Record(i, str(i))

    def by_twos(records):
        records = iter(records)
        while two := list(islice(records, 2)):
            yield from ([Translation(r.text.upper(), 0, 0, 0)] for r in two)

    for i, (record, [translation]) in enumerate(paired(records(), by_twos)):
        assert record.text == translation.text == str(i)
        assert alive <= i + 3
