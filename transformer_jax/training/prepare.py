"""Everything before the first step: ``prepare`` claims the work directory, makes the tokenizer and
the corpora, and restores or starts the run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from transformer_jax.checkpoint import (
    choose_checkpoints,
    complete_steps,
    config_of,
    load_parameters,
)
from transformer_jax.config import Config
from transformer_jax.config_io import flatten
from transformer_jax.data.batching import BatchPlan
from transformer_jax.data.bucketing import default_buckets
from transformer_jax.data.corpus import Corpus, corpus_folder, prepare_corpus
from transformer_jax.data.loader import place
from transformer_jax.data.sources import ParallelText
from transformer_jax.decoding.checks import check_decoding
from transformer_jax.distributed import (
    check_agreement,
    from_first,
    is_first,
    together,
)
from transformer_jax.errors import UserError
from transformer_jax.evaluation import check_bleu
from transformer_jax.model.layers import use_matmul_precision
from transformer_jax.remote_workdir import RemoteWorkdir, local_workdir
from transformer_jax.sharding import check_rows, make_mesh
from transformer_jax.storage import is_url, local_path
from transformer_jax.tokenizer import Tokenizer
from transformer_jax.training.progress import Progress, selection
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
from transformer_jax.training.workdir import claimed, held, remove_tokenizer, write_config

log = logging.getLogger(__name__)

Pairs = list[tuple[str, str]]


@dataclass
class Prepared:
    """A run that is ready for its next step."""

    began: float  # time.monotonic() when preparing began
    config: Config  # with the tokenizer's vocabulary sizes
    workdir: Path  # on this machine
    location: str  # the URL that the folder mirrors, or its path
    mesh: Mesh
    tokenizer: Tokenizer
    train_corpus: Corpus
    plan: BatchPlan
    dev_corpus: Corpus | None
    dev_pairs: Pairs  # lines that are translated; empty if there are none
    test_pairs: Pairs
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
    """Prepare a run, and hold its work directory while the context lasts. Arguments as in
    ``train``.

    With several processes, all call this at the same time and get the same.

    Raises:
      UserError: anything about settings, text or work directory that would fail later on. What is
        refused leaves the config of an earlier run as it was.
    """
    began = time.monotonic()
    settings = flatten(config).items()
    check_agreement({k: v for k, v in settings if not k.startswith(FREE_BETWEEN_PROCESSES)})
    use_matmul_precision(config.model)
    mesh = make_mesh(config.mesh, devices)
    check_rows(mesh, config.batch.row_multiple, config.optimizer.accumulate_steps)
    with together():
        texts, dev_pairs, test_pairs = check_inputs(config)
    folder, remote = _local_folder(workdir)
    config = _with_buckets(config, folder, platform=mesh.devices.flat[0].platform)
    with ExitStack() as stack:
        with together():  # process 0 holds the folder and builds for all
            if is_first():
                stack.enter_context(claimed(folder, config, allow_changes=allow_changes))
                text = prepare_text(folder, config, texts)
        with together():
            tokenizer, corpora = text if is_first() else prepare_text(folder, config, texts)
        config = _with_vocabulary(config, tokenizer)
        check_agreement(
            {"tokenizer": tokenizer.fingerprint, "text of data.dev": _hash(dev_pairs)}
            | {"text of data.test": _hash(test_pairs)}
            | {f"corpus of data.{name}": corpus.fingerprint for name, corpus in corpora.items()}
        )
        plan = BatchPlan(corpora["train"], config.batch, seed=config.seed)
        functions = make_step_functions(config, mesh)
        checkpoints = Checkpoints(folder, config, tokenizer, when_saved=lambda: _copy(remote))
        stack.callback(checkpoints.wait)
        state, progress = _restore_or_start(config, functions, checkpoints, corpora)
        if is_first():  # only now: whatever is refused leaves the config as it was
            write_config(folder, config)
        if remote is not None:  # a store that cannot be written is known before the first step
            remote.push()
        yield Prepared(
            began=began,
            config=config,
            workdir=folder,
            location=str(folder) if remote is None else remote.url,
            mesh=mesh,
            tokenizer=tokenizer,
            train_corpus=corpora["train"],
            plan=plan,
            dev_corpus=corpora.get("dev"),
            dev_pairs=dev_pairs,
            test_pairs=test_pairs,
            functions=functions,
            checkpoints=checkpoints,
            state=state,
            progress=progress,
        )
        if remote is not None:  # summary.json
            remote.push()


def prepare_text(
    folder: Path, config: Config, texts: dict[str, ParallelText]
) -> tuple[Tokenizer, dict[str, Corpus]]:
    """The tokenizer and the corpora of train and dev, built if need be."""
    tokenizer = (
        prepare_tokenizer(folder, config, texts["train"]) if is_first() else Tokenizer.load(folder)
    )
    check_decoding(config.decoding, tokenizer)
    directory = corpus_folder(folder, config)
    return tokenizer, {
        name: prepare_corpus(directory, text, tokenizer, config, name)
        for name, text in texts.items()
        if name != "test"
    }


def _local_folder(workdir: str | Path) -> tuple[Path, RemoteWorkdir | None]:
    """The folder to train in; one that mirrors a URL is brought up to date."""
    if not is_url(str(workdir)):
        return local_path(workdir).resolve(), None
    remote = RemoteWorkdir(str(workdir))
    if jax.process_count() > 1:
        raise UserError(
            f"workdir is {str(workdir)!r} and there are {jax.process_count()} processes; expected "
            "a folder that all of them share."
        )
    with held(remote.folder):
        remote.pull()
    return remote.folder, remote


def _with_buckets(config: Config, workdir: Path, *, platform: str) -> Config:
    """The config with a number of buckets: if it leaves that open, the number of the run in the
    work directory, wherever that began, so that its batches stay the same.
    """
    if config.batch.buckets is not None:
        return config

    def find() -> int:
        before = config_of(workdir).batch if (workdir / "config.json").is_file() else config.batch
        return before.buckets or default_buckets(platform)

    batch = dataclasses.replace(config.batch, buckets=from_first(find))
    return dataclasses.replace(config, batch=batch)


def check_inputs(config: Config) -> tuple[dict[str, ParallelText], Pairs, Pairs]:
    """The texts, and the lines of dev and of test that training will translate; what is missing or
    wrong is named now rather than after hours of preparing the training text.
    """
    data, training = config.data, config.training
    if not data.train.is_given:
        raise UserError(
            "There is nothing to train on; expected data.train.source and data.train.target (text "
            "files), another data.train.kind, or a --config."
        )
    given = [name for name in ("train", "dev", "test") if getattr(data, name).is_given]
    texts = {name: ParallelText(getattr(data, name), data.root) for name in given}
    check_bleu(training.bleu_tokenize, training.bleu_language)
    dev, test = (_read_all(config, texts, name) for name in ("dev", "test"))
    return texts, dev[: training.bleu_sentences] if training.bleu_every else [], test


def prepare_tokenizer(workdir: Path, config: Config, text: ParallelText) -> Tokenizer:
    """The work directory's tokenizer. If it has none yet: that of ``training.start_from``, or one
    trained on the text.

    ``tokenizer.origin`` holds the fingerprint of the text, or of the tokenizer, that it comes from:
    until the first checkpoint the text may still be corrected.
    """
    if has_tokenizer(workdir) and complete_steps(workdir / "checkpoints"):
        return Tokenizer.load(workdir)
    tokenizer = None
    if config.training.start_from:
        [newest, *_] = _start_checkpoints(config)
        symbols = config.tokenizer.user_defined_symbols
        tokenizer = Tokenizer.load(newest).with_symbols(symbols)
    elif config.tokenizer.model:
        tokenizer = Tokenizer.train([], config.tokenizer)  # needs no text
    origin, noted = text if tokenizer is None else tokenizer, workdir / "tokenizer.origin"
    if has_tokenizer(workdir):
        if not noted.is_file() or noted.read_text() == origin.fingerprint:
            return Tokenizer.load(workdir)
        remove_tokenizer(workdir)
    if tokenizer is None:
        log.info("Training the tokenizer.")
        pairs = text.pairs(invalid_utf8=config.data.invalid_utf8)
        tokenizer = Tokenizer.train(pairs, config.tokenizer)
    noted.write_text(origin.fingerprint)
    tokenizer.save(workdir)
    return tokenizer


def has_tokenizer(workdir: Path) -> bool:
    """Whether a complete tokenizer is there: of two files the target's is written last."""
    return (workdir / "tokenizer.model").exists() or (workdir / "tokenizer.target.model").exists()


