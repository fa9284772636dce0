"""Translator on a tiny random model: order, lengths, independence, agreement with the model."""

from __future__ import annotations

import dataclasses
import logging
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_models import WORDS, lines_of_words, make_model
from reference_search import Rules, reference_search

from transformer_jax.decoding.ensemble import Ensemble
from transformer_jax.decoding.length_buckets import Bucket, make_buckets
from transformer_jax.decoding.search import Hypothesis
from transformer_jax.devices.sharding import make_mesh
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.settings.config import DecodingConfig, MeshConfig, ModelConfig
from transformer_jax.tokenization.special_ids import EOS_ID, PAD_ID
from transformer_jax.translation import loading
from transformer_jax.translation.plan import Part
from transformer_jax.translation.requests import Request
from transformer_jax.translation.scoring import Scorer
from transformer_jax.translation.segments import Segment
from transformer_jax.translation.sentences import space_after
from transformer_jax.translation.translator import Translator

LINES = lines_of_words(23)
CONFIG = DecodingConfig(beam_size=3, max_extra_length=6, max_source_length=24, batch_size=4)


@pytest.fixture(scope="module")
def translator(model, tokenizer):
    return Translator(model, tokenizer, CONFIG)


@nnx.jit
def forward(model, source_BS, target_BT):
    return jax.nn.log_softmax(model(source_BS, target_BT))


@pytest.mark.parametrize(
    "settings",
    [
        {"norm": "pre", "norm_type": "rms", "positions": "learned", "max_positions": 32},
        pytest.param({"final_norm": True, "activation": "swiglu"}, marks=pytest.mark.exhaustive),
    ],
)
def test_equals_the_reference_search_with_the_forward_pass(tokenizer, settings):
    model = make_model(tokenizer, **settings)
    lines = LINES[:6]
    found = Translator(model, tokenizer, CONFIG).stream(lines)
    for line, [translation] in zip(lines, found, strict=True):
        source = [*tokenizer.source.encode([line])[0], EOS_ID]
        source_1S = np.array([source + [PAD_ID] * (24 - len(source))])

        def log_probs(tokens, source_1S=source_1S):
            # The prediction after ``tokens`` does not see EOS.
            target_1T = np.array([[*tokens, EOS_ID] + [PAD_ID] * (31 - len(tokens))])
            return np.asarray(forward(model, source_1S, target_1T))[0, len(tokens)]

        [best, *_] = reference_search(
            log_probs, Rules(len(source) + CONFIG.max_extra_length), beam_size=3
        )
        assert translation.score == pytest.approx(best.score, abs=1e-4)
        assert translation.text == tokenizer.target.decode(best.tokens)
        assert translation.length == len(best.tokens)


def test_one_line_out_for_each_line_in(translator):
    lines = ["", *LINES, "   ", "\t", LINES[3], ""]
    found = translator.translate(lines)
    assert len(found) == len(lines)
    assert [i for i, text in enumerate(found) if not text] == [0, 24, 25, 27]
    assert found[26] == found[4]
    assert len(set(found)) > 5  # so that these tests can fail


def test_a_line_does_not_depend_on_the_others(translator):
    together = list(translator.stream(LINES))
    order = np.random.default_rng(0).permutation(len(LINES))
    assert list(translator.stream([LINES[i] for i in order])) == [together[i] for i in order]
    assert [next(translator.stream([line])) for line in LINES] == together
    assert list(translator.stream(LINES, window=5)) == together


def test_nothing_is_compiled_twice(model, tokenizer, caplog):
    # Settings of no other test: engines with the same settings share compiled functions.
    config = dataclasses.replace(CONFIG, length_penalty=0.61)
    translator = Translator(model, tokenizer, config)
    assert translator.engines[0].buckets == (Bucket((16, 24), CONFIG.batch_size),)
    with caplog.at_level(logging.INFO, "transformer_jax"):
        first = translator.translate(LINES)
        translator.parameters = jax.tree.map(lambda x: -x, translator.parameters)
        assert translator.translate(LINES) != first
    assert sum("Compiling" in message for message in caplog.messages) == 1


