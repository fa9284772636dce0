"""Import of MarianMT models: same text, logits and translations; fine-tuning works."""

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
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers import MarianConfig, MarianMTModel, MarianTokenizer

from transformer_jax import checkpoint
from transformer_jax.checkpoint import load_model
from transformer_jax.config import (
    BatchConfig,
    DataConfig,
    DecodingConfig,
    PairsConfig,
    TrainingConfig,
)
from transformer_jax.config_io import load_config_file
from transformer_jax.decoding.attention_weights import sentence_attention
from transformer_jax.decoding.segments import split
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.interop.__main__ import main
from transformer_jax.interop.ctranslate2 import export_ctranslate2
from transformer_jax.interop.huggingface import export_huggingface
from transformer_jax.interop.huggingface_import import import_huggingface
from transformer_jax.special_ids import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from transformer_jax.training.loop import train

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
    """A folder as of an OPUS-MT model: EOS 0, UNK 1, PAD last and zero; two SentencePiece models,
    one vocabulary of both without two of their pieces and with two tags.
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
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"source_lang": "en", "target_lang": "de"})
    )
    last = len(names) - 1
    config = MarianConfig(
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
    model = MarianMTModel(config)
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
        model.final_logits_bias[0, 0] += 5.0  # translations end before they must
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
    """The imported model."""
    folder = tmp_path_factory.mktemp("imported") / "run"
    assert main(["import", "--input", str(marian), "--workdir", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def theirs(marian) -> tuple[MarianMTModel, MarianTokenizer]:
    return MarianMTModel.from_pretrained(marian).eval(), MarianTokenizer.from_pretrained(marian)


def _columns(marian: Path, pieces: list[str]) -> list[int]:
    """Our id of each of their ids."""
    special = {"<pad>": BOS_ID, "</s>": EOS_ID, "<unk>": UNK_ID}
    return [special[p] if p in special else pieces.index(p) for p in _vocabulary(marian)]


def _vocabulary(marian: Path) -> dict[str, int]:
    return json.loads((marian / "vocab.json").read_text())


def test_text_becomes_the_pieces_of_their_tokenizer(marian, workdir, theirs, lines) -> None:
    tokenizer, theirs_ = load_model(workdir)[2], theirs[1]
    ours_of = np.array(
        _columns(marian, tokenizer.source.tokens(range(tokenizer.source.vocab_size)))
    )
    # with a PAD of our own
    assert tokenizer.vocabulary and tokenizer.source.vocab_size == len(ours_of) + 1
    odd = ["Äone zzz Ä two", "OÄN 漢字 Ä ÄÄ", "  two  ones", "", "three-four, fiveeee"]
    tagged = [">>deu<< one two", ">>fra<<one two", ">>xxx<< one", "one >>deu<< two", ">>deu<<"]
    texts = lines[:20] + [_target(line) for line in lines[:20]] + odd + tagged
    assert tokenizer.joint and tokenizer.target is not tokenizer.source
    unknown = 0
    for side, encode in (("source", tokenizer.source.encode), ("target", tokenizer.target.encode)):
        for text, ids in zip(texts, encode(texts), strict=True):
            expected = (theirs_(text) if side == "source" else theirs_(text_target=text)).input_ids[
                :-1
            ]
            assert ids == ours_of[expected].tolist(), (side, text)
            # pieces of their SentencePiece models that their vocabulary lacks, for the most part
            unknown += UNK_ID in ids
    assert unknown > 5
    lacking = next(
        p for p in _pieces((marian / "source.spm").read_bytes()) if p not in _vocabulary(marian)
    )
    assert tokenizer.target.ids([lacking]) == [UNK_ID]
    segments = split(">>deu<<" + " one two three" * 20, 15, tokenizer)
    assert len(segments) > 3 and all(len(segment) <= 15 for segment in segments)
    assert all(tokenizer.source.tokens(segment[:1]) == [">>deu<<"] for segment in segments)
    ids = tokenizer.target.encode([_target(line) for line in lines[:8]])
    assert [tokenizer.target.decode(row) for row in ids] == [_target(line) for line in lines[:8]]


@pytest.mark.cpu("an imported model computes in bfloat16 elsewhere")
def test_logits_agree_and_new_pieces_get_no_probability(
    marian, workdir, theirs, lines, logits
) -> None:
    config, model, tokenizer = load_model(workdir)
    columns = _columns(marian, tokenizer.source.tokens(range(tokenizer.source.vocab_size)))
    assert (config.model.activation, config.model.norm_epsilon, config.model.softmax_bias) == (
        "silu",
        1e-5,
        True,
    )
    for source, target in [
        (lines[0], _target(lines[1])),
        (">>deu<< Ä " + lines[2], "漢 " + _target(lines[3])),
    ]:
        source_ids, target_ids = (
            theirs[1](source).input_ids,
            theirs[1](text_target=target).input_ids,
        )
        start = theirs[0].config.pad_token_id
        with torch.no_grad():
            inputs = torch.tensor([[start, *target_ids[:-1]]])
            expected = (
                theirs[0](input_ids=torch.tensor([source_ids]), decoder_input_ids=inputs)
                .logits[0]
                .numpy()
            )
        sides = [
            [*tokenizer.source.encode([source])[0], EOS_ID],
            [*tokenizer.target.encode([target])[0], EOS_ID],
        ]
        source_BS, target_BT = (np.array([ids + [PAD_ID] * (40 - len(ids))]) for ids in sides)
        ours = logits(model, source_BS, target_BT)[0, : len(target_ids)]
        np.testing.assert_allclose(ours[:, columns], expected, atol=1e-4)
        assert np.delete(ours, columns, axis=1).max() < ours.max() - 80


@pytest.mark.cpu("an imported model computes in bfloat16 elsewhere")
def test_translations_agree(workdir, theirs, lines) -> None:
    model, tokenizer = theirs
    texts = lines[:16]
    ours = Translator.from_workdir(workdir, batch_size=16)
    generated = model.generate(**tokenizer(texts, return_tensors="pt", padding=True))
    expected = tokenizer.batch_decode(generated, skip_special_tokens=True)
    assert (ours.config.beam_size, ours.config.min_length, ours.config.suppress) == (
        3,
        5,
        ("<s>", "<unk>"),
    )
    assert [text.strip() for text in ours.translate(texts)] == expected
    assert len(set(expected)) > 3 and generated.shape[1] < 25


@pytest.mark.cpu("an imported model computes in bfloat16 elsewhere")
def test_attention_weights_are_theirs(marian, workdir, theirs, lines) -> None:
    model = MarianMTModel.from_pretrained(marian, attn_implementation="eager").eval()
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


def test_ctranslate2_gets_tags_as_pieces(workdir, tmp_path) -> None:
    pytest.importorskip("ctranslate2")
    """As docs/interop.md says: source.spm, which turns text into pieces for it, cuts them apart."""
    config, model, tokenizer = load_model(workdir)
    export_ctranslate2(config, model, tokenizer, tmp_path)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "source.spm")).encode(
        "two", out_type=str
    )
    assert [">>deu<<", *pieces] == tokenizer.source.tokens(
        tokenizer.source.encode([">>deu<< two"])[0]
    )
    assert ">>deu<<" in json.loads((tmp_path / "shared_vocabulary.json").read_text())


def test_training_goes_on_from_the_imported_parameters(workdir, tmp_path, lines) -> None:
    run = tmp_path / "run"
    (tmp_path / "source").write_text("\n".join(lines) + "\n")
    (tmp_path / "target").write_text("\n".join(map(_target, lines)) + "\n")
    pairs = PairsConfig("text", ("source",), ("target",))
    config = load_config_file(workdir / "config.json")  # what train.py --config takes too
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
    before = nnx.to_pure_dict(nnx.state(load_model(workdir)[1], nnx.Param))
    trained, model, tokenizer = load_model(run)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert (
        trained.optimizer.ema_decay == 0.9
        and tokenizer.fingerprint == load_model(workdir)[2].fingerprint
    )
    moved = np.abs(
        np.asarray(after["target_embedding"]["matrix"] - before["target_embedding"]["matrix"])
    ).max()
    assert 0 < moved < 1e-5  # three steps of a warm-up from zero


def _change_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text()) | values
        (folder / "config.json").write_text(
            json.dumps({k: v for k, v in content.items() if v is not None})
        )

    return change


def _change_tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return rewrite


_FC1 = "model.encoder.layers.0.fc1.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda f: (f / "model.safetensors").unlink(),
            "pytorch_model.bin' cannot be read .*No such file.* expected a file from a Hugging",
        ),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"x" * 50),
            "model.safetensors' cannot be read",
        ),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "pytorch_model.bin' cannot be read",
        ),
        (
            _change_tensors(lambda t: t.pop(_FC1)),
            rf"have no tensor for {_FC1}; expected shape \(24, 16\)",
        ),
        (
            _change_tensors(lambda t: t.update(more=np.ones(3, np.float32))),
            "have shape .3,. for more; expected no tensor",
        ),
        (
            _change_tensors(lambda t: t.update({_FC1: np.ones((3, 16), np.float32)})),
            r"have shape \(3, 16\) for .*; expected shape \(24, 16\)",
        ),
        (
            lambda f: (f / "config.json").unlink(),
            "config.json' cannot be read .* expected a file from a Hugging Face .* hf download",
        ),
        (lambda f: (f / "config.json").write_text("{"), "config.json' cannot be read"),
        (
            lambda f: (f / "generation_config.json").unlink(),
            "generation_config.json' cannot be read",
        ),
        (lambda f: (f / "source.spm").unlink(), "source.spm' does not exist"),
        (
            lambda f: (f / "target.spm").write_bytes(b"not a model"),
            "target.spm.* is not a SentencePiece model",
        ),
        (
            lambda f: (f / "vocab.json").write_text('{"<unk>": 0}'),
            "has 1 tokens; expected every id from 0 to",
        ),
        (_change_config(model_type="bart"), "model_type in .* is 'bart'; expected 'marian'"),
        (_change_config(d_model=None), "lacks d_model"),
        (_change_config(normalize_before=True), "normalize_before in .* is True"),
        (_change_config(scale_embedding=False), "scale_embedding in .* is False"),
        (_change_config(decoder_ffn_dim=30), "decoder_ffn_dim in .* is 30"),
        (
            _change_config(activation_function="quick_gelu"),
            "activation_function in .* is 'quick_gelu'; expected 'relu' or",
        ),
        (
            _change_config(decoder_start_token_id=999),
            "Special tokens in .* 'decoder_start': ''",
        ),
        (
            _change_config(pad_token_id=0),
            "Special tokens in .*; expected distinct tokens from vocab.json",
        ),
        (
            _change_config(pad_token_id=1),
            "Special tokens in .*; expected distinct tokens from vocab.json",
        ),
        (_change_config(decoder_start_token_id=0), "Special tokens in .* 'decoder_start': '</s>'"),
        (
            lambda f: (f / "vocab.json").write_text(
                (f / "vocab.json").read_text().replace("<unk>", "<un>")
            ),
            "Special tokens in .* other than '<unk>'",
        ),
        (_change_config(tie_word_embeddings=False), "tie_word_embeddings in .* is False; exp"),
        (
            _change_config(share_encoder_decoder_embeddings=False),
            "share_encoder_decoder_embeddings in .* is False; expected True. Only models with",
        ),
        (
            _change_config(encoder_layers=3),
            "have no tensor for model.encoder.layers.2.fc1.bias; exp",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(change, message, marian, tmp_path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(marian, folder)
    change(folder)
    with pytest.raises(UserError, match=message):
        import_huggingface(folder)


def _rename_shared(*names: str) -> Callable[[Path], None]:
    """Put the tied matrix under other names."""
    return _change_tensors(lambda t: t.update(dict.fromkeys(names, t.pop("model.shared.weight"))))


def _pickle(folder: Path) -> None:
    """Older files are PyTorch's, name tied matrices more than once, and hold position tables."""
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
def test_weights_may_be_under_other_names_and_in_another_file(change, marian, tmp_path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(marian, folder)
    change(folder)
    states = [nnx.state(import_huggingface(each)[1], nnx.Param) for each in (marian, folder)]
    jax.tree.map(np.testing.assert_array_equal, *states)


def _with_settings(marian: Path, folder: Path, **settings: Any) -> Path:
    shutil.copytree(marian, folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def test_search_settings_are_imported(marian, tmp_path) -> None:
    some = sorted(_vocabulary(marian))[5]
    settings = {
        **{"num_beams": 2, "length_penalty": 0.7, "no_repeat_ngram_size": 3, "min_new_tokens": 4},
        **{"bad_words_ids": [[_vocabulary(marian)[some]]], "renormalize_logits": True},
        **{"max_length": 512, "diversity_penalty": 0.0, "num_return_sequences": 1, "min_p": None},
    }
    expected = DecodingConfig(
        beam_size=2,
        length_penalty=0.7,
        length_offset=0.0,
        no_repeat_ngram=3,
        min_length=4,
        suppress=(some,),
    )
    config, *_ = import_huggingface(_with_settings(marian, tmp_path / "some", **settings))
    assert config.decoding == expected
    config, *_ = import_huggingface(_with_settings(marian, tmp_path / "none", num_beams=None))
    assert config.decoding == DecodingConfig(beam_size=1, length_penalty=1.0, length_offset=0.0)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("early_stopping", True, "early_stopping in .* is True, which is not supported"),
        ("do_sample", True, "do_sample in .* is True"),
        ("encoder_no_repeat_ngram_size", 3, "encoder_no_repeat_ngram_size in .* is 3"),
        ("repetition_penalty", 1.5, "repetition_penalty in .* is 1.5"),
        ("min_length", 4, "min_length in .* is 4"),
        ("suppress_tokens", [7], r"suppress_tokens in .* is \[7\]"),
        ("bad_words_ids", [[5], [5, 6]], r"bad_words_ids in .* is \[\[5\], \[5, 6\]\]"),
        (
            "length_penalty",
            -1.0,
            "decoding.length_penalty is -1.0",
        ),
        ("min_new_tokens", 60, "decoding.min_length is 60"),
    ],
)
def test_search_settings_without_a_counterpart_are_refused(
    setting, value, message, marian, tmp_path
) -> None:
    with pytest.raises(UserError, match=message):
        import_huggingface(_with_settings(marian, tmp_path / "folder", **{setting: value}))


