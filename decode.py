"""Translate with a trained model; flags and implementation are in transformer_jax/decoding/."""

import sys

from transformer_jax.translation.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
