"""Marian's own files: the results of CTranslate2's converter and of Marian, exports, bad files."""

from __future__ import annotations

import dataclasses
import json
import shutil
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import ctranslate2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from ctranslate2.converters import marian as converters
from flax import nnx

from tests.pretrained import marian_files
from tests.pretrained.marian_files import LINES, SHAPES
from transformer_jax import Config, Engine, Sentence, Tokenizer, Transformer, Translator, UserError
from transformer_jax.export.__main__ import main as export_main
from transformer_jax.export.huggingface import export_huggingface
from transformer_jax.export.marian import export_marian
from transformer_jax.model.positions import sinusoidal_positions
from transformer_jax.model.transformer import abstract_model
from transformer_jax.pretrained.__main__ import main
from transformer_jax.pretrained.ctranslate2 import export_ctranslate2
from transformer_jax.pretrained.encoder import TextEncoder
from transformer_jax.pretrained.loading import import_huggingface, load_model
from transformer_jax.pretrained.marian import MarianFiles

SCORES = json.loads(Path(__file__).with_name("pymarian.json").read_text())
UPPER = [line.upper() for line in LINES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A folder of each shape."""
    root = tmp_path_factory.mktemp("marian")
    for shape in SHAPES:
        marian_files.write(shape, root / shape)
    return root


@cache
def loaded(folder: Path) -> tuple[Config, Transformer, Tokenizer]:
    """An imported model that computes in float32."""
    config, model, tokenizer = import_huggingface(folder)
    shape = dataclasses.replace(config.model, dtype="float32")
    parameters = nnx.state(model, nnx.Param)
    return config, nnx.merge(abstract_model(shape).graph, parameters), tokenizer


class _Converter(converters.MarianConverter):
    """CTranslate2's converter with Marian's positions and epsilon.

    In Marian (src/tensors/cpu/tensor_operators.cpp, src/layers/generic.h), wavelengths are a
    geometric series from 1 to 10,000 and epsilon is 1e-6. The converter has the paper's wavelengths
    and 1e-5.
    """

    def _load(self) -> Any:
        spec = super()._load()
        width = spec.encoder.embeddings[0].weight.shape[1]
        table = sinusoidal_positions(2048, width, "tensor2tensor")
        spec.encoder.position_encodings.encodings = table
        spec.decoder.position_encodings.encodings = table
        spec.config.layer_norm_epsilon = 1e-6
        return spec


def converted(folder: Path, output: Path) -> ctranslate2.Translator:
    files = []
    for number, ids in enumerate(MarianFiles(folder).vocabularies):
        files.append(output.with_name(f"{number}.yml"))
        tokens = sorted(ids.keys() - {"<pad>"}, key=ids.__getitem__)
        marian_files.write_vocabulary(files[-1], tokens)
    _Converter(str(folder / "model.npz"), [str(file) for file in files]).convert(str(output))
    return ctranslate2.Translator(str(output), inter_threads=1, intra_threads=1)


@nnx.jit
def all_log_probs(model: Transformer, source_BS: np.ndarray, target_BT: np.ndarray) -> jax.Array:
    return jax.nn.log_softmax(model(source_BS, target_BT))


def log_probs(model: Transformer, pairs: list[tuple[list[int], list[int]]]) -> list[np.ndarray]:
    """Log-probabilities of each target's tokens. All pairs are one batch: one compilation."""
    rows_of_sides = []
    for side in zip(*pairs):
        rows = np.full((len(pairs), max(map(len, side))), model.config.pad_id, np.int32)
        for row, ids in zip(rows, side):
            row[: len(ids)] = ids
        rows_of_sides.append(rows)
    log_probs_BTV = np.asarray(all_log_probs(model, *rows_of_sides))
    return [row[range(len(target)), target] for row, (_, target) in zip(log_probs_BTV, pairs)]


@pytest.mark.parametrize(
    "shape", ["opus-mt", pytest.param("untied", marks=pytest.mark.exhaustive), "pre-norm"]
)
def test_scores_and_beams_are_those_of_ctranslate2s_converter(shape, folders, tmp_path) -> None:
    config, model, tokenizer = loaded(folders / shape)
    theirs = converted(folders / shape, tmp_path / "ctranslate2")
    exported = theirs
    if not config.model.embedding_norm:
        (tmp_path / "exported").mkdir()
        export_ctranslate2(config, model, tokenizer, tmp_path / "exported")
        exported = ctranslate2.Translator(str(tmp_path / "exported"), intra_threads=1)
    eos = [config.model.eos_id]
    sources = tokenizer.source.encode(LINES[:8])
    targets = tokenizer.target.encode(UPPER[8:16])
    source_tokens = [tokenizer.source.tokens(ids) for ids in sources]
    target_tokens = [tokenizer.target.tokens(ids) for ids in targets]
    pairs = [(source + eos, target + eos) for source, target in zip(sources, targets)]
    for translator in (theirs, exported):
        scores = translator.score_batch(source_tokens, target_tokens)
        for score, expected in zip(scores, log_probs(model, pairs), strict=True):
            np.testing.assert_allclose(score.log_probs, expected, atol=2e-5)
    # Not suppressed here: CTranslate2 computes scores as if suppressed tokens did not exist.
    assert config.decoding.suppress == ("<unk>",)
    assert (config.decoding.beam_size, config.decoding.length_penalty) == (6, 1.0)
    search = dataclasses.replace(config.decoding, max_length=40, patience=2.0)
    engine = Engine(model, search)
    results = theirs.translate_batch(
        source_tokens,
        beam_size=6,
        length_penalty=1,
        patience=2,
        num_hypotheses=3,
        min_decoding_length=0,
        max_decoding_length=40,
        return_scores=True,
    )
    ours = engine.search([Sentence(ids + eos, num_hypotheses=3) for ids in sources])
    for hypotheses, result in zip(ours, results):
        if max(map(len, result.hypotheses)) == 40:  # searches differ at the limit of length
            continue
        best = hypotheses[:3]
        assert [tokenizer.target.tokens(x.tokens) for x in best] == result.hypotheses
        best_scores = [hypothesis.score for hypothesis in best]
        np.testing.assert_allclose(best_scores, result.scores, atol=2e-5)


@pytest.mark.parametrize("shape", SCORES["translations"])
def test_scores_are_those_of_marian_itself(shape, folders) -> None:
    """pymarian 1.12.42 printed these scores of token ids, with six digits.

    Pre-norm is missing: after the first step of a search, Marian's decoder does not normalize the
    keys and values of self-attention, unlike in training.
    """
    model = loaded(folders / shape)[1]
    scored = SCORES["translations"][shape]
    found = log_probs(model, [(source, target) for source, target, _ in scored])
    for ours, (_, _, score) in zip(found, scored, strict=True):
        assert ours.sum() == pytest.approx(score, rel=5e-6)
    assert SCORES["version"] == "1.12.42"


def test_the_decoders_first_input_is_zero_whatever_padding_becomes(folders) -> None:
    """Label smoothing trains the row of PAD, as a part of the softmax."""
    config, model, tokenizer = loaded(folders / "opus-mt")
    source = [*tokenizer.source.encode(LINES[:1])[0], config.model.eos_id]
    target = [*tokenizer.target.encode(UPPER[:1])[0], config.model.eos_id]
    changed = nnx.clone(model)
    matrix = changed.target_embedding.matrix
    matrix.set_value(matrix[...].at[config.model.pad_id].set(0.5))
    pairs = [(source, target)]
    np.testing.assert_array_equal(log_probs(changed, pairs), log_probs(model, pairs))


@pytest.mark.parametrize("shape", SHAPES)
def test_an_import_and_an_export_keep_every_bit(shape, folders, tmp_path) -> None:
    workdir = tmp_path / "run"
    output = tmp_path / "again"
    assert main(["import", "--input", str(folders / shape), "--workdir", str(workdir)]) == 0
    flags = ["--workdir", str(workdir), "--format", "marian", "--output", str(output)]
    assert export_main(flags) == 0
    original = np.load(folders / shape / "model.npz")
    written = np.load(output / "model.npz")
    assert {*written.files} == {*original.files}
    for name in original.files:
        np.testing.assert_array_equal(written[name], original[name], strict=True)
    for file in (folders / shape).iterdir():
        assert file.suffix == ".npz" or (output / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (12, 0.0, ("<unk>",))),  # marian-decoder's defaults
        ({"beam-size": 3}, (3, 0.0, ("<unk>",))),
        ({"normalize": 0.5}, (12, 0.5, ("<unk>",))),
        ({"allow-unk": True}, (12, 0.0, ())),
        ({"allow-unk": False}, (12, 0.0, ("<unk>",))),
    ],
)
def test_settings_of_the_search_and_their_defaults(fields, expected, folders, tmp_path) -> None:
    shutil.copytree(folders / "opus-mt", tmp_path / "model")
    decoder = {"models": ["model.npz"], "vocabs": ["vocab.yml", "vocab.yml"]}
    (tmp_path / "model" / "decoder.yml").write_text(yaml.safe_dump(decoder | fields))
    decoding = import_huggingface(tmp_path / "model")[0].decoding
    assert (decoding.beam_size, decoding.length_penalty, decoding.suppress) == expected


