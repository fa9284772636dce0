"""BLEU (sacreBLEU's and the paper's) and chrF, with signatures that make scores comparable."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

from sacrebleu.metrics import BLEU, CHRF

from transformer_jax.errors import UserError, needs_extra, shown


@dataclass(frozen=True)
class Score:
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

    bleu: Score
    chrf: Score
    exact_match: float
    """Fraction of lines that equal their reference, from 0 to 1."""
    paper_bleu: Score | None = None
    """BLEU as in the paper, if a language was given."""

    def __str__(self) -> str:
        scores = filter(None, (self.bleu, self.paper_bleu, self.chrf))
        return "\n".join([*map(str, scores), f"exact match {self.exact_match:.2%}"])


def evaluate(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    tokenize: str = "13a",
    language: str = "",
) -> Evaluation:
    """Compute BLEU, chrF and exact match, as reported by train.py and decode.py.

    With a ``language``, also computes BLEU as in the paper. Takes the same arguments and raises the
    same errors as ``bleu`` and ``paper_bleu``.
    """
    texts = hypotheses, references
    scores = bleu(*texts, tokenize=tokenize), chrf(*texts)
    equal = sum(ours == theirs for ours, theirs in zip(*texts)) / len(references)
    if not language:
        return Evaluation(*scores, equal)
    given = tokenize == "none"
    return Evaluation(*scores, equal, paper_bleu(*texts, language=language, tokenized=given))


def bleu(hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a") -> Score:
    """Compute corpus BLEU (Papineni et al., 2002), cased, on detokenized text.

    ``tokenize``: one of sacreBLEU's tokenizers; ``"none"`` for text that is already tokenized.

    Raises:
        UserError: different numbers of lines, nothing to score, or a tokenizer that is unknown to
          sacreBLEU or whose package is not installed.
    """
    return _corpus_score(_bleu_metric(tokenize), hypotheses, references)


def paper_bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, language: str, tokenized: bool = False
) -> Score:
    """Compute BLEU as in the paper (section 6.1): cased, Moses tokens, compounds split.

    Usually higher than ``bleu``. Follows tensor2tensor's get_ende_bleu.sh: in hypotheses and
    references, replace Unicode punctuation, tokenize with Moses, and split "rich-text" into three
    tokens; then compute BLEU without smoothing.

    Args:
      language: code of the target language, such as ``"de"``.
      tokenized: the text is already tokenized, so only compounds are split.

    Raises:
      UserError: different numbers of lines, nothing to score, or an unsupported language.
    """
    check_bleu("none", language)
    with needs_extra("paper"):
        from sacremoses import MosesPunctNormalizer, MosesTokenizer  # slow to import
    tokenizer, punctuation = MosesTokenizer(language), MosesPunctNormalizer()

    def tokens(line: str) -> str:
        if not tokenized:
            line = tokenizer.tokenize(punctuation.replace_unicode_punct(line), return_str=True)
        return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line)

    metric = BLEU(tokenize="none", force=True, smooth_method="none")
    score = _corpus_score(metric, [*map(tokens, hypotheses)], [*map(tokens, references)])
    rules = "none" if tokenized else f"moses-{language}-sacremoses-{version('sacremoses')}"
    signature = score.signature.replace("tok:none", f"tok:{rules}+compounds-split")
    return replace(score, signature=signature)


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """Compute corpus chrF2 (Popović, 2015): character n-grams up to length 6, beta = 2.

    Raises:
        UserError: different numbers of lines, or nothing to score.
    """
    return _corpus_score(CHRF(), hypotheses, references)


def check_bleu(tokenize: str, language: str = "") -> None:
    """Raise ``UserError`` if BLEU cannot be computed. Call this before a long run.

    ``tokenize`` is a sacreBLEU tokenizer; ``language`` is the language for BLEU as in the paper, if
    any.
    """
    _bleu_metric(tokenize)
    if not language:
        return
    with needs_extra("paper"):
        from sacremoses.corpus import NonbreakingPrefixes
    known = sorted(set(NonbreakingPrefixes().available_langs.values()))
    if language not in known:
        raise UserError(
            f"bleu_language is {shown(language)}; expected a language that the Moses "
            f"tokenizer supports: {', '.join(known)}."
        )


def _corpus_score(
    metric: BLEU | CHRF, hypotheses: Sequence[str], references: Sequence[str]
) -> Score:
    if isinstance(references, str) or len(hypotheses) != len(references) or not references:
        raise UserError(
            f"{len(hypotheses)} lines to score and {len(references)} reference lines; "
            "expected two lists with the same number of lines, at least one."
        )
    result = metric.corpus_score(hypotheses, [references])
    details = str(result).split(" ")[3:]  # after "BLEU = 41.02"
    return Score(result.name, result.score, str(metric.get_signature()), " ".join(details))


def _bleu_metric(tokenize: str) -> BLEU:
    try:
        return BLEU(tokenize=tokenize, force=tokenize == "none")
    # unknown tokenizer, missing package, or failed download
    except (KeyError, ImportError, RuntimeError, OSError) as error:
        reason, known = " ".join(str(error).split()), ", ".join(BLEU.TOKENIZERS)
        raise UserError(
            f"BLEU tokenizer {tokenize!r} cannot be used ({reason}); sacreBLEU supports {known}."
        ) from None
