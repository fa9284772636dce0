"""Engine: results independent of other sentences, and no cache copies."""

from __future__ import annotations

import dataclasses
import os
import re

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks import hlo
from transformer_jax.config import DecodingConfig, ModelConfig
from transformer_jax.decoding.engine import Engine, Sentence, search_together
from transformer_jax.decoding.ensemble import Ensemble
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer, with_cast_weights

VOCAB = 40
MODEL = ModelConfig(
    vocab_size=VOCAB,
    d_model=16,
    d_ff=32,
    num_heads=2,
    num_layers=1,
    tie_embeddings="none",
    dtype="float32",
)
CONFIG = DecodingConfig(beam_size=3, max_extra_length=10, max_source_length=16, batch_size=4)
# conftest.py takes it from the tests, as it compiles slowly
USERS_CODE_GENERATOR = (
    {"xla_cpu_use_fusion_emitters": True} if "fusion_emitters" in os.environ["XLA_FLAGS"] else {}
)
SENTENCES = [
    Sentence(np.random.default_rng(i).integers(4, VOCAB, 1 + i % 11).tolist(), seed=i)
    for i in range(30)
]


def make_model(seed, config=MODEL):
    model = Transformer(config, rngs=nnx.Rngs(seed))
    model.softmax_matrix[...] = model.softmax_matrix[...] * 4  # so that hypotheses differ clearly
    return model


def as_arrays(sentences, found):
    """Sources and best hypotheses, EOS included, padded to one shape: [N, 12] and [N, 28]."""
    source_NS, target_NT = (
        np.zeros((len(sentences), 12), np.int32),
        np.zeros((len(sentences), 28), np.int32),
    )
    for n, (sentence, its) in enumerate(zip(sentences, found, strict=True)):
        source_NS[n, : len(sentence.tokens) + 1] = [*sentence.tokens, 2]
        target_NT[n, : len(its[0].tokens) + 1] = [*its[0].tokens, 2]
    return source_NS, target_NT


def tokens(found):
    return [[hypothesis.tokens for hypothesis in its] for its in found]


def num_compiled(engine):
    return [function._cache_size() for function in engine._compiled]


@pytest.fixture(scope="module")
def engine():
    return Engine(make_model(0), CONFIG)


@pytest.mark.cpu("elsewhere sums may be taken in another order")
def test_the_same_in_any_company():
    """To the last bit, whichever shapes the neighbors are encoded in and whichever blocks of the
    caches they need.
    """
    config = DecodingConfig(**{**vars(CONFIG), "batch_size": 9, "max_source_length": 80})
    engine = Engine(make_model(0), config)
    search, exact = engine._search, {"compiler_options": dict(USERS_CODE_GENERATOR)}
    engine._compiled = engine._compiled._replace(
        encode=jax.jit(search.encode, static_argnames="bucket", **exact),
        seat=jax.jit(search.seat, static_argnames="bucket", **exact),
    )
    sentences = [
        Sentence(np.random.default_rng(i).integers(4, VOCAB, 1 + 7 * i % 79).tolist(), wanted=2)
        for i in range(60)
    ]
    whole = engine.search(sentences)
    order = np.random.default_rng(0).permutation(len(sentences))
    shuffled = engine.search([sentences[i] for i in order])
    assert shuffled == [whole[i] for i in order]
    assert [engine.search([sentence])[0] for sentence in sentences[:12]] == whole[:12]


