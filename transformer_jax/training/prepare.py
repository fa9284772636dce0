"""Preparation of a run: work directory, tokenizer, corpora, and restored or initial state.

It has three phases: process 0 opens the work directory; process 0 builds the tokenizer and the
corpora; all processes open them and create or restore the state.
"""

from __future__ import annotations

import dataclasses
import logging
import resource
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from transformer_jax.data.batching import BatchPlan
from transformer_jax.data.corpus import Corpus, build_corpus
from transformer_jax.data.loader import to_global_arrays
from transformer_jax.data.mixing import Mix
from transformer_jax.data.sources import ParallelText, TextPair, first_pairs, read_pairs
from transformer_jax.devices.distributed import (
    broadcast_from_first,
    check_agreement,
    is_first,
    lost_contact,
    raise_on_any_process,
)
from transformer_jax.devices.sharding import check_rows, make_mesh, map_named
from transformer_jax.errors import UserError, short_repr
from transformer_jax.evaluation import bleu_metric
from transformer_jax.model.matmul import compute_dtype
from transformer_jax.model.transformer import abstract_model
from transformer_jax.pretrained.loading import load_saved_model
from transformer_jax.runs.checkpoints import Checkpoints
from transformer_jax.runs.manifest import Manifest
from transformer_jax.runs.model_folder import SavedModel
from transformer_jax.runs.progress import Progress
from transformer_jax.runs.remote_workdir import open_workdir
from transformer_jax.runs.workdir import Workdir
from transformer_jax.settings.changes import (
    differences_in_fine_tuning,
    fields_that_differ,
    settings_of_all_processes,
)
from transformer_jax.settings.config import Config, DataConfig, PairsConfig
from transformer_jax.tokenization.languages import format_languages
from transformer_jax.tokenization.subword_sampling import subword_sampling
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.training.optimizer import VOCABULARY_MATRIX, check_frozen
from transformer_jax.training.step import (
    Parameters,
    StepFunctions,
    TrainState,
    make_step_functions,
)

logger = logging.getLogger(__name__)

Pairs = list[TextPair]

# With less, Orbax, JAX and SentencePiece fail with unclear errors, or abort.
_RESOURCE_LIMITS = (
    (resource.RLIMIT_NOFILE, 1, 256, "open files", "ulimit -n 256"),
    (resource.RLIMIT_AS, 1024, 4_000_000, "address space (KiB)", "ulimit -v unlimited"),
)


@dataclass
class PreparedRun:
    """Run that is ready for its next step."""

    workdir: Workdir
    mesh: Mesh
    corpora: dict[str, Corpus]  # train, dev
    pairs: dict[str, Pairs]  # dev, test: sentence pairs to translate
    plan: BatchPlan
    functions: StepFunctions
    state: TrainState
    progress: Progress

    @property
    def config(self) -> Config:
        """The settings, with the tokenizer's vocabulary sizes."""
        return self.workdir.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer."""
        return self.workdir.tokenizer

    @property
    def checkpoints(self) -> Checkpoints:
        """The run's checkpoints."""
        return self.workdir.checkpoints


