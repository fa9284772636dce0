"""Helpers that branches share with the trunk. Internal: not part of the public API."""

# ruff: noqa: F401

from transformer_jax.decoding.markup import PLACEHOLDERS, Document
from transformer_jax.decoding.records import check_patterns
from transformer_jax.decoding.segments import joint
from transformer_jax.devices.compilation_cache import enable_compilation_cache
from transformer_jax.devices.machine import num_cores
from transformer_jax.errors import needs_extra, one_line, short_repr
from transformer_jax.settings.config_files import flatten
from transformer_jax.storage.files import check_not_input, parse_object, write_atomically
from transformer_jax.tokenization.rust_tokenizer import RustTokenizer
from transformer_jax.tokenization.special_ids import SPECIAL_IDS
from transformer_jax.tokenization.tokenizer import Languages, read_sentencepiece
