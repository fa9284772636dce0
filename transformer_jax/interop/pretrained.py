"""Reads pretrained models in transformers' format, one tensor at a time."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from transformer_jax import (
    Config,
    ModelConfig,
    OptimizerConfig,
    Tokenizer,
    TokenizerConfig,
    TrainingConfig,
    UserError,
)
from transformer_jax.interop.families import ACTIVATIONS, FAMILIES, Family
from transformer_jax.interop.search_settings import IN_CONFIG, from_transformers
from transformer_jax.interop.weights import (
    library_names,
    parameter_name,
    parameter_shapes,
    plain_shape,
    reordered_weight,
    sines_first,
    transposed,
)
from transformer_jax.support import RustTokenizer, parse_object, short_repr
from transformer_jax.tokenization.tokenizer import Languages

# Added to the logit of a token that must never be generated. e^-100 is negligible in float32.
NEVER = np.float32(-100)
# Files that an export copies, apart from the weights.
_KEPT = ("*.json", "*.model", "*.spm", "*.txt")
_VOCABULARY_WEIGHTS = ("embedding.matrix", "softmax_matrix", "softmax_bias")
_DEFAULTS = {  # fields that config.json can omit
    **{"activation_dropout": 0.0, "attention_dropout": 0.0, "num_decoder_layers": None},
    **{"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
    **{"feed_forward_proj": "relu", "scale_embedding": False, "activation_function": "gelu"},
}


@dataclass(frozen=True)
class LazyArray:
    """A parameter that is read from its file when NumPy asks for it."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.read()


@dataclass(frozen=True)
class Rows:
    """Order of the vocabulary: our ids in terms of theirs."""

    theirs: np.ndarray
    """Their id of each of our ids; -1: a token that they do not have."""
    start: str
    """The special token that is the decoder's first input (``ModelConfig.decoder_start``)."""

    @property
    def ours(self) -> np.ndarray:
        """Our id of each of their ids."""
        order = np.empty(self.theirs.max() + 1, np.int64)
        order[self.theirs[self.theirs >= 0]] = np.flatnonzero(self.theirs >= 0)
        return order


