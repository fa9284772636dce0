"""Engine: results independent of other sentences, and no cache copies."""

from __future__ import annotations

import dataclasses
import functools
import os
import re

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks import hlo
from benchmarks.compile_for import lowered_search
from transformer_jax.decoding.compiled_search import COMPILER_OPTIONS
from transformer_jax.decoding.engine import Engine, search_together
from transformer_jax.decoding.ensemble import Ensemble
from transformer_jax.decoding.search import Sentence
from transformer_jax.errors import UserError
from transformer_jax.model import matmul
from transformer_jax.model.transformer import Transformer, with_cast_weights
from transformer_jax.settings.config import DecodingConfig, ModelConfig
from transformer_jax.translation import scoring

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
SAMPLE = dataclasses.replace(CONFIG, method="sample", beam_size=2)
INT8 = dataclasses.replace(CONFIG, weights="int8")
METHODS = pytest.mark.parametrize("config", [CONFIG, SAMPLE], ids=["beam", "sample"])
# XLA's default code generator. conftest.py selects an older one, which compiles faster.
USERS_CODE_GENERATOR = (
    {"xla_cpu_use_fusion_emitters": True} if "fusion_emitters" in os.environ["XLA_FLAGS"] else {}
)
SENTENCES = [
    Sentence(np.random.default_rng(i).integers(4, VOCAB, 1 + i % 11).tolist(), seed=i)
    for i in range(30)
]


@functools.cache
def make_model(seed, config=MODEL):
    model = Transformer(config, rngs=nnx.Rngs(seed))
    model.softmax_matrix[...] = model.softmax_matrix[...] * 4  # so that hypotheses differ clearly
    return model


def check_scores(models, sentences, found):
    """Check each best hypothesis against teacher forcing: the mean of the models' probabilities."""
    lengths = [max(len(tokens) for tokens in side) + 1 for side in _sides(sentences, found)]
    source_NS, target_NT = (np.zeros((len(sentences), length), np.int32) for length in lengths)
    for array, side in zip((source_NS, target_NT), _sides(sentences, found), strict=True):
        for row, tokens in zip(array, side, strict=True):
            row[: len(tokens) + 1] = [*tokens, 2]
    chances = [
        jax.jit(lambda s, t, model=model: jax.nn.softmax(model(s, t)))(source_NS, target_NT)
        for model in models
    ]
    log_probs_NTV = np.log(np.mean(chances, axis=0))
    for its, target_T, log_probs_TV in zip(found, target_NT, log_probs_NTV, strict=True):
        each = its[0].token_log_probs
        expected = log_probs_TV[np.arange(len(target_T)), target_T]
        np.testing.assert_allclose(each, expected[: len(each)], atol=1e-4)


def _sides(sentences, found):
    return [sentence.tokens for sentence in sentences], [its[0].tokens for its in found]


def tokens(found):
    return [[hypothesis.tokens for hypothesis in its] for its in found]


def as_users_compile(engine):
    """Compile with XLA's default code generator, which decides how numbers are rounded."""
    search, backend = engine._search, jax.default_backend()
    exact = {"compiler_options": COMPILER_OPTIONS.get(backend, {}) | USERS_CODE_GENERATOR}
    engine._compiled = engine._compiled._replace(
        encode=jax.jit(search.encode, static_argnames="bucket", **exact),
        admit_and_decode=jax.jit(search.admit_and_decode, **exact),
    )
    return engine


def num_compiled(engine):
    return [function._cache_size() for function in engine._compiled]


@pytest.fixture
def with_vnni(monkeypatch):
    monkeypatch.setattr(matmul, "cpu_flags", lambda: {"avx512_vnni"})


@pytest.fixture(scope="module")
def engine():
    return Engine(make_model(0), CONFIG)


