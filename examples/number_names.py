"""Write a small parallel corpus: English number names and their German translations.

    python examples/number_names.py --folder data/numbers

writes train.en, train.de (100,000 lines each), dev.en, dev.de (200) and test.en, test.de (1,000),
one sentence per line. ``configs/demo.py`` reads these files. Requires num2words.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import tyro

from transformer_jax import run_program
from transformer_jax.errors import needs_extra

with needs_extra("demo"):
    from num2words import num2words

COUNT = 1_000_000
HELD_OUT = 10_000  # in dev and in test, each


def main(
    folder: Path = Path("data/numbers"), train: int = 100_000, dev: int = 200, test: int = 1000
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, limit in {"train": train, "dev": dev, "test": test}.items():
        for language, lines in zip(("en", "de"), zip(*number_names(split, limit)), strict=True):
            path = folder / f"{split}.{language}"
            path.write_text("".join(f"{line}\n" for line in lines))
            print(f"{path}: {len(lines):,} lines, such as {lines[0]!r}")


def number_names(split: str, limit: int) -> Iterator[tuple[str, str]]:
    """Yield English and German names of numbers below a million, in a fixed random order.

    Splits (train, dev, test) do not overlap. On both sides of a pair, names start with a capital
    letter in half of the pairs and, independently, end with a period in half of the pairs. In
    train, numbers below 2,000 come first, in all four styles, and are repeated according to Zipf's
    law, single digits most often. There are few such numbers, but users try them first.
    """
    random = np.random.RandomState(0)  # its random stream never changes
    test, dev, train = np.split(random.permutation(COUNT), [HELD_OUT, 2 * HELD_OUT])
    small = train[train < 2000]
    large = train[train >= 2000]
    small = np.concatenate([small, np.repeat(small, np.where(small < 10, 600, 200) // (small + 1))])
    train = np.concatenate([np.repeat(small, 4), large])
    numbers = {"train": train, "dev": dev, "test": test}[split]
    styles = random.randint(4, size=COUNT)[numbers]
    if split == "train":
        styles[: 4 * len(small)] = np.tile(np.arange(4), len(small))
    for n, style in zip(numbers[:limit].tolist(), styles[:limit].tolist()):
        yield styled(name(n, "en", ", ", " and "), style), styled(name(n, "de", "", ""), style)


def styled(name: str, style: int) -> str:
    if style & 1:
        name = name[0].upper() + name[1:]
    return f"{name}." if style & 2 else name


def name(n: int, language: str, before_hundreds: str, before_rest: str) -> str:
    # num2words takes about 50 us per call. Joining the cached names of thousands and remainder
    # avoids most calls.
    remainder = n % 1000
    if n < 1000 or not remainder:
        return words(n, language)
    joint = before_hundreds if remainder >= 100 else before_rest
    return words(n - remainder, language) + joint + words(remainder, language)


@cache
def words(n: int, language: str) -> str:
    return str(num2words(n, lang=language))


if __name__ == "__main__":
    raise SystemExit(run_program(lambda: tyro.cli(main)))