@pytest.fixture(scope="module")
def of_long_and_short():
    """A search of many lengths, and what it finds on a CPU."""
    config = dataclasses.replace(CONFIG, batch_size=8, max_source_length=80, min_length=2)
    sentences = [
        Sentence(np.random.default_rng(i).integers(4, VOCAB, 1 + 7 * i % 79).tolist())
        for i in range(20)
    ]
    return config, sentences, Engine(make_model(0), config).search(sentences)


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_what_accelerators_do_otherwise_finds_the_same(backend, of_long_and_short, monkeypatch):
    """Other blocks of the caches, another top-k: run on a CPU."""
    config, sentences, expected = of_long_and_short
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    engine = Engine(make_model(0), config)
    found = engine.search(sentences)
    assert tokens(found) == tokens(expected)
    alone = [engine.search([sentence])[0] for sentence in sentences[::5]]
    assert tokens(alone) == tokens(expected[::5])
    np.testing.assert_allclose(
        *([its[0].log_prob for its in each] for each in (found, expected)), rtol=1e-5
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_search_in_bfloat16_converts_its_weights_once(tied):
    """When it gets its parameters, embeddings excepted; the model stays what it was to the last
    bit.
    """
    shape = {
        **vars(MODEL),
        "vocab_size": 56,
        "num_layers": 2,
        "dtype": "bfloat16",
        "tie_embeddings": "all" if tied else "none",
    }
    model = Transformer(ModelConfig(**shape), rngs=nnx.Rngs(0))
    engine = Engine(model, CONFIG)
    program = engine.lowered(engine.buckets[0]).as_text()
    main = program[program.index("func.func public @main") :]
    given = set(re.findall(r"tensor<((?:\d+x)+)bf16>", main[: main.index("{\n")]))
    # softmax, attention's, feed-forward's, its bias
    weights = {"56x16x", "16x2x8x", "2x8x16x", "16x32x", "32x16x", "32x"}
    assert weights <= given
    matrix = re.compile(r"stablehlo.convert %\S+ : \(tensor<((?:\d+x)+)f32>\) -> tensor<\1bf16>")
    assert not weights & set(matrix.findall(program))

    cast = with_cast_weights(model)
    # a lookup is not rounded before it is scaled
    assert cast.target_embedding.matrix.dtype == np.float32
    source, target = (np.random.default_rng(i).integers(4, 56, (3, 7)) for i in range(2))
    np.testing.assert_array_equal(*(jax.jit(each)(source, target) for each in (model, cast)))


def test_scores_are_those_of_the_models_forward_pass():
    """Sources of all shapes: the score of each token is that of teacher forcing."""
    model = make_model(0)
    engine = Engine(model, DecodingConfig(**{**vars(CONFIG), "max_source_length": 80}))
    for length in (3, 20, 30, 60, 75):
        tokens = np.random.default_rng(length).integers(4, VOCAB, length).tolist()
        [[found]] = engine.search([Sentence(tokens)])
        target = np.array([[*found.tokens, 2]])
        log_probs_TV = np.asarray(
            jax.jit(lambda s, t: jax.nn.log_softmax(model(s, t)))(np.array([[*tokens, 2]]), target)
        )[0]
        np.testing.assert_allclose(
            found.token_log_probs, log_probs_TV[np.arange(target.size), target[0]], atol=1e-4
        )


@pytest.mark.parametrize("batch_size", [1, 7])
def test_other_batch_sizes_agree(engine, batch_size):
    other = Engine(make_model(0), DecodingConfig(**{**vars(CONFIG), "batch_size": batch_size}))
    for one, two in zip(engine.search(SENTENCES), other.search(SENTENCES), strict=True):
        assert one[0].tokens == two[0].tokens
        assert one[0].log_prob == pytest.approx(two[0].log_prob, abs=1e-4)


def test_no_compilation_in_steady_state():
    fresh = Engine(make_model(1), CONFIG)
    fresh.search(SENTENCES[:3])
    compiled = num_compiled(fresh)
    fresh.search(SENTENCES)
    fresh.search(SENTENCES[5:])
    assert num_compiled(fresh) == compiled


def test_an_ensemble_of_one_model_twice_is_that_model(engine):
    twice = Engine(Ensemble([make_model(0), make_model(0)]), CONFIG)
    for one, two in zip(engine.search(SENTENCES), twice.search(SENTENCES), strict=True):
        assert one[0].tokens == two[0].tokens
        assert one[0].log_prob == pytest.approx(two[0].log_prob, abs=1e-4)


def test_an_ensemble_averages_probabilities():
    models = [make_model(2), make_model(3, ModelConfig(**{**vars(MODEL), "num_heads": 4}))]
    found = Engine(Ensemble(models), CONFIG).search(SENTENCES)
    source_NS, target_NT = as_arrays(SENTENCES, found)
    chances = [
        jax.jit(lambda s, t, model=model: jax.nn.softmax(model(s, t)))(source_NS, target_NT)
        for model in models
    ]
    log_probs_NTV = np.log(np.mean(chances, axis=0))
    for its, target_T, log_probs_TV in zip(found, target_NT, log_probs_NTV, strict=True):
        each = its[0].token_log_probs
        np.testing.assert_allclose(
            each, log_probs_TV[np.arange(28), target_T][: len(each)], atol=1e-4
        )


def test_samples_of_a_sentence_depend_on_its_seed_alone():
    engine = Engine(
        make_model(0), DecodingConfig(**{**vars(CONFIG), "method": "sample", "beam_size": 2})
    )
    both = [sentence._replace(wanted=2) for sentence in SENTENCES]
    whole = engine.search(both)
    assert engine.search(both[::-1]) == whole[::-1]
    other_seeds = [sentence._replace(seed=99 + sentence.seed) for sentence in both]
    assert tokens(engine.search(other_seeds)) != tokens(whole)


def test_equal_sentences_have_samples_of_their_own_whatever_the_batch():
    config = dataclasses.replace(CONFIG, method="sample", beam_size=2)
    equals = [Sentence([5, 6, 7, 8, 9], seed=seed, wanted=2) for seed in range(8)]
    together = tokens(Engine(make_model(0), config).search(equals))
    assert len({str(its) for its in together}) == 8
    for batch_size in (1, 3):
        engine = Engine(make_model(0), dataclasses.replace(config, batch_size=batch_size))
        mixed = [*SENTENCES[:5], *equals[::-1]]
        assert tokens(engine.search(mixed))[:4:-1] == together
    same_seed = [sentence._replace(seed=3) for sentence in equals]
    assert tokens(engine.search(same_seed)) == [together[3]] * 8


@pytest.mark.parametrize("settings", [{}, {"method": "sample"}])
def test_logits_that_are_not_numbers_are_reported(settings, caplog):
    """Those of one sentence, whose own token has a damaged embedding."""
    sound = Engine(make_model(0), dataclasses.replace(CONFIG, **settings))
    damaged = make_model(0, dataclasses.replace(MODEL, tie_embeddings="none"))
    matrix = damaged.source_embedding.matrix
    matrix[...] = matrix[...].at[39].set(np.nan)
    engine = Engine(damaged, dataclasses.replace(CONFIG, **settings))
    without = [s for s in SENTENCES[:9] if 39 not in s.tokens]
    found = engine.search([*without, Sentence([5, 39])])
    assert found == [*sound.search(without), []]
    assert f"1 of {len(found)} sentences have no result because the model's logits" in caplog.text


@pytest.mark.parametrize("settings", [{}, {"method": "sample"}])
def test_fewer_hypotheses_are_the_first_of_more(settings):
    engine = Engine(make_model(0), dataclasses.replace(CONFIG, **settings))
    every = engine.search([sentence._replace(wanted=CONFIG.beam_size) for sentence in SENTENCES])
    assert {len(its) for its in every} == {CONFIG.beam_size}
    for wanted in (1, 2):
        some = engine.search([sentence._replace(wanted=wanted) for sentence in SENTENCES])
        assert some == [its[:wanted] for its in every]


@pytest.mark.devices(3)
@pytest.mark.parametrize("rows", [4, 20])
def test_devices_share_the_sentences(engine, rows):
    config = dataclasses.replace(CONFIG, batch_size=rows)
    each = [Engine(make_model(0), config, device=device) for device in jax.devices()[:3]]
    searched = set()
    for device, one in enumerate(each):

        def seat(*given, device=device, seat=one.seat, **limits):
            searched.add(device)
            return seat(*given, **limits)

        one.seat = seat
    assert tokens(search_together(each, SENTENCES)) == tokens(engine.search(SENTENCES))
    assert len(searched) == min(3, -(-len(SENTENCES) // rows))
    assert search_together(each, []) == []


@pytest.mark.devices(2)
def test_one_device_is_where_the_search_runs(engine):
    device = jax.devices()[1]
    there = Engine(make_model(0), CONFIG, device=device)
    assert tokens(there.search(SENTENCES)) == tokens(engine.search(SENTENCES))
    compiled = num_compiled(there)
    assert tokens(there.search(SENTENCES[:9])) == tokens(engine.search(SENTENCES[:9]))
    assert num_compiled(there) == compiled
    held = there.parameters, there.new_rows(there.buckets[0])
    assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(held))


@pytest.mark.parametrize("number", [None, 0, 1])
def test_assigned_parameters_go_where_the_work_is_done(engine, number):
    device = None if number is None else jax.devices()[number]
    other = Engine(make_model(5), CONFIG, device=device)
    other.parameters = nnx.state(make_model(0), nnx.Param)
    assert all(
        leaf.devices() == {device or jax.devices()[0]} for leaf in jax.tree.leaves(other.parameters)
    )
    assert tokens(other.search(SENTENCES[:9])) == tokens(engine.search(SENTENCES[:9]))


def test_a_source_that_is_too_long(engine):
    with pytest.raises(
        UserError,
        match="A sentence has 16 source tokens; expected at most 15 ",
    ):
        engine.search([SENTENCES[0], Sentence([5] * 16)])


@pytest.mark.parametrize(
    "sentence", [Sentence([5, 40]), Sentence([-1]), Sentence([5], prefix=np.array([40]))], ids=str
)
def test_token_ids_outside_the_vocabulary_give_no_result(engine, sentence):
    found, nothing = engine.search([SENTENCES[0], sentence])
    assert found == engine.search([SENTENCES[0]])[0] and not nothing


def test_models_of_an_ensemble_that_do_not_fit():
    with pytest.raises(
        UserError,
        match=r"vocabulary sizes are \[\(40, 40\), \(50, 50\)\]; expected one or more",
    ):
        Ensemble([make_model(0), make_model(0, ModelConfig(**{**vars(MODEL), "vocab_size": 50}))])
    with pytest.raises(UserError, match=r"vocabulary sizes are \[\]; expected one or more"):
        Ensemble([])


def _computations_of_a_step(
    every: dict[str, dict[str, hlo.Operation]], logits: set[tuple[int, ...]]
) -> set[str]:
    """Those that make logits of these shapes, but for the loops around them, and all they call."""

    def has_matmul(operation: hlo.Operation) -> bool:
        fused = [x for name in operation.calls for x in every[name].values()]
        return any(x.is_matmul for x in [operation, *fused])

    found = {
        name
        for name, inside in every.items()
        if any(map(has_matmul, inside.values()))
        and any(shape in logits for x in inside.values() for _, shape, _ in hlo.arrays(x.type))
        and all(x.kind != "while" for x in inside.values())
    }
    while new := {x for n in found for op in every[n].values() for x in op.calls} - found:
        found |= new
    return found


@pytest.mark.cpu("it reads the program that XLA makes for them")
def test_the_loop_neither_copies_caches_nor_writes_log_probabilities_of_the_vocabulary():
    batch, beam, vocab = 5, 4, 3000
    model = Transformer(
        ModelConfig(**{**vars(MODEL), "vocab_size": vocab, "num_layers": 2}), rngs=nnx.Rngs(0)
    )
    config = DecodingConfig(
        **{**vars(CONFIG), "batch_size": batch, "beam_size": beam, "max_source_length": 24}
    )
    engine = Engine(model, config)
    compiled = engine.lowered(engine.buckets[0]).compile(USERS_CODE_GENERATOR)
    memory, program = compiled.memory_analysis(), compiled.as_text()
    rows = jax.eval_shape(lambda: engine.new_rows(engine.buckets[0]))
    blocks = [x for x in jax.tree.leaves(rows.cache) if len(x.shape) == 4]
    caches = sum(x.size * 4 for x in blocks)
    # they stay where they are given, and besides the logits
    assert memory.alias_size_in_bytes >= caches
    assert memory.temp_size_in_bytes < caches + batch * beam * vocab * 4  # nothing as large is held
    every = hlo.computations(program)
    steps = _computations_of_a_step(every, {(batch * beam, vocab), (batch, beam, vocab)})
    assert steps
    blocks = {x.shape for x in blocks}
    arrays = [each for name in steps for x in every[name].values() for each in hlo.arrays(x.type)]
    assert blocks <= {shape for dtype, shape, _ in arrays if dtype == "f32"}
    assert not hlo.copied(every, steps, blocks)

    # Logits are written once, by the product that makes them, and the column of PAD in place; the
    # search reads them and writes narrower things.
    shapes = rf"(?:{batch * beam},{vocab}|{batch},{beam},{vocab})"
    wide = re.compile(rf"^  (?:ROOT )?%(\S+) = f32\[{shapes}\]\S* ([\w-]+)\(", re.M)
    loop = [
        text
        for text in re.split(r"\n(?=%|ENTRY)", program)
        if text.startswith("%") and not re.search("fused_computation|wrapped", text.split()[0])
    ]
    written = [
        name
        for text in loop
        for name, op in wide.findall(text)
        if op not in ("bitcast", "parameter", "get-tuple-element")
        and "dynamic-update-slice" not in name
    ]
    assert len(written) == 1, written
