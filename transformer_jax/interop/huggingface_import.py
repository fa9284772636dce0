"""Imports pretrained models from the Hugging Face Hub, or from folders in transformers' format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from transformer_jax import Config, Tokenizer, Transformer, UserError, save_model
from transformer_jax.interop.pretrained import KEPT, Pretrained
from transformer_jax.interop.weights import with_parameters
from transformer_jax.support import needs_extra, one_line

_FILES = [*KEPT, "model*.safetensors"]


def find_pretrained(name: str, *, revision: str | None = None, allow_pickle: bool = False) -> Path:
    """Return a local folder, or the folder in huggingface_hub's cache of the model ``name``.

    A name such as ``facebook/nllb-200-distilled-600M`` is downloaded if it is not in the cache.
    ``revision`` is a branch, tag or commit, as is REVISION in NAME@REVISION. huggingface_hub reads
    HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE.

    Raises ``UserError`` if the model cannot be downloaded.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if revision:
            raise UserError(
                f"The revision is {revision!r}, but {name!r} is a folder; expected a name on the "
                "Hugging Face Hub. Leave out the revision, or choose another name."
            )
        return folder
    with needs_extra("pretrained"):
        import huggingface_hub  # noqa: F401
    files = [*_FILES, "pytorch_model.bin"] if allow_pickle else _FILES
    name, _, tag = name.partition("@")
    try:
        found = _download(name, revision or tag or None, files)
    except Exception as error:  # errors of huggingface_hub and of its HTTP client
        raise UserError(
            f"{name!r} is not a folder and cannot be downloaded ({one_line(error)}). Expected a "
            "folder with config.json or a name such as facebook/nllb-200-distilled-600M. Check the "
            "name, the revision, the network and, for private or gated models, HF_TOKEN. For "
            f"machines without a network, download a folder elsewhere: hf download {name} "
            "--local-dir FOLDER."
        ) from None
    return Path(found)


def _download(name: str, revision: str | None, files: list[str]) -> str:
    """Return the folder in huggingface_hub's cache, from the cache alone if the hub is silent.

    ``snapshot_download`` waits for the first answer without a limit, so ask first.
    """
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    try:
        HfApi().model_info(name, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled):
        pass  # snapshot_download raises it again, unless the cache has the model
    except Exception as error:  # errors of the HTTP client
        try:
            return snapshot_download(
                name, revision=revision, allow_patterns=files, local_files_only=True
            )
        except errors.LocalEntryNotFoundError:
            raise error from None
    return snapshot_download(name, revision=revision, allow_patterns=files)


def import_huggingface(
    folder: Path,
    *,
    lazy: bool = False,
    allow_pickle: bool = False,
    languages: tuple[str, str] = ("", ""),
) -> tuple[Config, Transformer, Tokenizer]:
    """Load a pretrained model of a family in ``families.py``.

    ``save_model`` writes the result as a model folder. Token ids are renumbered, because this
    package has fixed ids for PAD, BOS, EOS and UNK. The model computes the same function. If
    ``lazy``, parameters are read when they are saved, one at a time. With ``allow_pickle``, models
    are also read from pytorch_model.bin, by PyTorch, whole. ``languages`` are the codes of source
    and target by default, for a model of many languages.

    Raises:
      UserError: a file, setting or tensor is missing, unexpected or unsupported.
    """
    pretrained = Pretrained(folder, allow_pickle=allow_pickle, languages=languages)
    shape = pretrained.model_config()
    parameters = pretrained.parameters(shape)
    arrays = parameters if lazy else {name: jnp.asarray(x) for name, x in parameters.items()}
    return pretrained.config(shape), with_parameters(shape, arrays), pretrained.tokenizer()


def import_into(source: Path, folder: Path, **options: Any) -> None:
    """Write the model folder of the pretrained model in ``source`` to the empty ``folder``.
    ``options`` are those of ``import_huggingface``.
    """
    save_model(folder, *import_huggingface(source, lazy=True, **options))
