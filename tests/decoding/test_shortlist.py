"""The reduced softmax: model 1 finds the right pairs, everything as a shortlist changes nothing,
neighbours do not matter.
"""

from __future__ import annotations

import dataclasses
import gzip
import logging
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from scipy import sparse

from transformer_jax.config import (
    Config,
    DataConfig,
    DecodingConfig,
    ModelConfig,
    PairsConfig,
    TokenizerConfig,
)
from transformer_jax.config_io import to_json
from transformer_jax.data.corpus import Corpus
from transformer_jax.decoding import learn_shortlist, shortlist
from transformer_jax.decoding.engine import Engine, Sentence
from transformer_jax.decoding.learn_shortlist import main
from transformer_jax.decoding.shortlist import Shortlist
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.special_ids import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from transformer_jax.tokenizer import Tokenizer

V = 40
SPECIAL = [PAD_ID, BOS_ID, EOS_ID, UNK_ID]


def translation(source_token: int) -> int:
    return 4 + (source_token - 4 + 17) % (V - 4)


def toy_corpus(pairs: int = 2000) -> Corpus:
    """Word for word in another order, and token 4 in every sentence of both sides without being a
    translation of any.
    """
    generator = np.random.default_rng(0)
    words = 5 + (generator.zipf(1.3, size=(pairs, 6)) - 1) % (V - 5)
    words = np.where(words == 23, 24, words)  # whose translation would be 4
    sources = [[4, *row] for row in words.tolist()]
    targets = [
        generator.permutation([4, *map(translation, row)]).tolist() for row in words.tolist()
    ]
    return Corpus.from_lists(sources, targets)


def learn(corpus: Corpus, **settings) -> shortlist.Lexicon:
    return learn_shortlist.learn(corpus, source_vocab_size=V, target_vocab_size=V, **settings)


