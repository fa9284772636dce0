"""Import of MarianMT models: same token ids, logits and translations; fine-tuning."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import sentencepiece
import torch
import transformers  # its classes are imported on first use, which takes 3 s
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers.activations import ACT2CLS

from tests.pretrained.test_family_tokenizers import hostile
from transformer_jax.errors import UserError
from transformer_jax.export.huggingface import export_huggingface
from transformer_jax.pretrained.__main__ import main
from transformer_jax.pretrained.ctranslate2 import export_ctranslate2
from transformer_jax.pretrained.loading import import_huggingface, load_model
from transformer_jax.report.attention import sentence_attention
from transformer_jax.runs import model_folder
from transformer_jax.settings.config import (
    BatchConfig,
    DataConfig,
    DecodingConfig,
    PairsConfig,
    TrainingConfig,
)
from transformer_jax.settings.config_files import load_config_file
from transformer_jax.training.loop import train
from transformer_jax.translation.segments import cut_into_segments
from transformer_jax.translation.translator import Translator

TAGS = [">>deu<<", ">>fra<<"]


def _target(line: str) -> str:
    return line.upper().replace("E", "Ä")


def _sentencepiece(lines: list[str], size: int) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="unigram",
        vocab_size=size,
        minloglevel=2,
    )
    return model.getvalue()


def _pieces(model: bytes) -> list[str]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [
        processor.id_to_piece(i)
        for i in range(processor.vocab_size())
        if not processor.is_control(i)
    ][1:]


@pytest.fixture(scope="module")
def marian(tmp_path_factory, lines) -> Path:
    """A folder like that of an OPUS-MT model: EOS 0, UNK 1, PAD last with zero embedding; two
    SentencePiece models; one vocabulary that lacks two of their pieces and has two tags.
    """
    folder = tmp_path_factory.mktemp("marian")
    models = _sentencepiece(lines, 31), _sentencepiece([_target(line) for line in lines], 29)
    for name, model in zip(("source.spm", "target.spm"), models, strict=True):
        (folder / name).write_bytes(model)
    known = dict.fromkeys(_pieces(models[0]) + _pieces(models[1]))
    for piece in [p for p in _pieces(models[0]) if len(p) > 2][:2]:
        del known[piece]
    names = ["</s>", "<unk>", *TAGS, *known, "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(names)}))
    languages = {"source_lang": "en", "target_lang": "de"}
    (folder / "tokenizer_config.json").write_text(json.dumps(languages))
    last = len(names) - 1
    config = transformers.MarianConfig(
        vocab_size=len(names),
        d_model=16,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        activation_function="swish",
        scale_embedding=True,
        pad_token_id=last,
        eos_token_id=0,
        decoder_start_token_id=last,
        forced_eos_token_id=0,
        max_position_embeddings=64,
    )
    model = transformers.MarianMTModel(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                spread = 0.4 if parameter.ndim > 1 else 0.2
                centre = 1.0 if "norm.weight" in name else 0.0
                parameter.copy_(centre + spread * torch.randn(parameter.shape, generator=generator))
        model.model.shared.weight[last] = 0
        model.final_logits_bias.copy_(
            0.3 * torch.randn(model.final_logits_bias.shape, generator=generator)
        )
        model.final_logits_bias[0, 0] += 5.0  # translations end before the limit
    model.generation_config.update(
        num_beams=3,
        length_penalty=0.0,
        max_length=60,
        min_new_tokens=5,
        bad_words_ids=[[last], [1]],
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def workdir(marian, tmp_path_factory) -> Path:
    """The imported model's work directory."""
    folder = tmp_path_factory.mktemp("imported") / "run"
    assert main(["import", "--input", str(marian), "--workdir", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def theirs(marian) -> tuple[transformers.MarianMTModel, transformers.MarianTokenizer]:
    model = transformers.MarianMTModel.from_pretrained(marian)
    return model.eval(), transformers.MarianTokenizer.from_pretrained(marian)


def _vocabulary(marian: Path) -> dict[str, int]:
    return json.loads((marian / "vocab.json").read_text())


def test_token_ids_agree(marian, workdir, theirs, lines) -> None:
    tokenizer, theirs_ = load_model(workdir)[2], theirs[1]
    pieces = tokenizer.source.tokens(range(tokenizer.source.vocab_size))
    assert pieces == [*_vocabulary(marian)]
    odd = ["Äone zzz Ä two", "OÄN 漢字 Ä ÄÄ", "  two  ones", "", "three-four, fiveeee"]
    tagged = [">>deu<< one two", ">>fra<<one two", ">>xxx<< one", "one >>deu<< two", ">>deu<<"]
    texts = lines[:20] + [_target(line) for line in lines[:20]] + odd + tagged
    assert tokenizer.joint and tokenizer.target is not tokenizer.source
    unknown = 0
    for name, vocabulary in (("text", tokenizer.source), ("text_target", tokenizer.target)):
        for text, ids in zip(texts, vocabulary.encode(texts), strict=True):
            expected = theirs_(**{name: text}).input_ids[:-1]
            assert ids == expected, (name, text)
            unknown += tokenizer.source.unk_id in ids
    assert unknown > 5  # mostly pieces that their vocabulary lacks
    lacking = next(
        p for p in _pieces((marian / "source.spm").read_bytes()) if p not in _vocabulary(marian)
    )
    assert tokenizer.target.ids([lacking]) == [tokenizer.target.unk_id]
    segments = [
        segment.tokens
        for segment in cut_into_segments(">>deu<<" + " one two three" * 20, 15, tokenizer)[0]
    ]
    assert len(segments) > 3 and all(len(segment) <= 15 for segment in segments)
    assert all(tokenizer.source.tokens(segment[:1]) == [">>deu<<"] for segment in segments)
    ids = tokenizer.target.encode([_target(line) for line in lines[:8]])
    assert [tokenizer.target.decode(row) for row in ids] == [_target(line) for line in lines[:8]]


@pytest.mark.cpu("an imported model computes in bfloat16 elsewhere")
def test_logits_agree(marian, workdir, theirs, lines, logits) -> None:
    config, model, tokenizer = load_model(workdir)
    their_model, their_tokenizer = theirs
    model_config = config.model
    assert (model_config.activation, model_config.norm_epsilon) == ("silu", 1e-5)
    assert model_config.softmax_bias
    start = their_model.config.pad_token_id
    for source, target in [
        (lines[0], _target(lines[1])),
        (">>deu<< Ä " + lines[2], "漢 " + _target(lines[3])),
    ]:
        source_ids = torch.tensor([their_tokenizer(source).input_ids])
        target_ids = their_tokenizer(text_target=target).input_ids
        inputs = torch.tensor([[start, *target_ids[:-1]]])
        with torch.no_grad():
            expected = their_model(input_ids=source_ids, decoder_input_ids=inputs).logits[0].numpy()
        sides = [
            [*tokenizer.source.encode([source])[0], model_config.eos_id],
            [*tokenizer.target.encode([target])[0], model_config.eos_id],
        ]
        pad_id = model_config.pad_id
        source_BS, target_BT = (np.array([ids + [pad_id] * (40 - len(ids))]) for ids in sides)
        ours = logits(model, source_BS, target_BT)[0, : len(target_ids)]
        np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.mark.cpu("an imported model computes in bfloat16 elsewhere")
@pytest.mark.parametrize("name", ACT2CLS)
def test_logits_agree_for_every_name_of_an_activation(name, marian, tmp_path, logits) -> None:
    """Names of unsupported activations are errors."""
    shutil.copytree(marian, folder := tmp_path / "folder")
    _change_config(activation_function=name)(folder)
    if name not in ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish"):
        with pytest.raises(UserError, match=f"activation_function in .* is '{name}'; expected"):
            import_huggingface(folder, allow_pickle=True)
        return

    def spread(tensors: dict[str, np.ndarray]) -> None:
        """Give the activations inputs where they differ most, and weight their outputs."""
        for each, tensor in tensors.items():
            tensor *= 3 if ".fc1." in each or ".fc2.weight" in each else 1

    _change_tensors(spread)(folder)
    theirs = transformers.MarianMTModel.from_pretrained(folder).eval()
    _, model, _ = import_huggingface(folder, allow_pickle=True)
    start = theirs.config.decoder_start_token_id
    source_BS, target_BT = np.random.default_rng(0).integers(2, start, (2, 3, 9))
    inputs_BT = np.insert(target_BT, 0, start, axis=1)[:, :-1]
    with torch.no_grad():
        given = {"input_ids": source_BS, "decoder_input_ids": inputs_BT}
        expected = theirs(**{name: torch.tensor(ids) for name, ids in given.items()}).logits
    np.testing.assert_allclose(logits(model, source_BS, target_BT), expected, atol=2e-5)


@pytest.mark.cpu("an imported model computes in bfloat16 elsewhere")
def test_translations_agree(workdir, theirs, lines) -> None:
    model, tokenizer = theirs
    texts = lines[:16]
    ours = Translator.from_workdir(workdir, batch_size=16)
    generated = model.generate(**tokenizer(texts, return_tensors="pt", padding=True))
    expected = tokenizer.batch_decode(generated, skip_special_tokens=True)
    assert (ours.config.beam_size, ours.config.min_length) == (3, 5)
    assert ours.config.suppress == ("<unk>",)  # PAD is never generated
    assert [text.strip() for text in ours.translate(texts)] == expected
    assert len(set(expected)) > 3 and generated.shape[1] < 25


@pytest.mark.cpu("an imported model computes in bfloat16 elsewhere")
def test_attention_weights_agree(marian, workdir, theirs, lines) -> None:
    model = transformers.MarianMTModel.from_pretrained(marian, attn_implementation="eager").eval()
    sides = theirs[1](lines[0]).input_ids, theirs[1](text_target=_target(lines[1])).input_ids
    source, target = sides[0], [model.config.pad_token_id, *sides[1][:-1]]
    with torch.no_grad():
        expected = model(
            input_ids=torch.tensor([source]),
            decoder_input_ids=torch.tensor([target]),
            output_attentions=True,
        )
    translator = Translator.from_workdir(workdir)
    ours = sentence_attention(translator, lines[0], target=_target(lines[1]))
    for kind, layers in (
        ("encoder", expected.encoder_attentions),
        ("decoder", expected.decoder_attentions),
        ("cross", expected.cross_attentions),
    ):
        np.testing.assert_allclose(ours.of(kind)[2], torch.cat(layers).numpy(), atol=1e-5)


def test_ctranslate2_gets_tags_as_tokens(workdir, tmp_path) -> None:
    """As documented in docs/export.md. The exported source.spm would split a tag."""
    config, model, tokenizer = load_model(workdir)
    export_ctranslate2(config, model, tokenizer, tmp_path)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "source.spm"))
    [ids] = tokenizer.source.encode([">>deu<< two"])
    assert tokenizer.source.tokens(ids) == [">>deu<<", *processor.encode("two", out_type=str)]
    assert ">>deu<<" in json.loads((tmp_path / "shared_vocabulary.json").read_text())


