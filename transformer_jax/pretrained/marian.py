"""Marian's own files: model.npz, decoder.yml, and vocabularies in YAML or SentencePiece.

Its arrays are read with the axes of transformers: kernels [O, I] and vectors [N], where Marian has
[I, O] and [1, N]. Marian has no PAD, and the decoder's first input is a zero vector
(``ModelConfig.zero_decoder_start``). PAD is a new token after the vocabulary, with probability 0.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.errors import UserError, needs_extra, one_line, short_repr
from transformer_jax.pretrained.files import LazyArray, PretrainedFiles, check_files
from transformer_jax.tokenization.segmenters import read_sentencepiece

_CONFIG = "special:model.yml"
_KERNEL = re.compile(r"_W[qkvo12]$|logit_out_W$")
_VOCABULARY_ROWS = re.compile(r"Wemb$|logit_out_(Wt|b)$")
# Softmax bias of ids without a token. Adding exp(-50) changes no sum of probabilities, and the mean
# of all biases, in label smoothing, stays small.
_BIAS_OF_MISSING_TOKENS = -50
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)")
_CONTROL_CHARACTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0"}
# Operations before and after a sublayer and after the last layer, without dropout: fields of
# ``ModelConfig``.
_NORMS = {
    ("", "an", ""): ("post", False),
    ("", "an", "n"): ("post", True),
    ("n", "a", ""): ("pre", False),
    ("n", "a", "n"): ("pre", True),
}


class MarianFiles(PretrainedFiles):
    """The files of a model. Its config.json and generation_config.json have the settings that
    Marian keeps in model.npz and decoder.yml.
    """

    copied_files = ("*.yml", "*.spm", "*.sh", "LICENSE*")

    def __init__(self, folder: Path):
        super().__init__(folder)
        check_files(folder)
        decoder_file = _only_file(folder, "decoder.yml")
        decoder = _read_yaml(decoder_file.read_bytes(), str(decoder_file))
        if decoder.get("word-penalty"):
            raise UserError(
                f"word-penalty in {str(decoder_file)!r} is {decoder['word-penalty']!r}; expected "
                "0, because our search has no such penalty. Change it in the file."
            )
        self.model_file = _only_file(folder, "*.npz", *_names(decoder, "models", decoder_file))
        self._arrays = _read_npz(self.model_file)
        self._config = self._arrays.pop(_CONFIG)
        config = _read_yaml(self._config.tobytes().rstrip(b"\0"), f"{_CONFIG} of the model")
        names = _names(decoder, "vocabs", decoder_file)
        if len(names) != 2:
            raise UserError(
                f"vocabs in {str(decoder_file)!r} are {short_repr(names)}; expected two files, of "
                "the source's and the target's vocabulary."
            )
        self._vocabulary_files = [_only_file(folder, name) for name in dict.fromkeys(names)]
        if self._vocabulary_files[0].suffix == ".spm":
            self.segmenters = [file.name for file in self._vocabulary_files]
        self.vocabularies = [_read_vocabulary(file) for file in self._vocabulary_files]
        self._sizes = [max(ids.values()) + 1 for ids in self.vocabularies]
        pad_id = max(self._sizes)
        for ids in self.vocabularies:
            ids.setdefault("<pad>", pad_id)
        self.settings = _norm_settings(config)
        self["config.json"] = {
            **config,
            "model_type": "marian-npz",
            "share_encoder_decoder_embeddings": _is_on(config, "-all", "-src"),
            "tie_word_embeddings": _is_on(config, "-all", ""),
            "vocab_size": pad_id + 1,
            "pad_token_id": pad_id,
            "decoder_start_token_id": pad_id,
            "eos_token_id": self.vocabularies[-1]["</s>"],
        }
        unknown_id = self.vocabularies[-1]["<unk>"]
        self["generation_config.json"] = {
            "num_beams": decoder.get("beam-size", 12),
            "length_penalty": float(decoder.get("normalize", 0)),
            "bad_words_ids": [] if decoder.get("allow-unk") else [[unknown_id]],
        }

    def open_tensors(self, allow_pickle: bool = False) -> dict[str, LazyArray]:
        tensors = {}
        for name, array in self._arrays.items():
            if array.dtype.kind != "f":
                raise UserError(
                    f"{str(self.model_file)!r} has values of type {array.dtype} in {name}; "
                    "expected floats. The model is quantized: use the model that it was quantized "
                    "from."
                )
            x = array.T if _KERNEL.search(name) else array
            x = x[0] if len(x) == 1 else x
            new_name = re.sub("logit_out_W$", "logit_out_Wt", name)
            if _VOCABULARY_ROWS.search(new_name):
                x = self._with_padding(name, x)
            new_name = re.sub("(_ln_(?:scale|bias))_pre$", r"\1", new_name)
            tensors[new_name] = LazyArray.of(x)
        return tensors

    def _with_padding(self, name: str, x: np.ndarray) -> np.ndarray:
        """Append rows for ids without a token, such as PAD."""
        side = 0 if name.startswith("encoder") else -1
        if len(x) != self._sizes[side]:
            raise UserError(
                f"{str(self._vocabulary_files[side])!r} has {self._sizes[side]} tokens, but {name} "
                f"in {self.model_file.name} has {len(x)} rows; expected the same number."
            )
        widths = [(0, max(self._sizes) + 1 - len(x)), *[(0, 0)] * (x.ndim - 1)]
        return np.pad(x, widths, constant_values=_BIAS_OF_MISSING_TOKENS if x.ndim == 1 else 0)

    def write(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Write the model again, with other values of ``open_tensors``."""
        is_pre_norm = self.settings["norm"] == "pre"
        arrays = {}
        for name, x in tensors.items():
            if _VOCABULARY_ROWS.search(name):
                x = x[: self._sizes[0 if name.startswith("encoder") else -1]]
            x = x.T if _KERNEL.search(name) else x
            is_before = "_emb_ln_" in name or (is_pre_norm and "_top_ln_" not in name)
            suffix = "_pre" if "_ln_" in name and is_before else ""
            arrays[name + suffix] = x[None] if x.ndim == 1 else x
        np.savez(self.model_file, allow_pickle=False, **arrays, **{_CONFIG: self._config})

    def other_contents(self) -> dict[str, bytes]:
        """Return the model without its arrays."""
        content = BytesIO()
        np.savez(content, allow_pickle=False, **{_CONFIG: self._config})
        return {self.model_file.name: content.getvalue()}


