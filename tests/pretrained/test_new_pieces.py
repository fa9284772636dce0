"""New pieces of pretrained tokenizers: chosen in new text, and no change in any other."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ctranslate2
import pytest
import transformers

from tests.pretrained.test_family_tokenizers import WORDS, hostile, original, write_config
from tests.pretrained.test_new_languages import CHEROKEE, CODES, PIECES
from transformer_jax import Config, Tokenizer, Transformer, Translator, UserError
from transformer_jax.export.huggingface import export_huggingface
from transformer_jax.pretrained.ctranslate2 import export_ctranslate2
from transformer_jax.pretrained.folder import Pretrained
from transformer_jax.settings.config import TokenizerConfig
from transformer_jax.tokenization.new_pieces import learn_pieces, read_pieces
from transformer_jax.tokenization.segmenters import model_proto

LATIN = ["ktukk", "kisitu", "nmu'ltes", "wela'lin", "kesalul", "pjila'si"]  # new, in an old script
OWN: dict[str, dict[str, Any]] = {
    "bpe": {"vocab_size": 90},
    "unigram": {"vocab_size": 70},
    "unigram with bytes": {"vocab_size": 325, "byte_fallback": True},
}
CASES = ["nllb", "mbart", "madlad", "t5", "pegasus", *OWN]


def random_lines(words: list[str], count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(words, k=rng.randrange(1, 9))) for _ in range(count)]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tokenizer]]:
    """A tokenizer and, if it is transformers', its folder."""
    made: dict[str, tuple[Path, Tokenizer]] = {}

    def build(case: str) -> tuple[Path, Tokenizer]:
        if case not in made:
            folder = tmp_path_factory.mktemp(case)
            if case in OWN:
                settings = {"algorithm": case.split()[0]} | OWN[case]
                lines = random_lines(WORDS, 400)
                tokenizer = Tokenizer.train(zip(lines, lines), TokenizerConfig(**settings))
            else:
                original(case, folder / "original").save_pretrained(folder)
                reference = transformers.AutoTokenizer.from_pretrained(folder)
                size = max(reference.get_vocab().values()) + 9
                write_config(case, folder, size)
                tokenizer = Pretrained(folder).tokenizer()
            made[case] = folder, tokenizer
        return made[case]

    return build


def learned(tokenizer: Tokenizer, words: list[str], limit: int) -> list[str]:
    """Pieces of a text of these words, beside a text in the tokenizer's languages."""
    lines = random_lines([*words, "the"], 300)
    return learn_pieces(tokenizer.source.segmenter, lines, random_lines(WORDS, 300), limit)


@pytest.mark.parametrize("words", [CHEROKEE, LATIN], ids=["new script", "old script"])
@pytest.mark.parametrize("case", CASES)
def test_new_text_has_fewer_tokens_and_old_text_the_same(
    case: str, words: list[str], pretrained: Callable[[str], tuple[Path, Tokenizer]], tmp_path: Path
) -> None:
    folder, old = pretrained(case)
    pieces = learned(old, words, 40)
    assert 20 < len(pieces) <= 40
    new = old.with_new_pieces(pieces)
    new.save(tmp_path)
    new = Tokenizer.load(tmp_path)
    old_tokens = old.source.vocabulary.tokens
    assert len(set(new.source.ids(pieces))) == len(pieces)
    for token, new_token in zip(old_tokens, new.source.vocabulary.tokens):
        assert new_token == token or (not token and new_token in pieces)

    def has_new_piece(line: str) -> bool:
        spelling = "".join(old.source.segmenter.words(line))
        return any(piece in spelling for piece in pieces)

    old_lines = random_lines(WORDS, 500)  # the language of the other lines
    old_lines += [line for line in hostile(300) if not has_new_piece(line)]
    assert len(old_lines) > 700
    assert new.source.encode(old_lines) == old.source.encode(old_lines)
    new_lines = random_lines(words, 500, seed=1)
    encoded = new.source.encode(new_lines)
    assert [new.target.decode(ids) for ids in encoded] == new_lines
    assert {i for ids in encoded for i in ids} & {*new.source.ids(pieces)}
    num_words = len(" ".join(new_lines).split())
    num_parts = 0  # with a token for each unknown character
    for line in new_lines:
        for word in old.source.segmenter.words(line):
            num_parts += len(old.source.segmenter.parts(word))
    num_tokens = sum(map(len, encoded))
    assert num_tokens < 0.6 * num_parts and num_tokens < 3 * num_words

    for number, start in new.new_rows.items():
        piece = new.source.vocabulary.tokens[number]
        [parts] = old.source.encode([piece.replace("▁", " ")])
        if piece.startswith("▁") and old.source.unk_id not in start:
            assert start == parts
        assert old.source.unk_id not in start or "bytes" not in case

    if case not in OWN:
        (tmp_path / "exported").mkdir()
        for file in folder.glob("*.json"):
            (tmp_path / "exported" / file.name).write_bytes(file.read_bytes())
        (tmp_path / "exported" / "tokenizer.json").write_bytes(new.source.model)
        reference: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
        for line, ids in zip(new_lines, encoded):
            assert reference(line, add_special_tokens=False).input_ids == ids
            assert reference.decode(ids, skip_special_tokens=True).strip() == line


