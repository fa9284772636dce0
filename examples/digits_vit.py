"""A vision transformer (Dosovitskiy et al., 2021) for scikit-learn's handwritten digits.

Shows the encoder on its own, with image patches as tokens, learned positions, and a first token
whose output predicts the digit. Requires scikit-learn.

    python examples/digits_vit.py

prints the training loss and the accuracy on 360 test images.
"""

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import transformer_jax as tj

PATCH = 2  # an image of 8 x 8 is 16 patches of 2 x 2
CONFIG = tj.ModelConfig(
    d_model=64, d_ff=128, num_heads=4, num_layers=2, norm="pre", activation="gelu"
)
SCHEDULE = tj.OptimizerConfig(peak_learning_rate=0.003, warmup_steps=30, decay="cosine")


class VisionTransformer(nnx.Module):
    def __init__(self, config: tj.ModelConfig, *, rngs: nnx.Rngs):
        num_tokens = (8 // PATCH) ** 2 + 1
        D = config.d_model
        self.patches = nnx.Linear(PATCH * PATCH, D, rngs=rngs)
        self.first = nnx.Param(0.5 * jax.random.normal(rngs.params(), (1, 1, D)))
        # Large enough to distinguish positions from the first step on; 0.02 gives 89% accuracy.
        self.positions = nnx.Param(0.5 * jax.random.normal(rngs.params(), (1, num_tokens, D)))
        self.encoder = tj.Encoder(config, rngs=rngs)
        self.output = nnx.Linear(D, 10, rngs=rngs)

    def __call__(self, images_BYX: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        """Compute logits of the ten digits for images [B, 8, 8]."""
        B, Y, X = images_BYX.shape
        cut = images_BYX.reshape(B, Y // PATCH, PATCH, X // PATCH, PATCH).swapaxes(2, 3)
        x_BLD = self.patches(cut.reshape(B, -1, PATCH * PATCH))
        first_B1D = jnp.broadcast_to(self.first[...], (B, 1, x_BLD.shape[2]))
        x_BLD = jnp.concatenate([first_B1D, x_BLD], axis=1) + self.positions[...]
        everywhere = jnp.ones((1, 1, 1, x_BLD.shape[1]), bool)  # attends to all tokens
        return self.output(self.encoder(x_BLD, everywhere, dropout_key=dropout_key)[:, 0])


@nnx.jit
def train_step(model, optimizer, images_BYX, labels_B, dropout_key):
    def mean_loss(model):
        scores_BC = model(images_BYX, dropout_key)
        return optax.softmax_cross_entropy_with_integer_labels(scores_BC, labels_B).mean()

    loss, gradients = nnx.value_and_grad(mean_loss)(model)
    optimizer.update(model, gradients)
    return loss


def main(steps: int = 250, seed: int = 0) -> None:
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8) / 16
    split = train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)
    images, test_images, labels, test_labels = map(jnp.asarray, split)
    model = VisionTransformer(CONFIG, rngs=nnx.Rngs(seed))
    rate = tj.learning_rate_schedule(SCHEDULE, CONFIG.d_model, steps)
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)
    for step in range(1, steps + 1):
        rows_key, key = jax.random.split(jax.random.fold_in(jax.random.key(seed), step))
        rows_B = jax.random.choice(rows_key, len(images), (64,))
        loss = train_step(model, optimizer, images[rows_B], labels[rows_B], key)
        if step % 50 == 0:
            print(f"step {step}: loss {loss:.3f}")
    right = nnx.jit(lambda model: model(test_images).argmax(axis=1) == test_labels)(model)
    print(f"accuracy on {len(right)} test images: {right.mean():.1%}")


if __name__ == "__main__":
    tyro.cli(main)
