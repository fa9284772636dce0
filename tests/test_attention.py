"""Attention of a sentence: the numbers, the pictures of the program, and what it refuses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_models import lines_of_words, make_model, train_tokenizer

from transformer_jax import attention
from transformer_jax.attention import sentence_attention
from transformer_jax.checkpoint import save_model
from transformer_jax.cli import flags_given, parse_flags
from transformer_jax.config import Config, DecodingConfig
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.model.attention import attention_mask
from transformer_jax.model.transformer import Transformer
from transformer_jax.special_ids import BOS_ID, EOS_ID

LINES = lines_of_words(12)
DECODING = DecodingConfig(beam_size=2, max_extra_length=6, max_source_length=16, batch_size=1)


@pytest.fixture(scope="module")
def translator():
    tokenizer = train_tokenizer(LINES)
    model = make_model(tokenizer, num_layers=2, num_decoder_layers=3)
    return Translator(model, tokenizer, DECODING)


@pytest.fixture(scope="module")
def workdir(translator, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    [model] = translator.models
    save_model(folder, Config(decoding=DECODING), model, translator.tokenizer)
    return folder


@pytest.fixture
def draw(workdir, translator, tmp_path, monkeypatch, capsys):
    """Run the program: (exit status, its output file, stderr). The model is loaded once for all."""
    monkeypatch.setattr(Translator, "from_workdir", lambda *_, **__: translator)

    def run(*flags, text="one two three", output="a.svg"):
        file = tmp_path / output
        where = ["--workdir", str(workdir), "--text", text, "--output", str(file)]
        status = attention.main([*where, *map(str, flags)])
        return status, file, capsys.readouterr().err

    return run


def texts_in(svg: Path) -> list[str]:
    elements = ElementTree.parse(svg).getroot().iter("{http://www.w3.org/2000/svg}text")
    return [element.text or "" for element in elements]


def test_weights_are_those_of_the_model_without_padding(translator):
    text, target = LINES[2], LINES[3].upper()
    found = sentence_attention(translator, text, target=target)
    [model], tokenizer = translator.models, translator.tokenizer
    [source], [labels] = tokenizer.encode_source([text]), tokenizer.encode_target([target])
    assert found.source == (*tokenizer.source_tokens(source), "</s>")
    assert found.target == (*tokenizer.target_tokens(labels), "</s>")
    expected = nnx.jit(Transformer.attention_weights)(
        model, jnp.array([[*source, EOS_ID]]), jnp.array([[*labels, EOS_ID]])
    )
    for name in ("encoder", "decoder", "cross"):
        queries, keys, weights_NHTS = found.of(name)
        layers = getattr(expected, name)
        assert weights_NHTS.shape == (len(layers), 2, len(queries), len(keys))
        assert weights_NHTS.dtype == np.float32
        np.testing.assert_allclose(weights_NHTS.sum(axis=-1), 1, atol=1e-6)
        np.testing.assert_allclose(weights_NHTS, np.concatenate(layers), atol=1e-6)
    assert found.of("decoder")[1] == ("<s>", *found.target[:-1])
    assert not np.triu(found.decoder_NHTT, 1).any()


def test_weights_of_the_first_layers_are_computed_as_the_paper_says(translator):
    """softmax(q k^T / sqrt(d_k)) in NumPy, from the embeddings."""
    found = sentence_attention(translator, "one two", target="TWO")
    [model], tokenizer = translator.models, translator.tokenizer
    for kind, tokens in (
        ("encoder", [*tokenizer.encode_source(["one two"])[0], EOS_ID]),
        ("decoder", [BOS_ID, *tokenizer.encode_target(["TWO"])[0]]),
    ):
        ids_1L = jnp.array([tokens])
        embedding = model.source_embedding if kind == "encoder" else model.target_embedding
        x_1LD = embedding(ids_1L, jnp.arange(len(tokens))[None], num_positions=len(tokens))
        first = getattr(model, kind).layers[0].self_attention
        q_LHK, k_LHK = np.asarray(first.query(x_1LD)[0]), np.asarray(first.key(x_1LD)[0])
        scores_HLL = np.einsum("qhk,shk->hqs", q_LHK, k_LHK) / np.sqrt(q_LHK.shape[-1])
        real_1L = jnp.ones_like(ids_1L)
        mask = attention_mask(real_1L, real_1L, causal=kind == "decoder")
        exp_HLL = np.exp(scores_HLL) * np.asarray(mask)[0]
        expected = exp_HLL / exp_HLL.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(found.of(kind)[2][0], expected, atol=1e-6)


def test_without_a_target_it_is_what_the_beam_search_finds(translator):
    [[best]] = translator.stream(["three four"])
    found = sentence_attention(translator, "three four")
    assert found.target == (*best.tokens, "</s>")


def test_an_ensemble_has_no_attention_of_its_own(translator):
    both = Translator(translator.models * 2, translator.tokenizer, DECODING)
    with pytest.raises(UserError, match="has 2 models; expected one"):
        sentence_attention(both, "one")


def test_npz_has_the_tokens_and_all_weights(draw, translator):
    status, file, _ = draw(output="a.npz")
    assert status == 0
    found = sentence_attention(translator, "one two three")
    with np.load(file) as arrays:
        assert set(arrays) == {"source", "target", "encoder", "decoder", "cross"}
        assert (*arrays["source"],) == found.source and (*arrays["target"],) == found.target
        for kind in ("encoder", "decoder", "cross"):
            np.testing.assert_array_equal(arrays[kind], found.of(kind)[2])


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_maps_of_every_layer_and_head_with_their_tokens(draw, translator, kind):
    status, file, err = draw("--kind", kind)
    assert (status, err) == (0, "")
    texts = texts_in(file)
    queries, keys, weights_NHTS = sentence_attention(translator, "one two three").of(kind)
    layers, heads = weights_NHTS.shape[:2]
    for layer in range(1, layers + 1):
        for head in range(1, heads + 1):
            assert f"layer {layer}, head {head}" in texts
    for token in {*queries, *keys}:
        assert texts.count(token) == layers * heads * [*queries, *keys].count(token)


def test_lines_of_chosen_layers_heads_and_words(draw, translator):
    flags = ("--kind", "encoder", "--style", "lines", "--layers", -1, "--heads", 2)
    status, whole, _ = draw(*flags, output="whole.svg")
    _, one, _ = draw(*flags, "--query", "two", output="one.svg")
    assert status == 0
    texts = texts_in(whole)
    assert "layer 2" in texts and "layer 1" not in texts
    head = texts.index("head")
    assert texts[head + 1] == "2" and texts[head + 2].startswith("largest weight")
    source = sentence_attention(translator, "one two three").source
    assert [text for text in texts if text in source] == [*source, *source]

    def lines(file):
        return len(re.findall(r'clip-path="url', file.read_text()))

    assert 0 < lines(one) < lines(whole)


@pytest.mark.parametrize("output", ["a.png", "a.pdf"])
def test_other_formats(draw, output):
    status, file, _ = draw("--style", "lines", output=output)
    assert status == 0
    assert file.read_bytes().startswith({"a.png": b"\x89PNG", "a.pdf": b"%PDF"}[output])


def test_of_a_long_sentence_the_first_tokens_are_drawn_or_those_asked_for(
    draw, translator, monkeypatch
):
    monkeypatch.setattr(attention, "READABLE", 3)
    text, flags = "one two three five six", ("--kind", "encoder", "--layers", 1, "--heads", 1)
    tokens = sentence_attention(translator, text).source
    status, file, err = draw(*flags, text=text)
    assert status == 0 and [text for text in texts_in(file) if text in tokens] == [*tokens[:3]] * 2
    assert "The source has 6 tokens, more than are readable; the first 3 are drawn." in err
    assert "--source-tokens 4 6 draws the next ones." in err
    status, file, err = draw(*flags, "--source-tokens", 2, 6, text=text)
    assert (status, err) == (0, "")
    assert [text for text in texts_in(file) if text in tokens] == [*tokens[1:]] * 2


@pytest.mark.parametrize(
    ("query", "chosen"),
    [
        ("four", [1, 2, 3, 4, 5]),
        ("o", [3]),
        ("one", [0, 6]),
        ("12", [1]),
        ("18", None),
        ("x", None),
    ],
)
def test_a_query_is_a_word_a_token_or_a_number(query, chosen):
    tokens = ("▁one", "▁", "f", "o", "u", "r", "▁one")
    if chosen is None:
        with pytest.raises(UserError, match=f"query is '{query}'; .* from 11 to 17: ▁one ▁ f"):
            attention.tokens_of(query, tokens, 10)
    else:
        assert attention.tokens_of(query, tokens, 10) == chosen


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--heads", "3"], "head is 3; expected 1 to 2, or -1 (the last) to -2."),
        (["--layers", "0"], "layer is 0; expected 1 to 3, or -1 (the last) to -3."),
        (["--text", "  "], "text is '  '; expected a sentence."),
        (["--text", "one " * 2000], "text has 2001 tokens, EOS included; expected at most 1024."),
        (["--target", "ONE " * 2000], "target has 2001 tokens, EOS included; expected at most"),
        (["--source-tokens", "3", "9"], "source_tokens is 3 9; expected the first and the last"),
        (["--query", "one"], "--query has no effect on "),
        (["--kind", "encoder", "--target-tokens", "1", "2"], "--target-tokens has no effect on"),
        (["--style", "lines", "--query", "no"], "query is 'no'; expected a word or token of what"),
        (
            ["--output", "a.gif"],
            "output is 'a.gif'; expected a name that ends in one of .svg,",
        ),
        (["--output", "no/folder/a.svg"], "output is 'no/folder/a.svg'; expected the name of a"),
        (["--output", "a.npz", "--kind", "cross"], "--kind has no effect on 'a.npz'"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(draw, flags, message):
    status, file, err = draw(*flags)
    assert status == 2 and not file.exists()
    assert err.splitlines()[-1].startswith(f"error: {message}")


def test_documented_commands_are_understood():
    documents = [path.read_text() for path in (Path(__file__).parents[1] / "docs").glob("*.md")]
    command = r"^    python -m transformer_jax\.attention (.*?)(?:  #.*)?$"
    lines = [line for text in documents for line in text.replace("\\\n", " ").splitlines()]
    commands = [shlex.split(found[1]) for line in lines if (found := re.match(command, line))]
    assert len(commands) >= 3
    for flags in commands:
        attention.check_effects(parse_flags(attention.Arguments, flags), flags_given(flags))


def test_the_program_reads_a_work_directory(workdir, tmp_path, capsys):
    file = tmp_path / "a.svg"
    flags = ["--text", "one two", "--target", "TWO", "--output", str(file), "--heads", "1"]
    assert attention.main(["--workdir", str(workdir), *flags]) == 0
    assert "▁TWO" in texts_in(file)
    assert attention.main(["--workdir", str(tmp_path), *flags]) == 2
    assert capsys.readouterr().err.startswith("error: ")
