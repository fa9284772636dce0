"""Finds pretrained models: folders in transformers' format, or names on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from transformer_jax.errors import UserError, needs_extra, one_line
from transformer_jax.pretrained.folder import COPIED_FILES

_DOWNLOADED_FILES = [*COPIED_FILES, "model*.safetensors"]


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
    files = [*_DOWNLOADED_FILES, "pytorch_model.bin"] if allow_pickle else _DOWNLOADED_FILES
    name, _, tag = name.partition("@")
    try:
        folder_in_cache = _download(name, revision or tag or None, files)
    except Exception as error:  # errors of huggingface_hub and of its HTTP client
        raise UserError(
            f"{name!r} is not a folder and cannot be downloaded ({one_line(error)}). Expected a "
            "folder with config.json or a name such as facebook/nllb-200-distilled-600M. Check the "
            "name, the revision, the network and, for private or gated models, HF_TOKEN. For "
            f"machines without a network, download a folder elsewhere: hf download {name} "
            "--local-dir FOLDER."
        ) from None
    return Path(folder_in_cache)


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
