"""Guided alignment: its loss and gradient, resuming, devices, and nothing at all when off."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from number_names import number_names
from runs import ONE, assert_same_runs, changed, entries, no_evaluation, tiny

from transformer_jax.data.batching import Batch
from transformer_jax.data.loader import abstract_batch
from transformer_jax.devices.sharding import batch_sharding, make_mesh
from transformer_jax.model.transformer import Transformer
from transformer_jax.pretrained.loading import load_model
from transformer_jax.settings.config import (
    BatchConfig,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PairsConfig,
    TrainingConfig,
)
from transformer_jax.training.loop import train
from transformer_jax.training.objective import alignment_cross_entropy
from transformer_jax.training.prepare import prepare
from transformer_jax.training.step import make_step_functions
from transformer_jax.translation.scoring import Scorer

MODEL = ModelConfig(
    **{"vocab_size": 24, "d_model": 16, "d_ff": 32, "num_heads": 4, "num_layers": 1},
    **{"num_decoder_layers": 2, "alignment_layer": -2},
    **{"dropout": 0.0, "dtype": "float32", "tie_embeddings": "none"},
)


def guided(weight: float = 0.5, model: ModelConfig = MODEL, **optimizer: Any) -> Config:
    files = PairsConfig(source=("a",), target=("b",), alignments=("c",) if weight else ())
    return Config(
        model=model,
        data=DataConfig(train=files),
        optimizer=OptimizerConfig(**optimizer),
        training=TrainingConfig(guided_alignment=weight, label_smoothing=0.0),
    )


def links_to(source_lengths: np.ndarray, shape: tuple[int, int], random: Any) -> np.ndarray:
    return random.integers(0, source_lengths[:, None] + 1, shape).astype(np.int32)


def batch(rows: int = 8, S: int = 6, T: int = 7) -> Batch:
    """One pair per row, with links of about seven of eight tokens."""
    random = np.random.default_rng(0)
    lengths = random.integers(2, S + 1, rows)
    source, target = (random.integers(4, 24, (rows, L)).astype(np.int32) for L in (S, T))
    source *= np.arange(S) < lengths[:, None]
    return Batch(source, target, links_BT=links_to(lengths, (rows, T), random))


def packed(unpacked: Batch) -> Batch:
    """Two pairs per row. Links count from the start of the row."""
    B, S = unpacked.source_BS.shape
    lengths = (unpacked.source_BS != 0).sum(1)
    source = np.zeros((B // 2, 2 * S), np.int32)
    segments = np.zeros_like(source)
    for row, number in np.ndindex(B // 2, 2):
        first = number * lengths[2 * row]
        at = slice(first, first + lengths[2 * row + number])
        source[row, at] = unpacked.source_BS[2 * row + number, : lengths[2 * row + number]]
        segments[row, at] = number + 1
    links = unpacked.links_BT.copy()
    links[1::2] += np.where(links[1::2] > 0, lengths[::2, None], 0)
    target, links = (x.reshape(B // 2, -1) for x in (unpacked.target_BT, links))
    numbers = np.repeat([[1, 2]], target.shape[1] // 2, axis=1).repeat(B // 2, axis=0)
    return Batch(source, target, segments, numbers.astype(np.int32), links)


def one_step(config: Config, given: Batch, devices: int = 1) -> tuple[float, Any]:
    """The loss and the gradient of a step, from Adam's first moment."""
    functions = make_step_functions(config, make_mesh(config.mesh, jax.devices()[:devices]))
    state, metrics = functions.train_step(functions.init(), given)
    return float(metrics.sums.loss), jax.tree.map(np.asarray, state.optimizer)


@nnx.jit
def cross_attention(model: Transformer, source_BS: jax.Array, target_BT: jax.Array) -> jax.Array:
    """Weights of the first decoder layer's attention to the source."""
    return model.attention_weights(source_BS, target_BT).cross[0]


