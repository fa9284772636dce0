"""Files: atomic writes, locks, copies, and the cache folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import random
import threading
import time
import zlib
from pathlib import Path

import pytest

from transformer_jax.errors import UserError
from transformer_jax.storage import files
from transformer_jax.storage.files import (
    cache_folder,
    check_not_input,
    checksums,
    copy_file,
    copy_folder,
    files_in,
    is_url,
    local_path,
    locked,
    remove_file,
    remove_folder,
    to_path,
    write_atomically,
)


@pytest.mark.parametrize("content", ["ü\n", b"\xff\x00"])
def test_a_file_is_on_disk_before_it_replaces_the_old_one(content, tmp_path, monkeypatch) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    expected = content.encode() if isinstance(content, str) else content
    seen = []

    def fsync(number: int) -> None:
        written = [each for each in tmp_path.iterdir() if each != path]
        seen.append((path.read_text(), [each.read_bytes() for each in written]))

    monkeypatch.setattr(files.os, "fsync", fsync)
    write_atomically(path, content)
    assert seen == [("old", [expected])]
    assert path.read_bytes() == expected and [*tmp_path.iterdir()] == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match=r"summary\.json"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


class PartialWrites(io.FileIO):
    """A raw file of which each write takes only some of the bytes, as POSIX allows."""

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        return super().write(view[: random.Random(len(view)).randint(1, max(1, len(view)))])


def test_files_are_complete_if_each_write_takes_only_some_bytes(tmp_path, monkeypatch) -> None:
    open_ = Path.open

    def partial(path, mode="r", *args, **options):
        if mode in ("xb", "wb"):
            return io.BufferedWriter(PartialWrites(path, mode[0]), buffer_size=7)
        return open_(path, mode, *args, **options)

    content = random.Random(0).randbytes(10_000)
    monkeypatch.setattr(Path, "open", partial)
    write_atomically(tmp_path / "a", content)
    copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == content


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 31, 32, 33])
def test_checksums_and_copies_of_files_around_the_size_of_a_block(
    size, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(files, "_BLOCK_BYTES", 16)
    content = random.Random(size).randbytes(size)
    (tmp_path / "a").write_bytes(content)
    copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == content
    assert checksums(tmp_path, ["a", "b"]) == dict.fromkeys("ab", zlib.crc32(content))


def test_an_error_names_the_file_that_the_user_named(tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    for path in tmp_path / "missing" / "file", tmp_path / "folder":
        with pytest.raises(OSError) as raised:
            write_atomically(path, "new")
        assert raised.value.filename == str(path)


def test_a_lock_is_held_until_the_end_and_waited_for_on_request(tmp_path) -> None:
    path, order = tmp_path / ".lock", []

    def wait() -> None:
        with locked(path):
            order.append("second")

    with locked(path):
        with pytest.raises(UserError, match="^in use$"), locked(path, "in use"):
            pass
        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.2)
        order.append("first")
    waiting.join(timeout=60)
    assert order == ["first", "second"]
    with locked(path):  # free again
        pass


def test_without_locks_there_is_a_warning(tmp_path, monkeypatch, caplog) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with locked(tmp_path / ".lock"):
        [message] = caplog.messages
    assert "does not support locks; use it from one process only" in message


def test_folders_that_vanish_while_files_are_listed_are_passed_over(tmp_path, monkeypatch) -> None:
    """For example ``state.orbax-checkpoint-tmp``, which another process is about to rename."""
    for name in ("a/temporary/file", "b/file"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    listed = os.scandir

    def scandir(folder):
        if os.fspath(folder).endswith("temporary"):
            (tmp_path / "a/temporary/file").unlink()
            (tmp_path / "a/temporary").rmdir()
        return listed(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    assert files_in(tmp_path) == ["b/file"]
    assert not (tmp_path / "a" / "temporary").exists()


def test_a_folders_manifest_is_copied_last(tmp_path, monkeypatch) -> None:
    names = ["a", "manifest.json", "state/manifest.json", "state/z", "zz"]
    for name in names:
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_text(name)
    copied, copy = [], files.copy_file
    monkeypatch.setattr(
        files,
        "copy_file",
        lambda source, target: (copied.append(source.name), copy(source, target)),
    )
    copy_folder(tmp_path / "source", tmp_path / "target")
    assert copied[-1] == "manifest.json" and copied[:-1] == ["a", "manifest.json", "z", "zz"]
    assert files_in(tmp_path / "target") == names
    remove_folder(tmp_path / "target")
    assert not (tmp_path / "target").exists()
    remove_folder(tmp_path / "target")  # nothing to delete


@pytest.mark.parametrize(
    ("variable", "expected"),
    [(None, "home/.cache"), ("", "home/.cache"), ("relative", "home/.cache"), ("/else", "/else")],
)
def test_the_cache_folder(variable, expected, tmp_path, monkeypatch) -> None:
    """As in the XDG specification, a relative path is ignored."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if variable is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert cache_folder() == tmp_path / expected / "transformer_jax"


