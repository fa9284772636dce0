"""Loading a model by name: a work directory, a model folder, a URL, or a pretrained model.

A pretrained model, ``hf://NAME`` or ``hf://NAME@REVISION``, is downloaded and imported.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer, abstract_model, model_from_arrays
from transformer_jax.pretrained.folder import Pretrained
from transformer_jax.pretrained.hub import find_pretrained
from transformer_jax.runs.manifest import Manifest, delete_complete
from transformer_jax.runs.mirror import cached_folder
from transformer_jax.runs.model_folder import SavedModel, read_model, write_model
from transformer_jax.runs.remote_workdir import local_copy
from transformer_jax.settings.config import Config
from transformer_jax.storage.files import MANIFEST, locked
from transformer_jax.tokenization.tokenizer import Tokenizer


def load_model(path: str | Path) -> tuple[Config, Transformer, Tokenizer]:
    """Load the trained model from a work directory, a model folder or a checkpoint, or their URL.

    In a work directory, this is the model in ``model/`` or, until training finishes, the newest
    checkpoint, and its config.json determines the ``decoding`` settings. Raises ``UserError`` if
    the model or checkpoint is missing or corrupt.
    """
    saved = load_saved_model(path)
    graph = abstract_model(saved.config.model).graph
    model = nnx.merge(graph, jax.tree.map(jnp.asarray, saved.parameters))
    return saved.config, model, saved.tokenizer


def load_saved_model(path: str | Path) -> SavedModel:
    """Load a model like ``load_model``, with its parameters as NumPy arrays."""
    return read_model(local_workdir(path), path)


def local_workdir(workdir: str | Path) -> Path:
    """Return a local folder for reading a work directory, a model folder or a checkpoint.

    A URL is copied first: small files and the model or, without ``model/``, the parameters of the
    last checkpoint. A pretrained model, hf://NAME or hf://NAME@REVISION, is downloaded and
    imported.
    """
    if str(workdir).startswith("hf://"):
        return pretrained_workdir(str(workdir).removeprefix("hf://"))
    return local_copy(workdir)


def pretrained_workdir(name: str | Path) -> Path:
    """Return the model folder of a pretrained model, after importing it into the cache.

    ``name`` is NAME or NAME@REVISION on the Hugging Face Hub, or a folder in transformers' format
    or a model folder.
    """
    source = find_pretrained(str(name))
    if (source / MANIFEST).exists():
        return source
    folder = cached_folder(f"{source.resolve()}-{_fingerprint(source)}", "read")
    with locked(folder.with_suffix(".lock")):
        try:
            Manifest(folder).config  # noqa: B018  reads it
        except UserError:  # not imported yet, or by another version of this package
            delete_complete(folder)
            import_into(source, folder)
    return folder


def _fingerprint(source: Path) -> str:
    """Return the SHA-256 (hex) of the names, sizes and times of all files in a folder."""
    stat_of_files = [(file.name, file.stat()) for file in sorted(source.glob("*")) if file.exists()]
    fields = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stat_of_files]
    return hashlib.sha256(repr(fields).encode()).hexdigest()


def import_huggingface(
    folder: Path,
    *,
    allow_pickle: bool = False,
    languages: tuple[str, str] = ("", ""),
) -> tuple[Config, Transformer, Tokenizer]:
    """Load a pretrained model of a family in ``families.py``.

    Token ids are those of transformers. With ``allow_pickle``, models are also read from
    pytorch_model.bin, by PyTorch, whole. ``languages`` are the codes of source and target by
    default, for a model of many languages.

    Raises:
      UserError: a file, setting or tensor is missing, unexpected or unsupported.
    """
    pretrained = Pretrained(folder, allow_pickle=allow_pickle, languages=languages)
    model_config = pretrained.model_config()
    arrays = {name: np.asarray(x) for name, x in pretrained.parameters(model_config).items()}
    return (
        pretrained.config(model_config),
        model_from_arrays(model_config, arrays),
        pretrained.tokenizer(),
    )


def import_into(source: Path, folder: Path, **options: Any) -> None:
    """Write the model folder of the pretrained model in ``source`` to the empty ``folder``.
    ``options`` are those of ``import_huggingface``. Parameters are read and written one at a time.
    """
    pretrained = Pretrained(source, **options)
    model_config = pretrained.model_config()
    parameters = pretrained.parameters(model_config)
    write_model(folder, pretrained.config(model_config), parameters, pretrained.tokenizer(), [])