@pytest.mark.parametrize("case", ["nllb", "mbart", "bpe", "unigram with bytes"])
def test_pieces_of_a_file_are_chosen(
    case: str, pretrained: Callable[[str], tuple[Path, Tokenizer]], tmp_path: Path
) -> None:
    _, old = pretrained(case)
    (tmp_path / "pieces").write_text("\ufeff" + "\r\n".join(PIECES) + "\r\n\r\n")
    new = old.with_new_pieces(read_pieces(tmp_path / "pieces"))
    [ids] = new.source.encode(["ᏣᎳᎩ ᎣᏏᏲ ᏣᎳ"])
    assert new.source.tokens(ids)[-1:] == ["▁ᏣᎳ"]
    assert "▁ᏣᎳᎩ" in new.source.tokens(ids) and "ᏏᏲ" in new.source.tokens(ids)
    # More pieces can come later; the first ones keep their ids.
    more = new.with_new_pieces(["▁Ꭳ", "▁ᎣᏏᏲ"])
    assert more.source.ids(PIECES) == new.source.ids(PIECES)
    assert more.source.tokens(more.source.encode(["ᎣᏏᏲ"])[0]) == ["▁ᎣᏏᏲ"]
    assert more.new_rows == {
        **new.new_rows,
        more.source.ids(["▁Ꭳ"])[0]: new.source.ids(["▁", "Ꭳ"]),
        more.source.ids(["▁ᎣᏏᏲ"])[0]: new.source.ids(["▁", "Ꭳ", "ᏏᏲ"]),
    }


@pytest.mark.parametrize("case", ["nllb", "mbart", "madlad"])
def test_a_language_can_come_later(
    case: str, pretrained: Callable[[str], tuple[Path, Tokenizer]]
) -> None:
    _, old = pretrained(case)
    new = old.with_new_pieces(PIECES)
    old_code, new_code, token = CODES[case]
    more = new.with_new_languages([f"{new_code}:{old_code}"])
    assert more.source.ids(PIECES) == new.source.ids(PIECES)
    [number] = more.source.ids([token])
    assert number == max(new.source.ids(PIECES)) + 1
    assert more.new_rows[number] == old.source.ids([old.languages.tokens[old_code]])
    assert more.source.encode(["ᏣᎳᎩ the"]) == new.source.encode(["ᏣᎳᎩ the"])


def test_scores_stay_within_those_of_the_old_pieces(
    pretrained: Callable[[str], tuple[Path, Tokenizer]],
) -> None:
    """SentencePiece derives the scores of unknown text and symbols from the lowest and highest."""
    _, old = pretrained("unigram")
    new = old.with_new_pieces(PIECES)
    ranges = []
    for tokenizer in (old, new):
        pieces = model_proto(tokenizer.source.model).pieces
        scores = [piece.score for piece in pieces if piece.type == piece.NORMAL]
        ranges.append((min(scores), max(scores)))
    assert ranges[0] == ranges[1]