@pytest.mark.parametrize("alignment_layer", [None, 0])
def test_a_layer_is_averaged_over_heads_and_the_default_is_one_head(
    alignment_layer: int | None,
) -> None:
    """Without ``alignment_layer``, the default is the last layer."""
    config = dataclasses.replace(MODEL, alignment_layer=alignment_layer)
    model = Transformer(config, rngs=nnx.Rngs(0))
    layers = (0, 1, -1, -2, None)

    @nnx.jit
    def both(model: Transformer, *rows: jax.Array) -> tuple[Any, list[jax.Array]]:
        found = [model.cross_attention(*rows, layer) for layer in layers]
        return model.attention_weights(*rows).cross, found

    cross, found = both(model, *batch()[:2])
    default = cross[-1].mean(1) if alignment_layer is None else cross[alignment_layer][:, 0]
    expected = [*(cross[layer].mean(1) for layer in layers[:-1]), default]
    chex.assert_trees_all_close(found, expected, atol=1e-6)


def test_the_cross_entropy_equals_numpys() -> None:
    random = np.random.default_rng(1)
    weights = random.dirichlet(np.ones(5), (3, 4)).astype(np.float32)
    links = random.permutation(np.arange(12) % 6).reshape(3, 4)
    expected = -sum(
        np.log(weights[b, t, links[b, t] - 1]) for b, t in np.ndindex(3, 4) if links[b, t] > 0
    )
    assert (links == 0).any() and (links == 5).any()
    found = alignment_cross_entropy(jnp.asarray(weights), jnp.asarray(links))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_weight_of_zero_has_a_finite_gradient() -> None:
    gradient = jax.grad(lambda x: alignment_cross_entropy(x, jnp.array([[1]])))
    assert jnp.isfinite(gradient(jnp.array([[[0.0, 1.0]]]))).all()


@pytest.mark.parametrize("given", [batch(), packed(batch())], ids=["bucketed", "packed"])
def test_the_loss_adds_the_weighted_cross_entropy_of_one_head(given: Batch) -> None:
    config = guided()
    functions = make_step_functions(config, make_mesh(config.mesh, ONE))
    parameters = functions.init().parameters
    model = nnx.merge(functions.graph, parameters)
    pairs = batch()
    weights = cross_attention(model, pairs.source_BS, pairs.target_BT)[:, 0]
    linked = jnp.take_along_axis(weights, pairs.links_BT[..., None] - 1, axis=2)[..., 0]
    extra = -np.log(linked[pairs.links_BT > 0]).sum()
    plain = float(functions.eval_step(parameters, given._replace(links_BT=None)).loss)
    found = float(functions.eval_step(parameters, given).loss)
    assert extra > 10
    np.testing.assert_allclose(found, plain + 0.5 * extra, rtol=1e-5)


def test_its_gradient_reaches_only_what_the_head_depends_on() -> None:
    config = guided()
    functions = make_step_functions(config, make_mesh(config.mesh, ONE))
    given = batch()

    def loss(parameters: Any) -> jax.Array:
        model = nnx.merge(functions.graph, parameters)
        _, weights = model.hidden_and_alignment(*given[:2], with_alignment=True)
        return alignment_cross_entropy(weights, given.links_BT)

    gradient = jax.jit(jax.grad(loss))(functions.init().parameters)
    assert not gradient["softmax_matrix"].any()
    layers = gradient["decoder"]["layers"]
    head, last = (layers[i] for i in range(2))
    assert not any(x.any() for x in jax.tree.leaves(last))
    attention = head["cross_attention"]
    for name in ("query", "key"):
        by_head = np.abs(attention[name]["kernel"]).sum(axis=(0, 2))
        assert by_head[0] > 0 and not by_head[1:].any()
    for name in ("value", "output"):
        assert not attention[name]["kernel"].any()
    assert not any(x.any() for x in jax.tree.leaves(head["feed_forward"]))
    reached = [head["self_attention"], gradient["encoder"], gradient["target_embedding"]]
    assert all(np.any(x) for part in reached for x in jax.tree.leaves(part))


@pytest.mark.parametrize(
    "config",
    [
        guided(accumulate_steps=2),
        pytest.param(
            guided(model=dataclasses.replace(MODEL, remat=True)), marks=pytest.mark.exhaustive
        ),
    ],
    ids=["accumulated", "remat"],
)
def test_other_ways_to_the_same_step(config: Config) -> None:
    expected, found = one_step(guided(), batch()), one_step(config, batch())
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    chex.assert_trees_all_close(found[1], expected[1], rtol=1e-3, atol=1e-6)


