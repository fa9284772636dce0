"""Output files: killed and resumed, or sharded and joined, they equal the output of one run."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tracemalloc
from itertools import islice

import pytest

from transformer_jax.decoding.output_file import complete_sentences, open_output
from transformer_jax.decoding.records import Results, Translation, blocks, read_records
from transformer_jax.errors import UserError

LINES = [" ".join(["word"] * (i % 7)) + str(i) for i in range(25)]


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours runs after it."""


def translate(record, nbest=1):
    """A translator that finds fewer than ``nbest`` for every fourth line."""
    texts = [f"{record.text.upper()} {k}" for k in range(nbest if record.number % 4 else 1)]
    return [Translation(text, -1.0 - k, -2.0, 3) for k, text in enumerate(texts)]


def run(source, path, *, nbest=1, format="text", stop=None, shard=(0, 1), resume=False):
    """What decode.py does, with the translator above; ``stop``: killed after that many more
    sentences. Returns how many sentences were kept.
    """
    results = Results(nbest=nbest)
    lines = results.text if format == "text" else results.json
    records = read_records(source, format, shard=shard)
    numbered = format == "text" and nbest > 1
    with (
        contextlib.suppress(Killed),
        open_output(str(path), resume=resume, numbered=numbered) as (write, kept),
    ):
        to_do = islice(records, kept, None)
        answers = ((r, translate(r, nbest)) for block in blocks(to_do, 6) for r in block)
        for record, translations in islice(answers, stop):
            write(lines(record, translations))
        if stop is not None:
            raise Killed  # nothing is done on the way out that a killed process would miss
    return kept


@pytest.fixture(params=["text", "text-nbest", "jsonl", "jsonl-nbest"])
def kind(request, tmp_path):
    """(input file, arguments of ``run``)."""
    format, _, nbest = request.param.partition("-")
    source = tmp_path / "input"
    source.write_text(
        "".join((line if format == "text" else json.dumps({"text": line})) + "\n" for line in LINES)
    )
    return source, {"format": format, "nbest": 3 if nbest else 1}


def test_a_whole_run_leaves_the_file_alone(kind, tmp_path):
    source, arguments = kind
    run(source, tmp_path / "out", **arguments)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["input", "out"]
    numbered = arguments == {"format": "text", "nbest": 3}
    assert complete_sentences(tmp_path / "out", numbered=numbered)[0] == 25 - numbered


def test_cut_anywhere_the_rest_is_the_same(kind, tmp_path):
    source, arguments = kind
    run(source, tmp_path / "whole", **arguments)
    whole = (tmp_path / "whole").read_bytes()
    path = tmp_path / "out"
    run(source, path, stop=25, **arguments)
    assert path.read_bytes() == whole
    for size in [*range(0, len(whole), len(whole) // 40 + 1), len(whole) - 1, len(whole)]:
        path.write_bytes(whole[:size])
        kept = run(source, path, resume=True, **arguments)
        assert path.read_bytes() == whole, size
        # it does not begin anew either
        assert kept >= whole[:size].count(b"\n") / arguments["nbest"] - 1


@pytest.mark.parametrize("stop", [None, 0, 3])
def test_without_resume_nothing_of_an_older_file_stays(tmp_path, stop):
    source, path = tmp_path / "input", tmp_path / "out"
    source.write_text("\n".join(LINES) + "\n")
    path.write_text("old\n" * 25)
    run(source, path, stop=stop)
    assert path.read_text().splitlines() == [line.upper() + " 0" for line in LINES[:stop]]


def test_with_nothing_there_it_begins(kind, tmp_path):
    source, arguments = kind
    assert run(source, tmp_path / "new", resume=True, **arguments) == 0
    run(source, tmp_path / "whole", **arguments)
    assert (tmp_path / "new").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("resume", [True, False])
def test_two_do_not_write_one_file(tmp_path, resume):
    path = tmp_path / "out"
    with open_output(str(path)) as (write, _):
        write(["one"])
        with (
            pytest.raises(UserError, match="out is being written by another process"),
            open_output(str(path), resume=resume),
        ):
            pass
        write(["two"])
    assert path.read_text() == "one\ntwo\n"
    with open_output(str(path)) as (_, kept):  # the lock ended with the first
        assert kept == 0 and path.read_text() == ""


def test_an_error_keeps_what_is_written(tmp_path, caplog):
    caplog.set_level("INFO")
    path = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), open_output(str(path)) as (write, _):
        write(["one"])
        assert path.read_text() == "one\n"
        raise KeyboardInterrupt
    assert f"Finished lines are in {path}; run the command again with --resume" in caplog.text
    with open_output(str(path), resume=True) as (_, kept):
        assert kept == 1


def test_a_full_disk_is_told_with_the_file(caplog):
    caplog.set_level("INFO")
    with (
        pytest.raises(OSError, match="No space left on device: '/dev/full'"),
        open_output("/dev/full") as (write, _),
    ):
        write(["one"])
    assert not caplog.text  # a device keeps nothing


def test_half_of_a_surrogate_pair_is_written_as_an_escape(tmp_path):
    with open_output(str(tmp_path / "out")) as (write, _):
        write(['{"ü": "\ud800"}'])
    assert (tmp_path / "out").read_bytes() == '{"ü": "\\ud800"}\n'.encode()


def test_a_device_keeps_nothing():
    with open_output("/dev/null", resume=True) as (write, kept):
        write(["one"])
        assert kept == 0


@pytest.mark.parametrize("count", [1, 3, 4, 30])
def test_shards_joined_are_the_whole(kind, tmp_path, count):
    """Shards joined with the commands of docs/decoding.md."""
    source, arguments = kind
    run(source, tmp_path / "whole", **arguments)
    for i in range(count):
        run(source, tmp_path / f"de.{i}", shard=(i, count), stop=2, **arguments)
        run(source, tmp_path / f"de.{i}", shard=(i, count), resume=True, **arguments)
    shards = f"$(seq -f de.%g 0 {count - 1})"
    join = f"paste -d '\\n' {shards} | head -n $(cat {shards} | wc -l) > big.de"
    if arguments == {"format": "text", "nbest": 3}:
        join = f"sort -n -s -m {shards} > big.de"
    subprocess.run(["bash", "-c", join], cwd=tmp_path, check=True)
    assert (tmp_path / "big.de").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_hundred_thousand_lines_in_flat_memory(tmp_path):
    source, path = tmp_path / "input", tmp_path / "out"
    source.write_text("".join(f"{i}\n" for i in range(100_000)))
    tracemalloc.start()
    run(source, path, stop=60_000)
    run(source, path, resume=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000
    with open(path) as file:
        assert all(line == f"{i} 0\n" for i, line in enumerate(file))
    assert path.read_bytes().count(b"\n") == 100_000
