"""The reduced softmax: model 1 finds the right pairs, everything as a shortlist changes nothing, neighbours do not matter."""

from __future__ import annotations

import gzip
import logging
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.config import Config, DataConfig, ModelConfig, PairsConfig, TokenizerConfig
from transformer_jax.config_files import to_json
from transformer_jax.data.corpus import Corpus
from transformer_jax.decoding import lexicon, shortlist
from transformer_jax.decoding.beam_search import beam_search
from transformer_jax.decoding.shortlist import Shortlist, check_pieces, main, shortlisted_step
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Tokenizer

V = 40
SPECIAL = [PAD_ID, BOS_ID, EOS_ID, UNK_ID]


def translation(source_piece: int) -> int:
    return 4 + (source_piece - 4 + 17) % (V - 4)


def toy_corpus(pairs: int = 2000) -> Corpus:
    """Word for word in another order, and piece 4 in every sentence of both sides without being a translation of any."""
    generator = np.random.default_rng(0)
    words = 5 + (generator.zipf(1.3, size=(pairs, 6)) - 1) % (V - 5)
    words = np.where(words == 23, 24, words)  # whose translation would be 4
    sources = [[4, *row] for row in words.tolist()]
    targets = [generator.permutation([4, *map(translation, row)]).tolist() for row in words.tolist()]
    return Corpus.from_lists(sources, targets)


def learn(corpus: Corpus, **settings) -> lexicon.Lexicon:
    return lexicon.learn(corpus, source_vocab_size=V, target_vocab_size=V, **settings)


