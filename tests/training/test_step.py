"""Training step: any mesh, gradient accumulation, skipped steps, learning rate schedule."""

import dataclasses
import re
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from runs import ONE, changed

from benchmarks.hlo import collectives
from transformer_jax.data.batching import Batch
from transformer_jax.devices.sharding import check_rows, make_mesh, state_shardings
from transformer_jax.errors import UserError
from transformer_jax.model import attention_kernel, gpu, matmul, norm_kernel
from transformer_jax.settings.config import (
    BatchConfig,
    Config,
    DataConfig,
    LossSettings,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from transformer_jax.tokenization.special_ids import EOS_ID, PAD_ID
from transformer_jax.training import step as step_module
from transformer_jax.training.loss import LossSums
from transformer_jax.training.optimizer import DECAYS, learning_rate_schedule, make_optimizer
from transformer_jax.training.step import (
    StepConfig,
    StepFunctions,
    StepMetrics,
    TrainState,
    accumulated_gradients,
    make_step_functions,
    shared_functions,
)
from transformer_jax.training.two_passes import cut_tokens

CONFIG = Config(
    model=ModelConfig(
        vocab_size=24, d_model=16, d_ff=32, num_heads=8, num_layers=1, dropout=0.0, dtype="float32"
    ),
    data=DataConfig(max_source_length=16, max_target_length=16),
    batch=BatchConfig(tokens=256, row_multiple=8),
    optimizer=OptimizerConfig(warmup_steps=10),
    training=TrainingConfig(steps=10),
)
# Dropout makes compiling a step half as long again.
DROPPING = changed(CONFIG, model={"dropout": 0.1})


def batch(seed: int = 0, rows: int = 16) -> Batch:
    rng = np.random.default_rng(seed)
    source, target = (
        rng.integers(4, 24, (rows, 7)).astype(np.int32),
        rng.integers(4, 24, (rows, 6)).astype(np.int32),
    )
    source[1, 3:] = target[1, 4:] = 0
    return Batch(source, target)


def step_functions(config: Config, devices: int = 1) -> StepFunctions:
    return make_step_functions(config, make_mesh(config.mesh, jax.devices()[:devices]))


def start(run: StepFunctions) -> TrainState:
    """The initial state of ``CONFIG``, placed on this run's devices. ``init`` compiles once."""
    first = jax.tree.map(np.asarray, step_functions(CONFIG).init())
    return jax.device_put(first, jax.tree.map(lambda x: x.sharding, run.abstract_state))


def losses(config: Config, devices: int, steps: int = 4) -> tuple[list[float], TrainState]:
    return losses_of(step_functions(config, devices), steps)


def losses_of(run: StepFunctions, steps: int = 4) -> tuple[list[float], TrainState]:
    state, result = start(run), []
    for step in range(steps):
        state, metrics = run.train_step(state, batch(step))
        result.append(float(metrics.sums.loss) / float(metrics.sums.tokens))
    return result, state


@pytest.fixture(scope="module")
def on_one_device() -> list[float]:
    return losses(DROPPING, 1)[0]


def test_numbers_of_three_steps() -> None:
    """Initial parameters, dropout masks and losses of seed 0 equal those of earlier versions."""
    model = ModelConfig(
        vocab_size=32,
        d_model=16,
        d_ff=32,
        num_heads=4,
        num_layers=2,
        attention_dropout=0.1,
        feed_forward_dropout=0.1,
        dtype="float32",
    )
    rng = np.random.default_rng(0)
    source, target = (rng.integers(4, 32, (8, n)).astype(np.int32) for n in (9, 7))
    source[1, 5:] = target[2, 3:] = 0
    run = step_functions(Config(model=model, optimizer=OptimizerConfig(warmup_steps=10)))
    state, losses, norms = run.init(), [], []
    for _ in range(3):
        state, metrics = run.train_step(state, Batch(source, target))
        losses.append(metrics.sums.loss)
        norms.append(metrics.gradient_norm)
    np.testing.assert_allclose(losses, [200.79037, 192.0907, 179.84537], rtol=2e-6)
    np.testing.assert_allclose(norms, [1.6832926, 1.3260058, 0.7285598], rtol=2e-6)


def test_a_step_transfers_nothing_between_host_and_devices() -> None:
    run = step_functions(DROPPING)
    state, inputs = start(run), jax.device_put(batch())
    with jax.transfer_guard("disallow"):
        state, metrics = run.train_step(state, inputs)
        run.eval_step(state.parameters, inputs)
    assert float(metrics.sums.tokens) > 0


def test_seeds_share_a_compiled_step() -> None:
    """In one process, and in the compilation cache, whose key is the program's text."""
    steps = [step_functions(changed(DROPPING, seed=seed)) for seed in (0, 7)]
    assert steps[0].train_step is steps[1].train_step
    model, optimizer, training = DROPPING.model, DROPPING.optimizer, DROPPING.training
    config = StepConfig(model, optimizer, 0, training.part(LossSettings))
    steps[1] = shared_functions.__wrapped__(config, make_mesh(DROPPING.mesh, ONE))
    texts = {each.train_step.lower(each.abstract_state, batch()).as_text() for each in steps}
    assert len(texts) == 1
    run = steps[0]
    _, of_0 = run.train_step(start(run), batch())
    _, of_7 = run.train_step(start(run).replace(seed=np.uint32(7)), batch())
    assert float(of_0.sums.nll) != float(of_7.sums.nll)  # dropout differs


# Each axis on its own (for data, see the accumulation test), and all three, on two slices and with
# devices in another order, as on real machines, where a mesh follows the topology.
MESHES = [
    pytest.param(MeshConfig(1, 8, 1), range(8), marks=pytest.mark.exhaustive),
    pytest.param(MeshConfig(1, 1, 8), range(8), marks=pytest.mark.exhaustive),
    (MeshConfig(2, 2, 2, slices=2), (6, 3, 0, 5, 2, 7, 4, 1)),
]


ROWS = 8192  # so many that all parameters are small compared with one layer's output


def compiled_step(run: StepFunctions, rows: int) -> str:
    """The compiled program of a step on rows of 16 + 16 tokens."""
    side = jax.ShapeDtypeStruct((rows, 16), jnp.int32)
    return run.train_step.lower(run.abstract_state, Batch(side, side)).compile().as_text()


@pytest.mark.devices(8)
@pytest.mark.parametrize(("mesh", "order"), MESHES, ids=str)
def test_losses_on_a_mesh_equal_those_on_one_device(
    mesh: MeshConfig, order: Sequence[int], on_one_device: list[float]
) -> None:
    devices = [jax.devices()[number] for number in order]
    run = make_step_functions(changed(DROPPING, mesh=mesh), make_mesh(mesh, devices))
    several, state = losses_of(run)
    np.testing.assert_allclose(several, on_one_device, rtol=1e-5)
    kernel = state.parameters["encoder"]["layers"][0]["feed_forward"]["inner"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // (mesh.fsdp * mesh.tensor)


@pytest.mark.devices(8)
def test_initial_parameters_do_not_depend_on_the_devices() -> None:
    run = step_functions(changed(CONFIG, mesh=MeshConfig(2, 2, 2)), 8)
    chex.assert_trees_all_equal(run.init(), step_functions(CONFIG).init())


@pytest.mark.devices(8)
def test_tensor_axis_sums_activations_and_gathers_no_matrix() -> None:
    model = {"vocab_size": 256, "d_model": 64, "d_ff": 256}
    config = changed(CONFIG, model=model, mesh=MeshConfig(tensor=8))
    crossing = collectives(compiled_step(step_functions(config, 8), ROWS))
    assert set(crossing) == {"all-reduce f32", "all-gather f32"}
    # only gradients of biases [F] are gathered; they do not depend on the rows
    assert crossing["all-gather f32"]["mb"] <= 2 * config.model.d_ff * 4 / 1e6 + 0.001
    layer_mb = ROWS * 16 * config.model.d_model * 4 / 1e6  # one layer's output
    # Of an encoder layer and a decoder layer: feed-forward sums once in the forward and once in the
    # backward pass; attention once in the forward pass and once each for queries, keys and values
    # in the backward pass. The vocabulary is sharded: both embeddings sum once in the forward pass,
    # and the loss sums the gradient of the decoder output, and three numbers for each position.
    sums = 2 * 2 + 3 * 4 + 2 + 1 + 3 / config.model.d_model
    assert 10 <= crossing["all-reduce f32"]["mb"] / layer_mb <= sums + 0.01


@pytest.mark.devices(8)
def test_sharding_of_every_parameter() -> None:
    """Every matrix is sharded along ``fsdp`` and, except learned positions, along ``tensor``."""
    model = {"attention_bias": True, "positions": "learned", "softmax_bias": True}
    model |= {"tie_embeddings": "none", "norm": "pre"}
    config = changed(CONFIG, model=model, mesh=MeshConfig(2, 2, 2))
    parameters = make_step_functions(config, make_mesh(config.mesh)).abstract_state.parameters
    found = {
        re.sub(r"\d+", "*", ".".join(str(key.key) for key in path)): leaf.sharding.spec
        for path, leaf in jax.tree_util.tree_leaves_with_path(parameters)
    }
    heads, inner = P("fsdp", "tensor", None), P("fsdp", "tensor")
    attention = {
        **{f"{name}.kernel": heads for name in ("query", "key", "value")},
        "output.kernel": P("tensor", None, "fsdp"),
        **{f"{name}.bias": P() for name in ("query", "key", "value", "output")},
    }
    feed_forward = {
        "inner.kernel": inner,
        "inner.bias": P(),
        "output.kernel": P("tensor", "fsdp"),
        "output.bias": P(),
    }
    norm = {"norm.scale": P(), "norm.bias": P()}
    matrix = P("tensor", "fsdp")
    expected = {"softmax_matrix": matrix, "softmax_bias": P()}
    for side in ("source", "target"):
        expected[f"{side}_embedding.matrix"] = matrix
        expected[f"{side}_embedding.position_matrix"] = P(None, "fsdp")
    for stack, sublayers in (
        ("encoder", {"self_attention": attention, "feed_forward": feed_forward}),
        (
            "decoder",
            {"self_attention": attention, "cross_attention": attention}
            | {"feed_forward": feed_forward},
        ),
    ):
        expected |= {f"{stack}.final_norm.{name}": P() for name in ("scale", "bias")}
        for sublayer, parts in sublayers.items():
            for prefix, specs in ((sublayer, parts), (f"{sublayer}_residual", norm)):
                expected |= {
                    f"{stack}.layers.*.{prefix}.{name}": spec for name, spec in specs.items()
                }
    assert found == expected


@pytest.mark.devices(8)
def test_fsdp_divides_memory_by_the_number_of_devices() -> None:
    """For a base model. The replicated parameters are small."""
    config = changed(CONFIG, model=ModelConfig(vocab_size=37_000), mesh=MeshConfig(fsdp=8))
    state = make_step_functions(config, make_mesh(config.mesh)).abstract_state
    for part in (state.parameters, state.optimizer):
        leaves = jax.tree.leaves(part)
        held = sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
        assert held <= 1.05 / 8 * sum(np.prod(leaf.shape) for leaf in leaves)


@pytest.mark.parametrize(
    ("devices", "accumulate_steps"),
    [
        pytest.param(1, 4, marks=pytest.mark.exhaustive),
        pytest.param(4, 2, marks=pytest.mark.devices(4)),
    ],
)
def test_accumulation_changes_nothing(devices: int, accumulate_steps: int) -> None:
    parts = changed(CONFIG, optimizer={"accumulate_steps": accumulate_steps})
    whole_losses, whole = losses(CONFIG, 1)
    part_losses, split = losses(parts, devices)
    np.testing.assert_allclose(part_losses, whole_losses, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), split.parameters, whole.parameters
    )


def test_each_microbatch_draws_its_own_dropout() -> None:
    def gradient(parameters, batch, key):  # one-hot random number
        drawn = jax.nn.one_hot(jax.random.randint(key, (), 0, 1000), 1000)
        return drawn, LossSums(*[jnp.zeros(())] * 4)

    @jax.jit
    def accumulated(parameters, batch, seed):
        key = jax.random.key(seed)
        return accumulated_gradients(gradient, parameters, batch, key, microbatches=4)[0]

    drawn = accumulated(np.zeros(1000, np.float32), batch(), 0)
    assert sorted(drawn.tolist())[-5:] == [0, 1, 1, 1, 1]


@pytest.fixture(scope="module")
def two_rows_alone() -> tuple[StepMetrics, LossSums]:
    """Metrics of a step on two rows, and of an evaluation after it."""
    run = step_functions(CONFIG)
    state, metrics = run.train_step(start(run), batch(rows=2))
    return metrics, run.eval_step(state.parameters, batch(rows=2))


@pytest.mark.parametrize(
    ("devices", "accumulate_steps", "segments"),
    [
        pytest.param(1, 4, False, marks=pytest.mark.exhaustive),
        (1, 4, True),
        pytest.param(4, 2, False, marks=pytest.mark.devices(4)),
    ],
)
def test_empty_rows_change_nothing(
    devices: int,
    accumulate_steps: int,
    segments: bool,
    two_rows_alone: tuple[StepMetrics, LossSums],
) -> None:
    """Even if they fill a microbatch or a device, and if each row is marked as one segment."""
    config = changed(CONFIG, optimizer={"accumulate_steps": accumulate_steps})
    run = step_functions(config, devices)
    padded = Batch(*(np.pad(side, ((0, 14), (0, 0))) for side in batch(rows=2)[:2]))
    if segments:
        padded = Batch(*padded[:2], *((side != 0).astype(np.int32) for side in padded[:2]))
    alone, sums = two_rows_alone
    state, metrics = run.train_step(start(run), padded)
    np.testing.assert_array_equal(metrics.sums.tokens, alone.sums.tokens)
    np.testing.assert_allclose(metrics.gradient_norm, alone.gradient_norm, rtol=1e-5)
    np.testing.assert_allclose(run.eval_step(state.parameters, padded).nll, sums.nll, rtol=1e-4)


def test_a_non_finite_step_is_skipped_and_counted() -> None:
    run = step_functions(CONFIG)
    state, _ = run.train_step(run.init(), batch())
    norm = state.parameters["encoder"]["layers"][0]["feed_forward_residual"]["norm"]
    scale = np.array(norm["scale"])
    norm["scale"] = np.full_like(scale, np.nan)
    before = jax.tree.map(np.asarray, (state.parameters, state.optimizer))
    for count in (1, 2):
        state, metrics = run.train_step(state, batch())
        assert (int(metrics.bad_steps), int(metrics.bad_in_a_row)) == (count, count)
    chex.assert_trees_all_equal((state.parameters, state.optimizer), before)
    assert int(state.step) == 3  # skipped steps count, so the next batch is a new one
    norm = state.parameters["encoder"]["layers"][0]["feed_forward_residual"]["norm"]
    norm["scale"] = scale
    state, metrics = run.train_step(state, batch())
    assert (int(metrics.bad_steps), int(metrics.bad_in_a_row)) == (2, 0)
    second = learning_rate_schedule(CONFIG.optimizer, CONFIG.model.d_model)(1)
    assert float(metrics.learning_rate) == pytest.approx(float(second))  # of the second update


def test_gradients_are_clipped_to_a_global_norm() -> None:
    """Adam's update does not depend on the gradient's size, but its first moment does."""
    parameters = {"a": np.zeros((2, 2), np.float32), "b": np.zeros(5, np.float32)}
    gradient = {"a": np.full((2, 2), 3, np.float32), "b": np.full(5, 4, np.float32)}
    norm = np.sqrt(4 * 9 + 5 * 16)
    for clip_norm, scale in ((0.0, 1.0), (2.0, 2.0 / norm), (1e3, 1.0)):
        optimizer = make_optimizer(OptimizerConfig(clip_norm=clip_norm, beta1=0.9), 16)
        _, state = jax.jit(optimizer.update)(gradient, optimizer.init(parameters), parameters)
        [moment] = [
            part.mu
            for part in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "mu"))
            if hasattr(part, "mu")
        ]
        chex.assert_trees_all_close(
            moment, jax.tree.map(lambda g, s=scale: np.float32(0.1 * s) * g, gradient), rtol=1e-5
        )


