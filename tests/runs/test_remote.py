"""Work directories and text at URLs (fsspec's memory store): training, resuming, reading."""

import dataclasses
import gzip
import json
import os
import shutil
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import chex
import fsspec
import jax
import pytest
from runs import ONE, entries, no_evaluation, tiny

from transformer_jax.data.sources import ParallelText, read_pairs
from transformer_jax.data.text_files import read_lines
from transformer_jax.errors import UserError
from transformer_jax.pretrained.loading import load_model, local_workdir
from transformer_jax.runs import remote_workdir
from transformer_jax.runs.checkpoint_folder import complete_steps
from transformer_jax.runs.remote_workdir import open_workdir
from transformer_jax.settings.config import Config, PairsConfig, TokenizerConfig
from transformer_jax.storage.files import files_in, remote_path
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.training.loop import train
from transformer_jax.training.prepare import prepare
from transformer_jax.translation.flags import checked_flags

URL = "memory://bucket/run"


def run(steps, **training):
    """A config without evaluation."""
    options = {"checkpoint_every": 2, "keep_checkpoints": 2, "average": 1} | training
    return no_evaluation(tiny(steps=steps, **options))


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """An empty store, and a machine without local copies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    store = fsspec.filesystem("memory")
    store.store.clear()
    yield store
    store.store.clear()


@pytest.fixture
def saved():
    """A run at the URL with two made-up checkpoints."""
    workdir = open_workdir(URL)
    for step in (2, 4):
        checkpoint(workdir, step, f"array {step}")
    (workdir.folder / "config.json").write_text("{}")
    (workdir.folder / "corpus").mkdir()
    (workdir.folder / "corpus" / "tokens").write_text("large")
    workdir.claim()
    push(workdir)
    return workdir


def push(workdir):
    workdir.push_files()
    workdir.push_checkpoints()


def checkpoint(workdir, step, text):
    folder = workdir.folder / f"checkpoints/{step:08d}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "state").mkdir(parents=True)
    (folder / "state" / "array").write_text(text)
    checksums = {"state/array": zlib.crc32(text.encode())}
    content = {"config": dataclasses.asdict(Config()), "files": checksums}
    content = {"checksum": zlib.crc32(json.dumps(content).encode()), **content}
    (folder / "manifest.json").write_text(json.dumps(content))


def stored():
    """All files at the URL except hidden ones, with their contents."""
    store = fsspec.filesystem("memory")
    paths = store.find("/bucket/run")
    names = {path.removeprefix("/bucket/run/"): store.cat(path) for path in paths}
    return {name: content for name, content in names.items() if "/." not in f"/{name}"}


def files(folder):
    """All files except hidden ones and corpora, with their contents."""
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {
        str(name): (folder / name).read_bytes()
        for name in names
        if name.parts[0] != "corpus" and not name.name.startswith(".")
    }


def test_a_run_resumes_on_another_machine(tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    train(run(6), whole, devices=ONE)
    train(run(4), URL, devices=ONE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other machine"))
    train(run(6), URL, devices=ONE)
    read = local_workdir(URL)
    assert not (read / "corpus").exists()
    assert [entry["loss"] for entry in entries(read)] == [entry["loss"] for entry in entries(whole)]
    assert json.loads((read / "summary.json").read_text())["steps"] == 6
    (_, one, tokenizer), (_, two, _) = load_model(read), load_model(whole)
    chex.assert_trees_all_equal(*(jax.tree.leaves(model) for model in (one, two)))
    assert tokenizer.target.vocab_size == 150
    load_model(local_workdir(f"{URL}/checkpoints/00000006"))
    load_model(f"{URL}/model")
    assert not (read / "checkpoints/00000004").exists()


def test_the_url_and_readers_have_the_files_of_the_run(saved, store):
    read = local_workdir(URL)
    assert stored() == files(saved.folder)
    newest = {k: v for k, v in stored().items() if "00000002" not in k}
    assert files(read) == newest
    local_workdir(f"{URL}/checkpoints/00000002")
    assert files(read) == stored()
    (read / "corpus").mkdir()
    (read / "corpus" / "tokens").write_text("the reader's own")
    shutil.rmtree(saved.folder / "checkpoints/00000002")
    checkpoint(saved, 4, "another array 4")
    checkpoint(saved, 6, "array 6")
    (saved.folder / "metrics.jsonl").write_text("{}\n")
    (saved.folder / "tokenizer.model").write_text("of a first attempt")
    push(saved)
    (saved.folder / "tokenizer.model").rename(saved.folder / "tokenizer.source.model")
    push(saved)
    os.utime(read / "checkpoints/00000002/manifest.json", (0, 0))
    local_workdir(f"{URL}/checkpoints/00000004")
    assert files(local_workdir(URL)) == stored() == files(saved.folder)
    assert (read / "corpus" / "tokens").exists()
    assert not any("corpus" in path for path in store.find("/bucket"))


def test_files_of_other_programs_at_the_url_are_left_there(saved, store):
    """Only files of a tokenizer, which a run replaces, are deleted there."""
    others = {"notes.txt": b"ours", "plots/loss.svg": b"<svg/>", "checkpoints/best": b"4"}
    for name, content in others.items():
        store.pipe_file(f"/bucket/run/{name}", content)
    (saved.folder / "tokenizer.model").write_text("of a first attempt")
    push(saved)
    (saved.folder / "tokenizer.model").rename(saved.folder / "tokenizer.source.model")
    shutil.rmtree(saved.folder / "checkpoints/00000002")
    push(saved)
    assert stored() == files(saved.folder) | others


@pytest.mark.parametrize("name", ["run[12]", "run*", "run?", "{run1,run2}"])
def test_a_url_whose_name_looks_like_a_glob_is_one_run(store, name):
    """Mirroring deletes checkpoints and files from the run alone, not from runs that match it."""
    other, ours = open_workdir("memory://bucket/run1"), open_workdir(f"memory://bucket/{name}")
    for workdir in (other, ours):
        for step in (2, 4):
            checkpoint(workdir, step, f"array {step}")
        (workdir.folder / "config.json").write_text("{}")
        (workdir.folder / "tokenizer.model").write_text("model")
        workdir.claim()
        push(workdir)
    shutil.rmtree(ours.folder / "checkpoints/00000002")
    (ours.folder / "tokenizer.model").unlink()
    push(ours)
    for workdir in (other, ours):
        names = [each for each in files_in(workdir.store) if "/." not in f"/{each}"]
        there = {each: (workdir.store / each).read_bytes() for each in names}
        assert there == files(workdir.folder)
    assert {"tokenizer.model", "checkpoints/00000002/state/array"} <= {*files(other.folder)}
    assert complete_steps(local_workdir(f"memory://bucket/{name}") / "checkpoints") == [4]


def test_the_manifest_is_copied_last(saved, store, monkeypatch):
    checkpoint(saved, 6, "array 6")
    open_, opened = store.open, []

    def cut(path, mode="rb", **options):
        if mode == "wb" and "00000006" in path:
            opened.append(path)
            if path.endswith("manifest.json"):
                raise OSError("cut")
        return open_(path, mode, **options)

    with monkeypatch.context() as patched:
        patched.setattr(store, "open", cut)
        with pytest.raises(UserError, match="could not be copied to .*: cut. Nothing is lost"):
            push(saved)
    assert [path.rpartition("/")[2] for path in opened] == ["array", "manifest.json"]
    assert not (local_workdir(URL) / "checkpoints/00000006").exists()
    push(saved)
    assert stored() == files(saved.folder)


def test_the_url_overrides_files_unless_this_machine_wrote_last(
    saved, store, tmp_path, monkeypatch
):
    checkpoint(saved, 6, "array 6")  # not copied yet
    before = files(saved.folder)
    open_workdir(URL).pull()
    assert files(saved.folder) == before
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other machine"))
    other = open_workdir(URL)
    other.pull()
    other.claim()
    assert other.checkpoints.steps() == [2, 4]
    checkpoint(other, 5, "array 5")
    push(other)
    for work in (saved.check_claim, saved.push_files, saved.push_checkpoints):
        with pytest.raises(UserError, match="another run has started in memory:"):
            work()
    saved.pull()
    assert files(saved.folder) == files(other.folder)
    store.rm("/bucket/run", recursive=True)
    saved.pull()
    assert files(saved.folder) == {} and (saved.folder / "corpus" / "tokens").exists()
    with pytest.raises(UserError, match="memory://bucket/run' has no config.json"):
        local_workdir(URL)


TOKENS = [None, "a", "b"]


@pytest.mark.parametrize("there", TOKENS)
@pytest.mark.parametrize("here", TOKENS)
def test_a_work_directory_is_pulled_unless_this_machine_wrote_last(here, there, store, monkeypatch):
    workdir = open_workdir(URL)
    if there is not None:
        store.pipe_file("/bucket/run/.token", there.encode())
    if here is not None:
        (workdir.folder / ".token").write_text(here)
    pulled = []
    monkeypatch.setattr(remote_workdir, "mirror_files", lambda *_, **__: pulled.append("files"))
    monkeypatch.setattr(remote_workdir, "mirror_checkpoints", lambda *_, **__: None)
    workdir.pull()
    assert bool(pulled) == (here is None or here != there)
    workdir.claim_id = "a"
    if there == "a":
        workdir.check_claim()
        workdir.join("a", None)
    else:
        with pytest.raises(UserError, match="another run has started"):
            workdir.check_claim()


def test_a_run_ends_when_another_starts_at_its_url(tmp_path, monkeypatch):
    with (
        pytest.raises(UserError, match="another run has started in memory:"),
        prepare(run(6), URL, devices=ONE) as first,
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other machine"))
        train(run(2), URL, devices=ONE)
        first.checkpoints.save(first.state, first.progress)
    assert complete_steps(remote_path(URL) / "checkpoints") == [2]


def test_text_behind_urls(tmp_path, store, monkeypatch):
    for name, text in {
        "a.en": "one\n",
        "b.en": "two\n",
        "a.de": "eins\n",
        "b.de": "zwei\n",
    }.items():
        store.pipe_file(f"/bucket/text/{name}.gz", gzip.compress(text.encode()))
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        store.put_file(str(tmp_path / f"{name}.gz"), f"/bucket/text/{name}.gz")
    here = PairsConfig("text", ("*.en.gz",), ("*.de.gz",))
    there = PairsConfig(
        "text", ("memory://bucket/text/*.en.gz",), ("memory://bucket/text/*.de.gz",)
    )
    pairs = [("one", "eins"), ("two", "zwei")]
    assert list(read_pairs(there)) == list(read_pairs(here, "memory://bucket/text/")) == pairs
    assert list(read_lines("memory://bucket/text/b.de.gz")) == ["zwei"]
    before = ParallelText(there).fingerprint
    assert before == ParallelText(here, str(tmp_path)).fingerprint
    store.pipe_file("/bucket/text/a.en.gz", gzip.compress(b"changed"))
    assert ParallelText(there).fingerprint != before
    with pytest.raises(UserError, match="does not match any files"):
        ParallelText(PairsConfig("text", ("x*.en",), ("x*.de",)), "memory://bucket/text")
    with pytest.raises(
        UserError, match="'memory://bucket/text' is not a file; expected a text file"
    ):
        ParallelText(PairsConfig("text", *[("memory://bucket/text",)] * 2))
    with pytest.raises(UserError, match="'memory://bucket/text/c.en' is not a file"):
        ParallelText(PairsConfig("text", ("c.en",), ("c.de",)), "memory://bucket/text")
    with (
        monkeypatch.context() as patched,
        pytest.raises(UserError, match="a.en.gz' cannot be read: no password"),
    ):
        patched.setattr(
            store, "info", lambda path: (_ for _ in ()).throw(PermissionError("no password"))
        )
        ParallelText(PairsConfig("text", *[("memory://bucket/text/a.en.gz",)] * 2))
    with pytest.raises(
        UserError, match="'nowhere://x' cannot be opened: Unsupported filesystem: 'nowhere'"
    ):
        ParallelText(PairsConfig("text", *[("nowhere://x",)] * 2))


def test_a_corrupt_copy_is_fetched_again(saved):
    array = "checkpoints/00000004/state/array"
    for folder, fetch in ((local_workdir(URL), lambda: local_workdir(URL)), (saved.folder, None)):
        for damage in ("", "arra"):
            (folder / array).write_text(damage)
            if fetch is None:  # as if another machine wrote last
                (folder / ".token").unlink(missing_ok=True)
            (fetch or saved.pull)()
            assert (folder / array).read_text() == "array 4"


def test_a_checkpoint_deleted_during_a_copy_is_not_copied(saved, store, monkeypatch):
    open_ = store.open

    def gone(path, mode="rb", **options):
        if "00000002/state" in path:
            raise FileNotFoundError(path)
        return open_(path, mode, **options)

    monkeypatch.setattr(store, "open", gone)
    local_workdir(f"{URL}/checkpoints/00000002")
    assert [path.name for path in (local_workdir(URL) / "checkpoints").iterdir()] == ["00000004"]


def test_readers_copy_only_what_a_model_needs(store, monkeypatch):
    """Of a finished run, the model; of a checkpoint, its parameters or their average."""
    open_, opened = store.open, []

    def noted(path, mode="rb", **options):
        if mode == "rb" and "/checkpoints/" in path:
            opened.append(path)
        return open_(path, mode, **options)

    config = run(4)
    optimizer = dataclasses.replace(config.optimizer, ema_decay=0.5)
    for name, part in ((URL, "parameters"), (f"{URL}2", "ema")):
        if part == "ema":
            config = dataclasses.replace(config, optimizer=optimizer)
        train(config, name, devices=ONE)
        with monkeypatch.context() as patch:
            patch.setattr(store, "open", noted)
            loaded = load_model(name)
            assert not opened
            one = load_model(f"{name}/checkpoints/00000004")
            parts = {path.split("/state/")[1].split("/")[0] for path in opened if "/state/" in path}
            assert {"parameters", "ema", "rest"} & parts == {part}
        opened.clear()
        chex.assert_trees_all_equal(*(jax.tree.leaves(model) for _, model, _ in (loaded, one)))


def test_concurrent_readers_take_turns_and_keep_each_others_checkpoints(saved, store, monkeypatch):
    at_work, most = 0, 0
    mirror = remote_workdir.mirror_checkpoints

    def counted(*folders, **options):
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        time.sleep(0.05)
        mirror(*folders, **options)
        at_work -= 1

    monkeypatch.setattr(remote_workdir, "mirror_checkpoints", counted)
    with ThreadPoolExecutor(3) as readers:
        folders = list(readers.map(local_workdir, [URL, f"{URL}/checkpoints/00000002", URL]))
    assert most == 1 and set(folders) == {folders[0], folders[0] / "checkpoints/00000002"}
    store.rm("/bucket/run/checkpoints/00000002", recursive=True)
    assert complete_steps(local_workdir(URL) / "checkpoints") == [2, 4]
    os.utime(folders[0] / "checkpoints/00000002/manifest.json", (0, 0))
    assert complete_steps(local_workdir(URL) / "checkpoints") == [4]


def test_an_inaccessible_store_is_an_error_before_training(store, monkeypatch):
    open_ = store.open

    def refuse(path, mode="rb", **options):
        if mode.startswith("w"):
            raise PermissionError("no right to write")
        return open_(path, mode, **options)

    def silent(path, mode="rb", **options):
        if mode.startswith("r"):
            raise TimeoutError("no answer")
        return open_(path, mode, **options)

    for name, fault, message in (
        ("open", refuse, "memory:.*run cannot be written: no right to write"),
        ("open", silent, "memory:.*run cannot be read: no answer"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(store, name, fault)
            with pytest.raises(UserError, match=message):
                train(run(2), URL, devices=ONE)


def test_training_continues_during_a_store_outage(store, monkeypatch, caplog):
    open_ = store.open

    def sometimes(path, mode="rb", **options):
        if "checkpoints/00000002" in path and mode == "wb":
            raise OSError("the store is away")
        return open_(path, mode, **options)

    monkeypatch.setattr(store, "open", sometimes)
    train(run(4, keep_checkpoints=1), URL, devices=ONE)
    said = caplog.text
    assert "could not be copied to memory:" in said
    assert "the store is away. Nothing is lost" in said and "Training continues" in said
    assert complete_steps(remote_path(URL) / "checkpoints") == [4]


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    """Shells do not expand it in ``--workdir=~/run`` or in config files."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    train(run(2), "~/run", devices=ONE)
    assert local_workdir("~/run") == tmp_path / "run"
    arguments, _ = checked_flags(["--workdir=~/run"])  # of decode.py
    assert arguments.workdir == (str(tmp_path / "run"),)
    settings = TokenizerConfig(model="~/run/tokenizer.model")
    assert Tokenizer.train([], settings).fingerprint == Tokenizer.load("run").fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
