"""examples/attention_is_all_you_need.py computes what the package computes by default."""

from __future__ import annotations

import dataclasses
import re
import runpy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

import transformer_jax as tj
from transformer_jax.training.step import make_step_functions

PATH = Path(__file__).resolve().parents[1] / "examples" / "attention_is_all_you_need.py"
paper = SimpleNamespace(**runpy.run_path(str(PATH)))

CONFIG = paper.Config(
    vocab_size=30, num_layers=2, d_model=32, d_ff=64, num_heads=4, dropout=0.0, warmup_steps=100
)
MODEL = tj.ModelConfig(
    **{name: getattr(CONFIG, name) for name in CONFIG._fields[:6]}, dtype="float32"
)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def parameters() -> Any:
    return paper.init_parameters(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def pairs() -> tuple[Array, Array]:
    """Eight sentence pairs of different lengths."""

    def sentences(key: Array, longest: int) -> Array:
        tokens_BL = jax.random.randint(key, (8, longest), 4, CONFIG.vocab_size)
        after_BL = jnp.arange(longest)[None] - jnp.arange(longest - 8, longest)[:, None]
        return jnp.where(after_BL < 0, tokens_BL, jnp.where(after_BL == 0, tj.EOS_ID, tj.PAD_ID))

    return sentences(jax.random.key(1), 11), sentences(jax.random.key(2), 9)


def in_package(parameters: Any) -> Any:
    """The package's parameters, as a nested dict."""

    def layer(weights: Any) -> Any:
        layer = {}
        for name, sublayer in weights.items():
            if name == "feed_forward":
                layer[name] = {
                    "inner": {"kernel": sublayer["inner_DF"], "bias": sublayer["inner_bias_F"]},
                    "output": {"kernel": sublayer["output_FD"], "bias": sublayer["output_bias_D"]},
                }
            else:
                names = ("query_DHK", "key_DHK", "value_DHK", "output_HKD")
                layer[name] = {key.rpartition("_")[0]: {"kernel": sublayer[key]} for key in names}
            norm = {"scale": sublayer["scale_D"], "bias": sublayer["bias_D"]}
            layer[f"{name}_residual"] = {"norm": norm}
        return layer

    stacks = {
        stack: {"layers": dict(enumerate(map(layer, parameters[stack])))}
        for stack in ("encoder", "decoder")
    }
    return stacks | {"target_embedding": {"matrix": parameters["embedding_VD"]}}


def package_model(parameters: Any) -> tj.Transformer:
    model = tj.Transformer(MODEL, rngs=nnx.Rngs(0))
    nnx.update(model, in_package(parameters))
    return model


def test_defaults_are_the_same() -> None:
    """The base model."""
    config, model = paper.Config(), tj.ModelConfig()
    assert all(getattr(model, name) == getattr(config, name) for name in config._fields[:6])
    assert config.label_smoothing == tj.TrainingConfig().label_smoothing
    assert config.warmup_steps == tj.OptimizerConfig().warmup_steps
    assert (paper.PAD, paper.BOS, paper.EOS) == (tj.PAD_ID, tj.BOS_ID, tj.EOS_ID)


def test_initial_parameters_have_the_same_distributions(parameters: Any) -> None:
    model = tj.Transformer(MODEL, rngs=nnx.Rngs(0))
    expected = nnx.to_pure_dict(nnx.state(model, nnx.Param))

    def check(ours: Array, theirs: Array) -> None:
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours.std(), theirs.std(), rtol=0.15)

    jax.tree.map(check, in_package(parameters), expected)


def test_logits_are_equal(parameters: Any, pairs: tuple[Array, Array]) -> None:
    source_BS, target_BT = pairs

    def logits(source_S: Array, target_T: Array) -> Array:
        return paper.decode(parameters, target_T, paper.encode(parameters, source_S), source_S)

    expected = nnx.jit(lambda model: model(source_BS, target_BT))(package_model(parameters))
    is_token_BT1 = np.asarray(target_BT != tj.PAD_ID)[:, :, None]
    found = jax.jit(jax.vmap(logits))(source_BS, target_BT)
    np.testing.assert_allclose(found * is_token_BT1, expected * is_token_BT1, **CLOSE)


