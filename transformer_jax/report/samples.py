"""Sample translations of the dev set and their attention maps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from transformer_jax import Translator, read_pairs
from transformer_jax.report.attention import sentence_attention
from transformer_jax.report.runs import Run
from transformer_jax.support import enable_compilation_cache


def take_samples(run: Run, number: int, texts: Sequence[str]) -> None:
    """Translate ``number`` lines of the dev set, and compute attention for ``texts`` (default: the
    first line). Failures are added to ``run.problems``.
    """
    enable_compilation_cache()
    try:
        pairs = _dev_lines(run, number)
        sources = [source for source, _ in pairs]
        if not sources and not texts:
            return
        translator = Translator.from_workdir(run.workdir, batch_size=8)
        run.translations.update(zip(pairs, translator.translate(sources)))
        for text in texts or sources[:1]:
            run.attention[text] = sentence_attention(translator, text)
    except Exception as error:  # corrupt or missing files, or files just deleted by training
        said = str(error) or type(error).__name__
        run.problems.append(f"Translations and attention are incomplete: {said}")


def _dev_lines(run: Run, number: int) -> list[tuple[str, str]]:
    """Read evenly spaced lines from the part of the dev set that has BLEU, or from all of it."""
    if not number:
        return []
    data, first = run.config.data, run.config.training.bleu_sentences
    if not data.dev.is_given:
        run.problems.append("The run has no dev set to translate.")
        return []
    lines = islice(read_pairs(data.dev, data.root), first or None)
    pairs = [pair for pair in lines if all(map(str.strip, pair))]
    return pairs[:: -(-len(pairs) // number)][:number] if pairs else []