@pytest.fixture(scope="module")
def of_all_lengths():
    """Settings, sentences, engine and results for sources of three padded lengths up to 80."""
    config = dataclasses.replace(CONFIG, batch_size=9, max_source_length=80, min_length=2)
    engine = as_users_compile(Engine(make_model(0), config))
    sentences = [
        Sentence(
            np.random.default_rng(i).integers(4, VOCAB, 1 + 7 * i % 15 + 32 * (i % 3)).tolist(),
            num_hypotheses=2,
        )
        for i in range(40)
    ]
    return config, sentences, engine, engine.search(sentences)


@pytest.mark.cpu("elsewhere sums may be taken in another order")
def test_results_are_bit_identical_in_any_batch(of_all_lengths):
    """Padded lengths and positions of neighbors do not matter."""
    _, sentences, engine, whole = of_all_lengths
    order = np.random.default_rng(0).permutation(len(sentences))
    shuffled = engine.search([sentences[i] for i in order])
    assert shuffled == [whole[i] for i in order]
    assert [engine.search([sentence])[0] for sentence in sentences[:12]] == whole[:12]


def test_scores_equal_teacher_forcing(of_all_lengths):
    _, sentences, _, found = of_all_lengths
    check_scores([make_model(0)], sentences[:12], found[:12])


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_code_for_accelerators_finds_the_same(backend, of_all_lengths, monkeypatch):
    """Accelerators use other cache blocks and another top-k; both run on a CPU here."""
    config, sentences, _, expected = of_all_lengths
    sentences, expected = sentences[:20], expected[:20]
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
def test_bfloat16_weights_are_converted_once(tied):
    """The engine casts assigned parameters, except embeddings. Outputs are bit-identical."""
    changes = {"vocab_size": 56, "dtype": "bfloat16", "tie_embeddings": "all" if tied else "none"}
    model = Transformer(dataclasses.replace(MODEL, **changes), rngs=nnx.Rngs(0))
    engine = Engine(model, CONFIG)
    program = lowered_search(engine).as_text()
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


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.exhaustive), 7])
def test_batch_sizes_agree(engine, batch_size):
    other = Engine(make_model(0), dataclasses.replace(CONFIG, batch_size=batch_size))
    for one, two in zip(engine.search(SENTENCES), other.search(SENTENCES), strict=True):
        assert one[0].tokens == two[0].tokens
        assert one[0].log_prob == pytest.approx(two[0].log_prob, abs=1e-4)


def test_an_ensemble_averages_probabilities():
    """Models may differ in width, in depth and in the number of positions."""
    other = {"num_heads": 4, "d_model": 24, "num_decoder_layers": 3, "positions": "learned"}
    models = [make_model(2), make_model(3, dataclasses.replace(MODEL, **other)), make_model(4)]
    check_scores(models, SENTENCES, Engine(Ensemble(models), CONFIG).search(SENTENCES))


def test_samples_depend_only_on_the_sentence_and_its_seed():
    engine = Engine(make_model(0), SAMPLE)
    equals = [Sentence([5, 6, 7, 8, 9], seed=seed, num_hypotheses=2) for seed in range(8)]
    together = engine.search(equals)
    assert len({str(its) for its in tokens(together)}) == 8
    mixed = [*SENTENCES[:5], *equals[::-1]]
    assert engine.search(mixed)[:4:-1] == together
    one_by_one = Engine(make_model(0), dataclasses.replace(SAMPLE, batch_size=1))
    assert tokens(one_by_one.search(mixed))[:4:-1] == tokens(together)
    same_seed = [sentence._replace(seed=3) for sentence in equals]
    assert engine.search(same_seed) == [together[3]] * 8


def test_64_bit_types_change_nothing():
    expected = Engine(make_model(0), CONFIG).search(SENTENCES[:6])
    with jax.enable_x64(True):
        found = Engine(make_model(0), CONFIG).search(SENTENCES[:6])
    assert [its[0].tokens for its in found] == [its[0].tokens for its in expected]


