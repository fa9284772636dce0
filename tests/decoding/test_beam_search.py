"""Beam search on toy chains, compared with brute force, a reference and other batch contents."""

from __future__ import annotations

from functools import partial

import chains
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import BOS, EOS, IDS, PAD, assert_same
from reference_search import Rules, every_hypothesis, reference_search
from reference_search import chain as as_model

from transformer_jax.decoding import beam_search
from transformer_jax.decoding.beam_search import BeamSearch
from transformer_jax.decoding.logits import argmax, log_sum_exp, top_k
from transformer_jax.decoding.ranking import length_penalty
from transformer_jax.decoding.search import (
    NextToken,
    gather_beams,
    results,
    search,
    take_step,
)
from transformer_jax.errors import UserError


def random_logits(
    seed: int, *, sentences: int = 100, length: int = 9, vocab: int = 11, possible: int = 99
) -> np.ndarray:
    """logits_BLVV of the next token given the position and the previous token. Only the first
    ``possible`` tokens occur. One shape by default, because each shape is compiled.
    """
    shape = sentences, length, vocab, vocab
    logits = np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 1.5
    logits[..., possible:] = -np.inf
    return logits


@partial(jax.jit, static_argnames=("beam_size", "length_penalty", "patience"))
def _search(logits_BLVV, limit_B, *, beam_size=3, length_penalty=0.6, patience=None):
    batch, length = logits_BLVV.shape[:2]

    def step(tokens_BW, position_BW):
        rows_B1 = jnp.arange(batch)[:, None]
        return logits_BLVV[rows_B1, position_BW, tokens_BW], position_BW + 1

    method = BeamSearch(
        **IDS, beam_size=beam_size, length_penalty=length_penalty, patience=patience
    )
    cache = jnp.zeros((batch, beam_size), jnp.int32)
    return search(method, step, cache, limit_B=limit_B, max_length=length)


def found_in(logits, limits=None, **settings):
    """(tokens, score, log-probability) of every hypothesis of every sentence."""
    limits = np.full(len(logits), logits.shape[1]) if limits is None else np.asarray(limits)
    found = chains.hypotheses(_search(logits, limits, **settings))
    for its, limit in zip(found, limits, strict=True):
        assert all(len(tokens) <= limit for tokens, _, _ in its)
    return found


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    with np.errstate(divide="ignore"):
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize(
    ("possible", "length", "beam_size", "alpha"),
    [(4, 5, 40, 2.0), (5, 4, 48, 0.6), (7, 3, 40, 0.0), (40, 2, 40, 1.0)],
)
def test_a_wide_beam_equals_brute_force(possible, length, beam_size, alpha):
    rules = Rules(max_length=length, length_penalty=alpha)
    for vocab in (beam_size, possible):  # the beam may be wider than the vocabulary
        logits = random_logits(possible, sentences=6, length=length, vocab=vocab, possible=possible)
        found = found_in(logits, beam_size=beam_size, length_penalty=alpha)
        for chain, its in zip(logits, found, strict=True):
            assert_same(its, every_hypothesis(as_model(log_softmax(chain)), rules)[:beam_size])


@pytest.mark.parametrize(("beam_size", "alpha"), [(1, 0.6), (2, 1.5), (3, 0.6), (3, 4.0), (8, 0.0)])
def test_equals_the_reference_search(beam_size, alpha):
    """Maximum lengths vary between sentences; 0 allows no hypothesis. A beam of 1 is greedy. With a
    large penalty, hypotheses are overtaken by longer ones of lower probability.
    """
    logits, limits = random_logits(beam_size), np.arange(100) % 10
    found = found_in(logits, limits, beam_size=beam_size, length_penalty=alpha)
    for chain, limit, its in zip(logits, limits.tolist(), found, strict=True):
        rules = Rules(max_length=limit, length_penalty=alpha)
        expected = reference_search(as_model(log_softmax(chain)), rules, beam_size=beam_size)
        assert_same(its, expected)


