"""Evaluates a model during training: loss on the dev set, BLEU by real beam search, the test set.

All devices of all processes take part.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
from flax import nnx

from transformer_jax.checkpoint import choose_checkpoints, load_parameters
from transformer_jax.config import Config
from transformer_jax.data.batching import BatchPlan
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.loader import abstract_batch, load_batches, place
from transformer_jax.decoding.translator import Translator
from transformer_jax.distributed import from_first
from transformer_jax.evaluation import Evaluation, bleu, evaluate
from transformer_jax.sharding import batch_sharding
from transformer_jax.training.compiling import Job, bytes_on_device, step_name
from transformer_jax.training.loss import LossSums
from transformer_jax.training.prepare import Prepared
from transformer_jax.training.reporting import Example, means
from transformer_jax.training.step import Parameters

_SMALLER_STEP = "Lower batch.tokens or set optimizer.accumulate_steps."
_SMALLER_SEARCH = "Lower decoding.batch_size or decoding.beam_size."
_EVALUATION_SHAPES = 4  # each is compiled for a few batches
_BATCHES_BETWEEN_POLLS = 20  # of a translation


class EvaluationStopped(Exception):
    """A signal came before the evaluation had ended."""


class Evaluator:
    """Figures of parameters on dev and test. Every process asks for the same figures at the same
    time, and gets them.
    """

    def __init__(
        self,
        run: Prepared,
        *,
        stop: Callable[[], bool] = lambda: False,
        ready: Callable[[str], bool] = lambda name: True,
    ):
        """``stop`` is polled between batches; if it is true, ``EvaluationStopped`` is raised.

        ``ready`` is called with the name of one of ``jobs`` before it is needed, and may wait; if
        it is false, ``EvaluationStopped`` is raised as well.
        """
        self._run, self._stop, self._ready = run, stop, ready
        self._dev = None if run.dev_corpus is None else evaluation_plan(run.dev_corpus, run.config)
        self._translator: Translator | None = None
        self._searches: dict[str, dict[str, Callable[[], jax.stages.Lowered]]] = {}
        if run.dev_pairs or run.test_pairs:
            devices = list(run.mesh.devices.flat)
            batch_size = -(-run.config.decoding.batch_size // len(devices)) * len(devices)
            config = dataclasses.replace(run.config.decoding, batch_size=batch_size)
            model = nnx.merge(run.functions.graph, run.state.parameters)
            self._translator = Translator(model, run.tokenizer, config, devices=devices)
            for name, pairs in (("dev", run.dev_pairs), ("test", run.test_pairs)):
                self._searches[name] = self._translator.ahead([source for source, _ in pairs])
            self._translator.parameters = ()  # each evaluation brings its own

    def translates(self, number: int) -> bool:
        """Whether evaluation ``number`` on the dev set includes BLEU."""
        every = self._run.config.training.bleu_every
        return bool(every) and number % every == 0

    def dev(self, parameters: Parameters, *, number: int) -> tuple[dict[str, Any], Example | None]:
        """Figures ``dev_loss``, ...; with ``dev_bleu`` and one translation if evaluation
        ``number`` includes BLEU.
        """
        assert self._dev is not None
        figures: dict[str, Any] = means(self._loss(parameters, self._dev), "dev_")
        if not self.translates(number):
            return figures, None
        pairs = self._run.dev_pairs
        self._wait_for(*self._searches["dev"])
        translations = self._translate(parameters, pairs)
        tokenize = self._run.config.training.bleu_tokenize
        figures["dev_bleu"] = bleu(translations, [y for _, y in pairs], tokenize=tokenize).value
        chosen = number * 7919 % len(pairs)
        return figures, Example(*pairs[chosen], translations[chosen])

    def test(self) -> tuple[dict[str, Any], Evaluation]:
        """Figures on the test set of the parameters that ``load_model`` takes."""
        run = self._run
        names = from_first(lambda: [path.name for path in choose_checkpoints(run.workdir)])
        parameters = load_parameters([run.workdir / "checkpoints" / name for name in names])
        places = run.functions.abstract_state.parameters
        shardings = jax.tree.map(lambda leaf: leaf.sharding, places)
        self._wait_for(*self._searches["test"])
        translations = self._translate(place(parameters, shardings), run.test_pairs)
        references = [target for _, target in run.test_pairs]
        tokenize, language = run.config.training.bleu_tokenize, run.config.training.bleu_language
        scores = evaluate(translations, references, tokenize=tokenize, language=language)
        figures = {
            "sentences": len(references),
            "checkpoint": int(names[0]),
            "averaged_checkpoints": len(names),
            "bleu": scores.bleu.value,
            "bleu_signature": scores.bleu.signature,
            "chrf": scores.chrf.value,
            "chrf_signature": scores.chrf.signature,
            "exact_match": scores.exact_match,
        }
        if scores.paper_bleu:
            figures["paper_bleu"] = scores.paper_bleu.value
            figures["paper_bleu_signature"] = scores.paper_bleu.signature
        return figures, scores

    def jobs(self, start: int) -> Iterator[Job]:
        """The functions that evaluations from step ``start`` on need."""
        run, training = self._run, self._run.config.training
        evaluates = start < training.steps or run.progress.evaluation_due
        abstract, rows = run.functions.abstract_state, batch_sharding(run.mesh)
        beside = bytes_on_device(abstract) - bytes_on_device(abstract.parameters)
        if self._dev is not None and evaluates:
            for shape in self._dev.first_uses(0, self._dev.steps_per_epoch):
                batch = abstract_batch(shape, rows, packed=self._dev.packed)
                lower_step = partial(run.functions.eval_step.lower, abstract.parameters, batch)
                yield Job(step_name(shape, "evaluation"), lower_step, _SMALLER_STEP, beside)
        for searches in ["dev", "test"] if evaluates and training.bleu_every else ["test"]:
            for name, lower in self._searches.get(searches, {}).items():
                yield Job(name, lower, _SMALLER_SEARCH, beside)

    def _loss(self, parameters: Parameters, plan: BatchPlan) -> LossSums:
        total: Any = None
        rows = batch_sharding(self._run.mesh)
        with load_batches(plan, sharding=rows, stop=plan.steps_per_epoch) as batches:
            for step, batch in enumerate(batches):
                self._poll()
                self._wait_for(step_name(plan.shape(step), "evaluation"))
                sums = self._run.functions.eval_step(parameters, batch)
                total = sums if total is None else jax.tree.map(operator.add, total, sums)
        return jax.device_get(total)

    def _translate(self, parameters: Parameters, pairs: Sequence[tuple[str, str]]) -> list[str]:
        assert self._translator is not None
        self._translator.parameters = parameters  # nothing is compiled again
        sources = [source for source, _ in pairs]
        window = _BATCHES_BETWEEN_POLLS * self._translator.config.batch_size
        translations = []
        for number, [best, *_] in enumerate(self._translator.stream(sources, window=window)):
            if number % window == 0:
                self._poll()
            translations.append(best.text)
        self._translator.parameters = ()
        return translations

    def _wait_for(self, *names: str) -> None:
        """Wait until these functions are compiled."""
        if not all(map(self._ready, names)):
            raise EvaluationStopped

    def _poll(self) -> None:
        if self._stop():
            raise EvaluationStopped


def evaluation_plan(corpus: Corpus, config: Config) -> BatchPlan:
    """Batches for a loss on a whole corpus, one epoch: as large as a microbatch in training, so
    that they fit into memory, or as the longest sentence needs.
    """
    microbatches, longest = config.optimizer.accumulate_steps, int(corpus.lengths().max())
    rows = config.batch.row_multiple // microbatches
    batch = dataclasses.replace(
        config.batch,
        tokens=max(config.batch.tokens // microbatches, rows * longest),
        row_multiple=rows,
        row_length=max(config.batch.row_length, longest),
        buckets=_EVALUATION_SHAPES,
    )
    return BatchPlan(corpus, batch, seed=0)
