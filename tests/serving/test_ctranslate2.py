"""The service with CTranslate2 as its search."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ctranslate2
import pytest
from servers import LINES, Server, serving, write_served_run

from transformer_jax.errors import UserError
from transformer_jax.export.ctranslate2 import export_ctranslate2
from transformer_jax.pretrained.loading import load_model
from transformer_jax.serving.__main__ import _load
from transformer_jax.serving.flags import checked_flags
from transformer_jax.translation.scoring import Scorer

FLAGS = ["--languages", "en-de", "--engine", "ctranslate2"]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, translator) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_served_run(folder, translator)
    (folder / "ctranslate2").mkdir()
    export_ctranslate2(*load_model(folder), folder / "ctranslate2")
    return folder


@pytest.fixture(scope="module")
def server(workdir, translator) -> Iterator[Server]:
    service = _load(*checked_flags(["--workdir", str(workdir), *FLAGS]))
    service.start()
    try:
        with serving(service, translator) as found:
            yield found
    finally:
        service.close()


def by_ctranslate2(server: Server, workdir: Path, lines: list[str], prefix: str = "") -> list[Any]:
    """The translations of CTranslate2 itself, with the exported settings."""
    folder, tokenizer = workdir / "ctranslate2", server.translator.tokenizer
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


def test_responses_are_those_of_ctranslate2(server, workdir) -> None:
    expected = by_ctranslate2(server, workdir, LINES)
    with ThreadPoolExecutor(16) as clients:
        replies = list(clients.map(lambda line: server.ask(q=line, alternatives=1), LINES))
    for reply, translations in zip(replies, expected, strict=True):
        assert reply.status == 200, reply.body
        found = [reply.json["translatedText"], *reply.json["alternatives"]]
        assert found == translations
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
    translator = server.translator
    settings = json.loads((workdir / "ctranslate2" / "generation_config.json").read_text())
    limit = settings["max_decoding_length"]
    tokenizer = translator.tokenizer
    scorer = Scorer(translator.model, tokenizer, translator.config)
    for line in LINES[:8]:
        [[sentence]] = server.ask(q=line, details=True).json["sentences"]
        *tokens, _ = sentence["tokens"]
        target = tokenizer.target.ids(tokens)
        [expected_L] = scorer.score_tokens([(tokenizer.source.encode([line])[0], target)])
        if len(expected_L) == limit + 1:  # EOS is free at CTranslate2's limit
            expected_L = expected_L[:-1]
        # CTranslate2 renormalizes without PAD, whose probability is high in a random model.
        assert sentence["log_prob"] == pytest.approx(expected_L.sum(), rel=0.02)


def test_an_export_is_needed(workdir, tmp_path, translator) -> None:
    write_served_run(tmp_path, translator)
    with pytest.raises(UserError, match="transformer_jax.export .* --format ctranslate2"):
        _load(*checked_flags(["--workdir", str(tmp_path), *FLAGS]))
    flags = ["--workdir", str(workdir), *FLAGS]
    with pytest.raises(UserError, match="'sample', which --engine ctranslate2 does not support"):
        _load(*checked_flags([*flags, "--method", "sample"]))
    with pytest.raises(UserError, match=r"can have \(50, 60\) source and target.* most \(24, 34\)"):
        _load(*checked_flags([*flags, "--max-source-length", "50"]))


def test_search_flags_apply(workdir) -> None:
    before = json.loads((workdir / "ctranslate2" / "generation_config.json").read_text())
    flags = ["--beam-size", "2", "--patience", "1", "--max-length", "5", "--suppress", "O"]
    service = _load(*checked_flags(["--workdir", str(workdir), *FLAGS, *flags]))
    [model] = service.models.values()
    [batch] = model.workers.schedulers[0].batches
    assert batch.model.search_settings == before | {
        **{"beam_size": 2, "patience": 1.0, "max_decoding_length": 5},
        "suppress_sequences": [["<pad>"], ["O"]],
    }
