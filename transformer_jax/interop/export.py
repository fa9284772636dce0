"""Checks and files shared by the exports."""

from __future__ import annotations

from pathlib import Path

from transformer_jax import ModelConfig, Tokenizer, UserError


def check_fields(shape: ModelConfig, library: str, **allowed: tuple[object, ...]) -> None:
    """Raise ``UserError`` for a field whose value ``library`` does not support.

    Both exports support only the paper's value of some fields.
    """
    paper = ("position_offset", "embedding_norm", "attention_scale", "output_scale")
    allowed = {name: (getattr(ModelConfig(), name),) for name in paper} | allowed
    scales = ("all", "tokens") if shape.positions == "interleaved" else ("all",)
    for name, values in ({"embedding_scale": scales} | allowed).items():
        if getattr(shape, name) not in values:
            raise UserError(
                f"model.{name} is {getattr(shape, name)!r}; expected "
                f"{' or '.join(map(repr, values))}. {library} supports no other value."
            )


def write_sentencepiece(tokenizer: Tokenizer, folder: Path) -> tuple[list[str], list[str]]:
    """Write source.spm and target.spm to ``folder``. Returns the source and target tokens in id
    order.
    """
    sides = {"source.spm": tokenizer.source, "target.spm": tokenizer.target}
    for name, side in sides.items():
        (folder / name).write_bytes(side.model)
    source, target = (side.tokens(range(side.vocab_size)) for side in sides.values())
    return source, target
