"""The encoder-decoder Transformer from "Attention Is All You Need", in JAX and Flax.

Public names (``__init__.pyi``) are imported on first use, so ``--help`` does not wait for JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
