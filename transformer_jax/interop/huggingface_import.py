"""Imports pretrained models from folders in transformers' format."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from transformer_jax import Config, Tokenizer, Transformer
from transformer_jax.interop.pretrained import Pretrained
from transformer_jax.interop.weights import blank_model


def import_huggingface(
    folder: Path, *, lazy: bool = False, allow_pickle: bool = False
) -> tuple[Config, Transformer, Tokenizer]:
    """Load a pretrained model of a family in ``families.py``.

    ``save_model`` writes the result as a model folder. Token ids are renumbered, because this
    package has fixed ids for PAD, BOS, EOS and UNK. The model computes the same function. If
    ``lazy``, parameters are read when they are saved, one at a time. With ``allow_pickle``, models
    are also read from pytorch_model.bin, by PyTorch, whole.

    Raises:
      UserError: a file, setting or tensor is missing, unexpected or unsupported.
    """
    pretrained = Pretrained(folder, allow_pickle=allow_pickle)
    shape = pretrained.model_config()
    graph, _ = nnx.split(blank_model(shape), nnx.Param)
    lazies = pretrained.parameters(shape)
    parameters = {path: x if lazy else jnp.asarray(x) for path, x in lazies.items()}
    model = nnx.merge(graph, nnx.traversals.unflatten_mapping(parameters))
    return pretrained.config(shape), model, pretrained.tokenizer()
