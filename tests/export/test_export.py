"""Exports: results in the target library, round trip of MarianMT, and unsupported models."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ctranslate2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers  # its classes are imported on first use, which takes 3 s
import yaml
from flax import nnx

from transformer_jax import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    Config,
    DataConfig,
    DecodingConfig,
    ModelConfig,
    PairsConfig,
    Scorer,
    Tokenizer,
    TokenizerConfig,
    Transformer,
    Translator,
    UserError,
    build_corpus,
    save_model,
)
from transformer_jax.export.__main__ import main
from transformer_jax.export.huggingface import export_huggingface
from transformer_jax.export.model_card import write_model_card
from transformer_jax.pretrained import search_settings
from transformer_jax.pretrained.__main__ import main as import_main
from transformer_jax.pretrained.ctranslate2 import export_ctranslate2
from transformer_jax.pretrained.loading import import_huggingface

EXPORTS = {"ctranslate2": export_ctranslate2, "huggingface": export_huggingface}
# Fields of models that both formats can express, and of models for CTranslate2 only.
BOTH: dict[str, dict[str, Any]] = {
    "paper": {"norm_epsilon": 1e-5},
    "biases, one decoder layer": {
        **{"attention_bias": True, "softmax_bias": True, "num_decoder_layers": 1},
        **{"activation": "silu"},
    },
    "biases in attention only": {
        **{"attention_bias": True, "feed_forward_bias": False, "norm_bias": False},
        **{"activation": "gelu"},
    },
}
CTRANSLATE2: dict[str, dict[str, Any]] = {
    "pre-norm, untied": {
        **{"norm": "pre", "norm_epsilon": 1e-3, "tie_embeddings": "none"},
        **{"activation": "gelu_tanh"},
    },
    "learned": {"positions": "learned", "max_positions": 40, "tie_embeddings": "target"},
    "learned, untied": {"positions": "learned", "max_positions": 40, "tie_embeddings": "none"},
    "embeddings tied apart from the softmax": {
        **{"tie_embeddings": "embeddings", "activation": "gelu"},
    },
    "final norm": {"final_norm": True},
    "swiglu": {"norm": "pre", "norm_type": "rms", "activation": "swiglu"},
    "two vocabularies": {"tie_embeddings": "target"},
    "learned from the third row, normalized": {
        **{"positions": "learned", "position_offset": 2, "max_positions": 40},
        **{"embedding_norm": True, "embedding_scale": "none", "share_positions": False},
    },
    "sinusoids from the fourth on": {"position_offset": 3, "embedding_scale": "tokens"},
    "a position bias for each layer": {
        **{"positions": "relative", "relative_bias": "layer", "relative_distance": 9},
        **{"relative_buckets": 6, "attention_scale": False, "output_scale": True},
    },
    "narrow heads": {"d_k": 5, "d_v": 5},
}
# Fields of our config that Hugging Face's folder keeps.
KEPT = ["vocab_size", "source_vocab_size", "tie_embeddings", "positions", "activation"]


def export(
    form: str, folder: Path, config: Config, model: Transformer, tokenizer: Tokenizer
) -> Path:
    folder.mkdir(parents=True)
    EXPORTS[form](config, model, tokenizer, folder)
    return folder


def ctranslate2_of(folder: Path) -> ctranslate2.Translator:
    return ctranslate2.Translator(str(folder), inter_threads=1, intra_threads=1)


def marian_of(folder: Path) -> transformers.MarianMTModel:
    model, info = transformers.MarianMTModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched")), info
    return model.eval()


def padded(rows: list[list[int]]) -> np.ndarray:
    return np.array([ids + [PAD_ID] * (30 - len(ids)) for ids in rows])


@pytest.mark.parametrize("name", [*BOTH, *CTRANSLATE2])
def test_logits_agree_with_the_libraries(
    name, tmp_path, joint, separate, lines, make, logits
) -> None:
    tokenizer = separate if name.startswith("two") else joint
    config, model = make(tokenizer, **(BOTH | CTRANSLATE2)[name])
    sources = [[*ids, EOS_ID] for ids in tokenizer.source.encode(lines[:4])]
    upper = [line.upper() for line in lines[4:8]]
    targets = [[*ids, EOS_ID] for ids in tokenizer.target.encode(upper)]
    source_BS, target_BT = padded(sources), padded(targets)
    ours_BTV, real_BT = logits(model, source_BS, target_BT), target_BT != PAD_ID

    folder = export("ctranslate2", tmp_path / "ctranslate2", config, model, tokenizer)
    scores = ctranslate2_of(folder).score_batch(
        [tokenizer.source.tokens(ids[:-1]) for ids in sources],
        [tokenizer.target.tokens(ids[:-1]) for ids in targets],
    )
    log_probs_BTV = np.asarray(jax.nn.log_softmax(ours_BTV))
    for b, (score, ids) in enumerate(zip(scores, targets, strict=True)):
        expected = log_probs_BTV[b, range(len(ids)), ids]
        np.testing.assert_allclose(score.log_probs, expected, atol=1e-4)
    if name in CTRANSLATE2:
        return

    folder = export("huggingface", tmp_path / "huggingface", config, model, tokenizer)
    source = torch.tensor(source_BS)
    inputs_BT = np.pad(target_BT[:, :-1], ((0, 0), (1, 0)), constant_values=BOS_ID)
    with torch.no_grad():
        theirs_BTV = marian_of(folder)(
            *(source, source != PAD_ID), decoder_input_ids=torch.tensor(inputs_BT)
        ).logits.numpy()
    np.testing.assert_allclose(theirs_BTV[real_BT], ours_BTV[real_BT], rtol=1e-5, atol=1e-4)
    config_again, model_again, tokenizer_again = import_huggingface(folder)
    for field in KEPT:
        assert getattr(config_again.model, field) == getattr(config.model, field), field
    assert config_again.model.norm_epsilon == 1e-5
    assert config_again.decoding.beam_size == config.decoding.beam_size
    assert tokenizer_again.source.encode(lines) == tokenizer.source.encode(lines)
    assert tokenizer_again.target.encode(upper) == tokenizer.target.encode(upper)
    assert tokenizer_again.joint == tokenizer.joint
    in_float32 = dataclasses.replace(config_again.model, dtype="float32")
    graph, _ = nnx.split(Transformer(in_float32, rngs=nnx.Rngs(9)), nnx.Param)
    model_again = nnx.merge(graph, nnx.state(model_again, nnx.Param))
    again_BTV = logits(model_again, source_BS, target_BT)
    np.testing.assert_allclose(again_BTV[real_BT][:, 1:], ours_BTV[real_BT][:, 1:], atol=1e-4)


# Searches.


@pytest.fixture
def marian(joint, make) -> Callable[..., tuple[Config, Transformer]]:
    """``marian(seed, **fields of DecodingConfig)``: a model like OPUS-MT whose sentences end."""

    def build(seed: int, **decoding: Any) -> tuple[Config, Transformer]:
        config, model = make(joint, seed, softmax_bias=True, num_layers=1)
        model.softmax_bias[...] = model.softmax_bias[...].at[EOS_ID].add(2.0)
        search = dataclasses.replace(config.decoding, **decoding)
        return dataclasses.replace(config, decoding=search), model

    return build


def by_ctranslate2(
    folder: Path, tokenizer: Tokenizer, texts: list[str], **changes: Any
) -> list[tuple[list[int], float]]:
    """Token ids and score of each translation, with changes to the exported settings."""
    settings = json.loads((folder / "generation_config.json").read_text()) | changes
    tokens = [tokenizer.source.tokens(ids) for ids in tokenizer.source.encode(texts)]
    found = ctranslate2_of(folder).translate_batch(tokens, return_scores=True, **settings)
    return [(tokenizer.target.ids(each.hypotheses[0]), each.scores[0]) for each in found]


def by_transformers(
    folder: Path, tokenizer: Tokenizer, texts: list[str], beam_size: int = 4
) -> list[tuple[list[int], float | None]]:
    """Token ids of each translation, and its score if from beam search."""
    their_tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    batch = their_tokenizer(texts, return_tensors="pt", padding=True)
    given = [[i for i in row if i != PAD_ID] for row in batch.input_ids.tolist()]
    assert given == [[*ids, EOS_ID] for ids in tokenizer.source.encode(texts)]
    found = marian_of(folder).generate(
        **batch, num_beams=beam_size, return_dict_in_generate=True, output_scores=True
    )
    scores = found.sequences_scores.tolist() if beam_size > 1 else [None] * len(texts)
    special = (PAD_ID, BOS_ID, EOS_ID)
    sequences = [[i for i in row if i not in special] for row in found.sequences.tolist()]
    return list(zip(sequences, scores, strict=True))


def test_greedy_and_beam_outputs_agree_with_the_libraries(tmp_path, joint, lines, marian) -> None:
    # The libraries' stopping rules agree at length penalty 0, if no translation reaches its limit.
    texts = lines[:16]
    config, model = marian(15)
    folders = {form: export(form, tmp_path / form, config, model, joint) for form in EXPORTS}
    for beam_size in (1, 4):
        decoding = dataclasses.replace(config.decoding, beam_size=beam_size)
        ours = [found[0] for found in Translator(model, joint, decoding).stream(texts)]
        expected = [translation.text for translation in ours]
        assert len(set(expected)) > 3
        assert max(translation.length for translation in ours) < 20
        for found in (
            by_ctranslate2(folders["ctranslate2"], joint, texts, beam_size=beam_size),
            by_transformers(folders["huggingface"], joint, texts, beam_size),
        ):
            assert [joint.target.decode(ids) for ids, _ in found] == expected


def test_scores_agree_with_the_libraries_at_length_offset_0(tmp_path, joint, lines, marian) -> None:
    """The libraries may stop before the best hypothesis is certain, so our scores are never worse.
    CTranslate2's are equal with the exported patience.
    """
    texts = lines[:12]
    config, model = marian(6, length_penalty=0.8, length_offset=0.0)
    bias = model.softmax_bias
    # CTranslate2 renormalizes without suppressed tokens
    bias[...] = bias[...].at[PAD_ID].set(-30.0)
    ours = [found[0].score for found in Translator(model, joint, config.decoding).stream(texts)]
    sources, scorer = joint.source.encode(texts), Scorer(model, joint, config.decoding)
    for form, translate in (("ctranslate2", by_ctranslate2), ("huggingface", by_transformers)):
        folder = export(form, tmp_path / form, config, model, joint)
        targets, scores = zip(*translate(folder, joint, texts), strict=True)
        log_probs = scorer.score_tokens(list(zip(sources, targets, strict=True)))
        np.testing.assert_allclose(scores, [x.sum() / len(x) ** 0.8 for x in log_probs], atol=1e-4)
        assert (np.array(ours) > np.array(scores) - 1e-4).all()
        if form == "ctranslate2":
            np.testing.assert_allclose(ours, scores, atol=1e-4)


@pytest.mark.parametrize(
    ("alpha", "patience"),
    [
        (0.5, 1.0),
        *(
            pytest.param(alpha, patience, marks=pytest.mark.exhaustive)
            for alpha, patience in ((0.5, 0.6), (0.5, 1.4), (0.5, 2.0), (1.0, 0.5), (1.0, 1.0))
        ),
    ],
)
def test_the_libraries_stop_at_the_same_patience(
    alpha, patience, tmp_path, joint, lines, marian
) -> None:
    """CTranslate2 for every patience, transformers for 1. No search reaches its length limit."""
    search = {"length_penalty": alpha, "length_offset": 0.0, "max_extra_length": 40}
    config, model = marian(15, patience=patience, **search)
    model.softmax_bias[...] = model.softmax_bias[...].at[PAD_ID].set(-30.0)
    ours = [found[0] for found in Translator(model, joint, config.decoding).stream(lines)]
    texts = [translation.text for translation in ours]
    assert max(translation.length for translation in ours) < 40
    libraries = {"ctranslate2": by_ctranslate2}
    if patience == 1:
        libraries["huggingface"] = by_transformers
    for form, translate in libraries.items():
        folder = export(form, tmp_path / form, config, model, joint)
        targets, scores = zip(*translate(folder, joint, lines), strict=True)
        assert [joint.target.decode(ids) for ids in targets] == texts
        np.testing.assert_allclose([each.score for each in ours], scores, atol=1e-4)
    if patience <= 1:
        exact = Translator(model, joint, dataclasses.replace(config.decoding, patience=None))
        assert exact.translate(lines) != texts


@pytest.mark.exhaustive
def test_ctranslate2_renormalizes_without_suppressed_tokens(
    tmp_path, joint, lines, marian, logits
) -> None:
    """We and transformers do not: the difference is -log(1 - p) for each token."""
    config, model = marian(15, suppress=tuple(joint.target.tokens(joint.target.encode(["T"])[0])))
    forbidden = [PAD_ID, *joint.target.ids(config.decoding.suppress)]
    sources, scorer = joint.source.encode(lines[:6]), Scorer(model, joint, config.decoding)
    folders = {form: export(form, tmp_path / form, config, model, joint) for form in EXPORTS}
    targets, theirs = zip(*by_ctranslate2(folders["ctranslate2"], joint, lines[:6]), strict=True)
    ours = scorer.score_tokens(list(zip(sources, targets, strict=True)))
    differences = []
    for pair in zip(sources, targets, strict=True):
        found = logits(model, *(np.array([[*ids, EOS_ID]]) for ids in pair))[0]
        differences.append(-np.log1p(-jax.nn.softmax(found)[:, forbidden].sum(1)).sum())
    assert max(map(len, targets)) < 20 and max(differences) > 1e-3
    np.testing.assert_allclose(theirs - np.array([x.sum() for x in ours]), differences, atol=1e-4)
    targets, theirs = zip(*by_transformers(folders["huggingface"], joint, lines[:6]), strict=True)
    ours = scorer.score_tokens(list(zip(sources, targets, strict=True)))
    np.testing.assert_allclose(theirs, [x.sum() for x in ours], atol=1e-4)


def test_the_end_at_the_limit_is_free_in_the_libraries(tmp_path, joint, lines, marian) -> None:
    """Our scores include EOS's log-probability there. CTranslate2 leaves EOS out, so its limit is
    one token longer.
    """
    limit = 4
    config, model = marian(6)
    bias = model.softmax_bias
    bias[...] = bias[...].at[PAD_ID].set(-30.0).at[EOS_ID].add(-3.0)
    sources, scorer = joint.source.encode(lines[:6]), Scorer(model, joint, config.decoding)
    folders = {form: export(form, tmp_path / form, config, model, joint) for form in EXPORTS}
    generation = folders["huggingface"] / "generation_config.json"
    settings = json.loads(generation.read_text()) | {"max_length": limit + 2}  # with BOS and EOS
    generation.write_text(json.dumps(settings))
    for found in (
        by_transformers(folders["huggingface"], joint, lines[:6]),
        by_ctranslate2(folders["ctranslate2"], joint, lines[:6], max_decoding_length=limit),
    ):
        targets, theirs = zip(*found, strict=True)
        ours = scorer.score_tokens(list(zip(sources, targets, strict=True)))
        cut = [len(target) == limit for target in targets]
        expected = [x[:-1].sum() if free else x.sum() for x, free in zip(ours, cut, strict=True)]
        np.testing.assert_allclose(theirs, expected, atol=1e-4)
        assert any(x[-1] < -0.1 for x, free in zip(ours, cut, strict=True) if free)


def test_exported_beam_search_is_not_worse_than_greedy(tmp_path, joint, lines, make) -> None:
    """With a length penalty, CTranslate2 stops after beam size x patience finished hypotheses, even
    poor ones. Its default patience of 1 is too early for these models.
    """
    searches = {
        "exported": {},
        "greedy": {"beam_size": 1},
        "default": {"patience": 1},
        "exhaustive": {"patience": 50},
    }
    fields = {"softmax_bias": True, "tie_embeddings": "none", "num_layers": 1}
    for seed in (9, 2):
        config, model = make(joint, seed, positions="learned", max_positions=40, **fields)
        decoding = dataclasses.replace(config.decoding, length_penalty=0.6)
        config = dataclasses.replace(config, decoding=decoding)
        # Sentences end, as target positions drift toward the output embedding of EOS.
        end_D, table = model.softmax_matrix[...][EOS_ID], model.target_embedding.position_matrix
        steps_L1 = jnp.arange(len(table), dtype=jnp.float32)[:, None] - 4
        table[...] = table[...] + 0.8 * steps_L1 * (end_D / jnp.linalg.norm(end_D))[None]
        folder = export("ctranslate2", tmp_path / str(seed), config, model, joint)
        scores = {
            name: np.array([x for _, x in by_ctranslate2(folder, joint, lines, **changes)])
            for name, changes in searches.items()
        }
        assert (scores["default"] < scores["greedy"] - 1e-4).any(), (
            "these models do not show the difference"
        )
        assert (scores["exported"] > scores["greedy"] - 1e-4).all()
        np.testing.assert_allclose(scores["exported"], scores["exhaustive"], atol=1e-4)


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_files_have_the_permissions_of_new_files(mask, tmp_path, joint, make) -> None:
    before = os.umask(mask)
    try:
        for form in EXPORTS:
            export(form, tmp_path / form, *make(joint), joint)
        save_model(tmp_path / "saved", *make(joint), joint)
        pairs = PairsConfig("text", ("one",), ("one",))
        (tmp_path / "one").write_text("one\n")
        build_corpus(pairs, joint, DataConfig(root=str(tmp_path), workers=1), tmp_path / "corpus")
    finally:
        os.umask(before)
    modes = {
        path: stat.S_IMODE(path.stat().st_mode) | path.is_dir() * 0o111
        for path in tmp_path.rglob("*")
    }
    assert len(modes) > 20
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o666 != 0o666 & ~mask} == {}


# Unsupported models, settings and tokenizers.


@pytest.mark.parametrize(
    ("form", "fields", "field"),
    [
        ("huggingface", {"norm": "pre"}, "model.norm"),
        ("huggingface", {"d_k": 9}, "model.d_k"),
        ("huggingface", {"d_v": 9}, "model.d_v"),
        ("huggingface", {"tie_embeddings": "target"}, "model.tie_embeddings"),
        ("huggingface", {"positions": "learned"}, "model.positions"),
        ("huggingface", {"norm_epsilon": 1e-3}, "model.norm_epsilon"),
        ("huggingface", {"final_norm": True}, "model.final_norm"),
        ("huggingface", {"norm_type": "rms"}, "model.norm_type"),
        ("huggingface", {"activation": "swiglu"}, "model.activation"),
        ("ctranslate2", {"d_k": 7}, "model.d_v"),
        ("ctranslate2", {"d_v": 7}, "model.d_v"),
    ],
)
def test_unsupported_fields_are_errors(form, fields, field, tmp_path, joint) -> None:
    sizes = {"d_model": 16, "d_ff": 24, "num_heads": 2, "num_layers": 1} | fields
    config = Config(model=ModelConfig(vocab_size=joint.target.vocab_size, **sizes))
    model = nnx.eval_shape(lambda: Transformer(config.model, rngs=nnx.Rngs(0)))
    with pytest.raises(UserError, match=f"^{field} is "):
        export(form, tmp_path / form, config, model, joint)
    assert not any((tmp_path / form).iterdir())


@pytest.mark.parametrize("form", EXPORTS)
def test_suppressed_tokens_must_be_in_the_vocabulary(form, tmp_path, joint, make) -> None:
    config, model = make(joint)
    config = dataclasses.replace(config, decoding=DecodingConfig(suppress=("qqq",)))
    message = "decoding.suppress contains 'qqq'; expected tokens in the target vocabulary"
    with pytest.raises(UserError, match=message):
        export(form, tmp_path / form, config, model, joint)


def test_search_settings_are_exported(tmp_path, joint, make) -> None:
    config, model = make(joint)
    changes = {"length_penalty": 0.6, "min_length": 2, "suppress": ("T",), "no_repeat_ngram": 3}
    decoding = dataclasses.replace(config.decoding, **changes)
    config = dataclasses.replace(config, decoding=decoding)
    folder = export("huggingface", tmp_path / "out", config, model, joint)
    theirs = transformers.MarianMTModel.from_pretrained(folder).generation_config
    assert (theirs.length_penalty, theirs.max_length, theirs.min_new_tokens) == (0.6, 35, 2)
    assert theirs.bad_words_ids == [[PAD_ID], joint.target.ids(["T"])]
    assert theirs.no_repeat_ngram_size == 3


def test_every_search_setting_has_a_name_elsewhere() -> None:
    """Or another form, or it is not part of a model's search: exports ignore no new setting."""
    without_a_name = {
        *("length_offset", "patience", "suppress"),
        *("max_length", "max_extra_length", "max_source_length"),
        *("method", "temperature", "top_k", "top_p", "seed"),
        *("batch_size", "weights"),
    }
    fields = {field.name for field in dataclasses.fields(DecodingConfig)}
    assert fields == {*search_settings._SETTING_NAMES} | without_a_name


