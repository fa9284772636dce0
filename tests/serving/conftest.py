"""A server shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from random_models import make_model, train_tokenizer
from servers import CONFIG, LINES, Server, make_model_to_serve, serving

from transformer_jax.serving.flags import Pair
from transformer_jax.serving.limits import Limits
from transformer_jax.serving.service import Service
from transformer_jax.translation.translator import Translator


@pytest.fixture(scope="session")
def translator() -> Translator:
    """The reference for a server's responses."""
    tokenizer = train_tokenizer(LINES)
    return Translator(make_model(tokenizer), tokenizer, CONFIG)


@pytest.fixture(scope="session")
def server(translator: Translator) -> Iterator[Server]:
    """A server for en-de."""
    models = {Pair("en", "de"): make_model_to_serve(translator)}
    service = Service(models, Limits(100, 2000))
    with serving(service, translator) as found:
        yield found