@pytest.mark.exhaustive
def test_a_packed_batch_has_the_same_step() -> None:
    expected, found = one_step(guided(), batch()), one_step(guided(), packed(batch()))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    chex.assert_trees_all_close(found[1], expected[1], rtol=1e-3, atol=1e-6)


def test_r_drop_counts_each_link_once() -> None:
    """Without dropout, both passes are the same."""
    config = guided()
    both = changed(config, training={"r_drop": 1.0})
    np.testing.assert_allclose(one_step(both, batch())[0], one_step(config, batch())[0], rtol=1e-6)


@pytest.mark.parametrize("is_packed", [False, True])
def test_without_alignments_the_program_is_the_same(is_packed: bool) -> None:
    """The layer of the alignments alone changes nothing."""
    texts = []
    for model in (MODEL, dataclasses.replace(MODEL, alignment_layer=None)):
        mesh = make_mesh(MeshConfig(), ONE)
        functions = make_step_functions(guided(0.0, model), mesh)
        given = abstract_batch((8, 6, 7), batch_sharding(mesh), packed=is_packed)
        texts.append(functions.train_step.lower(functions.abstract_state, given).as_text())
    assert texts[0] == texts[1]


def aligned_run(folder: Path) -> Config:
    """Number names. Each German name is one word, which links to every English word."""
    folder.mkdir(exist_ok=True)
    en, de = zip(*number_names("train", 300))
    links = [" ".join(f"{i}-0" for i in range(len(line.split()))) for line in en]
    for name, lines in (("en", en), ("de", de), ("links", links)):
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    pairs = PairsConfig(source=("en",), target=("de",), alignments=("links",))
    return changed(
        tiny(),
        data={"root": str(folder), "train": pairs, "dev": PairsConfig(), "test": PairsConfig()},
        model={"alignment_layer": 0},
        training={"steps": 5, "checkpoint_every": 2, "average": 1, "guided_alignment": 0.5},
    )


@pytest.mark.devices(8)
@pytest.mark.parametrize(
    "layout", ["packed", pytest.param("bucketed", marks=pytest.mark.exhaustive)]
)
def test_a_run_resumes_bit_exactly_and_has_the_same_losses_on_eight_devices(
    layout: Any, tmp_path: Path
) -> None:
    config = changed(aligned_run(tmp_path / "text"), batch=BatchConfig(layout, 1024, 1))
    config = changed(config, batch={"row_length": 64})
    train(config, tmp_path / "whole", devices=ONE)
    train(changed(config, training={"steps": 2}), tmp_path / "resumed", devices=ONE)
    train(config, tmp_path / "resumed", devices=ONE)
    train(changed(config, mesh=MeshConfig(2, 2, 2)), tmp_path / "eight")
    assert_same_runs(config, tmp_path)
    _, model, tokenizer = load_model(tmp_path / "whole")
    pair = [tokenizer.source.encode(["seven"])[0], tokenizer.target.encode(["sieben"])[0]]
    [found] = Scorer(model, tokenizer).align_tokens([tuple(pair)])  # the head that was trained
    rows = [np.array([[*ids, 2]]) for ids in pair]
    expected = cross_attention(model, *rows)[0, 0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_run_can_go_on_without_guided_alignment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its weight changes to 0; the files stay, because the text must be the same."""
    config = aligned_run(tmp_path / "text")
    train(changed(config, training={"steps": 2}), tmp_path / "run", devices=ONE)
    assert "has no effect" not in caplog.text
    without = changed(config, training={"guided_alignment": 0.0, "steps": 4})
    train(without, tmp_path / "run", devices=ONE, allow_changes=True)
    assert "data.train.alignments has no effect: training.guided_alignment is 0." in caplog.text
    before, after = (entries(tmp_path / "run")[i] for i in (1, 2))
    assert before["loss"] > before["nll"] + 0.2 and after["loss"] < after["nll"] + 0.2


def test_other_settings_without_effect_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = no_evaluation(tiny(patience=2, r_drop=5.0))
    with prepare(config, tmp_path / "run", devices=ONE):
        pass
    assert "training.patience has no effect: no data.dev." in caplog.text
    assert "training.r_drop has no effect: all dropout rates are 0." in caplog.text
