"""What a work directory holds before the first step: the config it belongs to, and the
tokenizer.
"""

from __future__ import annotations

import dataclasses
import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from transformer_jax.checkpoint import choose_checkpoints
from transformer_jax.checkpoint_files import complete_steps
from transformer_jax.config import Config, PairsConfig
from transformer_jax.config_io import load_config_file, to_json
from transformer_jax.data.corpus import digests_folder
from transformer_jax.data.sources import check_files, pairs_fingerprint, read_pairs
from transformer_jax.errors import UserError
from transformer_jax.remote_workdir import RemoteWorkdir, local_workdir
from transformer_jax.tokenizer import Tokenizer
from transformer_jax.training.resuming import differences_on_resume, fields_that_differ

log = logging.getLogger(__name__)


def check_inputs(config: Config) -> None:
    """Miss a file now rather than after an hour of preparing the others."""
    if not config.data.train.is_given:
        raise UserError(
            "There is nothing to train on; expected data.train.source and data.train.target (text files), another "
            "data.train.kind, or a --config."
        )
    for pairs in (config.data.train, config.data.dev, config.data.test):
        if pairs.is_given:
            check_files(pairs, config.data.root)


@contextmanager
def claimed(workdir: Path, config: Config, *, allow_changes: bool = False) -> Iterator[None]:
    """Hold the work directory, made for this config if need be, for as long as the context lasts;
    no second run can.

    With ``allow_changes`` the fields that are ``changeable`` may differ from those of the run that
    is already there; what that means is logged.

    A folder where no step was ever trained, for bad input say, is taken over; only its tokenised
    corpora can be of use. One with imported parameters gets the new config if that leaves their
    model and tokenizer as they are.

    Raises:
      UserError: another run holds it, or was begun in it with another config; a path that is no
        work directory. Nothing in it was changed.
    """
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"{str(workdir)!r} is a file; expected a new folder or a work directory.")
    has_config = (workdir / "config.json").exists()
    if (
        workdir.is_dir()
        and not has_config
        and any(not _may_be_there(entry.name) for entry in workdir.iterdir())
    ):
        raise UserError(
            f"{str(workdir)!r} is not empty and holds no config.json; expected a new folder or a work directory."
        )
    workdir.mkdir(parents=True, exist_ok=True)
    with lock(workdir):
        _claim(workdir, config, allow_changes=allow_changes)
        yield


def _may_be_there(name: str) -> bool:
    """In a folder that is to become a work directory: hidden files, and corpora of an earlier one
    (``RemoteWorkdir.pull``).
    """
    return name.startswith(".") or name == "corpus"


def _claim(workdir: Path, config: Config, *, allow_changes: bool) -> None:
    path = workdir / "config.json"
    if not path.exists():
        write_config(workdir, config)
    else:
        differences = differences_on_resume(load_config_file(path), config)
        untrained = not _was_trained(workdir)
        if untrained and complete_steps(workdir / "checkpoints"):
            of_model = [
                each for each in differences if each.name.startswith(("model.", "tokenizer."))
            ]
            if fixed := [each for each in of_model if not each.changeable]:
                raise UserError(
                    f"{str(workdir)!r} holds an imported model; expected its own settings, which --config {path} gives. "
                    + fields_that_differ(fixed)
                )
            write_config(workdir, config)
        elif differences and untrained:
            _remove_tokenizer(workdir)
            write_config(workdir, config)
        elif differences:
            fields = fields_that_differ(differences)
            changeable = all(each.changeable for each in differences)
            if not (changeable and allow_changes):
                flag = ", or --allow-changes" if changeable else ""
                raise UserError(
                    f"{str(workdir)!r} holds a run with another config; choose another --workdir, or the same settings{flag}. "
                    + fields
                )
            log.warning("The run goes on with other settings. %s", fields)
            if any(each.name.startswith("batch.") for each in differences):
                log.warning(
                    "From here on step N has the N-th batch of the new plan. Of the epoch under way some pairs come twice and "
                    "some not at all; the learning rate still follows the step."
                )


def _was_trained(workdir: Path) -> bool:
    """Whether a step is left of any run: in a checkpoint (an import is step 0), or in more metrics
    than that it started.
    """
    if any(step > 0 for step in complete_steps(workdir / "checkpoints")):
        return True
    metrics = workdir / "metrics.jsonl"
    return metrics.exists() and any(
        '"kind": "start"' not in line for line in metrics.read_text().splitlines()
    )


def fetch(remote: RemoteWorkdir) -> None:
    """Bring a URL's folder up to date, unless a run is at work in it."""
    remote.folder.mkdir(parents=True, exist_ok=True)
    with lock(remote.folder):
        remote.pull()


