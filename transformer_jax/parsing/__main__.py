"""Constituency parsing as translation (section 6.3): convert between trees and text.

    python -m transformer_jax.parsing prepare --trees wsj/22/*.mrg --output data/wsj/dev
    python decode.py --workdir W --input data/wsj/dev.words --output dev.sequences
    python -m transformer_jax.parsing restore --words data/wsj/dev.words \\
        --sequences dev.sequences --output dev.mrg
    python -m transformer_jax.parsing score --gold data/wsj/dev.mrg --parses dev.mrg
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from transformer_jax import UserError, parse_flags, read_lines, run_program
from transformer_jax.parsing.bracketing import bracket_score
from transformer_jax.parsing.trees import (
    from_sequence,
    read_parses,
    with_numbers,
    without_numbers,
)
from transformer_jax.storage.files import check_not_input, write_atomically


@dataclass(frozen=True)
class Prepare:
    """Write OUTPUT.words and OUTPUT.sequences, the source and target text for train.py, and
    OUTPUT.mrg, the cleaned trees.
    """

    trees: tuple[str, ...]
    """Treebank files in Penn format, optionally compressed (.gz)."""
    output: str
    """Output path without suffix. Missing folders are created."""
    numbered: bool = False
    """Number the words (`#0 It #1 barks`), and write each word's number and part of speech
    (`#0 PRP`) instead of XX in the sequence. A model then needs fewer trees to learn to attend to
    each word."""

    def run(self) -> None:
        """Write the three files, and a summary to stderr."""
        parses = [parse for file in self.trees for parse in read_parses(file)]
        if not parses:
            raise UserError(
                f"No trees found in {' '.join(self.trees)}; expected trees in Penn format."
            )
        stem = Path(self.output)
        sources = [with_numbers(parse.words) if self.numbered else parse.words for parse in parses]
        outputs = {
            "words": [" ".join(tokens) for tokens in sources],
            "sequences": [parse.sequence(numbered=self.numbered) for parse in parses],
            "mrg": [str(parse) for parse in parses],
        }
        for ending in outputs:
            check_not_input(f"{stem}.{ending}", *self.trees)
        stem.parent.mkdir(parents=True, exist_ok=True)
        for ending, lines in outputs.items():
            write_atomically(Path(f"{stem}.{ending}"), "\n".join([*lines, ""]))
        num_words = sum(len(parse.words) for parse in parses)
        message = f"{stem}.words, .sequences and .mrg: {len(parses)} trees with {num_words} words."
        print(message, file=sys.stderr)


@dataclass(frozen=True)
class Restore:
    """Convert the output of decode.py to trees, one per line."""

    words: str
    """Input file of decode.py."""
    sequences: str
    """Output file of decode.py."""
    output: str | None = None
    """File to write. Default: stdout."""

    def run(self) -> None:
        """Write the trees, and a summary to stderr."""
        trees = list[str]()
        malformed = 0
        for words, sequence in zip_longest(read_lines(self.words), read_lines(self.sequences)):
            if words is None or sequence is None:
                short = self.words if words is None else self.sequences
                raise UserError(
                    f"{short} ends after {len(trees)} lines; expected the same number of lines in "
                    f"{self.words} and {self.sequences}."
                )
            parse, well_formed = from_sequence(without_numbers(words.split()), sequence)
            malformed += not well_formed
            trees.append(f"{parse}\n")
        if self.output is None:
            sys.stdout.writelines(trees)
            sys.stdout.flush()
        else:
            Path(self.output).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(Path(self.output), "".join(trees))
        print(f"{len(trees)} trees, {malformed} from malformed sequences.", file=sys.stderr)


@dataclass(frozen=True)
class Score:
    """Print labeled bracket F1, precision and recall. EVALB with Collins' parameters gives the same
    scores.
    """

    gold: str
    """File with gold trees."""
    parses: str
    """File with trees to score, for the same sentences."""

    def run(self) -> None:
        """Print the scores."""
        print(bracket_score(read_parses(self.gold), read_parses(self.parses)))


def main(argv: list[str] | None = None) -> int:
    """Run the program. Returns the exit status (see ``run_program``)."""
    tasks: Any = Prepare | Restore | Score
    return run_program(lambda: parse_flags(tasks, argv).run())


if __name__ == "__main__":
    sys.exit(main())
