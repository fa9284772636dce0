"""Figures of a model in training: loss on dev, BLEU on dev and test by real beam search, on all
devices of all processes.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from transformer_jax.checkpoint import choose_checkpoints, load_parameters
from transformer_jax.config import Config
from transformer_jax.data.batching import whole_corpus
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.loader import place
from transformer_jax.decoding.translator import Translator
from transformer_jax.distributed import from_first
from transformer_jax.evaluation import bleu, check_bleu_tokenizer, evaluate
from transformer_jax.sharding import batch_sharding
from transformer_jax.tokenizer import Tokenizer
from transformer_jax.training.loss import LossSums
from transformer_jax.training.prepare import read_all
from transformer_jax.training.reporting import means
from transformer_jax.training.step import Parameters, StepFunctions

log = logging.getLogger(__name__)


class Evaluator:
    """What dev and test say of parameters. Every process asks for the same figures at the same
    time, and gets them.

    Attributes:
      dev_pairs, test_pairs: (source, target) lines that are translated; empty where there are none.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        step_functions: StepFunctions,
        mesh: Mesh,
        dev_corpus: Corpus | None,
    ):
        """Reads the text of dev and test. What would fail late fails now: a tokenisation that
        sacreBLEU cannot do, too.
        """
        self.dev_pairs = (
            read_all(config, "dev", limit=config.training.bleu_sentences)
            if config.training.bleu_every
            else []
        )
        self.test_pairs = read_all(config, "test")
        check_bleu_tokenizer(config.training.bleu_tokenize)
        self._config, self._tokenizer, self._step_functions, self._mesh = (
            config,
            tokenizer,
            step_functions,
            mesh,
        )
        self._dev_corpus = dev_corpus
        self._translator: Translator | None = None
        self._shapes_seen: set[tuple[int, ...]] = set()

    def start(self, parameters: Parameters) -> None:
        """Check the settings of the search before training begins; nothing is compiled yet."""
        if not self.dev_pairs and not self.test_pairs:
            return
        devices = list(self._mesh.devices.flat)
        batch_size = -(-self._config.decoding.batch_size // len(devices)) * len(devices)
        # A shortlist cannot be there before the tokenizer.
        config = dataclasses.replace(self._config.decoding, shortlist="", batch_size=batch_size)
        model = nnx.merge(self._step_functions.graph, parameters)
        self._translator = Translator(model, self._tokenizer, config, devices=devices)
        self._translator.parameters = ()  # each evaluation brings its own

    def translates(self, number: int) -> bool:
        """Whether evaluation ``number`` on dev is one with BLEU."""
        every = self._config.training.bleu_every
        return bool(every) and number % every == 0

    def dev(self, parameters: Parameters, *, number: int) -> tuple[dict[str, Any], str]:
        """Figures (``dev_loss``, ...; ``dev_bleu`` when evaluation ``number`` is to translate) and
        a text to show.
        """
        assert self._dev_corpus is not None
        values: dict[str, Any] = means(self._loss(parameters, self._dev_corpus), "dev_")
        text = f"dev loss {values['dev_loss']:.4f}, perplexity {values['dev_perplexity']:.3f}"
        text += f", accuracy {values['dev_accuracy']:.2%}"
        if self.translates(number):
            translations = self._translate(parameters, self.dev_pairs)
            references = [target for _, target in self.dev_pairs]
            score = bleu(translations, references, tokenize=self._config.training.bleu_tokenize)
            values["dev_bleu"] = score.value
            chosen = number * 7919 % len(translations)
            source, target = self.dev_pairs[chosen]
            text += f", BLEU {score.value:.2f}\n  source      {source}\n  reference   {target}"
            text += f"\n  translation {translations[chosen]}"
        return values, text

    def test(self, workdir: Path) -> tuple[dict[str, Any], str]:
        """BLEU and chrF on the test pairs of the parameters that ``load_model`` takes, and a text
        to show.
        """
        names = from_first(lambda: [path.name for path in choose_checkpoints(workdir)])
        parameters = load_parameters([workdir / "checkpoints" / name for name in names])
        shardings = jax.tree.map(
            lambda s: s.sharding, self._step_functions.abstract_state.parameters
        )
        pairs = self.test_pairs
        translations = self._translate(place(parameters, shardings), pairs)
        tokenize = self._config.training.bleu_tokenize
        scores = evaluate(translations, [target for _, target in pairs], tokenize=tokenize)
        values = {
            "sentences": len(pairs),
            "checkpoint": int(names[0]),
            "averaged_checkpoints": len(names),
            "bleu": scores.bleu.value,
            "bleu_signature": scores.bleu.signature,
            "chrf": scores.chrf.value,
            "chrf_signature": scores.chrf.signature,
            "exact_match": scores.exact_match,
        }
        which = (
            f"mean of {len(names)} checkpoints, the last of step"
            if len(names) > 1
            else "checkpoint of step"
        )
        return values, f"test, {which} {int(names[0])}: {scores}"

    def _loss(self, parameters: Parameters, corpus: Corpus) -> LossSums:
        total: Any = None
        sharding = batch_sharding(self._mesh)
        # What fits into memory in training fits here: there a batch is worked through in parts.
        tokens = self._config.batch.tokens // self._config.optimizer.accumulate_steps
        for batch in whole_corpus(
            corpus, tokens=tokens, row_multiple=self._config.batch.row_multiple
        ):
            shape = (*batch.source_BS.shape, batch.target_BT.shape[1])
            if shape not in self._shapes_seen:
                self._shapes_seen.add(shape)
                log.info("Compiling the evaluation step for %d rows of %d + %d tokens.", *shape)
            sums = self._step_functions.eval_step(
                parameters, place(batch, jax.tree.map(lambda _: sharding, batch))
            )
            total = sums if total is None else jax.tree.map(lambda a, b: a + b, total, sums)
        return jax.device_get(total)

    def _translate(self, parameters: Parameters, pairs: list[tuple[str, str]]) -> list[str]:
        assert self._translator is not None
        self._translator.parameters = parameters  # newer ones need no new compilation
        translations = self._translator.translate([source for source, _ in pairs])
        self._translator.parameters = ()
        return translations
