"""Beam search on toy chains, compared with brute force, a reference and other batch contents."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_search import Rules, every_hypothesis, reference_search
from reference_search import chain as as_model

from transformer_jax.decoding.beam_search import BeamSearch
from transformer_jax.decoding.logits import top_k
from transformer_jax.decoding.search import length_divisor, search
from transformer_jax.errors import UserError

PAD, BOS, EOS = 0, 1, 2
IDS = {"pad_id": PAD, "bos_id": BOS, "eos_id": EOS}


def random_chain(
    seed: int, *, sentences: int, length: int, vocab: int, possible: int | None = None
) -> np.ndarray:
    """logits_BLVV of the next token given the position and the token before; only the first
    ``possible`` tokens occur.
    """
    logits = (
        np.random.default_rng(seed)
        .normal(size=(sentences, length, vocab, vocab))
        .astype(np.float32)
        * 1.5
    )
    if possible is not None:
        logits[..., possible:] = -np.inf
    return logits


@partial(jax.jit, static_argnames=("beam_size", "length_penalty"))
def _search(logits_BLVV, max_lengths_B, *, beam_size, length_penalty):
    batch, length = logits_BLVV.shape[:2]

    def step(tokens_BW, position_BW):
        rows_B1 = jnp.arange(batch)[:, None]
        return logits_BLVV[rows_B1, position_BW, tokens_BW], position_BW + 1

    method = BeamSearch(**IDS, beam_size=beam_size, length_penalty=length_penalty)
    cache = jnp.zeros((batch, beam_size), jnp.int32)
    return search(method, step, cache, limit_B=max_lengths_B, max_length=length)


def found_in(logits, *, beam_size, length_penalty=0.6, max_lengths=None):
    """The result as one list of (tokens, score, log-probability) a sentence, with what every result
    must satisfy checked.
    """
    limits = (
        np.full(len(logits), logits.shape[1]) if max_lengths is None else np.asarray(max_lengths)
    )
    result = jax.tree.map(
        np.asarray,
        _search(logits, limits, beam_size=beam_size, length_penalty=length_penalty),
    )
    found = []
    for sentence, limit in enumerate(limits):
        hypotheses = []
        for tokens, score, log_prob, length, _ in zip(
            *(field[sentence] for field in result), strict=True
        ):
            assert (tokens[length:] == PAD).all()
            if length == 0:
                assert score == log_prob == -np.inf
                continue
            assert length <= limit and tokens[length - 1] == EOS
            assert not {EOS, PAD} & set(tokens[: length - 1].tolist())
            hypotheses.append((tokens[:length].tolist(), float(score), float(log_prob)))
        scores = [score for _, score, _ in hypotheses]
        assert scores == sorted(scores, reverse=True)
        found.append(hypotheses)
    return found


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    with np.errstate(divide="ignore"):
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def forced_log_prob(log_probs_LVV: np.ndarray, tokens: list[int]) -> float:
    """What the chain gives ``tokens``, EOS included."""
    return sum(
        log_probs_LVV[t, before, token]
        for t, (before, token) in enumerate(itertools.pairwise([BOS, *tokens]))
    )


def assert_same(found, expected):
    """The hypotheses of one sentence against those of the plain search."""
    assert [tuple(tokens) for tokens, _, _ in found] == [
        hypothesis.tokens for hypothesis in expected
    ]
    np.testing.assert_allclose(
        [score for _, score, _ in found], [hypothesis.score for hypothesis in expected], rtol=1e-5
    )
    np.testing.assert_allclose(
        [log_p for _, _, log_p in found],
        [hypothesis.log_prob for hypothesis in expected],
        rtol=1e-5,
    )


@pytest.mark.parametrize(
    ("possible", "length", "beam_size", "alpha"),
    [
        (4, 5, 40, 0.6),
        (4, 5, 40, 2.0),
        (5, 4, 48, 0.6),
        (7, 3, 40, 0.0),
        (7, 3, 40, 1.0),
        (40, 2, 40, 0.6),
    ],
)
def test_a_wide_beam_finds_the_best_of_all_sequences(possible, length, beam_size, alpha):
    rules = Rules(max_length=length, length_penalty=alpha)
    for vocab in (beam_size, possible):  # the beam may be wider than the vocabulary
        logits = random_chain(possible, sentences=6, length=length, vocab=vocab, possible=possible)
        for chain, found in zip(
            logits, found_in(logits, beam_size=beam_size, length_penalty=alpha), strict=True
        ):
            assert_same(found, every_hypothesis(as_model(log_softmax(chain)), rules)[:beam_size])


@pytest.mark.parametrize(("beam_size", "alpha"), [(2, 0.6), (3, 0.0), (3, 1.5), (4, 0.6), (8, 0.6)])
def test_agrees_with_a_plain_search(beam_size, alpha):
    logits = random_chain(beam_size, sentences=100, length=9, vocab=11)
    for chain, found in zip(
        logits, found_in(logits, beam_size=beam_size, length_penalty=alpha), strict=True
    ):
        rules = Rules(max_length=9, length_penalty=alpha)
        assert_same(
            found, reference_search(as_model(log_softmax(chain)), rules, beam_size=beam_size)
        )


def test_beam_of_one_is_greedy():
    logits = random_chain(0, sentences=40, length=12, vocab=9)
    for chain, [(tokens, _, _)] in zip(logits, found_in(logits, beam_size=1), strict=True):
        expected = [BOS]
        while expected[-1] != EOS:
            position = len(expected) - 1
            row = chain[position, expected[-1]].copy()
            row[PAD] = -np.inf
            expected.append(EOS if position == 11 else int(row.argmax()))
        assert tokens == expected[1:]


def test_reported_scores_are_those_of_the_forced_output():
    logits = random_chain(2, sentences=20, length=10, vocab=13)
    limits = np.arange(20) % 10 + 1
    for chain, hypotheses in zip(
        logits, found_in(logits, beam_size=5, max_lengths=limits), strict=True
    ):
        for tokens, score, log_prob in hypotheses:
            expected = forced_log_prob(log_softmax(chain), tokens)
            assert log_prob == pytest.approx(expected, abs=1e-4)
            assert score == pytest.approx(expected / ((5 + len(tokens)) / 6) ** 0.6, abs=1e-4)


def test_neighbors_do_not_matter():
    logits = random_chain(3, sentences=12, length=8, vocab=10)
    limits = np.array([8, 1, 3, 8, 5, 2, 8, 7, 6, 4, 8, 1])
    together = found_in(logits, beam_size=3, max_lengths=limits)
    order = np.random.default_rng(0).permutation(12)
    shuffled = found_in(logits[order], beam_size=3, max_lengths=limits[order])
    assert [together[i] for i in order] == shuffled
    for i in range(12):
        assert found_in(logits[i : i + 1], beam_size=3, max_lengths=limits[i : i + 1]) == [
            together[i]
        ]


def test_a_limit_is_the_same_as_a_shorter_search():
    logits = random_chain(4, sentences=8, length=9, vocab=10)
    assert found_in(logits, beam_size=4, max_lengths=[5] * 8) == found_in(
        logits[:, :5], beam_size=4, max_lengths=[5] * 8
    )


def test_at_the_limit_only_the_end_is_allowed():
    logits = random_chain(5, sentences=4, length=6, vocab=8)
    logits[..., EOS] = -20
    for limit in (1, 3, 6):
        for hypotheses in found_in(logits, beam_size=2, max_lengths=[limit] * 4):
            assert len(hypotheses[0][0]) == limit


def test_no_room_gives_no_hypothesis():
    logits = random_chain(6, sentences=2, length=4, vocab=8)
    nothing, something = found_in(logits, beam_size=2, max_lengths=[0, 4])
    assert not nothing and something


def test_slots_that_nothing_can_fill_stay_empty():
    logits = random_chain(7, sentences=3, length=2, vocab=6, possible=4)  # EOS, or 1 EOS, or 3 EOS
    assert [len(hypotheses) for hypotheses in found_in(logits, beam_size=6)] == [3, 3, 3]


def test_ties_go_to_the_better_beam_then_the_lower_token():
    logits = np.zeros((5, 4, 12, 12), np.float32)
    logits[..., EOS] = -1
    found = found_in(logits, beam_size=3)
    assert found == [found[0]] * 5
    assert [tokens for tokens, _, _ in found[0]] == [[1, 1, 1, EOS], [1, 1, 3, EOS], [1, 1, 4, EOS]]


def test_impossible_tokens_never_give_nan():
    logits = random_chain(8, sentences=5, length=6, vocab=10, possible=4)
    logits[:, :, 3] = -np.inf
    logits[:, :, 3, EOS] = 0
    assert all(
        np.isfinite(score)
        for hypotheses in found_in(logits, beam_size=5)
        for _, score, _ in hypotheses
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_numbers_give_a_score_of_nan_and_leave_the_neighbors(value):
    logits = random_chain(9, sentences=3, length=6, vocab=10)
    expected = found_in(logits, beam_size=2)
    logits[1, 2] = value
    batch_B, limits_B = np.arange(3), np.full(3, 6)
    result = jax.device_get(_search(logits, limits_B, beam_size=2, length_penalty=0.6))
    assert np.isnan(result.scores_BN[1]).all() and np.isnan(result.log_probs_BN[1]).all()
    assert (result.lengths_BN[1] == 0).all() and (result.tokens_BNL[1] == PAD).all()
    others = jax.tree.map(lambda x: x[batch_B != 1], result)
    assert found_in(logits[[0, 2]], beam_size=2) == [expected[0], expected[2]]
    assert others.scores_BN.tolist() == [[score for _, score, _ in expected[i]] for i in (0, 2)]


def test_what_is_not_a_number_where_no_hypothesis_lives_is_not_felt():
    """After a token of probability 0, say."""
    logits = random_chain(10, sentences=2, length=6, vocab=10)
    logits[:, :, :, 5] = -np.inf
    expected = found_in(logits, beam_size=3)
    logits[:, :, 5] = np.nan
    assert found_in(logits, beam_size=3) == expected


def test_compiles_once_for_one_shape():
    before = _search._cache_size()
    for seed in range(3):
        logits = random_chain(seed, sentences=7, length=7, vocab=7)
        found_in(logits, beam_size=2, max_lengths=np.full(7, 3 + seed))
    assert _search._cache_size() == before + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beam_size": 0}, "beam_size is 0"),
        ({"beam_size": 2, "length_penalty": -1.0}, "length_penalty is -1.0"),
        ({"beam_size": 2, "length_penalty": float("nan")}, "length_penalty is nan"),
    ],
)
def test_settings_out_of_range(arguments, message):
    with pytest.raises(UserError, match=message):
        found_in(random_chain(0, sentences=2, length=3, vocab=8), **arguments)


@pytest.mark.parametrize(
    ("name", "token"), [("bos_id", -1), ("eos_id", -1), ("pad_id", -1), ("eos_id", 5)]
)
def test_token_ids_out_of_range(name, token):
    with pytest.raises(UserError, match=rf"{name} is {token}; expected a"):
        search(
            BeamSearch(**{**IDS, name: token}, beam_size=2),
            lambda tokens_BW, cache: (jnp.zeros((1, 2, 5)), cache),
            (),
            limit_B=jnp.array([4]),
            max_length=4,
        )


@pytest.mark.parametrize(
    ("width", "k"), [(5, 3), (127, 4), (1024, 4), (3001, 8), (3001, 1), (4096, 16)]
)
@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_two_stage_top_k_equals_lax(width, k, backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    ours = jax.jit(lambda x: top_k(x, k))
    for values in (5, 1_000_000):
        x = np.random.default_rng(width).integers(values, size=(6, width)).astype(np.float32)
        x[0] = 0
        x[1, : width // 2] = -np.inf
        for found, expected in zip(ours(x), jax.lax.top_k(x, k), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_length_divisor_is_that_of_the_paper():
    np.testing.assert_allclose(
        length_divisor(jnp.array([1, 7, 25]), 0.6), [1.0, 2**0.6, 5**0.6], rtol=1e-6
    )


@pytest.mark.parametrize("max_length", [2, 4])
@pytest.mark.parametrize("prefix", [(), (3,)])
def test_a_beam_in_a_dead_end_never_finishes(max_length: int, prefix: tuple[int, ...]) -> None:
    """As in a search that a grammar restricts: after token 3 nothing is possible, not even where
    EOS is forced.
    """
    log_chance = np.full((5, 5), -np.inf, np.float32)
    log_chance[1, [3, 4]], log_chance[4, 2] = np.log(0.5), 0
    result = search(
        BeamSearch(**IDS, beam_size=2),
        lambda tokens_BW, cache: (jnp.asarray(log_chance)[tokens_BW], cache),
        (),
        limit_B=jnp.array([max_length]),
        max_length=max_length,
        prefix_BP=jnp.array([prefix], jnp.int32).reshape(1, -1),
    )
    result = jax.device_get(result)
    rules = Rules(max_length, prefix=prefix)
    expected = reference_search(
        lambda tokens: log_chance[tokens[-1] if tokens else 1], rules, beam_size=2
    )
    assert [h.tokens for h in expected] == ([] if prefix else [(4, 2)])
    found = [
        tuple(result.tokens_BNL[0, n, :length].tolist())
        for n, length in enumerate(result.lengths_BN[0])
        if length
    ]
    assert found == [h.tokens for h in expected]
    assert np.isneginf(result.scores_BN[0, len(found) :]).all()


def test_tokens_and_rows_of_probability_zero_never_win() -> None:
    chance = np.zeros((5, 5), np.float32)
    chance[1, 3], chance[1, 4], chance[3, 2], chance[3, 3], chance[4, 2] = 0.9, 0.1, 0.5, 0.5, 1.0
    with np.errstate(divide="ignore"):
        log_chance_VV = jnp.asarray(np.log(chance))
    result = search(
        BeamSearch(**IDS, beam_size=2, length_penalty=0.0),
        lambda tokens_BW, cache: (log_chance_VV[tokens_BW], cache),
        (),
        limit_B=jnp.array([6]),
        max_length=6,
    )
    assert result.tokens_BNL[0, 0].tolist() == [3, 2, 0, 0, 0, 0]
    np.testing.assert_allclose(result.scores_BN[0, 0], np.log(0.45), rtol=1e-5)


def _toy_step(tokens_BW, cache):
    return jnp.zeros((*tokens_BW.shape, 5)), cache


def _squeezed_step(tokens_BW, cache):
    return jnp.zeros((*tokens_BW.shape, 1, 5)), cache


@pytest.mark.parametrize(
    ("message", "given"),
    [
        (r"limit_B has shape \(\); expected 1 axes that begin with \(1,\)", {"limit_B": 5}),
        (r"prefix_BP has shape \(3, 1\); expected 2 axes .* \(2,\)", {"prefix_BP": [[3]] * 3}),
        (r"array of the cache has shape \(\); expected any number", {"cache": {"step": 0}}),
        (r"array of the cache has shape \(2, 4\); expected", {"cache": jnp.zeros((2, 4))}),
        (r"first result of step_fn, .*, has shape \(\)", {"step_fn": lambda t, c: (c, t)}),
        (r"first result of step_fn, .*, has shape \(2, 2, 1, 5\)", {"step_fn": _squeezed_step}),
    ],
)
def test_shapes_that_do_not_fit(message, given) -> None:
    arguments = {"step_fn": _toy_step, "cache": {}, "limit_B": [3, 3], "prefix_BP": None} | given
    step_fn, cache = arguments.pop("step_fn"), arguments.pop("cache")
    with pytest.raises(UserError, match=message):
        search(BeamSearch(**IDS, beam_size=2), step_fn, cache, max_length=4, **arguments)


def test_a_cache_that_changes_its_type() -> None:
    step_fn, cache = lambda t, c: (_toy_step(t, c)[0], c.astype(float)), jnp.zeros((2, 2), int)
    with pytest.raises(TypeError, match="input and output must have identical types|equal types"):
        search(BeamSearch(**IDS, beam_size=2), step_fn, cache, limit_B=[3, 3], max_length=4)


def test_a_prefix_ends_at_padding() -> None:
    given = [
        search(
            BeamSearch(**IDS, beam_size=2),
            _toy_step,
            {},
            limit_B=[4, 4],
            max_length=4,
            prefix_BP=[[3, end], [3, 4]],
        )
        for end in (PAD, -1)
    ]
    for padded, ended in zip(*given, strict=True):
        np.testing.assert_array_equal(padded, ended)