def test_a_step_in_bfloat16_is_close_to_one_in_float32() -> None:
    """Parameters and Adam's moments stay in float32."""
    low = changed(CONFIG, model={"dtype": "bfloat16"})
    (low_state, low_metrics), (_, metrics) = (
        step_functions(each).train_step(start(step_functions(each)), batch())
        for each in (low, CONFIG)
    )
    np.testing.assert_allclose(low_metrics.sums.loss, metrics.sums.loss, rtol=1e-2)
    np.testing.assert_allclose(low_metrics.gradient_norm, metrics.gradient_norm, rtol=0.1)
    floats = [
        leaf for leaf in jax.tree.leaves(low_state) if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    assert len(floats) > 60 and all(leaf.dtype == jnp.float32 for leaf in floats)


def test_remat_gives_the_same_gradients() -> None:
    remat = changed(DROPPING, model={"remat": True})
    (state, _), (plain, _) = (
        step_functions(each).train_step(start(step_functions(each)), batch())
        for each in (remat, DROPPING)
    )
    chex.assert_trees_all_close(state.optimizer, plain.optimizer, rtol=1e-4, atol=1e-6)


def test_weight_decay_applies_to_matrices_only() -> None:
    config = changed(CONFIG, model={"attention_bias": True, "tie_embeddings": "none"})
    ones = jax.tree.map(
        lambda p: np.ones(p.shape, np.float32), step_functions(config).abstract_state.parameters
    )
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.1), 16)
    zeros = jax.tree.map(np.zeros_like, ones)
    updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(ones), ones)
    decayed = {
        (str(path[-1]), bool(np.all(update)))
        for path, update in jax.tree_util.tree_leaves_with_path(updates)
    }
    names = {
        "['kernel']": True,
        "['matrix']": True,
        "['softmax_matrix']": True,
        "['bias']": False,
        "['scale']": False,
    }
    assert decayed == set(names.items())


