"""Write a small parallel corpus: English number names and their German translations.

    python examples/number_names.py --folder data/numbers

writes train.en, train.de (20,000 lines each), dev.en, dev.de (200) and test.en, test.de (500), one
sentence per line. Requires num2words.
"""

from pathlib import Path

import tyro

import transformer_jax as tj
from transformer_jax.data.sources import read_pairs


def main(folder: Path = Path("data/numbers"), train: int = 20_000) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, limit in {"train": train, "dev": 200, "test": 500}.items():
        pairs = read_pairs(tj.PairsConfig("numbers", split=split, limit=limit))
        for language, lines in zip(("en", "de"), zip(*pairs), strict=True):
            path = folder / f"{split}.{language}"
            path.write_text("".join(f"{line}\n" for line in lines))
            print(f"{path}: {len(lines):,} lines, such as {lines[0]!r}")


if __name__ == "__main__":
    tyro.cli(main)