@partial(jax.jit, static_argnames=("beam_size", "length_penalty", "patience"))
def _search_wanted(logits_BLVV, limit_B, num_hypotheses_B, *, beam_size, length_penalty, patience):
    """The result, and the number of steps of each sentence."""
    batch, length = logits_BLVV.shape[:2]

    def step(tokens_BW, position_BW):
        rows_B1, last = jnp.arange(batch)[:, None], length - 1
        at_BW = jnp.minimum(position_BW, last)
        return logits_BLVV[rows_B1, at_BW, tokens_BW], position_BW + 1

    def advance(carry):
        state, cache, steps_B = carry
        steps_B += ~state.done_B
        return *take_step(method, step, state, cache, reorder=gather_beams), steps_B

    method = BeamSearch(
        **IDS, beam_size=beam_size, length_penalty=length_penalty, patience=patience
    )
    state = method.start(
        limit_B,
        max_length=length,
        prefix_BP=jnp.zeros((batch, 0), jnp.int32),
        seed_B=jnp.arange(batch),
        num_hypotheses_B=num_hypotheses_B,
    )
    carry = state, jnp.zeros((batch, beam_size), jnp.int32), jnp.zeros(batch, jnp.int32)
    state, _, steps_B = jax.lax.while_loop(lambda c: ~c[0].done_B.all(), advance, carry)
    return results(state.finished, PAD), steps_B


# A beam of 3 with patience 0.5 stops at 2 hypotheses: 1.5 rounds up, as in CTranslate2. With 0.8,
# it stops at 2, too: 2.4 rounds down.
@pytest.mark.parametrize(
    "patience",
    [0.5, 0.8, 1, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in (0.2, 1.5, 2.0, 1e38))],
)
@pytest.mark.parametrize(
    ("beam_size", "alpha"),
    [
        *((1, 0.6), (3, 0.6), (4, 4.0)),
        *(pytest.param(*x, marks=pytest.mark.exhaustive) for x in ((2, 1.5), (8, 0.0))),
    ],
)
def test_patience_equals_the_reference_search(beam_size, alpha, patience):
    """The ``num_hypotheses_B`` best equal those of a search that only counts. The exact rule can
    end our search earlier, so patience never adds a step.
    """
    logits, limits = random_logits(beam_size), np.arange(100) % 10
    logits[::7, ..., 5:] = -np.inf  # fewer possible continuations than candidates
    wanted = np.arange(100) // 10 % beam_size + 1
    sizes = {"beam_size": beam_size, "length_penalty": alpha}
    result, steps_B = _search_wanted(logits, limits, wanted, patience=patience, **sizes)
    exact, exact_steps_B = _search_wanted(logits, limits, wanted, patience=None, **sizes)
    found, found_exactly = chains.hypotheses(result), chains.hypotheses(exact)
    settings = {"beam_size": beam_size, "patience": patience}
    for i, (chain, limit, number) in enumerate(zip(logits, limits.tolist(), wanted, strict=True)):
        rules, model = Rules(max_length=limit, length_penalty=alpha), as_model(log_softmax(chain))
        expected = reference_search(model, rules, num_hypotheses=number, **settings)
        assert_same(found[i][:number], expected)
    assert (steps_B <= exact_steps_B).all()
    if beam_size == 1 or patience == 1e38:
        assert found == found_exactly and (steps_B == exact_steps_B).all()
    elif patience <= 1:
        assert steps_B.sum() < exact_steps_B.sum()
        if alpha > 2:
            assert [its[0] for its in found if its] != [its[0] for its in found_exactly if its]


def test_patience_counts_hypotheses_that_are_no_longer_kept():
    """One hypothesis ends at each step, so a beam of 3 with patience 2 stops after six steps. By
    then it has dropped the three oldest, as the length penalty makes longer ones better.
    """
    logits = np.full((1, 9, 11, 11), -np.inf, np.float32)
    logits[..., EOS] = 0
    logits[..., 4] = 2
    every = {"beam_size": 3, "length_penalty": 4.0, "patience": 2.0}
    result, steps_B = _search_wanted(logits, np.array([9]), np.array([3]), **every)
    assert steps_B.tolist() == [6]
    [its] = chains.hypotheses(result)
    assert sorted(len(tokens) for tokens, _, _ in its) == [4, 5, 6]


