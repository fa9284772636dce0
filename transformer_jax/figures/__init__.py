"""Figures of attention, positional encoding and the learning rate, in matplotlib."""

from transformer_jax.figures.drawing import (
    attention_lines,
    attention_maps,
    positions_picture,
    save_picture,
    schedule_picture,
)

__all__ = [
    "attention_lines",
    "attention_maps",
    "positions_picture",
    "save_picture",
    "schedule_picture",
]
