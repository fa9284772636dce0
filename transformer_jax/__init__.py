"""transformer_jax: the encoder-decoder Transformer of "Attention Is All You Need", in JAX and Flax.

Its names, listed in ``__init__.pyi``, are imported when they are first used: ``--help`` need not
wait for JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
