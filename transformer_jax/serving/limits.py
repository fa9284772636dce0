"""Limits of requests. docs/serving.md lists them."""

from __future__ import annotations

from typing import NamedTuple

from transformer_jax import UserError
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


class Limits(NamedTuple):
    """Limits that flags set."""

    max_queue: int
    """Sentences in progress, in all requests together; texts or sentences of a request."""
    max_characters: int
    """Characters of a request."""

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
            raise RequestRejected(
                503,
                f"{num_accepted} sentences are in progress and this request has "
                f"{num_sentences}; expected at most {self.max_queue} in total. Retry later.",
                limit=self.max_queue,
            )


def _check(limit: int, count: int, items: str) -> None:
    if count > limit:
        raise RequestRejected(
            413,
            f"The request has {count} {items}; expected at most {limit}. Split the request.",
            limit=limit,
        )
