"""Write number names in words, English and German, with their word alignments.

    python examples/aligned_numbers.py --folder data/aligned

writes train, dev and test (.en, .de, .links) for guided alignment. A test pair:

    forty two thousand three hundred and seven
    zwei und vierzig tausend drei hundert sieben
    0-2 1-0 2-3 3-4 4-5 6-6 0?1 1?1 2?1 3?1 4?1 5?1 6?1

i-j is a sure link of a source and a target word. i?j is a possible link, in dev and test only:
"und" has no counterpart, so its links do not count (benchmarks/alignment_error.py).
"""

from itertools import product
from pathlib import Path

import numpy as np
import tyro

from transformer_jax import run_program

ONES = [
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen",
    "ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn "
    "sechzehn siebzehn achtzehn neunzehn",
]
TENS = [
    "twenty thirty forty fifty sixty seventy eighty ninety",
    "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig",
]
NOTHING = 0  # meaning of a word without a counterpart
Words = list[tuple[str, int]]  # each with its meaning, a number unique in its name


def main(
    folder: Path = Path("data/aligned"), train: int = 20_000, dev: int = 200, test: int = 500
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    numbers = iter(np.random.RandomState(0).permutation(999_999).tolist())
    for split, count in {"train": train, "dev": dev, "test": test}.items():
        lines: list[tuple[str, str, str]] = []
        for _ in range(count):
            en, de = sides = name(next(numbers) + 1, 1)
            texts = [" ".join(word for word, _ in side) for side in sides]
            pairs = [*product(enumerate(en), enumerate(de))]
            links = [f"{i}-{j}" for (i, (_, x)), (j, (_, y)) in pairs if x == y != NOTHING]
            if split != "train":
                links += [f"{i}?{j}" for (i, _), (j, (_, meaning)) in pairs if meaning == NOTHING]
            lines.append((texts[0], texts[1], " ".join(links)))
        for suffix, side in zip(("en", "de", "links"), zip(*lines), strict=True):
            (folder / f"{split}.{suffix}").write_text("".join(f"{line}\n" for line in side))
    print(f"{folder}: {train:,} + {dev:,} + {test:,} pairs, such as", *lines[0], sep="\n  ")


def name(n: int, place: int) -> tuple[Words, Words]:
    """The names of a number from 1 to 999,999. Meanings are decimal places times ``place``."""
    for size, *words in (1000, "thousand", "tausend"), (100, "hundred", "hundert"):
        if n >= size:
            (en, de) = name(n // size, 7 * size * place)
            remainder = n % size
            en, de = ([*side, (word, size * place)] for side, word in zip((en, de), words))
            en += [("and", NOTHING)] * (size == 100 and remainder > 0)
            last = name(remainder, place) if remainder else ([], [])
            return en + last[0], de + last[1]
    if n < 20:
        en, de = ([(words.split()[n - 1], place)] for words in ONES)
        return en, de
    en, de = ([(words.split()[n // 10 - 2], 10 * place)] for words in TENS)
    if n % 10:
        digit = name(n % 10, place)
        en = [*en, *digit[0]]
        de = [*digit[1], ("und", NOTHING), *de]
    return en, de


if __name__ == "__main__":
    raise SystemExit(run_program(lambda: tyro.cli(main)))