def test_patience_does_not_count_impossible_ends():
    """Token 3 is the only possible one at first, so candidates with EOS are impossible."""
    log_probs_VV = _log_chances({(BOS, 3): 1, (3, 4): 0.5, (3, EOS): 0.1, (4, 4): 1})
    logits = np.full((1, 9, 11, 11), -np.inf, np.float32)
    logits[0, :, :5, :5] = log_probs_VV
    found, _ = _search_wanted(
        *(logits, np.array([9]), np.array([1])), beam_size=4, length_penalty=0.6, patience=0.25
    )
    assert [tokens for tokens, _, _ in chains.hypotheses(found)[0]] == [(3, EOS)]


@pytest.mark.parametrize("patience", [None, 1.0])
def test_results_do_not_depend_on_neighbors(patience):
    logits, limits = random_logits(3), np.arange(100) % 9 + 1
    together = found_in(logits, limits, patience=patience)
    order = np.random.default_rng(0).permutation(100)
    found = found_in(logits[order], limits[order], patience=patience)
    assert found == [together[i] for i in order]
    for i in range(12):
        alone = found_in(logits[i : i + 1], limits[i : i + 1], patience=patience)
        assert alone == [together[i]]


def test_limits_above_the_maximum_length_are_the_maximum_length():
    logits, excess = random_logits(4), np.arange(100) % 10
    expected = _search(logits, np.full(100, 9))
    jax.tree.map(np.testing.assert_array_equal, _search(logits, 9 + excess), expected)


def test_ties_go_to_the_hypothesis_that_finished_first():
    logits = np.full((1, 9, 11, 11), -np.inf, np.float32)
    logits[0, 0, BOS, [EOS, 3]] = logits[0, 1, 3, EOS] = 0
    [its] = found_in(logits, length_penalty=0.0)
    assert [tokens for tokens, _, _ in its] == [(EOS,), (3, EOS)]


def test_ties_go_to_the_better_beam_then_the_lower_token():
    logits = np.zeros((100, 9, 11, 11), np.float32)
    logits[..., EOS] = -1
    found = found_in(logits, [4] * 100)
    assert found == [found[0]] * 100
    assert [tokens for tokens, _, _ in found[0]] == [(1, 1, 1, EOS), (1, 1, 3, EOS), (1, 1, 4, EOS)]


def test_nan_and_infinite_logits_give_a_nan_score_and_leave_the_neighbors_alone():
    logits, limits = random_logits(9), np.full(100, 9)
    expected = jax.device_get(_search(logits, limits))
    logits[1, 2], logits[4, 2] = np.nan, np.inf
    result = jax.device_get(_search(logits, limits))
    for row in (1, 4):
        assert np.isnan(result.scores_BN[row]).all() and np.isnan(result.log_probs_BN[row]).all()
        assert (result.lengths_BN[row] == 0).all() and (result.tokens_BNL[row] == PAD).all()
    for found, before in zip(result, expected, strict=True):
        np.testing.assert_array_equal(*(np.delete(x, (1, 4), axis=0) for x in (found, before)))


def test_nan_logits_of_no_live_hypothesis_are_ignored():
    """The NaN logits follow a token of probability 0."""
    logits = random_logits(10)
    logits[:, :, :, 5] = -np.inf
    expected = found_in(logits)
    logits[:, :, 5] = np.nan
    assert found_in(logits) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beam_size": 0}, "beam_size is 0"),
        ({"length_penalty": -1.0}, "length_penalty is -1.0"),
        ({"patience": 0.0}, "patience is 0.0; expected a positive number or None"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
    ],
)
def test_settings_out_of_range(arguments, message):
    with pytest.raises(UserError, match=message):
        found_in(random_logits(0), **arguments)


