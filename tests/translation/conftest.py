"""The random model of tests/decoding."""

from tests.decoding.conftest import model, tokenizer

__all__ = ["model", "tokenizer"]