def make_shortlist(*, frequent: int = 2, top: int = 3, vocab_size: int = V) -> Shortlist:
    """Token s may need s, s + 1, ...; frequent are 10, 11, ..."""
    candidates = (np.arange(vocab_size)[:, None] + np.arange(top)) % vocab_size
    order = np.roll(np.arange(4, vocab_size), -6)
    return Shortlist(
        "a tokenizer",
        np.arange(vocab_size + 1) * top,
        candidates.ravel().astype(np.int32),
        np.concatenate([SPECIAL, order]).astype(np.int32),
        frequent,
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    generator = np.random.default_rng(0)
    lines = [" ".join(generator.choice(list("abcdefghij"), size=i % 7 + 1)) for i in range(200)]
    (folder / "source").write_text("".join(f"{line}\n" for line in lines))
    (folder / "target").write_text(
        "".join(f"{' '.join(reversed(line.upper().split()))}\n" for line in lines)
    )
    return folder


@pytest.fixture(scope="module")
def tokenizer(text):
    pairs = zip(
        (text / "source").read_text().splitlines(),
        (text / "target").read_text().splitlines(),
        strict=True,
    )
    return Tokenizer.train(pairs, TokenizerConfig(vocab_size=45, algorithm="bpe"))


# Learning


def test_model_1_finds_the_right_pairs():
    learned = learn(toy_corpus())
    best = shortlist.strongest(learned.probability, 1)
    seen = np.flatnonzero(np.diff(best.indptr))
    assert len(seen) > 30
    for source in set(seen) - {PAD_ID, 4}:  # PAD stands for NULL here
        assert best.indices[best.indptr[source]] == translation(source)
    assert learned.frequency[4] == 2000 and learned.frequency.sum() == 2000 * 7


def test_rows_are_distributions():
    sums = learn(toy_corpus(300)).probability.sum(axis=1)
    np.testing.assert_allclose(sums[sums > 0], 1, rtol=1e-4)


def test_every_iteration_makes_the_corpus_likelier():
    corpus = toy_corpus(300)
    likelihoods = []
    for iterations in (1, 2, 3, 5, 8):
        probability = learn(corpus, iterations=iterations).probability.toarray()
        log_likelihood = 0.0
        for i in range(corpus.num_pairs):
            (source, _), (target, _) = corpus.source(np.array([i])), corpus.target(np.array([i]))
            source = np.where(source == EOS_ID, PAD_ID, source)
            log_likelihood += np.log(probability[np.ix_(source, target[:-1])].mean(axis=0)).sum()
        likelihoods.append(log_likelihood)
    assert likelihoods == sorted(likelihoods) and likelihoods[-1] > likelihoods[0] + 100


def test_chunks_do_not_matter(monkeypatch):
    whole = learn(toy_corpus(300))
    monkeypatch.setattr(learn_shortlist, "_CHUNK", 500)
    np.testing.assert_allclose(
        whole.probability.toarray(), learn(toy_corpus(300)).probability.toarray(), atol=1e-5
    )


def test_a_bounded_table_keeps_the_translations(monkeypatch):
    monkeypatch.setattr(learn_shortlist, "_CHUNK", 500)
    monkeypatch.setattr(learn_shortlist, "_MOST_ENTRIES", 12 * V)
    bounded = learn(toy_corpus()).probability
    assert bounded.nnz <= 12 * V
    for source in range(5, 20):
        row = bounded.indices[bounded.indptr[source] : bounded.indptr[source + 1]]
        assert translation(source) in row


def test_a_sample_of_the_pairs_is_spread_over_the_corpus():
    sources = [[4]] * 500 + [[5]] * 500
    learned = learn(Corpus.from_lists(sources, sources), max_pairs=10)
    assert learned.frequency[[4, 5]].tolist() == [5, 5]


def test_strongest_keeps_the_largest_and_of_equals_the_lower():
    table = sparse.csr_array(np.array([[0.1, 0.4, 0, 0.4], [0, 0, 0, 0], [0.2, 0.1, 0.3, 0.4]]))
    kept = shortlist.strongest(table, 2)
    assert kept.indices.tolist() == [1, 3, 3, 2] and kept.indptr.tolist() == [0, 2, 2, 4]


# The tokens of a sentence


def test_shared_tokens_stand_first_in_a_fixed_order():
    shared = make_shortlist(frequent=3).shared((30, EOS_ID, 7))
    assert shared.dtype == np.int32 and shared.tolist() == [*SPECIAL, 30, 7, 10, 11, 12]


def test_a_sentence_has_what_goes_with_its_own_tokens():
    made = make_shortlist(vocab_size=2000)
    shared = made.shared()
    tokens = made.of_sentences(
        np.array([[700, 900, 2], [11, 2, 0]]), shared, prefix_BP=np.array([[-1, -1], [1500, -1]])
    )
    assert tokens.dtype == np.int32 and tokens.shape == (2, len(shared) + 64)
    assert (tokens[:, : len(shared)] == shared).all()
    own = tokens[:, len(shared) :]
    # EOS has candidates here
    assert own[0][:7].tolist() == [4, 700, 701, 702, 900, 901, 902] and (own[0][7:] == -1).all()
    assert own[1][:4].tolist() == [4, 12, 13, 1500] and (own[1][4:] == -1).all()


def test_neighbours_change_nothing_but_the_padding():
    made = make_shortlist(vocab_size=2000, top=10)
    shared = made.shared()
    sources = np.random.default_rng(0).integers(4, 2000, (6, 9))
    together = made.of_sentences(np.concatenate([sources, np.arange(1000, 1090)[None, :9]]), shared)
    for source, its in zip(sources, together, strict=False):
        [alone] = made.of_sentences(source[None], shared)
        assert alone[alone >= 0].tolist() == its[its >= 0].tolist()


def test_widths_are_few():
    made = make_shortlist(vocab_size=2000)
    widths = {
        made.of_sentences(np.arange(count)[None], made.shared()).shape[1]
        for count in range(1, 2000, 50)
    }
    assert widths == {6 + width for width in (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)}


# Searching with it


CONFIG = DecodingConfig(beam_size=3, max_extra_length=6, max_source_length=8, batch_size=4)
SENTENCES = [
    Sentence(np.random.default_rng(i).integers(4, V, 1 + i % 7).tolist(), seed=i) for i in range(24)
]


def make_model(seed: int = 3, **settings) -> Transformer:
    small = {
        "vocab_size": V,
        "d_model": 16,
        "d_ff": 32,
        "num_heads": 2,
        "num_layers": 1,
        "dtype": "float32",
    }
    model = Transformer(
        ModelConfig(**small | {"tie_embeddings": "none", "softmax_bias": True} | settings),
        rngs=nnx.Rngs(seed),
    )
    if model.softmax_matrix is not None:
        model.softmax_matrix[...] = model.softmax_matrix[...] * 4
    if model.softmax_bias is not None:
        bias_V = jax.random.normal(jax.random.key(seed), (V,))
        model.softmax_bias[...] = bias_V.at[EOS_ID].set(-2)  # no end before something is said
    return model


@pytest.fixture(scope="module")
def engine():
    return Engine([make_model()], CONFIG, shortlist=make_shortlist(frequent=3))


def agree(one, other):
    """The same hypotheses, to the last token; numbers as far as sums over another order of tokens
    allow.
    """
    assert [[hypothesis.tokens for hypothesis in its] for its in one] == [
        [h.tokens for h in its] for its in other
    ]
    for its, others in zip(one, other, strict=True):
        for hypothesis, same in zip(its, others, strict=True):
            np.testing.assert_allclose(hypothesis.token_log_probs, same.token_log_probs, atol=1e-4)
            assert hypothesis.score == pytest.approx(same.score, abs=1e-4)


def test_the_whole_vocabulary_as_a_shortlist_changes_nothing():
    """In another order, too: suppressed tokens come first. Two unlike models, and all that may
    change ranks.
    """
    models = [make_model(tie_embeddings="all", softmax_bias=False), make_model(num_heads=4)]
    rules = {
        "min_length": 4,
        "no_repeat_ngram": 2,
        "repetition_penalty": 1.5,
        "coverage_penalty": 0.3,
    }
    config = dataclasses.replace(CONFIG, **rules)
    sentences = [sentence._replace(prefix=[30, 7][: i % 3]) for i, sentence in enumerate(SENTENCES)]
    plain = Engine(models, config, suppress=(17, 30)).search(sentences, num_hypotheses=2)
    listed = Engine(models, config, suppress=(17, 30), shortlist=make_shortlist(frequent=V))
    agree(listed.search(sentences, num_hypotheses=2), plain)


def test_neighbours_and_order_do_not_matter(engine):
    """To the last bit, as without a shortlist."""
    together = engine.search(SENTENCES)
    assert len({str(best.tokens) for [best] in together}) > 18
    assert [engine.search([sentence])[0] for sentence in SENTENCES[:12]] == together[:12]
    assert engine.search(SENTENCES[::-1])[::-1] == together
    assert engine.num_compiled == 1


def test_other_batch_sizes_and_widths_agree(engine, monkeypatch):
    monkeypatch.setattr(shortlist, "_SMALLEST", 24)
    other = Engine(
        [make_model()],
        dataclasses.replace(CONFIG, batch_size=2),
        shortlist=make_shortlist(frequent=3),
    )
    agree(other.search(SENTENCES), engine.search(SENTENCES))


def test_samples_of_a_sentence_depend_on_its_seed_alone(monkeypatch):
    config, made = (
        dataclasses.replace(CONFIG, method="sample", beam_size=2),
        make_shortlist(frequent=3),
    )
    whole = Engine([make_model()], config, shortlist=made).search(SENTENCES, num_hypotheses=2)
    monkeypatch.setattr(shortlist, "_SMALLEST", 24)  # as if its neighbours needed less
    agree(
        Engine([make_model()], config, shortlist=made).search(SENTENCES[::-1], num_hypotheses=2)[
            ::-1
        ],
        whole,
    )


@pytest.mark.parametrize("num_models", [1, 2])
def test_probabilities_are_those_of_a_softmax_over_a_sentences_own_tokens(engine, num_models):
    if num_models == 2:
        engine = Engine(
            [make_model(1), make_model(2)], CONFIG, shortlist=make_shortlist(frequent=3)
        )
    source_NS, target_NT = (
        np.zeros((len(SENTENCES), 8), np.int32),
        np.zeros((len(SENTENCES), 14), np.int32),
    )
    its_own_NV = np.zeros((len(SENTENCES), V), bool)
    its_own_NV[:, [*SPECIAL, 10, 11, 12]] = True
    found = engine.search(SENTENCES)
    for i, (sentence, [best]) in enumerate(zip(SENTENCES, found, strict=True)):
        source_NS[i, : len(sentence.tokens) + 1] = [*sentence.tokens, EOS_ID]
        target_NT[i, : len(best.tokens) + 1] = [*best.tokens, EOS_ID]
        its_own_NV[i, (np.array([*sentence.tokens, EOS_ID])[:, None] + np.arange(3)) % V] = True
    logits = [
        jax.jit(lambda s, t, model=model: model(s, t))(source_NS, target_NT)
        for model in engine.models
    ]
    chances_NTV = np.mean(
        [jax.nn.softmax(np.where(its_own_NV[:, None], each, -np.inf)) for each in logits], axis=0
    )
    for i, [best] in enumerate(found):
        tokens = [*best.tokens, EOS_ID]
        assert its_own_NV[i, tokens].all() and not its_own_NV[i].all()
        np.testing.assert_allclose(
            best.token_log_probs, np.log(chances_NTV[i, np.arange(len(tokens)), tokens]), atol=1e-4
        )


def test_prefixes_and_suppressed_tokens(engine):
    """A prefix has what the source does not ask for, or what is suppressed elsewhere."""
    [favourite, *_] = engine.search([Sentence([20, 21])])[0][0].tokens
    config, made = dataclasses.replace(CONFIG, min_length=4), make_shortlist(frequent=3)
    strict = Engine([make_model()], config, suppress=(37, favourite), shortlist=made)
    sentences = [
        Sentence([20, 21], prefix=[38, 5]),
        Sentence([20, 21]),
        Sentence([20, 21], prefix=[favourite]),
    ]
    forced, free, against = [its[0].tokens for its in strict.search(sentences)]
    assert forced[:2] == [38, 5] and against[0] == favourite
    assert len(free) >= 4 and not {*forced[2:], *free, *against[1:]} & {37, favourite}
    assert [strict.search([sentences[i]])[0][0].tokens for i in (0, 2)] == [forced, against]


@pytest.mark.devices(4)
def test_devices_share_the_work(engine):
    spread = Engine(
        [make_model()], CONFIG, shortlist=make_shortlist(frequent=3), devices=jax.devices()[:4]
    )
    agree(spread.search(SENTENCES), engine.search(SENTENCES))


@pytest.mark.cpu("it reads the program that XLA makes for them")
def test_the_loop_copies_no_softmax_weights(engine):
    program = engine.lowered(engine.buckets[0]).compile().as_text()
    weights = rf"f32\[{CONFIG.batch_size},16,64\]"
    assert re.search(weights, program)
    # where they are made
    assert (
        len(re.findall(rf"= {weights}\S* (?:copy|gather|concatenate|pad|select)\(", program)) <= 1
    )


def test_more_samples_than_what_every_sentence_has():
    engine = Engine(
        [make_model()],
        dataclasses.replace(CONFIG, method="sample", beam_size=9),
        shortlist=make_shortlist(),
    )
    assert len(engine.search(SENTENCES[:1], num_hypotheses=9)[0]) == 9


def test_a_beam_wider_than_what_every_sentence_has():
    with pytest.raises(
        UserError,
        match="beam_size is 7; expected at most 6, the tokens that every sentence may use",
    ):
        Engine([make_model()], dataclasses.replace(CONFIG, beam_size=7), shortlist=make_shortlist())


# Files


def test_saved_and_loaded_it_is_the_same(tokenizer, tmp_path):
    size = tokenizer.target_vocab_size
    corpus = Corpus.from_lists(
        tokenizer.encode_source(["a b c"] * 3), tokenizer.encode_target(["C B A"] * 3)
    )
    learned = learn_shortlist.learn(corpus, source_vocab_size=size, target_vocab_size=size)
    made = Shortlist.from_lexicon(learned, tokenizer, top=5, frequent=7)
    made.save(tmp_path / "shortlist.npz")
    loaded = Shortlist.load(tmp_path / "shortlist.npz", tokenizer)
    for name in ("fingerprint", "offsets", "candidates", "by_frequency", "frequent"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(made, name))
    assert [path.name for path in tmp_path.iterdir()] == ["shortlist.npz"]
    assert learned.probability.indptr[PAD_ID + 1] > 0  # NULL's
    assert loaded.candidates[: loaded.offsets[PAD_ID + 1]].tolist() == [PAD_ID]
    lengths = np.diff(loaded.offsets)
    own = [i in loaded.candidates[loaded.offsets[i] : loaded.offsets[i + 1]] for i in range(size)]
    assert all(own) and lengths.max() <= 6  # a joint vocabulary: names may stay as they are


def test_the_program_learns_from_the_runs_own_text(text, tokenizer, tmp_path, capsys, monkeypatch):
    # it would write to this test's stderr ever after
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    pairs = PairsConfig(kind="text", source=(str(text / "source"),), target=(str(text / "target"),))
    (tmp_path / "config.json").write_text(to_json(Config(data=DataConfig(train=pairs, workers=0))))
    tokenizer.save(tmp_path)
    assert main(["--workdir", str(tmp_path), "--top", "4", "--frequent", "3"]) == 0
    made = Shortlist.load(tmp_path / "shortlist.npz", tokenizer)
    assert made.frequent == 3
    for [word], [translated] in zip(
        tokenizer.encode_source(list("abc")), tokenizer.encode_target(list("ABC")), strict=True
    ):
        assert made.candidates[made.offsets[word]] == translated  # the likeliest stands first
    assert (
        main(["--workdir", str(tmp_path / "nowhere")]) == 2
        and "no config.json" in capsys.readouterr().err
    )
    assert (
        main(["--workdir", str(tmp_path), "--top", "0"]) == 2
        and "are 0, 100 and 300000" in capsys.readouterr().err
    )
    assert main(["--workdir", str(tmp_path), "--output", str(tmp_path / "no" / "x.npz")]) == 2
    assert "expected the name of a file in a folder that exists" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(to_json(Config()))
    assert (
        main(["--workdir", str(tmp_path)]) == 2
        and "names no training text" in capsys.readouterr().err
    )


def test_the_program_starts_without_a_warning():
    command = [
        sys.executable,
        "-W",
        "error::RuntimeWarning",
        "-m",
        "transformer_jax.decoding.learn_shortlist",
        "--help",
    ]
    assert "--workdir" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_text_tables_are_read(tokenizer, tmp_path, caplog):
    small, big, other = tokenizer.target_ids(["▁a", "▁A", "▁B"])
    entries = "▁A ▁a 0.75\n▁B ▁a 0.125\nNULL ▁a 0.1\n▁A NULL 0.5\n\n▁NOWHERE ▁a 0.5\n"
    (tmp_path / "lex.s2t").write_text(entries)
    with gzip.open(tmp_path / "lex.s2t.gz", "wt") as file:
        file.write(entries)
    for name in ("lex.s2t", "lex.s2t.gz"):
        made = Shortlist.load(tmp_path / name, tokenizer)
        assert made.candidates[made.offsets[small] : made.offsets[small + 1]].tolist() == [
            big,
            other,
            small,
        ]
        assert made.by_frequency[4:6].tolist() == [big, other]
    assert "1 entries with tokens that the vocabulary lacks" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("▁A ▁a\n", "line 1 is '▁A ▁a'; expected `target source probability`"),
        ("▁A ▁a 0.5\n▁A ▁a 1.5\n", "line 2"),
        ("▁A ▁a nan\n", "line 1"),
        ("▁Ä ▁un 0.5\n", "no entry in the tokens of this vocabulary"),
        ("", "no entry"),
    ],
)
def test_bad_text_tables(tokenizer, tmp_path, content, message):
    (tmp_path / "table").write_text(content)
    with pytest.raises(UserError, match=message):
        Shortlist.load(tmp_path / "table", tokenizer)