def read_marian_files(folder: Path) -> MarianFiles | None:
    """Open the folder of a model in Marian's own format; None: it is in another format."""
    is_marian = any(folder.glob("*.npz")) and not (folder / "config.json").exists()
    return MarianFiles(folder) if is_marian else None


def _read_npz(file: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        if _CONFIG not in arrays:
            raise ValueError(f"it has no {_CONFIG}")
        return arrays
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise _corrupt(file, error) from None


def unpack(archive_file: Path, folder: Path) -> None:
    """Write the files of a zip archive, such as OPUS-MT's, to ``folder``, without its folders.

    Raises ``UserError`` for a file outside the archive, and for another kind of file.
    """
    try:
        with zipfile.ZipFile(archive_file) as archive:
            for entry in archive.infolist():
                path = Path(entry.filename)
                if path.is_absolute() or ".." in path.parts or "\\" in entry.filename:
                    raise UserError(
                        f"{str(archive_file)!r} has the path {entry.filename!r}, which leads out "
                        "of the archive; expected the names of files. Do not use this archive."
                    )
                if not entry.is_dir():
                    (folder / path.name).write_bytes(archive.read(entry))
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise _corrupt(archive_file, error) from None


def _corrupt(file: Path, error: Exception) -> UserError:
    return UserError(
        f"{str(file)!r} cannot be read ({one_line(error)}); expected the file of a Transformer "
        "that Marian has written. Download it again."
    )


def _only_file(folder: Path, pattern: str, *names: str) -> Path:
    """Return the file of one of these names, or else the only one that fits the pattern."""
    files = [folder / name for name in names if (folder / name).is_file()]
    files = files or [folder / pattern] * (folder / pattern).is_file()
    files = files or sorted(folder.glob(f"*{pattern}"))
    if len(files) != 1:
        names_found = ", ".join(file.name for file in files) or f"no {pattern}"
        raise UserError(
            f"{str(folder)!r} has {names_found}; expected one such file. Give the folder or zip of "
            "a single model of Marian."
        )
    return files[0]


def _names(decoder: dict[str, Any], field: str, file: Path) -> list[str]:
    """Return the names of files that decoder.yml lists."""
    paths = decoder.get(field)
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise UserError(
            f"{field} in {str(file)!r} is {short_repr(paths)}; expected a list of files."
        )
    return [path.rpartition("/")[2] for path in paths]


def _read_yaml(content: bytes, name: str) -> dict[str, Any]:
    """Parse YAML that has only numbers, strings and lists of them. No code is run."""
    with needs_extra("pretrained"):
        import yaml
    try:
        fields = yaml.safe_load(content.decode())
        if not isinstance(fields, dict):
            raise ValueError("it has no fields")
        for field, value in fields.items():
            items = value if isinstance(value, list) else [value]
            if any(isinstance(item, dict | list) for item in items):
                raise ValueError(f"{field} has nested values")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(
            f"{name} is not a file of settings ({one_line(error)}); expected YAML as Marian writes "
            "it, with numbers, strings and lists of them."
        ) from None
    return fields


def _is_on(config: Mapping[str, Any], *endings: str) -> bool:
    return any(config.get(f"tied-embeddings{ending}") for ending in endings)


def _norm_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``ModelConfig`` for the places of norms.

    Raises ``UserError`` for other operations, such as highway connections.
    """
    names = [f"transformer-{name}" for name in ("preprocess", "postprocess", "postprocess-top")]
    operations = tuple(str(config.get(name) or "").replace("d", "") for name in names)
    after_embedding = str(config.get("transformer-postprocess-emb") or "").replace("d", "")
    if operations not in _NORMS or after_embedding not in ("", "n"):
        listed = ", ".join(f"{name} {config.get(name)!r}" for name in names)
        raise UserError(
            f"{_CONFIG} has {listed} and transformer-postprocess-emb "
            f"{config.get('transformer-postprocess-emb')!r}; expected '', 'dan', '' or 'n', 'da', "
            "'n', and 'd' or 'nd'. Other operations are not supported."
        )
    norm, final_norm = _NORMS[operations]
    has_embedding_norm = after_embedding == "n"
    return {
        "norm": norm,
        "final_norm": final_norm,
        "embedding_norm": has_embedding_norm,
        "share_positions": not has_embedding_norm,
    }


def _read_vocabulary(file: Path) -> dict[str, int]:
    """Return the ids of the tokens in a SentencePiece model or in YAML.

    PyYAML cannot read all characters that Marian writes, so the YAML is parsed here: one token a
    line, or a key and a value on two lines.
    """
    ids: dict[str, int] = {}
    if file.suffix == ".spm":
        ids = dict(read_sentencepiece(file).ids)
    elif file.suffix in (".yml", ".yaml"):
        text = re.sub(r"^\? (.*)\n: ", r"\1: ", file.read_text(errors="replace"), flags=re.M)
        for number, line in enumerate(text.split("\n"), 1):
            key, _, value = line.rstrip().rpartition(":")
            if key and value.strip().isdecimal():
                ids.setdefault(_unquoted(key), int(value))
            elif line.strip():
                raise UserError(
                    f"{str(file)!r}, line {number} is {short_repr(line)}; expected a token, a "
                    "colon and an id."
                )
    else:
        raise UserError(
            f"The vocabulary is {str(file)!r}; expected .yml or .spm. Factored and other "
            "vocabularies are not supported."
        )
    missing = [token for token in ("</s>", "<unk>") if token not in ids]
    if missing:
        raise UserError(f"{str(file)!r} has no token {missing[0]}; expected </s> and <unk>.")
    return ids


def _unquoted(key: str) -> str:
    """Return the token of a key in YAML."""

    def character(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if len(code) > 1 else _CONTROL_CHARACTERS.get(code, code)

    if len(key) > 1 and key[0] == key[-1] == '"':
        return _ESCAPE.sub(character, key[1:-1])
    if len(key) > 1 and key[0] == key[-1] == "'":
        return key[1:-1].replace("''", "'")
    return key