def test_dropout_differs_between_steps_and_rows() -> None:
    run = step_functions(DROPPING)
    same = Batch(*(np.repeat(side[:1], 16, axis=0) for side in batch()[:2]))
    state = start(run)
    first = float(run.train_step(start(run), same)[1].sums.nll)
    state = dataclasses.replace(state, step=state.step + 1)
    assert float(run.train_step(state, same)[1].sums.nll) != first
    again = float(run.train_step(start(run), same)[1].sums.nll)
    assert again == first


def test_r_drop_penalizes_the_divergence_between_two_dropout_masks() -> None:
    """The divergence is proportional to ``r_drop`` and shrinks in training. Tokens count once."""

    def run(r_drop: float, devices: int) -> list[StepMetrics]:
        training = {"label_smoothing": 0.0, "r_drop": r_drop}
        run = step_functions(changed(DROPPING, training=training), devices)
        state, found = start(run), []
        for _ in range(10):
            state, metrics = run.train_step(state, batch())
            found.append(metrics)
        return found

    def divergence(metrics: StepMetrics) -> float:
        loss, nll, tokens = map(float, (metrics.sums.loss, metrics.sums.nll, metrics.sums.tokens))
        return (loss - nll) / tokens

    weak, strong = run(0.5, devices=1), run(5.0, devices=2)
    assert int(strong[0].sums.tokens) == (batch().target_BT > 0).sum()
    np.testing.assert_allclose(divergence(strong[0]), 10 * divergence(weak[0]), rtol=1e-4)
    assert divergence(strong[-1]) < 0.5 * 10 * divergence(weak[-1])


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_simcut_adds_the_divergence_from_a_pass_with_cut_tokens(packed: bool) -> None:
    """Equation 6 of Gao et al. (2022). EOS and the decoder's start are never cut."""
    inputs = batch()
    source, target = inputs.source_BS.copy(), inputs.target_BT.copy()
    source[:, [2, 6]] = target[:, [2, 5]] = EOS_ID
    inputs = Batch(source, target)
    if packed:  # rows of two sentences
        segments = [np.repeat([[1] * 3 + [2] * 4], len(source), axis=0)[:, :n] for n in (7, 6)]
        inputs = Batch(source, target, *segments)
    run = step_functions(changed(CONFIG, training={"simcut": 3.0, "simcut_rate": 0.4}))
    state = start(run)
    model = nnx.merge(run.graph, jax.tree.map(jnp.copy, state.parameters))
    plain = step_functions(CONFIG)
    without = plain.eval_step(state.parameters, inputs)
    dropout_key = jax.random.fold_in(jax.random.key(state.seed), state.step)
    found = run.train_step(state, inputs)[1].sums

    @nnx.jit
    def log_probs(model: Any, source: np.ndarray, target: np.ndarray) -> jax.Array:
        segments = inputs.source_segments_BS, inputs.target_segments_BT
        options = dict(zip(("source_segments_BS", "target_segments_BT"), segments, strict=True))
        return jax.nn.log_softmax(model(source, target, **options)[..., :24])

    log_p = np.asarray(log_probs(model, source, target))
    # a 25th token, whose embedding is zero
    matrix = model.target_embedding.matrix
    model.target_embedding.matrix = nnx.Param(jnp.pad(matrix[...], ((0, 1), (0, 0))))
    cut = []
    for tokens, key in zip((source, target), jax.random.split(dropout_key, 3)[1:], strict=True):
        doubled = np.repeat(tokens, 2, axis=0)
        chosen = np.asarray(cut_tokens(doubled, 0.4, key, CONFIG.model))
        assert not chosen[::2].any() and not chosen[1::2][tokens == EOS_ID].any()
        assert 0.25 < chosen[1::2][tokens != EOS_ID].mean() < 0.55
        cut.append(np.where(chosen[1::2], 24, tokens))
    log_q = np.asarray(log_probs(model, *cut))
    divergence = ((np.exp(log_p) * (log_p - log_q)).sum(axis=-1) * (target != PAD_ID)).sum()
    assert divergence > 0.01 * found.tokens
    np.testing.assert_allclose(found.loss, without.loss + 3 * divergence, rtol=1e-5)
    np.testing.assert_allclose(found[1:], without[1:], rtol=1e-6)


