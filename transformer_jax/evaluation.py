"""BLEU and chrF through sacreBLEU, each with the signature that makes it comparable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sacrebleu.metrics import BLEU, CHRF

from transformer_jax.errors import UserError


@dataclass(frozen=True)
class Score:
    """A corpus score; prints in sacreBLEU's own form, with all that another paper needs."""

    name: str
    """BLEU or chrF2."""
    value: float
    """0 to 100."""
    signature: str
    """sacreBLEU's: tokenisation, case, smoothing, version."""
    details: str = ""
    """BLEU: n-gram precisions, brevity penalty and lengths."""

    def __str__(self) -> str:
        return f"{self.name}|{self.signature} = {self.value:.2f} {self.details}".rstrip()


@dataclass(frozen=True)
class Evaluation:
    """How close translations are to their references."""

    bleu: Score
    chrf: Score
    exact_match: float
    """Share of the lines that equal their reference, 0 to 1."""

    def __str__(self) -> str:
        return f"{self.bleu}\n{self.chrf}\nexact match {self.exact_match:.2%}"


def evaluate(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a"
) -> Evaluation:
    """BLEU, chrF and exact match of translations, as train.py and decode.py report them.

    Arguments and errors as in ``bleu``.
    """
    equal = sum(ours == theirs for ours, theirs in zip(hypotheses, references, strict=False))
    bleu_score = bleu(hypotheses, references, tokenize=tokenize)
    return Evaluation(bleu_score, chrf(hypotheses, references), equal / len(references))


def bleu(hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a") -> Score:
    """Corpus BLEU (Papineni et al., 2002), cased, of detokenised text.

    ``tokenize``: one of sacreBLEU's tokenisations; ``"none"`` for text that is already tokenised.

    Raises:
        UserError: different counts, nothing to score, or a tokenisation that sacreBLEU lacks or has
          no package for.
    """
    return _corpus_score(_bleu_metric(tokenize), hypotheses, references)


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """Corpus chrF2 (Popović, 2015): character n-grams up to 6, recall weighted twice.

    Raises:
        UserError: different counts, or nothing to score.
    """
    return _corpus_score(CHRF(), hypotheses, references)


def check_bleu_tokenizer(tokenize: str) -> None:
    """Raise ``UserError`` unless sacreBLEU can tokenise this way here: checked before long work."""
    _bleu_metric(tokenize)


def check_pairs(hypotheses: Sequence[object], references: Sequence[str]) -> None:
    """Raise ``UserError`` unless there is one reference for each line, and at least one line."""
    if len(hypotheses) != len(references):
        raise UserError(
            f"{len(hypotheses)} lines to score and {len(references)} reference lines; "
            "expected as many references as lines."
        )
    if not hypotheses:
        raise UserError("There is nothing to score: 0 lines and 0 references.")


def _corpus_score(
    metric: BLEU | CHRF, hypotheses: Sequence[str], references: Sequence[str]
) -> Score:
    check_pairs(hypotheses, references)
    result = metric.corpus_score(hypotheses, [references])
    details = str(result).split(" ")[3:]  # after "BLEU = 41.02"
    return Score(result.name, result.score, str(metric.get_signature()), " ".join(details))


def _bleu_metric(tokenize: str) -> BLEU:
    try:
        return BLEU(tokenize=tokenize, force=tokenize == "none")
    # unknown; a package or a download is missing
    except (KeyError, ImportError, RuntimeError, OSError) as error:
        reason, known = " ".join(str(error).split()), ", ".join(BLEU.TOKENIZERS)
        raise UserError(
            f"BLEU tokenisation {tokenize!r} cannot be used ({reason}); sacreBLEU knows {known}."
        ) from None
