"""Evaluation during training: dev loss, dev BLEU with beam search, and test scores.

Evaluation uses all devices in all processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from transformer_jax.data.batching import BatchPlan
from transformer_jax.data.loader import load_batches, to_global_arrays
from transformer_jax.data.sources import TextPair
from transformer_jax.devices.distributed import allgather, broadcast_from_first
from transformer_jax.devices.sharding import batch_sharding, replicated
from transformer_jax.evaluation import METRICS, Evaluation, evaluate
from transformer_jax.runs.averaging import choose_average
from transformer_jax.settings.config import BatchConfig
from transformer_jax.tokenization.languages import format_languages
from transformer_jax.training.loss import LossSums
from transformer_jax.training.metrics import means_per_token
from transformer_jax.training.prepare import PreparedRun
from transformer_jax.training.step import Parameters
from transformer_jax.translation.requests import Request
from transformer_jax.translation.translator import Translator

_EVALUATION_SHAPES = 4  # few, because each shape is compiled for only a few batches


class Evaluator:
    """Evaluation of parameters on the dev set and the test set.

    Every process must call the same methods in the same order, and gets the same results.
    """

    def __init__(self, run: PreparedRun):
        config = run.config
        self._run = run
        self._training_config = config.training
        self._dev: BatchPlan | None = None
        if dev := run.corpora.get("dev"):
            # As large as a training microbatch, so batches fit into memory, unless the longest
            # sentence needs more.
            rows = config.batch.row_multiple
            longest = int(dev.lengths().max())
            tokens = max(config.batch.tokens // config.optimizer.accumulate_steps, rows * longest)
            batch = BatchConfig(tokens=tokens, row_multiple=rows, buckets=_EVALUATION_SHAPES)
            self._dev = BatchPlan(dev, batch, seed=0, pad_id=config.model.pad_id)
        self._translator: Translator | None = None
        if any(run.pairs.values()):
            rows = -(-config.decoding.batch_size // jax.process_count())
            decoding = dataclasses.replace(config.decoding, batch_size=rows)
            model = nnx.merge(run.functions.graph, self._replicated_copy(run.state.parameters))
            devices = list(run.mesh.local_devices)
            self._translator = Translator(model, run.tokenizer, decoding, devices=devices)
            self._translator.parameters = ()  # set by each evaluation

    def dev(self, parameters: Parameters) -> tuple[dict[str, Any], str]:
        """Compute dev-set metrics (``dev_loss``, ...) and format the first pair's translation.

        Without ``training.bleu_sentences``, there is no ``dev_bleu``, and the translation is "".
        """
        assert self._dev is not None
        metrics: dict[str, Any] = means_per_token(self._loss(parameters, self._dev), "dev_")
        if not (pairs := self._run.pairs["dev"]):
            return metrics, ""
        translations = self._translate(parameters, pairs)
        references = [pair.target for pair in pairs]
        tokenize = self._training_config.bleu_tokenize
        for name, score in evaluate(translations, references, tokenize=tokenize).scores.items():
            metrics[f"dev_{name}"] = score.value
        for languages, scores in by_languages(pairs, translations, tokenize).items():
            for name in METRICS:
                metrics[f"dev_{name}_{languages}"] = scores[name]
        lines = zip(("source", "reference", "translation"), (*pairs[0][:2], translations[0]))
        return metrics, "\n".join(f"  {name:11} {line}" for name, line in lines)

    def choose(self) -> tuple[list[int], Any]:
        """Choose the run's model (see ``averaging.choose_average``).

        Returns the averaged steps, newest first, and the parameters as NumPy arrays.
        """
        progress = self._run.progress
        plan = self._dev

        def dev_loss(average: Any) -> float:
            assert plan is not None
            return means_per_token(self._loss(self._on_devices(average), plan))["loss"]

        checkpoints = self._run.checkpoints
        return choose_average(
            checkpoints.folder,
            broadcast_from_first(lambda: checkpoints.steps()[::-1]),
            progress.best_step,
            self._training_config,
            stopped_early=progress.early_stopping_triggered(self._training_config.patience),
            dev_loss=None if plan is None else dev_loss,
        )

    def test(self, parameters: Any) -> tuple[dict[str, Any], Evaluation]:
        """Evaluate parameters on the test set."""
        pairs = self._run.pairs["test"]
        translations = self._translate(self._on_devices(parameters), pairs)
        references = [pair.target for pair in pairs]
        tokenize = self._training_config.bleu_tokenize
        scores = evaluate(translations, references, tokenize=tokenize)
        metrics: dict[str, Any] = {
            "sentences": len(references),
            "exact_match": scores.exact_match,
        }
        for name, score in scores.scores.items():
            metrics[name] = score.value
            metrics[f"{name}_signature"] = score.signature
        if languages := by_languages(pairs, translations, tokenize):
            metrics["languages"] = languages
        return metrics, scores

    def _on_devices(self, parameters: Any) -> Parameters:
        return to_global_arrays(parameters, self._run.functions.abstract_state.parameters)

    def _loss(self, parameters: Parameters, plan: BatchPlan) -> LossSums:
        row_sharding = batch_sharding(self._run.mesh)
        batches = load_batches(plan, sharding=row_sharding, stop=plan.steps_per_epoch)
        parts = [self._run.functions.eval_step(parameters, batch) for batch in batches]
        return jax.tree.map(lambda *sums: sum(sums), *jax.device_get(parts))

    def _replicated_copy(self, parameters: Parameters) -> Parameters:
        """Replicate parameters and return the copy on a local device."""
        copies = jax.device_put(parameters, replicated(self._run.mesh))
        return jax.tree.map(lambda x: x.addressable_data(0), copies)

    def _translate(self, parameters: Parameters, pairs: Sequence[TextPair]) -> list[str]:
        """Translate the sources. With n processes, each one translates every n-th line."""
        assert self._translator is not None
        self._translator.parameters = self._replicated_copy(parameters)  # nothing is compiled again
        lines = []
        for line_number, pair in enumerate(pairs, 1):
            source_language, target_language = pair.languages
            lines.append(
                Request(
                    pair.source,
                    source_language=source_language,
                    target_language=target_language,
                    line_number=line_number,
                )
            )
        count = jax.process_count()
        own_lines = lines[jax.process_index() :: count]
        lines_of_processes = allgather(self._translator.translate(own_lines))
        self._translator.parameters = ()
        return [lines_of_processes[i % count][i // count] for i in range(len(lines))]


def by_languages(
    pairs: Sequence[TextPair], translations: Sequence[str], tokenize: str
) -> dict[str, dict[str, Any]]:
    """Return the number of sentences and the metrics of each pair of languages; {} if there is only
    one.
    """
    lines: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
    for pair, translation in zip(pairs, translations):
        hypotheses, references = lines.setdefault(pair.languages, ([], []))
        hypotheses.append(translation)
        references.append(pair.target)
    if len(lines) < 2:
        return {}
    scores = {}
    for languages, (hypotheses, references) in lines.items():
        evaluation = evaluate(hypotheses, references, tokenize=tokenize)
        scores[format_languages(languages)] = {
            "sentences": len(references),
            **{name: score.value for name, score in evaluation.scores.items()},
        }
    return scores
