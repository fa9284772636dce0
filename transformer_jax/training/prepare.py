"""Everything before the first step: ``prepare`` claims the work directory, makes the tokenizer and
the corpora, and restores or starts the run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import resource
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
    config_of,
    load_parameters,
    load_tokenizer,
)
from transformer_jax.config import Config
from transformer_jax.config_io import flatten
from transformer_jax.data.batching import BatchPlan
from transformer_jax.data.corpus import (
    MANIFEST,
    Corpus,
    corpus_folder,
    corpus_name,
    open_corpus,
    prepare_corpus,
)
from transformer_jax.data.loader import place
from transformer_jax.data.sources import ParallelText
from transformer_jax.decoding.checks import check_decoding
from transformer_jax.distributed import (
    check_agreement,
    from_all,
    from_first,
    is_first,
    together,
)
from transformer_jax.errors import UserError
from transformer_jax.evaluation import check_bleu
from transformer_jax.model.layers import use_matmul_precision
from transformer_jax.remote_workdir import local_workdir
from transformer_jax.sharding import check_rows, make_mesh
from transformer_jax.storage import AnyPath, copy_folder
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
from transformer_jax.training.workdir import Workdir, claimed, write_config

log = logging.getLogger(__name__)

Pairs = list[tuple[str, str]]

_FEWEST_FILES = 256  # that a process may open: Orbax and JAX fail with less in unclear ways


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
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < _FEWEST_FILES:
        raise UserError(
            f"This process may open {files} files; expected at least {_FEWEST_FILES} "
            f"(ulimit -n {_FEWEST_FILES})."
        )
    settings = flatten(config).items()
    check_agreement({k: v for k, v in settings if not k.startswith(FREE_BETWEEN_PROCESSES)})
    use_matmul_precision(config.model)
    mesh = make_mesh(config.mesh, devices)
    check_rows(mesh, config.batch.row_multiple, config.optimizer.accumulate_steps)
    place = Workdir(workdir)
    with ExitStack() as stack:
        with together():
            texts, dev_pairs, test_pairs = check_inputs(config)
            newest = None
            if is_first():  # which holds the work directory, and builds, for all
                claim = claimed(place, config, allow_changes=allow_changes)
                newest = stack.enter_context(claim)
        place.share_token()
        corpora: dict[str, Corpus] = {}
        with together():
            if is_first():
                corpora = _build_text(place, config, texts, newest)
                place.push()
        with together():
            if not is_first():
                place.pull()
            tokenizer = Tokenizer.load(place.folder)
        _share_corpora(place, config, corpora)
        check_agreement(
            {
                "tokenizer": tokenizer.fingerprint,
                "text of data.dev": _hash(dev_pairs),
                "text of data.test": _hash(test_pairs),
            }
        )
        config = _with_vocabulary(config, tokenizer)
        plan = BatchPlan(corpora["train"], config.batch, seed=config.seed)
        functions = make_step_functions(config, mesh)
        checkpoints = Checkpoints(place, config, tokenizer)
        stack.callback(checkpoints.wait)
        state, progress = _restore_or_start(config, functions, checkpoints, corpora)
        if is_first():  # only now: whatever is refused leaves the config as it was
            write_config(place.folder, config)
            place.push()
        yield Prepared(
            began=began,
            config=config,
            workdir=place.folder,
            location=str(place.store),
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
        checkpoints.wait()
        if is_first():  # summary.json
            place.push()


def _build_text(
    place: Workdir, config: Config, texts: dict[str, ParallelText], newest: AnyPath | None
) -> dict[str, Corpus]:
    """Make the tokenizer and the corpora of train and dev, unless they are there."""
    tokenizer = prepare_tokenizer(place.folder, config, texts["train"], newest)
    check_decoding(config.decoding, tokenizer)
    directory = corpus_folder(place.folder, config)
    return {
        name: prepare_corpus(directory, texts[name], tokenizer, config, name)
        for name in ("train", "dev")
        if name in texts
    }


def _share_corpora(place: Workdir, config: Config, corpora: dict[str, Corpus]) -> None:
    """Give every process the corpora of process 0. Hosts that do not see its folder copy them by
    way of the work directory.
    """
    found: dict[str, str] = from_first(lambda: {k: c.fingerprint for k, c in corpora.items()})
    here, there = corpus_folder(place.folder, config), place.store / "corpus"

    def missing() -> list[str]:
        for name, fingerprint in found.items():
            if name not in corpora and (corpus := open_corpus(here, fingerprint)):
                corpora[name] = corpus
        return [corpus_name(each) for name, each in found.items() if name not in corpora]

    wanted = {folder for folders in from_all(missing()) for folder in folders}
    for copies, source, target in ((is_first(), here, there), (not is_first(), there, here)):
        with together():
            for folder in wanted if copies and source != target else ():
                copy_folder(source / folder, target / folder, last=MANIFEST)
    with together():
        if lacking := missing():
            raise UserError(
                f"The tokenized corpora {', '.join(lacking)} of process 0 are corrupt or missing "
                f"in {here}; expected the same data.cache in all processes, or a folder of each "
                "machine's own."
            )


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
    names = ("train", "dev", "test") if is_first() else ("dev", "test")
    given = [name for name in names if getattr(data, name).is_given]
    texts = {name: ParallelText(getattr(data, name), data.root) for name in given}
    check_bleu(training.bleu_tokenize, training.bleu_language)
    dev, test = (_read_all(config, texts, name) for name in ("dev", "test"))
    return texts, dev[: training.bleu_sentences] if training.bleu_every else [], test


def prepare_tokenizer(
    folder: Path, config: Config, text: ParallelText, newest: AnyPath | None
) -> Tokenizer:
    """The work directory's tokenizer, which its newest checkpoint was trained with. If there is no
    checkpoint: that of ``training.start_from``, or one trained on the text.

    ``tokenizer.origin`` says of which text and settings, or of which tokenizer: until the first
    checkpoint both may still be corrected.
    """
    if newest is not None:
        return load_tokenizer(folder, newest)
    tokenizer = None
    if config.training.start_from:
        [first, *_] = _start_checkpoints(config)
        symbols = config.tokenizer.user_defined_symbols
        tokenizer = load_tokenizer(first.parents[1], first).with_symbols(symbols)
    elif config.tokenizer.model:
        tokenizer = Tokenizer.train([], config.tokenizer)  # needs no text
    origin, noted = text if tokenizer is None else tokenizer, folder / "tokenizer.origin"
    if noted.is_file() and noted.read_text() == f"{origin.fingerprint} {config.tokenizer}":
        return Tokenizer.load(folder)
    noted.unlink(missing_ok=True)
    if tokenizer is None:
        log.info("Training the tokenizer.")
        pairs = text.pairs(invalid_utf8=config.data.invalid_utf8)
        tokenizer = Tokenizer.train(pairs, config.tokenizer)
    tokenizer.save(folder)
    noted.write_text(f"{origin.fingerprint} {config.tokenizer}")
    return tokenizer


def _with_vocabulary(config: Config, tokenizer: Tokenizer) -> Config:
    model = dataclasses.replace(
        config.model,
        vocab_size=tokenizer.target.vocab_size,
        source_vocab_size=None if tokenizer.joint else tokenizer.source.vocab_size,
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
        return _initial_state(config, functions), Progress(corpus=corpus, selected=selected)
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


def _initial_state(config: Config, functions: StepFunctions) -> TrainState:
    """Random parameters, or those of ``training.start_from``."""
    abstract: Parameters = functions.abstract_state.parameters
    state = functions.init()
    if not config.training.start_from:
        return state
    source = local_workdir(config.training.start_from)
    names = from_first(lambda: [path.name for path in _start_checkpoints(config)])
    folder = source.parent if source.parent.name == "checkpoints" else source / "checkpoints"
    start = [folder / name for name in names]
    log.info("Starting from the parameters of %s.", config.training.start_from)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    parameters = place(jax.tree.map(_grown, load_parameters(start), abstract), shardings)
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
