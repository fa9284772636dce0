"""Files on local disks and in object stores: paths, atomic writes, locks, JSON."""

from __future__ import annotations

import fcntl
import glob
import importlib
import json
import logging
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, TypeVar

from transformer_jax.errors import UserError, needs_extra, one_line, short_repr

if TYPE_CHECKING:
    from upath import UPath

logger = logging.getLogger(__name__)

T = TypeVar("T")

AnyPath: TypeAlias = "Path | UPath"
"""A local path or the path of a URL, as returned by ``to_path``."""

MANIFEST = "manifest.json"
"""Name of the last file to be written to a checkpoint, a model or a corpus."""

MODEL = "model"
"""Name of the finished model's folder in a work directory."""

_BLOCK_BYTES = 1 << 22  # read at a time

_RETRY_SECONDS = 600.0  # an object store can be down for minutes
_RETRY_INTERVAL_SECONDS = 5.0

_JSON_TYPE_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}

_STORE_PACKAGES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}  # scheme: (package, extra)


def is_url(name: str) -> bool:
    """Return True for a URL (s3://, gs://, https:// and others), False for a path."""
    return "://" in name


def local_path(name: str | Path) -> Path:
    """Return the absolute path of a local file, with ``~`` expanded."""
    return Path(os.path.expanduser(name)).absolute()


def is_checkpoint(folder: AnyPath) -> bool:
    """Return True for the path of a checkpoint, which may be missing."""
    return folder.parent.name == "checkpoints" and folder.name.isdigit()


def existing_folder(workdir: str | Path) -> Path:
    """Return the path of a local work directory or checkpoint.

    Raises ``UserError`` if it is not a folder.
    """
    folder = local_path(workdir)
    if not folder.is_dir():
        raise UserError(
            f"{str(workdir)!r} is not a folder; expected a work directory written by train.py, "
            "the folder of one of its checkpoints, a model folder, or hf://NAME."
        )
    return folder


def check_not_input(output: str, *inputs: str | None) -> None:
    """Raise ``UserError`` if a file to be written is one of the inputs, perhaps by another name."""
    paths = map(to_path, filter(None, inputs))
    local = [path for path in paths if isinstance(path, os.PathLike)]  # file:// URLs too
    for path in filter(os.path.isfile, local):
        if os.path.isfile(output) and os.path.samefile(path, output):
            raise UserError(f"--output {output!r} is also an input; expected another file.")


def cache_folder() -> Path:
    """Return ``transformer_jax`` in the user's cache directory ($XDG_CACHE_HOME or ~/.cache)."""
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(caches) if os.path.isabs(caches) else local_path("~/.cache")) / "transformer_jax"


def to_path(name: str) -> AnyPath:
    """Return the path object of a local file name or URL."""
    return remote_path(name) if is_url(name) else Path(name)


def remote_path(url: str) -> UPath:
    """Return the path object of a URL.

    Raises ``UserError`` if no installed package supports the URL.
    """
    from upath import UPath  # slow to import, and few runs need it

    if store := _STORE_PACKAGES.get(url.partition("://")[0]):
        package, extra = store
        with needs_extra(extra):
            importlib.import_module(package)
    try:
        path = UPath(url)
        path.fs  # noqa: B018  imports the package
    except Exception as error:  # each file system has its own errors, for example of the network
        raise UserError(
            f"{short_repr(url)} cannot be opened: {one_line(error)}. Expected a path, or a URL "
            "that fsspec supports."
        ) from None
    return path


def needs_mirror(workdir: str) -> bool:
    """Return True for a URL that Orbax cannot write to, so that checkpoints are copied there."""
    return is_url(workdir) and not workdir.startswith("gs://")


def check_multiprocess(workdir: str, *, multiprocess: bool) -> None:
    """Raise ``UserError`` if several processes cannot train in this work directory."""
    if multiprocess and needs_mirror(workdir):
        raise UserError(
            f"workdir is {workdir!r}, which does not work with several processes; use a gs:// URL "
            "or a folder that all processes share, or start one process without the flags that "
            "connect processes."
        )


def kind_of(path: AnyPath) -> str:
    """Return "file", "directory", or "" if the path is neither.

    Raises ``UserError`` if an object store reports an error, for example if credentials are
    missing.
    """
    if isinstance(path, Path):
        return "file" if path.is_file() else "directory" if path.is_dir() else ""
    try:  # in some stores, isfile() and exists() return False on any error
        return str(path.fs.info(path.path)["type"])
    except FileNotFoundError:
        return ""
    except Exception as error:
        raise UserError(f"{short_repr(str(path))} cannot be read: {one_line(error)}") from error


def retry(path: AnyPath, operation: Callable[[], T]) -> T:
    """Return ``operation()``, retrying for up to ten minutes while an object store fails.

    Errors are raised immediately if ``path`` is local.
    """
    end = time.monotonic() + _RETRY_SECONDS
    while True:
        try:
            return operation()
        except Exception as error:  # each store raises different errors
            # If the store failed, its error is the cause of the UserError.
            is_user_error = isinstance(error, UserError) and error.__cause__ is None
            if is_user_error or isinstance(path, Path) or time.monotonic() > end:
                raise
            logger.warning("%s failed (%s); retrying.", path, one_line(error))
        time.sleep(_RETRY_INTERVAL_SECONDS)


