"""Work directories in object storage: mirrored by a run, or copied to this machine for reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from transformer_jax.data.corpus import Corpus, open_corpus
from transformer_jax.errors import UserError, one_line
from transformer_jax.runs.checkpoint_folder import complete_steps
from transformer_jax.runs.checkpoints import Checkpoints, WorkdirTaken
from transformer_jax.runs.mirror import (
    cached_folder,
    mirror_checkpoints,
    mirror_files,
    mirror_folder,
)
from transformer_jax.runs.workdir import Workdir, read_claim
from transformer_jax.storage.files import (
    MANIFEST,
    MODEL,
    AnyPath,
    check_multiprocess,
    copy_folder,
    existing_folder,
    is_url,
    kind_of,
    locked,
    needs_mirror,
    remote_path,
    retry,
)


def open_workdir(name: str | Path) -> Workdir:
    """Return the work directory of a run, by its path or URL."""
    url = str(name).rstrip("/") if is_url(str(name)) else ""
    check_multiprocess(url, multiprocess=jax.process_count() > 1)
    return RemoteWorkdir(url) if url else Workdir(name)


class RemoteWorkdir(Workdir):
    """Work directory at a URL, with a local mirror.

    Orbax writes checkpoints directly to gs:// URLs. For other URLs, it writes them to the mirror,
    and they are copied from there.
    """

    def __init__(self, url: str):
        super().__init__(cached_folder(url, "train"))
        self.store = remote_path(url)
        if not needs_mirror(url):
            self.checkpoints = Checkpoints(self, self.store / "checkpoints")

    def check_claim(self) -> None:
        retry(self.store, super().check_claim)

    def open_corpus(self, fingerprint: str) -> Corpus:
        if open_corpus(self.path("corpus"), fingerprint) is None:
            copy_folder(self.store / "corpus" / fingerprint, self.path("corpus") / fingerprint)
        return super().open_corpus(fingerprint)

    def publish(self, fingerprints: Sequence[str]) -> None:
        if jax.process_count() > 1:
            for fingerprint in fingerprints:
                remote_corpus = self.store / "corpus" / fingerprint
                self._push(mirror_folder, self.path("corpus") / fingerprint, remote_corpus)
        self.push_files()

    def finish(self) -> None:
        retry(self.store, self.push_files)
        self.push_checkpoints()

    def pull(self) -> None:
        """Mirror the URL to the local folder, unless this machine was the last to write to the URL.

        In that case, the local folder can hold files that could not be copied.
        """
        if read_claim(self.store) == (read_claim(self.folder) or None):
            return
        mirror_files(self.store, self.folder)
        if isinstance(self.checkpoints.folder, Path):
            mirror_checkpoints(self.store / "checkpoints", self.checkpoints.folder)

    def push_files(self) -> None:
        """Mirror the local folder to the URL, except for checkpoints."""
        self._push(mirror_files, self.folder, self.store)

    def push_checkpoints(self) -> None:
        """Mirror the local checkpoints to the URL, unless Orbax writes them there directly.

        Call ``push_files`` first: a resumed run drops log entries after its checkpoint.
        """
        if isinstance(self.checkpoints.folder, Path):
            self._push(mirror_checkpoints, self.checkpoints.folder, self.store / "checkpoints")

    def _push(self, mirror: Callable[..., None], source: AnyPath, target: AnyPath) -> None:
        self.check_claim()
        try:
            mirror(source, target, check_claim=self.check_claim)
        except WorkdirTaken:
            raise
        except Exception as error:
            raise UserError(
                f"{source} could not be copied to {target}: {one_line(error)}. Nothing is lost: "
                "run the same command on this machine to continue."
            ) from error


def local_copy(workdir: str | Path) -> Path:
    """Return a local folder for reading a work directory, a model folder or a checkpoint.

    A URL is copied first: small files and the model or, without ``model/``, the parameters of the
    last checkpoint.
    """
    if not is_url(str(workdir)):
        return existing_folder(workdir)
    url, _, step = str(workdir).rstrip("/").partition("/checkpoints/")
    folder = cached_folder(url, "read")
    store = remote_path(url)
    # Readers of the same URL on this machine share the folder and take turns.
    with locked(folder.with_suffix(".lock")):
        if kind_of(store / "config.json") != "file":
            raise UserError(
                f"{str(workdir)!r} has no config.json; expected a work directory written by "
                "train.py --workdir, or a model folder."
            )
        is_model = kind_of(store / MANIFEST) == "file"
        if is_model:
            mirror_folder(store, folder)
        else:
            mirror_files(store, folder, model=not step)
        if step or not (is_model or (folder / MODEL).exists()):
            checkpoints = store / "checkpoints"
            steps = [int(step)] if step.isdigit() else complete_steps(checkpoints)[-1:]
            mirror_checkpoints(checkpoints, folder / "checkpoints", steps)
    return folder / "checkpoints" / step if step else folder
