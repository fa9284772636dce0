"""The paper in one file: "Attention Is All You Need" (Vaswani et al., 2017) with only JAX.

Read it next to https://arxiv.org/abs/1706.03762. Sections and equations are named beside the code.
Functions take one sentence, and `jax.vmap` makes them take a batch or a beam. Names of arrays end
in their shape: S source length, T target length, L either, D d_model, H heads, K head width, F
d_ff, V vocabulary, W beam width, C candidates, B batch, N sentences.

    python examples/number_names.py --folder data/numbers
    python examples/attention_is_all_you_need.py --folder data/numbers

trains a small model that translates English number names to German, and prints the loss and how
many of 1,000 unseen numbers beam search translates exactly. `transformer_jax` computes the same
logits, losses, training steps and beams (tests/test_one_file.py), and computes them faster.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

PAD, BOS, EOS = 0, 1, 2


class Config(NamedTuple):
    """The base model (Table 3)."""

    vocab_size: int = 37_000
    num_layers: int = 6
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    dropout: float = 0.1
    label_smoothing: float = 0.1
    warmup_steps: int = 4000


SMALL = Config(num_layers=2, d_model=128, d_ff=512, num_heads=4, dropout=0.0, warmup_steps=600)


def init_parameters(config: Config, key: Array) -> Any:
    """Draw the weights. The paper does not say how; this is what the authors' code does."""
    D = config.d_model
    F = config.d_ff
    H = config.num_heads
    numbers = count()
    norm = {"scale_D": jnp.ones(D), "bias_D": jnp.zeros(D)}

    def matrix(*shape: int, inputs: int = 1) -> Array:
        axes = range(len(shape))
        xavier = jax.nn.initializers.glorot_uniform(axes[:inputs], axes[inputs:])
        return xavier(jax.random.fold_in(key, next(numbers)), shape)

    def attention() -> Any:
        projections = {name: matrix(D, H, D // H) for name in ("query_DHK", "key_DHK", "value_DHK")}
        return projections | {"output_HKD": matrix(H, D // H, D, inputs=2)} | norm

    def feed_forward() -> Any:
        inner = {"inner_DF": matrix(D, F), "inner_bias_F": jnp.zeros(F)}
        return inner | {"output_FD": matrix(F, D), "output_bias_D": jnp.zeros(D)} | norm

    def layer(*attentions: str) -> Any:
        return {name: attention() for name in attentions} | {"feed_forward": feed_forward()}

    return {
        "embedding_VD": jax.random.normal(key, (config.vocab_size, D)) * D**-0.5,
        "encoder": [layer("self_attention") for _ in range(config.num_layers)],
        "decoder": [layer("self_attention", "cross_attention") for _ in range(config.num_layers)],
    }


# 3 Model architecture

Dropout = Callable[[Array], Array]


def make_dropout(rate: float, key: Array | None) -> Dropout:
    """Return a function that drops other elements at each call, or none without a key (5.4)."""
    numbers = count()

    def dropout(x: Array) -> Array:
        is_kept = jax.random.bernoulli(jax.random.fold_in(key, next(numbers)), 1 - rate, x.shape)
        return jnp.where(is_kept, x / (1 - rate), 0)

    return (lambda x: x) if key is None or rate == 0 else dropout


NO_DROPOUT = make_dropout(0, None)


def positional_encoding(length: int, d_model: int) -> Array:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)); PE(pos, 2i + 1) is its cosine (3.5)."""
    wavelengths = 10000 ** (jnp.arange(0, d_model, 2) / d_model)
    angles = jnp.arange(length)[:, None] / wavelengths[None]
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=2).reshape(length, d_model)


def embed(embedding_VD: Array, tokens_L: Array) -> Array:
    """Embeddings times sqrt(d_model), plus positions (3.4, 3.5)."""
    d_model = embedding_VD.shape[1]
    return embedding_VD[tokens_L] * d_model**0.5 + positional_encoding(len(tokens_L), d_model)


def attention(q_THK: Array, k_SHK: Array, v_SHK: Array, mask_TS: Array) -> Array:
    """softmax(Q K^T / sqrt(d_k)) V for each head (equation 1). True in the mask: may attend."""
    d_k = q_THK.shape[2]
    scores_HTS = jnp.einsum("THK,SHK->HTS", q_THK, k_SHK) / d_k**0.5
    weights_HTS = jax.nn.softmax(jnp.where(mask_TS[None], scores_HTS, -1e30), axis=2)
    return jnp.einsum("HTS,SHK->THK", weights_HTS, v_SHK)


def multi_head_attention(weights: Any, x_TD: Array, memory_SD: Array, mask_TS: Array) -> Array:
    """Concat(head_1, ..., head_h) W^O: queries from x, keys and values from memory (3.2.2)."""
    q_THK = jnp.einsum("TD,DHK->THK", x_TD, weights["query_DHK"])
    k_SHK = jnp.einsum("SD,DHK->SHK", memory_SD, weights["key_DHK"])
    v_SHK = jnp.einsum("SD,DHK->SHK", memory_SD, weights["value_DHK"])
    heads_THK = attention(q_THK, k_SHK, v_SHK, mask_TS)
    return jnp.einsum("THK,HKD->TD", heads_THK, weights["output_HKD"])


def feed_forward(weights: Any, x_LD: Array) -> Array:
    """max(0, x W_1 + b_1) W_2 + b_2 (equation 2)."""
    hidden_LF = jax.nn.relu(x_LD @ weights["inner_DF"] + weights["inner_bias_F"][None])
    return hidden_LF @ weights["output_FD"] + weights["output_bias_D"][None]


def add_and_norm(weights: Any, x_LD: Array, sublayer_LD: Array) -> Array:
    """LayerNorm(x + Sublayer(x)) (3.1)."""
    x_LD = x_LD + sublayer_LD
    centered_LD = x_LD - x_LD.mean(axis=1, keepdims=True)
    variance_L1 = jnp.square(centered_LD).mean(axis=1, keepdims=True)
    normalized_LD = centered_LD * jax.lax.rsqrt(variance_L1 + 1e-6)
    return normalized_LD * weights["scale_D"][None] + weights["bias_D"][None]


def encode(parameters: Any, source_S: Array, dropout: Dropout = NO_DROPOUT) -> Array:
    """The encoder (3.1; Figure 1, left). Every position attends to all that are not padding."""
    mask_1S = (source_S != PAD)[None]
    x_SD = dropout(embed(parameters["embedding_VD"], source_S))
    for layer in parameters["encoder"]:
        y_SD = multi_head_attention(layer["self_attention"], x_SD, x_SD, mask_1S)
        x_SD = add_and_norm(layer["self_attention"], x_SD, dropout(y_SD))
        y_SD = feed_forward(layer["feed_forward"], x_SD)
        x_SD = add_and_norm(layer["feed_forward"], x_SD, dropout(y_SD))
    return x_SD


def decode(
    parameters: Any,
    target_T: Array,
    memory_SD: Array,
    source_S: Array,
    dropout: Dropout = NO_DROPOUT,
) -> Array:
    """The decoder (3.1; Figure 1, right): logits [T, V] of each target token, given those before.

    Its inputs are the targets, shifted right by one. No position attends to later ones.
    """
    mask_1S = (source_S != PAD)[None]
    causal_mask_TT = jnp.tril(jnp.ones((len(target_T), len(target_T)), bool))
    inputs_T = jnp.concatenate([jnp.array([BOS]), target_T[:-1]])
    x_TD = dropout(embed(parameters["embedding_VD"], inputs_T))
    for layer in parameters["decoder"]:
        y_TD = multi_head_attention(layer["self_attention"], x_TD, x_TD, causal_mask_TT)
        x_TD = add_and_norm(layer["self_attention"], x_TD, dropout(y_TD))
        y_TD = multi_head_attention(layer["cross_attention"], x_TD, memory_SD, mask_1S)
        x_TD = add_and_norm(layer["cross_attention"], x_TD, dropout(y_TD))
        y_TD = feed_forward(layer["feed_forward"], x_TD)
        x_TD = add_and_norm(layer["feed_forward"], x_TD, dropout(y_TD))
    return x_TD @ parameters["embedding_VD"].T  # the same matrix again (3.4)


# 5 Training


def mean_loss(
    config: Config, parameters: Any, source_BS: Array, target_BT: Array, key: Array
) -> Array:
    """Cross-entropy per target token, with label smoothing (5.4)."""

    def logits(source_S: Array, target_T: Array, key: Array) -> Array:
        dropout = make_dropout(config.dropout, key)
        return decode(
            parameters, target_T, encode(parameters, source_S, dropout), source_S, dropout
        )

    keys_B = jax.random.split(key, len(source_BS))
    log_probs_BTV = jax.nn.log_softmax(jax.vmap(logits)(source_BS, target_BT, keys_B))
    label_BT = jnp.take_along_axis(log_probs_BTV, target_BT[:, :, None], axis=2)[:, :, 0]
    epsilon = config.label_smoothing
    loss_BT = -(1 - epsilon) * label_BT - epsilon * log_probs_BTV.mean(axis=2)
    is_token_BT = target_BT != PAD
    return jnp.where(is_token_BT, loss_BT, 0).sum() / is_token_BT.sum()


def learning_rate(config: Config, step: Array) -> Array:
    """d_model^-0.5 min(step^-0.5, step warmup_steps^-1.5) (equation 3). Steps begin with 1."""
    return config.d_model**-0.5 * jnp.minimum(step**-0.5, step * config.warmup_steps**-1.5)


class TrainState(NamedTuple):
    parameters: Any
    m: Any  # Adam's mean of the gradient
    v: Any  # Adam's mean of the squared gradient
    step: Array | float = 0.0


@partial(jax.jit, static_argnums=0)
def train_step(
    config: Config, state: TrainState, source_BS: Array, target_BT: Array, key: Array
) -> tuple[TrainState, Array]:
    """Adam with beta_1 = 0.9, beta_2 = 0.98 and epsilon = 10^-9 (5.3)."""
    loss_and_gradient = jax.value_and_grad(mean_loss, argnums=1)
    loss, gradient = loss_and_gradient(config, state.parameters, source_BS, target_BT, key)
    step = state.step + 1
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.m, gradient)
    v = jax.tree.map(lambda v, g: 0.98 * v + 0.02 * g * g, state.v, gradient)

    def update(x: Array, m: Array, v: Array) -> Array:
        direction = m / (1 - 0.9**step) / (jnp.sqrt(v / (1 - 0.98**step)) + 1e-9)
        return x - learning_rate(config, step) * direction

    return TrainState(jax.tree.map(update, state.parameters, m, v), m, v, step), loss


# 6.1 Search


def greedy_search(parameters: Any, source_S: Array, longest: int) -> Array:
    """Append the most likely token until it is EOS. Returns at most T = `longest` tokens."""
    memory_SD = encode(parameters, source_S)

    def step(t: Array, target_T: Array) -> Array:
        logits_V = decode(parameters, target_T, memory_SD, source_S)[t].at[PAD].set(-jnp.inf)
        token = jnp.where(t == longest - 1, EOS, logits_V.argmax())
        return target_T.at[t].set(jnp.where((target_T == EOS).any(), PAD, token))

    return jax.lax.fori_loop(0, longest, step, jnp.full(longest, PAD))


Beams = tuple[Array, Array]  # tokens_WT and scores_W, best first; -inf marks an empty place


def best(W: int, tokens_CT: Array, scores_C: Array) -> Beams:
    scores_W, index_W = jax.lax.top_k(scores_C, W)
    return tokens_CT[index_W], scores_W


def length_penalty(length: Array | int) -> Array | float:
    """Divisor of log-probabilities (Wu et al., 2016, equation 14) with the paper's alpha = 0.6."""
    return ((5 + length) / 6) ** 0.6


def beam_search(parameters: Any, source_S: Array, longest: int, W: int = 4) -> Beams:
    """Find the W best translations of at most `longest` tokens (paper: 50 more than the source).

    Each step extends W live hypotheses by every token. Those of the best W that end in EOS are
    finished; the best W that do not end stay live. The search stops when no live hypothesis can
    become one of the W best.
    """
    memory_SD = encode(parameters, source_S)
    decode_beams = jax.vmap(decode, in_axes=(None, 0, None, None))
    no_tokens_WT = jnp.full((W, longest), PAD)
    no_scores_W = jnp.full(W, -jnp.inf)

    def step(state: tuple[Array, Beams, Beams]) -> tuple[Array, Beams, Beams]:
        t, (live_WT, live_W), (finished_WT, finished_W) = state
        logits_WV = decode_beams(parameters, live_WT, memory_SD, source_S)[:, t]
        token_V = jnp.arange(logits_WV.shape[1])
        is_allowed_V = jnp.where(t == longest - 1, token_V == EOS, token_V != PAD)
        log_probs_WV = jnp.where(is_allowed_V[None], jax.nn.log_softmax(logits_WV), -jnp.inf)

        scores_C, index_C = jax.lax.top_k((live_W[:, None] + log_probs_WV).reshape(-1), 2 * W)
        parent_C, token_C = jnp.divmod(index_C, len(token_V))
        tokens_CT = live_WT[parent_C].at[:, t].set(token_C)
        live = best(W, tokens_CT, jnp.where(token_C == EOS, -jnp.inf, scores_C))
        ended_C = jnp.where(token_C == EOS, scores_C / length_penalty(t + 1), -jnp.inf)
        tokens_CT = jnp.concatenate([finished_WT, tokens_CT[:W]])
        return t + 1, live, best(W, tokens_CT, jnp.concatenate([finished_W, ended_C[:W]]))

    def can_improve(state: tuple[Array, Beams, Beams]) -> Array:
        t, (_, live_W), (_, finished_W) = state
        return (t < longest) & (live_W[0] / length_penalty(longest) > finished_W[-1])

    first = no_tokens_WT, no_scores_W.at[0].set(0)
    state = jnp.array(0), first, (no_tokens_WT, no_scores_W)
    return jax.lax.while_loop(can_improve, step, state)[2]


# 5.1 Data: byte-pair encoding with one vocabulary for both languages


def split(lines: Sequence[str], merges: Sequence[tuple[str, str]]) -> list[list[str]]:
    """Split lines into characters, _ before each word, and apply the merges in order."""
    text = "\n".join("".join(f" {c} " for c in "_" + line.replace(" ", "_")) for line in lines)
    for left, right in merges:
        text = text.replace(f" {left}  {right} ", f" {left}{right} ")
    return [line.split() for line in text.split("\n")]


def learn_merges(lines: Sequence[str], number: int) -> list[tuple[str, str]]:
    """Merge the most frequent pair of neighbors within words, again and again."""
    merges: list[tuple[str, str]] = []
    for _ in range(number):
        pairs = Counter(pair for line in split(lines, merges) for pair in pairwise(line))
        merges.append(next(pair for pair, _ in pairs.most_common() if "_" not in pair[1]))
    return merges


def main(folder: Path, steps: int, batch_size: int = 128, num_merges: int = 120) -> None:
    """Train on the folder's pairs, then translate its test set."""
    names = ("train.en", "train.de", "test.en", "test.de")
    lines = {name: (folder / name).read_text().splitlines() for name in names}
    merges = learn_merges(lines["train.en"][::50] + lines["train.de"][::50], num_merges)
    tokens = {name: split(lines[name], merges) for name in names}
    longest = 1 + max(len(line) for text in tokens.values() for line in text)
    vocabulary = ["<pad>", "<bos>", "<eos>"]
    vocabulary += sorted({token for text in tokens.values() for line in text for token in line})
    number = {token: i for i, token in enumerate(vocabulary)}

    def ids(name: str) -> Array:
        rows = [[*(number[token] for token in line), EOS] for line in tokens[name]]
        return jnp.array([row + [PAD] * (longest - len(row)) for row in rows])

    config = SMALL._replace(vocab_size=len(vocabulary))
    parameters = init_parameters(config, jax.random.key(0))
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    state = TrainState(parameters, m=zeros, v=zeros)
    checkpoints = []
    source_NS = ids("train.en")
    target_NT = ids("train.de")
    for i in range(1, steps + 1):
        key = jax.random.key(i)
        row_B = jax.random.randint(key, (batch_size,), 0, len(source_NS))
        state, loss = train_step(config, state, source_NS[row_B], target_NT[row_B], key)
        if i % 100 == 0 or i == steps:
            print(f"step {i}: loss {loss:.3f}", flush=True)
            checkpoints.append(state.parameters)

    average = jax.tree.map(lambda *x: sum(x) / len(x), *checkpoints[-5:])  # the last five (6.1)
    search = partial(beam_search, average, longest=longest)
    tokens_NWT, _ = jax.lax.map(search, ids("test.en"), batch_size=100)
    best_NT = tokens_NWT[:, 0].tolist()
    joined = ["".join(vocabulary[i] for i in tokens_T if i > EOS) for tokens_T in best_NT]
    translations = [text.replace("_", " ").strip() for text in joined]
    for english, german in zip(lines["test.en"][:3], translations):
        print(f"{english} -> {german}")
    num_exact = sum(map(str.__eq__, translations, lines["test.de"]))
    print(f"{num_exact} of {len(translations)} unseen numbers are exact")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("data/numbers"))
    parser.add_argument("--steps", type=int, default=1500)
    main(**vars(parser.parse_args()))
