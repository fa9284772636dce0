"""Metrics of translations: BLEU and chrF from sacreBLEU, with signatures; exact match."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sacrebleu.metrics import BLEU, CHRF

from transformer_jax.errors import UserError, one_line


@dataclass(frozen=True)
class CorpusScore:
    """A corpus-level score. Prints in sacreBLEU's format, including the signature."""

    name: str
    """Metric name: BLEU or chrF2."""
    value: float
    """Score from 0 to 100."""
    signature: str
    """sacreBLEU's signature: tokenization, case, smoothing, version."""
    details: str = ""
    """BLEU: n-gram precisions, brevity penalty and lengths."""

    def __str__(self) -> str:
        return f"{self.name}|{self.signature} = {self.value:.2f} {self.details}".rstrip()


@dataclass(frozen=True)
class Evaluation:
    """Scores of translations against their references."""

    scores: Mapping[str, CorpusScore]
    """By their names in ``METRICS``."""
    exact_match: float
    """Fraction of lines that equal their reference, from 0 to 1."""

    @property
    def bleu(self) -> CorpusScore:
        """BLEU."""
        return self.scores["bleu"]

    @property
    def chrf(self) -> CorpusScore:
        """chrF2."""
        return self.scores["chrf"]

    def __str__(self) -> str:
        lines = [*map(str, self.scores.values()), f"exact match {self.exact_match:.2%}"]
        return "\n".join(lines)


def evaluate(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a"
) -> Evaluation:
    """Compute all metrics and exact match, as reported by train.py and decode.py.

    Takes the same arguments and raises the same errors as ``bleu``.
    """
    scores = {
        name: metric.score(hypotheses, references, tokenize) for name, metric in METRICS.items()
    }
    matches = sum(hypothesis == reference for hypothesis, reference in zip(hypotheses, references))
    return Evaluation(scores, matches / len(references))


class Metric(NamedTuple):
    """A metric of translations, of the dev set during training and of other texts."""

    label: str
    """Name in messages."""
    score: Callable[[Sequence[str], Sequence[str], str], CorpusScore]
    """Takes hypotheses, references and ``training.bleu_tokenize``."""
    higher_is_better: bool = True


METRICS = {
    "bleu": Metric(
        "BLEU",
        lambda hypotheses, references, tokenize: bleu(hypotheses, references, tokenize=tokenize),
    ),
    "chrf": Metric("chrF", lambda hypotheses, references, _: chrf(hypotheses, references)),
}
"""Metrics by their names in log entries and in ``training.select_by``."""


def selection_score(select_by: str, metrics: Mapping[str, Any]) -> float:
    """Return what ``training.select_by`` maximizes: the metric, or its negative if less is better.

    ``metrics`` has the loss and the metrics of an evaluation on the dev set.
    """
    value = float(metrics[f"dev_{select_by}"])
    higher_is_better = select_by != "loss" and METRICS[select_by].higher_is_better
    return value if higher_is_better else -value


def bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a"
) -> CorpusScore:
    """Compute corpus BLEU (Papineni et al., 2002), cased, on detokenized text.

    ``tokenize``: one of sacreBLEU's tokenizers; ``"none"`` for text that is already tokenized.

    Raises:
        UserError: different numbers of lines, nothing to score, or a tokenizer that is unknown to
          sacreBLEU or whose package is not installed.
    """
    return _corpus_score(bleu_metric(tokenize), hypotheses, references)


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> CorpusScore:
    """Compute corpus chrF2 (Popović, 2015): character n-grams up to length 6, beta = 2.

    Raises:
        UserError: different numbers of lines, or nothing to score.
    """
    return _corpus_score(CHRF(), hypotheses, references)


def _corpus_score(
    metric: BLEU | CHRF, hypotheses: Sequence[str], references: Sequence[str]
) -> CorpusScore:
    if isinstance(references, str) or len(hypotheses) != len(references) or not references:
        raise UserError(
            f"{len(hypotheses)} lines to score and {len(references)} reference lines; "
            "expected two lists with the same number of lines, at least one."
        )
    result = metric.corpus_score(hypotheses, [references])
    details = str(result).split(" ")[3:]  # after "BLEU = 41.02"
    return CorpusScore(result.name, result.score, str(metric.get_signature()), " ".join(details))


def bleu_metric(tokenize: str) -> BLEU:
    """Return sacreBLEU's metric. Raises ``UserError`` if it cannot use this tokenizer."""
    try:
        return BLEU(tokenize=tokenize, force=tokenize == "none")
    # unknown tokenizer, missing package, or failed download
    except (KeyError, ImportError, RuntimeError, OSError) as error:
        known = ", ".join(BLEU.TOKENIZERS)
        raise UserError(
            f"BLEU tokenizer {tokenize!r} cannot be used ({one_line(error)}); sacreBLEU supports "
            f"{known}."
        ) from None