def make_shortlist(*, frequent: int = 2, top: int = 3, vocab_size: int = V) -> Shortlist:
    """Piece s may need s, s + 1, ...; frequent are 10, 11, ..."""
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
    (folder / "target").write_text("".join(f"{' '.join(reversed(line.upper().split()))}\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def tokenizer(text):
    pairs = zip((text / "source").read_text().splitlines(), (text / "target").read_text().splitlines(), strict=True)
    return Tokenizer.train(pairs, TokenizerConfig(vocab_size=45, algorithm="bpe"))


# Learning


def test_model_1_finds_the_right_pairs():
    learned = learn(toy_corpus())
    best = lexicon.strongest(learned.probability, 1)
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
            source = corpus.source_tokens[corpus.source_offsets[i] : corpus.source_offsets[i + 1]]
            target = corpus.target_tokens[corpus.target_offsets[i] : corpus.target_offsets[i + 1] - 1]
            source = np.where(source == EOS_ID, PAD_ID, source)
            log_likelihood += np.log(probability[np.ix_(source, target)].mean(axis=0)).sum()
        likelihoods.append(log_likelihood)
    assert likelihoods == sorted(likelihoods) and likelihoods[-1] > likelihoods[0] + 100


def test_chunks_do_not_matter(monkeypatch):
    whole = learn(toy_corpus(300))
    monkeypatch.setattr(lexicon, "_CHUNK", 500)
    np.testing.assert_allclose(whole.probability.toarray(), learn(toy_corpus(300)).probability.toarray(), atol=1e-5)


def test_a_bounded_table_keeps_the_translations(monkeypatch):
    monkeypatch.setattr(lexicon, "_CHUNK", 500)
    monkeypatch.setattr(lexicon, "_MOST_ENTRIES", 12 * V)
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
    table = lexicon.sparse.csr_array(np.array([[0.1, 0.4, 0, 0.4], [0, 0, 0, 0], [0.2, 0.1, 0.3, 0.4]]))
    kept = lexicon.strongest(table, 2)
    assert kept.indices.tolist() == [1, 3, 3, 2] and kept.indptr.tolist() == [0, 2, 2, 4]


# The pieces of a batch


def test_pieces_are_what_the_batch_needs():
    made = make_shortlist(vocab_size=2000)
    pieces = made.pieces(np.array([[700, 2, 0], [700, 900, 2]]))
    assert pieces.dtype == np.int32 and len(pieces) == 256
    assert pieces[:4].tolist() == SPECIAL and (np.diff(pieces) > 0).all()
    assert {10, 11, 700, 701, 702, 900, 901, 902} <= set(pieces.tolist())
    fill = sorted(set(pieces.tolist()) - {*range(5), 700, 701, 702, 900, 901, 902})  # PAD and EOS have candidates here
    assert fill == list(range(10, 10 + len(fill)))  # the next most frequent ones


def test_sizes_are_few():
    made = make_shortlist(vocab_size=2000)
    sizes = {len(made.pieces(np.arange(count)[None])) for count in range(0, 2000, 50)}
    assert sizes == {256, 384, 512, 768, 1024, 1536, 2000}
    np.testing.assert_array_equal(made.pieces(np.arange(2000)[None]), np.arange(2000))


def test_given_pieces_come_first_and_prefixes_are_in():
    made = make_shortlist(vocab_size=2000)
    pieces = made.pieces(np.array([[5, 2]]), prefix_BP=np.array([[1500, -1], [-1, 1501]]), first=(1234, EOS_ID, 7))
    assert pieces[:6].tolist() == [*SPECIAL, 1234, 7] and (np.diff(pieces[6:]) > 0).all()
    assert {1500, 1501} <= set(pieces.tolist())
    check_pieces(pieces, 2000)


def test_a_sentence_is_allowed_what_it_would_have_alone():
    made = make_shortlist(vocab_size=2000)
    source = np.array([[700, 900, 2], [30, 2, 0]])
    prefix = np.array([[-1], [1500]])
    pieces = made.pieces(source, prefix_BP=prefix)
    allowed = made.allowed(source, pieces, prefix_BP=prefix)
    assert sorted(pieces[allowed[0]]) == [0, 1, 2, 3, 4, 10, 11, 700, 701, 702, 900, 901, 902]
    assert sorted(pieces[allowed[1]]) == [0, 1, 2, 3, 4, 10, 11, 30, 31, 32, 1500]
    alone = source[1:, :2]
    its_pieces = made.pieces(alone, prefix_BP=prefix[1:])
    assert sorted(its_pieces[made.allowed(alone, its_pieces, prefix_BP=prefix[1:])[0]])[3:] == sorted(pieces[allowed[1]])[3:]


# Searching with it


def make_model(vocab_size: int = V, **settings) -> Transformer:
    small = {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_layers": 1, "dtype": "float32"}
    settings = {"vocab_size": vocab_size, "tie_embeddings": "none", "softmax_bias": True} | small | settings
    model = Transformer(ModelConfig(**settings), rngs=nnx.Rngs(3))
    key = jax.random.key(0)
    if model.softmax_matrix is not None:
        model.softmax_matrix[...] = model.softmax_matrix[...] * 5
    if model.softmax_bias is not None:
        model.softmax_bias[...] = jax.random.normal(key, (vocab_size,))
    return model


SOURCE = np.random.default_rng(1).integers(4, V, size=(6, 7))
SOURCE[:, -1] = EOS_ID


@partial(jax.jit, static_argnums=0)
def _search(graph, parameters, source_BS, pieces_K, allowed_BK):
    model = nnx.merge(graph, parameters)
    cache = model.start_cache(model.encode(source_BS), source_BS != PAD_ID, beam_size=3, max_length=9)
    return beam_search(
        model.decode_step if pieces_K is None else partial(shortlisted_step(model, pieces_K), allowed_BK=allowed_BK),
        cache,
        batch_size=len(source_BS),
        beam_size=3,
        max_length=9,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        pad_id=PAD_ID,
        reorder=lambda cache, parents_BW: cache.reorder(parents_BW),
    )


def search(model, source=SOURCE, pieces=None, allowed=None):
    """(true pieces, scores) of the best hypotheses."""
    graph, parameters = nnx.split(model, nnx.Param)
    result = _search(graph, parameters, jnp.asarray(source), pieces, allowed)
    tokens = np.asarray(result.tokens_BNL)
    return tokens if pieces is None else pieces[tokens], np.asarray(result.scores_BN)


@pytest.mark.parametrize("settings", [{}, {"tie_embeddings": "all", "softmax_bias": False}])
def test_the_whole_vocabulary_as_a_shortlist_changes_nothing(settings):
    model = make_model(**settings)
    made = make_shortlist(frequent=V)
    pieces = made.pieces(SOURCE)
    assert len(pieces) == V
    tokens, scores = search(model)
    shuffled = np.concatenate([SPECIAL, np.random.default_rng(0).permutation(np.arange(4, V))]).astype(np.int32)
    for order in (pieces, shuffled):
        its_tokens, its_scores = search(model, pieces=order, allowed=made.allowed(SOURCE, order))
        np.testing.assert_array_equal(its_tokens, tokens)
        np.testing.assert_allclose(its_scores, scores, rtol=1e-5)


def test_one_step_is_that_of_the_model_without_the_other_pieces():
    model, pieces = make_model(), np.array([*SPECIAL, 30, 9, 17], np.int32)

    @jax.jit
    def steps(places_BW):
        cache = model.start_cache(model.encode(SOURCE), SOURCE != PAD_ID, beam_size=2, max_length=4)
        return shortlisted_step(model, pieces)(places_BW, cache), model.decode_step(jnp.asarray(pieces)[places_BW], cache)

    (logits, cache), (expected, expected_cache) = steps(np.array([[4, 6]] * len(SOURCE)))
    np.testing.assert_allclose(logits, expected[:, :, pieces], atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, cache, expected_cache)


def test_only_allowed_pieces_are_found():
    model, pieces = make_model(), np.arange(V, dtype=np.int32)
    allowed = np.isin(pieces, [*SPECIAL, *range(5, 15)])
    tokens, scores = search(model, pieces=pieces, allowed=np.tile(allowed, (len(SOURCE), 1)))
    assert set(tokens.ravel().tolist()) <= set(pieces[allowed].tolist())
    assert (tokens != search(model)[0]).any() and np.isfinite(scores).all()


def test_with_a_mask_neighbours_do_not_matter(monkeypatch):
    monkeypatch.setattr(shortlist, "_SMALLEST", 16)
    model, made = make_model(), make_shortlist(frequent=3)
    pieces = made.pieces(SOURCE)
    together = search(model, pieces=pieces, allowed=made.allowed(SOURCE, pieces))
    for i in range(len(SOURCE)):
        alone = SOURCE[i : i + 1]
        pieces = made.pieces(alone)
        tokens, scores = search(model, alone, pieces, made.allowed(alone, pieces))
        np.testing.assert_array_equal(tokens[0], together[0][i])
        np.testing.assert_allclose(scores[0], together[1][i], rtol=1e-5)


# Files


def test_saved_and_loaded_it_is_the_same(tokenizer, tmp_path):
    size = tokenizer.target_vocab_size
    corpus = Corpus.from_lists(tokenizer.encode_source(["a b c"] * 3), tokenizer.encode_target(["C B A"] * 3))
    learned = lexicon.learn(corpus, source_vocab_size=size, target_vocab_size=size)
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
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)  # it would write to this test's stderr ever after
    pairs = PairsConfig(kind="text", source=(str(text / "source"),), target=(str(text / "target"),))
    (tmp_path / "config.json").write_text(to_json(Config(data=DataConfig(train=pairs, workers=0))))
    tokenizer.save(tmp_path)
    assert main(["--workdir", str(tmp_path), "--top", "4", "--frequent", "3"]) == 0
    made = Shortlist.load(tmp_path / "shortlist.npz", tokenizer)
    assert made.frequent == 3
    for [word], [translated] in zip(tokenizer.encode_source(list("abc")), tokenizer.encode_target(list("ABC")), strict=True):
        assert made.candidates[made.offsets[word]] == translated  # the likeliest stands first
    assert main(["--workdir", str(tmp_path / "nowhere")]) == 2 and "no config.json" in capsys.readouterr().err
    assert main(["--workdir", str(tmp_path), "--top", "0"]) == 2 and "are 0, 100 and 300000" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(to_json(Config()))
    assert main(["--workdir", str(tmp_path)]) == 2 and "names no training text" in capsys.readouterr().err


def test_the_program_starts_without_a_warning():
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "transformer_jax.decoding.shortlist", "--help"]
    assert "--workdir" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_text_tables_are_read(tokenizer, tmp_path, caplog):
    small, big, other = tokenizer.target_ids(["▁a", "▁A", "▁B"])
    entries = "▁A ▁a 0.75\n▁B ▁a 0.125\nNULL ▁a 0.1\n▁A NULL 0.5\n\n▁NOWHERE ▁a 0.5\n"
    (tmp_path / "lex.s2t").write_text(entries)
    with gzip.open(tmp_path / "lex.s2t.gz", "wt") as file:
        file.write(entries)
    for name in ("lex.s2t", "lex.s2t.gz"):
        made = Shortlist.load(tmp_path / name, tokenizer)
        assert made.candidates[made.offsets[small] : made.offsets[small + 1]].tolist() == [big, other, small]
        assert made.by_frequency[4:6].tolist() == [big, other]
    assert "1 entries with pieces that the vocabulary lacks" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("▁A ▁a\n", "line 1 is '▁A ▁a'; expected `target source probability`"),
        ("▁A ▁a 0.5\n▁A ▁a 1.5\n", "line 2"),
        ("▁A ▁a nan\n", "line 1"),
        ("▁Ä ▁un 0.5\n", "no entry in the pieces of this vocabulary"),
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
    np.savez(path, format=1, fingerprint=tokenizer.fingerprint, offsets=np.array([None, {}]), candidates=[], by_frequency=[])
    with pytest.raises(UserError, match="damaged"):  # never a pickle
        Shortlist.load(path, tokenizer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"by_frequency": np.array([0, 1, 5, 3, 2, 4], np.int32)}, "misses EOS"),
        ({"by_frequency": np.array([0, 1], np.int32)}, "misses EOS"),
        ({"by_frequency": np.array([0, 1, 2, 3, 4, 4], np.int32)}, "a piece twice"),
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


def test_bad_pieces():
    model, made = make_model(), make_shortlist()
    for pieces, message in (
        ([0, 1, 5, 3], "misses EOS"),
        ([0, 1, 2, 3, V], r"outside 0\.\.39"),
        ([0, 1, 2, 3, 7, 7], "a piece twice"),
    ):
        with pytest.raises(UserError, match=message):
            shortlisted_step(model, np.array(pieces, np.int32))
    with pytest.raises(UserError, match=r"Source pieces go from 5 to 40; expected 0\.\.39"):
        made.pieces(np.array([[5, V]]))
    with pytest.raises(UserError, match="Piece 99 is not in the vocabulary"):
        made.pieces(np.array([[5]]), first=(99,))
