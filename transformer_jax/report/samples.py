"""Sentences of the dev set as each run translates them, and where it looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from transformer_jax.attention import SentenceAttention, sentence_attention
from transformer_jax.data.sources import read_pairs
from transformer_jax.report.runs import Run


@dataclass
class Samples:
    """By (source, reference) the translation by each run; by (run, sentence) its attention."""

    translations: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    attention: dict[tuple[str, str], SentenceAttention] = field(default_factory=dict)


def take_samples(runs: Sequence[Run], number: int, *, texts: Sequence[str]) -> Samples:
    """Translate ``number`` lines of each run's dev set, and attend to ``texts``, or else to the
    first of those lines. What fails is noted with the run.
    """
    from transformer_jax.compilation_cache import keep_compiled
    from transformer_jax.decoding.translator import Translator
    from transformer_jax.model.layers import use_matmul_precision

    keep_compiled("auto")
    samples = Samples()
    for run in runs:
        pairs = _dev_lines(run, number) if number and run.checkpoints and run.config else []
        sources = [source for source, _ in pairs]
        if not run.checkpoints or not (sources or texts):
            continue
        try:
            translator = Translator.from_workdir(run.workdir, batch_size=8)
            use_matmul_precision(translator.models[0].config)
            for pair, translation in zip(pairs, translator.translate(sources), strict=True):
                samples.translations.setdefault(pair, {})[run.name] = translation
            for text in texts or sources[:1]:
                samples.attention[run.name, text] = sentence_attention(translator, text)
        except Exception as error:  # whatever is damaged, or deleted by training just now
            said = str(error) or type(error).__name__
            run.problems.append(f"Translations and attention are not complete: {said}")
    return samples


def _dev_lines(run: Run, number: int) -> list[tuple[str, str]]:
    """Lines from all over what training measures BLEU on."""
    assert run.config is not None
    data, first = run.config.data, run.config.training.bleu_sentences
    if not data.dev.is_given:
        run.problems.append("The run has no dev set: there are no lines to translate.")
        return []
    try:
        lines = read_pairs(data.dev, data.root, invalid_utf8=data.invalid_utf8)
        pairs = [pair for pair in islice(lines, first) if all(map(str.strip, pair))]
    except Exception as error:  # files may be gone, or on another machine
        run.problems.append(f"The dev set cannot be read: {error}")
        return []
    return pairs[:: -(-len(pairs) // number)][:number] if pairs else []
