"""Work directory of a run: its files, their owner, and the checks before a run starts in it."""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformer_jax.data.corpus import TEMPORARY_PREFIX, Corpus, open_corpus
from transformer_jax.devices.distributed import broadcast_from_first
from transformer_jax.devices.sharding import parameters_by_name
from transformer_jax.errors import UserError, one_line
from transformer_jax.model.matmul import compute_dtype
from transformer_jax.runs.checkpoint_folder import checkpoint_name, load_tokenizer
from transformer_jax.runs.checkpoints import Checkpoints, WorkdirTaken
from transformer_jax.runs.manifest import PARAMETERS, Manifest, delete_complete
from transformer_jax.runs.model_folder import check_link, write_model
from transformer_jax.settings.changes import Difference, differences_on_resume, fields_that_differ
from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import from_json, to_json
from transformer_jax.storage.files import (
    MANIFEST,
    MODEL,
    AnyPath,
    files_in,
    kind_of,
    local_path,
    locked,
    remove_folder,
    write_atomically,
)
from transformer_jax.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_CLAIM_FILE = ".token"
_CLAIM_TIMEOUT_SECONDS = 60.0  # on a network file system, new files can appear late


class Workdir:
    """Work directory of a run, on a local or shared disk.

    With several processes, process 0 calls ``open`` and ``publish``, then all others ``join`` and
    ``pull``.

    Attributes:
      config: the run's settings, with the sizes of its vocabularies. Set before the first save.
      tokenizer: the run's tokenizer. Set before the first save.
      checkpoints: the run's checkpoints.
      resume_from: the checkpoint that the run resumes from, or None. Set by ``join``.
      claim_id: random string that process 0 writes there. A run that starts later replaces it.
      folder: the folder on this machine.
      store: the folder or URL that ``--workdir`` names.
    """

    config: Config
    tokenizer: Tokenizer

    def __init__(self, name: str | Path):
        # resolved, because a link can be changed during the run
        self.folder = Path(os.path.realpath(local_path(name)))
        self.store: AnyPath = self.folder
        self.checkpoints = Checkpoints(self, self.folder / "checkpoints")
        self.resume_from: Manifest | None = None
        self.claim_id = ""
        try:
            str(self.folder).encode()
        except UnicodeEncodeError:  # Orbax does not accept it
            raise UserError(
                f"--workdir is {str(self.folder)!r}, which contains characters outside this "
                "locale's encoding; set PYTHONUTF8=1 in the environment, or choose an ASCII name."
            ) from None

    def __str__(self) -> str:
        return str(self.store)

    def path(self, name: str) -> Path:
        """Return the path of one of the run's files on this machine."""
        return self.folder / name

    @contextmanager
    def open(self, config: Config, *, allow_changes: bool = False) -> Iterator[int | None]:
        """Lock and claim the work directory for a run with this config until the context exits.

        Yields the step of the newest intact checkpoint, or None. Deletes newer and incomplete
        checkpoints. With ``allow_changes``, the run can resume with different values of
        ``Changeable`` settings. A folder without a checkpoint is reused, with its corpora.

        Raises:
          UserError: the folder is in use by another run, holds a run with another config or a
            finished model without checkpoints, is a model folder or is not a work directory. Its
            contents are unchanged.
        """
        if self.folder.is_file():
            raise UserError(
                f"--workdir is {str(self)!r}, which is a file; expected a folder, new or of a run."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        _check_is_workdir(self)
        busy_message = (
            f"Another run is using {str(self)!r}; wait for it to finish or choose another "
            "--workdir."
        )
        with locked(self.path(".lock"), busy_message):
            self.pull()
            newest = self.checkpoints.newest()
            if newest is not None:
                # the checkpoint's own config, because config.json can have been edited
                differences = differences_on_resume(newest.config, config)
                _check_changes(self, differences, allow_changes=allow_changes)
            elif Manifest(self.path(MODEL)).is_model:
                raise UserError(
                    f"{str(self)!r} has a finished model, but no checkpoint to resume from. To "
                    f"continue from the model, pass --training.start-from {self} and another "
                    "--workdir; to train from scratch, choose another --workdir or delete "
                    f"{self}/{MODEL}."
                )
            claim_of_last_run = read_claim(self.folder)
            self.claim()  # before anything is deleted
            if newest is None:
                self.write_config(config)
            _delete_unfinished_corpora(self, claim_of_last_run)
            step = None if newest is None else newest.steps[0]
            _delete_checkpoints_after(self, step or 0)
            yield step

    def claim(self) -> None:
        """Write a new claim, so runs elsewhere that use the work directory stop."""
        self.claim_id = secrets.token_hex()
        try:
            for folder in (self.store, self.folder):
                (folder / _CLAIM_FILE).write_text(self.claim_id)
        except Exception as error:  # each store raises different errors
            raise UserError(f"{self} cannot be written: {one_line(error)}") from error

    def join(self, claim_id: str, step: int | None) -> None:
        """Wait for process 0's claim, and open the checkpoint of the step that ``open`` yields.

        Raises ``UserError`` if the claim does not appear.
        """
        self.claim_id = claim_id
        end = time.monotonic() + _CLAIM_TIMEOUT_SECONDS
        while read_claim(self.store) != claim_id:
            if time.monotonic() > end:
                raise UserError(
                    f"{self} is not shared by all processes: process 0's file "
                    f"{_CLAIM_FILE} did not appear within {_CLAIM_TIMEOUT_SECONDS:.0f} s; choose a "
                    "shared folder or a gs:// URL."
                )
            time.sleep(0.2)
        if step is not None:
            self.resume_from = Manifest(self.checkpoints.path(step))

    def check_claim(self) -> None:
        """Raise ``WorkdirTaken`` if another run has started in the same work directory."""
        if read_claim(self.store) != self.claim_id:
            raise WorkdirTaken(
                f"Stopping because another run has started in {self}. Restart this run with "
                "a different --workdir."
            )

    def write_config(self, config: Config) -> None:
        """Write config.json."""
        write_atomically(self.path("config.json"), to_json(config))

    def write_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Write the tokenizer's files."""
        tokenizer.save(self.folder)

    def read_tokenizer(self) -> Tokenizer:
        """Read the run's tokenizer.

        Raises ``UserError`` if the checkpoint to resume from has another one.
        """
        if self.resume_from is None:
            return Tokenizer.load(self.folder)
        return load_tokenizer(self.folder, self.resume_from)

    def open_corpus(self, fingerprint: str) -> Corpus:
        """Open a corpus that process 0 built."""
        corpus = open_corpus(self.path("corpus"), fingerprint)
        if corpus is None:
            path = self.store / "corpus" / fingerprint
            raise UserError(
                f"The corpus {self.path('corpus') / fingerprint} is corrupt. Delete {path} and run "
                "the same command again to build it again."
            )
        return corpus

    def write_model(self, parameters: Any, steps: Sequence[int]) -> None:
        """Write the finished model, the average of these steps' checkpoints."""
        config = self.config
        with_auto_dtype = dataclasses.replace(config.model, dtype="auto")
        if config.model.dtype == compute_dtype(with_auto_dtype):  # other machines choose their own
            config = dataclasses.replace(config, model=with_auto_dtype)
        model = self.path(MODEL)
        arrays = parameters_by_name(parameters)
        broadcast_from_first(lambda: write_model(model, config, arrays, self.tokenizer, steps))

    # The methods below copy files for ``RemoteWorkdir``. On a shared disk there is nothing to copy.

    def publish(self, fingerprints: Sequence[str]) -> None:
        """Give the other processes what process 0 built: tokenizer, logs, and the corpora
        with these fingerprints.
        """

    def finish(self) -> None:
        """Publish the model and the summary of a run that ends, in process 0."""

    def pull(self) -> None:
        """Bring the files of the store to this machine. Here, the folder is the store."""

    def push_files(self) -> None:
        """Bring the files of this machine to the store, except for checkpoints."""

    def push_checkpoints(self) -> None:
        """Bring the checkpoints of this machine to the store."""


def read_claim(folder: AnyPath) -> str:
    """Return the claim on a work directory, or '' if it is missing."""
    path = folder / _CLAIM_FILE
    try:
        if not isinstance(path, Path):
            path.fs.invalidate_cache()
        return path.read_text()
    except FileNotFoundError:
        return ""
    except Exception as error:
        raise UserError(f"{folder} cannot be read: {one_line(error)}") from error


def _check_is_workdir(workdir: Workdir) -> None:
    """Raise ``UserError`` if another program wrote the files in the work directory."""
    store = workdir.store
    for name in ("checkpoints", MODEL, "config.json"):
        check_link(workdir.path(name))
    is_import_of_earlier_version = kind_of(workdir.checkpoints.path(0) / MANIFEST)
    if kind_of(store / PARAMETERS) or is_import_of_earlier_version:
        raise UserError(
            f"{str(store)!r} is a finished or imported model, which training does not modify. To "
            f"fine-tune it, pass --training.start-from {store} and another --workdir."
        )
    path = store / "config.json"
    if kind_of(path):
        try:
            from_json(path.read_bytes())
        except UserError as error:
            if workdir.checkpoints.newest() is None:
                raise UserError(f"{str(path)!r}: {error}") from None
        return
    names = os.listdir(store) if isinstance(store, Path) else files_in(store)
    if any(name[0] != "." and name.partition("/")[0] != "corpus" for name in names):
        raise UserError(
            f"{str(store)!r} is not empty but has no config.json; expected a new folder or a "
            "work directory."
        )


def _check_changes(workdir: Workdir, differences: list[Difference], *, allow_changes: bool) -> None:
    """Raise ``UserError`` unless the run can resume with these changed settings."""
    if not differences:
        return
    fields = fields_that_differ(differences)
    can_change = all(difference.changeable for difference in differences)
    if not (can_change and allow_changes):
        flag = ", or --allow-changes" if can_change else ""
        raise UserError(
            f"{str(workdir)!r} contains a run with a different config. Use another --workdir or "
            f"the same settings{flag}. {fields}"
        )
    logger.warning("Resuming the run with different settings. %s", fields)


def _delete_unfinished_corpora(workdir: Workdir, claim_id: str) -> None:
    """Delete the unfinished corpora of the run with this claim.

    Work directories can share a ``corpus`` folder, so those of other runs are kept.
    """
    if claim_id:
        for path in workdir.path("corpus").glob(f"{TEMPORARY_PREFIX}{claim_id}*"):
            remove_folder(path)


def _delete_checkpoints_after(workdir: Workdir, newest: int) -> None:
    """Delete checkpoints that are incomplete or newer than the ``newest`` intact one."""
    folder = workdir.checkpoints.folder
    complete_steps = [step for step in workdir.checkpoints.steps() if step <= newest]
    for name in {name.partition("/")[0] for name in files_in(folder)}:
        if not name.isdecimal() or name != checkpoint_name(int(name)):
            continue  # not a checkpoint
        if int(name) not in complete_steps:
            if int(name) > max(complete_steps, default=0):
                logger.warning("Deleting %s, which is incomplete or corrupt.", folder / name)
            delete_complete(folder / name)