def write_atomically(path: AnyPath, content: bytes | str) -> None:
    """Replace a file's content. Even after a crash, readers see either the old or the new one."""
    with _replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def _replacing(path: AnyPath) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` once it is completely written to disk.

    In an object store, a file appears when it is closed, so it needs no temporary file.
    """
    if not isinstance(path, Path):
        with path.open("wb") as file:
            yield file
        return
    # Other threads, and hosts and containers with equal process ids, can write the same file.
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:  # for example a full disk
        error.filename = str(path)  # not the temporary file
        raise
    finally:
        temporary.unlink(missing_ok=True)


def parse_object(text: str | bytes, name: str, /, **fields: Any) -> dict[str, Any]:
    """Parse a JSON object, which other programs, older versions or disk errors can have changed.

    ``name`` is the file or line in messages. ``fields`` gives the types of required fields: a
    class, or a union such as ``int | None``; numbers are ``int | float``.

    Raises ``UserError`` if it is not JSON, not an object, or a field is missing or has another
    type.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not valid JSON: {one_line(error)}.") from None
    if not isinstance(content, dict):
        raise UserError(f"{name} contains {short_repr(content)}; expected a JSON object.")
    check_types(content, name, fields)
    return content


def check_types(content: Mapping[str, Any], name: str, fields: Mapping[str, Any]) -> None:
    """Raise ``UserError`` unless a JSON object has ``fields`` of these types (``parse_object``)."""
    for field, kind in fields.items():
        value = content.get(field)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            actual = short_repr(value) if field in content else "missing"
            expected = _JSON_TYPE_NAMES.get(kind) or str(getattr(kind, "__name__", kind))
            raise UserError(f"{name}: {field} is {actual}; expected {expected}.")


def copy_file(source: AnyPath, target: AnyPath) -> None:
    """Copy a local or remote file. Readers of ``target`` never see a partial file."""
    if isinstance(target, Path):
        target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as file, _replacing(target) as copy:
        shutil.copyfileobj(file, copy, _BLOCK_BYTES)


def copy_folder(source: AnyPath, target: AnyPath, skipped: tuple[str, ...] = ()) -> None:
    """Copy a folder, except files with ``skipped`` prefixes.

    Its manifest, which marks it as complete, is copied last.
    """
    for name in sorted(files_in(source), key=lambda name: name == MANIFEST):
        if not name.startswith(skipped):
            copy_file(source / name, target / name)


def files_in(folder: AnyPath) -> list[str]:
    """Return the names of all files in a folder and its subfolders, relative to the folder."""
    if isinstance(folder, Path):
        # Unlike rglob, walk passes over folders that another program deletes or renames meanwhile.
        paths = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
        return sorted(path.relative_to(folder).as_posix() for path in paths if path.is_file())
    folder.fs.invalidate_cache()  # fsspec caches listings, but other programs can add files
    prefix = folder.path.rstrip("/") + "/"
    return sorted(path.removeprefix(prefix) for path in folder.fs.find(prefix))


def checksums(folder: AnyPath, names: Iterable[str]) -> dict[str, int]:
    """Return the CRC-32 of each of these files in a folder."""
    values = {}
    for name in names:
        value = 0
        with (folder / name).open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                value = zlib.crc32(block, value)
        values[name] = value
    return values


def remove_folder(folder: AnyPath) -> None:
    """Delete a folder and its contents, skipping local files that cannot be deleted.

    Of a link, only the link is deleted: the folder can belong to another run.
    """
    if isinstance(folder, Path):
        if folder.is_symlink():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)
    else:
        _remove(folder, recursive=True)


def remove_file(file: AnyPath) -> None:
    """Delete a file if it exists."""
    if isinstance(file, Path):
        file.unlink(missing_ok=True)
    else:
        _remove(file, recursive=False)


def _remove(path: UPath, *, recursive: bool) -> None:
    with suppress(FileNotFoundError):
        # fsspec takes the path as a glob, so a folder named run[12] would be run1 and run2.
        path.fs.rm(glob.escape(path.path), recursive=recursive)


@contextmanager
def locked(path: Path, busy_message: str = "") -> Iterator[None]:
    """Lock the file ``path`` until the context exits or the process ends.

    If another process holds the lock, raises ``UserError(busy_message)``, or waits if it is
    empty. If the file system does not support locks, logs a warning.
    """
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy_message else 0))
        except BlockingIOError:
            raise UserError(busy_message) from None
        except OSError:
            logger.warning(
                "%s is on a file system that does not support locks; use it from one process only.",
                path,
            )
        yield


@contextmanager
def new_folder(name: str, flag: str) -> Iterator[Path]:
    """Create a folder for the caller to fill; delete it if an error occurs.

    Raises a ``UserError`` that names ``flag`` if the folder is not empty.
    """
    folder = Path(name).expanduser()
    if "://" in name or (folder.exists() and any(folder.iterdir())):
        raise UserError(f"--{flag} is {name!r}; expected a new or empty folder on this machine.")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
