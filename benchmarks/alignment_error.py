"""Alignment error rate (AER; Och and Ney, 2003) of the word alignments of given pairs of lines.

    python decode.py --workdir W --input benchmarks/captions.en --alignments hard \
        --score-targets benchmarks/captions.de \
        | python benchmarks/alignment_error.py --gold benchmarks/captions.links

Reads Pharaoh lines, such as 0-0 1-2, or output lines of decode.py, which end with one. In the file
of correct alignments, i-j is a sure link and i?j is a possible link: right, but not required.
captions.* are 20 pairs in the style of Multi30k, written and aligned by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformer_jax import UserError, read_lines, run_program


class Errors(NamedTuple):
    """Alignment error rate, precision and recall of links, as fractions."""

    rate: float
    precision: float
    recall: float


def alignment_error(predicted: Iterable[str], gold: Iterable[str]) -> Errors:
    """Compare lines of links with the correct ones. Raises ``UserError`` for different numbers of
    lines.
    """
    predicted = list(predicted)
    gold = list(gold)
    if len(predicted) != len(gold):
        raise UserError(
            f"There are {len(predicted)} lines of links; expected {len(gold)}, as in gold."
        )
    links = sure_links = right_sure = right = 0
    for line, correct in zip(predicted, gold):
        predicted_links = set(line.rpartition("|||")[2].split())
        sure = {link for link in correct.split() if "-" in link}
        possible = sure | {link.replace("?", "-") for link in correct.split()}
        links += len(predicted_links)
        sure_links += len(sure)
        right_sure += len(predicted_links & sure)
        right += len(predicted_links & possible)
    rate = 1 - (right_sure + right) / max(1, links + sure_links)
    return Errors(rate, right / max(1, links), right_sure / max(1, sure_links))


def main(gold: str, links: str = "") -> None:
    """``gold``: file of correct alignments. ``links``: file to compare; "": standard input."""
    predicted = read_lines(links or sys.stdin.buffer)
    errors = alignment_error(predicted, read_lines(gold))
    print(
        f"AER {errors.rate:.1%}, precision {errors.precision:.1%} of the links, recall "
        f"{errors.recall:.1%} of the sure links"
    )


if __name__ == "__main__":
    raise SystemExit(run_program(lambda: tyro.cli(main)))