@contextmanager
def prepare(
    config: Config,
    path: str | Path,
    *,
    devices: Sequence[jax.Device] | None = None,
    allow_changes: bool = False,
) -> Iterator[PreparedRun]:
    """Prepare a run, and lock its work directory, at ``path``, until the context exits.

    Takes the same arguments as ``train``. With several processes, all of them must call this
    together, and they get the same result.

    Raises:
      UserError: the settings, text or work directory have a problem that would stop training later.
        The config of an earlier run is not changed.
    """
    with raise_on_any_process():
        _check_limits()
        if config.training.freeze:
            check_frozen(
                config.training.freeze,
                abstract_model(config.model).parameters,
                new_rows=bool(config.tokenizer.new_languages),
            )
        mesh = make_mesh(config.mesh, devices)
        check_rows(mesh, config.batch.row_multiple, config.optimizer.accumulate_steps)
        config.check(config.training_rules())
        config = config.with_layout(mesh.devices.flat[0].platform)
        bleu_metric(config.training.bleu_tokenize)  # fails early
        texts, pairs = check_inputs(config.data, config.training.bleu_sentences)
        workdir = open_workdir(path)
    check_agreement(
        settings_of_all_processes(config)
        | {f"text of data.{name}": texts[name].fingerprint for name in pairs}
    )
    with ExitStack() as stack:

        def open_in_first_process() -> tuple[int | None, str]:
            newest = stack.enter_context(workdir.open(config, allow_changes=allow_changes))
            return newest, workdir.claim_id

        newest, claim_id = broadcast_from_first(open_in_first_process)
        start_model = None
        with raise_on_any_process():
            workdir.join(claim_id, newest)
            if newest is None and config.training.start_from:
                start_model = _load_start_model(config)
        fingerprints = broadcast_from_first(
            lambda: build_files(workdir, config, texts, start_model)
        )
        run = open_run(workdir, config, mesh, pairs, fingerprints, start_model)
        start_model = None  # frees memory
        # If other processes are gone, a save in progress would never end.
        stack.push(lambda _, error, __: None if lost_contact(error) else run.checkpoints.wait())
        yield run
        if is_first():
            workdir.finish()


def _check_limits() -> None:
    for limit, unit, minimum, name, command in _RESOURCE_LIMITS:
        available, _ = resource.getrlimit(limit)
        if available != resource.RLIM_INFINITY and available < minimum * unit:
            raise UserError(
                f"The limit on {name} is {available // unit}; expected at least {minimum} "
                f"({command})."
            )


def build_files(
    workdir: Workdir,
    config: Config,
    texts: dict[str, ParallelText],
    start_model: SavedModel | None,
) -> dict[str, str]:
    """Build the tokenizer and the train and dev corpora, in process 0.

    Returns the corpora's fingerprints. A new run's tokenizer is that of ``start_model``,
    or is trained on the text.
    """
    if workdir.resume_from is not None:
        tokenizer = workdir.read_tokenizer()
    else:
        tokenizer = _new_tokenizer(config, texts["train"], start_model)
        workdir.write_tokenizer(tokenizer)
    tokenizer.target.suppressed_ids(config.decoding.suppress)  # fail early
    _check_languages(tokenizer, texts)
    fingerprints = {}
    for name, text in texts.items():
        if name == "test":
            continue
        corpus = build_corpus(
            text,
            tokenizer,
            config.data,
            workdir.path("corpus"),
            sampling=subword_sampling(config.tokenizer) if name == "train" else None,
            seed=config.seed,
            run_id=workdir.claim_id,
        )
        fingerprints[name] = corpus.fingerprint
    workdir.publish(list(fingerprints.values()))
    return fingerprints


def _new_tokenizer(config: Config, text: ParallelText, start_model: SavedModel | None) -> Tokenizer:
    settings = config.tokenizer
    if start_model:
        tokenizer = start_model.tokenizer.with_symbols(settings.user_defined_symbols)
        tokenizer = tokenizer.with_new_languages(_new_languages(config, start_model))
    else:
        logger.info("Preparing the tokenizer.")
        tokenizer = Tokenizer.train(text.pairs(), settings)
        _check_decoder_start(config.model.decoder_start_id, tokenizer)
    return tokenizer.with_languages(settings.source_language, settings.target_language)


def _new_languages(config: Config, start_model: SavedModel) -> list[str]:
    """Return the languages that the model of ``training.start_from`` does not have. A recipe based
    on its config has those that it added itself.
    """
    added_before = start_model.config.tokenizer.new_languages
    return [entry for entry in config.tokenizer.new_languages if entry not in added_before]


