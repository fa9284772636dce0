"""Files of pretrained models in transformers' format: JSON, and weights one tensor at a time."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from transformer_jax.errors import UserError, one_line
from transformer_jax.storage.files import check_types, parse_object

# Names in safetensors files.
_DTYPES: dict[str, Any] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": jnp.bfloat16}
_FILE_ENDINGS = (".json", ".safetensors", ".bin", ".model", ".spm", ".txt", ".npz", ".yml")


@dataclass(frozen=True)
class LazyArray:
    """A parameter that is read from its file when NumPy asks for it."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    """Reads it as float32."""
    map: Callable[[], np.ndarray]
    """Returns an array in the type of the file. Where possible, only the parts of it that are used
    are read."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.read()


def open_tensors(folder: Path, allow_pickle: bool = False) -> dict[str, LazyArray]:
    """Return the tensors in model.safetensors, its shards or pytorch_model.bin, by name."""
    single_file = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    pickle = folder / "pytorch_model.bin"
    if not (single_file.exists() or index.exists()):
        if allow_pickle and pickle.exists():
            return _read_pickle(pickle)
        if allow_pickle:
            raise UserError(
                f"{str(folder)!r} has no model.safetensors and no {pickle.name}; expected one of "
                "them. Pickles in several files are not read: let transformers load the model and "
                "write it again, with save_pretrained(FOLDER)."
            )
        raise UserError(
            f"{str(folder)!r} has no model.safetensors. Use a revision that has it, for example "
            "NAME@refs/pr/NUMBER (docs/pretrained.md). If the model has only pytorch_model.bin, a "
            "pickle, and you trust it: python -m transformer_jax.pretrained import --allow-pickle."
        )
    names = [single_file.name]
    if index.exists() and not single_file.exists():
        table = _read_json(index, weight_map=dict)["weight_map"]
        names = sorted({str(name) for name in table.values()})
    tensors: dict[str, LazyArray] = {}
    for name in names:
        file = folder / name
        if Path(name).name != name:
            raise _outside_folder_error(file)
        try:
            with safe_open(file, framework="numpy"), file.open("rb") as stream:  # checks the file
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            header.pop("__metadata__", None)
        except Exception as error:  # many exception types, not all public
            raise read_error(file, error) from None
        for tensor, header_entry in header.items():
            if header_entry["dtype"] not in _DTYPES:
                raise UserError(
                    f"{str(file)!r} has values of type {header_entry['dtype']} in {tensor}; "
                    f"expected {', '.join(_DTYPES)}. The model is quantized: use the model that it "
                    "was quantized from."
                )
            tensors[tensor] = _lazy_tensor(file, header_entry)
    return tensors


def _read_pickle(file: Path) -> dict[str, LazyArray]:
    try:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch, for unusual pickles
            read = torch.load(file, map_location="cpu", weights_only=True)
        arrays = {name: x.detach().float().numpy() for name, x in read.items()}
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
    return {name: lazy_array(x.shape, lambda x=x: x) for name, x in arrays.items()}  # type: ignore[misc]


def lazy_array(shape: Sequence[int], read: Callable[[], np.ndarray]) -> LazyArray:
    """Return an array that is always read as a whole."""
    return LazyArray(tuple(shape), read, read)


def _lazy_tensor(file: Path, header_entry: Mapping[str, Any]) -> LazyArray:
    """Return a tensor, given its place in the file. Memory-mapped pages would count as memory."""
    start, end = header_entry["data_offsets"]
    dtype = np.dtype(_DTYPES[header_entry["dtype"]])
    shape = tuple(header_entry["shape"])

    def begin() -> int:
        with file.open("rb") as stream:
            return 8 + int.from_bytes(stream.read(8), "little") + start

    def read() -> np.ndarray:
        x = np.fromfile(file, dtype, (end - start) // dtype.itemsize, offset=begin())
        return x.reshape(shape).astype(np.float32, copy=False)

    def map_file() -> np.ndarray:
        return np.memmap(file, dtype, "r", begin(), shape)

    return LazyArray(shape, read, map_file)


class JsonFiles(dict[str, dict[str, Any]]):
    """JSON objects in a folder, by file name. Each file is read once, when it is first needed.

    A missing file is an empty object.

    Attributes:
      copied_files: patterns of the files that an export copies, apart from the weights.
    """

    copied_files: tuple[str, ...] = ("*.json", "*.model", "*.spm", "*.txt")

    def __init__(self, folder: Path):
        self.folder = folder

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

    def open_tensors(self, allow_pickle: bool = False) -> dict[str, LazyArray]:
        """Return the weights by name."""
        return open_tensors(self.folder, allow_pickle)

    def other_contents(self) -> dict[str, bytes]:
        """Return the contents of further files that an export needs, by name."""
        return {}


def read_files(folder: Path) -> JsonFiles:
    """Open the folder of a pretrained model.

    Raises ``UserError`` if it has no config.json, or links and pipes among its files.
    """
    check_files(folder)
    files = JsonFiles(folder)
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