def test_the_size_of_the_cache_is_reported_before_it_is_allocated(model, tokenizer, caplog):
    settings = {"beam_size": 512, "batch_size": 65_536, "max_extra_length": 65_536}
    [engine] = Translator(model, tokenizer, DecodingConfig(**settings)).engines
    with caplog.at_level(logging.INFO, "transformer_jax"):
        jax.eval_shape(lambda: engine.new_rows(engine.buckets[0]))
    found = re.search("65536 sentences .* .KV cache: (.*) GB.", caplog.text)
    assert float(found[1]) > 65_536 * 512 * 65_536 * 2 * 4 / 1e9  # a key and a value of 1 float


def test_a_stream_reads_one_window_ahead(translator):
    read = []

    def lines():
        for line in LINES:
            read.append(line)
            yield line

    stream = translator.stream(lines(), window=2)
    next(stream)
    assert len(read) == 2


def test_n_best(translator):
    best = list(translator.stream(LINES))
    for [first], several in zip(best, translator.stream([*LINES], num_hypotheses=3), strict=True):
        scores = [translation.score for translation in several]
        assert len(several) == 3 and scores == sorted(scores, reverse=True)
        assert first.text == several[0].text
        for t in several:
            assert t.score == pytest.approx(t.log_prob / ((5 + t.length) / 6) ** 0.6, rel=1e-5)


def test_at_least_one_translation(translator):
    best = list(translator.stream(["one two"]))
    for num_hypotheses in (0, -1):
        assert list(translator.stream(["one two"], num_hypotheses=num_hypotheses)) == best


@pytest.mark.parametrize("line", ["one two", Request("one two")])
def test_a_single_line_is_an_error(translator, line):
    for call in (translator.translate, translator.stream):
        with pytest.raises(UserError, match="expected an iterable of lines, such as a list"):
            call(line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (7, "Line 2 is 7; expected text"),
        (None, "Line 2 is None; expected text"),
        (b"one", "Line 2 is b'one'; expected text"),
        ("one \ud800", "Line 2 is not valid Unicode; expected no lone surrogates"),
        (Request("one", prefix="\ud800"), "Line 2: prefix is not valid Unicode"),
        (Request("one", prefix=7, line_number=5), "Line 5: prefix is 7; expected text"),
    ],
)
def test_invalid_lines(translator, line, message):
    with pytest.raises(UserError, match=message):
        translator.translate(["one", line])


@pytest.mark.parametrize("text", ["", " \t"])
def test_the_prefix_of_a_blank_line_is_ignored(translator, text):
    requests = [Request(text, prefix=prefix) for prefix in ("€", "ONE " * 9999)]
    assert translator.translate(requests) == ["", ""]


def test_messages_shorten_long_values(translator):
    for call in (
        lambda: translator.translate("one " * 9999),
        lambda: translator.translate(b"one " * 9999),
        lambda: translator.translate([Request("one", prefix="ONE " * 9999)]),
        lambda: translator.translate([["one"] * 9999]),
    ):
        with pytest.raises(UserError) as error:
            call()
        assert len(str(error.value)) < 400


def test_a_long_line_is_translated_in_segments(translator, caplog):
    line = " ".join(WORDS) * 30 + ". " + " ".join(WORDS) + ". " + "x" * 100
    with caplog.at_level(logging.WARNING):
        short, long = translator.translate([LINES[0], line])
    assert short == translator.translate([LINES[0]])[0]
    assert len(long.split()) > 30
    [message] = caplog.messages
    assert message.startswith("Line 2 has ") and "the maximum is 23, so it is translated" in message
    [several] = translator.stream([Request(line, line_number=2**40)], num_hypotheses=3)
    assert several[0].text == long
    scores = [t.score for t in several]
    assert len(several) == 3 and scores == sorted(scores, reverse=True)