def test_bad_files(tokenizer, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        Shortlist.load(tmp_path / "none.npz", tokenizer)
    size = tokenizer.target_vocab_size
    made = make_shortlist(vocab_size=size)
    path = tmp_path / "shortlist.npz"
    made.save(path)
    with pytest.raises(UserError, match="another tokenizer"):
        Shortlist.load(path, tokenizer)
    good = path.read_bytes()
    for content in (b"", b"garbage", good[: len(good) // 2], good[:200] + bytes(100) + good[300:]):
        path.write_bytes(content)
        with pytest.raises(UserError, match="damaged"):
            Shortlist.load(path, tokenizer)
    np.savez(
        path,
        format=1,
        fingerprint=tokenizer.fingerprint,
        offsets=np.array([None, {}]),
        candidates=[],
        by_frequency=[],
    )
    with pytest.raises(UserError, match="damaged"):  # never a pickle
        Shortlist.load(path, tokenizer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"by_frequency": np.array([0, 1, 5, 3, 2, 4], np.int32)}, "misses EOS"),
        ({"by_frequency": np.array([0, 1], np.int32)}, "misses EOS"),
        ({"by_frequency": np.array([0, 1, 2, 3, 4, 4], np.int32)}, "a token twice"),
        ({"candidates": np.array([3, 6], np.int32)}, r"outside 0\.\.5"),
        ({"candidates": np.array([3, -1], np.int32)}, r"outside 0\.\.5"),
        ({"candidates": np.array([0.5, 1])}, "flat integers"),
        ({"offsets": np.array([0, 2, 1])}, "offsets do not fit"),
        ({"offsets": np.array([0, 1, 3])}, "offsets do not fit"),
        ({"frequent": -1}, "expected 0 or more"),
    ],
)
def test_bad_shortlists(changes, message):
    good = {
        "fingerprint": "",
        "offsets": np.array([0, 1, 2]),
        "candidates": np.array([3, 5], np.int32),
        "by_frequency": np.array([0, 1, 2, 3, 5, 4], np.int32),
        "frequent": 1,
    }
    Shortlist(**good)
    with pytest.raises(UserError, match=message):
        Shortlist(**good | changes)
