"""transformer_jax: the encoder-decoder Transformer of "Attention Is All You Need", in JAX and Flax.

The names in ``__init__.pyi`` are imported on first use, so that ``--help`` does not wait for JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
