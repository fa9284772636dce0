"""The service with CTranslate2 as its search."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import pytest
from servers import LINES, Server, serving, write_served_run

from transformer_jax.errors import UserError
from transformer_jax.serving.__main__ import _load
from transformer_jax.serving.flags import checked_flags
from transformer_jax.translation.scoring import Scorer
from transformer_jax.translation.translator import Translator

FLAGS = ["--languages", "en-de"]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory, translator: Translator) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_served_run(folder, translator)
    return folder


@pytest.fixture(scope="module")
def server(workdir: Path, translator: Translator) -> Iterator[Server]:
    """The service with its default flags."""
    service = _load(*checked_flags(["--workdir", str(workdir), *FLAGS]))
    service.start()
    try:
        with serving(service, translator) as found:
            yield found
    finally:
        service.close()


def export_of(workdir: Path) -> Path:
    return workdir / ".ctranslate2" / "float32"


def by_ctranslate2(server: Server, workdir: Path, lines: list[str], prefix: str = "") -> list[Any]:
    """The translations of CTranslate2 itself, with the exported settings."""
    folder = export_of(workdir)
    tokenizer = server.translator.tokenizer
    [start] = tokenizer.target.encode([prefix])
    settings = json.loads((folder / "generation_config.json").read_text())
    results = ctranslate2.Translator(str(folder)).translate_batch(
        [tokenizer.source.tokens(ids) for ids in tokenizer.source.encode(lines)],
        target_prefix=[tokenizer.target.tokens(start)] * len(lines) if prefix else None,
        num_hypotheses=2,
        **settings,
    )
    target = tokenizer.target
    return [[target.decode(target.ids(x)) for x in result.hypotheses] for result in results]


def test_responses_are_those_of_ctranslate2_and_of_its_file_translation(server, workdir) -> None:
    assert server.request("GET", "/health").json == {"status": "ok", "engine": "ctranslate2"}
    expected = by_ctranslate2(server, workdir, LINES)
    with ThreadPoolExecutor(16) as clients:
        replies = list(clients.map(lambda line: server.ask(q=line, alternatives=1), LINES))
    for reply, translations in zip(replies, expected, strict=True):
        assert reply.status == 200, reply.body
        found = [reply.json["translatedText"], *reply.json["alternatives"]]
        assert found == translations
    from_file = Translator.from_workdir(workdir, engine="ctranslate2").translate(LINES)
    assert from_file == [best for best, _ in expected]
    [[best, _]] = by_ctranslate2(server, workdir, LINES[:1], prefix="nine")
    reply = server.ask(q=LINES[0], prefix="nine", split=False)
    assert reply.json == {"translatedText": best}
    assert server.is_idle()


def test_a_second_start_does_nothing(server) -> None:
    [model] = server.service.models.values()
    before = list(model.workers._threads)
    model.workers.start()
    assert model.workers._threads == before


def test_log_probabilities_are_those_of_the_model(server, workdir) -> None:
    """With attention, our model also scores the tokens."""
    translator = server.translator
    settings = json.loads((export_of(workdir) / "generation_config.json").read_text())
    limit = settings["max_decoding_length"]
    tokenizer = translator.tokenizer
    scorer = Scorer(translator.model, tokenizer, translator.config)
    for line in LINES[:8]:
        [[sentence]] = server.ask(q=line, details=True).json["sentences"]
        *tokens, _ = sentence["tokens"]
        assert sentence["token_scores"] == []
        target = tokenizer.target.ids(tokens)
        [log_probs_L] = scorer.score_tokens([(tokenizer.source.encode([line])[0], target)])
        expected_L = log_probs_L
        if len(expected_L) == limit + 1:  # EOS is free at CTranslate2's limit
            expected_L = expected_L[:-1]
        # CTranslate2 renormalizes without PAD, whose probability is high in a random model.
        assert sentence["log_prob"] == pytest.approx(expected_L.sum(), rel=0.02)
        [[attended]] = server.ask(q=line, attention=True).json["sentences"]
        assert attended["translation"] == sentence["translation"]
        np.testing.assert_allclose(attended["token_scores"], log_probs_L, atol=1e-3)
        assert len(attended["alignment"]) == len(tokens) + 1


def test_glossaries_need_jax(workdir) -> None:
    flags = ["--workdir", str(workdir), *FLAGS, "--max-terms", "1"]
    assert _load(*checked_flags(flags)).engine == "jax"
    with pytest.raises(UserError, match=r"\(--max-terms\) work only with JAX"):
        _load(*checked_flags([*flags, "--engine", "ctranslate2"]))


def test_search_flags_apply(workdir) -> None:
    before = json.loads((export_of(workdir) / "generation_config.json").read_text())
    flags = ["--beam-size", "2", "--patience", "1", "--max-length", "5", "--suppress", "O"]
    service = _load(*checked_flags(["--workdir", str(workdir), *FLAGS, *flags]))
    [model] = service.models.values()
    assert model.translator.ctranslate2.search_settings == before | {
        **{"beam_size": 2, "patience": 1.0, "max_decoding_length": 5},
        "suppress_sequences": [["<pad>"], ["O"]],
    }
