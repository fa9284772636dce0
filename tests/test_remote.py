"""A work directory and its text behind URLs, in fsspec's store in memory: trained, resumed
elsewhere, read.
"""

import dataclasses
import gzip
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import chex
import fsspec
import jax
import pytest
from runs import ONE, entries, no_evaluation, tiny

from transformer_jax.checkpoint import load_model, write_manifest
from transformer_jax.config import Config, DataConfig, PairsConfig, TokenizerConfig
from transformer_jax.data.corpus import corpus_folder
from transformer_jax.data.sources import ParallelText, read_lines, read_pairs
from transformer_jax.decoding.program import checked_workdir
from transformer_jax.errors import UserError
from transformer_jax.remote_workdir import RemoteWorkdir, local_workdir
from transformer_jax.tokenizer import Tokenizer
from transformer_jax.training.loop import train

URL = "memory://bucket/run"


def run(steps):
    """A config that only trains."""
    return no_evaluation(tiny(steps=steps, checkpoint_every=2, keep_checkpoints=2, average=1))


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """An empty store, and a machine without copies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    store = fsspec.filesystem("memory")
    store.store.clear()
    yield store
    store.store.clear()


@pytest.fixture
def saved(tmp_path):
    """A folder that looks like a work directory, with two checkpoints."""
    remote = RemoteWorkdir(URL)
    for step in (2, 4):
        checkpoint(remote, step, f"array {step}")
    (remote.folder / "config.json").write_text("{}")
    (remote.folder / "corpus").mkdir()
    (remote.folder / "corpus" / "tokens").write_text("large")
    remote.push()
    return remote


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def checkpoint(remote, step, text):
    state = remote.folder / f"checkpoints/{step:08d}/state"
    shutil.rmtree(state.parent, ignore_errors=True)
    state.mkdir(parents=True)
    (state / "array").write_text(text)
    write_manifest(state.parent)


def test_a_run_goes_on_on_another_machine(tmp_path, monkeypatch):
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
    assert tokenizer.target_vocab_size == 150
    load_model(local_workdir(f"{URL}/checkpoints/00000006"))
    with pytest.raises(UserError, match="expected a folder"):
        load_model(URL)


def test_the_store_has_what_the_folder_has(saved, store):
    assert files(saved.folder).keys() - {"corpus/tokens"} == {
        path.removeprefix("/bucket/run/") for path in store.find("/bucket")
    }
    shutil.rmtree(saved.folder / "checkpoints/00000002")
    checkpoint(saved, 6, "array 6")
    (saved.folder / "metrics.jsonl").write_text("{}\n")
    saved.push()
    assert files(local_workdir(URL)) == {
        name: data for name, data in files(saved.folder).items() if name != "corpus/tokens"
    }


def test_the_manifest_comes_last_and_what_a_cut_left_goes(saved, store, monkeypatch):
    checkpoint(saved, 6, "array 6")
    put = store.put_file

    def cut(path, name):
        assert not name.endswith("manifest.json")
        put(path, name + "-of-an-earlier-try")
        raise OSError("cut")

    monkeypatch.setattr(store, "put_file", cut)
    with pytest.raises(UserError, match="could not be copied to .*: cut"):
        saved.push()
    monkeypatch.undo()
    assert not (local_workdir(URL) / "checkpoints/00000006").exists()
    saved.push()
    assert sorted(files(local_workdir(URL) / "checkpoints/00000006")) == [
        "manifest.json",
        "state/array",
    ]


def test_a_folder_that_is_ahead_goes_on_and_one_behind_catches_up(
    saved, tmp_path, monkeypatch, caplog
):
    checkpoint(saved, 6, "array 6")
    (saved.folder / "metrics.jsonl").write_text("of six steps")
    before = files(saved.folder)
    assert RemoteWorkdir(URL).pull() and files(saved.folder) == before
    assert "continuing from its step 6" in caplog.text
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other machine"))
    other = RemoteWorkdir(URL)
    assert other.pull()
    checkpoint(other, 4, "another array 4")
    checkpoint(other, 8, "array 8")
    (other.folder / "metrics.jsonl").write_text("of eight")
    shutil.rmtree(other.folder / "checkpoints/00000002")
    fsspec.filesystem("memory").rm("/bucket/run/checkpoints/00000004", recursive=True)
    other.push()
    assert saved.pull() and files(saved.folder) == files(other.folder) | {"corpus/tokens": b"large"}


def test_another_run_at_the_url_is_not_overwritten(saved, store):
    """Emptied and begun anew from another machine, it is not so far yet as the folder that is left
    here.
    """
    store.rm("/bucket/run/checkpoints", recursive=True)
    other = RemoteWorkdir(URL, purpose="of another machine")
    (other.folder / "config.json").write_text("{}")
    checkpoint(other, 2, "another array 2")
    other.push()
    before = files(saved.folder), dict(store.store)
    with pytest.raises(
        UserError,
        match="have no checkpoint in common: the folder's last is of step 4, "
        r"the URL's of step 2\.",
    ):
        saved.pull()
    assert (files(saved.folder), dict(store.store)) == before


@pytest.mark.parametrize("damage", ["", "arra"])
def test_a_damaged_copy_is_fetched_again(saved, store, damage):
    array = "checkpoints/00000004/state/array"
    for remote in (saved, RemoteWorkdir(URL, purpose="read")):
        local_workdir(URL)
        (remote.folder / array).write_text(damage)
        assert remote.pull() and (remote.folder / array).read_text() == "array 4"


def test_what_the_run_deletes_meanwhile_is_no_checkpoint_of_the_copy(saved, store, monkeypatch):
    get = store.get_file

    def gone(path, target):
        if "00000002" in path:
            raise FileNotFoundError(path)
        get(path, target)

    monkeypatch.setattr(store, "get_file", gone)
    assert [path.name for path in (local_workdir(URL) / "checkpoints").iterdir()] == ["00000004"]


def test_an_emptied_url_begins_anew(saved, store):
    store.rm("/bucket/run", recursive=True)
    assert not saved.pull()
    assert list(files(saved.folder)) == ["corpus/tokens"]
    with pytest.raises(UserError, match="memory://bucket/run' holds no config.json"):
        local_workdir(URL)


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
    store.pipe_file("/bucket/text/a.en.gz", b"changed")
    assert ParallelText(there).fingerprint != before
    with pytest.raises(UserError, match="matches no file"):
        ParallelText(PairsConfig("text", ("x*.en",), ("x*.de",)), "memory://bucket/text")
    with pytest.raises(
        UserError, match="File 'memory://bucket/text' is a folder; expected the tsv"
    ):
        ParallelText(PairsConfig("tsv", ("memory://bucket/text",)))
    with pytest.raises(UserError, match="File 'memory://bucket/text/c.en' does not exist"):
        ParallelText(PairsConfig("text", ("c.en",), ("c.de",)), "memory://bucket/text")
    with (
        monkeypatch.context() as patched,
        pytest.raises(UserError, match="a.en.gz' cannot be read: no password"),
    ):
        patched.setattr(
            store, "info", lambda path: (_ for _ in ()).throw(PermissionError("no password"))
        )
        ParallelText(PairsConfig("tsv", ("memory://bucket/text/a.en.gz",)))
    with pytest.raises(
        UserError, match="'nowhere://x' cannot be opened: Unsupported filesystem: 'nowhere'"
    ):
        ParallelText(PairsConfig("tsv", ("nowhere://x",)))


def test_where_a_url_cannot_be(tmp_path):
    for name in (f"file://{tmp_path}", f"local://{tmp_path}"):
        with pytest.raises(UserError, match=f"is on this machine; expected its path, '{tmp_path}'"):
            RemoteWorkdir(name)


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    """The shell leaves it to the program in ``--workdir=~/run`` and in config files."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    train(run(2), "~/run", devices=ONE)
    assert local_workdir("~/run") == tmp_path / "run"
    assert checked_workdir("~/run") == str(tmp_path / "run")
    settings = TokenizerConfig(model="~/run/tokenizer.model")
    assert Tokenizer.train([], settings).fingerprint == Tokenizer.load("run").fingerprint
    cache = DataConfig(cache="~nobody-of-this-name/x")
    assert corpus_folder(Path(), Config(data=cache)) == tmp_path / cache.cache
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_the_url_no_longer_has_goes_here_too(saved, store):
    (saved.folder / "tensorboard").mkdir()
    (saved.folder / "tensorboard" / "events").write_text("a curve")
    saved.push()
    read = local_workdir(URL)
    (read / ".hidden").write_text("ours")
    (read / "corpus").mkdir()
    (read / "corpus" / "tokens").write_text("ours")
    assert (read / "tensorboard" / "events").exists()
    store.rm("/bucket/run/tensorboard", recursive=True)
    local_workdir(URL)
    assert {".hidden", "corpus/tokens", "config.json"} <= files(read).keys()
    assert "tensorboard/events" not in files(read)