def test_paths_and_urls(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert [is_url(name) for name in ("s3://b/x", "gs://b", "a/b", "/a:b", "c:/x")] == [
        *(True, True),
        *(False, False, False),
    ]
    assert local_path("~/x") == tmp_path / "x" and local_path("x") == Path(os.getcwd(), "x")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_output_is_no_input_by_any_name(place, tmp_path, monkeypatch) -> None:
    """The input can have any of these names, too, and any place among the inputs."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("x").write_text("text")
    Path("other").write_text("text")
    Path("hard").hardlink_to("x")
    Path("soft").symlink_to("x")
    Path("twice").symlink_to("soft")
    Path("beside").symlink_to(tmp_path)
    with open("x") as opened:
        names = ["x", "./x", "folder/../x", str(tmp_path / "x"), "beside/x", "hard", "soft"]
        names += ["twice", "beside/hard", f"/dev/fd/{opened.fileno()}"]
        urls = [f"file://{tmp_path}/x", f"file://{tmp_path}/hard", f"local://{tmp_path}/soft"]
        for given in (*names, *urls):
            inputs: list[str | None] = [None, "other", "", "missing", "memory://x", "/dev/null"]
            inputs.insert(place, given)
            for output in names:
                with pytest.raises(UserError, match=f"^--output '{output}' is also an input; exp"):
                    check_not_input(output, *inputs)
            for output in ("folder/x", "other.copy", "/dev/null", "folder"):
                check_not_input(output, *inputs)


@pytest.mark.parametrize("name", ["run[12]", "run*", "run?", "[!x]un1", "**", "{run1,run2}"])
@pytest.mark.parametrize("remote", [False, True])
def test_folders_may_have_names_that_are_globs(name, remote, tmp_path) -> None:
    """Only the folder and the file of that name are listed, copied and deleted."""
    base = to_path(f"memory:/{tmp_path}") if remote else tmp_path
    for folder in (name, "run1", "run2"):
        for file in ("a", "b", "state/a"):
            (base / folder / file).parent.mkdir(parents=True, exist_ok=True)
            (base / folder / file).write_text(folder)
    assert files_in(base / name) == ["a", "b", "state/a"]
    copy_folder(base / name, base / f"{name}copy")
    assert (base / f"{name}copy" / "state/a").read_text() == name
    remove_folder(base / f"{name}copy")
    remove_file(base / name / "a")
    remove_file(base / name / "a")  # nothing to delete
    others = [f"{folder}/{file}" for folder in ("run1", "run2") for file in ("a", "b", "state/a")]
    assert files_in(base) == sorted([f"{name}/b", f"{name}/state/a", *others])
    remove_folder(base / name)
    remove_folder(base / name)
    assert files_in(base) == others


@pytest.mark.parametrize(
    "url",
    ["github://", "zip://missing.zip", "nowhere://x", "s3://[::1", "://", "a b://c"],
)
def test_urls_that_no_file_system_opens_are_named(url: str) -> None:
    """Each file system reports its own errors, such as a TypeError for a missing host."""
    with contextlib.suppress(UserError):
        path = to_path(url)
        assert isinstance(str(path), str)
        assert url.partition("://")[0] not in ("github", "zip", "nowhere")
