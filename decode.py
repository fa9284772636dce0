"""Translate with a trained model: the flags are in transformer_jax/decoding/flags.py, what they do
in job.py beside it.
"""

from transformer_jax.decoding.__main__ import run

if __name__ == "__main__":
    run()
