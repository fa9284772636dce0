"""Translate with a trained model; transformer_jax/decoding/ has the flags and the work."""

import sys

from transformer_jax.decoding.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
