"""Matplotlib figures of attention."""

from transformer_jax.figures.drawing import attention_maps, save_picture

__all__ = ["attention_maps", "save_picture"]