def test_a_zip_as_opus_mt_publishes_them(folders, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "opus"
    shutil.copytree(folders / "opus-mt", folder)
    model = "opus.spm32k-spm32k.transformer-align.model1.npz.best-perplexity.npz"
    vocabulary = "opus.spm32k-spm32k.vocab.yml"
    (folder / "model.npz").rename(folder / model)
    (folder / "vocab.yml").rename(folder / vocabulary)
    decoder = yaml.safe_load((folder / "decoder.yml").read_text())
    decoder |= {"models": [model], "vocabs": [vocabulary, vocabulary]}
    (folder / "decoder.yml").write_text(yaml.safe_dump(decoder))
    for name in ("README.md", "LICENSE", "preprocess.sh", "postprocess.sh"):
        (folder / name).write_text(name)
    archive = tmp_path / "opus-2020-02-26.zip"
    with zipfile.ZipFile(archive, "w") as target:
        for file in folder.iterdir():
            target.write(file, file.name)
    translator = Translator.from_pretrained(archive)
    expected = Translator.from_pretrained(folders / "opus-mt")
    assert translator.translate(LINES[:4]) == expected.translate(LINES[:4])
    workdir = tmp_path / "run"
    assert main(["import", "--input", str(archive), "--workdir", str(workdir)]) == 0
    output = tmp_path / "again"
    assert (
        export_main(["--workdir", str(workdir), "--format", "marian", "--output", str(output)]) == 0
    )
    assert {file.name for file in output.iterdir()} == {file.name for file in folder.iterdir()}
    again = import_huggingface(output)[1]
    model_of_run = load_model(workdir)[1]
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model_of_run))


