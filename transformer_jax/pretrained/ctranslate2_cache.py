"""Exports to CTranslate2 that are kept beside the model, for ``--engine auto``.

An export is used again while its fingerprint is that of the model: parameters, settings, and the
versions of this package and of CTranslate2.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from flax import nnx

from transformer_jax.devices.sharding import parameters_by_name
from transformer_jax.model.transformer import Transformer
from transformer_jax.pretrained.ctranslate2 import export_ctranslate2, position_table_length
from transformer_jax.pretrained.weights import check_finite
from transformer_jax.runs.manifest import Manifest, delete_complete, write_manifest
from transformer_jax.runs.mirror import cached_folder
from transformer_jax.settings.config import Config
from transformer_jax.storage.files import locked, new_folder
from transformer_jax.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_FOLDER = ".ctranslate2"  # hidden, so that it is not copied with a work directory


@contextmanager
def current_export(
    workdir: Path, config: Config, model: Transformer, tokenizer: Tokenizer, weights_type: str
) -> Iterator[Path]:
    """Export a model with weights of this type, unless ``workdir`` has an intact export with its
    fingerprint. Yields the export's folder, which other processes do not replace within the
    context.

    The folder is in ``workdir`` or, if that is read-only, in the user's cache directory.

    Raises:
      UserError: a parameter is NaN or infinite.
      OSError: the disk is full.
    """
    parent = _writable_folder(workdir)
    folder = parent / weights_type
    fingerprint = _fingerprint(config, model, tokenizer)
    with locked(parent / "lock"):
        problem = _problem(folder, fingerprint)
        if problem:
            logger.info("Exporting the model to CTranslate2: %s.", problem)
            delete_complete(folder)
            with new_folder(str(folder), "workdir"):
                export_ctranslate2(config, model, tokenizer, folder, weights_type)
                write_manifest(folder, config, tokenizer, {"fingerprint": fingerprint})
        yield folder


def _writable_folder(workdir: Path) -> Path:
    """Return the folder for exports of a model."""
    folder = workdir / _FOLDER
    try:
        folder.mkdir(exist_ok=True)
        (folder / "lock").open("ab").close()
    except OSError:  # read-only
        return cached_folder(str(workdir.resolve()), "ctranslate2")
    return folder


def _fingerprint(config: Config, model: Transformer, tokenizer: Tokenizer) -> str:
    """Return the SHA-256 (hex) of everything that an export depends on."""
    versions = [importlib.metadata.version(name) for name in ("transformer-jax", "ctranslate2")]
    settings = [repr(model.config), position_table_length(config), tokenizer.fingerprint]
    digest = hashlib.sha256(repr([*versions, *settings]).encode())
    parameters = parameters_by_name(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    for name, parameter in parameters.items():
        x = np.ascontiguousarray(parameter)
        check_finite(x, "The model has", name)
        digest.update(name.encode())
        digest.update(x.data)
    return digest.hexdigest()


def _problem(folder: Path, fingerprint: str) -> str:
    """Return the reason that an export cannot be used, or ""."""
    manifest = Manifest(folder)
    if not manifest.content:  # or it is incomplete
        return "there is no export yet"
    if manifest.content.get("fingerprint") != fingerprint:
        return "the model, its settings or a version has changed"
    return "the export is corrupt" if manifest.corruption() else ""
