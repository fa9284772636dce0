"""Translate with a trained model. The flags are in transformer_jax/decoding/flags.py, what they do in
job.py beside it.
"""

import sys

from transformer_jax.decoding.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