def test_vocabularies_in_yaml_are_read_as_ctranslate2_and_yaml_read_them(tmp_path) -> None:
    tokens = ["</s>", "<unk>", "▁a", "a:", '"', "'", "''", "\\", "\\n", ": 3", "~", "null", "1.5"]
    tokens += [
        "#",
        "- x",
        "? y",
        "é\u0301",
        "😀",
        "{",
        "&a",
        "*a",
        "!b",
        "a b",
        "yes",
        "0x1F",
        "='",
    ]
    file = tmp_path / "vocab.yml"
    marian_files.write_vocabulary(file, tokens)
    folder = tmp_path / "model"
    marian_files.write("opus-mt", folder)
    ids = _ids(folder, file)
    assert ids == {token: i for i, token in enumerate(tokens)}
    assert converters.load_vocab(file) == tokens
    assert yaml.load(file.read_text(), yaml.BaseLoader) == {x: str(i) for x, i in ids.items()}
    other = (
        "\"</s>\": 0\n<unk>: 1\n'it''s': 2\n\"\\x85\\u2028\\t\": 3\n? key\n: 4\n\n\u2028x: 5\r\n"
    )
    file.write_text(other)
    assert [*_ids(folder, file)] == ["</s>", "<unk>", "it's", "\x85\u2028\t", "key", "\u2028x"]


def _ids(folder: Path, vocabulary: Path) -> dict[str, int]:
    shutil.copy(vocabulary, folder / "vocab.yml")
    [ids] = MarianFiles(folder).vocabularies
    return {token: i for token, i in ids.items() if token != "<pad>"}


def _change_decoder(**fields: Any) -> Any:
    def change(folder: Path) -> None:
        content = yaml.safe_load((folder / "decoder.yml").read_text()) | fields
        (folder / "decoder.yml").write_text(yaml.safe_dump(content))

    return change


def _change_model(fields: dict[str, Any], *missing: str, **more: np.ndarray) -> Any:
    def change(folder: Path) -> None:
        weights = dict(np.load(folder / "model.npz"))
        content = yaml.safe_load(weights.pop("special:model.yml").tobytes().rstrip(b"\0"))
        weights = {name: x for name, x in (weights | more).items() if name not in missing}
        marian_files.write_model(folder / "model.npz", content | fields, weights)

    return change


def _append(name: str, text: str) -> Any:
    return lambda folder: (folder / name).write_text((folder / name).read_text() + text)


