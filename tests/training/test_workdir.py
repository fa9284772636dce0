"""Ownership of a work directory: nothing of another program or run is changed or deleted."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from orbax.checkpoint import v1 as ocp
from runs import ONE, no_evaluation, tiny

from transformer_jax.errors import UserError
from transformer_jax.runs import checkpoints, remote_workdir
from transformer_jax.runs.checkpoint_folder import complete_steps
from transformer_jax.runs.remote_workdir import open_workdir
from transformer_jax.runs.workdir import Workdir
from transformer_jax.storage.files import write_atomically
from transformer_jax.training.loop import train
from transformer_jax.training.prepare import prepare

CONFIG = no_evaluation(tiny(steps=4, checkpoint_every=2))
URL = "memory://bucket/run"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty store, and a machine without local copies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    store = fsspec.filesystem("memory")
    store.store.clear()
    yield store
    store.store.clear()


def written(folder: Path, *names: str) -> dict[Path, str]:
    """Write files with made-up contents."""
    files = {folder / name: f"contents of {name}" for name in names}
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return files


def everything(folder: Path) -> dict[str, bytes]:
    """All files, hidden ones too, with their contents."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "names",
    [
        ("model.bin", "corpus/tmp-x/part"),
        ("config.json", "corpus/tmp-x/part"),
        ("config.json", "checkpoints/00000005/model.bin", "tokenizer.model"),
        ("checkpoints/00000005/model.bin",),
    ],
)
@pytest.mark.parametrize("remote", [False, True])
def test_a_folder_of_another_program_is_refused_and_unchanged(
    names: tuple[str, ...], remote: bool, tmp_path: Path, store: Any
) -> None:
    folder = tmp_path / "theirs"
    written(folder, *names)
    if remote:
        store.put(str(folder), "/bucket/run", recursive=True)
    before = everything(folder), dict(store.store)
    with pytest.raises(UserError, match=r"config\.json"):
        train(CONFIG, URL if remote else folder, devices=ONE)
    assert (everything(folder), dict(store.store)) == before


def test_a_work_directory_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(
        UserError, match=r"--workdir is '.*run', which is a file; expected a folder"
    ):
        train(CONFIG, tmp_path / "run", devices=ONE)
    assert (tmp_path / "run").read_text() == "mine"


def test_a_finished_model_without_checkpoints_is_kept(tmp_path: Path) -> None:
    """Checkpoints are only for resuming, so users may delete them."""
    train(CONFIG, tmp_path / "run", devices=ONE)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = everything(tmp_path / "run")
    with pytest.raises(UserError, match="has a finished model, but no checkpoint to resume from"):
        train(CONFIG, tmp_path / "run", devices=ONE)
    assert everything(tmp_path / "run") == before