class Pretrained:
    """A folder with config.json, weights and a tokenizer, of one of ``FAMILIES``.

    Raises ``UserError`` if a file, setting or tensor is missing, unexpected or unsupported.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.theirs = _read_json(folder / "config.json", vocab_size=int)
        kind = self.theirs.get("model_type")
        if kind not in FAMILIES:
            raise UserError(
                f"model_type in {str(folder / 'config.json')!r} is {kind!r}; expected one of: "
                f"{', '.join(['marian', *FAMILIES])}."
            )
        self.kind, self.family = str(kind), FAMILIES[str(kind)]
        size = self.theirs["vocab_size"]
        if not 4 <= size < 2**24:
            raise UserError(f"vocab_size in config.json is {size}; expected 4 to {2**24}.")
        self._tensors = _tensors(folder)
        self.vocabulary = _vocabulary(folder, self.family)
        if outside := [token for token, i in self.vocabulary.items() if not 0 <= i < size]:
            raise UserError(
                f"The tokenizer in {str(folder)!r} has {len(outside)} tokens with ids outside the "
                f"embedding matrix, such as {outside[0]!r}; expected ids below vocab_size in "
                f"config.json, {size}."
            )
        self.rows = self._rows()

    def _rows(self) -> Rows:
        """Put PAD, BOS, EOS and UNK first, and keep the order of the other tokens."""
        theirs, size = self.theirs, self.theirs["vocab_size"]
        ids = {name: theirs.get(f"{name}_token_id") for name in ("pad", "bos", "eos")}
        ids["unk"] = self.vocabulary.get("<unk>")
        default = ids["pad"] if self.family.settings.get("positions") == "relative" else ids["eos"]
        start_id = theirs.get("decoder_start_token_id")
        start_id = default if start_id is None else start_id
        if start_id not in ids.values():  # a language code
            ids["bos"] = start_id
        elif list(ids.values()).count(ids["bos"]) > 1:
            ids["bos"] = None
        start = next(name for name in ("eos", "pad", "unk", "bos") if ids[name] == start_id)
        unused = sorted({*range(size)} - {*self.vocabulary.values()} - {*ids.values()})
        for name in ("bos", "unk"):
            if ids[name] is None:
                ids[name] = unused.pop() if unused else -1
        first = [ids[name] for name in ("pad", "bos", "eos", "unk")]
        known = [i for i in first if i != -1]
        if len(set(known)) < len(known) or not all(type(i) is int and i < size for i in known):
            raise UserError(
                f"Special tokens in config.json are {ids}; expected distinct ids below {size} for "
                "pad_token_id and eos_token_id."
            )
        rest = np.setdiff1d(np.arange(size), known)
        return Rows(np.concatenate([np.array(first), rest]), start)

    def model_config(self) -> ModelConfig:
        """Return the architecture, and check settings that have no counterpart."""
        theirs, family = _DEFAULTS | self.theirs, self.family
        required = dict(family.required)
        for name in ("ffn_dim", "attention_heads"):
            if f"encoder_{name}" in theirs:
                required[f"decoder_{name}"] = (theirs[f"encoder_{name}"],)
        scales: dict[Any, str] = {True: "tokens", False: "none"}
        values = {"activation": ACTIVATIONS, "embedding_scale": scales}
        fields: dict[str, Any] = dict(family.settings)
        for name, ours in family.fields.items():
            if name not in theirs:
                raise UserError(f"config.json: {name} is missing; download the file again.")
            value = theirs[name]
            if ours in values:
                required[name] = tuple(values[ours])
                value = values[ours].get(value) if isinstance(value, str | bool) else None
            fields[ours] = value
        for name, allowed in required.items():
            if theirs.get(name, allowed[0]) not in allowed:
                raise UserError(
                    f"{name} in config.json is {short_repr(theirs[name])}; expected "
                    f"{' or '.join(map(repr, allowed))} for {family.name}."
                )
        if "d_k" in fields:
            fields["d_v"] = fields["d_k"]
            fields["attention_dropout"] = fields["feed_forward_dropout"] = fields["dropout"]
            tied = theirs.get("tie_word_embeddings") is not False
            fields["output_scale"] = self.kind != "mt5" and theirs.get(
                "scale_decoder_outputs", tied
            )
        if fields.get("positions") == "learned":
            fields["max_positions"] = theirs["max_position_embeddings"]
        fields["softmax_bias"] = fields.get("softmax_bias", False) or -1 in self.rows.theirs
        return ModelConfig(
            **fields,
            vocab_size=len(self.rows.theirs),
            tie_embeddings="embeddings" if self._has_softmax_matrix() else "all",
            decoder_start=self.rows.start,
        )

    def _has_softmax_matrix(self) -> bool:
        """True if the softmax has its own matrix: files can store a tied matrix twice."""
        names = self.family.library.names
        softmax, shared = (self._tensors.get(names[each]) for each in _TIED)
        if softmax is None or shared is None:
            return False
        return softmax.shape != shared.shape or not np.array_equal(softmax.read(), shared.read())

    def parameters(self, config: ModelConfig) -> dict[tuple[Any, ...], LazyArray]:
        """Return the parameters by path, and check the names and shapes of all tensors."""
        shapes = parameter_shapes(config)
        names = library_names(shapes, self.family.library)
        order_D = np.argsort(sines_first(config.d_model)) if self.family.sines_first else None
        found, used = {}, set()
        for path, shape in shapes.items():
            ours = parameter_name(path)
            theirs = names[ours]
            tensor = self._tensors.get(theirs)
            expected = transposed(ours, np.broadcast_to(0, plain_shape(ours, shape))).shape
            if ours.endswith(_VOCABULARY_WEIGHTS):
                expected = (self.theirs["vocab_size"], *expected[1:])
            if tensor is None and ours == "softmax_bias":
                tensor = LazyArray(expected, lambda n=expected: np.zeros(n, np.float32))  # type: ignore[misc]
            if ours == "softmax_bias" and tensor is not None:
                tensor = LazyArray(tensor.shape[-1:], lambda t=tensor: t.read().reshape(-1))  # type: ignore[misc]
            if tensor is None or tensor.shape != expected:
                has = "no tensor" if tensor is None else f"shape {tensor.shape}"
                raise UserError(
                    f"The weights in {str(self.folder)!r} have {has} for {theirs}; expected shape "
                    f"{expected}."
                )
            used.add(theirs)
            found[path] = LazyArray(shape, _Read(ours, theirs, tensor, shape, self.rows, order_D))
        self._check_unused(used)
        return found

    def _check_unused(self, used: set[str]) -> None:
        for name in sorted(self._tensors.keys() - used):
            if not _REDUNDANT.search(name):
                raise UserError(
                    f"The weights in {str(self.folder)!r} have {name}, with shape "
                    f"{self._tensors[name].shape}; expected no such tensor in "
                    f"{self.family.name}."
                )

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, with our ids."""
        token_of = {i: token for token, i in self.vocabulary.items()}
        names = [token_of.get(i, f"<unused_{i}>") for i in self.rows.theirs]
        json_file = self.folder / "tokenizer.json"
        model = json_file if json_file.exists() else self.folder / "sentencepiece.bpe.model"
        content = model.read_bytes()
        return Tokenizer(
            content, vocabulary=names, languages=self._languages(), pretrained=self._archive()
        )

    def _languages(self) -> Languages:
        pattern = re.compile(self.family.languages or "(?!)")
        tokens = {
            match[match.lastindex or 0]: token
            for token in sorted(self.vocabulary, key=self.vocabulary.__getitem__)
            if (match := pattern.fullmatch(token))
        }
        if self.kind == "bart":
            return Languages({}, "<s>", "<s>")
        settings = _read_json(self.folder / "tokenizer_config.json", missing_ok=True)
        token_of = {i: token for token, i in self.vocabulary.items()}
        forced = token_of.get(self.search_settings().get("forced_bos_token_id"), "")
        default = next(iter(tokens.values()), "")
        target = tokens.get(settings.get("tgt_lang") or "", "") or forced
        return Languages(tokens, tokens.get(settings.get("src_lang") or "", default), target)

    def search_settings(self) -> dict[str, Any]:
        """Return the settings of ``generate``, which older versions wrote to config.json."""
        settings = _read_json(self.folder / "generation_config.json", missing_ok=True)
        older = {name: x for name, x in self.theirs.items() if IN_CONFIG.search(name)}
        return settings or older

    def config(self, model: ModelConfig) -> Config:
        """Return settings for decoding and for fine-tuning."""
        token_of = dict(zip(self.rows.theirs.tolist(), range(len(self.rows.theirs))))
        names = {i: token for token, i in self.vocabulary.items() if token_of.get(i) != 0}
        decoding = from_transformers(self.search_settings(), names, self.folder)
        return Config(
            model=model,
            tokenizer=TokenizerConfig(vocab_size=model.vocab_size),
            # a low learning rate for fine-tuning
            optimizer=OptimizerConfig(peak_learning_rate=1e-4, warmup_steps=1000),
            training=TrainingConfig(),
            decoding=decoding,
        )

    def _archive(self) -> bytes:
        """Return a zip archive of all files but the weights, for exports."""
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted({f for pattern in _KEPT for f in self.folder.glob(pattern)}):
                if file.name != "tokenizer.json" and "index.json" not in file.name:
                    archive.writestr(zipfile.ZipInfo(file.name), file.read_bytes())
        return content.getvalue()