def _rewrite(name: str, text: str) -> Any:
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _change_model({"transformer-decoder-autoreg": "rnn"}),
            "transformer-decoder-autoreg in special:model.yml is 'rnn'; expected 'self-attention'",
        ),
        (
            _change_model({"transformer-decoder-autoreg": "average-attention"}),
            "'average-attention'",
        ),
        (_change_model({"type": "s2s"}), "type in special:model.yml is 's2s'; expected 'transfo"),
        (_change_model({"transformer-ffn-activation": "gelu"}), "'gelu'; expected 'relu' or 'swi"),
        (_change_model({"transformer-tied-layers": [1, 1]}), r"tied-layers .* is \[1, 1\]"),
        (_change_model({"transformer-train-position-embeddings": True}), "embeddings .* is True"),
        (_change_model({"transformer-postprocess": "dhn"}), "transformer-postprocess 'dhn'"),
        (_change_model({"dim-emb": [1, {"a": 2}]}), "dim-emb has nested values"),
        (_change_model({"dim-emb": "16"}), "dim-emb is '16'"),
        (_change_model({}, "decoder_l2_ffn_W1"), "have no tensor for decoder_l2_ffn_W1"),
        (_change_model({}, "Wemb"), "have no tensor for Wemb"),
        (_change_model({}, decoder_l1_rnn_W=np.ones((2, 2))), "for decoder_l1_rnn_W; expected no"),
        (
            _change_model({}, encoder_l1_self_Wq=np.ones((16, 8), np.float32)),
            r"shape \(8, 16\) for encoder_l1_self_Wq; expected shape \(16, 16\)",
        ),
        (_change_model({}, encoder_l1_self_Wq=np.ones((16, 16), np.int8)), "int8 in encoder_l1_se"),
        (
            _change_model({}, encoder_l1_self_bq=np.full((1, 16), np.nan, np.float32)),
            "have 16 NaN or infinite values in encoder_l1_self_bq",
        ),
        (_change_model({"tied-embeddings-all": False}), "for Wemb; expected no tensor"),
        (
            _append("vocab.yml", "more: 999\n"),
            r"vocab.yml' has 1000 tokens, but Wemb in model.npz ",
        ),
        (_append("vocab.yml", "no id\n"), "line .* is 'no id'; expected a token, a colon and an"),
        (_rewrite("vocab.yml", "a: 0\n"), "has no token </s>"),
        (
            _rewrite("decoder.yml", "x: !!python/object/apply:os.system ['touch x']"),
            "is not a file",
        ),
        (_rewrite("decoder.yml", "- a"), "it has no fields"),
        (_change_decoder(vocabs=["a.fsv", "a.fsv"]), "has no a.fsv; expected"),
        (_change_decoder(vocabs=["vocab.yml"]), "expected two files"),
        (_change_decoder(models="model.npz"), "models in .* is 'model.npz'; expected a list"),
        (_change_decoder(**{"word-penalty": 0.5}), "word-penalty in .* is 0.5; expected 0"),
        (_change_decoder(**{"beam-size": 0}), "decoding.beam_size is 0"),
        (lambda folder: (folder / "decoder.yml").unlink(), "has no decoder.yml; expected"),
        (lambda folder: (folder / "target.spm").unlink(), "has no target.spm"),
        (_rewrite("model.npz", "no archive"), "model.npz' cannot be read"),
    ],
)
def test_bad_files_are_named_in_one_line(change, message, folders, tmp_path) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(folders / "opus-mt", folder)
    change(folder)
    with pytest.raises(UserError, match=message) as error:
        import_huggingface(folder)
    assert "\n" not in str(error.value)
    assert not Path("x").exists()


def test_factored_vocabularies_are_not_supported(folders, tmp_path) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(folders / "opus-mt", folder)
    (folder / "vocab.yml").rename(folder / "vocab.fsv")
    _change_decoder(vocabs=["vocab.fsv", "vocab.fsv"])(folder)
    with pytest.raises(UserError, match=r"expected .yml or .spm. Factored"):
        import_huggingface(folder)


@pytest.mark.parametrize("name", ["../outside.yml", "/tmp/outside.yml", "a/../../outside.yml"])
def test_a_zip_with_paths_outside_is_not_unpacked(name, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    archive = tmp_path / "bad.zip"
    with zipfile.ZipFile(archive, "w") as target:
        target.writestr(name, "x")
    assert main(["import", "--input", str(archive), "--workdir", str(tmp_path / "run")]) == 2
    assert f"has the path {name!r}, which leads out" in capsys.readouterr().err
    files = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    assert {name for name in files if "lock" not in name} == {"bad.zip"}


def test_exports_go_back_to_the_format_that_a_model_came_from(
    folders, tmp_path, joint, make
) -> None:
    config, model, tokenizer = loaded(folders / "opus-mt")
    with pytest.raises(UserError, match="came from Marian's own files"):
        export_huggingface(config, model, tokenizer, tmp_path)
    own = make(joint)[1]
    with pytest.raises(UserError, match="did not come from Marian's own files"):
        export_marian(own, joint, tmp_path)


def test_an_encoder_of_marian_alone(folders) -> None:
    model = loaded(folders / "untied")[1]
    encoder = TextEncoder.from_pretrained(folders / "untied", dtype="float32")
    ids_BS, mask_BS = encoder.tokenize(LINES[:3])
    expected_BSD = np.asarray(model.encode(jnp.array(ids_BS)))
    hidden_BSD = np.asarray(encoder.encode(LINES[:3]))
    np.testing.assert_allclose(hidden_BSD[mask_BS], expected_BSD[mask_BS], atol=2e-6)
