"""The copy task: a Transformer learns to reproduce its input sequence.

Shows a custom training step (model, loss, the paper's Adam and learning-rate schedule) and a search
with the trained model.

    python examples/copy_task.py

prints the training loss, a new sequence and its copy, and how many of 200 new sequences are copied
exactly (nearly all).
"""

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

import transformer_jax as tj

LONGEST = 10
CONFIG = tj.ModelConfig(vocab_size=20, d_model=64, d_ff=128, num_heads=4, num_layers=2, dropout=0.0)


def random_sequences(key: jax.Array, rows: int) -> jax.Array:
    """Draw 1 to 10 random tokens, then EOS and padding, int32 [rows, 11]. Ids below 4 are special
    tokens.
    """
    tokens_key, lengths_key = jax.random.split(key)
    tokens_BL = jax.random.randint(tokens_key, (rows, LONGEST + 1), 4, CONFIG.vocab_size)
    lengths_B1 = jax.random.randint(lengths_key, (rows, 1), 1, LONGEST + 1)
    after_BL = jnp.arange(LONGEST + 1)[None] - lengths_B1
    return jnp.where(after_BL < 0, tokens_BL, jnp.where(after_BL == 0, tj.EOS_ID, tj.PAD_ID))


def mean_loss(model: tj.Transformer, tokens_BL: jax.Array) -> jax.Array:
    """Compute label-smoothed cross-entropy per token. The model shifts the target right."""
    hidden_BTD = model.hidden(tokens_BL, tokens_BL)  # source and target are the same
    sums = tj.smoothed_cross_entropy(hidden_BTD, model.output_matrix_VD, tokens_BL)
    return sums.loss / sums.tokens


@nnx.jit
def train_step(model: tj.Transformer, optimizer: nnx.Optimizer, key: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(mean_loss)(model, random_sequences(key, 64))
    optimizer.update(model, gradients)
    return loss


def main(steps: int = 500, seed: int = 0) -> None:
    model = tj.Transformer(CONFIG, rngs=nnx.Rngs(seed))
    adam = tj.make_optimizer(tj.OptimizerConfig(warmup_steps=200), CONFIG.d_model)
    optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)
    for step in range(1, steps + 1):
        loss = train_step(model, optimizer, jax.random.fold_in(jax.random.key(seed), step))
        if step % 100 == 0:
            print(f"step {step}: loss {loss:.3f}")

    new = random_sequences(jax.random.key(seed + 1), 200).tolist()
    sources = [tokens[: tokens.index(tj.EOS_ID)] for tokens in new]
    limits = {"max_source_length": LONGEST + 1, "max_extra_length": 5}
    engine = tj.Engine(model, tj.DecodingConfig(beam_size=1, **limits))
    hypotheses = engine.search([tj.Sentence(tokens) for tokens in sources])
    copies = [best.tokens for [best] in hypotheses]
    print(f"source {sources[0]}\ncopy   {copies[0]}")
    print(f"{sum(map(list.__eq__, sources, copies))} of 200 new sequences are copied exactly")


if __name__ == "__main__":
    tyro.cli(main)