_TIED = ("softmax_matrix", "target_embedding.matrix")
# Copies of tied matrices, and sinusoids.
_REDUNDANT = re.compile(
    r"(embed_tokens|lm_head|shared)\.weight$|embed_positions\.weights?$|"
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias"
)


@dataclass(frozen=True)
class _Read:
    """Reads a tensor as our parameter."""

    ours: str
    theirs: str
    tensor: LazyArray
    shape: tuple[int, ...]
    rows: Rows
    order_D: np.ndarray | None

    def __call__(self) -> np.ndarray:
        x = self.tensor.read()
        if not np.isfinite(x.sum(dtype=np.float64)):
            raise UserError(
                f"{self.theirs} has NaN or infinite values; expected finite numbers. Download or "
                "train the weights again."
            )
        x = transposed(self.ours, x)
        if self.order_D is not None:
            x = reordered_weight(self.ours, x, self.order_D)
        if self.ours.endswith(_VOCABULARY_WEIGHTS):
            theirs = self.rows.theirs
            x = x[theirs]
            x[theirs < 0] = NEVER if self.ours == "softmax_bias" else 0
        return np.ascontiguousarray(x.reshape(self.shape))


def _tensors(folder: Path) -> dict[str, LazyArray]:
    """Return the tensors in model.safetensors or its shards, by name."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    names = [whole.name]
    if index.exists() and not whole.exists():
        table = _read_json(index, weight_map=dict)["weight_map"]
        names = sorted({str(name) for name in table.values()})
    found = {}
    for name in names:
        file = folder / name
        if Path(name).name != name or not _is_inside(file, folder):
            raise UserError(f"{str(file)!r} leads out of the folder; expected a file in it.")
        try:
            with safe_open(file, framework="flax") as opened:
                for each in opened.keys():  # noqa: SIM118: not a dict
                    found[each] = _lazy(file, each, tuple(opened.get_slice(each).get_shape()))
        except Exception as error:  # many exception types, not all public
            raise _not_read(file, error) from None
    return found


def _lazy(file: Path, name: str, shape: tuple[int, ...]) -> LazyArray:
    def read() -> np.ndarray:
        with safe_open(file, framework="flax") as opened:
            return np.asarray(opened.get_tensor(name), np.float32)

    return LazyArray(shape, read)


def _is_inside(file: Path, folder: Path) -> bool:
    """True unless the file is a link to another folder, other than the blobs of the hub's cache."""
    target, folder = file.resolve(), folder.resolve()
    blobs = folder.parent.parent / "blobs"
    return target.is_relative_to(folder) or target.is_relative_to(blobs)