@contextmanager
def lock(workdir: Path) -> Iterator[None]:
    """Keep a second run out of the work directory; the lock ends with the context, at the latest
    with this process.
    """
    with (workdir / ".lock").open("wb") as file:
        _take(file, workdir)
        yield


def _take(file: BinaryIO, workdir: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"Another run is at work in {str(workdir)!r}; wait for it or choose another --workdir."
        ) from None
    except OSError:
        log.warning(
            "%s is on a file system without locks: do not start a second run in it.", workdir
        )


def write_config(workdir: Path, config: Config) -> None:
    """Replace config.json in one go: a kill leaves the old one or the new one."""
    temporary = workdir / ".config.json.tmp"
    temporary.write_text(to_json(config))
    temporary.rename(workdir / "config.json")


def prepare_tokenizer(workdir: Path, config: Config) -> Tokenizer:
    """The work directory's tokenizer. If it has none yet: that of ``training.start_from``, or one
    trained on the text.

    ``tokenizer.origin`` has the fingerprint of the text, or of the tokenizer, that it comes from.
    """
    if has_tokenizer(workdir) and complete_steps(workdir / "checkpoints"):
        return Tokenizer.load(workdir)
    # Before the first checkpoint the text may still be corrected.
    tokenizer = None
    if config.training.start_from:
        tokenizer = Tokenizer.load(start_checkpoints(config)[0]).with_symbols(
            config.tokenizer.user_defined_symbols
        )
    elif config.tokenizer.model:
        tokenizer = Tokenizer.train([], config.tokenizer)  # no text is needed
    if tokenizer is not None:
        origin = tokenizer.fingerprint
    else:
        origin = pairs_fingerprint(
            config.data.train, config.data.root, digests=digests_folder(workdir, config)
        )
    noted = workdir / "tokenizer.origin"
    if has_tokenizer(workdir) and (not noted.is_file() or noted.read_text() == origin):
        return Tokenizer.load(workdir)
    _remove_tokenizer(workdir)
    noted.write_text(origin)
    if tokenizer is None:
        log.info("Training the tokenizer.")
        tokenizer = Tokenizer.train(_read(config, config.data.train), config.tokenizer)
    tokenizer.save(workdir)
    return tokenizer


def _remove_tokenizer(workdir: Path) -> None:
    for file in workdir.glob("tokenizer*.model"):
        file.unlink()


def start_checkpoints(config: Config) -> list[Path]:
    """The folders of the checkpoints whose mean ``training.start_from`` names, as ``load_model``
    takes it; newest first.

    Raises ``UserError`` if none are there, or those of a model that is not of the shape of
    ``config.model``.
    """
    name = config.training.start_from
    try:
        chosen = choose_checkpoints(local_workdir(name))
    except UserError as error:
        raise UserError(f"training.start_from is {name!r}: {error}") from None
    theirs, tokenizer = (
        load_config_file(chosen[0] / "config.json"),
        Tokenizer.load(chosen[0]),
    )
    ours = with_vocabulary(config, tokenizer).model
    differences = differences_on_resume(theirs, dataclasses.replace(theirs, model=ours))
    if fixed := [each for each in differences if not each.changeable]:
        raise UserError(
            f"training.start_from is {name!r}, whose model has other settings than this run's; expected the same, which "
            f"--config {name}/config.json gives. " + fields_that_differ(fixed, where=f"in {name}")
        )
    return chosen


def has_tokenizer(workdir: Path) -> bool:
    """Whether a whole tokenizer is there: of two files the target's is written last."""
    return (workdir / "tokenizer.model").exists() or (workdir / "tokenizer.target.model").exists()


def with_vocabulary(config: Config, tokenizer: Tokenizer) -> Config:
    """The config with the model's vocabulary sizes taken from the tokenizer."""
    model = dataclasses.replace(
        config.model,
        vocab_size=tokenizer.target_vocab_size,
        source_vocab_size=None if tokenizer.joint else tokenizer.source_vocab_size,
    )
    return dataclasses.replace(config, model=model)


def read_all(config: Config, name: str, *, limit: int | None = None) -> list[tuple[str, str]]:
    """The text of ``config.data.<name>``, at most ``limit`` pairs of it; empty if there is none."""
    pairs: PairsConfig = getattr(config.data, name)
    if not pairs.is_given:
        return []
    found = list(islice(_read(config, pairs), limit))
    if not found:
        raise UserError(
            f"data.{name} has no pairs; expected at least one, or data.{name}.kind none."
        )
    return found


def _read(config: Config, pairs: PairsConfig) -> Iterator[tuple[str, str]]:
    return read_pairs(pairs, config.data.root, invalid_utf8=config.data.invalid_utf8)
