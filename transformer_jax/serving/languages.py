"""Language pairs of the served models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from transformer_jax import UserError
from transformer_jax.errors import short_repr
from transformer_jax.serving.flags import Pair, normalize_code
from transformer_jax.serving.schema import Language

# Language pairs in an error message.
_MAX_PAIRS_SHOWN = 12


class LanguagePairs:
    """The language pairs that a service translates."""

    def __init__(self, pairs: Iterable[Pair]):
        self.pairs = list(pairs)
        self._pairs_to = defaultdict[str, list[Pair]](list)
        for pair in self.pairs:
            self._pairs_to[normalize_code(pair.target)].append(pair)

    def find(self, source: str, target: str) -> Pair:
        """Find the pair of two codes; ``source`` can be auto. Raises ``UserError`` if none or
        several match.
        """
        pairs = self._pairs_to.get(normalize_code(target), [])
        if normalize_code(source) != "auto":
            pairs = [
                pair for pair in pairs if normalize_code(pair.source) == normalize_code(source)
            ]
        if len(pairs) == 1:
            return pairs[0]
        expected = "a source language because several match:" if pairs else "one of"
        candidates = pairs or self.pairs
        shown = ", ".join(map(str, candidates[:_MAX_PAIRS_SHOWN]))
        if len(candidates) > _MAX_PAIRS_SHOWN:
            shown += ", ... (GET /languages lists all)"
        raise UserError(
            f"source is {short_repr(source)} and target is {short_repr(target)}; "
            f"expected {expected} {shown}."
        )

    def languages(self) -> list[Language]:
        """List all languages, each with its target languages."""
        targets = dict[str, list[str]]()
        for source, target in self.pairs:
            targets.setdefault(source, []).append(target)
            targets.setdefault(target, [])
        return [
            Language(code=code, name=code, targets=target_codes)
            for code, target_codes in targets.items()
        ]