def test_training_starts_from_the_imported_parameters(workdir, tmp_path, lines) -> None:
    run = tmp_path / "run"
    (tmp_path / "source").write_text("\n".join(lines) + "\n")
    (tmp_path / "target").write_text("\n".join(map(_target, lines)) + "\n")
    pairs = PairsConfig("text", ("source",), ("target",))
    config = load_config_file(workdir / "config.json")  # as for train.py --config
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dropout=0.0),
        data=DataConfig(
            root=str(tmp_path), train=pairs, max_source_length=40, max_target_length=40, workers=1
        ),
        batch=BatchConfig(tokens=512, buckets=1),
        optimizer=dataclasses.replace(config.optimizer, ema_decay=0.9, clip_norm=1.0),
        training=TrainingConfig(steps=3, start_from=str(workdir)),
    )
    with pytest.raises(UserError, match=f"imported model.*--training.start-from {workdir}"):
        train(config, workdir)
    assert train(config, run, devices=jax.devices()[:1])["steps"] == 3
    _, before, imported = load_model(workdir)
    trained, after, tokenizer = load_model(run)
    assert trained.optimizer.ema_decay == 0.9 and tokenizer.fingerprint == imported.fingerprint
    matrices = (np.asarray(model.target_embedding.matrix[...]) for model in (before, after))
    moved = np.abs(np.subtract(*matrices)).max()
    assert 0 < moved < 1e-5  # three steps of warmup from zero


