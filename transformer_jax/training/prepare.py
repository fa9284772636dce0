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
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from transformer_jax.data.batching import BatchPlan
from transformer_jax.data.corpus import Corpus, build_corpus, open_corpus
from transformer_jax.data.loader import to_global_arrays
from transformer_jax.data.mixing import Mix
from transformer_jax.data.sources import ParallelText, read_pairs
from transformer_jax.devices.distributed import (
    broadcast_from_first,
    check_agreement,
    is_first,
    lost_contact,
    raise_on_any_process,
)
from transformer_jax.devices.sharding import check_rows, make_mesh
from transformer_jax.errors import UserError, short_repr
from transformer_jax.evaluation import bleu_metric
from transformer_jax.model.matmul import compute_dtype
from transformer_jax.model.transformer import abstract_model
from transformer_jax.pretrained.loading import load_parameters
from transformer_jax.runs.checkpoint import checkpoint_name, config_of, load_tokenizer
from transformer_jax.settings.changes import (
    differences_in_fine_tuning,
    fields_that_differ,
    settings_of_all_processes,
)
from transformer_jax.settings.config import Config, DataConfig, ModelConfig, TrainingConfig
from transformer_jax.settings.config_files import to_json
from transformer_jax.storage.files import copy_folder, retry, write_atomically
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.training.optimizer import check_frozen
from transformer_jax.training.progress import Progress
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

# With less, Orbax, JAX and SentencePiece fail with unclear errors, or abort.
_LIMITS = (
    (resource.RLIMIT_NOFILE, 1, 256, "open files", "ulimit -n 256"),
    (resource.RLIMIT_AS, 1024, 4_000_000, "address space (KiB)", "ulimit -v unlimited"),
)


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
    with raise_on_any_process():
        _check_limits()
        config.check(config.training_rules())
        mesh = make_mesh(config.mesh, devices)
        config = with_layout(config, mesh.devices.flat[0].platform)
        check_rows(mesh, config.batch.row_multiple, config.optimizer.accumulate_steps)
        if config.training.freeze:
            check_frozen(config.training.freeze, abstract_model(config.model).parameters)
        texts, pairs = check_inputs(config.data, config.training)
        run_dir = Workdir(workdir)
    check_agreement(
        settings_of_all_processes(config)
        | {f"text of data.{name}": texts[name].fingerprint for name in pairs}
    )
    with ExitStack() as stack:
        opened = open_run_dir(run_dir, config, allow_changes=allow_changes)
        newest, run_dir.token = broadcast_from_first(
            lambda: (stack.enter_context(opened), run_dir.token)
        )
        with raise_on_any_process():
            run_dir.wait_for_token()
            start = None
            if newest is None and config.training.start_from:
                start = _start_model(config.training.start_from, config)
        built = broadcast_from_first(lambda: build_files(run_dir, config, texts, newest, start))
        run = open_run(run_dir, config, mesh, pairs, built, newest, start)
        start = None  # frees memory
        # If other processes are gone, a save in progress would never end.
        stack.push(lambda _, error, __: None if lost_contact(error) else run.checkpoints.wait())
        yield run
        if is_first():  # push summary.json
            retry(run_dir.store, run_dir.push_files)
            run_dir.push_checkpoints()


def _check_limits() -> None:
    for limit, unit, least, name, command in _LIMITS:
        found, _ = resource.getrlimit(limit)
        if found != resource.RLIM_INFINITY and found < least * unit:
            raise UserError(
                f"The limit on {name} is {found // unit}; expected at least {least} ({command})."
            )