@pytest.mark.exhaustive
def test_simcut_without_cuts_or_dropout_is_plain_training() -> None:
    """And with both, two devices give the same as one."""
    config = changed(CONFIG, training={"simcut": 3.0, "simcut_rate": 0.0})
    np.testing.assert_allclose(losses(config, 1)[0], losses(CONFIG, 1)[0], rtol=1e-5)
    cutting = changed(DROPPING, training={"simcut": 3.0})
    np.testing.assert_allclose(losses(cutting, 2)[0], losses(cutting, 1)[0], rtol=1e-5)


def test_schedule_is_equation_3_with_steps_from_1() -> None:
    schedule = learning_rate_schedule(OptimizerConfig(warmup_steps=4000), 512)
    for step in (1, 100, 4000, 4001, 100_000):
        expected = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        np.testing.assert_allclose(schedule(step - 1), expected, rtol=1e-5)
    given = learning_rate_schedule(OptimizerConfig(warmup_steps=100, peak_learning_rate=0.01), 512)
    np.testing.assert_allclose([given(99), given(399)], [0.01, 0.005], rtol=1e-5)


@pytest.mark.parametrize(
    ("decay", "at_half", "at_end"),
    [("constant", 1, 1), ("linear", 0.5, 0.01), ("cosine", 0.5, (1 - np.cos(np.pi / 100)) / 2)],
)
def test_other_decays_end_at_the_last_step(decay: str, at_half: float, at_end: float) -> None:
    config = OptimizerConfig(warmup_steps=10, peak_learning_rate=2.0, decay=decay)  # type: ignore[arg-type]
    schedule = learning_rate_schedule(config, 512, 109)
    np.testing.assert_allclose([schedule(4), schedule(9)], [1.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose([schedule(59), schedule(108)], [2 * at_half, 2 * at_end], rtol=1e-3)
    if decay != "constant":
        with pytest.raises(AssertionError, match=f"{decay} decay needs steps"):
            learning_rate_schedule(config, 512)


def test_a_new_schedule_gets_its_formula_and_one_line_in_the_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rates reach the training step, without a change in other places."""
    monkeypatch.setitem(
        DECAYS, "one_minus_sqrt", lambda step, warmup, progress: 1 - jnp.sqrt(progress)
    )
    optimizer = OptimizerConfig(warmup_steps=1, peak_learning_rate=0.01)
    object.__setattr__(optimizer, "decay", "one_minus_sqrt")
    run = step_functions(dataclasses.replace(CONFIG, optimizer=optimizer))
    state = start(run)
    for step in range(3):
        state, metrics = run.train_step(state, batch())
        expected = 0.01 * (1 - np.sqrt(step / CONFIG.training.steps))
        np.testing.assert_allclose(metrics.learning_rate, expected, rtol=1e-4)


def test_the_moving_average_starts_with_a_low_decay() -> None:
    run = step_functions(changed(CONFIG, optimizer={"ema_decay": 0.2}))
    state = run.init()
    for decay in (2 / 11, 0.2, 0.2):  # (1 + t) / (10 + t), at most ema_decay
        before = np.asarray(state.ema["target_embedding"]["matrix"])
        state, _ = run.train_step(state, batch())
        now = np.asarray(state.parameters["target_embedding"]["matrix"])
        np.testing.assert_allclose(
            state.ema["target_embedding"]["matrix"], decay * before + (1 - decay) * now, atol=1e-6
        )


def test_the_moving_average_ignores_a_skipped_step() -> None:
    """The skipped step does not change it, and the next step has the decay of a first step."""
    run = step_functions(changed(CONFIG, optimizer={"ema_decay": 0.2}))
    good, broken = run.init(), run.init()
    embedding = broken.parameters["target_embedding"]
    embedding["matrix"] = np.full(embedding["matrix"].shape, np.nan, np.float32)
    state, metrics = run.train_step(broken, batch())
    assert int(metrics.bad_steps) == 1 and int(state.step) == 1
    chex.assert_trees_all_equal(state.ema, good.ema)
    before = np.asarray(good.ema["target_embedding"]["matrix"])
    state = dataclasses.replace(state, parameters=good.parameters)
    state, _ = run.train_step(state, batch())
    now = np.asarray(state.parameters["target_embedding"]["matrix"])
    np.testing.assert_allclose(
        state.ema["target_embedding"]["matrix"], 2 / 11 * before + 9 / 11 * now, atol=1e-6
    )
    assert np.abs(now - before).max() > 1e-3


def test_first_update_has_the_size_of_the_learning_rate() -> None:
    """Adam's first step is the learning rate times the gradient's sign."""
    run = step_functions(CONFIG)
    before = run.init().parameters["target_embedding"]["matrix"]
    state, metrics = run.train_step(run.init(), batch())
    step = np.abs(np.asarray(state.parameters["target_embedding"]["matrix"]) - np.asarray(before))
    np.testing.assert_allclose(step[4:].max(), metrics.learning_rate, rtol=1e-2)
    np.testing.assert_allclose(metrics.learning_rate, 16**-0.5 * 10**-1.5, rtol=1e-5)


@pytest.mark.devices(8)
def test_mesh_errors() -> None:
    with pytest.raises(UserError, match="expected a product of 8, the number of devices"):
        make_mesh(MeshConfig(data=3))
    with pytest.raises(UserError, match=r"multiple of mesh.data x mesh.fsdp x .* = 8"):
        check_rows(make_mesh(MeshConfig()), 12)
    with pytest.raises(UserError, match=r"is 24; expected .* x optimizer.accumulate_steps = 16"):
        check_rows(make_mesh(MeshConfig()), 24, 2)
    check_rows(make_mesh(MeshConfig()), 32, 2)
    run = step_functions(CONFIG, 8)
    with pytest.raises(UserError, match=r"rows in the batch is 12; expected a multiple .* = 8"):
        run.train_step(run.abstract_state, batch(rows=12))
    with pytest.raises(UserError, match=r"rows in the batch is 12; expected a multiple .* = 8"):
        run.eval_step(run.abstract_state.parameters, batch(rows=12))
    with pytest.raises(UserError, match="mesh.tensor is 8; expected a divisor"):
        step_functions(changed(CONFIG, model={"num_heads": 4}, mesh=MeshConfig(tensor=8)), 8)
    with pytest.raises(UserError, match="mesh.fsdp is 3; expected a divisor of model.d_model"):
        step_functions(changed(CONFIG, mesh=MeshConfig(fsdp=3)), 3)


@pytest.mark.devices(8)
def test_optimizer_state_is_sharded_like_its_parameters() -> None:
    mesh = make_mesh(MeshConfig(fsdp=8))
    abstract = jax.eval_shape(step_functions(CONFIG).init)
    shardings = state_shardings(abstract, mesh)
    parameters = jax.tree.leaves(jax.tree.map(lambda s: s.spec, shardings.parameters))
    moments = jax.tree.leaves(jax.tree.map(lambda s: s.spec, shardings.optimizer[1].mu))
    assert parameters == moments
    assert sum("fsdp" in spec for spec in parameters) >= 10


@pytest.mark.devices(8)
def test_data_and_fsdp_axes_exchange_no_activations() -> None:
    """They exchange parameters and gradients. Of a batch, only the gradient of the embeddings needs
    an exchange, which is smaller than the output of one layer.
    """
    model = {"vocab_size": 256, "d_model": 64, "d_ff": 256}
    model |= {"attention_dropout": 0.1, "feed_forward_dropout": 0.1}
    config = changed(DROPPING, model=model, mesh=MeshConfig(2, 4))
    crossing = collectives(compiled_step(step_functions(config, 8), ROWS))
    layer_mb = ROWS / 8 * 16 * config.model.d_model * 4 / 1e6  # one layer's output on one device
    assert sum(figures["mb"] for figures in crossing.values()) < layer_mb


def test_compiler_options_exist() -> None:
    """XLA knows the same options on every platform, and unknown options are an error."""
    for options in step_module.COMPILER_OPTIONS.values():
        assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2


@pytest.fixture
def interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Interpret the training step's GPU kernels on CPUs. Collects the names of traced kernels."""
    traced: set[str] = set()

    def interpreted(name: str, kernel: Any, *given: Any, **settings: Any) -> Any:
        traced.add(name)
        return kernel(*given, **settings, interpret=True)

    for module, name in ((attention_kernel, "short_attention"), (norm_kernel, "residual_norm")):
        monkeypatch.setattr(module, name, partial(interpreted, name, getattr(module, name)))
    monkeypatch.setattr(gpu, "runs_kernels", lambda: True)
    monkeypatch.setattr(attention_kernel, "runs_kernels", lambda: True)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, cuda, default: cuda(*x))
    monkeypatch.setattr(step_module, "shared_functions", lru_cache(shared_functions.__wrapped__))
    return traced


@pytest.mark.devices(8)
def test_kernels_on_several_devices_give_the_same_losses(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels draw the same dropout masks, but round to bfloat16 in slightly different places."""
    monkeypatch.setattr(matmul, "_on_cpu", lambda: False)  # activations are bfloat16
    config = changed(DROPPING, model={"d_model": 128, "dtype": "bfloat16"})
    first = jax.tree.map(np.asarray, step_functions(config).init())

    def losses(config: Config, devices: int) -> list[float]:
        run = step_functions(config, devices)
        state, sums = (
            jax.device_put(first, jax.tree.map(lambda x: x.sharding, run.abstract_state)),
            [],
        )
        for step in range(2):
            state, metrics = run.train_step(state, batch(step))
            sums.append(float(metrics.sums.loss))
        return sums

    plain = losses(config, 1)
    traced = request.getfixturevalue("interpreted_kernels")
    together = losses(changed(config, mesh=MeshConfig(2, 2, 2)), 8)
    assert traced == {"short_attention", "residual_norm"} and together != plain
    np.testing.assert_allclose(together, plain, rtol=2e-3)