def _change_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text()) | values
        kept = {name: value for name, value in content.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return change


def _change_tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return rewrite


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _write(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def _rename_unknown(folder: Path) -> None:
    file = folder / "vocab.json"
    file.write_text(file.read_text().replace("<unk>", "<un>"))


FC1 = "model.encoder.layers.0.fc1.weight"
WEIGHTS, PICKLE = "model.safetensors", "pytorch_model.bin"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_remove(WEIGHTS), f"has no {WEIGHTS} and no {PICKLE}; expected one"),
        (_write(WEIGHTS, "x" * 50), "model.safetensors' cannot be read"),
        (lambda f: (f / WEIGHTS).rename(f / PICKLE), "pytorch_model.bin' cannot be read"),
        (
            _change_tensors(lambda t: t.pop(FC1)),
            rf"have no tensor for {FC1}; expected shape \(24, 16\)",
        ),
        (
            _change_tensors(lambda t: t.update(more=np.ones(3, np.float32))),
            "The MarianMTModel weights in .* have shape .3,. for more; expected no tensor",
        ),
        (
            _change_tensors(lambda t: t.update({FC1: np.ones((3, 16), np.float32)})),
            r"have shape \(3, 16\) for .*; expected shape \(24, 16\)",
        ),
        (
            _remove("config.json"),
            "config.json' cannot be read .* expected a file from a Hugging Face .* hf download",
        ),
        (_write("config.json", "{"), "config.json' cannot be read"),
        (_write("vocab.json", '["a"]'), "vocab.json' cannot be read"),
        (_write("generation_config.json", "{"), "generation_config.json' cannot be read"),
        (_remove("source.spm"), "has no source.spm; expected the tokenizer's SentencePiece models"),
        (_write("target.spm", "not a model"), "target.spm.* is not a SentencePiece model"),
        (
            _write("vocab.json", '{"<unk>": 0}'),
            "unk_id and eos_id of a vocabulary are both 0; expected different",
        ),
        (_change_config(model_type="bart"), "has no tokenizer.json; expected that file or"),
        (_change_config(d_model=None), "for .*; expected shape .1024,"),  # the class's default
        (_change_config(normalize_before=True), "normalize_before in .* is True"),
        (_change_config(scale_embedding=1), "config.json: scale_embedding is 1; expected true or"),
        (_change_config(decoder_ffn_dim=30), "decoder_ffn_dim in .* is 30"),
        (
            _change_config(activation_function="quick_gelu"),
            "activation_function in .* is 'quick_gelu'; expected 'relu' or",
        ),
        (
            _change_config(decoder_start_token_id=999),
            "Special tokens in .* 999.*; expected",
        ),
        (_change_config(pad_token_id=0), "Special tokens in .* different ids for pad_token_id"),
        (_change_config(pad_token_id=1), "pad_id and unk_id of a vocabulary are both 1; expected"),
        (_rename_unknown, "vocab.json: <unk> is missing"),
        (
            _change_config(share_encoder_decoder_embeddings=False),
            "have no tensor for model.decoder.embed_tokens.weight; expected shape",
        ),
        (_change_config(encoder_layers=3), "have no tensor for model.encoder.layers.2; expected 3"),
    ],
)
def test_unsupported_and_corrupt_folders_are_errors(change, message, marian, tmp_path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(marian, folder)
    change(folder)
    with pytest.raises((UserError, FileNotFoundError), match=message):
        import_huggingface(folder, allow_pickle=True)


WRONG_TYPES = ["16", None, True, [], [[1]], {}, {"a": 1}]
WRONG_NUMBERS = [-1, 1.5, float("nan"), 10**30]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "vocab.json"])
@pytest.mark.parametrize(
    "damaged",
    ["", "{", "null", "[]", "3", '"x"', "[" * 100_000, '{"a":' * 100_000, "9" * 5000, "\udcff"],
)
def test_json_of_another_shape(name, damaged, marian, tmp_path) -> None:
    shutil.copytree(marian, folder := tmp_path / "folder")
    (folder / name).write_text(damaged, errors="surrogateescape")
    with pytest.raises(UserError, match=f"{name}' cannot be read .*(JSON|missing)"):
        import_huggingface(folder, allow_pickle=True)