def build_files(
    run_dir: Workdir,
    config: Config,
    texts: dict[str, ParallelText],
    newest: int | None,
    start: Start | None,
) -> dict[str, str]:
    """Build the tokenizer and the train and dev corpora, in process 0.

    Returns the corpora's fingerprints. On resume, the tokenizer is that of checkpoint ``newest``.
    A new tokenizer comes from the model to ``start`` from, or is trained on the text.
    """
    if newest is not None:
        checkpoint = run_dir.checkpoints / checkpoint_name(newest)
        tokenizer = load_tokenizer(run_dir.folder, checkpoint)
    else:
        its = config.tokenizer
        if start:
            tokenizer = start[1].with_symbols(its.user_defined_symbols)
        else:
            log.info("Preparing the tokenizer.")
            tokenizer = Tokenizer.train(texts["train"].pairs(), its)
            _check_decoder_start(config.model.decoder_start_id, tokenizer)
        tokenizer = tokenizer.with_languages(its.source_language, its.target_language)
        tokenizer.save(run_dir.folder)
    tokenizer.target.suppressed_ids(config.decoding.suppress)  # fail early
    built = {}
    for name in [name for name in texts if name != "test"]:
        built[name] = build_corpus(
            texts[name],
            tokenizer,
            config.data,
            run_dir.folder / "corpus",
            bpe_dropout=config.tokenizer.bpe_dropout if name == "train" else 0.0,
            num_samples=config.tokenizer.bpe_dropout_samples,
            seed=config.seed,
            token=run_dir.token,
        ).fingerprint
        run_dir.push_corpus(built[name])
    run_dir.push_files()
    return built


def open_run(
    run_dir: Workdir,
    config: Config,
    mesh: Mesh,
    pairs: dict[str, Pairs],
    built: dict[str, str],
    newest: int | None,
    start: Start | None,
) -> Prepared:
    """Open the tokenizer and corpora, and create or restore the state, in all processes."""
    with raise_on_any_process():
        if not is_first():
            run_dir.pull()
        tokenizer = Tokenizer.load(run_dir.folder)
        corpora = {name: _open_corpus(run_dir, each) for name, each in built.items()}
        model = dataclasses.replace(
            config.model,
            vocab_size=tokenizer.target.vocab_size,
            source_vocab_size=None if tokenizer.joint else tokenizer.source.vocab_size,
            pad_id=tokenizer.target.pad_id,
            eos_id=tokenizer.target.eos_id,
            dtype=_dtype(run_dir, config.model, newest),
        )
        config = dataclasses.replace(config, model=model)
        mix = Mix(train, config.data.train) if len((train := corpora["train"]).sizes) > 1 else train
        plan = BatchPlan(mix, config.batch, seed=config.seed, pad_id=model.pad_id)
        _warn_without_effect(config, aligned=plan.aligned)
    leaves = jax.tree.leaves(start and start[0])
    checksum = functools.reduce(lambda crc, leaf: zlib.crc32(leaf, crc), leaves, 0)
    check_agreement(
        {
            "tokenizer": tokenizer.fingerprint,
            "training.start_from": checksum,
            "model.dtype": model.dtype,
        }
    )
    with raise_on_any_process():
        functions = make_step_functions(config, mesh)
        checkpoints = Checkpoints(run_dir, config, tokenizer)
        selected = f"{config.training.select_by} on {built.get('dev', '')}"
        progress = Progress(built["train"], selected=selected)
        if newest is None:
            state = _initial_state(functions, start)
        else:
            state, progress = _resume(checkpoints, newest, functions, progress)
        if is_first():  # last, so an error leaves the config unchanged
            write_atomically(run_dir.folder / "config.json", to_json(config))
    return Prepared(
        config,
        run_dir,
        mesh,
        tokenizer,
        corpora,
        pairs,
        plan,
        functions,
        checkpoints,
        state,
        progress,
    )


def _warn_without_effect(config: Config, *, aligned: bool) -> None:
    model, training = config.model, config.training
    has_dropout = model.dropout or model.attention_dropout or model.feed_forward_dropout
    for name, is_idle, reason in (
        (
            "data.train.alignments",
            aligned and not training.guided_alignment,
            "training.guided_alignment is 0",
        ),
        ("training.patience", training.patience and not config.data.dev.is_given, "no data.dev"),
        ("training.r_drop", training.r_drop and not has_dropout, "all dropout rates are 0"),
    ):
        if is_idle:
            log.warning("%s has no effect: %s.", name, reason)


def _dtype(run_dir: Workdir, model: ModelConfig, newest: int | None) -> Any:
    """Resolve ``model.dtype``. A resumed run keeps the data type of its first part."""
    if newest is not None and model.dtype == "auto":
        model = config_of(run_dir.checkpoints / checkpoint_name(newest)).model
    return str(compute_dtype(model))


