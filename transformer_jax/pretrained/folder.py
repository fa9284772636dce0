"""Reads pretrained models in transformers' format, one tensor at a time."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import zipfile
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.errors import UserError, short_repr
from transformer_jax.model.positions import sinusoidal_positions
from transformer_jax.model.transformer import Transformer
from transformer_jax.pretrained.families import ACTIVATIONS, FAMILIES
from transformer_jax.pretrained.files import LazyArray, check_links, open_tensors, read_json
from transformer_jax.pretrained.search_settings import IN_CONFIG, from_transformers
from transformer_jax.pretrained.tokenizer_files import Rows, read_rows, read_tokenizer
from transformer_jax.pretrained.weights import (
    from_library,
    parameter_shapes,
    plain_weights,
    sines_first,
    to_library,
)
from transformer_jax.settings.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainingConfig,
)
from transformer_jax.tokenization.special_ids import SPECIAL_IDS
from transformer_jax.tokenization.tokenizer import Languages, Tokenizer

# Added to the logit of a token that must never be generated. e^-100 is negligible in float32.
NEVER = np.float32(-100)
# Files that an export copies, apart from the weights.
KEPT = ("*.json", "*.model", "*.spm", "*.txt")
_VOCABULARY_WEIGHTS = ("embedding.matrix", "softmax_matrix", "softmax_bias")
_ENGLISH = ("eng_Latn", "en_XX", "en")
_DEFAULTS = {  # fields that config.json can omit
    "activation_dropout": 0.0,
    "attention_dropout": 0.0,
    "num_decoder_layers": None,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "feed_forward_proj": "relu",
    "scale_embedding": False,
    "activation_function": "gelu",
}
_TYPES: dict[str, Any] = {  # other fields are numbers
    "activation_function": str,
    "feed_forward_proj": str,
    "scale_embedding": bool,
    "num_decoder_layers": int | None,
}


class Pretrained:
    """A folder with config.json, weights and a tokenizer, of one of ``FAMILIES``.

    ``allow_pickle`` also reads pytorch_model.bin. ``languages`` are the codes of source and target
    by default. Raises ``UserError`` if a file, setting, tensor or language is missing, unexpected
    or unsupported.
    """

    def __init__(
        self,
        folder: Path,
        *,
        allow_pickle: bool = False,
        languages: tuple[str, str] = ("", ""),
    ) -> None:
        check_links(folder)
        self.folder, self._allow_pickle = folder, allow_pickle
        file = folder / "config.json"
        kind = (theirs := read_json(file)).get("model_type")
        if str(kind) not in FAMILIES:
            raise UserError(
                f"model_type in {str(file)!r} is {kind!r}; expected one of: {', '.join(FAMILIES)}. "
                "Other models are not supported."
            )
        self.kind, self.family = str(kind), FAMILIES[str(kind)]
        needed = [name for name in self.family.fields if name in theirs or name not in _DEFAULTS]
        types = {name: _TYPES.get(name, int | float) for name in needed}
        self.theirs = read_json(file, {"vocab_size": int} | types)
        names, shares = dict(self.family.library.names), "share_encoder_decoder_embeddings"
        self._shares = not self.family.separate or self.theirs.get(shares) is not False
        if not self._shares:
            names |= self.family.separate
        if str(self.theirs.get("feed_forward_proj")).startswith("gated"):
            names = {ours: theirs.replace(".wi.", ".wi_1.") for ours, theirs in names.items()}
        self.library = self.family.library._replace(names=names)
        self._models, vocabularies = read_tokenizer(folder, self.family)
        self.vocabulary, self._joint = vocabularies[-1], len(vocabularies) == 1
        self._given, self._languages = languages, self._read_languages()
        self._changed: dict[str, dict[str, Any]] = {}  # fields of files to change in exports
        if self._language_last:
            self._choose_pair()
        size_name = "vocab_size" if self._shares else "decoder_vocab_size"
        self.source_rows, self.rows = (
            read_rows(self.family, self.theirs, *each)
            for each in ((vocabularies[0], "vocab_size"), (self.vocabulary, size_name))
        )

    @cached_property
    def _tensors(self) -> dict[str, LazyArray]:
        tensors = open_tensors(self.folder, self._allow_pickle)
        shared = self.library.names["target_embedding.matrix"]
        prefix = "model." if shared.startswith("model.") else ""
        if not any(name.startswith(prefix) for name in tensors):  # without a head, as BartModel
            tensors = {prefix + name: tensor for name, tensor in tensors.items()}
        if self._shares and self.theirs.get("tie_word_embeddings") is not False:
            for name in filter(_COPY.search, sorted(tensors)):  # a tied matrix can have any name
                tensors.setdefault(shared, tensors[name])
        return tensors

    def model_config(self, tied: bool | None = None) -> ModelConfig:
        """Return the architecture, and check settings that have no counterpart.

        ``tied``: the softmax uses the embedding matrix (None: as the weights do).
        """
        if tied is None:  # files can store a tied matrix twice
            tied = self._is_copy(self.library.names["softmax_matrix"])
        theirs, family = _DEFAULTS | self.theirs, self.family
        required = dict(family.required)
        for name in ("ffn_dim", "attention_heads"):
            if f"encoder_{name}" in theirs:
                required[f"decoder_{name}"] = (theirs[f"encoder_{name}"],)
        scale_names: dict[Any, str] = {True: "tokens", False: "none"}
        values = {"activation": ACTIVATIONS, "embedding_scale": scale_names}
        fields: dict[str, Any] = dict(family.settings)
        for name, ours in family.fields.items():
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
        fields["decoder_start_id"] = SPECIAL_IDS[self.rows.start]
        fields["language_last"] = self._language_last
        tied_alone: Any = ("target" if tied else "none"), ("all" if tied else "embeddings")
        return ModelConfig(
            **fields,
            vocab_size=len(self.rows.theirs),
            source_vocab_size=None if self._joint else len(self.source_rows.theirs),
            tie_embeddings=tied_alone[self._shares],
        )

    def _is_copy(self, name: str) -> bool:
        """True if a tensor equals the target embeddings, or does not exist."""
        shared = self._tensors.get(self.library.names["target_embedding.matrix"])
        its = self._tensors.get(name)
        if its is None or shared is None or its is shared:
            return True
        return its.shape == shared.shape and np.array_equal(its.read(), shared.read())

    def parameters(self, config: ModelConfig) -> dict[str, LazyArray]:
        """Return the parameters by name, and check the names and shapes of all tensors."""
        names = {*self.library.names.values()}
        tensors = {
            name: tensor
            for name, tensor in self._tensors.items()
            if name in names
            or not _REDUNDANT.search(name)
            or (name.endswith("embed_tokens.weight") and not self._is_copy(name))
        }
        theirs = dataclasses.replace(
            config,
            vocab_size=len(self.rows.ours),
            source_vocab_size=None if self._joint else len(self.source_rows.ours),
            softmax_bias="softmax_bias" in self.library.names,
        )
        where = f"The {self.family.name} weights in {str(self.folder)!r}"
        found = from_library(tensors, theirs, self.library, where, optional="final_logits_bias")
        for name, shape in parameter_shapes(config).items():
            if name.endswith(_VOCABULARY_WEIGHTS):
                found[name] = LazyArray(shape, partial(self._in_our_order, name, found.get(name)))
        return found

    def _in_our_order(self, name: str, tensor: LazyArray | None) -> np.ndarray:
        """Read the weights of a vocabulary."""
        rows = self._rows_of(name)
        x = tensor.read() if tensor else np.zeros(len(rows.ours), np.float32)  # biases
        x = x[rows.theirs]
        x[rows.theirs < 0] = NEVER if name == "softmax_bias" else 0
        return x

    def _rows_of(self, ours: str) -> Rows:
        return self.source_rows if ours.startswith("source") else self.rows

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
        weights = {
            name: x[self._rows_of(name).ours] if name.endswith(_VOCABULARY_WEIGHTS) else x
            for name, x in plain_weights(model).items()
            if name != "softmax_bias" or name in self.library.names
        }
        tensors = to_library(weights, self.library)
        shared_VD = tensors.get("model.shared.weight")
        for side in ("encoder", "decoder"):
            if shared_VD is not None and not config.ties_softmax:  # transformers reads these then
                tensors[f"model.{side}.embed_tokens.weight"] = shared_VD.copy()
            if self.kind == "pegasus":  # transformers also saves the sinusoids
                length = self.theirs["max_position_embeddings"]
                table_LD = sinusoidal_positions(length, config.d_model)
                tensors[f"model.{side}.embed_positions.weight"] = sines_first("", table_LD)
        return tensors

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, with our ids."""
        tokenizer = Tokenizer(
            *self._models,
            vocabulary=self.source_rows.tokens,
            target_vocabulary=() if self._joint else self.rows.tokens,
            languages=self._languages,
            pretrained=self._archive(),
        )
        return tokenizer if self._language_last else tokenizer.with_languages(*self._given)

    def _read_languages(self) -> Languages:
        token_of = {i: token for token, i in self.vocabulary.items()}
        forced = token_of.get(self._search[0].get("forced_bos_token_id", -1), "")
        tokens = {
            match[match.lastindex or 0]: token
            for _, token in sorted(token_of.items())
            if (match := re.fullmatch(self.family.languages, token))
        }
        if not tokens:
            first = "<s>" if self.kind == "bart" else ""
            return Languages({}, first, first or forced)
        if Languages(tokens).tagged:
            return Languages(tokens)
        settings = self._tokenizer_settings
        english = [tokens[code] for code in _ENGLISH if code in tokens]  # transformers' default
        default = [*english, *tokens.values(), ""][0]
        target = tokens.get(settings.get("tgt_lang") or "", "") or forced
        return Languages(tokens, tokens.get(settings.get("src_lang") or "", default), target)

    @cached_property
    def _tokenizer_settings(self) -> dict[str, Any]:
        return read_json(self.folder / "tokenizer_config.json", missing_ok=True)

    @cached_property
    def _language_last(self) -> bool:
        """True for mBART's first version: the source's language is the last token, and the target's
        is the decoder's first input, like BOS.
        """
        if self.kind != "mbart":
            return False
        its_class = str(self._tokenizer_settings.get("tokenizer_class"))
        start, eos = (self.theirs.get(f"{name}_token_id") for name in ("decoder_start", "eos"))
        return its_class.startswith("MBartT") or not (start == eos or "50" in its_class)

    def _choose_pair(self) -> None:
        """Fix source and target language of a model that starts with the target's."""
        its, start = self._languages, self.theirs.get("decoder_start_token_id")
        started = [token for token in its.tokens.values() if self.vocabulary[token] == start]
        defaults = its.source, [*started, its.target][0]
        pair = [its.tokens.get(x, "") if x else y for x, y in zip(self._given, defaults)]
        if "" in pair:
            codes = ", ".join(its.tokens) or "none, because the tokenizer's files have no codes"
            raise UserError(
                f"--source-language and --target-language are {self._given}; expected two of: "
                f"{codes}. The model in {str(self.folder)!r} is from mBART's first version, which "
                "is imported for one language pair, by python -m transformer_jax.pretrained import."
            )
        first = {"decoder_start_token_id": self.vocabulary[pair[1]]}
        self._languages, self.theirs = Languages({}, pair[0]), self.theirs | first
        if any(self._given):
            self._changed = dict.fromkeys(("config.json", "generation_config.json"), first)
            self._changed["tokenizer_config.json"] = {"src_lang": pair[0], "tgt_lang": pair[1]}

    @cached_property
    def _search(self) -> tuple[dict[str, Any], Path]:
        """Settings of ``generate``, and their file: config.json in older versions."""
        file = self.folder / "generation_config.json"
        if settings := read_json(file, missing_ok=True):
            return settings, file
        settings = {name: x for name, x in self.theirs.items() if IN_CONFIG.search(name)}
        return settings, self.folder / "config.json"

    def config(self, model: ModelConfig) -> Config:
        """Return settings for decoding and for fine-tuning."""
        names = dict(zip(self.rows.theirs[1:].tolist(), self.rows.tokens[1:]))  # PAD never is
        settings, file = self._search
        decoding = from_transformers(settings, names, file)
        # The longest input that the model was trained on. T5's has no limit of its own.
        its = self.theirs
        longest = its.get("max_position_embeddings") or its.get("n_positions") or 512
        limit = min(longest, model.position_limit, 256)
        return Config(
            model=model,
            tokenizer=TokenizerConfig(vocab_size=model.vocab_size, joint=self._joint),
            # a low learning rate for fine-tuning
            optimizer=OptimizerConfig(peak_learning_rate=1e-4, warmup_steps=1000),
            # as in transformers, where these biases are not parameters
            training=TrainingConfig(freeze=("softmax_bias",) if model.softmax_bias else ()),
            data=DataConfig(max_source_length=limit, max_target_length=limit),
            decoding=dataclasses.replace(decoding, max_source_length=longest),
        )

    def _archive(self) -> bytes:
        """Return a zip archive of all files but the weights, for exports."""
        target = io.BytesIO()
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            files = {file for pattern in KEPT for file in self.folder.glob(pattern)}
            if self._changed:  # records the languages, even if the original has no such file
                files.add(self.folder / "tokenizer_config.json")
            for file in sorted(files):
                if file.name != "tokenizer.json" and "index.json" not in file.name:
                    if changed := self._changed.get(file.name):
                        fields = read_json(file, missing_ok=True) | changed
                        content = json.dumps(fields, indent=2).encode()
                    else:
                        content = file.read_bytes()
                    archive.writestr(zipfile.ZipInfo(file.name), content)
        return target.getvalue()


_COPY = re.compile(r"(embed_tokens|lm_head)\.weight$")
# Copies of tied matrices, and sinusoids.
_REDUNDANT = re.compile(
    r"(embed_tokens|lm_head|shared)\.weight$|embed_positions\.weights?$|"
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias"
)
