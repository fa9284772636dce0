"""Choice of the engine: CTranslate2 if it can do what is asked, with an export that is current."""

from __future__ import annotations

import dataclasses
import logging
import sys
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from random_models import lines_of_words, make_model, train_tokenizer

from transformer_jax.decoding.ensemble import Ensemble
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.pretrained import ctranslate2_cache
from transformer_jax.settings.config import Config, DecodingConfig, ModelConfig
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.translation import engine_choice
from transformer_jax.translation.ctranslate2_engine import CTranslate2Engine
from transformer_jax.translation.engine_choice import choose_engine
from transformer_jax.translation.translator import Translator

LINES = lines_of_words(20)
CONFIG = DecodingConfig(beam_size=3, max_extra_length=10, max_source_length=24, batch_size=4)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(LINES)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Transformer:
    return make_model(tokenizer)


@pytest.fixture
def choose(tmp_path, tokenizer, model, caplog):
    """``choose(name, **changes)``: the engine, and the log messages."""

    def chosen(name: str = "auto", **changes: Any) -> tuple[Any, str]:
        caplog.clear()
        arguments = {"model": model, "tokenizer": tokenizer, "config": CONFIG, "jax_only": ""}
        arguments |= changes
        with caplog.at_level(logging.INFO):
            found = choose_engine(
                *(name, tmp_path, arguments["model"], arguments["tokenizer"], arguments["config"]),
                jax_only=arguments["jax_only"],
            )
        return found, caplog.text

    return chosen


def translations(engine: Any, model: Transformer, tokenizer: Tokenizer) -> list[str]:
    return Translator(model, tokenizer, CONFIG, ctranslate2=engine).translate(LINES)


def test_on_a_cpu_ctranslate2_searches_with_an_export_beside_the_model(
    choose, model, tokenizer, tmp_path
) -> None:
    engine, messages = choose()
    assert "there is no export yet" in messages and "Engine ctranslate2, in float32" in messages
    file = tmp_path / ".ctranslate2" / "float32" / "model.bin"
    before = file.stat().st_mtime_ns
    again, messages = choose()
    assert "Exporting" not in messages and file.stat().st_mtime_ns == before
    found = translations(engine, model, tokenizer)
    assert found == translations(again, model, tokenizer)
    assert len(set(found)) > 3


def test_each_type_of_weights_has_an_export(choose, model, tokenizer, tmp_path) -> None:
    """In int8, it is smaller, and has the outputs of float32 weights that are quantized later."""
    choose()
    int8 = dataclasses.replace(CONFIG, weights="int8")
    engine, messages = choose(config=int8)
    assert "there is no export yet" in messages and "Engine ctranslate2, in int8" in messages
    assert "Exporting" not in choose()[1] and "Exporting" not in choose(config=int8)[1]
    folder = tmp_path / ".ctranslate2"
    sizes = {name: (folder / name / "model.bin").stat().st_size for name in ("float32", "int8")}
    assert sizes["int8"] < sizes["float32"]
    quantized_later = CTranslate2Engine(
        folder / "float32", Config(model=model.config, decoding=int8), tokenizer
    )
    assert translations(engine, model, tokenizer) == translations(quantized_later, model, tokenizer)


def test_jax_is_chosen_without_a_word(choose) -> None:
    assert choose("jax") == (None, "")


def test_an_export_is_replaced_if_it_is_stale_or_corrupt(
    choose, model, tokenizer, tmp_path, monkeypatch
) -> None:
    first, _ = choose()
    folder = tmp_path / ".ctranslate2" / "float32"
    other = make_model(tokenizer, seed=3)
    changed, messages = choose(model=other)
    assert "has changed" in messages
    assert translations(changed, other, tokenizer) != translations(first, model, tokenizer)
    choose()
    content = bytearray((folder / "model.bin").read_bytes())
    content[-100] ^= 1
    (folder / "model.bin").write_bytes(content)
    _, messages = choose()
    assert "the export is corrupt" in messages
    (folder / "config.json").unlink()
    _, messages = choose()
    assert "the export is corrupt" in messages
    (folder / "manifest.json").write_text("{")
    assert "there is no export yet" in choose()[1]
    (folder / "manifest.json").unlink()  # as a killed process leaves it
    repaired, messages = choose()
    assert "there is no export yet" in messages
    assert translations(repaired, model, tokenizer) == translations(first, model, tokenizer)
    respelled = train_tokenizer([line.replace("one", "uno") for line in LINES])
    assert respelled.target.vocab_size == tokenizer.target.vocab_size
    assert "has changed" in choose(tokenizer=respelled)[1]
    assert "has changed" in choose()[1]
    longer = dataclasses.replace(CONFIG, max_source_length=3000)  # needs more positions
    assert "has changed" in choose(config=longer)[1]
    versions = {"transformer-jax": "0.1", "ctranslate2": "4.0"}
    monkeypatch.setattr(ctranslate2_cache.importlib.metadata, "version", versions.__getitem__)
    choose()
    versions["ctranslate2"] = "4.1"
    assert "has changed" in choose()[1]


