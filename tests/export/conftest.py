"""The tiny models and tokenizers of tests/pretrained."""

from tests.pretrained.conftest import joint, lines, logits, make, separate

__all__ = ["joint", "lines", "logits", "make", "separate"]
