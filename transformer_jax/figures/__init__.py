"""Matplotlib figures of attention, positional encodings and learning rate schedules."""

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
