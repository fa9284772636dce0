"""Preparation of a run: work directory, tokenizer, corpora, and restored or initial state."""

from __future__ import annotations

import dataclasses
import functools
import logging
import resource
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from transformer_jax.data.batching import BatchPlan
from transformer_jax.data.corpus import (
    Corpus,
    build_corpus,
    open_corpus,
)
from transformer_jax.data.loader import to_global_arrays
from transformer_jax.data.sources import ParallelText
from transformer_jax.devices.distributed import (
    allgather,
    broadcast_from_first,
    check_agreement,
    first_then_others,
    is_first,
    lost_contact,
    raise_on_any_process,
)
from transformer_jax.devices.sharding import check_rows, make_mesh
from transformer_jax.errors import UserError
from transformer_jax.evaluation import check_bleu
from transformer_jax.saved_models.checkpoint import checkpoint_name, load_tokenizer
from transformer_jax.saved_models.model_folder import load_parameters
from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import flatten, to_json
from transformer_jax.storage.files import copy_folder, retry, write_atomically
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.training.progress import Progress
from transformer_jax.training.resuming import (
    FREE_BETWEEN_PROCESSES,
    differences_on_resume,
    fields_that_differ,
)
from transformer_jax.training.saver import Checkpoints
from transformer_jax.training.step import (
    Parameters,
    StepFunctions,
    TrainState,
    make_step_functions,
)
from transformer_jax.training.workdir import Workdir, open_run_dir

log = logging.getLogger(__name__)

Pairs = list[tuple[str, str]]
Start = tuple[Any, Tokenizer]  # NumPy parameters and tokenizer of training.start_from

_FEWEST_FILES = 256  # open files; with fewer, Orbax and JAX fail with unclear errors


@dataclass
class Prepared:
    """Run that is ready for its next step."""

    config: Config  # with the tokenizer's vocabulary sizes
    workdir: Workdir
    mesh: Mesh
    tokenizer: Tokenizer
    corpora: dict[str, Corpus]  # train, dev
    pairs: dict[str, Pairs]  # dev, test: sentence pairs to translate
    plan: BatchPlan
    functions: StepFunctions
    checkpoints: Checkpoints
    state: TrainState
    progress: Progress


