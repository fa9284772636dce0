"""Files of pretrained models in transformers' format: JSON, and weights one tensor at a time."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from transformer_jax.errors import UserError, one_line, short_repr
from transformer_jax.storage.files import check_types, parse_object

# Names in safetensors files.
_DTYPES: dict[str, Any] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": jnp.bfloat16}
_FILE_ENDINGS = (".json", ".safetensors", ".bin", ".model", ".spm", ".txt", ".npz", ".yml")


@dataclass(frozen=True)
class LazyArray:
    """An array that is read from its file when it is needed. NumPy gets it as float32."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    """Reads it in the type of the file."""

    @classmethod
    def of(cls, array: np.ndarray) -> LazyArray:
        """Wrap an array that is in memory."""
        return cls(array.shape, lambda: array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.ascontiguousarray(self.read(), np.float32)


def _open_safetensors(file: Path) -> dict[str, LazyArray]:
    """Return the tensors in a file, by name."""
    try:
        with safe_open(file, framework="numpy"), file.open("rb") as stream:  # checks the file
            header_size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(header_size))
    except Exception as error:  # many exception types, not all public
        raise read_error(file, error) from None
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise UserError(
                f"{str(file)!r} has values of type {entry['dtype']} in {name}; expected "
                f"{', '.join(_DTYPES)}. The model is quantized: use the model that it was "
                "quantized from."
            )
        shape = tuple(entry["shape"])
        start = 8 + header_size + entry["data_offsets"][0]
        read = partial(_read_tensor, file, _DTYPES[entry["dtype"]], shape, start)
        tensors[name] = LazyArray(shape, read)
    return tensors


def _read_tensor(file: Path, dtype: Any, shape: tuple[int, ...], start: int) -> np.ndarray:
    """Read a tensor. The pages of a memory map would count as memory, beside the copy."""
    return np.fromfile(file, dtype, math.prod(shape), offset=start).reshape(shape)


def _read_pickle(file: Path) -> dict[str, LazyArray]:
    try:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch, for unusual pickles
            read = torch.load(file, map_location="cpu", weights_only=True)
        return {name: LazyArray.of(x.detach().float().numpy()) for name, x in read.items()}
    except ModuleNotFoundError:
        raise UserError(
            f"Reading {file.name} requires PyTorch. Install it (pip install torch) or download "
            "model.safetensors."
        ) from None
    except UnpicklingError:  # its message advises to run the code in the pickle
        error = UserError("it has objects that are not tensors, or is not a pickle")
        raise read_error(file, error) from None
    except Exception as error:  # many exception types, not all public
        raise read_error(file, error) from None


class PretrainedFiles(dict[str, dict[str, Any]]):
    """The files in the folder of a pretrained model: a dict of the JSON objects by file name, the
    vocabularies and the weights. A file of JSON is read once, when it is first needed. If it is
    missing, its object is empty.

    Attributes:
      copied_files: patterns of the files that an export copies, apart from the weights.
      segmenters: names of the source's and the target's SentencePiece model (Marian).
      settings: fields of ``ModelConfig`` that differ between the models of a family, but are not
        single fields of config.json.
    """

    copied_files: tuple[str, ...] = ("*.json", "*.model", "*.spm", "*.txt")

    segmenters: Sequence[str] = ("source.spm", "target.spm")

    def __init__(self, folder: Path):
        self.folder = folder
        self.settings: dict[str, Any] = {}

    def __missing__(self, name: str) -> dict[str, Any]:
        file = self.folder / name
        self[name] = _read_json(file) if file.exists() else {}
        return self[name]

    def check(self, name: str, fields: Mapping[str, Any]) -> None:
        """Raise ``UserError`` unless a file has ``fields`` of these types."""
        file = self.folder / name
        if fields and not (name in self or file.exists()):
            raise read_error(file, FileNotFoundError("it is missing"))
        try:
            check_types(self[name], name, fields)
        except UserError as error:
            raise read_error(file, error) from None

    @cached_property
    def vocabularies(self) -> list[dict[str, int]]:
        """Ids of tokens; two if source and target have a vocabulary each (Marian)."""
        vocabularies = [self.read_vocabulary("vocab.json")]
        if (self.folder / "target_vocab.json").exists():
            vocabularies.append(self.read_vocabulary("target_vocab.json"))
        return vocabularies

    def read_vocabulary(self, name: str) -> dict[str, int]:
        """Return the ids of tokens in a file."""
        ids = dict(self[name])
        self.check(name, dict.fromkeys([*ids, "<unk>"], int))
        for token in ids:
            if any("\ud800" <= character <= "\udfff" for character in token):
                raise UserError(
                    f"{str(self.folder / name)!r} has the token {short_repr(token)}, which is not "
                    "valid Unicode (a lone surrogate); expected text. Download it again."
                )
        return ids

    def open_tensors(self, allow_pickle: bool = False) -> dict[str, LazyArray]:
        """Return the tensors in model.safetensors, its shards or pytorch_model.bin, by name."""
        single_file = self.folder / "model.safetensors"
        index = self.folder / "model.safetensors.index.json"
        pickle = self.folder / "pytorch_model.bin"
        if single_file.exists():
            return _open_safetensors(single_file)
        if index.exists():
            table = _read_json(index, weight_map=dict)["weight_map"]
            tensors: dict[str, LazyArray] = {}
            for name in sorted({str(name) for name in table.values()}):
                if Path(name).name != name:
                    raise _outside_folder_error(self.folder / name)
                tensors |= _open_safetensors(self.folder / name)
            return tensors
        if allow_pickle and pickle.exists():
            return _read_pickle(pickle)
        if allow_pickle:
            raise UserError(
                f"{str(self.folder)!r} has no model.safetensors and no {pickle.name}; expected one "
                "of them. Pickles in several files are not read: let transformers load the model "
                "and write it again, with save_pretrained(FOLDER)."
            )
        raise UserError(
            f"{str(self.folder)!r} has no model.safetensors. Use a revision that has it, for "
            "example NAME@refs/pr/NUMBER (docs/pretrained.md). If the model has only "
            "pytorch_model.bin, a pickle, and you trust it: python -m transformer_jax.pretrained "
            "import --allow-pickle."
        )

    def other_contents(self) -> dict[str, bytes]:
        """Return the contents of further files that an export needs, by name."""
        return {}


def read_files(folder: Path) -> PretrainedFiles:
    """Open the folder of a pretrained model.

    Raises ``UserError`` if it has no config.json, or links and pipes among its files.
    """
    check_files(folder)
    files = PretrainedFiles(folder)
    if not (folder / "config.json").exists() and (folder / "adapter_config.json").exists():
        raise UserError(
            f"{str(folder)!r} is an adapter (such as LoRA) of another model; expected a whole "
            "model. Merge it in transformers with peft: model.merge_and_unload(), then "
            "save_pretrained(FOLDER)."
        )
    if (folder / "model_index.json").exists():
        raise UserError(
            f"{str(folder)!r} is an image model; expected a model that writes text. "
            "TextEncoder.from_pretrained loads its text encoder."
        )
    files["config.json"] = _read_json(folder / "config.json")
    return files


def check_files(folder: Path) -> None:
    """Raise ``UserError`` for a link out of the folder, except to the blobs of the hub's cache, for
    a broken link, and for anything but files and folders, such as a pipe.
    """
    resolved_folder = folder.resolve()
    for file in resolved_folder.glob("*"):
        try:
            target = file.resolve(strict=True)
        except (OSError, RuntimeError):  # a loop is a RuntimeError before Python 3.13
            raise _outside_folder_error(file) from None
        if not any(
            map(target.is_relative_to, (resolved_folder, resolved_folder.parent.parent / "blobs"))
        ):
            raise _outside_folder_error(file)
        is_needed = file.suffix in _FILE_ENDINGS
        if not (target.is_file() or target.is_dir()) or (is_needed and target.is_dir()):
            kind = "a folder" if target.is_dir() else "a pipe or a device"
            raise UserError(f"{str(file)!r} is {kind}; expected a file. Remove it.")


def _outside_folder_error(file: Path) -> UserError:
    return UserError(
        f"{str(file)!r} leads out of the folder, or nowhere; expected a file in it. Replace the "
        "link with a copy of the file, or remove it."
    )


def _read_json(file: Path, **fields: Any) -> dict[str, Any]:
    try:
        return parse_object(file.read_bytes(), file.name, **fields)
    except (OSError, UserError) as error:
        raise read_error(file, error) from None


def read_error(file: Path, error: Exception) -> UserError:
    """Return the error for a file that is missing, corrupt or of another format."""
    reason = one_line(error).rstrip(".")
    return UserError(
        f"{str(file)!r} cannot be read ({reason}); expected a file from a Hugging Face folder in "
        "transformers' format. Download it again: hf download NAME --local-dir FOLDER"
    )
