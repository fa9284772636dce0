"""Layouts, settings and tokenizers that published models have, and unusual folders.

Every case says which model has it. The files are small, with random weights.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.numpy import load_file, save_file
from tokenizers import models, pre_tokenizers, processors

from tests.pretrained import families
from transformer_jax import Engine, Sentence, UserError
from transformer_jax.pretrained.__main__ import main
from transformer_jax.pretrained.config_file import read_config
from transformer_jax.pretrained.families import FAMILIES
from transformer_jax.pretrained.files import read_files
from transformer_jax.pretrained.folder import Pretrained
from transformer_jax.pretrained.loading import import_huggingface, pretrained_workdir
from transformer_jax.settings.config import DecodingConfig

pytestmark = pytest.mark.cpu("compares with PyTorch to within 1e-5")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def changed(folder: Path, name: str = "config.json", **fields: Any) -> None:
    """Set fields of a JSON file; ... deletes a field."""
    content = json.loads((folder / name).read_text()) | fields
    content = {key: value for key, value in content.items() if value is not ...}
    (folder / name).write_text(json.dumps(content))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: Any) -> Callable[[str], Path]:
    """``folder_of(case)``: a copy of the stand-in."""
    originals: dict[str, Path] = {}

    def copy(case: str) -> Path:
        if case not in originals:
            originals[case] = tmp_path_factory.mktemp("original") / "model"
            families.write(case, originals[case])
        target = tmp_path_factory.mktemp("copy") / "model"
        shutil.copytree(originals[case], target)
        return target

    return copy


def logits_of_both(folder: Path, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the same ids, as transformers and this package load the folder."""
    theirs: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    _, model, _ = import_huggingface(folder, **options)
    rng = np.random.default_rng(0)
    source, labels = rng.integers(4, 20, (2, 2, 6))
    source[1, 4:] = model.config.pad_id
    mask = torch.tensor((source != model.config.pad_id).astype(int))
    start = np.full((2, 1), model.config.decoder_start_id)
    inputs = np.concatenate([start, labels[:, :-1]], axis=1)
    with torch.no_grad():
        expected = theirs(
            input_ids=torch.tensor(source),
            attention_mask=mask,
            decoder_input_ids=torch.tensor(inputs),
        ).logits.numpy()
    return np.asarray(model(source.astype(np.int32), labels.astype(np.int32))), expected


def assert_equal_logits(folder: Path, **options: Any) -> None:
    ours, expected = logits_of_both(folder, **options)
    assert np.abs(ours - expected).max() < 1e-4 * np.abs(expected).max()


