"""Tags at the beginning of a line, such as ``<2de>`` or ``>>deu<<``, that name its target language.

A model with such tags translates a line without a tag, or with an unknown one, into whichever
language it likes, so the first such line gets a warning.
"""

from __future__ import annotations

import logging
import re
from functools import cached_property

from transformer_jax.errors import short_repr
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.translation.requests import Request

logger = logging.getLogger(__name__)

_TAG = re.compile(r"\s*(>>[^<>\s]*<<|<2[^<>\s]*>)")
# Tags in a message.
_MAX_SHOWN = 8


class TagCheck:
    """Warns of the first line without a tag, and of the first one with an unknown tag."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._warned = set[str]()

    @cached_property
    def tags(self) -> list[str]:
        """The model's tags; empty if it has fewer than two, because then a line needs none."""
        source = self._tokenizer.source
        tokens = source.tokens(range(source.vocab_size))
        tags = [token for token in tokens if _TAG.fullmatch(token)]
        return tags if len(tags) > 1 else []

    def check(self, request: Request) -> None:
        """Log a warning if the request's text needs a known tag and has none."""
        source = request.affixes(self._tokenizer).before_source
        if source or not self.tags or not request.text.strip():
            return  # the language is chosen in another way
        tag = _TAG.match(request.text)
        if tag and tag[1] in self.tags:
            return
        kind = "unknown" if tag else "missing"
        if kind in self._warned:
            return
        self._warned.add(kind)
        problem = "has no tag for the target language"
        if tag:
            problem = f"has the unknown tag {short_repr(tag[1])}"
        known = ", ".join(self.tags[:_MAX_SHOWN])
        if len(self.tags) > _MAX_SHOWN:
            known += ", ..."
        message = "%s %s, so the model chooses the language; expected one of: %s. "
        message += "Further lines like it are not reported."
        logger.warning(message, request.name, problem, known)