def test_each_line_and_each_segment_draws_its_own_samples(translator):
    text = " ".join(WORDS) * 30
    requests = [Request(text, prefix=WORDS[0].upper(), line_number=number) for number in (1, 2, 2)]
    first, second, again = (translator.plan(request).sentences for request in requests)
    seeds = [sentence.seed for sentence in first + second]
    assert len(set(seeds)) == len(seeds) > 8
    assert second == again
    # Only the first segment begins with the prefix.
    assert first[0].prefix and not any(sentence.prefix for sentence in first[1:])


def test_segments_are_joined_with_spaces_unless_the_script_has_none():
    texts = ("好。", "", "是", "Ja.", "Nein.")
    found = [[Hypothesis([i], -1.0, -1.0, [-0.5, -0.5])] for i in range(len(texts))]
    target = SimpleNamespace(
        decode=lambda ids: texts[ids[0]], tokens=lambda ids: [texts[ids[0]]], eos_token="</s>"
    )
    segments = [Segment(f"source {i}", [i], " " * bool(i)) for i in range(len(texts))]
    part = Part(Request(""), "", "", segments, [], "", {}, False, SimpleNamespace(target=target))
    [translation] = part.join(found)
    assert translation.text == "好。是Ja. Nein."
    assert (translation.length, translation.score, translation.log_prob) == (10, -1.0, -5.0)
    assert len(translation.tokens) == 9 and len(translation.token_log_probs) == 10
    joints = {"": "", "Ja.": " ", "好。": "", "他说:“好!”": "", "東京 (": "", "네.": " "}
    assert {text: space_after(text) for text in joints} == joints


@pytest.mark.devices(2)
def test_lines_are_divided_among_devices(model, tokenizer, translator):
    spread = Translator(model, tokenizer, CONFIG, devices=jax.devices()[:2])
    assert [engine.config.batch_size for engine in spread.engines] == [2] * 2
    assert spread.translate(LINES) == translator.translate(LINES)


@pytest.mark.devices(2)
def test_parameters_on_a_mesh_need_no_sharding_of_the_batch(model, tokenizer, translator):
    mesh = make_mesh(MeshConfig(), jax.devices()[:2])
    whole = Translator(model, tokenizer, CONFIG)
    whole.parameters = jax.device_put(
        whole.parameters, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    )
    assert whole.translate(LINES[:3]) == translator.translate(LINES[:3])


def test_parameters_can_be_assigned_as_state_or_dict(tokenizer, translator, model):
    other = Translator(make_model(tokenizer, seed=9), tokenizer, CONFIG)
    state = nnx.state(model, nnx.Param)
    for parameters in (state, nnx.to_pure_dict(state)):
        other.parameters = parameters
        assert other.translate(LINES[:3]) == translator.translate(LINES[:3])
        other.parameters = {}  # frees the memory


def test_the_scorer_has_the_new_parameters(tokenizer, model):
    """A scorer of the old ones would align tags to other words."""
    other = make_model(tokenizer, seed=9)
    translator = Translator(model, tokenizer, CONFIG)
    pairs = [("one two", "ONE TWO")]
    before = translator.scorer.score(pairs)
    translator.parameters = nnx.state(other, nnx.Param)
    assert translator.scorer.score(pairs) == Scorer(other, tokenizer, CONFIG).score(pairs) != before


def test_nan_logits_give_an_empty_line(model, tokenizer, caplog):
    broken = Translator(model, tokenizer, CONFIG)
    broken.parameters = jax.tree.map(lambda x: x * jnp.nan, broken.parameters)
    [[found], [blank]] = broken.stream([LINES[0], ""])
    assert found.text == blank.text == "" and np.isnan(found.score) and np.isnan(found.log_prob)
    assert blank.score == blank.log_prob == 0
    assert "Line 1: the search found no translation" in caplog.text