def test_exports_of_a_model_trained_here_have_them(
    pretrained: Callable[[str], tuple[Path, Tokenizer]],
    make: Callable[..., tuple[Config, Transformer]],
    tmp_path: Path,
) -> None:
    tokenizer = pretrained("unigram")[1].with_new_pieces(PIECES)
    config, model = make(tokenizer, norm_epsilon=1e-5, softmax_bias=True)
    for name, export in (("marian", export_huggingface), ("ctranslate2", export_ctranslate2)):
        (tmp_path / name).mkdir()
        export(config, model, tokenizer, tmp_path / name)
    lines = random_lines(CHEROKEE, 100)
    reference = transformers.MarianTokenizer.from_pretrained(tmp_path / "marian")
    encoded = tokenizer.source.encode(lines)
    assert reference(lines).input_ids == [[*ids, tokenizer.source.eos_id] for ids in encoded]
    assert len(reference) == tokenizer.target.vocab_size
    engine = ctranslate2.Translator(str(tmp_path / "ctranslate2"), intra_threads=1)
    results = engine.translate_batch(
        [tokenizer.source.tokens(ids) for ids in encoded[:8]], beam_size=1, max_decoding_length=8
    )
    decoding = dataclasses.replace(config.decoding, beam_size=1, max_length=8)
    for [translation], result in zip(
        Translator(model, tokenizer, decoding).stream(lines[:8]), results
    ):
        assert list(translation.tokens)[:6] == result.hypotheses[0][:6]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read .*; expected a number, or a text file"),
        (b"\xff\xfe", "cannot be read"),
        (b"\n\n", "is empty; expected one piece per line"),
        ("▁Ꮳ\n▁two words\n", "line 2 is '▁two words', a piece with a space"),
        ("▁\n", "line 1 is '▁', a piece with a space, or without text"),
        ("▁a▁b", "line 1 is '▁a▁b', a piece with a space"),
        ("Ꮳ\nᏣᎳ\nᏣ\n", "line 3 is 'Ꮳ', a piece as in line 1"),
    ],
)
def test_bad_files(content: str | bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "pieces"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        read_pieces(file)


def test_bad_pieces(pretrained: Callable[[str], tuple[Path, Tokenizer]], tmp_path: Path) -> None:
    _, nllb = pretrained("nllb")
    for pieces, message in (
        (["Ꮳ", "▁the"], "has '▁the', which exists in the vocabulary"),
        (["▁ｋ", "ｋ"], "has '▁ｋ', which would never be chosen .*: the tokenizer normalizes it"),
        (["Ꮳ", "Ꮃ", "ᏣᎳᎩ"], "has 'ᏣᎳᎩ', which would never be chosen .*, their parts as well"),
    ):
        with pytest.raises(UserError, match=message):
            nllb.with_new_pieces(pieces)
    for words, limit, message in (
        (CHEROKEE, 5000, "has fewer than 49.. different merges .* lower tokenizer.new_pieces"),
        (["the"], 1, "fewer than 1 different merges"),
        (WORDS, 3, "in the new language are in the vocabulary or occur in the other languages"),
    ):
        with pytest.raises(UserError, match=message):
            learned(nllb, words, limit)
    separate = Tokenizer.from_models(*[pretrained("bpe")[1].source.model] * 2)
    with pytest.raises(UserError, match="expected none, because source and target have a tok"):
        separate.with_new_pieces(PIECES)
    for case, message in (
        ("byt5", "because the model's tokens are bytes; expected"),
        ("bart", "because the model's tokens are bytes; expected"),
        ("m2m_100", "needs a tokenizer.json file .*not for M2M100 and Marian"),
        ("mbart", "needs a tokenizer.json file"),
    ):
        folder = tmp_path / case
        size = max(original(case, folder).get_vocab().values()) + 1
        if case == "bart":
            original(case, tmp_path / "bart saved").save_pretrained(folder)
        write_config(case, folder, size)
        with pytest.raises(UserError, match=message):
            Pretrained(folder).tokenizer().with_new_pieces(PIECES)


def test_bad_settings() -> None:
    with pytest.raises(UserError, match="tokenizer.new_pieces is '0'; expected a positive number"):
        TokenizerConfig(new_pieces="0")