@contextmanager
def prepare(
    config: Config,
    workdir: str | Path,
    *,
    devices: Sequence[jax.Device] | None = None,
    allow_changes: bool = False,
) -> Iterator[Prepared]:
    """Prepare a run, and lock its work directory until the context exits.

    Takes the same arguments as ``train``. With several processes, all of them must call this
    together, and they get the same result.

    Raises:
      UserError: the settings, text or work directory have a problem that would stop training later.
        The config of an earlier run is not changed.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < _FEWEST_FILES:
        raise UserError(
            f"The limit on open files is {files}; expected at least {_FEWEST_FILES} "
            f"(ulimit -n {_FEWEST_FILES})."
        )
    settings = flatten(config).items()
    check_agreement({k: v for k, v in settings if not k.startswith(FREE_BETWEEN_PROCESSES)})
    mesh = make_mesh(config.mesh, devices)
    config = with_layout(config, mesh.devices.flat[0].platform)
    check_rows(mesh, config.batch.row_multiple, config.optimizer.accumulate_steps)
    place = Workdir(workdir)
    with ExitStack() as stack:
        with raise_on_any_process():
            texts, pairs = check_inputs(config)
        claim = open_run_dir(place, config, allow_changes=allow_changes)
        newest = broadcast_from_first(lambda: stack.enter_context(claim))
        place.check_shared_folder()
        with raise_on_any_process():
            start = None if newest is not None else _start_model(config)
        tokenizer, corpora = first_then_others(
            lambda: _tokenized(place, config, texts, newest, start)
        )
        _share_corpora(place, corpora)
        check_agreement(
            {
                "tokenizer": tokenizer.fingerprint,
                "training.start_from": start and _checksum(start[0]),
                **{f"text of data.{name}": texts[name].fingerprint for name in pairs},
            }
        )
        config = _with_vocabulary(config, tokenizer)
        plan = BatchPlan(corpora["train"], config.batch, seed=config.seed)
        functions = make_step_functions(config, mesh)
        checkpoints = Checkpoints(place, config, tokenizer)
        # If other processes are gone, a save in progress would never end.
        stack.push(lambda _, error, __: None if lost_contact(error) else checkpoints.wait())
        dev = corpora["dev"].fingerprint if "dev" in corpora else ""
        selected = f"{config.training.select_by} on {dev}"
        progress = Progress(corpora["train"].fingerprint, selected=selected)
        if newest is None:
            state = _initial_state(functions, start)
        else:
            state, progress = _resume(checkpoints, newest, functions, progress)
        if is_first():  # last, so an error leaves the config unchanged
            write_atomically(place.folder / "config.json", to_json(config))
        yield Prepared(
            config=config,
            workdir=place,
            mesh=mesh,
            tokenizer=tokenizer,
            corpora=corpora,
            pairs=pairs,
            plan=plan,
            functions=functions,
            checkpoints=checkpoints,
            state=state,
            progress=progress,
        )
        checkpoints.wait()
        if is_first():  # push summary.json
            retry(place.store, place.push_files)
            place.push_checkpoints()


def _tokenized(
    place: Workdir,
    config: Config,
    texts: dict[str, ParallelText],
    newest: int | None,
    start: Start | None,
) -> tuple[Tokenizer, dict[str, Corpus]]:
    """Load or build the tokenizer and, in process 0, the train and dev corpora."""
    if not is_first():
        place.pull()
        return Tokenizer.load(place.folder), {}
    tokenizer = prepare_tokenizer(place, config, texts["train"], newest, start)
    tokenizer.target.require_ids(config.decoding.suppress, "decoding.suppress")  # fail early
    corpora = {
        name: build_corpus(
            text,
            tokenizer,
            config.data,
            place.folder / "corpus",
            sampling=config.tokenizer.sampling if name == "train" else 0.0,
            num_samples=config.tokenizer.sampled_epochs,
            seed=config.seed,
        )
        for name, text in texts.items()
        if name != "test"
    }
    place.push_files()
    return tokenizer, corpora


def _share_corpora(place: Workdir, corpora: dict[str, Corpus]) -> None:
    """Make the corpora of process 0 available to every process.

    If the work directory is a URL, other hosts copy the corpora through it.
    """
    found: dict[str, str] = broadcast_from_first(
        lambda: {k: c.fingerprint for k, c in corpora.items()}
    )
    here, there = place.folder / "corpus", place.store / "corpus"

    def missing() -> list[str]:
        for name, fingerprint in found.items():
            if name not in corpora and (corpus := open_corpus(here, fingerprint)):
                corpora[name] = corpus
        return [fingerprint for name, fingerprint in found.items() if name not in corpora]

    wanted = {folder for folders in allgather(missing()) for folder in folders}

    def copy() -> None:
        source, target = (here, there) if is_first() else (there, here)
        for folder in wanted:
            copy_folder(source / folder, target / folder)

    first_then_others(copy)
    with raise_on_any_process():
        if missing():
            raise UserError(
                f"The corpus copied to {str(here)!r} is corrupt. Run the same command again to "
                "copy it again."
            )


def check_inputs(config: Config) -> tuple[dict[str, ParallelText], dict[str, Pairs]]:
    """Open the texts, and load the dev and test pairs that training will translate.

    Missing or invalid input is reported here, before the hours that preparing the training text can
    take.
    """
    data, training = config.data, config.training
    if not data.train.is_given:
        raise UserError(
            "No training data is given; set data.train.source and data.train.target (text "
            "files), choose another data.train.kind, or pass a --config."
        )
    names = ("train", "dev", "test") if is_first() else ("dev", "test")
    given = [name for name in names if getattr(data, name).is_given]
    texts = {name: ParallelText(getattr(data, name), data.root) for name in given}
    check_bleu(training.bleu_tokenize)
    pairs = {}
    for name in [name for name in given if name != "train"]:
        pairs[name] = list(texts[name].pairs())
        if not pairs[name]:
            raise UserError(
                f"data.{name} has no pairs. Check its files, or set data.{name}.kind to none."
            )
    if "dev" in pairs:
        pairs["dev"] = pairs["dev"][: training.bleu_sentences]
    return texts, pairs


def prepare_tokenizer(
    place: Workdir, config: Config, text: ParallelText, newest: int | None, start: Start | None
) -> Tokenizer:
    """Load the newest checkpoint's tokenizer, or create one if no checkpoint exists.

    A new tokenizer comes from the model to start from, or is trained on the text.
    """
    if newest is not None:
        return load_tokenizer(place.folder, place.checkpoints / checkpoint_name(newest))
    if start:
        symbols = config.tokenizer.user_defined_symbols
        tokenizer = start[1].with_symbols(symbols)
    else:
        log.info("Preparing the tokenizer.")
        tokenizer = Tokenizer.train(text.pairs(), config.tokenizer)
    tokenizer.save(place.folder)
    return tokenizer


def with_layout(config: Config, platform: str) -> Config:
    """Resolve ``batch.layout`` for a run's devices. Batches then depend only on the config."""
    if config.batch.layout != "auto":
        return config
    batch = dataclasses.replace(config.batch, layout="packed" if platform == "tpu" else "bucketed")
    return dataclasses.replace(config, batch=batch)