CASE_OF = {"m2m_100": "m2m_100", "t5": "t5", "mt5": "mt5", "umt5": "umt5", "bart": "bart"}
CASE_OF |= {"mbart": "mbart", "pegasus": "pegasus", "marian": "marian"}


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - {"marian-npz"}))
def test_absent_fields_have_the_defaults_of_the_class(
    model_type: str, folder_of: Callable[[str], Path]
) -> None:
    """Older models lack newer fields. Each field alone, and all of them."""
    folder = folder_of(CASE_OF[model_type])
    whole = (folder / "config.json").read_text()
    family = FAMILIES[model_type]
    required = dict.fromkeys(
        [*family.required, "normalize_before", "share_encoder_decoder_embeddings"]
    )
    for absent in [[name] for name in family.defaults] + [list(family.defaults)]:
        (folder / "config.json").write_text(whole)
        changed(folder, **dict.fromkeys([*absent, *required], ...))
        theirs = transformers.AutoConfig.from_pretrained(folder)
        fields = read_config(read_files(folder)).fields
        for name in absent:
            expected = getattr(theirs, name, None)
            if name == "num_decoder_layers":  # transformers has the number already
                expected = None if expected == theirs.num_layers else expected
            if name == "tie_word_embeddings":
                expected = True
            assert fields[name] == expected, (absent, name)
    for name in family.fields:
        assert name in family.defaults


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("m2m_100", {"scale_embedding": ..., "activation_function": ...}),
        ("m2m_100", {"max_position_embeddings": ...}),
        ("m2m_100", {"pad_token_id": 3}),  # positions begin after it
        ("pegasus", {"decoder_start_token_id": ...}),
        ("bart", {"activation_function": ..., "scale_embedding": True}),
        ("t5", {"relative_attention_max_distance": ..., "feed_forward_proj": ...}),
        ("mt5", {"feed_forward_proj": ...}),
        ("marian", {"activation_function": ..., "scale_embedding": ...}),
    ],
)
def test_unusual_and_absent_fields(
    case: str, fields: dict[str, Any], folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(case)
    (folder / "generation_config.json").unlink()
    changed(folder, **fields)
    if "pad_token_id" in fields:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["<pad>"], vocabulary["<unk>"] = 3, 1
        for added in tokenizer["added_tokens"]:
            added["id"] = vocabulary[added["content"]]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert_equal_logits(folder)


def test_madlad_400_has_no_shared_weight(folder_of: Callable[[str], Path]) -> None:
    """google/madlad400-3b-mt: decoder.embed_tokens.weight and lm_head.weight, untied."""
    folder = folder_of("t5 1.1")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    shared = tensors.pop("shared.weight")
    tensors["decoder.embed_tokens.weight"] = shared
    tensors["lm_head.weight"] = np.random.default_rng(0).standard_normal(shared.shape, np.float32)
    save_file(tensors, file, metadata={"format": "pt"})
    changed(folder, tie_word_embeddings=False)
    config, model, _ = import_huggingface(folder)
    assert config.model.tie_embeddings == "embeddings" and not config.model.output_scale
    np.testing.assert_array_equal(np.asarray(model.target_embedding.matrix[...]), shared)
    np.testing.assert_array_equal(np.asarray(model.output_matrix_VD), tensors["lm_head.weight"])
    assert_equal_logits(folder)


def bert_tokenizer(folder: Path) -> None:
    """As fnlp/bart-base-chinese: [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, which is EOS."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *families.WORDS]
    ids = {word: i for i, word in enumerate(words)}
    fast = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    fast.save(str(folder / "tokenizer.json"))
    special = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[UNK]"}
    settings = {f"{name}_token": token for name, token in special.items()}
    settings["tokenizer_class"] = "BertTokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ids_of_model = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    changed(folder, **ids_of_model, decoder_start_token_id=3, forced_bos_token_id=...)
    (folder / "generation_config.json").unlink()


def test_bart_with_the_tokenizer_of_bert(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("bart")
    bert_tokenizer(folder)
    config, _, tokenizer = import_huggingface(folder)
    assert (config.model.pad_id, config.model.eos_id, config.model.decoder_start_id) == (0, 3, 3)
    [ids] = tokenizer.source.encode(["w1 w2 zz"])
    affixes = tokenizer.affixes()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert [*affixes.source(ids), 3] == theirs("w1 w2 zz").input_ids
    assert [*affixes.target(ids), 3] == theirs(text_target="w1 w2 zz").input_ids
    assert tokenizer.source.unk_id == 1 and tokenizer.source.unk_id in ids
    assert tokenizer.target.decode([2, *ids[:2], 3, 0]) == "w1 w2"
    assert_equal_logits(folder)


def test_what_stands_around_a_line_is_asked(folder_of: Callable[[str], Path]) -> None:
    """A tokenizer.json that says something else is followed or refused."""
    folder = folder_of("nllb")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.get_vocab()

    def says(*around: str) -> None:
        special = [(token, ids[token]) for token in dict.fromkeys(around) if token != "$A"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(around), special_tokens=special
        )
        tokenizer.save(str(folder / "tokenizer.json"))

    says("$A", "</s>", "deu_Latn")  # as NLLB with legacy_behaviour
    legacy = Pretrained(folder).tokenizer()
    assert legacy.affixes("eng_Latn", "deu_Latn") == ([], [2, 28], [29])
    for around in (["$A"], ["$A", "</s>"], ["<s>", "$A", "</s>"], ["eng_Latn", "</s>", "$A"]):
        says(*around)
        with pytest.raises(UserError, match=r"puts .* around a line.*; expected the language"):
            Pretrained(folder)


@pytest.mark.parametrize("legacy", [False, True])
def test_legacy_behaviour_of_nllb(legacy: bool, folder_of: Callable[[str], Path]) -> None:
    """facebook/nllb-200: NllbTokenizer puts the language first, or last in older versions. The
    published tokenizer.json says the opposite.
    """
    folder = folder_of("nllb")
    settings = {"tokenizer_class": "NllbTokenizer", "legacy_behaviour": legacy}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Pretrained(folder).tokenizer()
    affixes = tokenizer.affixes("deu_Latn", "eng_Latn")
    assert affixes == (([], [2, 29], [28]) if legacy else ([29], [], [28]))
    assert tokenizer.unscored_prefix_length == 1


def test_tokenizers_with_code_of_their_own_are_refused(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("bart")
    changed(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["x.Own", None]})
    with pytest.raises(UserError, match="is code of its own .auto_map"):
        Pretrained(folder)


def test_new_languages_can_have_other_codes(folder_of: Callable[[str], Path]) -> None:
    """Of fine-tuned NLLB models, such as gsw_CH."""
    folder = folder_of("nllb")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["gsw_CH"])
    tokenizer.save(str(folder / "tokenizer.json"))
    new = ["eng_Latn", "deu_Latn", "gsw_CH", "<mask>"]
    settings = {"tokenizer_class": "NllbTokenizer", "additional_special_tokens": new}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    shared = tensors["model.shared.weight"]
    tensors["model.shared.weight"] = np.concatenate([shared, shared[:1]])
    save_file(tensors, file, metadata={"format": "pt"})
    changed(folder, vocab_size=len(shared) + 1)
    _, _, ours = import_huggingface(folder)
    assert [*ours.languages.tokens] == ["eng_Latn", "deu_Latn", "gsw_CH"]
    assert ours.affixes("eng_Latn", "gsw_CH").before_target == [len(shared)]


def test_tokens_that_an_older_folder_adds(tmp_path: Path) -> None:
    """added_tokens.json, without tokenizer.json."""
    from tests.pretrained.test_family_tokenizers import original, write_config

    theirs = original("t5", tmp_path)
    size = max(theirs.get_vocab().values()) + 9
    write_config("t5", tmp_path, size)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<sep>": size - 2}))
    tokenizer = Pretrained(tmp_path).tokenizer()
    assert tokenizer.target.ids(["<sep>"]) == [size - 2]


def test_marian_with_padded_rows(folder_of: Callable[[str], Path]) -> None:
    """transformers' resize_token_embeddings(pad_to_multiple_of=8)."""
    folder = folder_of("marian")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, axis in (("model.shared.weight", 0), ("final_logits_bias", 1)):
        widths = [(0, 0), (0, 0)]
        widths[axis] = (0, 5)
        tensors[name] = np.pad(tensors[name], widths)
    save_file(tensors, file, metadata={"format": "pt"})
    size = len(tensors["model.shared.weight"])
    changed(folder, vocab_size=size, decoder_vocab_size=size)
    _, _, tokenizer = import_huggingface(folder)
    assert tokenizer.target.decode([2, size - 1, 3]) == tokenizer.target.decode([2, 3])
    assert tokenizer.target.tokens([size - 1]) == [f"<unused_{size - 1}>"]
    assert_equal_logits(folder)


# Search settings.

CNN = {  # facebook/bart-large-cnn
    "_from_model_config": True,
    "bos_token_id": 0,
    "decoder_start_token_id": 2,
    "early_stopping": True,
    "eos_token_id": 2,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "length_penalty": 2.0,
    "max_length": 142,
    "min_length": 56,
    "no_repeat_ngram_size": 3,
    "num_beams": 4,
    "pad_token_id": 1,
    "transformers_version": "4.27.0.dev0",
}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            CNN,
            {"beam_size": 4, "length_penalty": 2.0, "min_length": 55, "max_extra_length": 55}
            | {"no_repeat_ngram": 3, "patience": 1.0},
        ),
        ({"top_k": 10, "temperature": 0.7, "top_p": 0.9, "typical_p": 0.5}, {}),
        ({"bad_words_ids": [[2], [5]], "eos_token_id": [2]}, {"suppress": ("w1",)}),
    ],
)
def test_search_settings(
    settings: dict[str, Any], expected: dict[str, Any], folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of("bart")
    (folder / "generation_config.json").write_text(json.dumps(settings))
    config, _, tokenizer = import_huggingface(folder)
    expected = {"beam_size": 1, "length_penalty": 1.0} | expected
    wanted = DecodingConfig(length_offset=0.0, max_source_length=64, **expected)
    assert config.decoding == wanted
    assert tokenizer.unscored_prefix_length == ("forced_bos_token_id" in settings)


def test_ids_of_the_generation_config_come_first(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("nllb")
    changed(folder, "generation_config.json", decoder_start_token_id=0)
    config, *_ = import_huggingface(folder)
    assert config.model.decoder_start_id == 0
    changed(folder, "generation_config.json", eos_token_id=[2, 3])
    with pytest.raises(
        UserError, match=r"Special tokens .*eos_token_id = \[2, 3\].*; expected one id"
    ):
        import_huggingface(folder)


# Token ids.


# The layouts of languages, and two vocabularies; the others with make test-all.
DEFAULT = ("nllb", "mbart, first version", "marian, two vocabularies")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in DEFAULT else pytest.mark.exhaustive)
        for case in families.CASES
    ],
)
def test_ids_of_transformers_go_straight_into_the_search(
    case: str, folder_of: Callable[[str], Path]
) -> None:
    """With the language and EOS, as their tokenizer gives them."""
    folder = folder_of(case)
    _, model, tokenizer = import_huggingface(folder)
    theirs = families.model_class(case).from_pretrained(folder).eval()
    affixes = tokenizer.affixes(*(families_codes(case) or ("", "")))
    lines = [f"w{i} w{i + 3} w{i + 5}" for i in range(6)]
    sources = []
    for ids in tokenizer.source.encode(lines):
        source = affixes.source(ids)
        sources.append(source if model.config.eos_id in source else [*source, model.config.eos_id])
    forced = affixes.before_target[: tokenizer.unscored_prefix_length]
    out = theirs.generate(
        torch.tensor(sources),
        num_beams=1,
        do_sample=False,
        max_new_tokens=12,
        min_length=0,
        forced_bos_token_id=forced[0] if forced else None,
        forced_eos_token_id=None,
        bad_words_ids=[[model.config.pad_id]],
    )
    decoding = DecodingConfig(beam_size=1, max_length=12, max_source_length=32, batch_size=8)
    engine = Engine(model, decoding, unscored_prefix_length=tokenizer.unscored_prefix_length)
    found = engine.search([Sentence(source, forced) for source in sources])
    for row, [best] in zip(out[:, 1:].tolist(), found):
        eos = model.config.eos_id
        wanted = row[: row.index(eos)] if eos in row else row[:11]
        assert best.tokens[:11] == wanted[:11]


