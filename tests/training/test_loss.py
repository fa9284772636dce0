"""Chunked loss compared with a plain loss: gradients, padding, chunk sizes, devices, backends."""

import re
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from reference import against_reference

from transformer_jax.devices.sharding import batch_sharding, make_mesh, replicated
from transformer_jax.errors import UserError
from transformer_jax.settings.config import MeshConfig
from transformer_jax.training import loss as loss_module
from transformer_jax.training.loss import LossSums, _loss, _StaticArguments
from transformer_jax.training.two_passes import TwoPasses

B, T, D, V = 3, 7, 8, 19

against_plain = partial(
    against_reference, tolerance={"rtol": 1e-5}, of_gradients={"rtol": 1e-4, "atol": 1e-5}
)


@pytest.fixture(params=["cpu", "gpu"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compute as on this backend, on the available devices."""
    monkeypatch.setattr(jax, "default_backend", lambda: request.param)
    return request.param


def smoothed_cross_entropy(*args: Any, max_logits: int | None = None, **options: Any) -> LossSums:
    """Compute the loss in chunks of about this many logits."""
    with patch.object(loss_module, "MAX_LOGITS", max_logits):
        return loss_module.smoothed_cross_entropy(*args, **options)


def _normal(seed: int, *shape: int) -> jax.Array:
    """NumPy's numbers, because JAX would compile a function for each shape."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def _tokens(seed: int, *shape: int, low: int = 0, high: int = V) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape, dtype=np.int32)


def _inputs() -> tuple[jax.Array, jax.Array, jax.Array]:
    target = _tokens(0, B, T, low=1)
    target[1, 4:] = target[2] = 0
    return _normal(1, B, T, D), _normal(2, V, D), jnp.asarray(target)


def _plain(hidden: jax.Array, matrix: jax.Array, target: jax.Array, epsilon: float) -> jax.Array:
    log_probs = jax.nn.log_softmax(jnp.einsum("BTD,VD->BTV", hidden, matrix))
    wanted = (1 - epsilon) * jax.nn.one_hot(target, V) + epsilon / V
    return -((wanted * log_probs).sum(axis=-1) * (target != 0)).sum()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("epsilon", "max_logits"),
    [
        *((0.0, 3 * B * V), (0.1, None)),
        *(pytest.param(0.1, x, marks=pytest.mark.exhaustive) for x in (1, 2 * B * V)),
    ],
)
def test_value_and_gradient_equal_the_plain_loss(epsilon: float, max_logits: int | None) -> None:
    hidden, matrix, target = _inputs()

    def ours(h: jax.Array, m: jax.Array) -> jax.Array:
        return smoothed_cross_entropy(
            h, m, target, label_smoothing=epsilon, max_logits=max_logits
        ).loss

    against_plain(ours, lambda h, m: _plain(h, m, target, epsilon), (hidden, matrix))


def test_types_of_target_ids() -> None:
    hidden, _, target = _inputs()
    matrix = _normal(3, 300, D)  # more tokens than an 8-bit type can name

    @jax.jit
    @jax.value_and_grad
    def loss(hidden: jax.Array, target: jax.Array) -> jax.Array:
        return smoothed_cross_entropy(hidden, matrix, target).loss

    expected = loss(hidden, target)
    for dtype in (jnp.uint8, jnp.int8, jnp.uint16):
        jax.tree.map(np.testing.assert_array_equal, loss(hidden, target.astype(dtype)), expected)
    for outside in (-1, -100, 300):
        assert np.isnan(loss(hidden, target.at[0, 0].set(outside))[0])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("max_logits", [2 * B * V, 10**6])
def test_value_and_gradient_with_a_bias(max_logits: int) -> None:
    hidden, matrix, target = _inputs()
    bias = _normal(9, V)

    # a bias is the weight of a constant feature
    def plain(h: jax.Array, m: jax.Array, b: jax.Array) -> jax.Array:
        ones = jnp.ones((B, T, 1))
        return _plain(
            jnp.concatenate([h, ones], axis=2),
            jnp.concatenate([m, b[:, None]], axis=1),
            target,
            0.1,
        )

    def ours(h: jax.Array, m: jax.Array, b: jax.Array) -> jax.Array:
        return smoothed_cross_entropy(h, m, target, max_logits=max_logits, bias_V=b).loss

    against_plain(ours, plain, (hidden, matrix, bias))


def _plain_r_drop(
    hidden: jax.Array, matrix: jax.Array, target: jax.Array, alpha: float
) -> jax.Array:
    log_p, log_q = jax.nn.log_softmax(jnp.einsum("PBTD,VD->PBTV", hidden, matrix))
    kl_pq = (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    kl_qp = (jnp.exp(log_q) * (log_q - log_p)).sum(axis=-1)
    divergence = (alpha / 2 * (kl_pq + kl_qp) * (target != 0)).sum()
    return (
        _plain(hidden[0], matrix, target, 0.1) + _plain(hidden[1], matrix, target, 0.1) + divergence
    )


def _plain_simcut(
    hidden: jax.Array, matrix: jax.Array, target: jax.Array, alpha: float
) -> jax.Array:
    log_p, log_q = jax.nn.log_softmax(jnp.einsum("PBTD,VD->PBTV", hidden, matrix))
    kl_pq = (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    return 2 * (_plain(hidden[0], matrix, target, 0.1) + alpha * (kl_pq * (target != 0)).sum())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    "max_logits",
    [6 * B * V, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in (1, 10**6))],
)
@pytest.mark.parametrize("name", ["r_drop", "simcut"])
def test_r_drop_and_simcut_add_the_divergence_of_two_passes(max_logits: int, name: Any) -> None:
    """With SimCut, only the first pass counts in the other sums. Chunk sizes may or may not divide
    the number of positions.
    """
    first, matrix, target = _inputs()
    second = np.asarray(first) + 0.3 * np.asarray(_normal(5, *first.shape))
    side_by_side = np.stack([first, second], axis=1).reshape(2 * B, T, D)
    twice = np.repeat(target, 2, axis=0)

    def ours(h: jax.Array, m: jax.Array) -> jax.Array:
        return smoothed_cross_entropy(
            h, m, twice, max_logits=max_logits, passes=TwoPasses(name, 3.0)
        ).loss

    def plain(h: jax.Array, m: jax.Array) -> jax.Array:
        objective = _plain_r_drop if name == "r_drop" else _plain_simcut
        return objective(h.reshape(B, 2, T, D).swapaxes(0, 1), m, target, 3.0)

    against_plain(ours, plain, (side_by_side, matrix))

    @jax.jit
    def both(h: jax.Array, m: jax.Array) -> list[LossSums]:
        plain = smoothed_cross_entropy(h, m, twice, max_logits=max_logits)
        if name == "simcut":
            first = smoothed_cross_entropy(h[::2], m, target, max_logits=max_logits)
            plain = jax.tree.map(lambda x: 2 * x, first)
        added = smoothed_cross_entropy(
            h, m, twice, max_logits=max_logits, passes=TwoPasses(name, 3.0)
        )
        return [added, plain]

    sums, without = both(side_by_side, matrix)
    np.testing.assert_allclose(sums[1:], without[1:], rtol=1e-6)
    assert sums.loss > without.loss + 1


@pytest.mark.usefixtures("backend")
def test_sums_beside_the_loss() -> None:
    hidden, matrix, target = _inputs()
    logits = np.einsum("BTD,VD->BTV", hidden, matrix)
    predicted, target = logits.argmax(axis=-1), np.asarray(target)
    of_label = np.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    nll = ((np.log(np.exp(logits).sum(axis=-1)) - of_label) * (target != 0)).sum()

    def ours(h: jax.Array) -> LossSums:
        return smoothed_cross_entropy(h, matrix, target, max_logits=60)

    for sums in (jax.jit(ours)(hidden), jax.jit(lambda h: jax.vjp(ours, h)[0])(hidden)):
        np.testing.assert_allclose(sums.nll, nll, rtol=1e-5)
        assert int(sums.correct) == int(((predicted == target) & (target != 0)).sum())
        assert int(sums.tokens) == int((target != 0).sum())


def test_gradient_is_zero_at_padding() -> None:
    hidden, matrix, target = _inputs()

    @jax.jit
    @jax.grad
    def gradient_of(h: jax.Array) -> jax.Array:
        return smoothed_cross_entropy(h, matrix, target, max_logits=60).loss

    gradient = np.asarray(gradient_of(hidden))
    assert (gradient[np.asarray(target) == 0] == 0).all()


@pytest.mark.usefixtures("backend")
def test_large_logits_stay_finite() -> None:
    hidden, matrix, target = _inputs()
    loss, gradient = jax.jit(
        jax.value_and_grad(lambda h: smoothed_cross_entropy(h, matrix, target, max_logits=60).loss)
    )(1e4 * np.asarray(hidden))
    assert np.isfinite(loss) and np.isfinite(gradient).all()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("vocab_size", [19, 24])
def test_tokens_that_a_bias_forbids(vocab_size: int) -> None:
    """More forbidden tokens in a row than one GPU thread reads at once."""
    hidden, _, target = _inputs()
    matrix, target = np.asarray(_normal(7, vocab_size, D)), np.minimum(target, 2)
    forbidden = np.where(np.arange(vocab_size) < 3, 0.0, -np.inf).astype(np.float32)

    def losses(m: jax.Array, bias_V: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        options: dict[str, Any] = {"label_smoothing": 0.0, "bias_V": bias_V}
        sums = smoothed_cross_entropy(hidden, m, target, **options)
        return sums.loss, sums.nll

    _, allowed = jax.jit(losses)(matrix[:3])
    gradient, found = jax.jit(jax.grad(losses, has_aux=True))(matrix, forbidden)
    np.testing.assert_allclose(found, allowed, rtol=1e-6)
    assert np.isfinite(gradient).all() and not np.asarray(gradient)[3:].any()


@pytest.mark.devices(8)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    "passes", [None, TwoPasses("r_drop", 3.0), TwoPasses("simcut", 3.0)], ids=str
)
def test_rows_on_several_devices_change_nothing(passes: TwoPasses | None) -> None:
    """Devices communicate after the last chunk, not after each."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    hidden, matrix, bias = _normal(1, 8, T, D), _normal(2, V, D), _normal(3, V)
    target = _tokens(4, 8, T)
    if passes:
        target[1::2] = target[::2]

    def value_and_gradient(mesh: Mesh | None) -> jax.stages.Wrapped:
        def loss(h: jax.Array, m: jax.Array, b: jax.Array) -> jax.Array:
            return smoothed_cross_entropy(
                h, m, target, max_logits=3 * V, bias_V=b, mesh=mesh, passes=passes
            ).loss

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))

    expected = value_and_gradient(None)(hidden, matrix, bias)
    spread = (
        jax.device_put(hidden, batch_sharding(mesh)),
        *jax.device_put((matrix, bias), replicated(mesh)),
    )
    compiled = value_and_gradient(mesh).lower(*spread).compile()
    for got, want in zip(
        jax.tree.leaves(compiled(*spread)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert compiled(*spread)[1][0].sharding.spec[0] == ("data", "fsdp")
    parts = re.split(r"\n(?=%|ENTRY)", compiled.as_text())
    chunk = [
        part
        for part in parts
        if not part.startswith("ENTRY") and re.search(rf"f32\[{V},{D}\]", part)
    ]
    assert any("dot(" in part for part in chunk), "no loop over chunks was found"
    assert not any("all-reduce" in part or "all-gather" in part for part in chunk)


@pytest.mark.devices(8)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("mesh", "vocab_size"),
    [
        pytest.param(MeshConfig(tensor=8), 1000, marks=pytest.mark.exhaustive),
        (MeshConfig(2, 2, 2), 1000),
        (MeshConfig(tensor=8), 1001),
    ],
    ids=str,
)
def test_devices_along_tensor_share_the_vocabulary(mesh: MeshConfig, vocab_size: int) -> None:
    """They compute different logits: same sums and gradients with less memory. If the number of
    devices does not divide the vocabulary, each device computes all logits.
    """
    devices, hidden = make_mesh(mesh), _normal(1, 8, 32, D)
    matrix, bias = _normal(2, vocab_size, D), _normal(3, vocab_size)
    target = _tokens(4, 8, 32, high=vocab_size)
    target[1::2] = target[::2]

    def compiled(mesh: Mesh | None, passes: TwoPasses | None) -> tuple[Any, jax.stages.Compiled]:
        def loss(h: jax.Array, m: jax.Array, b: jax.Array, t: jax.Array) -> Any:
            sums = smoothed_cross_entropy(h, m, t, bias_V=b, mesh=mesh, passes=passes)
            return sums.loss, sums

        inputs: Any = hidden, matrix, bias, target
        if mesh is not None:
            rows, everywhere = batch_sharding(mesh), replicated(mesh)
            inputs = jax.device_put(inputs, (rows, everywhere, everywhere, rows))
        function = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
        return inputs, function.lower(*inputs).compile()

    for passes in (None, TwoPasses("r_drop", 3.0), TwoPasses("simcut", 0.75)):
        inputs, alone = compiled(None, passes)
        spread, together = compiled(devices, passes)
        found, expected = together(*spread), alone(*inputs)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
        outside = target.copy()
        outside[0, 0] = vocab_size
        (loss, _), _ = together(*spread[:3], jax.device_put(outside, spread[3].sharding))
        assert np.isnan(loss)
    width = vocab_size // (1 if vocab_size % mesh.tensor else mesh.tensor)
    widths = set(map(int, re.findall(r"f32\[\d+,(\d+)\]", together.as_text())))
    assert {width, vocab_size} & widths == {width}
    logits_in_memory = together.memory_analysis().temp_size_in_bytes / (4 * target.size * width)
    assert logits_in_memory * mesh.data * mesh.fsdp < 8


@pytest.mark.cpu("on a GPU, cuBLAS has a workspace of 34 MB")
def test_temporaries_need_an_eighth_of_the_memory_of_all_logits() -> None:
    vocab_size, d_model, tokens = 8000, 32, (64, 32)
    shapes = [
        jax.ShapeDtypeStruct((*tokens, d_model), jnp.float32),
        jax.ShapeDtypeStruct((vocab_size, d_model), jnp.float32),
        jax.ShapeDtypeStruct(tokens, jnp.int32),
    ]
    compiled = (
        jax.jit(
            jax.grad(
                lambda h, m, t: smoothed_cross_entropy(h, m, t, max_logits=2**20).loss,
                argnums=(0, 1),
            )
        )
        .lower(*shapes)
        .compile()
    )
    all_logits = 4 * tokens[0] * tokens[1] * vocab_size
    assert compiled.memory_analysis().temp_size_in_bytes <= all_logits / 8


def test_only_the_loss_has_a_gradient() -> None:
    hidden, matrix, target = _inputs()
    with pytest.raises(UserError, match="nll has no gradient"):
        jax.grad(lambda h: smoothed_cross_entropy(h, matrix, target).nll)(hidden)


def test_a_gradient_that_does_not_use_the_loss_is_zero() -> None:
    """For example of a function that only divides by the number of tokens."""
    hidden, matrix, target = _inputs()

    def loss_of(count: str) -> Any:
        def f(h: jax.Array, m: jax.Array) -> jax.Array:
            sums = smoothed_cross_entropy(h, m, target)
            return (h**2).sum() / getattr(sums, count)

        return f

    for count in ("tokens", "correct"):
        value = getattr(smoothed_cross_entropy(hidden, matrix, target), count)
        d_hidden, d_matrix = jax.grad(loss_of(count), argnums=(0, 1))(hidden, matrix)
        np.testing.assert_allclose(d_hidden, 2 * hidden / value, rtol=1e-6)
        assert not d_matrix.any()


def test_bfloat16_gradients_do_not_depend_on_the_size_of_chunks(backend: str) -> None:
    """Gradients of the matrix are summed over chunks in float32. Logits are multiples of 1/2, which
    bfloat16 represents exactly, so they do not depend on the order of their sums.
    """
    hidden = jnp.round(_normal(3, 4, 32, 16)).astype(jnp.bfloat16)
    matrix = jnp.round(_normal(4, 64, 16)) / 2
    target = _tokens(5, 4, 32, low=1, high=64)
    dtype = jnp.dtype(jnp.bfloat16)
    gradients = []
    for max_logits in (64, 5 * 64, 10**6):  # chunks of 1, 5 and all positions
        static = _StaticArguments(0.1, 0, max_logits, dtype, None, None, backend)
        gradients.append(
            jax.grad(lambda h, m, s=static: _loss(s, target, (h, m, None)).loss, (0, 1))(
                hidden, matrix
            )
        )
    *_, (d_hidden, d_matrix) = gradients
    for d_hidden_in_chunks, d_matrix_in_chunks in gradients[:-1]:
        # to one bfloat16 rounding
        np.testing.assert_allclose(
            d_hidden_in_chunks.astype(jnp.float32), d_hidden.astype(jnp.float32), rtol=2**-7
        )
        error = np.abs(np.asarray(d_matrix_in_chunks) - np.asarray(d_matrix)).max()
        assert error < 1e-5 * np.abs(np.asarray(d_matrix)).max()


@pytest.mark.parametrize(("vocab_size", "r_drop"), [(499, 0.0), (504, 2.0)])
def test_bfloat16_logits(vocab_size: int, r_drop: float, backend: str) -> None:
    """Only the logits are rounded: sums and gradients equal those of a plain loss on rounded
    logits. Logits up to 8 have rounding errors up to 8 / 2^9 = 0.016, so log-probabilities and
    relative probabilities differ from exact ones by up to twice that.
    """
    hidden, matrix = _normal(3, 4, 9, 32), 0.3 * np.asarray(_normal(4, vocab_size, 32))
    target = _tokens(5, 4, 9, high=vocab_size)
    target[1::2] = target[::2]
    real, tokens = target != 0, int((target != 0).sum())
    passes = TwoPasses("r_drop", r_drop) if r_drop else None

    @jax.jit
    def exact_and_rounded(h: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = jnp.einsum("BTD,VD->BTV", h, m)
        return logits, jax.lax.reduce_precision(logits, exponent_bits=8, mantissa_bits=7)

    logits, rounded = map(np.asarray, exact_and_rounded(hidden, matrix))
    assert 6 < np.abs(logits).max() < 8
    assert np.abs(rounded - logits).max() > 0.01

    @jax.jit
    @jax.value_and_grad
    def plain(logits: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(logits)
        log_q = log_p.reshape(2, 2, 9, -1)[:, ::-1].reshape(log_p.shape)
        wanted = 0.9 * jax.nn.one_hot(target, vocab_size) + 0.1 / vocab_size
        divergence = r_drop / 2 * jnp.exp(log_p) * (log_p - log_q)
        return ((divergence - wanted * log_p).sum(axis=-1) * real).sum()

    def ours(h: jax.Array, m: jax.Array) -> tuple[jax.Array, LossSums]:
        settings = _StaticArguments(
            0.1,
            0,
            5 * 500,
            jnp.dtype(jnp.bfloat16),
            None,
            passes,
            backend,
        )
        sums = _loss(settings, target, (h, m, None))
        return sums.loss, sums

    of_ours = jax.jit(jax.grad(ours, argnums=(0, 1), has_aux=True))
    (d_hidden, d_matrix), sums = of_ours(hidden, matrix)
    plain_loss, d_logits = map(np.asarray, plain(rounded))
    # the smoothed loss uses the mean of the exact logits
    exact_mean = 0.1 * ((rounded.mean(axis=-1) - logits.mean(axis=-1)) * real).sum()
    np.testing.assert_allclose(sums.loss, plain_loss + exact_mean, rtol=1e-5)
    np.testing.assert_allclose(
        d_hidden, np.einsum("BTV,VD->BTD", d_logits, matrix), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        d_matrix, np.einsum("BTV,BTD->VD", d_logits, hidden), rtol=1e-4, atol=1e-5
    )
    label = np.take_along_axis(rounded, target[..., None], axis=-1)[..., 0]
    assert int(sums.correct) == int(((label == rounded.max(axis=-1)) & real).sum())
    assert int(sums.tokens) == tokens
    # difference from exact logits
    exact = jax.jit(lambda h, m: smoothed_cross_entropy(h, m, target, passes=passes))(
        hidden, matrix
    )
    assert abs(sums.nll - exact.nll) / tokens < 0.032
    assert abs(sums.loss - exact.loss) / tokens < 0.032 * (1 + r_drop)
    _, of_exact = plain(logits)
    assert np.linalg.norm(d_logits - of_exact) < 0.032 * (1 + r_drop) * np.linalg.norm(of_exact)


def _lowered(
    tokens: tuple[int, int],
    vocab_size: int,
    dtype: str = "bfloat16",
    *,
    r_drop: float = 0.0,
    device: Sharding | None = None,
) -> jax.stages.Lowered:
    """The gradient with respect to both inputs, at the width of a base model."""
    passes = TwoPasses("r_drop", r_drop) if r_drop else None
    of_loss = jax.grad(
        lambda h, m, t: smoothed_cross_entropy(h, m, t, passes=passes).loss, argnums=(0, 1)
    )
    hidden = jax.ShapeDtypeStruct((*tokens, 512), dtype, sharding=device)
    matrix = jax.ShapeDtypeStruct((vocab_size, 512), jnp.float32, sharding=device)
    target = jax.ShapeDtypeStruct(tokens, jnp.int32, sharding=device)
    return jax.jit(of_loss).lower(hidden, matrix, target)


def test_gpus_read_the_logits_once_for_maximum_and_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    program = _lowered((784, 32), 37_000).as_text()
    reductions = re.findall(r"stablehlo\.reduce\(.*tensor<6272x(?:4625|37000)xf32>.*", program)
    [maximum_and_sum] = reductions
    assert maximum_and_sum.count("tensor<6272x4625xf32>") == 2
    assert not re.search(r"stablehlo\.pad.*(low|high) = \[[0, ]*[1-9]", program)


@pytest.mark.parametrize("vocab_size", [32_000, 37_000, 36_997, 58_101])
def test_compiled_for_an_h200(
    vocab_size: int, h200: jax.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without padding or split sums that a second kernel adds up. The gradient with respect to the
    logits reuses their memory.
    """
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    lowered = _lowered((784, 32), vocab_size, device=SingleDeviceSharding(h200))
    compiled = lowered.compile({"xla_gpu_autotune_level": 0})
    program = compiled.as_text()
    assert f"bf16[6272,{vocab_size}]" in program
    assert "pad_fusion" not in program
    assert not re.search(rf"f32\[\d+,(6272|{vocab_size}),512\]", program)
    all_logits = 4 * 784 * 32 * vocab_size
    assert compiled.memory_analysis().temp_size_in_bytes <= all_logits / 6


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "dtype", "r_drop", "length"),
    [
        ((784, 32), 37_000, "bfloat16", 0.0, 6272),
        ((784, 32), 32_000, "bfloat16", 0.0, 6272),
        ((784, 32), 58_101, "bfloat16", 0.0, 6272),
        ((1568, 32), 37_000, "bfloat16", 2.0, 6272),
        ((1568, 32), 37_000, "bfloat16", 0.0, 12_544),
        ((784, 32), 37_000, "float32", 0.0, 3136),
        ((781, 31), 37_000, "bfloat16", 0.0, 6053),  # 24,211 positions, padded by one
        ((256, 32), 10_000, "bfloat16", 0.0, 8192),  # too few logits to split
    ],
)
def test_chunks_of_accelerators(
    tokens: tuple[int, int],
    vocab_size: int,
    dtype: str,
    r_drop: float,
    length: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal chunks of thousands of positions, which need at most a sixth of the memory of all
    logits in float32, unless that is little.
    """
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    program = _lowered(tokens, vocab_size, dtype, r_drop=r_drop).as_text()
    stored = "bf16" if dtype == "bfloat16" else "f32"
    assert set(re.findall(rf"tensor<(\d+)x{vocab_size}x{stored}>", program)) == {str(length)}
    in_memory = length * vocab_size * (2 if stored == "bf16" else 4) * (2 if r_drop else 1)
    assert in_memory <= max(2**28, 4 * tokens[0] * tokens[1] * vocab_size / 6)


def test_logits_have_the_type_of_matmuls_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = "tensor<128x1000xbf16>"
    assert stored not in _lowered((8, 16), 1000, "float32").as_text()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert stored not in _lowered((8, 16), 1000, "float32").as_text()
    assert stored in _lowered((8, 16), 1000, "bfloat16").as_text()
