"""Tokenizers of pretrained families segment text as transformers does, in folders of any age."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers
from transformers.models.m2m_100 import tokenization_m2m_100 as m2m_100
from transformers.models.mbart import tokenization_mbart as mbart
from transformers.models.mbart50 import tokenization_mbart50 as mbart50

from transformer_jax import Tokenizer, UserError
from transformer_jax.pretrained.folder import Pretrained
from transformer_jax.tokenization.segmenters import JsonSegmenter

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "größe", "straße"]
WORDS += ["день", "ночь", "hello", "world", "東京", "مرحبا", "नमस्ते", "é"]
SPACES = [" ", "  ", "\t", "\u00a0", "\u3000", "\u200b", "\u200c", "\u2009", ""]
SPECIAL = ["<s>", "</s>", "<pad>", "<unk>", "<mask>", "<extra_id_0>", "<extra_id_99>", "__de__"]
SPECIAL += [
    "deu_Latn",
    "de_DE",
    "en_XX",
    "<unk_5>",
    "<mask_1>",
    "<0x41>",
    "▁",
    "▁the",
    "<unused_7>",
    "<2de>",
    "<2xx>",
    ">>deu<<",
]
RANGES = [(32, 127), (1, 32), (0xA0, 0x250), (0x300, 0x370), (0x400, 0x500), (0x600, 0x700)]
RANGES += [(0x900, 0x980), (0x4E00, 0x4F00), (0x1F300, 0x1F650), (0xFE00, 0xFF00), (0x2000, 0x2070)]


def hostile(count: int = 2000, special: list[str] = SPECIAL) -> list[str]:
    rng = random.Random(3)

    def word() -> str:
        kind = rng.random()
        if kind < 0.4:
            return rng.choice(WORDS)
        if kind < 0.5 and special:
            return rng.choice(special)
        low, high = rng.choice(RANGES)
        length = 300 if kind > 0.995 else rng.randrange(1, 6)
        return "".join(chr(rng.randrange(low, high)) for _ in range(length)).replace("\n", "")

    lines = ["", " ", "\t", "</s>", "a" * 3000, "\ufeffthe", "e\u0301 é", "👩‍👩‍👧‍👦"]
    while len(lines) < count:
        lines.append("".join(word() + rng.choice(SPACES) for _ in range(rng.randrange(1, 9))))
    return lines


def spm(file: Path, **settings: Any) -> None:
    rng, model = random.Random(0), io.BytesIO()
    lines = [" ".join(rng.choices(WORDS, k=6)) for _ in range(400)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=120,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(model.getvalue())


T5_IDS = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
MADLAD_IDS = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}  # "<s>" is its PAD
UMT5_IDS = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
FAIRSEQ, T5 = "sentencepiece.bpe.model", "spiece.model"
LANGUAGES: dict[str, list[str]] = {
    "nllb": ["eng_Latn", "deu_Latn"],
    "m2m_100": [f"__{code}__" for code in m2m_100.FAIRSEQ_LANGUAGE_CODES["m2m100"]],
    "mbart": mbart50.FAIRSEQ_LANGUAGE_CODES,
    "mbart, first version": mbart.FAIRSEQ_LANGUAGE_CODES,
}
TAGS = ["<2en>", "<2de>", "<2zh_Hant>"]
# family, class of its tokenizer, file of its SentencePiece model, and how it is trained
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "nllb": ("M2M100", "NllbTokenizer", FAIRSEQ, {"model_type": "bpe"}),
    "m2m_100": ("M2M100", "M2M100Tokenizer", FAIRSEQ, {}),
    "mbart": ("MBart", "MBart50Tokenizer", FAIRSEQ, {}),
    "mbart, first version": ("MBart", "MBartTokenizer", FAIRSEQ, {}),
    "t5": ("T5", "T5Tokenizer", T5, T5_IDS),
    "mt5": ("MT5", "T5Tokenizer", T5, T5_IDS),
    "madlad": (
        "T5",
        "T5Tokenizer",
        T5,
        MADLAD_IDS | {"user_defined_symbols": ["\n", *TAGS], "remove_extra_whitespaces": False},
    ),
    "umt5": ("UMT5", "T5Tokenizer", T5, UMT5_IDS),
    "pegasus": ("Pegasus", "PegasusTokenizer", T5, T5_IDS),
    "byt5": ("T5", "ByT5Tokenizer", "", {}),
    "bart": ("Bart", "BartTokenizer", "", {}),
}


def write_config(case: str, folder: Path, size: int, german: int = 0) -> None:
    """Write the config.json of a small model."""
    fields = {"vocab_size": size, "d_model": 16, "decoder_start_token_id": 0}
    if "mbart" in case:
        fields["decoder_start_token_id"] = 2 if case == "mbart" else german
    if case == "pegasus":
        fields |= {"pad_token_id": 0, "eos_token_id": 1}
    if case == "madlad":
        fields |= {"pad_token_id": 1, "eos_token_id": 2}
    getattr(transformers, f"{CASES[case][0]}Config")(**fields).save_pretrained(folder)


def original(case: str, folder: Path) -> Any:
    """Write the files that the hub has for this family, and return transformers' tokenizer."""
    _, name, file, settings = CASES[case]
    folder.mkdir(exist_ok=True)
    kind = getattr(transformers, name)
    config: dict[str, Any] = {"tokenizer_class": name}
    if case == "madlad":
        config |= {"pad_token": "<s>", "extra_ids": 0, "additional_special_tokens": []}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    special: dict[str, Any] = {"additional_special_tokens": LANGUAGES.get(case, [])}
    if case != "m2m_100":
        special["mask_token"] = "<mask>"
    if case in LANGUAGES:
        (folder / "special_tokens_map.json").write_text(json.dumps(special))
    if file:
        spm(folder / file, **settings)
    if case == "m2m_100":
        its = sentencepiece.SentencePieceProcessor(model_file=str(folder / file))
        pieces = ["<s>", "<pad>", "</s>", "<unk>", *map(its.id_to_piece, range(3, len(its)))]
        (folder / "vocab.json").write_text(json.dumps({x: i for i, x in enumerate(pieces)}))
    if case == "bart":
        trained = tokenizers.ByteLevelBPETokenizer()
        special_tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        trained.train_from_iterator(WORDS * 9, 400, 1, False, special_tokens)
        trained.save_model(str(folder))
        return kind(str(folder / "vocab.json"), str(folder / "merges.txt"))
    if case == "nllb":
        return kind.from_pretrained(folder, extra_special_tokens=LANGUAGES[case])
    return kind.from_pretrained(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Callable[[str, bool], tuple[Any, Tokenizer]]:
    """``pair(case, resaved)``: transformers' tokenizer, and ours from the same folder."""
    made: dict[tuple[str, bool], tuple[Any, Tokenizer]] = {}

    def build(case: str, resaved: bool) -> tuple[Any, Tokenizer]:
        if (case, resaved) not in made:
            folder = tmp_path_factory.mktemp(case)
            theirs = original(case, folder / "original")
            if resaved:
                theirs.save_pretrained(folder / "saved")
            found = folder / ("saved" if resaved else "original")
            if case == "madlad" and resaved:  # the file makes its tags special tokens
                theirs = type(theirs).from_pretrained(found)
            # T5 has more rows than tokens.
            vocabulary = theirs.get_vocab()
            write_config(case, found, max(vocabulary.values()) + 9, vocabulary.get("de_DE", 0))
            ours = Pretrained(found).tokenizer()
            ours.save(folder / "ours")
            made[case, resaved] = theirs, Tokenizer.load(folder / "ours")
        return made[case, resaved]

    return build


def around(ours: Tokenizer, line: str) -> tuple[list[int], list[int]]:
    """The ids before and after a line, EOS included."""
    codes = [*ours.languages.tokens][:1] if ours.languages.layout == "both" else []
    affixes = ours.affixes("", *codes)
    return affixes.before_source, affixes.after_source or [ours.source.eos_id]


def expected(theirs: Any, ours: Tokenizer, line: str) -> list[int]:
    """Ids of the text alone."""
    before, after = around(ours, line)
    ids = theirs(line).input_ids
    assert theirs.convert_ids_to_tokens(ids[: len(before)]) == ours.source.tokens(before)
    assert theirs.convert_ids_to_tokens(ids[len(ids) - len(after) :]) == ours.source.tokens(after)
    # In the text, <s>, </s> and <pad> are unknown tokens here.
    return ours.source.vocabulary.without_controls(ids[len(before) : len(ids) - len(after)])


@pytest.mark.parametrize("case", [c for c in CASES if c not in ("byt5", "m2m_100")])
def test_ids_and_text_agree_where_transformers_wrote_the_folder(case, pair) -> None:
    theirs, ours = pair(case, True)
    lines = hostile()
    for line, ids in zip(lines, ours.source.encode(lines)):
        assert ids == expected(theirs, ours, line), line
        text = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        text = text.replace("▁", " ").strip().replace("\n", " ")
        assert ours.target.decode([*ids, ours.target.eos_id]) == text
    if ours.languages.tokens and case in LANGUAGES:
        theirs.tgt_lang = LANGUAGES[case][1]
        if case != "mbart, first version":
            affixes = ours.with_languages(target=theirs.tgt_lang).affixes()
            ids = affixes.target(ours.target.encode(["the fox"])[0])
            assert [*ids, ours.target.eos_id] == theirs(text_target="the fox").input_ids


@pytest.mark.parametrize("case", ["t5", "bart"])
@pytest.mark.parametrize("end", ["left", "right"])
def test_a_file_that_truncates_and_pads_does_neither_here(case, end, pair) -> None:
    segmenter = pair(case, True)[1].source.segmenter
    file = tokenizers.Tokenizer.from_str(segmenter.content.decode())
    file.enable_truncation(5, direction=end)
    file.enable_padding(direction=end, length=40)
    found = JsonSegmenter(file.to_str().encode())
    lines = hostile(200)
    assert found.encode_as_ids(lines) == segmenter.encode_as_ids(lines)
    for line in lines:
        assert found.affix_ids(line) == segmenter.affix_ids(line)


@pytest.mark.parametrize("case", [c for c in CASES if c not in ("byt5", "bart")])
def test_folders_with_only_a_sentencepiece_model(case, pair) -> None:
    theirs, ours = pair(case, False)
    vocabulary = theirs.get_vocab()
    found = {token: i for i, token in enumerate(ours.source.vocabulary.tokens) if token}
    if case == "nllb":  # transformers 5.24 puts <mask> first, unlike NLLB's own tokenizer.json
        codes = [*LANGUAGES[case], "<mask>"]
        assert [found[code] for code in codes] == list(range(len(found) - 3, len(found)))
        for code in codes:
            del found[code], vocabulary[code]
    assert found == vocabulary
    # Without tokenizer.json, special tokens in the text are text, and SentencePiece normalizes it.
    plain = [*hostile(special=[])[8:], ">>deu<< one"]
    file = Path(theirs.name_or_path) / CASES[case][2]
    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    for line, ids in zip(plain, ours.source.encode(plain)):
        assert ids == ours.source.ids(processor.encode(line, out_type=str))
    rng = random.Random(1)
    for _ in range(300):
        line = " ".join(rng.choices(WORDS, k=rng.randrange(1, 9)))
        [ids] = ours.source.encode([line])
        assert ids == expected(theirs, ours, line)
        assert ours.source.decode(ids) == line


@pytest.mark.parametrize("resaved", [True, False])
def test_the_language_of_the_target_begins_a_source_line(resaved, pair) -> None:
    theirs, ours = pair("madlad", resaved)
    assert list(ours.languages.tokens) == ["en", "de", "zh_Hant"]
    lines = [line for line in hostile(300, special=[]) if line.strip()]
    german = ours.with_languages("en", "de")
    for line, ids in zip(lines, map(german.affixes().source, german.source.encode(lines))):
        if resaved:
            assert ids == expected(theirs, ours, f"<2de> {line}"), line
        assert ids == ours.source.encode([f"<2de> {line}"])[0]
    for tokenizer, codes, tag in [
        (ours, ("en", "de"), "<2de>"),
        (german, ("", ""), "<2de>"),
        (german, ("", "en"), "<2en>"),
        (ours, ("de", ""), ""),
    ]:
        assert tokenizer.affixes(*codes) == (ours.source.encode([tag])[0], [], [])
    for field in ("source_language", "target_language"):
        with pytest.raises(UserError, match=f"{field} is 'xx'; expected one of: en, de, zh_Hant"):
            ours.with_languages(**{field.removesuffix("_language"): "xx"})
        with pytest.raises(UserError, match=f"Line 3: {field} is 'xx'; expected one of: en, de"):
            ours.affixes(**{field: "xx"}, name="Line 3: ")


def test_byt5_has_no_tokenizer_file(pair) -> None:
    theirs, ours = pair("byt5", False)
    lines = [line for line in hostile(special=["<extra_id_0>"])[8:] if line]
    for line, ids in zip(lines, ours.source.encode(lines)):
        assert ids == theirs(line).input_ids[:-1], line
        text = theirs.decode(ids, skip_special_tokens=True)
        assert ours.source.decode(ids) == text.replace("\n", " ").strip()


def test_sentinels_of_mt5_are_in_its_model(tmp_path) -> None:
    sentinels = [f"▁<extra_id_{i}>" for i in range(2)]
    spm(tmp_path / T5, **T5_IDS, user_defined_symbols=sentinels)
    size = len(sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / T5)))
    write_config("mt5", tmp_path, size)
    assert Pretrained(tmp_path).tokenizer().source.vocab_size == size


