"""Tokenizer: round trip, reproducible training and sampling, special ids, error messages."""

import functools
import hashlib
import json
import pickle
import random
import subprocess
import sys

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from number_names import number_names

from transformer_jax.errors import UserError
from transformer_jax.settings.config import TokenizerConfig
from transformer_jax.tokenization import tokenizer as tokenizer_module
from transformer_jax.tokenization.languages import Languages
from transformer_jax.tokenization.special_ids import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from transformer_jax.tokenization.subword_model import SubwordModel
from transformer_jax.tokenization.subword_sampling import BpeDropout
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.tokenization.vocabulary import Vocabulary

PAIRS = tuple(number_names("train", 2000))
SOURCES, TARGETS = (list(side) for side in zip(*PAIRS, strict=True))
# Words of random syllables, which have many plausible segmentations.
_generator = random.Random(0)
_syllables = ["ba", "be", "bo", "da", "de", "do", "na", "ne", "no", "ta", "te", "to"]
_words = [
    "".join(_generator.choices(_syllables, range(1, 13), k=_generator.randint(1, 4)))
    for _ in range(6000)
]
AMBIGUOUS = [" ".join(_words[i : i + 6]) for i in range(0, 6000, 6)]
AMBIGUOUS_PAIRS = tuple(zip(AMBIGUOUS, AMBIGUOUS, strict=True))
KINDS = [("bpe", True), ("bpe", False), ("unigram", True), ("unigram", False)]


def train_anew(algorithm="bpe", joint=True, vocab_size=60, pairs=PAIRS, **settings):
    config = TokenizerConfig(vocab_size=vocab_size, algorithm=algorithm, joint=joint, **settings)
    return Tokenizer.train(iter(pairs), config)


train = functools.cache(train_anew)  # pairs, if given, must be hashable
BYTES = train(vocab_size=330, byte_fallback=True, normalization="identity")


@pytest.mark.parametrize(("algorithm", "joint"), KINDS)
def test_decoding_inverts_encoding(algorithm, joint):
    tokenizer = train(algorithm, joint)
    for sampling in (None, BpeDropout(0.3)) if algorithm == "bpe" else (None,):
        ids = tokenizer.source.encode(SOURCES, sampling=sampling, seed=1)
        assert [tokenizer.source.decode(line) for line in ids] == SOURCES
        ids = tokenizer.target.encode(TARGETS, sampling=sampling, seed=1)
        assert [tokenizer.target.decode(line) for line in ids] == TARGETS
    assert (tokenizer.joint, tokenizer.source.vocab_size, tokenizer.target.vocab_size) == (
        joint,
        60,
        60,
    )


@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\u2581")),
    st.sampled_from([None, BpeDropout(0.5)]),
)
def test_identity_with_byte_fallback_inverts_any_line(line, sampling):
    [ids] = BYTES.source.encode([line], sampling=sampling, seed=1)
    assert BYTES.source.decode(ids) == line
    assert UNK_ID not in ids


def test_a_decoded_line_has_no_newline():
    newline = [i for i in range(BYTES.source.vocab_size) if BYTES.source.tokens([i]) == ["<0x0A>"]]
    assert BYTES.source.decode(newline) == " "


def test_text_never_encodes_to_special_ids():
    tokenizer = train()
    ids = tokenizer.source.encode(["forty-two", "</s> <pad>", "", "forty \u4e2d two"])
    assert not {PAD_ID, BOS_ID, EOS_ID} & {i for line in ids for i in line}
    assert ids[2] == []
    assert ids[3].count(UNK_ID) == 1
    assert tokenizer.target.decode([BOS_ID, *ids[0], EOS_ID, PAD_ID, PAD_ID]) == "forty-two"


@pytest.mark.parametrize(("algorithm", "joint"), KINDS)
def test_training_is_reproducible_and_quiet(algorithm, joint, capfd):
    assert train_anew(algorithm, joint).fingerprint == train(algorithm, joint).fingerprint
    assert train(algorithm, joint, vocab_size=59).fingerprint != train(algorithm, joint).fingerprint
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("joint", [True, False])
def test_training_sentences_are_spread_over_the_text(joint):
    pairs = tuple((f"{'a' if i < 500 else 'b'}{i}", f"x{i}") for i in range(1000))
    some = train(joint=joint, pairs=pairs, vocab_size=40, max_training_sentences=256)
    # Every 4th pair (250 of 1,000; at most 256) on each side, or every 8th if both sides share the
    # limit
    every = pairs[:: 8 if joint else 4]
    assert some.fingerprint == train(joint=joint, pairs=every, vocab_size=40).fingerprint