def _vocabulary(folder: Path, family: Family) -> dict[str, int]:
    """Return the tokens' ids."""
    file = folder / "tokenizer.json"
    if file.exists():
        return RustTokenizer(file.read_bytes()).ids
    file = folder / "vocab.json"
    if not (folder / "sentencepiece.bpe.model").exists() or not file.exists():
        raise UserError(
            f"{str(folder)!r} has no tokenizer.json; expected that file, or vocab.json and "
            "sentencepiece.bpe.model. transformers writes it: "
            "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)."
        )
    ids = _read_json(file, **dict.fromkeys(_read_json(file), int))
    special = _read_json(folder / "tokenizer_config.json", missing_ok=True)
    added = special.get("added_tokens_decoder") or {}
    ids |= {token["content"]: int(i) for i, token in added.items()}
    more = special.get("additional_special_tokens") or special.get("extra_special_tokens") or []
    if not more:
        settings = _read_json(folder / "special_tokens_map.json", missing_ok=True)
        more = settings.get("additional_special_tokens") or []
    for token in more:
        ids.setdefault(token if isinstance(token, str) else token["content"], len(ids))
    return ids


def _read_json(file: Path, *, missing_ok: bool = False, **fields: Any) -> dict[str, Any]:
    if missing_ok and not file.exists():
        return {}
    try:
        return parse_object(file.read_bytes(), file.name, **fields)
    except (OSError, UserError) as error:
        raise _not_read(file, error) from None


def _not_read(file: Path, error: Exception) -> UserError:
    return UserError(
        f"{str(file)!r} cannot be read ({str(error).rstrip('.')}); expected a file of a pretrained "
        "model in transformers' format with model.safetensors. Download it again, for example: hf "
        "download NAME --local-dir FOLDER"
    )
