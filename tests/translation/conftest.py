"""A random model shared by the tests of this folder."""

from __future__ import annotations

import pytest
from random_models import lines_of_words, make_model, train_tokenizer

from transformer_jax.model.transformer import Transformer
from transformer_jax.tokenization.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer(lines_of_words(23))


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> Transformer:
    return make_model(tokenizer)