def test_learned_positions_limit_lengths(tokenizer):
    def translator(max_positions, **settings):
        model = make_model(tokenizer, positions="learned", max_positions=max_positions)
        return Translator(model, tokenizer, dataclasses.replace(CONFIG, **settings))

    assert translator(20).engines[0].buckets[0].lengths == (16, 20)
    short = translator(12)
    assert short.engines[0].buckets[0].lengths == (12,)
    assert all(short.translate([LINES[0], " ".join(WORDS)]))
    with pytest.raises(UserError, match=r"Line 1: prefix '.*' has \d+ tokens; expected at most 4 "):
        translator(5).translate([Request(WORDS[0], prefix=" ".join(WORDS).upper())])
    [[translation]] = translator(5, min_length=5).stream([WORDS[0]])
    assert translation.length == 5
    models = [make_model(tokenizer), short.model]
    for both in (models, models[::-1]):  # an ensemble has the fewest positions of its models
        assert Translator(Ensemble(both), tokenizer, CONFIG).engines[0].max_source_length == 12


def test_longer_sources_have_fewer_rows(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert make_buckets(512, 32) == (Bucket((32, 64, 128), 32), Bucket((256, 512), 8))
    assert make_buckets(140, 7) == (Bucket((32, 64, 128), 7), Bucket((140,), 1))
    assert make_buckets(10, 5) == (Bucket((10,), 5),)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    short, longer = (16, 24, 32, 48, 64, 96, 128), (192, 256, 384, 512)
    assert make_buckets(512, 32) == (Bucket(short, 32), Bucket(longer, 8))
    assert make_buckets(2048, 32)[2:] == (Bucket((768, 1024, 1536, 2048), 2),)
    assert make_buckets(140, 7) == (Bucket(short, 7), Bucket((140,), 1))
    assert make_buckets(129, 1) == (Bucket(short, 1), Bucket((129,), 1))
    assert make_buckets(10, 5) == (Bucket((10,), 5),)
    assert make_buckets(2**31 - 1, 32)[-1].lengths[-1] == 2**31 - 1  # without counting to it


def test_an_ensemble_has_the_settings_of_its_first_run(model, tokenizer, monkeypatch):
    runs = {name: DecodingConfig(beam_size=size) for name, size in (("first", 2), ("second", 7))}
    monkeypatch.setattr(
        loading,
        "load_model",
        lambda name: (SimpleNamespace(decoding=runs[name]), model, tokenizer),
    )
    both, _, config = loading.load_models(["first", "second"], min_length=3)
    assert len(both.models) == 2 and (config.beam_size, config.min_length) == (2, 3)


def test_suppressed_tokens_outside_the_vocabulary(model, tokenizer):
    with pytest.raises(UserError, match=r"decoding.suppress contains 'qqq'; expected tokens in"):
        Translator(model, tokenizer, dataclasses.replace(CONFIG, suppress=("qqq",)))


def test_models_that_do_not_match(tokenizer):
    sizes = {"vocab_size": 9, "d_model": 8, "d_ff": 8, "num_heads": 1, "num_layers": 1}
    model = Transformer(ModelConfig(**sizes), rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match="expected both from the same training run"):
        Translator(model, tokenizer, CONFIG)
    with pytest.raises(UserError, match="workdir is empty; expected one or more"):
        Translator.from_workdir([])


def test_translating_imports_only_what_it_needs() -> None:
    """Orbax and sacreBLEU, for example, are slow to import."""
    unwanted = "orbax", "tensorstore", "sacrebleu", "transformers", "fsspec"
    names = f"[name for name in {unwanted} if name in sys.modules]"
    program = "import sys, transformer_jax; transformer_jax.Translator"
    program += f"; import transformer_jax.translation.program; print({names})"
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output == "[]\n"