@pytest.mark.parametrize("most", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("joint", [True, False])
def test_as_many_training_sentences_as_allowed_are_kept(joint, most, monkeypatch):
    """Every k-th pair, for the smallest power of two k. Joint: each pair has two sentences."""
    sides = ["st"] if joint else ["s", "t"]  # of each model
    learned = []

    def learn(lines, _):
        learned.append(list(lines))
        return model

    model = train().source.model
    monkeypatch.setattr(tokenizer_module, "learn_sentencepiece", learn)
    config = TokenizerConfig(joint=joint, max_training_sentences=2 * most if joint else most)
    for count in range(1, 40):
        learned.clear()
        Tokenizer.train(((f"s{i}", f"t{i}") for i in range(count)), config)
        stride = next(2**i for i in range(9) if len(range(0, count, 2**i)) <= most)
        kept = range(0, count, stride)
        expected = [sorted(f"{side}{i}" for side in its for i in kept) for its in sides]
        assert list(map(sorted, learned)) == expected


@pytest.mark.parametrize("joint", [True, False])
def test_save_and_load(tmp_path, joint):
    train(joint=not joint).save(tmp_path)
    tokenizer = train(joint=joint)
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert (
        loaded.fingerprint
        == tokenizer.fingerprint
        == pickle.loads(pickle.dumps(tokenizer)).fingerprint
    )
    assert loaded.target.encode(TARGETS) == tokenizer.target.encode(TARGETS)
    expected = (
        ["tokenizer.model"] if joint else ["tokenizer.source.model", "tokenizer.target.model"]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == expected


@pytest.mark.parametrize(("rule", "keeps"), [("nmt_nfkc", False), ("nfkc", True)])
def test_normalization_of_the_zero_width_non_joiner(rule, keeps):
    """As documented in ``TokenizerConfig.normalization``."""
    word = "می\u200cخواهم"
    tokenizer = train(pairs=((word, word),), vocab_size=16, normalization=rule)
    [ids] = tokenizer.source.encode([word])
    assert tokenizer.source.decode(ids) == (word if keeps else word.replace("\u200c", " "))


# Sampling


def test_sampling_with_probability_0_is_sentencepieces_segmentation():
    for tokenizer in (train(), BYTES):
        lines = [*SOURCES, "caf\u00e9 \u4e2d\u4e2d forty", "  a  b "]
        assert tokenizer.source.encode(
            lines, sampling=BpeDropout(1e-12)
        ) == tokenizer.source.encode(lines)


def test_sampling_depends_only_on_the_seed(tmp_path):
    tokenizer = train(pairs=AMBIGUOUS_PAIRS)
    tokenizer.save(tmp_path)

    def ids_of(seed):
        return tokenizer.source.encode(AMBIGUOUS[:200], sampling=BpeDropout(0.05), seed=seed)

    def digest(seed):
        return hashlib.sha256(
            json.dumps(
                tokenizer.source.encode(AMBIGUOUS[:200], sampling=BpeDropout(0.05), seed=seed)
            ).encode()
        ).hexdigest()

    assert digest(1) == digest(1) != digest(2)
    program = f"""
import hashlib, json, sys
from transformer_jax.tokenization.subword_model import SubwordModel
from transformer_jax.tokenization.subword_sampling import BpeDropout
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.tokenization.vocabulary import Vocabulary
lines = json.load(sys.stdin)
ids = Tokenizer.load({str(tmp_path)!r}).source.encode(lines, sampling=BpeDropout(0.05), seed=1)
print(hashlib.sha256(json.dumps(ids).encode()).hexdigest())
"""
    other = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(AMBIGUOUS[:200]),
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == digest(1)


# Errors


@pytest.mark.parametrize(("algorithm", "joint"), KINDS)
def test_a_vocabulary_larger_than_the_text_supports(algorithm, joint):
    with pytest.raises(
        UserError, match=r"5000 tokens .tokenizer\.vocab_size. .*training text.* value <= \d+"
    ) as raised:
        train(algorithm, joint, vocab_size=5000)
    most = int(str(raised.value).split("value <= ")[1].strip(" ."))
    assert train(algorithm, joint, vocab_size=most).source.vocab_size == most


def test_a_vocabulary_smaller_than_the_alphabet():
    with pytest.raises(
        UserError, match=r"9 tokens .tokenizer\.vocab_size. .*character_coverage.*required_chars"
    ):
        train(vocab_size=9)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize(
    "pairs", [(), (("", " "),), (("\x01", "\x02"),), (("a " * 2097, "b " * 2097),)]
)
def test_a_training_text_without_usable_lines(joint, pairs):
    with pytest.raises(
        UserError,
        match=r"SentencePiece, which skips empty lines and .* 4,192 bytes, cannot .* training text",
    ):
        train(joint=joint, pairs=pairs)


def test_loading_a_missing_or_corrupt_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.model"):
        Tokenizer.load(tmp_path)
    for damaged in (b"", b"no model", train().source.model[:500]):
        (tmp_path / "tokenizer.model").write_bytes(damaged)
        with pytest.raises(
            UserError, match=r"tokenizer\.model' is not a SentencePiece model or is corrupt"
        ):
            Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.manifest.json").write_text("[")
    with pytest.raises(UserError, match=r"manifest\.json' is corrupt .* restore it from a backup"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "content", ["null", "3", "true", "[1, 2]", "[[]]", "[null]", "[" * 100_000]
)
def test_loading_a_manifest_of_another_shape(content, tmp_path):
    """The manifest itself, and each of its fields."""
    plain = train()
    side = SubwordModel(plain.source.model, plain.source.vocabulary)
    Tokenizer(side, side, languages=Languages({"de": "one"}, "one")).save(tmp_path)
    manifest = tmp_path / "tokenizer.manifest.json"
    whole = json.loads(manifest.read_text())
    changed = [content]
    if len(content) < 9:
        for name in ("source", "languages"):
            changed.append(json.dumps(whole | {name: json.loads(content)}))
        of_source = whole["source"]
        for name in ("model", "vocabulary"):
            fields = of_source | {name: json.loads(content)}
            if (name, content) != ("vocabulary", "null"):  # the model's own
                changed.append(json.dumps(whole | {"source": fields}))
        for name in ("tokens", "pad_id", "special"):
            vocabulary = of_source["vocabulary"] | {name: json.loads(content)}
            if (name, content) not in (("special", "[1, 2]"), ("pad_id", "3")):
                fields = of_source | {"vocabulary": vocabulary}
                changed.append(json.dumps(whole | {"source": fields}))
    for text in changed:
        manifest.write_text(text)
        with pytest.raises(UserError, match=r"manifest\.json' is corrupt|of a vocabulary"):
            Tokenizer.load(tmp_path)


def test_a_model_trained_here_is_one_file(tmp_path):
    """Its fingerprint never changes, because runs and corpora record it."""
    plain = train()
    plain.save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.model"]
    digest = hashlib.sha256(plain.source.model).digest()
    assert plain.fingerprint == hashlib.sha256(digest).hexdigest()


@pytest.mark.parametrize("file", ["tokenizer.vocab.json", "tokenizer.languages.json"])
def test_imports_of_earlier_versions_are_refused(tmp_path, file):
    """They have other token ids."""
    train().save(tmp_path)
    (tmp_path / file).write_text("[]")
    with pytest.raises(UserError, match="by an earlier version .*; import the model again"):
        Tokenizer.load(tmp_path)


def test_an_existing_model_is_used(tmp_path):
    ours = train()
    ours.save(tmp_path)
    config = TokenizerConfig(model=str(tmp_path / "tokenizer.model"))
    assert Tokenizer.train(iter([]), config).fingerprint == ours.fingerprint
    two = train(joint=False)
    two.save(tmp_path)
    files = {
        "model": str(tmp_path / "tokenizer.source.model"),
        "target_model": str(tmp_path / "tokenizer.target.model"),
    }
    assert Tokenizer.train([], TokenizerConfig(joint=False, **files)).fingerprint == two.fingerprint
    with pytest.raises(FileNotFoundError, match="absent"):
        Tokenizer.train(PAIRS, TokenizerConfig(joint=False, **files | {"target_model": "absent"}))


@pytest.mark.parametrize(
    ("joint", "files", "expected"),
    [
        (
            True,
            {"model": "a", "target_model": "b"},
            "is 'b'; expected a file if tokenizer.model is set and",
        ),
        (False, {"model": "a"}, "is ''; expected a file if tokenizer.model is set"),
        (False, {"target_model": "b"}, "is 'b'; .* tokenizer.joint is False, otherwise ''"),
    ],
)
def test_models_for_one_side_only(joint, files, expected):
    with pytest.raises(UserError, match=f"tokenizer.target_model {expected}"):
        TokenizerConfig(joint=joint, **files)


def test_a_model_with_other_special_ids(tmp_path):
    """SentencePiece's defaults have no PAD, and UNK comes first."""
    file = tmp_path / "other.model"
    train = sentencepiece.SentencePieceTrainer.train
    with file.open("wb") as writer:
        train(sentence_iterator=iter(SOURCES), model_writer=writer, vocab_size=60, minloglevel=2)
    tokenizer = Tokenizer.train([], TokenizerConfig(model=str(file)))
    side = tokenizer.source
    assert (side.pad_id, side.bos_id, side.eos_id, side.unk_id) == (60, 1, 2, 0)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    assert side.encode(SOURCES) == processor.encode(list(SOURCES))
    assert side.decode([1, *side.encode(["one two"])[0], 2, 60, 60]) == "one two"
    tokenizer.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").source.pad_id == 60
    ours = tmp_path / "ours.model"
    ours.write_bytes(train_anew(vocab_size=59).source.model)
    two = TokenizerConfig(joint=False, model=str(file), target_model=str(ours))
    with pytest.raises(UserError, match="pad_id is 60 in the source .* and 0 in the target"):
        Tokenizer.train([], two)


@pytest.mark.parametrize(("algorithm", "joint"), KINDS)
def test_user_defined_symbols_are_never_split(algorithm, joint):
    symbols = ("<2de>", "<2de-formal>", "<BT>")
    tokenizer = train(algorithm, joint, vocab_size=64, user_defined_symbols=symbols)
    lines = ["<2de> one hundred", "<2de-formal> <BT> six", "one<BT>two", "seven"]
    for sampling in (None, BpeDropout(0.5)) if algorithm == "bpe" else (None,):
        found = [
            tokenizer.source.tokens(ids)
            for ids in tokenizer.source.encode(lines, sampling=sampling, seed=3)
        ]
        assert [[piece for piece in pieces if piece in symbols] for pieces in found] == [
            ["<2de>"],
            ["<2de-formal>", "<BT>"],
            ["<BT>"],
            [],
        ]
        assert not any("<unk>" in pieces for pieces in found)
        assert [tokenizer.source.decode(tokenizer.source.ids(pieces)) for pieces in found] == lines
    plain = [tokenizer.source.encode([line])[0] for line in lines]
    if algorithm == "bpe":
        assert tokenizer.source.encode(lines, sampling=BpeDropout(1e-12)) == plain
    else:
        with pytest.raises(UserError, match=r"tokenizer\.bpe_dropout needs a BPE model"):
            tokenizer.source.encode(lines, sampling=BpeDropout(0.1))
    tags = [tokenizer.source.split_tag(line) for line in lines]
    assert [rest for _, rest in tags] == [" one hundred", " six", "one<BT>two", "seven"]
    assert [tokenizer.source.tokens(ids) for ids, _ in tags][1:] == [
        ["\u2581", "<2de-formal>", "\u2581", "<BT>"],
        [],
        [],
    ]


def test_of_symbols_that_begin_alike_the_longest_is_found():
    symbols = ("@@", "@@@", "@@@x")
    tokenizer = train(vocab_size=66, user_defined_symbols=symbols)
    lines = ["@@@x one", "@@@ one @@@x two", "six @@ @@@"]
    for sampling in (None, BpeDropout(0.5)):
        pieces = [
            [piece for piece in tokenizer.source.tokens(ids) if "@" in piece]
            for ids in tokenizer.source.encode(lines, sampling=sampling, seed=3)
        ]
        assert pieces == [["@@@x"], ["@@@", "@@@x"], ["@@", "@@@"]]
    assert [tokenizer.source.split_tag(line)[1] for line in lines] == [
        " one",
        " one @@@x two",
        "six @@ @@@",
    ]


@pytest.mark.parametrize("symbols", [("",), ("a b",), ("<a>", "<a>"), ("<a>", "</s>")])
def test_invalid_user_defined_symbols(symbols):
    with pytest.raises(
        UserError, match="user_defined_symbols is .* expected distinct words without whitespace"
    ):
        TokenizerConfig(user_defined_symbols=symbols)


@pytest.mark.parametrize(("algorithm", "joint"), KINDS)
def test_adding_symbols_to_a_vocabulary(algorithm, joint):
    """New symbols come last and are never split. Other text is segmented as before, and existing
    symbols are not added again.
    """
    old = train(algorithm, joint, user_defined_symbols=("<2de>",))
    new = old.with_symbols(("<2fr>", "<2de>", "<BT>"))
    assert (new.source.vocab_size, new.target.vocab_size) == (
        old.source.vocab_size + 2,
        old.target.vocab_size + 2,
    )
    assert new.source.encode(SOURCES) == old.source.encode(SOURCES) and new.target.encode(
        TARGETS
    ) == old.target.encode(TARGETS)
    [tagged], [plain] = (
        new.source.encode(["<2fr> <BT> one hundred"]),
        old.source.encode(["one hundred"]),
    )
    assert [id_ for id_ in tagged if id_ >= old.source.vocab_size] == [
        old.source.vocab_size,
        old.source.vocab_size + 1,
    ]
    assert tagged[-len(plain) :] == plain
    assert new.with_symbols(("<BT>",)).fingerprint == new.fingerprint
    with pytest.raises(
        UserError, match=r"which is already a regular or special token .*; choose another name"
    ):
        old.with_symbols(old.source.tokens([9]))
    with pytest.raises(
        UserError, match=r"which is already a regular or special token in the vocabulary"
    ):
        old.with_symbols(old.source.tokens([EOS_ID]))


def _imported(models, *vocabularies, **fields):
    """A tokenizer with vocabularies other than its models', as in Marian."""
    made = [Vocabulary(tuple(tokens), 0, 2, 3, 1) for tokens in vocabularies]
    return Tokenizer(SubwordModel(models[0], made[0]), SubwordModel(models[1], made[-1]), **fields)


def test_the_first_of_equal_tokens_counts():
    """An id without a token has a name, which another token can have, too."""
    vocabulary = Vocabulary(("<pad>", "one", "</s>", "<unk>", "one", "", "<unused_5>"), 0, 2, 3)
    assert vocabulary.ids(["one", "<unused_5>", "two"]) == [1, 5, 3]
    assert vocabulary.names([4, 5, 6]) == ["one", "<unused_5>", "<unused_5>"]


def test_adding_symbols_to_an_imported_vocabulary(tmp_path):
    """Lines can start with old and new tags. An existing tag keeps its id."""
    plain = train()
    pieces = [*plain.source.tokens(range(plain.source.vocab_size)), ">>deu<<"]
    models = [plain.source.model] * 2
    imported = _imported(models, pieces)
    assert imported.joint
    with_sign = _imported(models, [*pieces, "Ω"])
    for sampling in (None, BpeDropout(0.1)):
        assert len(pieces) in with_sign.source.encode(["one Ω two"], sampling=sampling)[0]
        assert with_sign.source.split_tag(">>fra<< one") == ([UNK_ID], " one")
    grown = imported.with_symbols(("<2fr>", ">>deu<<"))
    deu, fr = len(pieces) - 1, len(pieces)
    assert grown.source.vocab_size == len(pieces) + 1
    assert (
        grown.source.encode(["one hundred"])
        == imported.source.encode(["one hundred"])
        == plain.source.encode(["one hundred"])
    )
    for line, tags in (
        (">>deu<< one", [deu]),
        ("<2fr> one", [fr]),
        (">>deu<< <2fr> one", [deu, fr]),
    ):
        tag, rest = grown.source.split_tag(line)
        assert [id_ for id_ in tag if id_ >= deu] == tags and rest.strip() == "one"
        assert [id_ for id_ in grown.source.encode([line])[0] if id_ >= deu] == tags
    grown.save(tmp_path)
    for same in (Tokenizer.load(tmp_path), pickle.loads(pickle.dumps(grown))):
        assert same.source.vocabulary == grown.source.vocabulary
        assert same.fingerprint == grown.fingerprint and same.joint
    train().save(tmp_path)
    assert Tokenizer.load(tmp_path).source.has_own_vocabulary


def test_two_imported_vocabularies(tmp_path):
    """As in Marian: each side has its own ids, also after new symbols and in files."""
    plain = train()
    pieces = plain.source.tokens(range(plain.source.vocab_size))
    target = [*pieces[:4], *reversed(pieces[4:]), "<2fr>"]
    models = [plain.source.model] * 2
    both = _imported(models, pieces, target, pretrained=b"zip")
    grown = both.with_symbols(["<2fr>"])
    assert (both.pretrained, grown.pretrained) == (b"zip", b"")
    assert grown.source.vocab_size == grown.target.vocab_size == len(target)
    both.save(tmp_path / "both")
    grown.save(tmp_path / "grown")
    for each in (both, Tokenizer.load(tmp_path / "both"), pickle.loads(pickle.dumps(both)), grown):
        assert not each.joint
        source, target_ids = (side.encode(["one two"])[0] for side in (each.source, each.target))
        assert source == plain.source.encode(["one two"])[0] != target_ids
        assert each.target.tokens(target_ids) == each.source.tokens(source)
        assert each.target.decode(target_ids) == "one two"
    assert Tokenizer.load(tmp_path / "grown").fingerprint == grown.fingerprint
    grown.save(tmp_path / "both")
    plain.save(tmp_path / "both")
    assert Tokenizer.load(tmp_path / "both").joint


def test_a_single_line_is_an_error():
    with pytest.raises(UserError, match="lines is 'one two'; expected a list of lines"):
        train().source.encode("one two")