@pytest.mark.parametrize(
    ("config", "value"),
    [
        (CONFIG, np.nan),
        (SAMPLE, np.nan),
        pytest.param(INT8, np.inf, marks=pytest.mark.cpu("int8 is for CPUs")),
    ],
    ids=["beam", "sample", "int8"],
)
def test_nan_logits_are_reported(config, value, with_vnni, caplog):
    """Only the sentence with a NaN or infinite embedding has no result."""
    corrupt = nnx.clone(make_model(0))
    matrix = corrupt.source_embedding.matrix
    matrix[...] = matrix[...].at[39].set(value)
    without = [s for s in SENTENCES[:9] if 39 not in s.tokens]
    found = Engine(corrupt, config).search([*without, Sentence([5, 39])])
    assert found == [*Engine(make_model(0), config).search(without), []]
    assert f"1 of {len(found)} sentences have no result because the model's logits" in caplog.text


@METHODS
def test_fewer_hypotheses_are_the_first_of_more(config):
    engine = Engine(make_model(0), config)
    every = engine.search(
        [sentence._replace(num_hypotheses=config.beam_size) for sentence in SENTENCES]
    )
    assert {len(its) for its in every} == {config.beam_size}
    for num_hypotheses in (1, 2):
        some = engine.search(
            [sentence._replace(num_hypotheses=num_hypotheses) for sentence in SENTENCES]
        )
        assert some == [its[:num_hypotheses] for its in every]


@pytest.mark.devices(3)
def test_devices_share_the_sentences(engine):
    each = [Engine(make_model(0), CONFIG, device=device) for device in jax.devices()[:3]]
    searched = set()
    for device, one in enumerate(each):

        def spy(*given, device=device, call=one.admit_and_decode, **limits):
            searched.add(device)
            return call(*given, **limits)

        one.admit_and_decode = spy
    for count, num_devices in ((30, 3), (8, 2), (0, 0)):
        searched.clear()
        sentences = SENTENCES[:count]
        assert tokens(search_together(each, sentences)) == tokens(engine.search(sentences))
        assert len(searched) == num_devices


@pytest.mark.devices(3)
@pytest.mark.cpu("other devices have their own memory")
@pytest.mark.parametrize("program", ["engine", "scorer"])
def test_cpu_devices_share_the_memory_of_the_weights(program, monkeypatch):
    model, devices = make_model(0), jax.devices()[:3]
    if program == "engine":
        engine = Engine(model, CONFIG, device=devices[0])
        engines = [engine, *map(engine.copy_to, devices[1:])]
        held = [(each.parameters, each._weights) for each in engines]
    else:
        monkeypatch.setattr(scoring, "check_vocabulary", lambda *_: None)
        held = scoring.Scorer(model, None, devices=devices)._parameters
    for arrays in zip(*map(jax.tree.leaves, held), strict=True):
        assert [x.devices() for x in arrays] == [{device} for device in devices]
        assert len({x.unsafe_buffer_pointer() for x in arrays}) == 1


@pytest.mark.devices(2)
@pytest.mark.parametrize("number", [None, 1])
def test_the_search_runs_on_its_device(engine, number):
    """Assigned parameters move there too, without recompilation."""
    device = None if number is None else jax.devices()[number]
    other = Engine(make_model(5), CONFIG, device=device)
    other.parameters = nnx.state(make_model(0), nnx.Param)
    held = other.parameters, other.new_rows(other.buckets[0])
    assert all(x.devices() == {device or jax.devices()[0]} for x in jax.tree.leaves(held))
    assert tokens(other.search(SENTENCES[:9])) == tokens(engine.search(SENTENCES[:9]))
    compiled = num_compiled(other)
    assert tokens(other.search(SENTENCES)) == tokens(engine.search(SENTENCES))
    assert num_compiled(other) == compiled


def test_overlong_sentences(engine):
    with pytest.raises(UserError, match="A sentence has 16 source tokens; expected at most 15 "):
        engine.search([SENTENCES[0], Sentence([5] * 16)])


