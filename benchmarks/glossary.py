"""Terms met, BLEU and speed of decoding with a glossary, on a trained model.

    python -m benchmarks.glossary --workdir W --input F --reference G
    python -m benchmarks.glossary --workdir W --input F --reference G --glossary terms.tsv

Without ``--glossary``, the terms are the ``--terms`` pairs of a source and a target word (letters
only, at least four) with the highest Dice coefficient that occur together in at least ``--count``
line pairs of ``--pairs`` (default: of the input and the reference, which favors BLEU). Pairs of
equal words are left out. Each source word has its most frequent partner.

Two tables:

- *Quality*, of all lines with at least one term: translated without the glossary, and with it.
  "met" is the share of terms whose target term is in the best translation; "lines" the share of
  lines with all terms. BLEU is of these lines. "longer" is the length of translations beside those
  without the glossary.
- *Speed* in lines per second, from text to text, of the same lines in turn: without terms, and with
  1 and 4 required terms, which are words of the reference translation.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

from benchmarks.in_turn import Table, finish, parser
from transformer_jax.data.text_files import read_lines
from transformer_jax.translation.glossary import read_glossary


def words(line: str) -> set[str]:
    """Return the words of at least four letters."""
    return {word for word in line.split() if word.isalpha() and len(word) > 3}


def likely_terms(pairs: Sequence[tuple[str, str]], number: int, least: int) -> dict[str, str]:
    """Return the ``number`` word pairs with the highest Dice coefficient."""
    sources = Counter[str]()
    targets = Counter[str]()
    both = Counter[tuple[str, str]]()
    for source, target in pairs:
        source_words = words(source)
        target_words = words(target)
        sources.update(source_words)
        targets.update(target_words)
        both.update((a, b) for a in source_words for b in target_words if a != b)
    dice = {
        (a, b): 2 * count / (sources[a] + targets[b])
        for (a, b), count in both.items()
        if count >= least
    }
    terms: dict[str, str] = {}
    for a, b in sorted(dice, key=lambda pair: (-dice[pair], pair)):
        if len(terms) < number:
            terms.setdefault(a, b)
    return terms


def quality(arguments: Any, pairs: Sequence[tuple[str, str]], terms: Any) -> Table:
    """Translate the lines with terms, without the glossary and with it."""
    from transformer_jax import Translator, bleu
    from transformer_jax.translation.glossary import unmet_terms

    settings = {"beam_size": arguments.beam_size, "batch_size": arguments.batch_size}
    translator = Translator.from_workdir(arguments.workdir, glossary=terms, **settings)
    glossary = translator.tokenize_glossary(terms, "The glossary")
    chosen = [pair for pair in pairs if glossary.find_terms(pair[0])]
    sources = [source for source, _ in chosen]
    references = [target for _, target in chosen]
    terms_of_lines = [glossary.find_terms(source) for source in sources]
    num_terms = sum(map(len, terms_of_lines))
    plain = Translator(translator.model, translator.tokenizer, translator.config)
    table: Table = {}
    lengths = []
    for name, each in (("without", plain), ("with", translator)):
        texts = each.translate(sources)
        missing = [len(unmet_terms(terms, text)) for terms, text in zip(terms_of_lines, texts)]
        lengths.append(sum(map(len, texts)))
        table[name] = {
            "lines with terms": len(chosen),
            "terms": num_terms,
            "met": 1 - sum(missing) / num_terms,
            "lines": missing.count(0) / len(chosen),
            "BLEU": bleu(texts, references, tokenize=arguments.bleu_tokenize).value,
            "longer": lengths[-1] / lengths[0],
        }
    return table


def speed(arguments: Any, pairs: Sequence[tuple[str, str]]) -> Table:
    """Time the same lines with 0, 1 and 4 required words of their references."""
    from transformer_jax import Request, Translator

    settings = {"beam_size": arguments.beam_size, "batch_size": arguments.batch_size}
    translator = Translator.from_workdir(arguments.workdir, **settings)
    rich = [pair for pair in pairs if pair[0].split() and len(words(pair[1])) >= 4]
    requests: dict[int, list[Request]] = {}
    for count in (0, 1, 4):
        requests[count] = [
            Request(
                source,
                # The key must occur in the source: each term has a word of it.
                glossary=dict(
                    zip(
                        dict.fromkeys(word for word in source.split() if word.isalpha()),
                        sorted(words(target))[:count],
                    )
                ),
            )
            for source, target in rich
        ]
    best = dict.fromkeys(requests, 0.0)
    for turn in range(arguments.rounds + 1):  # the first compiles
        for count, lines in requests.items():
            start = time.perf_counter()
            translator.translate(lines)
            if turn:
                best[count] = max(best[count], len(lines) / (time.perf_counter() - start))
    return {
        f"{count} terms": {"lines/s": each, "relative": each / best[0]}
        for count, each in best.items()
    }


def main() -> None:
    """Run the benchmark."""
    made = parser(__doc__)
    made.add_argument("--workdir", required=True)
    made.add_argument("--input", required=True)
    made.add_argument("--reference", required=True)
    made.add_argument("--glossary", help="TSV file of terms")
    made.add_argument("--pairs", nargs=2, help="source and target file from which to take terms")
    made.add_argument("--terms", type=int, default=200)
    made.add_argument("--count", type=int, default=3)
    made.add_argument("--sentences", type=int, default=1000)
    made.add_argument("--beam-size", type=int, default=4)
    made.add_argument("--batch-size", type=int, default=32)
    made.add_argument("--bleu-tokenize", default="13a")
    arguments = made.parse_args()

    def read(files: Sequence[str], limit: int | None = None) -> list[tuple[str, str]]:
        return list(islice(zip(*map(read_lines, files), strict=True), limit))

    pairs = read([arguments.input, arguments.reference], arguments.sentences)
    if arguments.glossary:
        terms: Any = read_glossary(arguments.glossary)
    else:
        known = read(arguments.pairs) if arguments.pairs else pairs
        terms = likely_terms(known, arguments.terms, arguments.count)
    table = quality(arguments, pairs, terms) | speed(arguments, pairs)
    finish(table, {"terms": terms}, arguments)


if __name__ == "__main__":
    main()