def families_codes(case: str) -> tuple[str, ...]:
    if case == "m2m_100":
        return "en", "de"
    return () if case == "mbart, first version" else tuple(families.languages(case))


def test_invalid_bytes_of_byt5_are_dropped(tmp_path: Path) -> None:
    """One invalid byte, or a character that the limit of length cuts, does not spoil the line."""
    config = transformers.T5Config(vocab_size=384, d_model=16, decoder_start_token_id=0)
    config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    target = Pretrained(tmp_path).tokenizer().target
    theirs = transformers.ByT5Tokenizer()
    [ids] = target.encode(["schön und größer"])
    for damaged in (ids[:5], [*ids, 3 + 0xFF], [*ids[:3], 3 + 0xC3, *ids[3:]], [*ids, 300, 383]):
        expected = theirs.decode(damaged, skip_special_tokens=True)
        assert target.decode(damaged) == expected and "\ufffd" not in expected


# Files.


def test_the_cache_of_imports_knows_every_file(
    folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if an older file takes the place of another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, other = folder_of("nllb"), folder_of("nllb")
    first = pretrained_workdir(folder)
    assert pretrained_workdir(folder) == first
    tensors = load_file(other / "model.safetensors")
    tensors["model.shared.weight"] = tensors["model.shared.weight"] * 2
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    os.utime(other / "model.safetensors", (1, 1))
    (other / "model.safetensors").replace(folder / "model.safetensors")
    assert pretrained_workdir(folder) != first


def test_a_pickle_of_parameters(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("marian")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    state = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in tensors.items()}
    torch.save(state, folder / "pytorch_model.bin")
    _, model, _ = import_huggingface(folder, allow_pickle=True)
    _, expected, _ = import_huggingface(folder_of("marian"))
    matrices = [np.asarray(x.target_embedding.matrix[...]) for x in (model, expected)]
    np.testing.assert_array_equal(*matrices)


def adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def folder_named_like_a_file(folder: Path) -> None:
    (folder / "more.json").mkdir()


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "notes.txt")


