"""Adapter for tokenizer.json files of pretrained models, read by the ``tokenizers`` library."""

from __future__ import annotations

from collections.abc import Sequence

from transformer_jax.errors import UserError, needs_extra


class RustTokenizer:
    """A tokenizer.json file, with the methods of a ``SentencePieceProcessor`` that we call.

    Added tokens that are written in the text, such as ``<extra_id_0>``, are tokens.
    """

    def __init__(self, content: bytes) -> None:
        with needs_extra("pretrained"):
            import tokenizers
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises Exception itself
            raise UserError(
                f"tokenizer.json is corrupt or too new ({error}); download it again or upgrade "
                "the tokenizers package."
            ) from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # ``Encoding.tokens`` would be the text of unknown tokens, and spaces beside added ones.
        self._token_of = {i: token for token, i in self.ids.items()}

    @property
    def ids(self) -> dict[str, int]:
        """Tokens and their ids in the file."""
        return self._tokenizer.get_vocab()

    def encode(self, texts: Sequence[str], **_: object) -> list[list[str]]:
        """Split each text into tokens, without special tokens."""
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [[self._token_of[i] for i in encoding.ids] for encoding in found]

    def decode(self, tokens: Sequence[str]) -> str:
        """Join tokens into text, without special tokens."""
        ids = [self._tokenizer.token_to_id(token) for token in tokens]
        return self._tokenizer.decode([i for i in ids if i is not None])
