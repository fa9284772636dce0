"""Packages for Argos Translate: contents, translations as in CTranslate2, and refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ctranslate2
import pytest
import sentencepiece

from transformer_jax import Config, PairsConfig, Tokenizer, TokenizerConfig, save_model
from transformer_jax.export.__main__ import main

NAMES = ["en", "English", "de", "Deutsch (Größe)"]
FOLDER = "translate-en_de"
# Argos Translate's search settings.
SEARCH: dict[str, Any] = {"beam_size": 4, "length_penalty": 0.2, "replace_unknowns": True}


@pytest.fixture
def exported(make, tmp_path, capsys) -> Callable[..., tuple[int, str]]:
    """``exported(vocabulary, flags, **changes of Config)``: exit status and stderr."""

    def run(vocabulary: Tokenizer, flags: list[str], **changes: Any) -> tuple[int, str]:
        ties = "all" if vocabulary.joint else "target"
        config, model = make(vocabulary, 15, softmax_bias=True, num_layers=1, tie_embeddings=ties)
        save_model(tmp_path / "model", dataclasses.replace(config, **changes), model, vocabulary)
        command = ["--workdir", str(tmp_path / "model"), "--format", "argos"]
        status = main([*command, "--output", str(tmp_path / "out"), *flags])
        return status, capsys.readouterr().err

    return run


def unpacked(folder: Path) -> Path:
    [file] = folder.iterdir()
    assert file.name == f"{FOLDER}.argosmodel"
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder.parent / "unpacked")
    [package] = (folder.parent / "unpacked").iterdir()
    assert package.name == FOLDER
    return package


def test_the_package_translates_as_the_model_does(exported, joint, lines, tmp_path) -> None:
    """By CTranslate2 and SentencePiece, with the files where Argos Translate looks for them."""
    (tmp_path / "en.onnx").write_bytes(b"a sentence model")
    flags = ["--sentence-model", str(tmp_path / "en.onnx")]
    status, said = exported(joint, ["--languages", *NAMES, *flags])
    assert status == 0, said
    package = unpacked(tmp_path / "out")
    assert json.loads((package / "metadata.json").read_text()) == {
        **dict(zip(("from_code", "from_name", "to_code", "to_name"), NAMES, strict=True)),
        **{"package_version": "100.0", "argos_version": "1.9"},
    }
    assert {path.name for path in package.iterdir()} == {
        *("metadata.json", "README.md", "model", "sentencepiece.model", "minisbd"),
    }
    assert [path.read_bytes() for path in (package / "minisbd").iterdir()] == [b"a sentence model"]
    assert "language: ['en', 'de']" in (package / "README.md").read_text()
    pieces = sentencepiece.SentencePieceProcessor(str(package / "sentencepiece.model"))
    theirs = ctranslate2.Translator(str(package / "model"), inter_threads=1, intra_threads=1)
    found = theirs.translate_batch(pieces.encode(lines, out_type=str), **SEARCH)
    texts = [pieces.decode(result.hypotheses[0]) for result in found]
    command = ["--workdir", str(tmp_path / "model"), "--format", "ctranslate2"]
    assert main([*command, "--output", str(tmp_path / "plain")]) == 0
    plain = ctranslate2.Translator(str(tmp_path / "plain"), inter_threads=1, intra_threads=1)
    expected = plain.translate_batch(
        [joint.source.tokens(ids) for ids in joint.source.encode(lines)], **SEARCH
    )
    assert texts == [
        joint.target.decode(joint.target.ids(result.hypotheses[0])) for result in expected
    ]
    assert len(set(texts)) > 3


@pytest.mark.exhaustive
def test_argos_translate_runs_the_package(exported, joint, lines, tmp_path, monkeypatch) -> None:
    """Without its sentence splitter, whose models come from the network."""
    pytest.importorskip("minisbd")
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))  # read when the library is imported
    from argostranslate import package, sbd, translate

    class OneSentence:
        def __init__(self, language: str, **settings: Any) -> None:
            assert language == "en"

        def sentences(self, text: str) -> list[str]:
            return [text]

    monkeypatch.setattr(sbd, "SBDetect", OneSentence)
    assert exported(joint, ["--languages", *NAMES, "--quantization", "int8"])[0] == 0
    [file] = (tmp_path / "out").iterdir()
    package.install_from_path(file)
    [installed] = package.get_installed_packages()
    assert [installed.from_name, installed.to_name] == NAMES[1::2]
    found = [translate.translate(line, "en", "de") for line in lines]
    theirs = ctranslate2.Translator(str(installed.package_path / "model"))
    tokens = [joint.source.tokens(ids) for ids in joint.source.encode(lines)]
    expected = theirs.translate_batch(tokens, **SEARCH)
    assert found == [
        joint.target.decode(joint.target.ids(result.hypotheses[0])) for result in expected
    ]


def test_quantized_packages_are_smaller(exported, joint, tmp_path) -> None:
    assert exported(joint, ["--languages", *NAMES, "--quantization", "int8"])[0] == 0
    model = unpacked(tmp_path / "out") / "model"
    assert ctranslate2.Translator(str(model)).compute_type.startswith("int8")


def tagged(*tags: str) -> dict[str, Any]:
    files = tuple(f"{i}.txt" for i in range(2))
    pairs = PairsConfig("text", files, files, tags=tags)
    symbols = tuple(filter(None, tags))
    config = Config()
    return {
        "data": dataclasses.replace(config.data, train=pairs),
        "tokenizer": TokenizerConfig(user_defined_symbols=symbols),
    }


def test_models_that_argos_translate_cannot_use_are_errors(
    exported, joint, separate, make, tmp_path
) -> None:
    languages = ["--languages", *NAMES]
    for vocabulary, flags, changes, message in (
        (joint, languages, tagged("<2de>", "<2fr>"), "data.train.tags is ('<2de>', '<2fr>')"),
        (joint, ["--languages", "en", "de"], {}, "--languages is ('en', 'de'); expected two codes"),
        (joint, [], {}, "--languages is (); expected two codes and names"),
        (separate, languages, {}, "tokenizer.joint is False"),
    ):
        status, said = exported(vocabulary, flags, **changes)
        assert status == 2 and message in said, said
        assert not (tmp_path / "out").exists()
        shutil.rmtree(tmp_path / "model")
    # Back-translations with a tag, and other lines without.
    assert exported(joint, languages, **tagged("", "<BT>"))[0] == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--format", "huggingface", "--quantization", "int8"],
            "--quantization has no effect with --format huggingface; expected --format argos or ct",
        ),
        (
            ["--format", "ctranslate2", "--sentence-model", "en.onnx"],
            "--sentence-model has no effect with --format ctranslate2; expected --format argos.",
        ),
    ],
)
def test_flags_of_other_formats_are_errors(flags, message, tmp_path, capsys) -> None:
    given = ["--workdir", str(tmp_path), "--output", str(tmp_path / "out"), *flags]
    assert main([*given]) == 2
    assert message in capsys.readouterr().err