def _check_languages(tokenizer: Tokenizer, texts: dict[str, ParallelText]) -> None:
    """Raise ``UserError`` for a language that the model does not have. Language fields of the train
    and dev sets are checked when their corpus is built.
    """
    for name, text in texts.items():
        data = text.config
        for languages in data.language_pairs:
            if not (data.source_language_field or data.target_language_field):
                tokenizer.affixes(*languages, f"data.{name}: ")
    if "test" in texts:
        for _ in texts["test"].text_pairs(tokenizer.languages):
            pass


def open_run(
    workdir: Workdir,
    config: Config,
    mesh: Mesh,
    pairs: dict[str, Pairs],
    fingerprints: dict[str, str],
    start_model: SavedModel | None,
) -> PreparedRun:
    """Open the tokenizer and corpora, and create or restore the state, in all processes."""
    with raise_on_any_process():
        workdir.receive()
        workdir.tokenizer = workdir.read_tokenizer()
        workdir.config = config = _with_model_of_run(config, workdir)
        corpora = {name: workdir.open_corpus(corpus) for name, corpus in fingerprints.items()}
        train = corpora["train"]
        mix = Mix(train, config.data.train) if len(train.sizes) > 1 else train
        plan = BatchPlan(mix, config.batch, seed=config.seed, pad_id=config.model.pad_id)
        _warn_without_effect(config, has_word_alignments=plan.aligned)
    check_agreement(
        {
            "tokenizer": workdir.tokenizer.fingerprint,
            "training.start_from": start_model.manifest.content["checksum"]
            if start_model
            else None,
            "model.dtype": config.model.dtype,
        }
    )
    with raise_on_any_process():
        new_rows = workdir.tokenizer.new_rows(config.tokenizer.new_languages)
        functions = make_step_functions(config, mesh, new_rows)
        criterion = f"{config.training.select_by} on {fingerprints.get('dev', '')}"
        progress = Progress(fingerprints["train"], selected=criterion)
        if workdir.resume_from is None:
            if start_model:
                entries = _new_languages(config, start_model)
                new_rows = workdir.tokenizer.new_rows(entries)
            state = _initial_state(functions, start_model, new_rows)
        else:
            state, progress = _resume(workdir, workdir.resume_from, functions, progress)
        if is_first():  # last, so an error leaves the config unchanged
            workdir.write_config(config)
    return PreparedRun(workdir, mesh, corpora, pairs, plan, functions, state, progress)


def _with_model_of_run(config: Config, workdir: Workdir) -> Config:
    """Set the fields of ``model`` that the tokenizer, the device or the first part of the run
    determines.
    """
    model = config.model
    tokenizer = workdir.tokenizer
    if workdir.resume_from is not None and model.dtype == "auto":
        model = dataclasses.replace(model, dtype=workdir.resume_from.config.model.dtype)
    model = dataclasses.replace(
        model,
        vocab_size=tokenizer.target.vocab_size,
        source_vocab_size=None if tokenizer.joint else tokenizer.source.vocab_size,
        pad_id=tokenizer.target.pad_id,
        eos_id=tokenizer.target.eos_id,
        dtype=str(compute_dtype(model)),  # type: ignore[arg-type]
    )
    return dataclasses.replace(config, model=model)


def _warn_without_effect(config: Config, *, has_word_alignments: bool) -> None:
    model = config.model
    training = config.training
    has_dropout = model.dropout or model.attention_dropout or model.feed_forward_dropout
    for name, is_idle, reason in (
        (
            "data.train.alignments",
            has_word_alignments and not training.guided_alignment,
            "training.guided_alignment is 0",
        ),
        ("training.patience", training.patience and not config.data.dev.is_given, "no data.dev"),
        ("training.r_drop", training.r_drop and not has_dropout, "all dropout rates are 0"),
    ):
        if is_idle:
            logger.warning("%s has no effect: %s.", name, reason)


