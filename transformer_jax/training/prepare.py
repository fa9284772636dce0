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
from pathlib import Path

import jax
from jax.sharding import Mesh

from transformer_jax.data.batching import BatchPlan
from transformer_jax.data.corpus import Corpus, build_corpus
from transformer_jax.data.loader import to_global_arrays
from transformer_jax.data.mixing import Mix
from transformer_jax.data.sources import ParallelText
from transformer_jax.devices.distributed import (
    broadcast_from_first,
    check_agreement,
    is_first,
    lost_contact,
    raise_on_any_process,
)
from transformer_jax.devices.sharding import check_rows, make_mesh
from transformer_jax.errors import UserError
from transformer_jax.evaluation import bleu_metric
from transformer_jax.model.matmul import compute_dtype
from transformer_jax.model.transformer import abstract_model
from transformer_jax.runs.checkpoints import Checkpoints
from transformer_jax.runs.manifest import Manifest
from transformer_jax.runs.progress import Progress
from transformer_jax.runs.remote_workdir import open_workdir
from transformer_jax.runs.workdir import Workdir
from transformer_jax.settings.changes import settings_of_all_processes
from transformer_jax.settings.config import Config
from transformer_jax.tokenization.subword_sampling import subword_sampling
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.training.optimizer import check_frozen
from transformer_jax.training.start_model import StartModel
from transformer_jax.training.step import StepFunctions, TrainState, make_step_functions
from transformer_jax.training.texts import Pairs, open_texts

logger = logging.getLogger(__name__)

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
        mesh = make_mesh(config.mesh, devices)
        _check_settings(config, mesh)
        config = config.with_layout(mesh.devices.flat[0].platform)
        texts, pairs = open_texts(config.data, config.training.bleu_sentences)
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
                start_model = StartModel(config)
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


def _check_settings(config: Config, mesh: Mesh) -> None:
    """Raise ``UserError`` for settings that would stop training later."""
    training = config.training
    config.check(config.training_rules())
    check_rows(mesh, config.batch.row_multiple, config.optimizer.accumulate_steps)
    bleu_metric(training.bleu_tokenize)
    if training.freeze:
        parameters = abstract_model(config.model).parameters
        may_have_new_rows = bool(config.tokenizer.new_languages or config.tokenizer.new_pieces)
        check_frozen(training.freeze, parameters, new_rows=may_have_new_rows)


def build_files(
    workdir: Workdir,
    config: Config,
    texts: dict[str, ParallelText],
    start_model: StartModel | None,
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


def _new_tokenizer(config: Config, text: ParallelText, start_model: StartModel | None) -> Tokenizer:
    settings = config.tokenizer
    if start_model:
        tokenizer = start_model.tokenizer(text)
    else:
        logger.info("Preparing the tokenizer.")
        tokenizer = Tokenizer.train(text.pairs(), settings)
        _check_decoder_start(config.model.decoder_start_id, tokenizer)
    return tokenizer.with_languages(settings.source_language, settings.target_language)


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
    start_model: StartModel | None,
) -> PreparedRun:
    """Open the tokenizer and corpora, and create or restore the state, in all processes."""
    with raise_on_any_process():
        if not is_first():
            workdir.pull()
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
            "training.start_from": start_model.checksum if start_model else None,
            "model.dtype": config.model.dtype,
        }
    )
    with raise_on_any_process():
        new_rows = workdir.tokenizer.new_rows
        functions = make_step_functions(config, mesh, new_rows)
        parameters = functions.abstract_state.parameters
        check_frozen(config.training.freeze, parameters, new_rows=bool(new_rows))
        criterion = f"{config.training.select_by} on {fingerprints.get('dev', '')}"
        progress = Progress(fingerprints["train"], selected=criterion)
        if workdir.resume_from is None:
            state = _initial_state(functions, start_model, workdir.tokenizer)
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
    functions: StepFunctions, start_model: StartModel | None, tokenizer: Tokenizer
) -> TrainState:
    """Create the initial state from random parameters or another model's."""
    if start_model is None:
        return functions.init()
    abstract = functions.abstract_state.parameters
    return functions.init(to_global_arrays(start_model.parameters(abstract, tokenizer), abstract))


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
