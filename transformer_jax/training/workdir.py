"""Claims a work directory for one run with one config."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from transformer_jax.checkpoint import checkpoint_name, complete_steps, config_of
from transformer_jax.config import Config
from transformer_jax.config_io import to_json
from transformer_jax.errors import UserError
from transformer_jax.storage import locked, write_atomically
from transformer_jax.training.resuming import (
    Difference,
    differences_on_resume,
    fields_that_differ,
)

log = logging.getLogger(__name__)


@contextmanager
def claimed(workdir: Path, config: Config, *, allow_changes: bool = False) -> Iterator[None]:
    """Make ``workdir`` the work directory of this config, and keep other runs out of it while the
    context lasts.

    With ``allow_changes`` the run in it may resume with other values of settings that are
    ``changeable``. A folder in which no step was ever trained, for bad input say, is taken over,
    with its corpora. One with an imported model gets the new config if that leaves the model and
    the tokenizer as they are.

    Raises:
      UserError: another run is at work in it, or it holds a run with another config; a path that is
        no work directory. Nothing in it was changed.
    """
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"{str(workdir)!r} is a file; expected a new folder or a work directory.")
    workdir.mkdir(parents=True, exist_ok=True)
    # corpora may be left of a run whose URL was emptied
    others = [e for e in workdir.iterdir() if not e.name.startswith(".") and e.name != "corpus"]
    if others and not (workdir / "config.json").exists():
        raise UserError(
            f"{str(workdir)!r} is not empty and holds no config.json; expected a new folder or a "
            "work directory."
        )
    with held(workdir):
        _claim(workdir, config, allow_changes=allow_changes)
        yield


@contextmanager
def held(workdir: Path) -> Iterator[None]:
    """Hold the work directory's lock; ``UserError`` if another run does."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(workdir / ".lock"))
        except BlockingIOError:
            raise UserError(
                f"Another run is at work in {str(workdir)!r}; wait for it or choose another "
                "--workdir."
            ) from None
        yield


def _claim(workdir: Path, config: Config, *, allow_changes: bool) -> None:
    path = workdir / "config.json"
    if not path.exists():
        write_config(workdir, config)
        return
    differences = differences_on_resume(config_of(workdir), config)
    steps = complete_steps(workdir / "checkpoints")
    if _was_trained(workdir, steps):
        if steps:  # config.json may have been edited, which changes nothing that was trained
            saved = config_of(workdir / "checkpoints" / checkpoint_name(steps[-1]))
            fixed = [each for each in differences_on_resume(saved, config) if not each.changeable]
            differences = [*(each for each in differences if each.changeable), *fixed]
        _check_changes(workdir, differences, allow_changes=allow_changes)
    elif steps:
        if fixed := [
            each
            for each in differences
            if each.name == "training.start_from"  # the imported model is where it starts
            or (each.name.startswith(("model.", "tokenizer.")) and not each.changeable)
        ]:
            raise UserError(
                f"{str(workdir)!r} holds an imported model; expected its own settings, which "
                f"--config {path} gives. {fields_that_differ(fixed)}"
            )
        write_config(workdir, config)
    elif differences:
        # whether other text asks for another tokenizer is for ``prepare_tokenizer`` to say
        if any(each.name.startswith("tokenizer.") for each in differences):
            remove_tokenizer(workdir)
        write_config(workdir, config)


def _check_changes(workdir: Path, differences: list[Difference], *, allow_changes: bool) -> None:
    """Raise ``UserError`` unless the run may resume with these changes of its settings."""
    if not differences:
        return
    fields = fields_that_differ(differences)
    changeable = all(each.changeable for each in differences)
    if not (changeable and allow_changes):
        flag = ", or --allow-changes" if changeable else ""
        raise UserError(
            f"{str(workdir)!r} holds a run with another config; choose another --workdir, or the "
            f"same settings{flag}. {fields}"
        )
    log.warning("The run resumes with other settings. %s", fields)
    if any(each.name.startswith("batch.") for each in differences):
        log.warning(
            "From here on step N has the N-th batch of the new plan: some pairs of this epoch come "
            "twice and some not at all; the learning rate still follows the step."
        )


def _was_trained(workdir: Path, steps: list[int]) -> bool:
    """Whether any step was trained: there is a checkpoint of one (an import is step 0), or metrics
    say more than that a run started and compiled.
    """
    metrics = workdir / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    before_steps = ('"kind": "start"', '"kind": "compile"')
    return any(steps) or not all(any(kind in line for kind in before_steps) for line in lines)


def write_config(workdir: Path, config: Config) -> None:
    """Replace the work directory's config."""
    write_atomically(workdir / "config.json", to_json(config))


def remove_tokenizer(workdir: Path) -> None:
    """Delete the work directory's tokenizer."""
    for file in workdir.glob("tokenizer*.model"):
        file.unlink()
