"""Comparison with PyTorch: outputs, gradients, losses and translations for the same weights.

``python -m pytest tests/export/test_pytorch.py -s`` prints a table (docs/log has one).
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from random_weights import random_transformer
from reference_search import Rules, reference_search
from torch import Tensor, nn
from torch.nn import functional as F

from transformer_jax import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    BeamSearch,
    ModelConfig,
    OptimizerConfig,
    Transformer,
    UserError,
    attention_mask,
    dot_product_attention,
    make_optimizer,
    search,
    sinusoidal_positions,
    smoothed_cross_entropy,
)
from transformer_jax.export.pytorch import TorchModules, from_torch, to_torch

# nn.Transformer warns about most of its own settings.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")

D, H, V = 32, 4, 40
SOURCE_BS = np.array([[5, 6, 7, 8, 9, 2], [10, 11, 2, 0, 0, 0], [12, 2, 0, 0, 0, 0]])
TARGET_BT = np.array([[7, 9, 11, 13, 2], [15, 5, 2, 0, 0], [2, 0, 0, 0, 0]])


class Seq2Seq(nn.Module):
    """The usual model around ``nn.Transformer``; computes logits [B, T, V]."""

    def __init__(self, parts: TorchModules):
        super().__init__()
        self.transformer, self.source, self.target, self.output, positions = parts
        if isinstance(positions, str):
            table_LD = torch.tensor(sinusoidal_positions(64, D))
            positions = table_LD, table_LD
        self.positions = positions

    def forward(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        inputs_BT = F.pad(target_BT[:, :-1], (1, 0), value=BOS_ID)
        length = target_BT.shape[1]
        padding_BS = source_BS == PAD_ID
        source_LD, target_LD = self.positions
        hidden_BTD = self.transformer(
            self.source(source_BS) * D**0.5 + source_LD[: source_BS.shape[1]],
            self.target(inputs_BT) * D**0.5 + target_LD[:length],
            tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),
            src_key_padding_mask=padding_BS,
            memory_key_padding_mask=padding_BS,
        )
        return self.output(hidden_BTD)


def parts(*, share: str = "all", seed: int = 0, **settings: Any) -> TorchModules:
    """Random modules, including random biases and norms."""
    torch.manual_seed(seed)
    given = {"dropout": 0.0, "batch_first": True} | settings
    transformer = nn.Transformer(D, H, 2, 1, 48, **given)
    target = nn.Embedding(V, D)
    source = target if share in ("all", "embeddings") else nn.Embedding(V - 9, D)
    output = nn.Linear(D, V, bias=share in ("none", "embeddings"))
    if share in ("all", "target"):
        output.weight = target.weight
    with torch.no_grad():
        for parameter in transformer.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn(parameter.shape)
        for module in dict.fromkeys((source, target, output)):
            nn.init.normal_(module.weight, std=D**-0.5)
    return TorchModules(transformer, source, target, output, "interleaved")


def imported(given: TorchModules) -> Transformer:
    return from_torch(**given._asdict(), dtype="float32")


def apart(ours: Any, theirs: Any) -> float:
    """Largest difference, relative to the largest value."""
    ours, theirs = (x.detach().numpy() if isinstance(x, Tensor) else x for x in (ours, theirs))
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


FOUND: dict[str, dict[str, float]] = {}  # largest error of each unit, by column
COLUMNS = ("outputs", "gradients", "losses of 50 steps")


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Print the errors at the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads wait for each other
    yield
    torch.set_num_threads(threads)
    print(f"\n\n| | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}")
    for unit, errors in FOUND.items():
        cells = (f"{errors[column]:.1e}" if column in errors else "" for column in COLUMNS)
        print(f"| {unit} | {' | '.join(cells)} |")
    print(f"\ntorch {torch.__version__}, jax {jax.__version__}, {platform.machine()}")


def compare(unit: str, column: str, errors: list[float], *, limit: float) -> None:
    found = FOUND.setdefault(unit, {})
    found[column] = max(*errors, found.get(column, 0.0))
    assert max(errors) <= limit


def compare_gradients(unit: str, gradients: Any, like: Transformer, theirs: nn.Module) -> None:
    """Compare all of PyTorch's gradients with ours, by PyTorch's names."""
    ours = to_torch(nnx.merge(nnx.split(like, nnx.Param)[0], gradients))
    named = dict(Seq2Seq(ours).named_parameters())
    found = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    assert found
    errors = [apart(named[name], gradient) for name, gradient in found.items()]
    compare(unit, "gradients", errors, limit=1e-5)


# Units: our function of (model, x_BTD, memory_BSD), and theirs.

REAL_BS, REAL_BT = SOURCE_BS != PAD_ID, TARGET_BT != PAD_ID
FUTURE_TT = torch.ones(5, 5, dtype=torch.bool).triu(1)
NO_SOURCE_BS, NO_TARGET_BT = torch.tensor(~REAL_BS), torch.tensor(~REAL_BT)
SELF = attention_mask(REAL_BT.astype(int), REAL_BT.astype(int), causal=True)
CROSS = attention_mask(REAL_BT.astype(int), REAL_BS.astype(int))
OVER_SOURCE = attention_mask(REAL_BS.astype(int), REAL_BS.astype(int))


def causal_attention(transformer: nn.Transformer, x: Tensor, memory: Tensor) -> Tensor:
    attention = transformer.decoder.layers[0].self_attn
    return attention(x, x, x, key_padding_mask=NO_TARGET_BT, attn_mask=FUTURE_TT)[0]


def cross_attention(transformer: nn.Transformer, x: Tensor, memory: Tensor) -> Tensor:
    attention = transformer.decoder.layers[0].multihead_attn
    return attention(x, memory, memory, key_padding_mask=NO_SOURCE_BS)[0]


def decoder_layer(transformer: nn.Transformer, x: Tensor, memory: Tensor) -> Tensor:
    return transformer.decoder.layers[0](
        *(x, memory),
        tgt_mask=FUTURE_TT,
        tgt_key_padding_mask=NO_TARGET_BT,
        memory_key_padding_mask=NO_SOURCE_BS,
    )


UNITS: dict[str, tuple[Callable[..., jax.Array], Callable[..., Tensor]]] = {
    "attention, causal and padding mask": (
        lambda model, x, memory: model.decoder.layers[0].self_attention(x, x, SELF),
        causal_attention,
    ),
    "attention over the source, padding mask": (
        lambda model, x, memory: model.decoder.layers[0].cross_attention(x, memory, CROSS),
        cross_attention,
    ),
    "layer norm": (
        lambda model, x, memory: model.decoder.final_norm(x),
        lambda transformer, x, memory: transformer.decoder.norm(x),
    ),
    "encoder layer": (
        lambda model, x, memory: model.encoder.layers[1](memory, OVER_SOURCE),
        lambda transformer, x, memory: transformer.encoder.layers[1](
            memory, src_key_padding_mask=NO_SOURCE_BS
        ),
    ),
    "decoder layer": (
        lambda model, x, memory: model.decoder.layers[0](x, memory, SELF, CROSS),
        decoder_layer,
    ),
}


@pytest.mark.parametrize(
    ("unit", "settings"),
    [
        *((unit, {}) for unit in UNITS),
        ("encoder layer", {"norm_first": True, "activation": "gelu"}),
        ("decoder layer", {"norm_first": True, "activation": "gelu"}),
    ],
    ids=str,
)
def test_unit_agrees_in_outputs_and_gradients(unit: str, settings: dict[str, Any]) -> None:
    ours, theirs = UNITS[unit]
    given = parts(**settings)
    graph, parameters = nnx.split(imported(given), nnx.Param)
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal((3, length, D), np.float32) for length in (5, 6)]
    real_BL1 = (REAL_BS if unit == "encoder layer" else REAL_BT)[..., None]
    weight_BLD = real_BL1 * rng.standard_normal((*real_BL1.shape[:2], D), np.float32)

    def weighted(parameters: Any, arrays: Any) -> tuple[jax.Array, jax.Array]:
        out_BLD = ours(nnx.merge(graph, parameters), *arrays)
        return (out_BLD * weight_BLD).sum(), out_BLD * real_BL1

    of = jax.jit(jax.grad(weighted, argnums=(0, 1), has_aux=True))
    (gradients, of_arrays), out_BLD = of(parameters, arrays)
    tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
    theirs_BLD = theirs(given.transformer, *tensors)
    (theirs_BLD * torch.tensor(weight_BLD)).sum().backward()

    name = unit + (", pre-norm, GELU" if settings else "")
    compare(name, "outputs", [apart(out_BLD, theirs_BLD * torch.tensor(real_BL1))], limit=2e-6)
    compare_gradients(name, gradients, nnx.merge(graph, parameters), Seq2Seq(given))
    for x, tensor in zip(of_arrays, tensors, strict=True):
        if tensor.grad is not None:
            compare(name, "gradients", [apart(x, tensor.grad)], limit=1e-5)


def test_scaled_dot_product_attention() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, length, H, 8), np.float32) for length in (5, 6, 6))
    theirs_BHTK = F.scaled_dot_product_attention(
        *(torch.tensor(x).transpose(1, 2) for x in (q, k, v)),
        attn_mask=torch.tensor(REAL_BS)[:, None, None],
    )
    out_BTHK = dot_product_attention(q, k, v, jnp.asarray(REAL_BS)[:, None, None])
    errors = [apart(out_BTHK, theirs_BHTK.transpose(1, 2))]
    compare("F.scaled_dot_product_attention", "outputs", errors, limit=2e-6)


# The whole model.

VARIANTS: dict[str, dict[str, Any]] = {
    "post-norm, ReLU": {},
    "pre-norm, GELU": {"norm_first": True, "activation": "gelu", "share": "target"},
    "post-norm, GELU, no biases": {"activation": "gelu", "bias": False, "share": "embeddings"},
    "pre-norm, ReLU, no biases": {"norm_first": True, "bias": False, "share": "none"},
}


def their_loss(model: Seq2Seq) -> tuple[Tensor, Tensor]:
    target_BT = torch.tensor(TARGET_BT)
    logits_BTV = model(torch.tensor(SOURCE_BS), target_BT)
    loss = F.cross_entropy(
        logits_BTV.flatten(0, 1), target_BT.flatten(), ignore_index=PAD_ID, label_smoothing=0.1
    )
    return loss, logits_BTV


@pytest.mark.parametrize(
    "variant",
    [
        "post-norm, ReLU",
        pytest.param("pre-norm, ReLU, no biases", marks=pytest.mark.exhaustive),
        pytest.param("pre-norm, GELU", marks=pytest.mark.exhaustive),
        pytest.param("post-norm, GELU, no biases", marks=pytest.mark.exhaustive),
    ],
)
def test_whole_model_agrees_in_outputs_gradients_and_losses(variant: str) -> None:
    given, name = parts(**VARIANTS[variant]), f"whole model, {variant}"
    ours, theirs = imported(given), Seq2Seq(given)
    graph, parameters = nnx.split(ours, nnx.Param)
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=200), D)
    state = jax.jit(optimizer.init)(parameters)

    def mean_loss(parameters: Any) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graph, parameters)
        hidden_BTD = model.hidden(SOURCE_BS, TARGET_BT)
        sums = smoothed_cross_entropy(
            hidden_BTD, model.output_matrix_VD, jnp.asarray(TARGET_BT), bias_V=model.output_bias_V
        )
        return sums.loss / sums.tokens, model.logits(hidden_BTD)

    @jax.jit
    def step(parameters: Any, state: Any) -> tuple[Any, ...]:
        gradient = jax.value_and_grad(mean_loss, has_aux=True)
        (loss, logits_BTV), gradients = gradient(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss, logits_BTV, gradients

    adam = torch.optim.Adam(theirs.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    rate = torch.optim.lr_scheduler.LambdaLR(
        adam, lambda count: D**-0.5 * min((count + 1) ** -0.5, (count + 1) * 200**-1.5)
    )
    errors = []
    for number in range(50):
        parameters, state, our_loss, ours_BTV, gradients = step(parameters, state)
        adam.zero_grad()
        loss, theirs_BTV = their_loss(theirs)
        loss.backward()
        if number == 0:
            outputs = [apart(ours_BTV[REAL_BT], theirs_BTV[REAL_BT])]
            compare(name, "outputs", outputs, limit=2e-6)
            compare_gradients(name, gradients, ours, theirs)
        adam.step()
        rate.step()
        errors.append(apart(our_loss, loss.item()))
    assert loss.item() < 1.5, "nothing was learned"
    compare(name, "losses of 50 steps", errors, limit=5e-6)


def test_smoothed_cross_entropy() -> None:
    rng = np.random.default_rng(2)
    arrays = [rng.standard_normal(shape, np.float32) for shape in ((3, 5, D), (V, D), (V,))]

    def mean_loss(arrays: list[Any]) -> jax.Array:
        hidden_BTD, matrix_VD, bias_V = arrays
        sums = smoothed_cross_entropy(hidden_BTD, matrix_VD, jnp.asarray(TARGET_BT), bias_V=bias_V)
        return sums.loss / sums.tokens

    ours, gradients = jax.jit(jax.value_and_grad(mean_loss))(arrays)
    tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
    theirs = F.cross_entropy(
        F.linear(*tensors).flatten(0, 1),
        torch.tensor(TARGET_BT).flatten(),
        ignore_index=PAD_ID,
        label_smoothing=0.1,
    )
    theirs.backward()
    compare("smoothed cross-entropy", "outputs", [apart(ours, theirs.item())], limit=2e-6)
    errors = [apart(x, tensor.grad) for x, tensor in zip(gradients, tensors, strict=True)]
    compare("smoothed cross-entropy", "gradients", errors, limit=1e-5)


# Searches.


@pytest.mark.parametrize(
    ("variant", "seed", "beam_size"),
    [
        ("post-norm, ReLU", 5, 4),
        pytest.param("pre-norm, GELU", 4, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_reference_search_over_their_model_agrees(variant: str, seed: int, beam_size: int) -> None:
    given = parts(**(VARIANTS[variant] | {"share": "none"}), seed=seed)
    with torch.no_grad():
        for parameter in given.transformer.parameters():
            if parameter.ndim == 2:
                parameter *= 2.0  # different hypotheses that depend on the source
        given.output.bias[EOS_ID] += 2.5  # translations end before the limit
    ours, theirs = imported(given), Seq2Seq(given)
    rng = np.random.default_rng(beam_size)
    sources = [[*rng.integers(4, V - 9, rng.integers(2, 6)), EOS_ID] for _ in range(12)]
    source_BS = np.array([line + [PAD_ID] * (6 - len(line)) for line in sources])
    method = BeamSearch(bos_id=BOS_ID, eos_id=EOS_ID, pad_id=PAD_ID, beam_size=beam_size)

    @jax.jit
    def found(source_BS: jax.Array) -> Any:
        size = {"beam_size": beam_size, "max_length": 9}
        cache = ours.start_cache(ours.encode(source_BS), source_BS != PAD_ID, **size)
        return search(
            *(method, ours.decode_step, cache),
            limit_B=jnp.full(len(sources), 9),
            max_length=9,
            reorder=lambda cache, parents_BW: cache.reorder(parents_BW),
        )

    result = jax.device_get(found(source_BS))
    lengths, errors = set(), []
    for line, tokens_NL, lengths_N, scores_N in zip(
        *(sources, result.tokens_BNL, result.lengths_BN, result.scores_BN), strict=True
    ):
        source_1S = torch.tensor([line])

        def log_probs(tokens: tuple[int, ...], source_1S: Tensor = source_1S) -> np.ndarray:
            with torch.no_grad():
                logits_1TV = theirs(source_1S, torch.tensor([[*tokens, EOS_ID]]))
            return logits_1TV[0, -1].log_softmax(-1).numpy()

        best = reference_search(log_probs, Rules(max_length=9), beam_size=beam_size)
        ours_ = [tuple(t[:n].tolist()) for t, n in zip(tokens_NL, lengths_N, strict=True)]
        assert ours_ == [hypothesis.tokens for hypothesis in best]
        errors.append(apart(scores_N, [hypothesis.score for hypothesis in best]))
        lengths |= set(lengths_N.tolist())
    assert len(lengths) > 2
    kind = "greedy" if beam_size == 1 else "4-best"
    unit = f"{kind} of {len(sources)} sentences, {variant}: the same tokens; scores"
    compare(unit, "outputs", errors, limit=2e-6)


# Round trip, and unsupported models.


@pytest.mark.parametrize(
    "fields",
    [
        {},  # no attention biases, no final norms
        {
            **{"norm": "pre", "final_norm": False, "norm_bias": False},
            **{"num_decoder_layers": 1, "source_vocab_size": 30, "tie_embeddings": "target"},
            **{"activation": "gelu_tanh"},
        },
        {
            **{"tie_embeddings": "none", "softmax_bias": True, "positions": "learned"},
            **{"activation": "silu", "feed_forward_bias": False, "attention_dropout": 0.2},
        },
        {
            **{"tie_embeddings": "embeddings", "final_norm": True, "positions": "learned"},
            **{"attention_bias": True, "norm_epsilon": 1e-3, "feed_forward_dropout": 0.3},
            **{"activation": "gelu"},
        },
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_round_trip_through_pytorch(
    fields: dict[str, Any], logits: Callable[..., np.ndarray]
) -> None:
    sizes = {"vocab_size": V, "d_model": D, "d_ff": 48, "num_heads": H, "num_layers": 2}
    config = ModelConfig(**(sizes | {"max_positions": 16, "dtype": "float32"} | fields))
    model = random_transformer(config)
    state = nnx.state(model, nnx.Param)

    there = to_torch(model)
    theirs = Seq2Seq(there)
    logits_BTV = logits(model, SOURCE_BS, TARGET_BT)
    theirs.eval()
    for gradients in (True, False):  # without gradients, PyTorch may use a fused encoder
        with torch.set_grad_enabled(gradients):
            theirs_BTV = theirs(torch.tensor(SOURCE_BS), torch.tensor(TARGET_BT))
        assert apart(logits_BTV[REAL_BT], theirs_BTV[REAL_BT]) < 2e-6

    back = from_torch(**there._asdict(), dtype="float32")
    unused = {} if config.positions == "learned" else {"max_positions": 1024}
    biases = dict.fromkeys(("attention_bias", "feed_forward_bias", "norm_bias"), True)
    assert back.config == dataclasses.replace(config, **unused, **biases)
    returned = dict(nnx.to_flat_state(nnx.state(back, nnx.Param)))
    for path, x in nnx.to_flat_state(state):
        np.testing.assert_allclose(returned.pop(path)[...], x[...], rtol=1e-6, err_msg=str(path))
    assert all(path[-1] == "bias" and not x[...].any() for path, x in returned.items())


@pytest.mark.parametrize("tied", ["all", "embeddings", "target", "none"])
@pytest.mark.parametrize("positions", ["interleaved", "learned"])
def test_all_weights_train_in_pytorch_and_are_tied_as_ours(tied: str, positions: str) -> None:
    """Each matrix is one Parameter with its own memory, and the modules are in training mode."""
    sizes = {"vocab_size": V, "d_model": D, "d_ff": 48, "num_heads": H, "num_layers": 1}
    fields = {"tie_embeddings": tied, "softmax_bias": tied == "none", "max_positions": 16}
    model = random_transformer(ModelConfig(**sizes, **fields, positions=positions, dtype="float32"))
    before = jax.tree.map(np.array, nnx.state(model, nnx.Param))
    there = to_torch(model)
    theirs = Seq2Seq(there)
    assert all(module.training for module in theirs.modules())
    matrices = [there.source_embedding.weight, there.target_embedding.weight, there.output.weight]
    source, target, output = map(id, matrices)
    ties = {"all": (True, True), "embeddings": (True, False), "target": (False, True)}
    assert (source == target, target == output) == ties.get(tied, (False, False))
    assert source != output or tied == "all"

    loss, _ = their_loss(theirs)
    loss.backward()
    named = dict(theirs.named_parameters())
    assert {name for name, x in named.items() if not x.requires_grad or x.grad is None} == set()
    memory = [x.data_ptr() for x in named.values()]
    assert len({*memory}) == len(named)
    number = sum(x.size for x in jax.tree.leaves(before))
    tables = 0 if positions == "interleaved" else sum(x.numel() for x in {*there.positions})
    zeros = [name for name, x in named.items() if name.endswith("bias") and not x.any()]
    lacking = sum(named[name].numel() for name in zeros)  # biases that our model does not have
    assert sum(x.numel() for x in named.values()) + tables - lacking == number

    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    after = nnx.state(from_torch(**there._asdict(), dtype="float32"), nnx.Param)
    returned = dict(nnx.to_flat_state(after))
    for path, x in nnx.to_flat_state(before):
        moved = np.abs(returned[path][...] - x[...]).max()
        assert (moved > 1e-6) == ("position_matrix" not in path), path  # not a Parameter
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model, nnx.Param), before)  # a copy


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_floating_point_type_become_float32(dtype: torch.dtype) -> None:
    given = parts(share="none")
    for module in given[:4]:
        module.to(dtype)
    model = imported(given)
    matrix_VD = given.target_embedding.weight.detach().float().numpy()
    np.testing.assert_array_equal(model.target_embedding.matrix[...], matrix_VD)
    parameters = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert {parameter.dtype.name for parameter in parameters} == {"float32"}


def test_a_layer_without_a_bias_gets_zeros(logits: Callable[..., np.ndarray]) -> None:
    given = parts()
    given.transformer.encoder.layers[1].linear2.bias = None
    ours_BTV = logits(imported(given), SOURCE_BS, TARGET_BT)
    theirs_BTV = Seq2Seq(given)(torch.tensor(SOURCE_BS), torch.tensor(TARGET_BT))
    assert apart(ours_BTV[REAL_BT], theirs_BTV[REAL_BT]) < 2e-6


class OwnLayer(nn.TransformerEncoderLayer):
    """Might compute anything."""


def _set(place: str, value: Any) -> Callable[[TorchModules], None]:
    """Set an attribute of the transformer: ``encoder.layers.1.norm_first``."""

    def change(given: TorchModules) -> None:
        module, _, name = place.rpartition(".")
        setattr(given.transformer.get_submodule(module), name, value)

    return change


def _unknown_activation(given: TorchModules) -> None:
    for stack in (given.transformer.encoder, given.transformer.decoder):
        for layer in stack.layers:
            layer.activation = F.mish


ADDED_KEYS = nn.MultiheadAttention(D, H, add_bias_kv=True, batch_first=True)
NARROW_LAYER = nn.TransformerEncoderLayer(D, H, 24, 0.0, batch_first=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _set("encoder", nn.LSTM(D, D)),
            r"'LSTM' object has no attribute 'layers'\); expected a torch.nn.Tr",
        ),
        (
            _set("encoder.layers.1", OwnLayer(D, H, 48, batch_first=True)),
            r"encoder.layers.1 is .*\.OwnLayer\(.*; expected torch.nn.*.TransformerEncoderLayer\(",
        ),
        (
            _set("decoder.layers.0.norm2", nn.RMSNorm(D)),
            r"decoder.layers.0.norm2 is torch.nn.*.RMSNorm\(.*; expected .*.LayerNorm\(",
        ),
        (
            _set("encoder.layers.0.self_attn.more", nn.Linear(2, 2)),
            r"encoder.layers.0.self_attn.more is .*.Linear\(\); expected no module",
        ),
        (
            _set("decoder.norm.eps", 1e-6),
            r"transformer.decoder.norm is .*LayerNorm\(eps=1e-06\); .*LayerNorm\(eps=1e-05\)",
        ),
        (
            _set("encoder.layers.1.self_attn.num_heads", 2),
            "encoder.layers.1.self_attn is .*num_heads=2, .*; expected .*num_heads=4, ",
        ),
        (
            _set("encoder.layers.1", NARROW_LAYER),
            r"have shape \(24,\) for encoder.layers.1.linear1.bias; expected shape \(48,\)",
        ),
        (
            _set("encoder.norm", None),
            "transformer.decoder.norm is .*LayerNorm.*; expected no module",
        ),
        (_set("decoder.norm", None), "transformer.decoder.norm is missing; expected .*LayerNorm"),
        (_unknown_activation, "activation in .*encoder.layers.0 is .*mish.*; expected one of relu"),
        (
            _set("decoder.layers.0.multihead_attn", ADDED_KEYS),
            "have shape .* for decoder.layers.0.multihead_attn.bias_k; expected no tensor",
        ),
        (
            _set("decoder.layers.0.self_attn.add_zero_attn", True),
            "transformer.decoder.layers.0.self_attn is .*add_zero_attn=True",
        ),
    ],
)
def test_unsupported_modules_are_errors(
    change: Callable[[TorchModules], None], message: str
) -> None:
    given = parts()
    change(given)
    with pytest.raises(UserError, match=message):
        imported(given)


def test_a_module_as_activation_leaves_relu_in_the_decoder() -> None:
    given = parts(activation=nn.GELU())
    assert given.transformer.decoder.layers[0].activation is F.relu, "PyTorch has fixed it"
    message = "decoder.layers.0 is .*activation=relu.*; expected .*activation=gelu.* Pass"
    with pytest.raises(UserError, match=message):
        imported(given)
    for layer in given.transformer.decoder.layers:
        layer.__dict__["activation"] = lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5))
    assert imported(given).config.activation == "gelu"


def test_unsupported_embeddings_and_positions_are_errors() -> None:
    transformer, embedding, _, output, _ = parts(share="none")
    table_LD = torch.zeros(8, D)
    for settings, message in (
        ({"source_embedding": nn.Sequential(embedding)}, "source_embedding is a Sequential; expec"),
        ({"source_embedding": nn.Embedding(V, D, max_norm=1.0)}, "Embedding with max_norm; exp"),
        ({"output": nn.Linear(D, V + 1)}, r"\(41,\) for output.bias; expected shape \(31,\)"),
        ({"output": output, "positions": "rotary"}, "positions is 'rotary'; expected 'interleave"),
        ({"positions": (table_LD, table_LD + 1)}, "separate position tables but share one emb"),
        ({"positions": table_LD / 0}, rf"have {8 * D} NaN or infinite values in positions\[1\]"),
        ({"output": embedding.weight / 0}, "NaN or infinite values in output.weight; expected fin"),
        ({"positions": table_LD[:, 1:]}, r"have shape \(8, 31\) for positions\[1\]"),
    ):
        with pytest.raises(UserError, match=message):
            from_torch(transformer, **({"source_embedding": embedding} | settings))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_type": "rms"}, "model.norm_type is 'rms'; expected 'layer'. torch.nn.Tr"),
        ({"activation": "swiglu"}, "model.activation is 'swiglu'; expected 'relu' or 'gelu' or"),
        ({"d_k": 16}, "model.d_k is 16; expected model.d_model / model.num_heads = 32 / 4"),
        ({"d_v": 16}, "model.d_v is 16"),
        ({"num_heads": 5, "d_k": 8, "d_v": 8}, "model.d_k is 8; expected .* = 32 / 5"),
    ],
    ids=str,
)
def test_fields_that_nn_transformer_lacks_are_errors(fields: dict[str, Any], message: str) -> None:
    sizes = {"vocab_size": V, "d_model": D, "d_ff": 48, "num_heads": H, "num_layers": 1}
    config = ModelConfig(**(sizes | fields))
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    with pytest.raises(UserError, match=message):
        to_torch(model)