def test_runs_that_share_a_corpus_folder_keep_each_others_unfinished_files(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    runs = [Workdir(tmp_path / name) for name in ("one", "other")]
    unfinished = {}
    for run in runs:
        run.folder.mkdir()
        (run.folder / "corpus").symlink_to(shared)
        with run.open(CONFIG):
            unfinished |= written(shared, f"tmp-{run.claim_id}-x/part")
    mine, theirs = unfinished
    with Workdir(runs[0].folder).open(CONFIG):  # it resumes after SIGKILL
        assert not mine.exists() and theirs.read_text()


def test_a_linked_checkpoint_of_another_run_is_unlinked_only(tmp_path: Path) -> None:
    others = written(tmp_path / "theirs", "manifest.json", "state/array")
    folder = tmp_path / "run"
    train(CONFIG, folder, devices=ONE)
    (folder / "checkpoints" / "00000006").symlink_to(tmp_path / "theirs")
    own = written(folder / "checkpoints", "2024/notes", "best/model")  # not names of checkpoints
    config = no_evaluation(tiny(steps=6, checkpoint_every=2))
    assert train(config, folder, devices=ONE)["steps"] == 6
    assert complete_steps(folder / "checkpoints") == [2, 4, 6]
    assert all(path.read_text() == text for path, text in (others | own).items())


def test_a_push_deletes_only_tokenizer_files_of_a_run(store: Any) -> None:
    with prepare(CONFIG, URL, devices=ONE) as run:
        for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.source.model"):
            store.pipe_file(f"/bucket/run/{name}", b"x")
        run.workdir.push_files()
        left = {path.rpartition("/")[2] for path in store.find("/bucket/run")}
    assert left >= {"tokenizer.json", "tokenizer_config.json", "tokenizer.model"}
    assert "tokenizer.source.model" not in left


@pytest.mark.parametrize(
    ("remote", "moment"),
    [
        (False, "saving"),
        (False, "manifest"),
        (True, "copy"),
        pytest.param(False, "copy", marks=pytest.mark.exhaustive),
        pytest.param(True, "saving", marks=pytest.mark.exhaustive),
        pytest.param(True, "manifest", marks=pytest.mark.exhaustive),
    ],
)
def test_a_save_in_flight_does_nothing_more_once_another_run_has_started(
    moment: str,
    remote: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It writes no manifest, deletes nothing, and the run ends with one message."""
    workdir = URL if remote else tmp_path / "run"
    taken: list[Any] = []

    def take(now: str, step: str) -> None:
        if now == moment and step == "00000006" and not taken:
            other = open_workdir(workdir)
            other.claim()
            taken.append(complete_steps(other.store / "checkpoints"))

    write = checkpoints.write_manifest
    save = ocp.save_checkpointables_async

    def manifest(path: Any, *given: Any) -> None:
        write(path, *given)
        take("manifest", path.name)

    def saving(path: str, *given: Any) -> Any:
        response = save(path, *given)

        def result() -> None:
            response.result()
            take("saving", Path(path).parent.name)

        return SimpleNamespace(result=result)

    def mirror(source: Any, target: Any, **options: Any) -> None:
        """As ``mirror_checkpoints``, but slow."""
        take("copy", f"{max(complete_steps(source), default=0):08d}")
        mirrored(source, target, **options)

    mirrored = remote_workdir.mirror_checkpoints
    monkeypatch.setattr(checkpoints, "write_manifest", manifest)
    monkeypatch.setattr(ocp, "save_checkpointables_async", saving)
    monkeypatch.setattr(remote_workdir, "mirror_checkpoints", mirror)
    config = no_evaluation(tiny(steps=8, checkpoint_every=2, keep_checkpoints=2, average=1))
    if moment == "copy" and not remote:
        pytest.skip("a local folder has no copy")
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(UserError, match="Stopping because another run has started in") as raised,
    ):
        train(config, workdir, devices=ONE)
    assert str(raised.value).count("another run") == 1 and "continues" not in caplog.text
    assert "Stopping" not in caplog.text and "could not be saved" not in caplog.text
    [before] = taken
    assert before[:2] == [2, 4]
    assert complete_steps(open_workdir(workdir).store / "checkpoints") == before


def test_a_model_in_flight_is_not_completed_once_another_run_has_started(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_ = store.open

    def slow(path: str, mode: str = "rb", **options: Any) -> Any:
        if "/model/" in path and mode == "wb" and not other.claim_id:
            other.claim()
        return open_(path, mode, **options)

    other = open_workdir(URL)
    monkeypatch.setattr(store, "open", slow)
    with pytest.raises(UserError, match="Stopping because another run has started in"):
        train(CONFIG, URL, devices=ONE)
    names = {path.removeprefix("/bucket/run/") for path in store.find("/bucket/run")}
    assert other.claim_id and not names & {"model/manifest.json", "summary.json"}


def test_temporary_names_of_one_process_differ(tmp_path: Path) -> None:
    """Threads, and containers that share a disk, can have the same process id."""
    from transformer_jax.storage import files

    path = tmp_path / "file"
    with files._replacing(path) as one:
        one.write(b"one")
        write_atomically(path, "other")
        assert path.read_text() == "other"
    assert path.read_text() == "one" and list(tmp_path.glob("*")) == [path]
