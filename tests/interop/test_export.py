"""Exported models compute what ours compute, by the libraries themselves, and what cannot be
expressed is refused.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import ctranslate2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ctranslate2.specs import transformer_spec
from flax import nnx
from transformers import MarianMTModel, MarianTokenizer

from transformer_jax.checkpoint import save_model
from transformer_jax.config import ModelConfig, TokenizerConfig
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.interop.__main__ import main
from transformer_jax.interop.ctranslate2 import export_ctranslate2
from transformer_jax.interop.huggingface import export_huggingface
from transformer_jax.model.transformer import Transformer
from transformer_jax.special_ids import BOS_ID, EOS_ID, PAD_ID
from transformer_jax.tokenizer import Tokenizer

EXPORTS = {"ctranslate2": export_ctranslate2, "huggingface": export_huggingface}
# Fields of the model, whether both languages share the vocabulary, and the formats that can express
# it.
VARIANTS = {
    "paper": ({}, True, ["ctranslate2", "huggingface"]),
    "biases": (
        {"attention_bias": True, "softmax_bias": True, "positions": "split"},
        True,
        ["ctranslate2", "huggingface"],
    ),
    "pre-norm, wide heads, untied": (
        {
            "norm": "pre",
            "d_k": 12,
            "d_v": 9,
            "tie_embeddings": "none",
            "activation": "gelu_tanh",
            "norm_epsilon": 1e-3,
        },
        True,
        ["ctranslate2"],
    ),
    "learned, narrow heads": (
        {
            "positions": "learned",
            "max_positions": 40,
            "d_k": 3,
            "d_v": 5,
            "tie_embeddings": "target",
        },
        True,
        ["ctranslate2", "huggingface"],
    ),
    "untied, one decoder layer": (
        {
            "tie_embeddings": "none",
            "num_decoder_layers": 1,
            "activation": "silu",
            "positions": "split",
            "d_k": 4,
            "d_v": 6,
        },
        True,
        ["ctranslate2", "huggingface"],
    ),
    "biases in attention only, shared layers": (
        {
            "activation": "gelu",
            "attention_bias": True,
            "feed_forward_bias": False,
            "norm_bias": False,
            "distinct_layers": 1,
        },
        True,
        ["ctranslate2", "huggingface"],
    ),
    "embeddings tied apart from the softmax": (
        {"tie_embeddings": "embeddings", "positions": "split"},
        True,
        ["ctranslate2", "huggingface"],
    ),
    "final norm": ({"final_norm": True}, True, ["ctranslate2"]),
    "swiglu, rotary": (
        {"norm": "pre", "norm_type": "rms", "activation": "swiglu", "positions": "rotary"},
        True,
        ["ctranslate2"],
    ),
    "relative": ({"positions": "relative", "d_k": 12}, True, ["ctranslate2"]),
    "two vocabularies": (
        {"tie_embeddings": "target", "positions": "split", "norm_epsilon": 1e-5},
        False,
        ["ctranslate2", "huggingface"],
    ),
}


def _translator(folder: Path) -> ctranslate2.Translator:
    return ctranslate2.Translator(str(folder), inter_threads=1, intra_threads=1)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_agree_with_the_libraries(
    name, tmp_path, joint, separate, lines, make, logits
) -> None:
    fields, shared, formats = VARIANTS[name]
    tokenizer = joint if shared else separate
    config, model = make(tokenizer, **fields)
    sources = [[*ids, EOS_ID] for ids in tokenizer.encode_source(lines[:4])]
    targets = [
        [*ids, EOS_ID] for ids in tokenizer.encode_target([line.upper() for line in lines[4:8]])
    ]
    source_BS, target_BT = (
        np.array([ids + [PAD_ID] * (30 - len(ids)) for ids in side]) for side in (sources, targets)
    )
    ours_BTV = logits(model, source_BS, target_BT)
    log_probs_BTV = np.asarray(jax.nn.log_softmax(ours_BTV))
    for form in formats:
        folder = tmp_path / form
        folder.mkdir()
        EXPORTS[form](config, model, tokenizer, folder)
        if form == "huggingface":
            theirs, info = MarianMTModel.from_pretrained(folder, output_loading_info=True)
            assert not any(
                info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
            ), info
            theirs.eval()
            with torch.no_grad():
                inputs_BT = np.pad(target_BT[:, :-1], ((0, 0), (1, 0)), constant_values=BOS_ID)
                source = torch.tensor(source_BS)
                got = theirs(
                    source,
                    attention_mask=source != PAD_ID,
                    decoder_input_ids=torch.tensor(inputs_BT),
                ).logits.numpy()
            real_BT = target_BT != PAD_ID
            np.testing.assert_allclose(got[real_BT], ours_BTV[real_BT], atol=1e-4)
        else:
            scores = _translator(folder).score_batch(
                [tokenizer.source_tokens(ids[:-1]) for ids in sources],
                [tokenizer.target_tokens(ids[:-1]) for ids in targets],
            )
            for b, (score, ids) in enumerate(zip(scores, targets, strict=True)):
                np.testing.assert_allclose(
                    score.log_probs, log_probs_BTV[b, range(len(ids)), ids], atol=1e-4
                )
    if not shared:
        assert json.loads((tmp_path / "huggingface" / "tokenizer_config.json").read_text())[
            "separate_vocabs"
        ]


def _let_sentences_end(model: Transformer, drift: float) -> None:
    """Give later target positions more and more of the direction that EOS is scored by."""
    end_D = model.softmax_matrix[...][EOS_ID]
    table = model.target_embedding.position_matrix
    steps_L1 = jnp.arange(len(table), dtype=jnp.float32)[:, None] - 4
    table[...] = table[...] + drift * steps_L1 * (end_D / jnp.linalg.norm(end_D))[None]


def test_greedy_and_beam_outputs_agree_with_the_libraries(tmp_path, joint, lines, make) -> None:
    # Length penalty 0, where all stop alike; EOS likely enough that no translation meets a limit,
    # where they differ.
    texts = lines[:16]
    ours: dict[int, Translator] = {}
    for seed, drift in [(2, 1.5), (18, 0.8)]:
        config, model = make(
            joint,
            seed,
            softmax_bias=True,
            tie_embeddings="none",
            num_layers=1,
            positions="learned",
            max_positions=40,
        )
        _let_sentences_end(model, drift)
        folders = {
            form: tmp_path / f"{form} {seed} {drift}" for form in ("ctranslate2", "huggingface")
        }
        for form, folder in folders.items():
            folder.mkdir()
            EXPORTS[form](config, model, joint, folder)
        translator = _translator(folders["ctranslate2"])
        settings = json.loads((folders["ctranslate2"] / "generation_config.json").read_text())
        theirs = MarianMTModel.from_pretrained(folders["huggingface"]).eval()
        their_tokenizer = MarianTokenizer.from_pretrained(folders["huggingface"])
        batch = their_tokenizer(texts, return_tensors="pt", padding=True)
        sources = joint.encode_source(texts)
        assert [[i for i in row if i != PAD_ID] for row in batch.input_ids.tolist()] == [
            [*ids, EOS_ID] for ids in sources
        ]
        assert theirs.generation_config.num_beams == settings["beam_size"] == 4
        for beam_size in (1, 4):
            if beam_size not in ours:
                ours[beam_size] = Translator(
                    model, joint, dataclasses.replace(config.decoding, beam_size=beam_size)
                )
            ours[beam_size].parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))
            results = [translations[0] for translations in ours[beam_size].stream(texts)]
            assert len({result.text for result in results}) > (8 if beam_size == 1 else 3)
            assert max(result.length for result in results) < 20
            found = translator.translate_batch(
                [joint.source_tokens(ids) for ids in sources], **settings | {"beam_size": beam_size}
            )
            assert [joint.decode_target(joint.target_ids(f.hypotheses[0])) for f in found] == [
                r.text for r in results
            ]
            generated = theirs.generate(**batch, num_beams=beam_size)
            # stripped of outer spaces
            texts_there = their_tokenizer.batch_decode(generated, skip_special_tokens=True)
            assert texts_there == [r.text.strip() for r in results]


def test_scores_are_those_of_the_libraries_at_length_offset_0(tmp_path, joint, lines, make) -> None:
    """They may stop before no better one can come, we do not: so ours are no worse. CTranslate2's
    are the same with the patience that is exported.
    """
    texts = lines[:12]
    config, model = make(
        joint,
        2,
        softmax_bias=True,
        tie_embeddings="none",
        num_layers=1,
        positions="learned",
        max_positions=40,
    )
    _let_sentences_end(model, 1.5)
    bias = model.softmax_bias
    # CTranslate2 normalises again without what is suppressed
    bias[...] = bias[...].at[PAD_ID].set(-30.0)
    decoding = dataclasses.replace(config.decoding, length_penalty=0.8, length_offset=0.0)
    for form in ("ctranslate2", "huggingface"):
        (tmp_path / form).mkdir()
        notes = EXPORTS[form](
            dataclasses.replace(config, decoding=decoding), model, joint, tmp_path / form
        )
        assert not any("rank otherwise" in note for note in notes)
    ours = [
        translations[0].score for translations in Translator(model, joint, decoding).stream(texts)
    ]
    scorer = Scorer(model, joint, decoding)
    settings = json.loads((tmp_path / "ctranslate2" / "generation_config.json").read_text())
    pieces = [joint.source_tokens(ids) for ids in joint.encode_source(texts)]
    found = _translator(tmp_path / "ctranslate2").translate_batch(
        pieces, return_scores=True, **settings
    )
    batch = MarianTokenizer.from_pretrained(tmp_path / "huggingface")(
        texts, return_tensors="pt", padding=True
    )
    theirs = MarianMTModel.from_pretrained(tmp_path / "huggingface").eval()
    generated = theirs.generate(**batch, return_dict_in_generate=True, output_scores=True)
    sequences = [
        [i for i in row if i not in (PAD_ID, BOS_ID, EOS_ID)]
        for row in generated.sequences.tolist()
    ]
    for scores, targets in (
        ([f.scores[0] for f in found], [joint.target_ids(f.hypotheses[0]) for f in found]),
        (generated.sequences_scores.tolist(), sequences),
    ):
        log_probs = scorer.score_tokens(list(zip(joint.encode_source(texts), targets, strict=True)))
        np.testing.assert_allclose(scores, [x.sum() / len(x) ** 0.8 for x in log_probs], atol=1e-4)
        assert (np.array(ours) > np.array(scores) - 1e-4).all()
    np.testing.assert_allclose(ours, [f.scores[0] for f in found], atol=1e-4)


def test_exported_beam_search_is_not_worse_than_greedy(tmp_path, joint, lines, make) -> None:
    """With a length penalty CTranslate2 ends a search once beam size x patience hypotheses are
    finished, poor ones included: with its default of 1 too early for these models.
    """
    for seed, drift in [(9, 0.8), (2, 0.8)]:
        config, model = make(
            joint,
            seed,
            softmax_bias=True,
            tie_embeddings="none",
            num_layers=1,
            positions="learned",
            max_positions=40,
        )
        _let_sentences_end(model, drift)
        decoding = dataclasses.replace(config.decoding, length_penalty=0.6)
        folder = tmp_path / str(seed)
        folder.mkdir()
        export_ctranslate2(dataclasses.replace(config, decoding=decoding), model, joint, folder)
        translator = _translator(folder)
        settings = json.loads((folder / "generation_config.json").read_text())
        tokens = [joint.source_tokens(ids) for ids in joint.encode_source(lines)]
        scores = {}
        for name, changes in {
            "exported": {},
            "greedy": {"beam_size": 1},
            "default": {"patience": 1},
            "exhaustive": {"patience": 50},
        }.items():
            found = translator.translate_batch(tokens, return_scores=True, **settings | changes)
            scores[name] = np.array([result.scores[0] for result in found])
        assert (scores["default"] < scores["greedy"] - 1e-4).any(), "these models show nothing"
        assert (scores["exported"] > scores["greedy"] - 1e-4).all()
        np.testing.assert_allclose(scores["exported"], scores["exhaustive"], atol=1e-4)


@pytest.mark.parametrize(
    ("form", "fields", "field"),
    [
        ("huggingface", {"norm": "pre"}, "model.norm"),
        ("huggingface", {"d_k": 9, "d_v": 8}, "model.d_k"),
        ("huggingface", {"d_k": 8, "d_v": 9}, "model.d_v"),
        ("huggingface", {"norm_epsilon": 1e-3}, "model.norm_epsilon"),
        ("huggingface", {"final_norm": True}, "model.final_norm"),
        ("huggingface", {"norm_type": "rms"}, "model.norm_type"),
        ("huggingface", {"activation": "swiglu"}, "model.activation"),
        ("huggingface", {"positions": "rotary"}, "model.positions"),
        ("huggingface", {"encoder_window": 3}, "model.encoder_window"),
        ("ctranslate2", {"encoder_window": 3}, "model.encoder_window"),
        ("ctranslate2", {"positions": "rotary", "d_v": 20}, "model.d_v"),
    ],
)
def test_what_a_format_cannot_express_is_refused_by_field(
    form, fields, field, tmp_path, joint, make
) -> None:
    config, model = make(joint, **fields)
    with pytest.raises(UserError, match=f"^{field} is "):
        EXPORTS[form](config, model, joint, tmp_path)
    assert not any(tmp_path.iterdir())


def test_notes_name_what_is_only_approximated(tmp_path, joint, make) -> None:
    config, model = make(joint)
    decoding = dataclasses.replace(
        config.decoding, length_penalty=0.6, min_length=2, suppress=("T",), no_repeat_ngram=3
    )
    notes = export_huggingface(
        dataclasses.replace(config, decoding=decoding), model, joint, tmp_path
    )
    said = "\n".join(notes)
    assert "more than 24 tokens are translated in segments here" in said
    assert (
        "length^0.6" in said
        and "((5 + length) / 6)^0.6" in said
        and "1e-05" in said
        and "34 tokens" in said
    )
    generation = MarianMTModel.from_pretrained(tmp_path).generation_config
    assert (generation.length_penalty, generation.max_length, generation.min_new_tokens) == (
        0.6,
        35,
        2,
    )
    assert (
        generation.bad_words_ids == [[PAD_ID], joint.target_ids(["T"])]
        and generation.no_repeat_ngram_size == 3
    )


@pytest.mark.parametrize("form", ["ctranslate2", "huggingface"])
def test_a_piece_to_suppress_must_be_one(form, tmp_path, joint, make) -> None:
    config, model = make(joint)
    config = dataclasses.replace(
        config, decoding=dataclasses.replace(config.decoding, suppress=("qqq",))
    )
    with pytest.raises(
        UserError, match="decoding.suppress has 'qqq'; expected tokens of the target vocabulary"
    ):
        EXPORTS[form](config, model, joint, tmp_path)


def test_a_note_says_where_marian_tokenizer_cuts_tags_otherwise(
    tmp_path, lines, joint, make
) -> None:
    tagged = Tokenizer.train(
        [(line, line) for line in lines],
        TokenizerConfig(vocab_size=48, user_defined_symbols=(">>deu<<",)),
    )
    for tokenizer, said in ((joint, False), (tagged, True)):
        folder = tmp_path / str(said)
        folder.mkdir()
        config, model = make(tokenizer)
        notes = export_huggingface(config, model, tokenizer, folder)
        assert any("MarianTokenizer takes >>deu<< off" in note for note in notes) == said
    theirs, [ours] = MarianTokenizer.from_pretrained(folder), tagged.encode_source([">>deu<< one"])
    assert tagged.source_tokens(ours)[0] == "▁" and theirs(">>deu<< one").input_ids == [
        *ours[1:],
        EOS_ID,
    ]


def test_ctranslate2_gets_a_head_width_only_where_it_needs_one(
    tmp_path, joint, make, monkeypatch
) -> None:
    asked = []

    class Spec(transformer_spec.TransformerEncoderSpec):
        def __init__(self, *sizes: int, **more: object) -> None:
            asked.append("head_dim" in more)
            super().__init__(*sizes, **more)

    monkeypatch.setattr(transformer_spec, "TransformerEncoderSpec", Spec)
    for d_k in (8, 9):
        (tmp_path / str(d_k)).mkdir()
        config, model = make(joint, d_k=d_k, d_v=8)
        export_ctranslate2(config, model, joint, tmp_path / str(d_k))
    assert asked == [False, True]


@pytest.fixture
def workdir(tmp_path, joint, make):
    config, model = make(joint)
    folder = tmp_path / "run"
    save_model(folder, config, model, joint)
    return folder


def test_program_writes_a_whole_folder(workdir, tmp_path, capsys) -> None:
    arguments = [
        "export",
        "--workdir",
        str(workdir),
        "--format",
        "ctranslate2",
        "--output",
        str(tmp_path / "out"),
    ]
    assert main(arguments) == 0
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "model.bin",
        "config.json",
        "shared_vocabulary.json",
        "source.spm",
        "target.spm",
        "generation_config.json",
    }
    assert "note: " in capsys.readouterr().err
    assert main(arguments) == 2
    assert "there already" in capsys.readouterr().err
    assert not list(tmp_path.glob(".*"))


def test_program_fills_an_empty_folder_that_is_there(workdir, tmp_path, capsys) -> None:
    (tmp_path / "out" / ".unfinished" / "left by a kill").mkdir(parents=True)
    number = (tmp_path / "out").stat().st_ino
    assert (
        main(
            [
                "export",
                "--workdir",
                str(workdir),
                "--format",
                "huggingface",
                "--output",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    assert (tmp_path / "out").stat().st_ino == number  # a mount point cannot be replaced
    assert (
        not list((tmp_path / "out").glob(".*"))
        and (tmp_path / "out" / "model.safetensors").is_file()
    )


def test_program_writes_to_no_url(workdir, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                "export",
                "--workdir",
                str(workdir),
                "--format",
                "huggingface",
                "--output",
                "s3://bucket/x",
            ]
        )
        == 2
    )
    assert "output is 's3://bucket/x'; expected a folder" in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"run"}


def test_program_ends_with_status_2_and_writes_nothing(
    workdir, tmp_path, capsys, monkeypatch
) -> None:
    output = ["--output", str(tmp_path / "out")]
    for arguments, message in (
        (["--workdir", str(tmp_path / "none")], "holds no checkpoint"),
        (["--workdir", str(workdir), "--average", "2"], "average is 2"),
    ):
        assert main(["export", *arguments, "--format", "ctranslate2", *output]) == 2
        assert message in capsys.readouterr().err
    for package, form in (
        ("ctranslate2.specs", "ctranslate2"),
        ("safetensors.numpy", "huggingface"),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        assert main(["export", "--workdir", str(workdir), "--format", form, *output]) == 2
        assert f"pip install {package.split('.')[0]}" in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"run"}


def test_norm_epsilon_must_be_positive() -> None:
    with pytest.raises(UserError, match="model.norm_epsilon is 0.0"):
        ModelConfig(norm_epsilon=0.0)