def test_unsupported_folders_are_errors(tmp_path) -> None:
    write_config("bart", tmp_path, 300)
    with pytest.raises(UserError, match=r"no tokenizer\.json; expected that file or"):
        Pretrained(tmp_path)
    write_config("t5", tmp_path, 300)
    (tmp_path / T5).write_bytes(b"corrupt")
    with pytest.raises(UserError, match="not a SentencePiece model or is corrupt"):
        Pretrained(tmp_path)
    original("mbart", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "MBartTokenizer"}')
    write_config("mbart", tmp_path, 300)
    for codes in (("en_XX", ""), ("en_XX", "xx")):
        with pytest.raises(
            UserError, match=r"-language are \('en_XX', 'x?x?'\); expected two of: ar"
        ):
            Pretrained(tmp_path, languages=codes)
    (tmp_path / "special_tokens_map.json").unlink()
    with pytest.raises(UserError, match="expected two of: none, because the tokenizer's files"):
        Pretrained(tmp_path)


@pytest.mark.parametrize("has_decoder", [False, True])
@pytest.mark.parametrize("case", ["t5", "mbart"])
def test_files_that_contradict_each_other(case, has_decoder, tmp_path) -> None:
    """transformers ignores special_tokens_map.json in folders that newer versions wrote."""
    original(case, tmp_path)
    write_config(case, tmp_path, 400)
    config = {"tokenizer_class": CASES[case][1], "mask_token": "fox", "pad_token": "<pad>"}
    if has_decoder:
        config["added_tokens_decoder"] = {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    special = {"mask_token": "dog", "sep_token": {"content": "cat", "lstrip": True}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    expected = getattr(transformers, CASES[case][1]).from_pretrained(tmp_path)
    assert expected.mask_token == ("fox" if has_decoder else "dog")
    settings = Pretrained(tmp_path)._tokenizer.settings
    assert settings["mask_token"] == expected.mask_token
    assert ("sep_token" in settings) == (expected.sep_token == "cat")
