"""Train a Transformer; flags and implementation are in transformer_jax/training/."""

import sys

from transformer_jax.training.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
