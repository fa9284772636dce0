"""Output files: killed and resumed, or sharded and joined, they equal the output of one run."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tracemalloc
from itertools import islice

import pytest

from transformer_jax.errors import UserError
from transformer_jax.translation.input_file import read_records
from transformer_jax.translation.output_file import count_complete_records, open_output
from transformer_jax.translation.output_formats import OutputFlags, output_writer
from transformer_jax.translation.requests import Translation, batched

LINES = [" ".join(["word"] * (i % 7)) + str(i) for i in range(25)]


class Killed(BaseException):
    """Simulates SIGKILL: no code of ours runs afterwards."""


def translate(record, nbest=1):
    """Translate into ``nbest`` hypotheses, or one for every fourth line."""
    texts = [f"{record.text.upper()} {k}" for k in range(nbest if record.line_number % 4 else 1)]
    return [Translation(text, -1.0 - k, -2.0, 3) for k, text in enumerate(texts)]


def run(source, path, *, nbest=1, format="text", stop=None, shard=(0, 1), resume=False):
    """Do what decode.py does, and kill it after ``stop`` more sentences. Returns the number of
    sentences kept from an earlier run.
    """
    writer = output_writer(OutputFlags(nbest=nbest), format)
    records = read_records(source, format, shard=shard)
    with (
        contextlib.suppress(Killed),
        open_output(str(path), resume=resume, record_of_line=writer.record_of_line) as (
            write,
            kept,
        ),
    ):
        to_do = islice(records, kept, None)
        answers = ((r, translate(r, nbest)) for block in batched(to_do, 6) for r in block)
        for record, translations in islice(answers, stop):
            write(writer.text(record, translations))
        if stop is not None:
            raise Killed
    return kept


@pytest.fixture(params=["text", "text-nbest", "jsonl", "jsonl-nbest"])
def kind(request, tmp_path):
    """Input file and arguments of ``run``."""
    format, _, nbest = request.param.partition("-")
    source = tmp_path / "input"
    source.write_text(
        "".join((line if format == "text" else json.dumps({"text": line})) + "\n" for line in LINES)
    )
    return source, {"format": format, "nbest": 3 if nbest else 1}


def test_a_whole_run_leaves_only_its_output(kind, tmp_path):
    source, arguments = kind
    assert run(source, tmp_path / "out", resume=True, **arguments) == 0  # nothing to resume
    assert sorted(p.name for p in tmp_path.iterdir()) == ["input", "out"]
    writer = output_writer(OutputFlags(nbest=arguments["nbest"]), arguments["format"])
    assert (writer.record_of_line is not None) == (arguments == {"format": "text", "nbest": 3})
    num_complete, _ = count_complete_records(tmp_path / "out", writer.record_of_line)
    assert num_complete == (24 if writer.record_of_line else 25)
    run(source, tmp_path / "whole", **arguments)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()


def test_resuming_a_cut_file_gives_the_same_output(kind, tmp_path):
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
        # It keeps all complete sentences but one.
        assert kept >= whole[:size].count(b"\n") / arguments["nbest"] - 1


@pytest.mark.parametrize("stop", [None, 0, 3])
def test_without_resume_the_file_is_overwritten(tmp_path, stop):
    source, path = tmp_path / "input", tmp_path / "out"
    source.write_text("\n".join(LINES) + "\n")
    path.write_text("old\n" * 25)
    run(source, path, stop=stop)
    assert path.read_text().splitlines() == [line.upper() + " 0" for line in LINES[:stop]]


@pytest.mark.parametrize("resume", [True, False])
def test_the_file_is_locked(tmp_path, resume):
    path = tmp_path / "out"
    with open_output(str(path)) as (write, _):
        write("one\n")
        with (
            pytest.raises(UserError, match="out is being written by another process"),
            open_output(str(path), resume=resume),
        ):
            pass
        write("two\n")
    assert path.read_text() == "one\ntwo\n"
    with open_output(str(path)) as (_, kept):  # the lock is free again
        assert kept == 0 and path.read_text() == ""


def test_an_error_keeps_finished_lines(tmp_path, caplog):
    caplog.set_level("INFO")
    path = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), open_output(str(path)) as (write, _):
        write("one\n")
        assert path.read_text() == "one\n"
        raise KeyboardInterrupt
    assert f"Finished lines are in {path}; run the command again with --resume" in caplog.text
    with open_output(str(path), resume=True) as (_, kept):
        assert kept == 1


def test_a_full_disk_is_an_error_that_names_the_file(caplog):
    caplog.set_level("INFO")
    with (
        pytest.raises(OSError, match="No space left on device: '/dev/full'"),
        open_output("/dev/full") as (write, _),
    ):
        write("one\n")
    assert not caplog.text  # a device keeps no lines


def test_a_device_has_nothing_to_resume():
    with open_output("/dev/null", resume=True) as (write, kept):
        write("one\n")
        assert kept == 0


def test_a_lone_surrogate_is_written_as_an_escape(tmp_path):
    with open_output(str(tmp_path / "out")) as (write, _):
        write('{"ü": "\ud800"}\n')
    assert (tmp_path / "out").read_bytes() == '{"ü": "\\ud800"}\n'.encode()


@pytest.mark.parametrize("count", [1, 4, 30])
def test_joined_shards_equal_the_whole(kind, tmp_path, count):
    """Joins shards with the commands of docs/decoding.md."""
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


def test_memory_does_not_grow_with_the_input(tmp_path):
    source, path = tmp_path / "input", tmp_path / "out"
    source.write_text("".join(f"{i}\n" for i in range(40_000)))
    tracemalloc.start()
    run(source, path, stop=24_000)
    run(source, path, resume=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000  # 50 bytes per line
    assert path.read_text() == "".join(f"{i} 0\n" for i in range(40_000))
