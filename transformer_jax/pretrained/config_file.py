"""config.json and generation_config.json of pretrained models, with the defaults of their class."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from transformer_jax.errors import UserError, short_repr
from transformer_jax.pretrained.families import FAMILIES, Family
from transformer_jax.pretrained.files import PretrainedFiles
from transformer_jax.pretrained.search_settings import SEARCH_SETTING_PATTERN

# Fields whose types are checked; the other fields of ``Family.fields`` are numbers.
_FIELD_TYPES: dict[str, Any] = {
    "vocab_size": int,
    "activation_function": str,
    "feed_forward_proj": str,
    "scale_embedding": bool,
    "num_decoder_layers": int | None,
    "transformer-ffn-activation": str,
}
_MAX_VOCABULARY_SIZE = 2**20  # more would take minutes
# Other names of fields. If a file has both, transformers takes this one.
_ALIASES = {
    "hidden_size": ("d_model",),
    "num_hidden_layers": ("encoder_layers", "num_layers"),
    "num_attention_heads": ("encoder_attention_heads", "num_heads"),
    "head_dim": ("d_kv",),
}


class SpecialIds(NamedTuple):
    """Ids of special tokens in transformers."""

    pad: int
    bos: int | None
    eos: int
    decoder_start: int


@dataclass(frozen=True)
class PretrainedConfig:
    """The settings of a folder."""

    model_type: str
    family: Family
    fields: dict[str, Any]
    """Fields of config.json, after the class's defaults."""
    generation: dict[str, Any]
    """Settings of ``generate``: from generation_config.json or, in older folders, config.json."""
    generation_file: Path
    """Where they come from."""

    @property
    def vocab_size(self) -> int:
        """Number of rows of the target's embedding matrix."""
        if self.shares_embeddings:
            return int(self.fields["vocab_size"])
        return int(self.fields.get("decoder_vocab_size") or self.fields["vocab_size"])

    @property
    def shares_embeddings(self) -> bool:
        """True if source and target have one embedding matrix."""
        name = "share_encoder_decoder_embeddings"
        return not self.family.separate_names or self.fields.get(name) is not False

    @cached_property
    def special(self) -> SpecialIds:
        """The ids that transformers uses. Those of generation_config.json, as ``generate`` uses
        them, come first.

        Raises ``UserError`` if they are missing or impossible.
        """
        fields = self.fields
        generation = self.generation
        pad_id = fields["pad_token_id"]
        config_eos = _only_id(fields["eos_token_id"])
        eos = _only_id(generation.get("eos_token_id"))
        eos = config_eos if eos is None else eos
        candidates = [
            generation.get("decoder_start_token_id"),
            generation.get("bos_token_id"),
            fields["decoder_start_token_id"],
            fields["bos_token_id"],
            pad_id if "num_layers" in self.family.defaults else eos,  # T5 starts with PAD
        ]
        start: Any = next((number for number in candidates if number is not None), None)
        ids = {
            "pad_token_id": pad_id,
            "eos_token_id": eos,
            "eos_token_id of config.json": config_eos,
            "decoder_start_token_id": start,
            "decoder_start_token_id of config.json": fields["decoder_start_token_id"],
        }
        vocab_size = self.vocab_size
        given_ids = [number for number in ids.values() if number is not None]
        are_valid = all(type(number) is int and 0 <= number < vocab_size for number in given_ids)
        if not are_valid or None in (pad_id, eos, start) or pad_id == eos:
            listed = ", ".join(f"{name} = {short_repr(number)}" for name, number in ids.items())
            raise UserError(
                f"Special tokens in config.json and generation_config.json are {listed}; "
                f"expected one id below {vocab_size} each, and different ids for pad_token_id and "
                "eos_token_id, because padding is masked."
            )
        bos = fields["bos_token_id"]
        is_usable = type(bos) is int and 0 <= bos < vocab_size and bos not in (pad_id, eos)
        if self.model_type == "m2m_100" and start == pad_id:
            raise UserError(
                f"decoder_start_token_id and pad_token_id in config.json are both {start}; "
                "expected different ids, because M2M100 numbers positions from the first token "
                "that is not padding."
            )
        return SpecialIds(pad_id, bos if is_usable else None, eos, start)


def read_config(files: PretrainedFiles) -> PretrainedConfig:
    """Return the settings in config.json and generation_config.json.

    Raises ``UserError`` for an unknown class and a field of another type or size.
    """
    file = files.folder / "config.json"
    content = files["config.json"]
    model_type = content.get("model_type")
    if str(model_type) not in FAMILIES:
        supported = [name for name, family in FAMILIES.items() if family.config_name == file.name]
        raise UserError(
            f"model_type in {str(file)!r} is {model_type!r}; expected one of: "
            f"{', '.join(supported)}. Other models are not supported."
        )
    family = FAMILIES[str(model_type)]
    if content.get("quantization_config"):
        raise UserError(
            f"{str(file)!r} has a quantization_config; expected a model with float weights. Use "
            "the model that it was quantized from."
        )
    names = [name for name in ("vocab_size", *family.fields, *_ALIASES) if name in content]
    files.check("config.json", {name: _FIELD_TYPES.get(name, int | float) for name in names})
    fields = {**family.defaults, **content}
    for alias, field_names in _ALIASES.items():
        for name in field_names:
            if name in family.fields and alias in content:
                fields[name] = content[alias]
    for name in ("vocab_size", "decoder_vocab_size"):
        vocab_size = fields.get(name)
        if vocab_size is not None and (
            type(vocab_size) is not int or not 4 <= vocab_size <= _MAX_VOCABULARY_SIZE
        ):
            raise UserError(
                f"{name} in config.json is {short_repr(vocab_size)}; expected the number of rows "
                f"of the embedding matrix, 4 to {_MAX_VOCABULARY_SIZE}. Use the config.json that "
                "belongs to the weights."
            )
    generation_file = files.folder / "generation_config.json"
    generation = files["generation_config.json"]
    if not generation:
        generation_file = file
        generation = {
            name: value for name, value in content.items() if SEARCH_SETTING_PATTERN.search(name)
        }
        if generation.pop("force_bos_token_to_be_generated", None):
            generation["forced_bos_token_id"] = fields["bos_token_id"]
    return PretrainedConfig(str(model_type), family, fields, generation, generation_file)


def _only_id(eos: Any) -> Any:
    """Return the only id of a list."""
    return eos[0] if isinstance(eos, list) and len(eos) == 1 else eos
