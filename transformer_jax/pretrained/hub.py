"""Finds pretrained models: folders, zip archives of Marian, or names on the Hugging Face Hub."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from transformer_jax.errors import UserError, needs_extra, one_line
from transformer_jax.pretrained.files import PretrainedFiles
from transformer_jax.pretrained.marian import unpack
from transformer_jax.storage.files import cache_folder, locked, remove_folder

_DOWNLOADED_FILES = [*PretrainedFiles.copied_files, "model*.safetensors"]


def find_pretrained(
    name: str,
    *,
    revision: str | None = None,
    allow_pickle: bool = False,
    files: Sequence[str] = _DOWNLOADED_FILES,
) -> Path:
    """Return a local folder, or the folder in huggingface_hub's cache of the model ``name``.
    A zip archive is unpacked in our own cache.

    A name such as ``facebook/nllb-200-distilled-600M`` is downloaded if it is not in the cache.
    ``revision`` is a branch, tag or commit, as is REVISION in NAME@REVISION. huggingface_hub reads
    HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE. ``files`` are the patterns to download.

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
    if folder.suffix == ".zip" and folder.is_file():
        return _unpack_archive(folder)
    with needs_extra("pretrained"):
        import huggingface_hub  # noqa: F401
    files = [*files, *["pytorch_model.bin"] * allow_pickle]
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


def _unpack_archive(archive: Path) -> Path:
    """Return the folder in our cache with the files of a zip archive."""
    stat = archive.stat()
    key = f"{archive.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    folder = cache_folder() / "unpacked" / hashlib.sha256(key.encode()).hexdigest()[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        if not folder.exists():
            temporary = folder.with_suffix(".part")
            remove_folder(temporary)
            temporary.mkdir()
            try:
                unpack(archive, temporary)
                temporary.rename(folder)
            finally:
                remove_folder(temporary)
    return folder


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
