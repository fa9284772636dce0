"""Train a Transformer: flags and what they do are in transformer_jax/training/__main__.py, the loop
in loop.py beside it.
"""

import sys

from transformer_jax.training.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