def weights_are_a_pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


UNUSUAL: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "adapter": ("nllb", adapter, "is an adapter .such as LoRA.*merge_and_unload"),
    "quantized": (
        "nllb",
        lambda f: changed(f, quantization_config={"load_in_8bit": True}),
        "has a quantization_config; expected a model with float weights",
    ),
    "no source.spm": (
        "marian",
        lambda f: (f / "source.spm").unlink(),
        "has no source.spm; expected the tokenizer's SentencePiece models",
    ),
    "folder": ("nllb", folder_named_like_a_file, "more.json' is a folder; expected a file"),
    "pipe": ("nllb", pipe, "notes.txt' is a pipe or a device; expected a file"),
    "pipe of weights": ("nllb", weights_are_a_pipe, "model.safetensors' is a pipe or a device"),
    "surrogate": (
        "marian",
        lambda f: changed(f, "vocab.json", **{"\ud800": 9}),
        "is not valid Unicode",
    ),
    "list of a forced token": (
        "nllb",
        lambda f: changed(f, "generation_config.json", forced_bos_token_id=[1]),
        r"forced_bos_token_id in .* is \[1\], which is not supported",
    ),
    "512 layers": (
        "nllb",
        lambda f: changed(f, encoder_layers=512),
        "have no tensor for model.encoder.layers.511; expected 512 layers in the encoder",
    ),
    "another activation": (
        "t5 1.1",
        lambda f: changed(f, dense_act_fn="relu"),
        "dense_act_fn in config.json is 'relu'; expected 'gelu_new'",
    ),
    "EOS without a token": (
        "t5",
        lambda f: changed(f, eos_token_id=29),
        "has no token with the id 29, eos_token_id",
    ),
    "PAD is UNK": (
        "t5",
        lambda f: changed(f, pad_token_id=2),
        "pad_id and unk_id of a vocabulary are both 2",
    ),
}


@pytest.mark.parametrize(("case", "change", "message"), UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_folders_are_refused_at_once(
    case: str, change: Callable[[Path], Any], message: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(case)
    change(folder)
    if "EOS" in message or "eos" in message:
        (folder / "generation_config.json").unlink()
    start = time.monotonic()
    with pytest.raises(UserError, match=message):
        import_huggingface(folder)
    assert time.monotonic() - start < 10


@pytest.mark.exhaustive
def test_a_model_is_compared_with_transformers(
    folder_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """By the program, which prints a table."""
    folder = folder_of("nllb")
    flags = ["--source-language", "eng_Latn", "--target-language", "deu_Latn"]
    assert main(["verify", str(folder), *flags]) == 0
    assert "| 20 of 20 |" in capsys.readouterr().out
