"""Reads pretrained models in transformers' format, one tensor at a time."""

from __future__ import annotations

import dataclasses
import io
import re
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from transformer_jax import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    Tokenizer,
    TokenizerConfig,
    TrainingConfig,
    Transformer,
    UserError,
    sinusoidal_positions,
)
from transformer_jax.interop.families import ACTIVATIONS, FAMILIES
from transformer_jax.interop.files import LazyArray, check_links, open_tensors, read_json
from transformer_jax.interop.pretrained_tokenizer import read_tokenizer
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
from transformer_jax.support import Languages, short_repr

# Added to the logit of a token that must never be generated. e^-100 is negligible in float32.
NEVER = np.float32(-100)
# Files that an export copies, apart from the weights.
_KEPT = ("*.json", "*.model", "*.spm", "*.txt")
_VOCABULARY_WEIGHTS = ("embedding.matrix", "softmax_matrix", "softmax_bias")
_ENGLISH = ("eng_Latn", "en_XX", "en")
_DEFAULTS = {  # fields that config.json can omit
    **{"activation_dropout": 0.0, "attention_dropout": 0.0, "num_decoder_layers": None},
    **{"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
    **{"feed_forward_proj": "relu", "scale_embedding": False, "activation_function": "gelu"},
}


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
        check_links(folder)
        self.folder = folder
        self.theirs = read_json(folder / "config.json", {"vocab_size": int})
        kind = self.theirs.get("model_type")
        if str(kind) not in FAMILIES:
            raise UserError(
                f"model_type in {str(folder / 'config.json')!r} is {kind!r}; expected one of: "
                f"{', '.join(['marian', *FAMILIES])}."
            )
        self.kind, self.family = str(kind), FAMILIES[str(kind)]
        size = self.theirs["vocab_size"]
        if not 4 <= size < 2**24:
            raise UserError(f"vocab_size in config.json is {size}; expected 4 to {2**24}.")
        self._model, self.vocabulary = read_tokenizer(folder, self.family)
        if outside := [token for token, i in self.vocabulary.items() if not 0 <= i < size]:
            raise UserError(
                f"The tokenizer in {str(folder)!r} has {len(outside)} tokens with ids outside the "
                f"embedding matrix, such as {outside[0]!r}; expected ids below vocab_size in "
                f"config.json, {size}."
            )
        self.rows = self._rows()

    @cached_property
    def _tensors(self) -> dict[str, LazyArray]:
        return open_tensors(self.folder)

    def _rows(self) -> Rows:
        """Put PAD, BOS, EOS and UNK first, and keep the order of the other tokens."""
        theirs, size = self.theirs, self.theirs["vocab_size"]
        ids = {name: theirs.get(f"{name}_token_id") for name in ("pad", "bos", "eos")}
        ids["unk"] = self.vocabulary.get("<unk>")
        default = ids["pad"] if self.family.settings.get("positions") == "relative" else ids["eos"]
        start_id = theirs.get("decoder_start_token_id")
        start_id = default if start_id is None else start_id
        its = [start_id, *ids.values()]
        if not all(i is None or (type(i) is int and 0 <= i < size) for i in its):
            raise self._wrong_ids(ids)
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
        known: Any = [i for i in first if i != -1]
        if len(set(known)) < len(known) or None in known:
            raise self._wrong_ids(ids)
        rest = np.setdiff1d(np.arange(size), known)
        return Rows(np.concatenate([np.array(first), rest]), start)

    def _wrong_ids(self, ids: dict[str, Any]) -> UserError:
        return UserError(
            f"Special tokens in {str(self.folder / 'config.json')!r} are {short_repr(ids)}; "
            f"expected distinct ids below {self.theirs['vocab_size']} for pad_token_id, "
            "eos_token_id and decoder_start_token_id."
        )

    def model_config(self, tied: bool | None = None) -> ModelConfig:
        """Return the architecture, and check settings that have no counterpart.

        ``tied``: the softmax uses the embedding matrix (None: as the weights do).
        """
        tied = self._ties_softmax() if tied is None else tied
        theirs, family = _DEFAULTS | self.theirs, self.family
        required = dict(family.required)
        for name in ("ffn_dim", "attention_heads"):
            if f"encoder_{name}" in theirs:
                required[f"decoder_{name}"] = (theirs[f"encoder_{name}"],)
        scale_names: dict[Any, str] = {True: "tokens", False: "none"}
        values = {"activation": ACTIVATIONS, "embedding_scale": scale_names}
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
            untied = theirs.get("tie_word_embeddings") is False
            scales = theirs.get("scale_decoder_outputs", not untied)
            fields["output_scale"] = scales and self.kind != "mt5"
        fields["softmax_bias"] = fields.get("softmax_bias", False) or -1 in self.rows.theirs
        fields["decoder_start"] = self.rows.start
        return ModelConfig(
            **fields,
            vocab_size=len(self.rows.theirs),
            tie_embeddings="all" if tied else "embeddings",
        )

    def _ties_softmax(self) -> bool:
        """True if the softmax uses the embedding matrix. Files can store a tied matrix twice."""
        names = self.family.library.names
        softmax, shared = (self._tensors.get(names[each]) for each in _TIED)
        if softmax is None or shared is None:
            return True
        return softmax.shape == shared.shape and np.array_equal(softmax.read(), shared.read())

    def parameters(self, config: ModelConfig) -> dict[tuple[Any, ...], LazyArray]:
        """Return the parameters by path, and check the names and shapes of all tensors."""
        names = self._names(config)
        order_D = np.argsort(sines_first(config.d_model)) if self.family.sines_first else None
        found, used = {}, set()
        for path, shape in parameter_shapes(config).items():
            ours = parameter_name(path)
            theirs = names.get(ours, ours)
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

    def _names(self, config: ModelConfig) -> dict[str, str]:
        """Map the names of our parameters to theirs."""
        library, paths = self.family.library, set(parameter_shapes(config))
        if "softmax_bias" not in library.names:  # only for tokens that they do not have
            paths.discard(("softmax_bias",))
        names = library_names(paths, library)
        if config.is_gated:  # T5's first matrix has another name then
            return {ours: theirs.replace(".wi.", ".wi_1.") for ours, theirs in names.items()}
        return names

    def tensors_of(self, model: Transformer) -> dict[str, np.ndarray]:
        """Return the tensors of a model that was imported from such a folder, by their names.

        Raises ``UserError`` if its architecture or vocabulary is not the folder's.
        """
        config, expected = model.config, self.model_config(tied=model.config.ties_softmax)
        for field in dataclasses.fields(config):
            ours, theirs = (getattr(each, field.name) for each in (config, expected))
            free = field.name in ("dtype", "remat") or "dropout" in field.name
            if not free and ours != theirs:
                raise UserError(
                    f"model.{field.name} is {ours!r}; expected {theirs!r}, as in the pretrained "
                    f"model, for an export to {self.family.name}."
                )
        names, tensors = self._names(config), {}
        order_D = sines_first(config.d_model) if self.family.sines_first else None
        for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            ours = parameter_name(path)
            x = np.asarray(parameter[...])
            x = x.reshape(plain_shape(ours, x.shape))
            if order_D is not None:
                x = reordered_weight(ours, x, order_D)
            if ours.endswith(_VOCABULARY_WEIGHTS):
                x = x[self.rows.ours]
            if ours == "softmax_bias":
                if ours not in names:
                    continue
                x = x[None]
            tensors[names[ours]] = np.ascontiguousarray(transposed(ours, x))
        if order_D is not None:  # transformers also saves the sinusoids
            table_LD = sinusoidal_positions(self.theirs["max_position_embeddings"], config.d_model)
            for side in ("encoder", "decoder"):
                tensors[f"model.{side}.embed_positions.weight"] = table_LD[:, order_D].copy()
        return tensors

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
        return Tokenizer(
            self._model, vocabulary=names, languages=self._languages(), pretrained=self._archive()
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
        settings = read_json(self.folder / "tokenizer_config.json", missing_ok=True)
        token_of = {i: token for token, i in self.vocabulary.items()}
        start = token_of.get(self.theirs.get("decoder_start_token_id", -1))
        its_class = str(settings.get("tokenizer_class"))
        if self.kind == "mbart" and (its_class.startswith("MBartT") or start in tokens.values()):
            raise UserError(
                f"The model in {str(self.folder)!r} is from mBART's first version, which has the "
                "language after the sentence; expected mBART-50, such as "
                "facebook/mbart-large-50-many-to-many-mmt."
            )
        forced = token_of.get(self.search_settings().get("forced_bos_token_id", -1), "")
        english = [tokens[code] for code in _ENGLISH if code in tokens]  # transformers' default
        default = [*english, *tokens.values(), ""][0]
        target = tokens.get(settings.get("tgt_lang") or "", "") or forced
        return Languages(tokens, tokens.get(settings.get("src_lang") or "", default), target)

    def search_settings(self) -> dict[str, Any]:
        """Return the settings of ``generate``, which older versions wrote to config.json."""
        settings = read_json(self.folder / "generation_config.json", missing_ok=True)
        older = {name: x for name, x in self.theirs.items() if IN_CONFIG.search(name)}
        return settings or older

    def config(self, model: ModelConfig) -> Config:
        """Return settings for decoding and for fine-tuning."""
        token_of = dict(zip(self.rows.theirs.tolist(), range(len(self.rows.theirs))))
        names = {i: token for token, i in self.vocabulary.items() if token_of.get(i) != 0}
        decoding = from_transformers(self.search_settings(), names, self.folder)
        # The longest input that the model was trained on. T5's has no limit of its own.
        its = self.theirs
        longest = its.get("max_position_embeddings") or its.get("n_positions") or 512
        limit = min(longest, model.position_limit, 256)
        return Config(
            model=model,
            tokenizer=TokenizerConfig(vocab_size=model.vocab_size),
            # a low learning rate for fine-tuning
            optimizer=OptimizerConfig(peak_learning_rate=1e-4, warmup_steps=1000),
            # as in transformers, where these biases are not parameters
            training=TrainingConfig(freeze=("softmax_bias",) if model.softmax_bias else ()),
            data=DataConfig(max_source_length=limit, max_target_length=limit),
            decoding=dataclasses.replace(decoding, max_source_length=longest),
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