@pytest.mark.parametrize(
    ("name", "field", "allowed"),
    [
        *(("config.json", f"{side}_layers", []) for side in ("encoder", "decoder")),
        *(("config.json", f"{side}_ffn_dim", []) for side in ("encoder", "decoder")),
        *(("config.json", f"{side}_attention_heads", []) for side in ("encoder", "decoder")),
        ("config.json", "d_model", []),
        ("config.json", "vocab_size", []),
        ("config.json", "pad_token_id", []),
        ("config.json", "eos_token_id", [None]),  # generation_config.json has it
        ("config.json", "decoder_start_token_id", [None]),
        ("config.json", "activation_function", []),
        *(("config.json", name, []) for name in ("dropout", "attention_dropout")),
        ("config.json", "scale_embedding", [True]),
        ("config.json", "normalize_before", []),
        ("vocab.json", "<unk>", []),
        ("generation_config.json", "num_beams", [None]),
        ("generation_config.json", "length_penalty", [None, 1.5, 10**30]),
        ("generation_config.json", "min_new_tokens", [None]),
        ("generation_config.json", "no_repeat_ngram_size", [None]),
        ("generation_config.json", "bad_words_ids", [None, [], [[1]], {}]),
    ],
)
def test_json_fields_of_other_types(name, field, allowed, marian, tmp_path) -> None:
    """Errors name the file and the field, or our name for the field."""
    shutil.copytree(marian, folder := tmp_path / "folder")
    content = json.loads((marian / name).read_text())
    for value in WRONG_TYPES + WRONG_NUMBERS:
        (folder / name).write_text(json.dumps(content | {field: value}))
        if any(value is each or value == each != 1 for each in allowed):
            import_huggingface(folder, allow_pickle=True)
            continue
        with pytest.raises(UserError) as raised:
            import_huggingface(folder, allow_pickle=True)
        message = str(raised.value)
        assert len(message) < 1000 and "\n" not in message
        if value in WRONG_TYPES:
            ours = {"num_beams": "beam_size", "min_new_tokens": "min_length"}.get(field, field)
            assert name in message and (field in message or ours.removesuffix("_size") in message)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_files_that_are_not_needed(name, marian, tmp_path) -> None:
    shutil.copytree(marian, folder := tmp_path / "folder")
    (folder / name).write_text("[" * 100_000)
    (folder / f"{WEIGHTS}.index.json").write_text("null")
    import_huggingface(folder, allow_pickle=True)