def test_token_ids_out_of_range():
    for name, token in [("bos_id", -1), ("eos_id", -1), ("pad_id", -1), ("eos_id", 5)]:
        with pytest.raises(UserError, match=rf"{name} is {token}; expected a"):
            search(
                BeamSearch(**{**IDS, name: token}, beam_size=2),
                lambda tokens_BW, cache: (jnp.zeros((1, 2, 5)), cache),
                (),
                limit_B=jnp.array([4]),
                max_length=4,
            )


@pytest.mark.parametrize(
    ("backend", "width", "k"),
    [
        *(("cpu", *sizes) for sizes in ((5, 3), (127, 4), (1024, 4), (3001, 8), (3001, 1))),
        *(("gpu", *sizes) for sizes in ((127, 4), (1024, 4), (3001, 8), (4096, 16))),
        ("tpu", 3001, 8),
    ],
)
def test_top_k_equals_lax(backend, width, k, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    ours = jax.jit(lambda x: top_k(x, k))
    for values in (5, 300, 1000, 1_000_000):  # ties within chunks and between chunks
        x = np.random.default_rng(width).integers(values, size=(6, width)).astype(np.float32)
        x[0] = 0
        x[1, : width // 2] = -np.inf
        for found, expected in zip(ours(x), jax.lax.top_k(x, k), strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("values", [3, 1_000_000])  # with and without ties
def test_chunks_of_a_sentence_hold_the_best_of_each_beam(values, monkeypatch):
    """On a CPU, beam search with a large vocabulary looks at the best chunks of a sentence; here it
    finds what it finds with the best tokens of each beam. Some tokens are impossible or forced.
    """
    vocab = 1100
    logits_LSV = np.random.default_rng(0).integers(values, size=(5, 3, vocab)).astype(np.float32)
    logits_LSV *= 4 / values
    logits_LSV[:, 0, 100:] = -np.inf
    prefix_BP = np.array([[-1, -1], [1000, -1], [7, 1099], [-1, -1]])

    def step(tokens_BW, positions_BW):
        return jnp.asarray(logits_LSV)[positions_BW, tokens_BW % 3], positions_BW + 1

    def search_all() -> object:
        method = BeamSearch(**IDS, beam_size=2)
        cache = jnp.zeros((4, 2), jnp.int32)
        limits = jnp.array([5, 5, 5, 3])
        run = jax.jit(
            lambda p: search(method, step, cache, limit_B=limits, max_length=5, prefix_BP=p)
        )
        return jax.device_get(run(prefix_BP))

    results_of_both = []
    for is_cpu in (True, False):
        monkeypatch.setattr(beam_search, "has_chunks", lambda *_, is_cpu=is_cpu: is_cpu)
        results_of_both.append(search_all())
    for by_sentence, by_beam in zip(*results_of_both, strict=True):
        np.testing.assert_array_equal(by_sentence, by_beam)


@pytest.mark.parametrize("width", [5, 255, 256, 1024, 3001])
def test_argmax_is_the_first_of_the_largest(width) -> None:
    for values in (2, 300, 1_000_000):  # ties within chunks and between chunks
        x = np.random.default_rng(width).integers(values, size=(6, width)).astype(np.float32)
        x[0] = 0
        x[1, : width // 2] = -np.inf
        x[2] = -np.inf
        np.testing.assert_array_equal(jax.jit(argmax)(x), x.argmax(axis=1))


def test_greedy_search_reorders_nothing() -> None:
    """Each hypothesis continues itself. The results are those of the reference search, above."""
    method = BeamSearch(**IDS, beam_size=1)
    state = method.start(jnp.array([4, 4]), prefix_BP=jnp.full((2, 4), -1), seed_B=jnp.zeros(2))
    scores = NextToken(
        jnp.array([[0.0, 0, 0, 3, 1], [0.0, 0, 0, 1, 3]]), jnp.ones((2, 1)), jnp.full(2, -1)
    )
    state, parents = method.advance(state, scores)
    assert parents is None
    assert state.live.tokens_BWL[:, 0, 0].tolist() == [3, 4]


def test_length_penalty_equals_the_papers() -> None:
    found = length_penalty(jnp.array([1, 7, 25]), 0.6)
    np.testing.assert_allclose(found, [1.0, 2**0.6, 5**0.6], rtol=1e-6)


def _log_chances(chances: dict[tuple[int, int], float]) -> np.ndarray:
    """log_probs_VV of five tokens from the possible (previous token, token)."""
    log_probs_VV = np.full((5, 5), -np.inf, np.float32)
    for pair, chance in chances.items():
        log_probs_VV[pair] = np.log(chance)
    return log_probs_VV


@partial(jax.jit, static_argnames="unscored_prefix_length")
def _search_with_prefixes(log_probs_VV, limit_B, prefix_BP, unscored_prefix_length=0):
    method = BeamSearch(**IDS, beam_size=2, unscored_prefix_length=unscored_prefix_length)
    step = lambda tokens_BW, cache: (log_probs_VV[tokens_BW], cache)  # noqa: E731
    return search(method, step, (), limit_B=limit_B, max_length=6, prefix_BP=prefix_BP)


@pytest.mark.parametrize(
    ("unscored_prefix_length", "free"), [(0, 1.0), (1, 0.1), (2, 0.02), (3, 0.02)]
)
def test_an_unscored_prefix_has_log_probability_0(unscored_prefix_length, free):
    """Tokens after a shorter prefix count. Impossible tokens stay impossible."""
    chances = {(BOS, 3): 0.1, (BOS, 4): 0.9, (3, 4): 0.2, (3, EOS): 0.8, (4, EOS): 1.0}
    log_probs_VV, prefixes = _log_chances(chances), np.array([[3, 4], [3, -1], [-1, -1], [4, 4]])
    *found, impossible = chains.hypotheses(
        _search_with_prefixes(log_probs_VV, np.full(4, 6), prefixes, unscored_prefix_length)
    )
    assert impossible == []
    best = [its[0] for its in found]
    assert [tokens for tokens, _, _ in best] == [(3, 4, EOS), (3, EOS), (4, EOS)]
    expected = [0.02 / free, 0.08 / max(free, 0.1), 0.9]
    np.testing.assert_allclose([log_prob for *_, log_prob in best], np.log(expected), rtol=1e-5)
    for tokens, score, log_prob in best:
        assert score == pytest.approx(log_prob / float(length_penalty(len(tokens), 0.6)), rel=1e-5)


@pytest.mark.parametrize(
    ("chances", "limit", "best", "best_after_3"),
    [
        # Nothing may follow token 3, as under a grammar, not even where EOS is forced.
        ({(BOS, 3): 0.5, (BOS, 4): 0.5, (4, EOS): 1}, 2, [(4, EOS)], []),
        ({(BOS, 3): 0.5, (BOS, 4): 0.5, (4, EOS): 1}, 4, [(4, EOS)], []),
        # Only EOS may follow token 4, and EOS or 3 may follow token 3.
        (
            {(BOS, 3): 0.9, (BOS, 4): 0.1, (3, EOS): 0.5, (3, 3): 0.5, (4, EOS): 1},
            6,
            [(3, EOS), (3, 3, EOS)],
            [(3, EOS), (3, 3, EOS)],
        ),
    ],
)
def test_tokens_and_rows_of_probability_zero_never_win(chances, limit, best, best_after_3):
    log_probs_VV, limits = _log_chances(chances), np.full(2, limit)
    results = [
        jax.device_get(_search_with_prefixes(log_probs_VV, limits, np.array([[end] * 2, [3, end]])))
        for end in (PAD, -1)
    ]
    for padded, ended in zip(*results, strict=True):  # PAD ends a prefix, as -1 does
        np.testing.assert_array_equal(padded, ended)
    expected = [
        reference_search(
            lambda tokens: log_probs_VV[tokens[-1] if tokens else BOS],
            Rules(limit, prefix=prefix),
            beam_size=2,
        )
        for prefix in ((), (3,))
    ]
    assert [[h.tokens for h in its] for its in expected] == [best, best_after_3]
    for its, wanted in zip(chains.hypotheses(results[0]), expected, strict=True):
        assert_same(its, wanted)


def _toy_step(tokens_BW, cache):
    return jnp.zeros((*tokens_BW.shape, 5)), cache


def _squeezed_step(tokens_BW, cache):
    return jnp.zeros((*tokens_BW.shape, 1, 5)), cache


@pytest.mark.parametrize(
    ("message", "given"),
    [
        (r"limit_B has shape \(\); expected one axis: the maximum length", {"limit_B": 5}),
        (r"limit_B is float32; expected integers", {"limit_B": [3.0, 3.0]}),
        (r"seed_B has shape \(3,\); expected 1 axes .* \(2,\)", {"seed_B": [1, 2, 3]}),
        (r"max_length is 0; expected a positive number", {"max_length": 0}),
        (r"prefix_BP has shape \(3, 1\); expected 2 axes .* \(2,\)", {"prefix_BP": [[3]] * 3}),
        (r"array of the cache has shape \(\); expected any number", {"cache": {"step": 0}}),
        (r"array of the cache has shape \(2, 4\); expected", {"cache": jnp.zeros((2, 4))}),
        (r"first result of step_fn, .*, has shape \(\)", {"step_fn": lambda t, c: (c, t)}),
        (r"first result of step_fn, .*, has shape \(2, 2, 1, 5\)", {"step_fn": _squeezed_step}),
        (r"step_fn returns .*; expected a tuple", {"step_fn": lambda t, c: _toy_step(t, c)[0]}),
        (
            r"returns the cache float32\[2, 2\]; expected .* argument, int32\[2, 2\]",
            {
                "step_fn": lambda t, c: (_toy_step(t, c)[0], c.astype(float)),
                "cache": jnp.zeros((2, 2), int),
            },
        ),
    ],
)
def test_shapes_that_do_not_match(message, given) -> None:
    arguments = {"step_fn": _toy_step, "cache": {}, "limit_B": [3, 3], "max_length": 4} | given
    with pytest.raises(UserError, match=message):
        search(BeamSearch(**IDS, beam_size=2), **arguments)


def test_logits_of_numpy() -> None:
    """A model outside JAX, here constant logits, gives the same results."""
    logits_BWV = np.random.default_rng(0).normal(size=(2, 2, 5)).astype(np.float32)
    results = [
        search(
            BeamSearch(**IDS, beam_size=2),
            lambda tokens_BW, cache, logits_BWV=logits_BWV: (logits_BWV, cache),
            {},
            limit_B=[3, 3],
            max_length=4,
        )
        for logits_BWV in (logits_BWV, jnp.asarray(logits_BWV))
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_a_search_under_vmap() -> None:
    """A batch of models gives the results of each model."""
    logits_MVV = jax.random.normal(jax.random.key(0), (3, 9, 9))
    method = BeamSearch(**IDS, beam_size=3)

    def search_one(logits_VV):
        step_fn = lambda tokens_BW, cache: (logits_VV[tokens_BW], cache)  # noqa: E731
        return search(method, step_fn, {}, limit_B=jnp.array([8, 5]), max_length=8)

    together = jax.jit(jax.vmap(search_one))(logits_MVV)
    search_alone = jax.jit(search_one)
    one_by_one = [search_alone(logits_VV) for logits_VV in logits_MVV]
    expected = jax.tree.map(lambda *arrays: np.stack(arrays), *one_by_one)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), together, expected)


@pytest.mark.parametrize("width", [1, 100, 128, 3000])
def test_log_sum_exp(width):
    """Rows with infinite values and NaN, too."""
    x = np.random.default_rng(0).normal(0, 30, (9, width)).astype(np.float32)
    x[1:5, 0] = [-np.inf, np.inf, np.nan, 3e38]
    x[5] = -np.inf
    x[6, -1] = np.nan
    found = np.asarray(jax.jit(log_sum_exp)(x))[:, 0]
    np.testing.assert_allclose(found, jax.nn.logsumexp(x, axis=-1), rtol=1e-6)