def test_marian_tokenizer_removes_tags_before_it_tokenizes(tmp_path, lines, make) -> None:
    tagged = Tokenizer.train(
        [(line, line) for line in lines],
        TokenizerConfig(vocab_size=48, user_defined_symbols=(">>deu<<",)),
    )
    folder = export("huggingface", tmp_path / "tagged", *make(tagged), tagged)
    theirs = transformers.MarianTokenizer.from_pretrained(folder)
    [ours] = tagged.source.encode([">>deu<< one"])
    assert tagged.source.tokens(ours)[0] == "▁"
    assert theirs(">>deu<< one").input_ids == [*ours[1:], EOS_ID]


# The program.


@pytest.fixture(scope="module")
def workdir(joint, make, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    config, model = make(joint)
    save_model(folder, config, model, joint)
    return folder


@pytest.fixture
def run(workdir, tmp_path, capsys):
    """``run(format, *flags)`` exports the run to ``tmp_path/out``: exit status and stderr."""

    def program(form: str, *more: str, languages: Sequence[str] = ()) -> tuple[int, str]:
        flags = {"--workdir": workdir, "--format": form, "--output": tmp_path / "out"}
        flags |= dict(zip(more[::2], more[1::2], strict=True))
        words = [str(word) for pair in flags.items() for word in pair]
        status = main([*words, *languages])
        return status, capsys.readouterr().err

    return program


def test_program_writes_a_new_folder(run, tmp_path) -> None:
    status, said = run("ctranslate2")
    assert status == 0
    assert "out for ctranslate2. See docs/export.md for differences in search" in said
    files = ["README.md", "config.json", "generation_config.json", "model.bin"]
    files += ["shared_vocabulary.json", "source.spm", "target.spm"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == files
    status, said = run("ctranslate2")
    assert status == 2 and "expected a new or empty folder" in said
    assert not list(tmp_path.glob(".*"))


def test_program_keeps_an_existing_empty_folder(run, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    number = (tmp_path / "out").stat().st_ino
    assert run("huggingface")[0] == 0
    assert (tmp_path / "out").stat().st_ino == number  # a mount point cannot be replaced
    assert not list((tmp_path / "out").glob(".*"))
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_program_errors_write_nothing(run, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for flag, value, message in (
        ("--workdir", str(tmp_path / "none"), "is not a folder; expected a work directory"),
        ("--output", "s3://bucket/x", "'s3://bucket/x'; expected a new or empty folder"),
    ):
        status, said = run("huggingface", flag, value)
        assert status == 2 and message in said
    monkeypatch.setitem(sys.modules, "ctranslate2.specs", None)
    status, said = run("ctranslate2")
    assert status == 2 and "ctranslate2 is not installed" in said
    assert "pip install '.[export]'" in said
    assert not list(tmp_path.iterdir())


def test_model_cards_have_test_scores_and_signatures_of_the_exported_model(
    workdir, run, tmp_path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(workdir, folder / "model")
    shutil.copy(workdir / "config.json", folder)
    scores = {"bleu": 40.7, "bleu_signature": "nrefs:1|case:mixed|eff:no|tok:none|version:2.6.0"}
    (folder / "summary.json").write_text(json.dumps({"steps": 9, "test": scores}))
    languages = ["--languages", "en", "English", "de", "German"]
    assert run("huggingface", "--workdir", str(folder), languages=languages)[0] == 0
    card = (tmp_path / "out" / "README.md").read_text()
    fields = yaml.safe_load(card.split("---")[1])
    assert fields["language"] == ["en", "de"] and fields["pipeline_tag"] == "translation"
    assert all(f"- {name}: `{value}`\n" in card for name, value in scores.items())
    shutil.rmtree(tmp_path / "out")
    # A model folder has no scores.
    assert run("huggingface", "--workdir", str(folder / "model"))[0] == 0
    assert "bleu" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("is_finished", "summary"),
    [
        (True, {"test": {"bleu": 40.7}}),
        (False, {"test": {"bleu": 40.7}}),  # the run goes on: its checkpoint has no scores yet
        (True, {}),  # without a test set
        (True, None),
    ],
)
def test_model_cards_have_only_scores_of_the_model_that_is_exported(
    is_finished: bool, summary: dict[str, Any] | None, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    if is_finished:
        (folder / "model").mkdir()
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    write_model_card(str(folder), ("en", "de"), tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert ("bleu" in card) == (is_finished and bool(summary))


def test_norm_epsilon_must_be_positive() -> None:
    with pytest.raises(UserError, match="model.norm_epsilon is 0.0"):
        ModelConfig(norm_epsilon=0.0)


# Contents of the folders.

SEARCH = {
    **{"beam_size": 7, "length_penalty": 0.9, "min_length": 3, "no_repeat_ngram": 5},
    **{"max_source_length": 30, "max_extra_length": 12, "suppress": ("T",)},
}


def in_json(file: Path) -> Any:
    return json.loads(file.read_text())


def with_search(config: Config, **changes: Any) -> Config:
    return dataclasses.replace(config, decoding=dataclasses.replace(config.decoding, **changes))


@pytest.mark.parametrize(
    ("fields", "source", "target"),
    [({}, 30, 42), ({"positions": "learned", "max_positions": 36}, 30, 36)],
)
def test_every_search_setting_has_its_name_in_ctranslate2(
    fields, source, target, tmp_path, joint, make
) -> None:
    config, model = make(joint, num_layers=1, **fields)
    folder = export("ctranslate2", tmp_path / "out", with_search(config, **SEARCH), model, joint)
    assert in_json(folder / "generation_config.json") == {
        "beam_size": 7,
        "length_penalty": 0.9,
        "min_decoding_length": 3,
        "no_repeat_ngram_size": 5,
        "patience": 2.0,  # docs/export.md; the exact rule has no value
        "max_input_length": source,
        "max_decoding_length": target,
        "suppress_sequences": [["<pad>"], ["T"]],
    }
    its = in_json(folder / "config.json")
    tokens = its["bos_token"], its["decoder_start_token"], its["eos_token"], its["unk_token"]
    assert tokens == ("<s>", "<s>", "</s>", "<unk>") and its["add_source_eos"]
    assert its["layer_norm_epsilon"] == config.model.norm_epsilon


@pytest.mark.parametrize("tie_embeddings", ["all", "target"])
def test_suppressed_tokens_are_target_tokens(
    tie_embeddings, tmp_path, joint, separate, make
) -> None:
    tokenizer = joint if tie_embeddings == "all" else separate
    [letter] = tokenizer.target.suppressed_ids(["T"])
    assert (tokenizer.source.tokens([letter]) == ["T"]) is (tie_embeddings == "all")
    config, model = make(tokenizer, num_layers=1, tie_embeddings=tie_embeddings)
    config = with_search(config, suppress=("T",))
    folder = export("ctranslate2", tmp_path / "out", config, model, tokenizer)
    settings = in_json(folder / "generation_config.json")
    assert settings["suppress_sequences"] == [["<pad>"], ["T"]]


def test_every_setting_has_its_name_in_hugging_faces_files(tmp_path, joint, make) -> None:
    sizes = {"num_layers": 2, "num_decoder_layers": 1, "num_heads": 4, "activation": "gelu_tanh"}
    rates = {"dropout": 0.3, "attention_dropout": 0.2, "feed_forward_dropout": 0.15}
    config, model = make(joint, **sizes, **rates)
    folder = export("huggingface", tmp_path / "out", with_search(config, **SEARCH), model, joint)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    ids |= {"forced_eos_token_id": 2}
    assert in_json(folder / "generation_config.json") == {
        "num_beams": 7,
        "length_penalty": 0.9,
        "min_new_tokens": 3,
        "no_repeat_ngram_size": 5,
        "max_length": 43,  # 30 source tokens + 12 + BOS
        "bad_words_ids": [[0], joint.target.ids(["T"])],
        "early_stopping": False,
        **ids,
    }
    assert (
        in_json(folder / "config.json").items()
        >= {
            **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "vocab_size": 64},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
            **{"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "activation_function": "gelu_new"},
            **{"dropout": 0.3, "attention_dropout": 0.2, "activation_dropout": 0.15},
            **{"max_position_embeddings": 1024, "scale_embedding": True, "dtype": "float32"},
            **ids,
        }.items()
    )
    tokens = joint.source.tokens(range(64))
    assert in_json(folder / "vocab.json") == {token: i for i, token in enumerate(tokens)}
    assert (
        in_json(folder / "tokenizer_config.json").items()
        >= {
            **{"model_max_length": 30, "pad_token": "<pad>", "eos_token": "</s>"},
            **{"unk_token": "<unk>"},
        }.items()
    )
    again, *_ = import_huggingface(folder)
    for name, value in (sizes | rates).items():
        assert getattr(again.model, name) == value, name
    assert (again.decoding.length_penalty, again.decoding.length_offset) == (0.9, 0.0)
    # An import is set up for fine-tuning.
    assert again.optimizer.peak_learning_rate == 1e-4 and again.optimizer.warmup_steps == 1000


def test_positions_cover_the_longest_lines_of_the_search(tmp_path, joint, make) -> None:
    """At least 2,048 in CTranslate2 and 1,024 in Hugging Face's format."""
    config, model = make(joint, num_layers=1)
    longer = with_search(config, max_source_length=2500, max_extra_length=100)
    for form, settings, longest in (
        ("ctranslate2", config, 2048),
        ("ctranslate2", longer, 2600),
        ("huggingface", config, 1024),
        ("huggingface", longer, 2600),
    ):
        folder = export(form, tmp_path / f"{form}-{longest}", settings, model, joint)
        if form == "huggingface":
            assert in_json(folder / "config.json")["max_position_embeddings"] == longest
            continue
        tokens = ["T"] * (longest - 1)  # and EOS
        [score] = ctranslate2_of(folder).score_batch([tokens], [["T"]], max_input_length=0)
        assert np.isfinite(score.log_probs).all()
        with pytest.raises(RuntimeError, match="position"):
            ctranslate2_of(folder).score_batch([[*tokens, "T"]], [["T"]], max_input_length=0)


@pytest.mark.parametrize("form", EXPORTS)
def test_weights_are_float32_whatever_the_model_computes_in(form, tmp_path, joint, make) -> None:
    config, model = make(joint, num_layers=1, dtype="bfloat16")
    folder = export(form, tmp_path / "out", config, model, joint)
    if form == "ctranslate2":
        assert ctranslate2_of(folder).compute_type in ("float32", "int8_float32", "default")
        assert (folder / "model.bin").stat().st_size > 4 * 64 * 16
    else:
        from safetensors.numpy import load_file

        tensors = load_file(folder / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float32)}
        matrix = np.asarray(model.target_embedding.matrix[...])
        found_VD = tensors["model.shared.weight"]
        np.testing.assert_array_equal(np.sort(found_VD, axis=1), np.sort(matrix, axis=1))


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
def test_what_a_failed_export_wrote_is_removed(error, run, tmp_path, monkeypatch) -> None:
    def fail(*given: Any) -> None:
        (given[3] / "model.bin").write_text("half")
        raise error

    monkeypatch.setattr("transformer_jax.pretrained.ctranslate2.export_ctranslate2", fail)
    status, _ = run("ctranslate2")
    assert status == (130 if error is KeyboardInterrupt else 2)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "other").write_text("of somebody else")
    assert run("ctranslate2")[0] == 2  # and deletes nothing
    assert (tmp_path / "out" / "other").read_text() == "of somebody else"


def test_conversions_with_pytorch_copy_the_weights(logits) -> None:
    """Changing one model does not change the other."""
    from transformer_jax.export.pytorch import from_torch, to_torch

    theirs = torch.nn.Transformer(16, 2, 1, 1, 24, batch_first=True)
    embedding = torch.nn.Embedding(20, 16)
    model = from_torch(theirs, embedding, dtype="float32")
    source_BS, target_BT = np.array([[5, 6, 2]]), np.array([[7, 2, 0]])
    before = logits(model, source_BS, target_BT)
    modules = to_torch(model)
    kept = [parameter.detach().clone() for parameter in modules.transformer.parameters()]
    with torch.no_grad():
        for parameter in [*theirs.parameters(), embedding.weight]:
            parameter.zero_()
    np.testing.assert_array_equal(logits(model, source_BS, target_BT), before)
    with torch.no_grad():
        modules.target_embedding.weight.zero_()
        modules.output.weight.zero_()
    np.testing.assert_array_equal(logits(model, source_BS, target_BT), before)
    for parameter, value in zip(modules.transformer.parameters(), kept, strict=True):
        assert torch.equal(parameter, value)


def test_the_import_program_says_how_to_go_on(tmp_path, joint, make, capsys) -> None:
    config, model = make(joint, num_layers=1)
    folder = export("huggingface", tmp_path / "hf", config, model, joint)
    workdir = tmp_path / "run"
    assert import_main(["import", "--input", str(folder), "--workdir", str(workdir)]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[-2:] == [
        f"Translate:  python decode.py --workdir {workdir}",
        f"Fine-tune:  python train.py --config {workdir}/config.json "
        f"--training.start-from {workdir} --workdir NEW ...",
    ]


@pytest.mark.parametrize("layer", [None, 0, -1])
def test_alignments_of_ctranslate2_are_those_of_the_scorer(joint, make, tmp_path, layer) -> None:
    """From all heads of the last layer, or from the head that learned them."""
    config, model = make(joint, 3, alignment_layer=layer, num_decoder_layers=2)
    translator = ctranslate2_of(export("ctranslate2", tmp_path / "model", config, model, joint))
    sources = joint.source.encode(["One two three.", "four"])
    found = translator.translate_batch(
        [joint.source.tokens(ids) for ids in sources], return_attention=True, beam_size=1
    )
    pairs = [(s, joint.target.ids(each.hypotheses[0])) for s, each in zip(sources, found)]
    scorer = Scorer(model, joint, config.decoding)
    for each, weights_TS in zip(found, scorer.align_tokens(pairs)):
        theirs_TS = np.array(each.attention[0])
        expected_TS = weights_TS[: len(theirs_TS), :-1]  # they leave out EOS
        np.testing.assert_allclose(theirs_TS, expected_TS, atol=1e-5)