def _with_header(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + content[end:]

    return changed


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:7],
        lambda content: content[:200],
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: bytes(8) + content[8:],
        lambda content: (100_000).to_bytes(8, "little") + b"[" * 100_000,
        lambda content: (4).to_bytes(8, "little") + b"null",
        lambda content: (2).to_bytes(8, "little") + b"{}",
        _with_header(lambda header: header.update({FC1: None})),
        _with_header(lambda header: header[FC1].update(shape="24")),
        _with_header(lambda header: header[FC1].update(shape=[24, 2**62])),
        _with_header(lambda header: header[FC1].update(shape=[-24, 16])),
        _with_header(lambda header: header[FC1].update(data_offsets=[0, 10**18])),
        _with_header(lambda header: header[FC1].update(data_offsets=[8, 0])),
        _with_header(lambda header: header[FC1].update(dtype="F3")),
        _with_header(lambda header: header[FC1].pop("dtype")),
        _with_header(lambda header: header.update(__metadata__=[])),
    ],
)
@pytest.mark.parametrize("name", [WEIGHTS, PICKLE])
def test_damaged_weights(name, damage, marian, tmp_path) -> None:
    shutil.copytree(marian, folder := tmp_path / "folder")
    content = damage((folder / WEIGHTS).read_bytes())
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}' cannot be read|have no tensor for"):
        import_huggingface(folder, allow_pickle=True)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("save", [lambda folder: None, lambda folder: _pickle(folder)])
