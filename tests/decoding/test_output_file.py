"""Killed at any moment and resumed, or written in shards and joined, an output is what one run
would have written.
"""

from __future__ import annotations

import contextlib
import json
import os
import tracemalloc
from itertools import islice

import numpy as np
import pytest

from transformer_jax.decoding import output_file
from transformer_jax.decoding.output_file import (
    OutputFile,
    OutputStream,
    fingerprint,
    join_shards,
    progress_path,
    sentence_groups,
    shard_path,
)
from transformer_jax.decoding.records import OutputFormat, Records
from transformer_jax.decoding.trained_models import blocks
from transformer_jax.decoding.translator import Translation
from transformer_jax.errors import UserError

SETTINGS = {"format": "text", "nbest": 1, "beam_size": 4, "suppress": ()}
LINES = [" ".join(["word"] * (i % 7)) + str(i) for i in range(25)]


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours runs after it."""


def translate(record, nbest=1):
    """A translator that finds fewer than ``nbest`` for every fourth line."""
    texts = [f"{record.text.upper()} {k}" for k in range(nbest if record.number % 4 else 1)]
    return [Translation(text, -1.0 - k, -2.0, 3) for k, text in enumerate(texts)]


def run(source, path, *, nbest=1, format="text", stop=None, shard=None, resume=False, **settings):
    """What decode.py does, with the translator above; ``stop``: killed after that many more
    sentences.
    """
    form = OutputFormat(format, nbest=nbest)
    records = Records(source, format, shard=shard or (0, 1))
    settings = SETTINGS | {"nbest": nbest, "format": format} | settings
    kept = 0
    with (
        contextlib.suppress(Killed),
        OutputFile(
            path,
            settings,
            shard=shard,
            lines_per_sentence=form.lines_per_sentence,
            resume=resume,
        ) as file,
    ):
        kept = file.kept
        to_do = islice(records, kept, None)
        results = ((r, translate(r, nbest)) for block in blocks(to_do, 6) for r in block)
        for record, translations in islice(results, stop):
            file.write(form.lines(record, translations))
        if stop is not None:
            raise Killed  # nothing is done on the way out that a killed process would miss
    return kept


def state(path):
    return json.loads(progress_path(path).read_text())["state"]


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
    with open(tmp_path / "out", "rb") as file:
        assert (
            sum(
                1
                for _ in sentence_groups(file, numbered=arguments == {"format": "text", "nbest": 3})
            )
            == 25
        )


def test_cut_anywhere_the_rest_is_the_same(kind, tmp_path):
    source, arguments = kind
    run(source, tmp_path / "whole", **arguments)
    whole = (tmp_path / "whole").read_bytes()
    path = tmp_path / "out"
    run(source, path, stop=25, **arguments)
    progress = progress_path(path).read_bytes()
    for size in [*range(0, len(whole), len(whole) // 40 + 1), len(whole) - 1, len(whole)]:
        path.write_bytes(whole[:size])
        progress_path(path).write_bytes(progress)
        kept = run(source, path, resume=True, **arguments)
        assert path.read_bytes() == whole, size
        # it does not begin anew either
        assert kept >= whole[:size].count(b"\n") / arguments["nbest"] - 1
        assert state(path) == "complete"


@pytest.mark.parametrize("moment", range(9))
def test_killed_while_it_begins(tmp_path, monkeypatch, moment):
    """An older file stands there: at no moment is it taken for this run's."""
    source, path = tmp_path / "input", tmp_path / "out"
    source.write_text("\n".join(LINES) + "\n")
    path.write_text("old\n" * 25)
    calls = 0

    def count(function):
        def counted(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > moment:
                raise Killed
            return function(*args, **kwargs)

        return counted

    with monkeypatch.context() as patch:
        for module, name in ((os, "fsync"), (os, "replace"), (output_file.json, "dumps")):
            patch.setattr(module, name, count(getattr(module, name)))
        with contextlib.suppress(Killed):
            run(source, path, stop=3, beam_size=5)
    if not progress_path(path).exists():  # nothing has begun
        assert path.read_text() == "old\n" * 25
        return
    run(source, path, resume=True, beam_size=5)
    assert path.read_text().splitlines() == [line.upper() + " 0" for line in LINES]


def test_other_settings_are_refused(tmp_path):
    source, path = tmp_path / "input", tmp_path / "out"
    source.write_text("\n".join(LINES) + "\n")
    run(source, path, stop=3)
    before = path.read_bytes()
    with pytest.raises(
        UserError, match="begun with other settings: beam_size: 4 then, 5 now. Resume with the same"
    ):
        run(source, path, resume=True, beam_size=5)
    assert path.read_bytes() == before
    run(source, path, beam_size=5)  # without resume it is written anew
    assert path.read_bytes().count(b"\n") == 25


def test_lines_of_unknown_origin_are_not_gone_on_with(tmp_path):
    path = tmp_path / "out"
    path.write_text("x\n")
    with pytest.raises(UserError, match=r"out has lines, but out.progress.json is not beside it"):
        OutputFile(path, SETTINGS, resume=True)
    progress_path(path).write_text("{}")
    with pytest.raises(UserError, match=r"out.progress.json is damaged"):
        OutputFile(path, SETTINGS, resume=True)
    assert path.read_text() == "x\n"


def test_with_nothing_there_it_begins(tmp_path):
    source, path = tmp_path / "input", tmp_path / "out"
    source.write_text("\n".join(LINES) + "\n")
    assert run(source, path, resume=True) == 0
    assert path.read_text().count("\n") == 25


def test_a_finished_file_is_known_by_its_progress(tmp_path):
    source, path = tmp_path / "input", tmp_path / "out"
    source.write_text("\n".join(LINES) + "\n")
    run(source, path, nbest=2, resume=True)
    before = path.read_bytes()
    # the last may have been meant to have more lines
    assert run(source, path, nbest=2, resume=True) >= 24
    assert path.read_bytes() == before
    with pytest.raises(UserError, match="beam_size: 4 then, 5 now"):
        run(source, path, nbest=2, resume=True, beam_size=5)
    run(source, path, nbest=2)
    with pytest.raises(UserError, match="or a run without --resume was completed"):
        run(source, path, nbest=2, resume=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("resume", [True, False])
def test_two_do_not_write_one_file(tmp_path, resume):
    path = tmp_path / "out"
    with OutputFile(path, SETTINGS) as file:
        file.write(["one"])
        with pytest.raises(UserError, match="out is being written by another process"):
            OutputFile(path, SETTINGS, resume=resume)
        file.write(["two"])
        assert progress_path(path).exists()
    assert path.read_text() == "one\ntwo\n"
    with OutputFile(path, SETTINGS) as file:  # the lock ended with the first
        assert file.kept == 0 and path.read_text() == ""


def test_an_error_keeps_what_is_written(tmp_path, caplog):
    path = tmp_path / "out"
    with (
        caplog.at_level("INFO"),
        pytest.raises(KeyboardInterrupt),
        OutputFile(path, SETTINGS) as file,
    ):
        file.write(["one"])
        assert path.read_text() == "one\n"
        raise KeyboardInterrupt
    assert "the same command with --resume continues it" in caplog.text
    with OutputFile(path, SETTINGS, resume=True) as file:
        assert file.kept == 1


def test_a_full_disk_is_told_with_the_file(tmp_path, caplog):
    """And what was written before stays."""
    device = OutputStream("/dev/full")
    with pytest.raises(UserError, match="^/dev/full cannot be written: No space left on device"):
        device.write(["one"])
    with contextlib.suppress(OSError):
        device._file.close()
    path = tmp_path / "out"
    with (
        caplog.at_level("INFO"),
        pytest.raises(UserError, match="out cannot be written: No space left on device"),
        OutputFile(path, SETTINGS) as file,
        open("/dev/full", "wb") as full,
    ):
        file.write(["one"])
        os.dup2(full.fileno(), file._file.fileno())
        file.write(["two"])
    assert f"{path} keeps what is translated; the same command with --resume" in caplog.text
    assert path.read_text() == "one\n"
    with OutputFile(path, SETTINGS, resume=True) as file:  # the lock ended
        assert file.kept == 1


@pytest.mark.parametrize("count", [1, 3, 4, 30])
def test_shards_joined_are_the_whole(kind, tmp_path, count):
    source, arguments = kind
    run(source, tmp_path / "whole", **arguments)
    for i in reversed(range(count)):
        run(source, tmp_path / "out", shard=(i, count), stop=2, **arguments)
        run(source, tmp_path / "out", shard=(i, count), resume=True, **arguments)
    assert join_shards(tmp_path / "out") == 25
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()


def test_shards_that_do_not_make_a_whole(tmp_path):
    source, out = tmp_path / "input", tmp_path / "out"
    source.write_text("\n".join(LINES) + "\n")
    paths = [shard_path(out, (i, 3)) for i in range(3)]

    def refused(message):
        with pytest.raises(UserError, match=message):
            join_shards(out)
        assert not out.exists() and not list(tmp_path.glob(".out*"))

    refused("there are none. Expected out.shard-i-of-n")
    for i in range(2):
        run(source, out, shard=(i, 3))
    refused("out.shard-2-of-3 missing; run decode.py --shard")
    run(source, out, shard=(2, 3), stop=2)
    refused("out.shard-2-of-3 is not complete .*--resume")
    run(source, out, shard=(2, 3), beam_size=5)
    refused(
        "out.shard-0-of-3 and out.shard-2-of-3 were written with other settings: "
        "beam_size: 4 then, 5 now"
    )
    run(source, out, shard=(2, 3))
    paths[1].write_text("x\n")
    refused("out.shard-1-of-3 ends before out.shard-2-of-3")
    shard_path(out, (0, 2)).write_text("")
    refused("there are those of 2, 3")


def test_a_fingerprint_tells_parameters_apart():
    tree = {"a": np.arange(3.0), "b": [np.ones(2)]}
    assert fingerprint(tree) == fingerprint({"a": np.arange(3.0), "b": [np.ones(2)]})
    assert fingerprint(tree) != fingerprint({"a": np.arange(3.0), "b": [np.zeros(2)]})


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
