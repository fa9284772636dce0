"""New pieces (subwords) for a pretrained model: read from a file, or learned from text.

Learned pieces are merges of old ones, as if the training of BPE went on: a word is first split as
before, and then its parts are merged. Pieces of a vocabulary that is trained separately would often
never be chosen, because merges of the old vocabulary come first (Purason et al., 2025).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from transformer_jax.errors import UserError, short_repr
from transformer_jax.tokenization.learning import learn_merges
from transformer_jax.tokenization.segmenters import Segmenter, can_choose

logger = logging.getLogger(__name__)

# Characters that stand for pieces: Unicode's planes for private use, without their last two.
_STAND_INS = [chr(code) for code in (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))]


def read_pieces(file: Path) -> list[str]:
    """Read a file with one piece per line, spelled as in a vocabulary (▁ is a space).

    Raises ``UserError`` if the file is missing or empty, or names the line that is no piece.
    """
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"tokenizer.new_pieces is {str(file)!r}, which cannot be read ({error}); expected a "
            "number, or a text file in UTF-8 with one piece per line."
        ) from None
    pieces: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        is_piece = line.split() == [line] and "▁" not in line[1:-1] and line.strip("▁")
        if line and (not is_piece or line in pieces):
            reason = f"as in line {pieces[line]}" if is_piece else "with a space, or without text"
            raise UserError(
                f"{str(file)!r}, line {number} is {short_repr(line)}, a piece {reason}; expected "
                "different pieces, spelled as in a vocabulary (▁ is a space before a word)."
            )
        if line:
            pieces[line] = number
    if not pieces:
        raise UserError(f"{str(file)!r} is empty; expected one piece per line.")
    return [*pieces]


def learn_pieces(
    segmenter: Segmenter,
    lines: Iterable[str],
    other_lines: Iterable[str],
    limit: int,
) -> list[str]:
    """Learn at most ``limit`` pieces for the text in ``lines``: the characters that the segmenter
    does not know, by frequency, and merges of its pieces.

    Pieces that would be chosen in ``other_lines``, in other languages, are left out, so these are
    split as before. Raises ``UserError`` if the text is too small for as many pieces.
    """
    known_pieces = segmenter.ids.keys()
    word_counts = Counter(word for line in lines for word in segmenter.words(line))
    new_characters = Counter[str]()
    parts_of_words = {}
    for word, count in word_counts.items():
        parts = segmenter.parts(word)
        parts_of_words[word] = parts
        for part in parts:
            if part not in known_pieces:
                new_characters[part] += count
    pieces = [character for character, _ in new_characters.most_common(limit)]
    if limit > len(new_characters):
        all_parts = dict.fromkeys(part for parts in parts_of_words.values() for part in parts)
        stand_ins = dict(zip(all_parts, _STAND_INS))
        part_of = {character: part for part, character in stand_ins.items()}
        counts = Counter[str]()
        for word, parts in parts_of_words.items():
            if all(part in stand_ins for part in parts):
                counts["".join(stand_ins[part] for part in parts)] += word_counts[word]
        merges = learn_merges(counts, limit - len(pieces))
        pieces += ["".join(part_of[character] for character in merge) for merge in merges]
    new_pieces = [piece for piece in dict.fromkeys(pieces) if piece not in known_pieces]
    other_words = {word for line in other_lines for word in segmenter.words(line)}
    pieces = _without_conflicts(segmenter, new_pieces, other_words)
    if not pieces:
        raise UserError(
            f"tokenizer.new_pieces is {limit}, but all pieces of the training text in the new "
            "language are in the vocabulary or occur in the other languages; expected ''."
        )
    message = "Learned %d new pieces of %d; those that other languages would use are left out."
    logger.info(message, len(pieces), limit)
    return pieces


def _without_conflicts(segmenter: Segmenter, pieces: list[str], other_words: set[str]) -> list[str]:
    """Leave out pieces that would be chosen in ``other_words``, and those that are never chosen
    because their own parts were left out.
    """
    while pieces:
        new_segmenter = segmenter.with_pieces(pieces)
        conflicting = {part for word in other_words for part in new_segmenter.parts(word)}
        remaining = [
            piece
            for piece in pieces
            if piece not in conflicting and can_choose(new_segmenter, piece)
        ]
        if len(remaining) == len(pieces):
            break
        pieces = remaining
    return pieces
