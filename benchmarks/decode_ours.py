"""Our side of ``decode_speed.py``: the model, its exports for the other engines, and our engine."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.decode_job import Job
from transformer_jax.checkpoint import load_model
from transformer_jax.config import Config, DecodingConfig, ModelConfig
from transformer_jax.decoding.devices import devices_for_rows
from transformer_jax.decoding.engine import Engine, Sentence
from transformer_jax.errors import UserError
from transformer_jax.interop.ctranslate2 import export_ctranslate2
from transformer_jax.interop.huggingface import export_huggingface
from transformer_jax.model.layers import compute_dtype
from transformer_jax.model.transformer import Transformer
from transformer_jax.special_ids import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from transformer_jax.training.summary import environment

_SHAPES = {  # models with random weights
    "base": ModelConfig(vocab_size=32_000),
    "tiny": ModelConfig(vocab_size=64, d_model=16, d_ff=32, num_heads=2, num_layers=1),
}


class NumberedTokens:
    """Stands in for the tokenizer of a model of random weights: what exports ask of one."""

    source_model, target_model, joint, imported = b"", None, True, False

    def __init__(self, vocab_size: int):
        """Tokens are p4, p5, ... after the four that every vocabulary has."""
        self.source_vocab_size = self.target_vocab_size = vocab_size
        special = {PAD_ID: "<pad>", BOS_ID: "<s>", EOS_ID: "</s>", UNK_ID: "<unk>"}
        self._tokens = [special.get(i, f"p{i}") for i in range(vocab_size)]

    def source_tokens(self, ids: Any) -> list[str]:
        """Their names."""
        return [self._tokens[i] for i in ids]

    target_tokens = source_tokens

    def require_target_ids(self, tokens: Any, _: str) -> list[int]:
        """Numbers of named tokens."""
        return [self._tokens.index(token) for token in tokens]


def load(job: Job) -> tuple[Config, Any, Any]:
    """Config, model and tokenizer: a trained one, or one whose random weights are the same in every
    process.
    """
    decoding = DecodingConfig(
        beam_size=job["beam_size"],
        length_penalty=job["length_penalty"],
        length_offset=0.0,  # as the others have it
        max_extra_length=job["max_extra_length"],
        max_source_length=job["max_source_length"],
        batch_size=job["batch_size"],
    )
    if job["workdir"]:
        config, model, tokenizer = load_model(job["workdir"])
        return Config(model=config.model, decoding=decoding), model, tokenizer
    shape = _SHAPES[job["model"]]
    return (
        Config(model=shape, decoding=decoding),
        Transformer(shape, rngs=nnx.Rngs(0)),
        NumberedTokens(shape.vocab_size),
    )


def prepare(job: Job) -> dict[str, Any]:
    """Write the model for the other engines; says where they run and what they cannot be given."""
    config, model, tokenizer = load(job)
    skipped = {}
    for name, export in (("ctranslate2", export_ctranslate2), ("huggingface", export_huggingface)):
        (job["folder"] / name).mkdir()
        try:
            export(config, model, tokenizer, job["folder"] / name)
        except UserError as error:
            skipped[name] = str(error)
    if "ctranslate2" in skipped:
        skipped["ctranslate2_int8"] = skipped["ctranslate2"]
    tokens = {
        "source": tokenizer.source_tokens(range(tokenizer.source_vocab_size)),
        "target": tokenizer.target_tokens(range(tokenizer.target_vocab_size)),
    }
    (job["folder"] / "tokens.json").write_text(json.dumps(tokens))
    return {"device": jax.default_backend(), "environment": environment(), "skipped": skipped}


class ForcedEngine(Engine):
    """Takes a sentence's ``seed``, of which beam search makes no use, for the length of its
    output.
    """

    def _waiting(self, *arguments: Any) -> Any:
        waiting, *others = super()._waiting(*arguments)
        return waiting._replace(limit_Q=waiting.seed_Q.astype(waiting.limit_Q.dtype)), *others


class Ours:
    """``transformer_jax.decoding.engine.Engine``, all sentences in one call."""

    def __init__(self, job: Job):
        self._compile_seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        devices = devices_for_rows(job["batch_size"])  # first, as it may decide how JAX starts
        config, model, _ = load(job)
        self.about = {"precision": str(jnp.dtype(compute_dtype(config.model)))}
        if job["forced"]:  # EOS is allowed where the length ends, and there nothing else is
            self._engine: Engine = ForcedEngine(
                [model], config.decoding, suppress=(EOS_ID,), devices=devices
            )
            self._sentences = [Sentence(x, seed=n) for x, n in zip(job["source"], job["forced"])]
            self._own = [Sentence(x, seed=n) for x, n in zip(job["source"], job["own_lengths"])]
        else:
            self._engine = Engine([model], config.decoding, devices=devices)
            self._sentences, self._own = [Sentence(x) for x in job["source"]], []

    def _listen(self, event: str, seconds: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/backend_compile"):
            self._compile_seconds += seconds

    def __call__(self) -> list[list[int]]:
        return self._search(self._sentences)

    def _search(self, sentences: list[Any]) -> list[list[int]]:
        engine = self._engine
        engine.slots_computed = engine.slots_used = 0
        found = engine.search(sentences)
        self._wasted = 1 - engine.slots_used / engine.slots_computed
        return [best.tokens for best, *_ in found]

    def extras(self) -> dict[str, Any]:
        found = {
            "compile_seconds": round(self._compile_seconds, 2),
            "shapes_compiled": self._engine.num_compiled,
            "wasted_slots": round(self._wasted, 4),
        }
        if self._own:  # here every sentence may have a length of its own
            self._search(self._own)
            found["wasted_slots_own_lengths"] = round(self._wasted, 4)
        return found
