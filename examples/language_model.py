"""A decoder-only language model of number names: encoder layers with a causal mask.

Trains on the names of the multiples of 7 below 10,000, then samples from the model with `search`.

    python examples/language_model.py

prints ten of 500 samples, how many of the 500 name a number below 10,000, and how many are new.
"""

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx
from num2words import num2words

import transformer_jax as tj

CONFIG = tj.ModelConfig(vocab_size=80, d_model=96, d_ff=384, num_heads=4, num_layers=2)


class LanguageModel(nnx.Module):
    def __init__(self, config: tj.ModelConfig, *, rngs: nnx.Rngs):
        self.embedding = tj.Embedding(config.vocab_size, config, rngs=rngs)  # also for the softmax
        self.layers = nnx.List(tj.EncoderLayer(config, rngs=rngs) for _ in range(config.num_layers))

    def hidden(self, tokens_BL: jax.Array) -> jax.Array:
        """Compute hidden states that predict the next token at each position, [B, L, D]."""
        length = tokens_BL.shape[1]
        real_BL = (tokens_BL != tj.PAD_ID).astype(int)
        x_BLD = self.embedding(tokens_BL, jnp.arange(length)[None], num_positions=length)
        for layer in self.layers:
            x_BLD = layer(x_BLD, tj.attention_mask(real_BL, real_BL, causal=True))
        return x_BLD

    def mean_loss(self, tokens_BL: jax.Array) -> jax.Array:
        before_BL = jnp.pad(tokens_BL[:, :-1], ((0, 0), (1, 0)), constant_values=tj.BOS_ID)
        hidden_BLD = self.hidden(before_BL)
        matrix_VD = self.embedding.matrix[...]
        sums = tj.smoothed_cross_entropy(hidden_BLD, matrix_VD, tokens_BL, label_smoothing=0.0)
        return sums.loss / sums.tokens


@nnx.jit
def train_step(model: LanguageModel, optimizer: nnx.Optimizer, tokens_BL: jax.Array) -> None:
    optimizer.update(model, nnx.grad(LanguageModel.mean_loss)(model, tokens_BL))


def draw(model: LanguageModel, number: int, length: int) -> jax.Array:
    """Draw ``number`` samples [N, L]. The cache is all tokens; each step recomputes the states."""

    def step_fn(tokens_BW, cache_BWL):
        lengths_BW1 = (cache_BWL != tj.PAD_ID).sum(axis=2, keepdims=True)
        is_last_BWL = jnp.arange(length)[None, None] == lengths_BW1
        cache_BWL = jnp.where(is_last_BWL, tokens_BW[..., None], cache_BWL)
        last_BWD = (model.hidden(cache_BWL[0])[None] * is_last_BWL[..., None]).sum(axis=2)
        return last_BWD @ model.embedding.matrix[...].T, cache_BWL

    method = tj.Sampling(bos_id=tj.BOS_ID, eos_id=tj.EOS_ID, pad_id=tj.PAD_ID, beam_size=number)
    empty_BWL = jnp.full((1, number, length), tj.PAD_ID)
    limit_B = jnp.array([length])
    return tj.search(method, step_fn, empty_BWL, limit_B=limit_B, max_length=length).tokens_BNL[0]


def main(steps: int = 400) -> None:
    names = [num2words(number) for number in range(10_000)]
    seen = names[::7]
    tokenizer = tj.Tokenizer.train(zip(seen, seen), tj.TokenizerConfig(CONFIG.vocab_size))
    corpus = tj.Corpus.from_lists(*[tokenizer.target.encode(seen)] * 2)
    plan = tj.BatchPlan(corpus, tj.BatchConfig(tokens=1024, buckets=1), seed=0)
    model = LanguageModel(CONFIG, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.002), wrt=nnx.Param)
    for step in range(steps):
        train_step(model, optimizer, plan.batch(step).target_BT)
    tokens_NL = nnx.jit(draw, static_argnums=(1, 2))(model, 500, plan.batch(0).target_BT.shape[1])
    samples = [tokenizer.target.decode(tokens_L) for tokens_L in tokens_NL.tolist()]
    right = [sample for sample in samples if sample in names]
    print(*samples[::50], sep="\n")
    print(f"{len(right)} of 500 are names; {len(set(right) - set(seen))} of them are new")


if __name__ == "__main__":
    tyro.cli(main)