def test_an_export_of_a_read_only_folder_is_in_the_cache(choose, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / ".ctranslate2").write_text("no folder can have this name")
    assert choose()[0]
    assert [*(tmp_path / "cache").rglob("model.bin")]
    assert "Exporting" not in choose()[1]


def test_what_ctranslate2_cannot_do_is_done_by_jax(choose, model, tokenizer, monkeypatch) -> None:
    """The log says why. If CTranslate2 was asked for, it is an error that names JAX."""
    uneven = make_model(tokenizer, d_k=4)
    broken = make_model(tokenizer)
    broken.softmax_matrix[...] = broken.softmax_matrix[...].at[0, 0].set(float("nan"))
    sample = dataclasses.replace(CONFIG, method="sample")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"jax_only": "--glossary works"}, "--glossary works only with JAX."),
        ({"config": sample}, "decoding.method is 'sample'; expected 'beam'"),
        ({"model": Ensemble([model, model])}, "CTranslate2 has no ensembles"),
        ({"model": uneven}, "model.d_v is 8; expected 4, as model.d_k"),
        ({"model": broken}, "1 NaN or infinite values in softmax_matrix"),
    ]
    for changes, reason in cases:
        engine, messages = choose(**changes)
        assert engine is None and "Engine jax. " in messages and reason in messages
        with pytest.raises(UserError) as raised:
            choose("ctranslate2", **changes)
        message = str(raised.value)
        assert message.startswith("--engine ctranslate2: ") and reason in message
        assert message.endswith("Or use --engine jax.") and "\n" not in message


def test_an_export_that_fails_is_a_reason(choose, monkeypatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ctranslate2_cache, "export_ctranslate2", fail)
    engine, messages = choose()
    assert engine is None and "failed: [Errno 28] No space left on device" in messages
    with pytest.raises(UserError, match=r"No space left on device. Or use --engine jax."):
        choose("ctranslate2")
    monkeypatch.undo()
    assert choose()[0]


def test_other_machines(choose, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    engine, messages = choose()
    assert engine is None and "Engine jax. ctranslate2 is not installed. Install it" in messages
    with pytest.raises(UserError, match="ctranslate2 is not installed"):
        choose("ctranslate2")
    monkeypatch.undo()
    monkeypatch.setattr(engine_choice, "jax", SimpleNamespace(default_backend=lambda: "gpu"))
    engine, messages = choose()
    assert engine is None and "Engine jax. JAX has a GPU." in messages
    assert choose("ctranslate2")[0]


def test_terms_need_jax(choose, model, tokenizer) -> None:
    engine, _ = choose()
    with pytest.raises(UserError, match="The engine is ctranslate2; expected jax"):
        Translator(model, tokenizer, CONFIG, ctranslate2=engine, glossary={"one": "TWO"}).translate(
            ["one two"]
        )


def test_the_weights_of_our_search_are_not_cast_for_it(
    choose, model, tokenizer, monkeypatch
) -> None:
    engine, _ = choose()

    def fail(*_: Any) -> None:
        raise AssertionError("cast")

    monkeypatch.setattr("transformer_jax.decoding.engine.with_cast_weights", fail)
    devices = jax.devices()[:1] * 2
    translator = Translator(model, tokenizer, CONFIG, devices=devices, ctranslate2=engine)
    assert len(translator.translate(LINES)) == len(LINES)
    with pytest.raises(AssertionError, match="cast"):
        Translator(model, tokenizer, CONFIG).translate(LINES)


def test_new_parameters_are_searched_with_jax(choose, model, tokenizer) -> None:
    engine, _ = choose()
    translator = Translator(model, tokenizer, CONFIG, ctranslate2=engine)
    other = Translator(make_model(tokenizer, seed=3), tokenizer, CONFIG)
    translator.parameters = other.parameters
    assert translator.translate(LINES) == other.translate(LINES)


def test_every_activation_has_a_name_in_ctranslate2_or_is_refused(tokenizer) -> None:
    """And so has every other setting: exports never ignore one that they do not know."""
    from ctranslate2.specs.common_spec import Activation

    from transformer_jax.pretrained import ctranslate2 as export
    from transformer_jax.pretrained.export_files import _ANY_VALUE, check_fields

    assert set(export._ACTIVATIONS.values()) <= set(Activation.__members__)
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert fields >= _ANY_VALUE and set(export._SUPPORTED) <= fields - _ANY_VALUE
    unknown = make_model(tokenizer).config
    object.__setattr__(unknown, "activation", "mish")
    with pytest.raises(UserError, match="model.activation is 'mish'; expected 'relu' or 'gelu'"):
        check_fields(unknown, "CTranslate2", **export._SUPPORTED)