def test_an_imported_model_can_be_exported_and_imported_again(workdir, tmp_path, lines) -> None:
    config, model, tokenizer = load_model(workdir)
    export_huggingface(config, model, tokenizer, tmp_path)
    theirs = MarianTokenizer.from_pretrained(tmp_path)
    again, _, tokenizer_again = import_huggingface(tmp_path)
    texts = [*lines, *map(_target, lines), ">>deu<< one", "漢 Ä zzz"]
    assert [theirs(text).input_ids[:-1] for text in texts] == tokenizer.source.encode(texts)
    assert tokenizer_again.source.encode(texts) == tokenizer.source.encode(texts)
    assert tokenizer_again.target.encode(texts) == tokenizer.target.encode(texts)
    assert again.decoding.suppress == config.decoding.suppress


def test_program_refuses_a_folder_in_use_and_bad_input(marian, workdir, tmp_path, capsys) -> None:
    assert main(["import", "--input", str(marian), "--workdir", str(workdir)]) == 2
    assert "expected a new or empty folder" in capsys.readouterr().err
    (tmp_path / "marian").mkdir()
    (tmp_path / "marian" / "model.npz").touch()
    for name in (
        "Helsinki-NLP/opus-mt-en-de",
        str(tmp_path / "marian"),
        str(tmp_path / "marian" / "model.npz"),
    ):
        assert main(["import", "--input", name, "--workdir", str(tmp_path / "w")]) == 2
        assert "config.json' cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "w").exists()


def test_an_import_that_was_cut_short_can_be_repeated(
    marian, tmp_path, monkeypatch, capsys
) -> None:
    arguments = ["import", "--input", str(marian), "--workdir", str(tmp_path / "w")]

    def full(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_manifest", full)
        assert main(arguments) == 2
        assert "no space left" in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert main(arguments) == 0 and [path.name for path in tmp_path.iterdir()] == ["w"]
    assert load_model(tmp_path / "w")[2].vocabulary