def _with_vocabulary(config: Config, tokenizer: Tokenizer) -> Config:
    model = dataclasses.replace(
        config.model,
        vocab_size=tokenizer.target_vocab_size,
        source_vocab_size=None if tokenizer.joint else tokenizer.source_vocab_size,
    )
    return dataclasses.replace(config, model=model)


def _restore_or_start(
    config: Config,
    functions: StepFunctions,
    checkpoints: Checkpoints,
    corpora: dict[str, Corpus],
) -> tuple[TrainState, Progress]:
    """The newest checkpoint's state and progress, or those before the first step."""
    corpus, selected = corpora["train"].fingerprint, selection(config, corpora.get("dev"))
    restored = checkpoints.restore_latest(functions.abstract_state)
    if restored is None:
        state = _initial_state(config, functions, checkpoints)
        return state, Progress(corpus=corpus, selected=selected)
    state, progress = restored
    step = int(state.step)
    if progress.corpus != corpus:
        raise UserError(
            f"The training text is not the one that {str(checkpoints.folder.parent)!r} was trained "
            f"on up to step {step}; expected the same files (data.train, data.root). To train its "
            "model further on this text, start a run in another --workdir with "
            "--training.start-from."
        )
    if step > config.training.steps:
        log.warning(
            "training.steps is %d, but the run has done %d already: nothing is left to train. "
            "Expected more than %d.",
            *(config.training.steps, step, step),
        )
    progress.forget_other_best(selected)
    return state, progress


