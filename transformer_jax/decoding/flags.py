"""The flags of decode.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Files:
    """What is read and written."""

    input: str | None = None
    """File to translate, UTF-8, .gz too. Default: stdin."""
    output: str | None = None
    """File to write. Default: stdout."""
    format: Literal["text", "jsonl"] = "text"
    """text: a sentence a line. jsonl: an object a line; its other fields come out unchanged."""
    text_field: str = "text"
    """JSONL: the field to translate. A field `prefix` forces the beginning of the translation."""
    resume: bool = False
    """Go on where an interrupted run with the same settings stopped writing --output."""
    part: str | None = None
    """i/n: take lines i, i + n, i + 2n, ... and write OUTPUT.part-i-of-n; other processes take the
    other parts.
    """
    join: bool = False
    """Write --output from all its parts; nothing is translated."""
    window: int | None = None
    """Lines that are read, then translated, at a time; 1 for a program that waits for each answer.
    Default: 1 at a terminal, otherwise 100 batches.
    """


@dataclass(frozen=True)
class Results:
    """What is told about a translation."""

    nbest: int = 1
    """More than 1: so many lines a sentence, best first, as `number ||| translation ||| score`;
    JSONL: `hypotheses`.
    """
    alignments: Literal["hard", "soft"] | None = None
    """hard: after each translation ` ||| 0-0 1-2`, source word - target word. soft (JSONL): a
    matrix over tokens.
    """
    alignment_layer: int = -1
    """Decoder layer whose attention is the alignment; negative: from the last."""
    token_scores: bool = False
    """JSONL: each token and its log-probability."""


@dataclass(frozen=True)
class Evaluation:
    """Comparing with given translations."""

    reference: str | None = None
    """File of reference translations: BLEU and chrF of the output go to stderr; with --shortlist
    also BLEU without it, how many lines differ, and the time of both.
    """
    bleu_tokenize: str | None = None
    """sacreBLEU's tokenisation for --reference. Default: the run's training.bleu_tokenize."""
    score: str | None = None
    """File of targets, a line for each input line: print their log-probabilities instead of
    translating.
    """


@dataclass(frozen=True)
class Search:
    """How translations are searched. Default of each: the run's own decoding setting."""

    beam_size: int | None = None
    """Hypotheses kept for a sentence (1: greedy); sampling: samples drawn, as many as --nbest where
    it is not given.
    """
    length_penalty: float | None = None
    """alpha in log P / ((c + length) / (c + 1))^alpha."""
    length_offset: float | None = None
    """c in it: 5 in the paper; 0 in Marian, CTranslate2, fairseq and transformers."""
    batch_size: int | None = None
    """Sentences searched at a time, by all devices together; 1 with --window 1."""
    max_source_length: int | None = None
    """Longer lines, counted in tokens with the end symbol, are translated in parts."""
    max_extra_length: int | None = None
    """A translation has at most so many tokens more than its source."""
    min_length: int | None = None
    """A translation has at least so many tokens."""
    coverage_penalty: float | None = None
    """beta of the coverage penalty (Wu et al., 2016): scores down what leaves source tokens unread;
    0: off.
    """
    no_repeat_ngram: int | None = None
    """No so many tokens in a row occur twice in a translation; 0: off."""
    repetition_penalty: float | None = None
    """A token that the translation already has is ranked by this times its log-probability; 1:
    off.
    """
    suppress: tuple[str, ...] | None = None
    """Target tokens that are never generated, written as in the vocabulary (`▁` where a word
    begins).
    """
    shortlist: str | None = None
    """File of python -m transformer_jax.decoding.learn_shortlist: choose from the tokens that go
    with the source alone, which is faster where the vocabulary is large; '': from all. --reference
    says what it costs in BLEU.
    """
    method: Literal["beam", "sample"] | None = None
    """sample: draw translations at random instead of searching the best."""
    temperature: float | None = None
    """Sampling: below 1 more cautious, above 1 more varied."""
    top_k: int | None = None
    """Sampling: draw from so many likeliest tokens; 0: from all."""
    top_p: float | None = None
    """Sampling: draw from the likeliest tokens that have this probability together."""
    seed: int | None = None
    """Sampling: another seed, other translations."""


@dataclass(frozen=True)
class Arguments:
    """Translate lines of text with a trained model: one line out for each line in. docs/decoding.md
    has examples.
    """

    workdir: tuple[str, ...] = ()
    """Work directory of a training run; several: their models translate together (mean of their
    probabilities).
    """
    checkpoint: Literal["last", "best"] | int | None = None
    """The newest checkpoint, the best on dev, or that of a step. Default: the newest; the best if
    training.patience ended the run.
    """
    average: int | None = None
    """Take the mean of so many checkpoints, up to the chosen one. Default: the run's
    training.average; with --checkpoint best or a step, 1.
    """
    files: Files = field(default_factory=Files)
    results: Results = field(default_factory=Results)
    evaluation: Evaluation = field(default_factory=Evaluation)
    search: Search = field(default_factory=Search)