def test_weights_that_are_not_finite(save, value, marian, tmp_path) -> None:
    shutil.copytree(marian, folder := tmp_path / "folder")
    _change_tensors(lambda tensors: tensors[FC1].__setitem__((3, slice(2)), value))(folder)
    save(folder)
    with pytest.raises(UserError, match=f"have 2 NaN or infinite values in {FC1}; expected finite"):
        import_huggingface(folder, allow_pickle=True)


def _rename_shared(*names: str) -> Callable[[Path], None]:
    """Store the tied matrix under other names."""
    return _change_tensors(lambda t: t.update(dict.fromkeys(names, t.pop("model.shared.weight"))))


def _pickle(folder: Path) -> None:
    """Older files are pickled by PyTorch and store tied matrices under several names."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    state = {name: torch.tensor(tensor) for name, tensor in tensors.items()}
    sides = [f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    state |= dict.fromkeys([*sides, "lm_head.weight"], state["model.shared.weight"])
    torch.save(state, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    "change",
    [
        _rename_shared("lm_head.weight"),
        _rename_shared("model.decoder.embed_tokens.weight", "lm_head.weight"),
        _pickle,
    ],
)
def test_weights_may_have_other_names_or_formats(change, marian, workdir, tmp_path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(marian, folder)
    change(folder)
    models = load_model(workdir)[1], import_huggingface(folder, allow_pickle=True)[1]
    jax.tree.map(np.testing.assert_array_equal, *(nnx.state(each, nnx.Param) for each in models))


def _with_settings(marian: Path, folder: Path, **settings: Any) -> Path:
    shutil.copytree(marian, folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def test_search_settings_are_imported(marian, tmp_path) -> None:
    some = sorted(_vocabulary(marian))[5]
    settings = {
        **{"num_beams": 2, "length_penalty": 0.7, "no_repeat_ngram_size": 3, "min_new_tokens": 4},
        **{"bad_words_ids": [[_vocabulary(marian)[some]]], "renormalize_logits": True},
        **{
            "early_stopping": True,
            "max_length": 512,
            "diversity_penalty": 0.0,
            "num_return_sequences": 1,
            "min_p": None,
        },
    }
    expected = DecodingConfig(
        beam_size=2,
        length_penalty=0.7,
        length_offset=0.0,
        max_source_length=64,
        patience=1.0,
        no_repeat_ngram=3,
        min_length=4,
        suppress=(some,),
    )
    config, *_ = import_huggingface(_with_settings(marian, tmp_path / "some", **settings))
    assert config.decoding == expected
    for other in (None, False, "never"):
        settings = {"num_beams": None, "early_stopping": other}
        config, *_ = import_huggingface(_with_settings(marian, tmp_path / str(other), **settings))
        assert config.decoding == DecodingConfig(
            beam_size=1, length_penalty=1.0, length_offset=0.0, max_source_length=64
        )


@pytest.mark.cpu("an imported model computes in bfloat16 elsewhere")
@pytest.mark.parametrize("generation", [None, {}])
def test_search_settings_of_older_folders_are_in_the_config(
    generation, marian, tmp_path, lines
) -> None:
    last = _vocabulary(marian)["<pad>"]
    settings = {"num_beams": 3, "length_penalty": 0.0, "bad_words_ids": [[last], [1]]}
    settings |= {"max_length": 60, "forced_eos_token_id": 0, "no_repeat_ngram_size": 2}
    settings |= {"early_stopping": False, "num_beam_groups": 1, "diversity_penalty": 0.0}
    folder = _with_settings(marian, tmp_path / "folder")
    (folder / "generation_config.json").unlink()
    _change_config(**settings, extra_pos_embeddings=last + 1, classif_dropout=0.5)(folder)
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert main(["import", "--input", str(folder), "--workdir", str(tmp_path / "run")]) == 0
    ours = Translator.from_workdir(tmp_path / "run", batch_size=16)
    assert (ours.config.beam_size, ours.config.length_penalty) == (3, 0.0)
    assert (ours.config.no_repeat_ngram, ours.config.suppress) == (2, ("<unk>",))
    generated = model.generate(**tokenizer(lines[:8], return_tensors="pt", padding=True))
    expected = tokenizer.batch_decode(generated, skip_special_tokens=True)
    assert [text.strip() for text in ours.translate(lines[:8])] == expected
    _change_config(do_sample=True)(folder)
    with pytest.raises(UserError, match=r"do_sample in .*config.json' is True, which is not"):
        import_huggingface(folder, allow_pickle=True)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("do_sample", True, "do_sample in .* is True, which is not supported"),
        ("encoder_no_repeat_ngram_size", 3, "encoder_no_repeat_ngram_size in .* is 3"),
        ("repetition_penalty", 1.5, "repetition_penalty in .* is 1.5"),
        ("suppress_tokens", [7], r"suppress_tokens in .* is \[7\]"),
        ("bad_words_ids", [[5], [5, 6]], r"bad_words_ids in .* is \[\[5\], \[5, 6\]\]"),
        ("length_penalty", -1.0, "decoding.length_penalty is -1.0"),
        ("encoder_no_repeat_ngram_size", 1, "encoder_no_repeat_ngram_size in .* is 1"),
    ],
)
def test_unsupported_search_settings_are_errors(setting, value, message, marian, tmp_path) -> None:
    with pytest.raises(UserError, match=message):
        import_huggingface(_with_settings(marian, tmp_path / "folder", **{setting: value}))


def test_an_imported_model_survives_export_and_import(workdir, tmp_path, lines) -> None:
    config, model, tokenizer = load_model(workdir)
    export_huggingface(config, model, tokenizer, tmp_path)
    theirs = transformers.MarianTokenizer.from_pretrained(tmp_path)
    again, _, tokenizer_again = import_huggingface(tmp_path)
    texts = [*lines, *map(_target, lines), ">>deu<< one", "漢 Ä zzz"]
    texts += hostile(508, special=[])[8:]  # special tokens in the text are text here
    assert [theirs(text).input_ids[:-1] for text in texts] == tokenizer.source.encode(texts)
    assert tokenizer_again.source.encode(texts) == tokenizer.source.encode(texts)
    assert tokenizer_again.target.encode(texts) == tokenizer.target.encode(texts)
    assert again.decoding.suppress == config.decoding.suppress


def test_program_errors_for_existing_folders_and_other_formats(
    marian, workdir, tmp_path, capsys
) -> None:
    assert main(["import", "--input", str(marian), "--workdir", str(workdir)]) == 2
    assert "expected a new or empty folder" in capsys.readouterr().err
    (tmp_path / "marian").mkdir()
    (tmp_path / "marian" / "model.npz").touch()
    folder = tmp_path / "marian"
    for name, message in (
        (folder, "has no decoder.yml; expected one such file"),
        (folder / "model.npz", "is not a folder and cannot be downloaded"),
    ):
        assert main(["import", "--input", str(name), "--workdir", str(tmp_path / "w")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "w").exists()


def test_a_failed_import_can_be_repeated(marian, tmp_path, monkeypatch, capsys) -> None:
    arguments = ["import", "--input", str(marian), "--workdir", str(tmp_path / "w")]

    def full(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(model_folder, "write_manifest", full)
        assert main(arguments) == 2
        assert "no space left" in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert main(arguments) == 0 and [path.name for path in tmp_path.iterdir()] == ["w"]
    assert load_model(tmp_path / "w")[2].pretrained