@pytest.mark.parametrize(
    ("sentence", "message"),
    [
        ([5, 6], r"A sentence is \[5, 6\]; expected a Sentence, such as"),
        (Sentence("ab"), "has the tokens 'ab'; expected token ids"),
        (Sentence([5.5]), r"has the tokens \[5.5\]; expected token ids"),
        (Sentence([5], prefix=["a"]), r"has the tokens \['a'\]; expected token ids"),
    ],
)
def test_sentences_without_token_ids(engine, sentence, message):
    with pytest.raises(UserError, match=message):
        engine.search([SENTENCES[0], sentence])


@pytest.mark.parametrize(
    "sentence", [Sentence([5, 40]), Sentence([-1]), Sentence([5], prefix=np.array([40]))], ids=str
)
def test_token_ids_outside_the_vocabulary_give_no_result(engine, sentence):
    found, nothing = engine.search([SENTENCES[0], sentence])
    assert found == engine.search([SENTENCES[0]])[0] and not nothing


def test_models_of_an_ensemble_that_do_not_match():
    """They get the same token ids, so every setting that gives a token id a meaning is the same."""
    for change, message in [
        ({"vocab_size": 50}, r"are \[\(40, 40\), \(50, 50\)\]; expected one"),
        ({"source_vocab_size": 50}, r"are \[\(40, 40\), \(50, 40\)\]; expected one"),
        ({"decoder_start_id": 0}, r"decoder_start_id are \[1, 0\]; expected the"),
        ({"pad_id": 3}, r"pad_id are \[0, 3\]; expected the"),
        ({"eos_id": 3}, r"eos_id are \[2, 3\]; expected the"),
    ]:
        other = dataclasses.replace(MODEL, **change)
        with pytest.raises(UserError, match=message):
            Ensemble([make_model(0), make_model(0, other)])
    with pytest.raises(UserError, match=r"vocabulary sizes are \[\]; expected one or more"):
        Ensemble([])


def _computations_of_a_step(
    every: dict[str, dict[str, hlo.Operation]], logits: set[tuple[int, ...]]
) -> set[str]:
    """Names of the computations that make logits, except loops, and of all that they call."""

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
def test_the_loop_copies_no_cache_and_writes_logits_once():
    batch, beam, vocab = 5, 4, 3000
    model = Transformer(dataclasses.replace(MODEL, vocab_size=vocab), rngs=nnx.Rngs(0))
    sizes = {"batch_size": batch, "beam_size": beam, "max_source_length": 24}
    engine = Engine(model, dataclasses.replace(CONFIG, **sizes))
    compiled = lowered_search(engine).compile(USERS_CODE_GENERATOR)
    memory, program = compiled.memory_analysis(), compiled.as_text()
    rows = jax.eval_shape(lambda: engine.new_rows(engine.buckets[0]))
    blocks = [x for x in jax.tree.leaves(rows.cache) if len(x.shape) == 4]
    caches = sum(x.size * 4 for x in blocks)
    assert memory.alias_size_in_bytes >= caches  # updated in place
    # little except logits and their exponentials
    assert memory.temp_size_in_bytes < caches + 2 * batch * beam * vocab * 4
    every = hlo.computations(program)
    steps = _computations_of_a_step(every, {(batch * beam, vocab), (batch, beam, vocab)})
    assert steps
    blocks = {x.shape for x in blocks}
    arrays = [each for name in steps for x in every[name].values() for each in hlo.arrays(x.type)]
    assert blocks <= {shape for dtype, shape, _ in arrays if dtype == "f32"}
    assert not hlo.copied(every, steps, blocks)

    # The matmul writes the logits, and PAD's column is updated in place. The search reads them,
    # writes their exponentials, and otherwise writes only smaller arrays.
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
    assert len(written) == 2, written

    # A small model's step waits for its many small operations: docs/log/2026-11-performance.md has
    # their number for two layers. Here it has one, and blocks for fewer positions.
    loops = [x for inside in every.values() for x in inside.values() if x.kind == "while"]
    [step] = [x.calls[-1] for x in loops if x.calls[-1] in steps]
    operations = [x.name for x in every[step].values() if not hlo.is_free(x)]
    assert len(operations) <= 130, sorted(operations)


