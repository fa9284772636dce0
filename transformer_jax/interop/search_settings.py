"""What exported search settings have in common: the limits of lengths, and what is said of those
that cannot travel.
"""

from __future__ import annotations

from transformer_jax.config import Config


def length_limits(config: Config) -> tuple[int, int]:
    """The longest source and the longest translation in pieces, end symbols included, that decoding
    here allows.
    """
    source = config.decoding.max_source_length
    target = source + config.decoding.max_extra_length
    if config.model.positions == "learned":
        return min(source, config.model.max_positions), min(target, config.model.max_positions)
    return source, target


def search_notes(
    config: Config, library: str, *, limit: str = "", long_lines: str = "cuts them off"
) -> list[str]:
    """Where the search of ``library`` cannot be that of ours, though it gets the same settings.

    ``limit``: the limit of a translation's length there, in words, if it is not a number of pieces.
    ``long_lines``: what becomes of too long a source there.
    """
    decoding = config.decoding
    longest_source, longest_target = length_limits(config)
    limit = limit or f"{longest_target} pieces"
    notes = [
        f"translations end at {limit} at the latest in {library}, at source length + {decoding.max_extra_length} here.",
        f"lines of more than {longest_source} pieces are translated in parts here; {library} {long_lines}.",
    ]
    if decoding.length_penalty and decoding.length_offset and decoding.beam_size > 1:
        c, alpha = decoding.length_offset, f"{decoding.length_penalty:g}"
        notes.append(
            f"{library} divides log P by length^{alpha}, decoding here by (({c:g} + length) / {c + 1:g})^{alpha}: hypotheses "
            "of different lengths may rank otherwise. decoding.length_offset 0 is what it does."
        )
    if decoding.length_penalty and decoding.beam_size > 1:
        notes.append(
            f"{library} may end a search while a longer translation could still score better; decoding here goes on until "
            "none can."
        )
    if decoding.method == "sample":
        notes.append(
            f"decoding.method is 'sample', which is left out: {library} is set up for beam search."
        )
    if decoding.repetition_penalty != 1:
        notes.append(
            "decoding.repetition_penalty is left out: it works on logits there, on log-probabilities here."
        )
    if decoding.shortlist:
        notes.append(
            "decoding.shortlist is left out: its file is of another format, and works in this library only."
        )
    if decoding.coverage_penalty:
        notes.append(f"decoding.coverage_penalty is left out: {library} has none, or another one.")
    return notes