def check_inputs(
    data: DataConfig, bleu_sentences: int
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
    texts = {}
    for name in names:
        pairs_config = getattr(data, name)
        if pairs_config.is_given:
            texts[name] = ParallelText(pairs_config, data.root)
    for name, text in texts.items():
        for item in text.config.items:
            if not any(islice(read_pairs(item, data.root), 1)):
                raise UserError(
                    f"data.{name} has no pairs in {short_repr(item.source)}. Check the "
                    f"files, or choose another data.{name}.kind."
                )
    pairs = {name: list(text.text_pairs()) for name, text in texts.items() if name != "train"}
    if "dev" in pairs:
        _check_dev_languages(data.train, {pair.languages for pair in pairs["dev"]})
        pairs["dev"] = first_pairs(pairs["dev"], bleu_sentences)
    return texts, pairs


def _check_dev_languages(train: PairsConfig, dev_languages: set[tuple[str, str]]) -> None:
    """Raise ``UserError`` if a pair of languages of the training set has no dev pairs."""
    if not (train.source_languages or train.target_languages):
        return
    for languages in train.language_pairs:
        if languages not in dev_languages:
            raise UserError(
                f"data.dev has no pairs with the languages {format_languages(languages)}, but "
                "data.train has; expected dev pairs for all of them, for loss and BLEU of each. "
                "Add some to data.dev and data.dev.source_languages and target_languages, such as "
                "lines taken out of the training set."
            )


def _resume(
    workdir: Workdir, checkpoint: Manifest, functions: StepFunctions, new_progress: Progress
) -> tuple[TrainState, Progress]:
    """Restore state and progress from a checkpoint.

    ``new_progress`` holds the corpus and the selection criterion of the resuming run.
    """
    state, progress = workdir.checkpoints.restore(checkpoint, functions.abstract_state)
    if progress.corpus != new_progress.corpus:
        raise UserError(
            f"The training text differs from the text that {str(workdir)!r} was "
            f"trained on up to step {checkpoint.steps[0]}; expected the same files (data.train, "
            "data.root), and a mix (weights or temperature) only if it was one. To continue "
            "training its model on this text, start a run in another --workdir with "
            "--training.start-from."
        )
    progress.reset_best_if_criterion_changed(new_progress.selected)
    return state, progress


def _initial_state(
    functions: StepFunctions, start_model: SavedModel | None, new_rows: dict[int, list[int]]
) -> TrainState:
    """Create the initial state from random parameters or another model's. Each of ``new_rows`` is
    the mean of other rows.
    """
    if start_model is None:
        return functions.init()
    abstract: Parameters = functions.abstract_state.parameters
    parameters = jax.tree.map(_with_added_rows, start_model.parameters, abstract)
    for number, start in new_rows.items():
        parameters = map_named(partial(_with_row, number, start), parameters)
    return functions.init(to_global_arrays(parameters, abstract))


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


def _load_start_model(config: Config) -> SavedModel:
    """Load the model of ``training.start_from``.

    Raises ``UserError`` if its model or tokenizer settings differ from ``config``.
    """
    name = config.training.start_from
    logger.info("Starting from the parameters of %s.", name)
    start_model = load_saved_model(name)
    if differences := differences_in_fine_tuning(start_model.config, config):
        raise UserError(
            f"training.start_from is {name!r}, but its model or tokenizer settings differ from "
            f"this run's. Use --config {name}. {fields_that_differ(differences)}"
        )
    return start_model


def _with_added_rows(values_VD: np.ndarray, abstract: jax.ShapeDtypeStruct) -> np.ndarray:
    """Append a row with the mean of all rows for each token added to the vocabulary."""
    missing = np.subtract(abstract.shape, values_VD.shape)
    return np.pad(values_VD, [(0, count) for count in missing], mode="mean")


def _with_row(number: int, start: Sequence[int], name: str, values: np.ndarray) -> np.ndarray:
    """Set one row of a vocabulary's matrix, or one softmax bias, to the mean of rows of others."""
    if start and (VOCABULARY_MATRIX.search(name) or name == "softmax_bias"):
        values[number] = values[list(start)].mean(0, dtype=np.float64)
    return values