def test_losses_and_five_steps_of_training_are_equal(
    parameters: Any, pairs: tuple[Array, Array]
) -> None:
    """One layer in each stack, because a step of two takes twice as long to compile."""
    shallow = CONFIG._replace(num_layers=1)
    parameters = parameters | {stack: parameters[stack][:1] for stack in ("encoder", "decoder")}
    config = tj.Config(
        model=dataclasses.replace(MODEL, num_layers=1),
        optimizer=tj.OptimizerConfig(warmup_steps=CONFIG.warmup_steps),
    )
    functions = make_step_functions(config, tj.make_mesh(config.mesh, jax.devices()[:1]))
    expected = functions.init(jax.tree.map(jnp.copy, in_package(parameters)))
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    state = paper.TrainState(parameters, m=zeros, v=zeros)
    for _ in range(5):
        state, loss = paper.train_step(shallow, state, *pairs, jax.random.key(0))
        expected, metrics = functions.train_step(expected, tj.Batch(*pairs))
        np.testing.assert_allclose(loss, metrics.sums.loss / metrics.sums.tokens, **CLOSE)
    compare = partial(np.testing.assert_allclose, **CLOSE)
    jax.tree.map(compare, in_package(state.parameters), expected.parameters)


def test_learning_rates_are_equal() -> None:
    """During the warm-up and after it."""
    step_N = jnp.arange(1, 1000)
    schedule = tj.learning_rate_schedule(tj.OptimizerConfig(warmup_steps=100), CONFIG.d_model)
    np.testing.assert_allclose(paper.learning_rate(CONFIG, step_N), schedule(step_N - 1), rtol=1e-5)


def test_beams_are_identical(parameters: Any, pairs: tuple[Array, Array]) -> None:
    """Greedy search is the package's beam of 1, and the four hypotheses of a beam have the same
    tokens and scores.
    """
    source_BS, _ = pairs
    # an embedding of EOS that makes hypotheses end at different lengths
    embedding_VD = (
        parameters["embedding_VD"] * jnp.where(jnp.arange(30) == tj.EOS_ID, 1.3, 1)[:, None]
    )
    parameters = parameters | {"embedding_VD": embedding_VD}
    model, longest = package_model(parameters), 12
    greedy = jax.vmap(lambda source_S: paper.greedy_search(parameters, source_S, longest))
    found = {1: jax.jit(greedy)(source_BS)[:, None]}
    search = jax.jit(jax.vmap(lambda source_S: paper.beam_search(parameters, source_S, longest)))
    found[4], scores_BW = search(source_BS)
    lengths = set()
    for beam_size, tokens_BWT in found.items():

        @nnx.jit
        def search_of_package(model: tj.Transformer, beam_size: int = beam_size) -> Any:
            cache = model.start_cache(
                model.encode(source_BS),
                source_BS != tj.PAD_ID,
                beam_size=beam_size,
                max_length=longest,
            )
            return tj.search(
                tj.BeamSearch(
                    bos_id=tj.BOS_ID, eos_id=tj.EOS_ID, pad_id=tj.PAD_ID, beam_size=beam_size
                ),
                model.decode_step,
                cache,
                limit_B=jnp.full(len(source_BS), longest),
                max_length=longest,
                reorder=type(cache).reorder,
            )

        expected = search_of_package(model)
        assert (np.asarray(expected.tokens_BNL) == np.asarray(tokens_BWT)).all()
        lengths |= set(np.asarray(expected.lengths_BN).ravel().tolist())
    np.testing.assert_allclose(scores_BW, expected.scores_BN, **CLOSE)
    assert len(lengths) > 4


@pytest.mark.exhaustive
def test_it_learns_number_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With one layer and few steps: the loss falls, and the text comes back from its tokens."""
    numbers = runpy.run_path(str(PATH.parent / "number_names.py"))
    numbers["main"](folder=tmp_path, train=500, dev=1, test=20)
    paper.main.__globals__["SMALL"] = paper.SMALL._replace(num_layers=1, warmup_steps=100)
    paper.main(folder=tmp_path, steps=200, batch_size=16)
    printed = capsys.readouterr().out
    first, second = map(float, re.findall(r"^step .*: loss (.*)$", printed, re.MULTILINE)[:2])
    assert second < first
    assert printed.count(" -> ") == 3
    assert re.fullmatch(r"\d+ of 20 unseen numbers are exact", printed.splitlines()[-1])
    texts = (tmp_path / "train.de").read_text().splitlines()
    merges = paper.learn_merges(texts, 30)
    assert ["".join(line).replace("_", " ").strip() for line in paper.split(texts, merges)] == texts


def test_it_needs_only_jax_and_is_short() -> None:
    text = PATH.read_text()
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    standard = {"argparse", "collections", "functools", "itertools", "pathlib", "typing"}
    assert imported - standard == {"jax"}
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 275
