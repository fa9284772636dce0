"""Checks of the decoder on a trained model and real text, too slow for the test suite.

    python tests/translation/check_trained.py --workdir W --input FILE --what agreement
    python tests/translation/check_trained.py --workdir W --input FILE --what independence

agreement: compare the n-best list of each line with the reference search, which runs the whole
  forward pass for each hypothesis and position, and compare scores with forced decoding.
independence: translate the lines in batches of several sizes, in order and shuffled, and count the
  lines with the same results to the last bit.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import tyro
from flax import nnx
from jax import Array
from reference_search import EOS, Rules, reference_search

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformer_jax.data.text_files import read_lines
from transformer_jax.decoding.engine import Engine
from transformer_jax.decoding.search import Hypothesis, Sentence
from transformer_jax.model.transformer import abstract_model
from transformer_jax.translation.translator import Translator


@dataclass(frozen=True)
class Arguments:
    """Compare translations of a file with a slow search, or across batches."""

    workdir: str
    """Work directory of a training run."""
    input: str
    """Text to translate."""
    what: Literal["agreement", "independence"]
    """The check to run."""
    limit: int | None = None
    """Use the first lines only."""
    beam_size: int = 4
    """Beam width."""
    max_extra_length: int = 12
    """Maximum extra length of a translation; the reference search never stops early."""
    weights: Literal["auto", "int8"] = "auto"
    """As in ``DecodingConfig``."""
    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """As in ``ModelConfig``, instead of the model's."""
    batch_sizes: tuple[int, ...] = (1, 7, 32, 128)
    """Batch sizes for ``independence``."""


def main(arguments: Arguments) -> None:
    """Run one check and print its result."""
    translator = Translator.from_workdir(
        arguments.workdir,
        beam_size=arguments.beam_size,
        max_extra_length=arguments.max_extra_length,
        weights=arguments.weights,
    )
    lines = list(read_lines(arguments.input))[: arguments.limit]
    encoded = translator.tokenizer.source.encode(lines)
    [engine] = translator.engines
    if arguments.dtype:
        graph = abstract_model(
            dataclasses.replace(engine.model.config, dtype=arguments.dtype)
        ).graph
        engine = Engine(nnx.merge(graph, nnx.state(engine.model)), engine.config)
    limit = engine.max_source_length - 1
    sentences = [Sentence(tokens[:limit]) for tokens in encoded if tokens]
    print(
        f"{len(sentences)} sentences, "
        f"{sum(len(s.tokens) for s in sentences) / len(sentences):.1f} tokens on average"
    )
    if arguments.what == "agreement":
        agreement(engine, sentences)
    else:
        independence(engine, sentences, arguments.batch_sizes)


def agreement(engine: Engine, sentences: list[Sentence]) -> None:
    """Compare each line with the pure-Python search."""
    config, model = engine.config, engine.model
    start = time.perf_counter()
    found = engine.search([each._replace(num_hypotheses=config.beam_size) for each in sentences])
    print(f"search: {time.perf_counter() - start:.0f} s")
    graph, parameters = nnx.split(model)

    @jax.jit
    def compiled(parameters: nnx.State, source_WS: Array, target_WT: Array, at: Array) -> Array:
        model = nnx.merge(graph, parameters)
        return jax.nn.log_softmax(
            model.logits(model.hidden(source_WS, target_WT)[:, at][:, None])[:, 0]
        )

    whole_pass = partial(compiled, parameters)
    start, same, best_same, worst = time.perf_counter(), 0, 0, 0.0
    for number, (sentence, its) in enumerate(zip(sentences, found, strict=True), 1):
        limit = len(sentence.tokens) + 1 + config.max_extra_length
        rules = Rules(
            limit, config.length_penalty, config.length_offset, min_length=config.min_length
        )
        model = WholePass(whole_pass, sentence, config.beam_size, limit)
        expected = reference_search(
            model, rules, beam_size=config.beam_size, patience=config.patience
        )
        ours, theirs = [(*h.tokens, EOS) for h in its], [h.tokens for h in expected]
        same += ours == theirs
        best_same += ours[0] == theirs[0]
        off = [
            abs(a.log_prob - b.log_prob)
            for a, b in zip(its, expected)
            if (*a.tokens, EOS) == b.tokens
        ]
        worst = max([worst, *off])
        if ours != theirs:
            print(
                f"  line {number}: "
                + ", ".join(f"{a.score:.6f} / {b.score:.6f}" for a, b in zip(its, expected))
            )
        if number % 50 and number < len(sentences):
            continue
        print(
            f"{number} lines: best translation the same for {best_same}, "
            f"whole n-best list for {same}; "
            f"largest difference of a log-probability {worst:.1e}; "
            f"plain search {time.perf_counter() - start:.0f} s",
            flush=True,
        )


class WholePass:
    """log_probs(tokens) of one sentence from the whole forward pass, encoder included, without a
    cache.

    Tokens that cannot be among the 2W best continuations get -inf, so that the reference search
    has fewer candidates.
    """

    def __init__(
        self, whole_pass: Callable[..., Array], sentence: Sentence, beam_size: int, limit: int
    ) -> None:
        self.whole_pass, self.beam_size, self.found = whole_pass, beam_size, {}
        self.width = -(-limit // 32) * 32
        source = np.zeros(-(-(len(sentence.tokens) + 1) // 16) * 16, np.int32)
        source[: len(sentence.tokens) + 1] = [*sentence.tokens, EOS]
        self.source_WS = np.tile(source, (beam_size, 1))

    def look_ahead(self, hypotheses: list[tuple[int, ...]]) -> None:
        """Compute all live hypotheses at once; they have the same length."""
        target_WT = np.zeros((self.beam_size, self.width), np.int32)
        for row, tokens in zip(target_WT, hypotheses):
            row[: len(tokens) + 1] = [*tokens, EOS]  # the EOS is not used
        rows_WV = np.array(self.whole_pass(self.source_WS, target_WT, len(hypotheses[0])))
        most = 2 * self.beam_size + 2  # PAD and EOS may be forbidden
        last_W1 = np.partition(rows_WV, -most)[:, -most, None]
        rows_WV[(rows_WV < last_W1) & (np.arange(rows_WV.shape[1]) != EOS)] = -np.inf
        self.found = dict(zip(hypotheses, rows_WV))

    def __call__(self, tokens: tuple[int, ...]) -> np.ndarray:
        return self.found[tokens]


def independence(engine: Engine, sentences: list[Sentence], batch_sizes: tuple[int, ...]) -> None:
    """Translate the same sentences in different batches."""
    order = np.random.default_rng(0).permutation(len(sentences))
    first: list[list[Hypothesis]] | None = None
    for batch_size in batch_sizes:
        of_size = Engine(engine.model, dataclasses.replace(engine.config, batch_size=batch_size))
        start = time.perf_counter()
        whole = of_size.search(sentences)
        shuffled = of_size.search([sentences[i] for i in order])
        exact = sum(shuffled[place] == whole[i] for place, i in enumerate(order))
        first = whole if first is None else first
        pairs = list(zip(first, whole, strict=True))
        equal = sum(a == b for a, b in pairs)
        same = sum(a[0].tokens == b[0].tokens for a, b in pairs)
        print(
            f"batch {batch_size}: shuffled and not, "
            f"identical to the last bit on {exact} of {len(sentences)}; "
            f"to batch {batch_sizes[0]} on {equal}, tokens on {same}; "
            f"{time.perf_counter() - start:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main(tyro.cli(Arguments))
