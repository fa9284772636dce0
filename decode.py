"""Translate with a trained model: flags in transformer_jax/decoding/flags.py, the work in job.py."""

import sys

from transformer_jax.decoding.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