def _open_corpus(run_dir: Workdir, fingerprint: str) -> Corpus:
    """Open a corpus that process 0 built, after copying it from the URL if it is not here."""
    here, there = run_dir.folder / "corpus", run_dir.store / "corpus"
    corpus = open_corpus(here, fingerprint)
    if corpus is None and here != there:
        copy_folder(there / fingerprint, here / fingerprint)
        corpus = open_corpus(here, fingerprint)
    if corpus is None:
        raise UserError(
            f"The corpus {here / fingerprint} is corrupt. Delete {there / fingerprint} and run the "
            "same command again to build it again."
        )
    return corpus


def check_inputs(
    data: DataConfig, training: TrainingConfig
) -> tuple[dict[str, ParallelText], dict[str, Pairs]]:
    """Open the texts, and load the dev and test pairs that training will translate.

    Also reads the first training pair. Missing or invalid input is reported here, before the hours
    that preparing the training text can take.
    """
    if not data.train.is_given:
        raise UserError(
            "No training data is given; set data.train.source and data.train.target (text "
            "files), choose another data.train.kind and set its source, or pass a --config."
        )
    names = ("train", "dev", "test") if is_first() else ("dev", "test")
    given = {name: getattr(data, name) for name in names}
    texts = {name: ParallelText(each, data.root) for name, each in given.items() if each.is_given}
    bleu_metric(training.bleu_tokenize)
    for name, text in texts.items():
        for item in text.config.items:
            if not any(islice(read_pairs(item, data.root), 1)):
                raise UserError(
                    f"data.{name} has no pairs in {short_repr(item.source)}. Check the "
                    f"files, or choose another data.{name}.kind."
                )
    pairs = {name: list(text.pairs()) for name, text in texts.items() if name != "train"}
    if "dev" in pairs:
        pairs["dev"] = pairs["dev"][: training.bleu_sentences]
    return texts, pairs


def with_layout(config: Config, platform: str) -> Config:
    """Resolve ``batch.layout`` for a run's devices. Batches then depend only on the config."""
    if config.batch.layout != "auto":
        return config
    batch = dataclasses.replace(config.batch, layout="packed" if platform == "tpu" else "bucketed")
    return dataclasses.replace(config, batch=batch)


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
            f"trained on up to step {step}; expected the same files (data.train, data.root), and a "
            "mix (weights or temperature) only if it was one. To continue training its model on "
            "this text, start a run in another --workdir with "
            "--training.start-from."
        )
    progress.forget_other_best(new.selected)
    return state, progress


def _initial_state(functions: StepFunctions, start: Start | None) -> TrainState:
    """Create the initial state from random parameters or another model's."""
    if start is None:
        return functions.init()
    abstract: Parameters = functions.abstract_state.parameters
    return functions.init(to_global_arrays(jax.tree.map(_grown, start[0], abstract), abstract))


def _check_decoder_start(start_id: int, tokenizer: Tokenizer) -> None:
    """Raise ``UserError`` if the decoder's first input is a token of the text, which a tokenizer
    from elsewhere (``tokenizer.model``) can have at this id.
    """
    target = tokenizer.target
    special = {target.bos_id, target.eos_id, target.pad_id} - {None}
    if start_id not in special:
        raise UserError(
            f"model.decoder_start_id is {start_id}; expected BOS, EOS or PAD of the tokenizer, one "
            f"of {sorted(map(str, special))}."
        )


def _start_model(name: str, config: Config) -> Start:
    """Load the model of ``training.start_from``, as ``load_model`` does.

    Raises ``UserError`` if its model or tokenizer settings differ from ``config``.
    """
    log.info("Starting from the parameters of %s.", name)
    model_config, parameters, tokenizer = load_parameters(name)
    if differences := differences_in_fine_tuning(model_config, config):
        raise UserError(
            f"training.start_from is {name!r}, but its model or tokenizer settings differ from "
            f"this run's. Use --config {name}. {fields_that_differ(differences)}"
        )
    return parameters, tokenizer


def _grown(values_VD: np.ndarray, abstract: jax.ShapeDtypeStruct) -> np.ndarray:
    """Append a row with the mean of all rows for each token added to the vocabulary."""
    missing = np.subtract(abstract.shape, values_VD.shape)
    return np.pad(values_VD, [(0, count) for count in missing], mode="mean")