@pytest.mark.exhaustive
@pytest.mark.cpu("elsewhere sums may be taken in another order, and int8 is not supported")
@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_other_precisions_do_not_depend_on_the_batch(precision, with_vnni):
    """Each row's matmuls and its rounded inputs are its own."""
    dtype, weights = ("float32", "int8") if precision == "int8" else (precision, "auto")
    model = make_model(0, dataclasses.replace(MODEL, dtype=dtype))
    sentences = [
        Sentence(np.random.default_rng(i).integers(4, VOCAB, 1 + i % 9).tolist()) for i in range(24)
    ]
    engine = Engine(model, dataclasses.replace(CONFIG, batch_size=8, weights=weights))
    whole = engine.search(sentences)
    order = np.random.default_rng(0).permutation(len(sentences))
    assert engine.search([sentences[i] for i in order]) == [whole[i] for i in order]
    assert [engine.search([sentence])[0] for sentence in sentences[:4]] == whole[:4]


@pytest.mark.cpu("elsewhere sums may be taken in another order, and int8 is not supported")
@pytest.mark.parametrize(
    ("precision", "beam_size", "batch_sizes"),
    [
        ("bfloat16", 4, (40, 3)),
        ("int8", 1, (40, 1)),
        *(
            pytest.param(precision, beam_size, (40, 1, 3), marks=pytest.mark.exhaustive)
            for precision in ("float32", "bfloat16", "int8")
            for beam_size in (4, 1)
        ),
    ],
)
def test_the_batch_size_does_not_change_a_bit(precision, beam_size, batch_sizes, with_vnni):
    """The model is large enough for XLA to choose its operations by the number of rows."""
    dtype, weights = ("float32", "int8") if precision == "int8" else (precision, "auto")
    large = {"vocab_size": 2000, "d_model": 64, "d_ff": 128, "num_heads": 4}
    model = make_model(0, dataclasses.replace(MODEL, dtype=dtype, **large))
    config = dataclasses.replace(CONFIG, beam_size=beam_size, weights=weights, max_extra_length=3)
    sentences = [
        Sentence(np.random.default_rng(i).integers(4, 2000, 1 + i % 9).tolist()) for i in range(40)
    ]
    sizes = [dataclasses.replace(config, batch_size=size) for size in batch_sizes]
    first, *others = [as_users_compile(Engine(model, each)).search(sentences) for each in sizes]
    for found in others:
        assert found == first


@pytest.mark.cpu("int8 is for CPUs")
def test_a_search_with_int8_weights(with_vnni):
    """Every matrix is an int8 array in the loop, and scores are close to the float32 model's."""
    models = [make_model(0), make_model(3)]
    engine = Engine(Ensemble(models), INT8)
    weights = jax.tree.leaves(engine._weights)
    matrices = {x.shape for x in jax.tree.leaves(engine.parameters) if x.ndim > 1}
    embeddings = {(VOCAB, 16)}
    assert matrices - embeddings == {x.shape for x in weights if x.dtype == np.int8} - embeddings
    assert sum(x.dtype == np.int8 for x in weights) == 2 * (1 + 3 * 4 + 2 * 2)
    found = engine.search(SENTENCES)
    exact = Engine(Ensemble(models), CONFIG).search(SENTENCES)
    same = [
        a[0].log_prob - b[0].log_prob for a, b in zip(found, exact) if tokens([a]) == tokens([b])
    ]
    assert len(same) > 20 and 0 < np.abs(same).mean() < 0.1


@pytest.mark.cpu("it is refused for another reason elsewhere")
def test_int8_needs_vnni(monkeypatch):
    monkeypatch.setattr(matmul, "cpu_flags", lambda: {"avx512f", "avx_vnni"})
    with pytest.raises(UserError, match="'int8', which needs a CPU with AVX-512 VNNI"):
        Engine(make_model(0), INT8)