def test_readers_of_one_url_wait_for_each_other(saved, store, monkeypatch):
    at_work, most = 0, 0
    pull = RemoteWorkdir.pull

    def counted(remote, **options):
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        time.sleep(0.05)
        found = pull(remote, **options)
        at_work -= 1
        return found

    monkeypatch.setattr(RemoteWorkdir, "pull", counted)
    with ThreadPoolExecutor(3) as readers:
        folders = list(readers.map(local_workdir, [URL] * 3))
    assert most == 1 and len(set(folders)) == 1


def test_a_cached_checkpoint_that_cannot_be_deleted_whole_is_none(saved, store, monkeypatch):
    read = local_workdir(URL)
    store.rm("/bucket/run/checkpoints/00000002", recursive=True)

    def vanished(path, ignore_errors=False):
        if not ignore_errors:
            raise FileNotFoundError(path)

    monkeypatch.setattr(shutil, "rmtree", vanished)
    assert local_workdir(URL) == read
    assert [path.parent.name for path in read.glob("checkpoints/*/manifest.json")] == ["00000004"]


def test_a_store_that_cannot_be_written_is_known_before_training(store, monkeypatch):
    def refuse(path, name):
        raise PermissionError("no right to write")

    with monkeypatch.context() as patched:
        patched.setattr(store, "put_file", refuse)
        with pytest.raises(
            UserError,
            match=r"could not be copied to memory://bucket/run: no right to write. Nothing is lost",
        ):
            train(run(2), URL, devices=ONE)
    assert train(run(2), URL, devices=ONE)["steps"] == 2  # as that message says


def test_a_store_that_does_not_answer_is_not_an_empty_one(saved, store, monkeypatch):
    def silent(path, **options):
        raise TimeoutError("no answer")

    monkeypatch.setattr(store, "info", silent)
    with pytest.raises(
        UserError, match=r"'memory:///?bucket/run/config.json' cannot be read: no answer"
    ):
        saved.pull()
    assert saved._steps_here() == [2, 4]


def test_training_outlasts_a_store_that_fails_for_a_while(store, monkeypatch, caplog):
    put = store.put_file

    def sometimes(path, name):
        if "checkpoints/00000002" in name:
            raise OSError("the store is away")
        put(path, name)

    monkeypatch.setattr(store, "put_file", sometimes)
    config = run(4)
    train(
        dataclasses.replace(
            config, training=dataclasses.replace(config.training, keep_checkpoints=1)
        ),
        URL,
        devices=ONE,
    )
    said = caplog.text
    assert "could not be copied to memory://bucket/run: the store is away." in said
    assert "Training continues; the next checkpoint tries again" in said
    assert [path.name for path in (local_workdir(URL) / "checkpoints").iterdir()] == ["00000004"]