def _with_vocabulary(config: Config, tokenizer: Tokenizer) -> Config:
    model = dataclasses.replace(
        config.model,
        vocab_size=tokenizer.target.vocab_size,
        source_vocab_size=None if tokenizer.joint else tokenizer.source.vocab_size,
    )
    return dataclasses.replace(config, model=model)


def _resume(
    checkpoints: Checkpoints, step: int, functions: StepFunctions, new: Progress
) -> tuple[TrainState, Progress]:
    """Restore state and progress from a checkpoint.

    ``new`` holds the corpus and the selection criterion of the resuming run.
    """
    state, progress = checkpoints.restore(step, functions.abstract_state)
    if progress.corpus != new.corpus:
        raise UserError(
            f"The training text differs from the text that {str(checkpoints.folder.parent)!r} was "
            f"trained on up to step {step}; expected the same files (data.train, data.root). To "
            "continue training its model on this text, start a run in another --workdir with "
            "--training.start-from."
        )
    progress.forget_other_best(new.selected)
    return state, progress


def _initial_state(functions: StepFunctions, start: Start | None) -> TrainState:
    """Create the initial state from random parameters or another model's."""
    state = functions.init()
    if start is None:
        return state
    abstract: Parameters = functions.abstract_state.parameters
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    parameters = to_global_arrays(jax.tree.map(_grown, start[0], abstract), shardings)
    ema = None if state.ema is None else jax.tree.map(lambda x: x.copy(), parameters)
    return state.replace(parameters=parameters, ema=ema)  # type: ignore[attr-defined]


def _start_model(config: Config) -> Start | None:
    """Load the model of ``training.start_from``, as ``load_model`` does.

    Raises ``UserError`` if its model settings differ from ``config.model``.
    """
    name = config.training.start_from
    if not name:
        return None
    log.info("Starting from the parameters of %s.", name)
    theirs, *start = load_parameters(name)
    ours = dataclasses.replace(theirs, model=config.model)
    if fixed := [each for each in differences_on_resume(theirs, ours) if not each.changeable]:
        raise UserError(
            f"training.start_from is {name!r}, but its model settings differ from this run's. "
            f"Use --config {name}. {fields_that_differ(fixed)}"
        )
    return start[0], start[1]


def _checksum(parameters: Any) -> int:
    """Return one number that differs for other parameters."""
    return functools.reduce(lambda crc, leaf: zlib.crc32(leaf, crc), jax.tree.leaves(parameters), 0)


def _grown(values_VD: np.ndarray, abstract: jax.ShapeDtypeStruct) -> np.ndarray:
    """Append a row with the mean of all rows for each token added to the vocabulary."""
    missing = np.subtract(abstract.shape, values_VD.shape)
    return np.pad(values_VD, [(0, count) for count in missing], mode="mean")
