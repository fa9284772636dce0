"""Export of a model that came from Marian's own files, back to them."""

from __future__ import annotations

from pathlib import Path

from transformer_jax import Tokenizer, Transformer, UserError
from transformer_jax.export.huggingface import unzip_pretrained
from transformer_jax.pretrained.marian import MarianFiles


def export_marian(model: Transformer, tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``model`` to the existing ``folder``: model.npz under its original name, decoder.yml,
    the vocabularies and the other files of the original.

    Raises ``UserError`` if the model did not come from Marian's own files. Other models have a
    learned embedding of the decoder's first input, where Marian has a zero vector.
    """
    pretrained = unzip_pretrained(tokenizer, folder) if tokenizer.pretrained else None
    if pretrained is None or not isinstance(pretrained.files, MarianFiles):
        raise UserError(
            "--format is 'marian', but the model did not come from Marian's own files; expected a "
            "model that began as an import of model.npz. For other models: --format huggingface "
            "or --format ctranslate2."
        )
    pretrained.files.write(pretrained.to_tensors(model))