def _initial_state(
    config: Config, functions: StepFunctions, checkpoints: Checkpoints
) -> TrainState:
    """Random parameters, those of ``training.start_from``, or imported ones."""
    abstract: Parameters = functions.abstract_state.parameters
    state = functions.init()
    if config.training.start_from:
        source = local_workdir(config.training.start_from)
        names = from_first(lambda: [str(p.relative_to(source)) for p in _start_checkpoints(config)])
        values = load_parameters([source / name for name in names])
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        parameters = place(jax.tree.map(_grown, values, abstract), shardings)
        log.info("Starting from the parameters of %s.", config.training.start_from)
    elif (parameters := checkpoints.imported_parameters(abstract)) is not None:
        log.info("Starting from the imported parameters in %s.", checkpoints.folder)
    else:
        return state
    ema = None if state.ema is None else jax.tree.map(lambda x: x.copy(), parameters)
    return state.replace(parameters=parameters, ema=ema)  # type: ignore[attr-defined]


def _start_checkpoints(config: Config) -> list[Path]:
    """The checkpoints whose mean ``training.start_from`` names, as ``load_model`` takes it.

    Raises ``UserError`` if there are none, or if their model has another shape than
    ``config.model``.
    """
    name = config.training.start_from
    try:
        chosen = choose_checkpoints(local_workdir(name))
    except UserError as error:
        raise UserError(f"training.start_from is {name!r}: {error}") from None
    theirs = config_of(chosen[0])
    ours = dataclasses.replace(theirs, model=config.model)
    if fixed := [each for each in differences_on_resume(theirs, ours) if not each.changeable]:
        raise UserError(
            f"training.start_from is {name!r}, whose model has other settings than this run's; "
            f"expected the same, which --config {name}/config.json gives. "
            + fields_that_differ(fixed, where=f"in {name}")
        )
    return chosen


def _grown(values_VD: np.ndarray, abstract: jax.ShapeDtypeStruct) -> np.ndarray:
    """A parameter, with the mean of its rows for each token that the vocabulary has gained."""
    missing = np.subtract(abstract.shape, values_VD.shape)
    return np.pad(values_VD, [(0, count) for count in missing], mode="mean")


def _copy(remote: RemoteWorkdir | None) -> None:
    """Copy a new checkpoint to the work directory's URL; training outlasts a store that fails."""
    try:
        if remote is not None:
            remote.push()
    except UserError as error:
        log.error("%s Training continues; the next checkpoint tries again.", error)


def _read_all(config: Config, texts: dict[str, ParallelText], name: str) -> Pairs:
    """The text of ``config.data.<name>``; empty if there is none."""
    if name not in texts:
        return []
    found = list(texts[name].pairs(invalid_utf8=config.data.invalid_utf8))
    if not found:
        raise UserError(
            f"data.{name} has no pairs; expected at least one, or data.{name}.kind none."
        )
    return found


def _hash(text: Pairs) -> str:
    return hashlib.sha256(repr(text).encode()).hexdigest()
