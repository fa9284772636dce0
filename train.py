"""Train a Transformer. Flags: transformer_jax/training/__main__.py; loop: loop.py beside it."""

import sys

from transformer_jax.training.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
