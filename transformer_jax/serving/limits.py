"""Limits of requests, and the flags that set them. docs/serving.md lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformer_jax import UserError
from transformer_jax.settings.checks import PositiveFloat, PositiveInt, Section

if TYPE_CHECKING:
    from transformer_jax.serving.rejected import RequestRejected
    from transformer_jax.serving.schema import Query

HEADER_TIMEOUT = 30.0
"""Seconds in which a client sends its headers."""

MAX_ALIGNED_SENTENCE_TOKENS = 256
"""Source tokens of a sentence whose attention is returned. Attention grows quadratically."""

MAX_ALIGNED_REQUEST_TOKENS = 4096
"""Source tokens of a request whose attention is returned."""

_BYTES_PER_CHARACTER = 12  # at most: \ud83d\ude00 in JSON, %F0%9F%98%80 in a form
_OTHER_BYTES = 10_000


@dataclass(frozen=True)
class Limits(Section, prefix="--"):
    """Limits that flags of transformer-serve set."""

    max_queue: PositiveInt = 1024
    """Maximum number of sentences in progress. Requests beyond this limit get status 503; a single
    request with more sentences gets 413. A sentence longer than ``max_source_length`` counts once
    per segment."""
    max_characters: PositiveInt = 20_000
    """Maximum number of characters in a request; longer requests get status 413."""
    timeout: PositiveFloat = 60.0
    """Maximum number of seconds from the start of a request to its response; slower requests get
    status 503."""

    @property
    def max_body_bytes(self) -> int:
        """Size of a request's body."""
        return self.max_characters * _BYTES_PER_CHARACTER + _OTHER_BYTES

    def check_query(self, query: Query, beam_size: int) -> None:
        """Check what a query asks for, before it is divided into sentences.

        Raises:
          UserError: it asks for too many alternatives.
          RequestRejected: it has too many characters or texts.
        """
        if query.alternatives >= beam_size:
            raise UserError(
                f"alternatives is {query.alternatives}; expected at most {beam_size - 1}, "
                "one less than this server's beam size."
            )
        _check(self.max_characters, query.num_characters, "characters")
        _check(self.max_queue, len(query.texts), "texts")

    def check_queue(self, num_accepted: int, num_sentences: int) -> None:
        """Raise ``RequestRejected`` if a request with so many sentences is too large, or if too
        many others are in progress.
        """
        _check(self.max_queue, num_sentences, "sentences")
        if num_accepted + num_sentences > self.max_queue:
            message = (
                f"{num_accepted} sentences are in progress and this request has "
                f"{num_sentences}; expected at most {self.max_queue} in total. Retry later."
            )
            raise _rejected(503, message, self.max_queue)


def _check(limit: int, count: int, items: str) -> None:
    if count > limit:
        message = f"The request has {count} {items}; expected at most {limit}. Split the request."
        raise _rejected(413, message, limit)


def _rejected(status: int, message: str, limit: int) -> RequestRejected:
    # Imported late, so that --help does not need the web framework.
    from transformer_jax.serving.rejected import RequestRejected

    return RequestRejected(status, message, limit=limit)
