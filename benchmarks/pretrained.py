"""Pretrained models beside transformers (PyTorch) on a CPU: decoding and a fine-tuning step.

    python -m benchmarks.pretrained --shapes t5-small nllb-600M --rounds 3
    python -m benchmarks.pretrained --shapes nllb-600M --parts training --engines ours

Random weights in the shape of the named model, saved by transformers and imported here; float32 and
the same 24 source tokens in both. Every output has 32 tokens: transformers gets ``min_new_tokens``
and ``max_new_tokens``, and our search suppresses EOS until its limit. Engines take turns, and
ratios are medians over the rounds; with one engine, there is no ratio. The training step is on 16
pairs of 32 + 32 tokens without dropout: AdamW in PyTorch, Adam here.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
import torch
import transformers
from flax import nnx

from transformer_jax import DecodingConfig, Engine, Sentence, smoothed_cross_entropy
from transformer_jax.pretrained.loading import import_huggingface

SOURCE = 24
TARGET = 32


def save(shape: str, folder: Path) -> Any:
    """Save random weights and a tokenizer of numbered tokens. Returns transformers' model."""
    if shape == "t5-small":
        config: Any = transformers.T5Config(decoder_start_token_id=0, dropout_rate=0.0)
        model: Any = transformers.T5ForConditionalGeneration(config)
        special = ["<pad>", "</s>", "<unk>"]
    else:
        config = transformers.M2M100Config(vocab_size=256_206, dropout=0.0, attention_dropout=0.0)
        config.encoder_layerdrop = config.decoder_layerdrop = 0.0
        model = transformers.M2M100ForConditionalGeneration(config)
        special = ["<s>", "<pad>", "</s>", "<unk>"]
    names = [*special, *(f"w{i}" for i in range(config.vocab_size - len(special) - 8))]
    words = tokenizers.models.WordLevel({x: i for i, x in enumerate(names)}, unk_token="<unk>")
    model.save_pretrained(folder, max_shard_size="100GB")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    return model


def decoding(
    torch_model: Any, jax_model: Any, batch: int, beam: int
) -> dict[str, Callable[[], int]]:
    """Return the search of each engine, which returns its number of output tokens."""
    ids = np.random.default_rng(0).integers(10, 10_000, (batch, SOURCE - 1))
    eos = torch_model.config.eos_token_id
    inputs = torch.tensor(np.pad(ids, ((0, 0), (0, 1)), constant_values=eos))
    options = {"min_new_tokens": TARGET, "max_new_tokens": TARGET, "num_beams": beam}

    def generate() -> int:
        with torch.no_grad():
            return int(torch_model.generate(inputs, do_sample=False, **options)[:, 1:].numel())

    config = DecodingConfig(
        beam_size=beam,
        batch_size=batch,
        max_source_length=SOURCE,
        max_extra_length=TARGET - SOURCE,
        length_penalty=1.0,
        length_offset=0.0,
    )
    engine = Engine(jax_model, config, suppressed_ids=(2,))
    sentences = [Sentence(row.tolist()) for row in ids]

    def search() -> int:
        return sum(len(hypotheses[0].tokens) + 1 for hypotheses in engine.search(sentences))

    return {"transformers": generate, "ours": search}


def training(torch_model: Any, jax_model: Any, batch: int) -> dict[str, Callable[[], int]]:
    """Return a training step of each engine, which returns its number of target tokens."""
    source, target = np.random.default_rng(1).integers(10, 10_000, (2, batch, TARGET))
    adam = torch.optim.AdamW(torch_model.parameters(), lr=1e-5, weight_decay=0.0)
    batch_of_ids = {"input_ids": torch.tensor(source), "labels": torch.tensor(target)}

    def torch_step() -> int:
        adam.zero_grad()
        torch_model(**batch_of_ids).loss.backward()
        adam.step()
        return batch * TARGET

    graph, parameters = nnx.split(jax_model, nnx.Param)
    optimizer = optax.adam(1e-5)

    def loss(parameters: Any) -> jax.Array:
        model = nnx.merge(graph, parameters)
        hidden_BTD = model.hidden(jnp.asarray(source), jnp.asarray(target))
        sums = smoothed_cross_entropy(
            hidden_BTD, model.output_matrix_VD, jnp.asarray(target), label_smoothing=0.0
        )
        return sums.loss / sums.tokens

    def step(parameters: Any, state: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(parameters), state)
        return optax.apply_updates(parameters, updates), state

    held: list[Any] = []
    jitted = jax.jit(step, donate_argnums=(0, 1))

    def jax_step() -> int:
        held[:] = jitted(*(held or (parameters, optimizer.init(parameters))))
        jax.block_until_ready(held)
        return batch * TARGET

    return {"transformers": torch_step, "ours": jax_step}


def compare(name: str, engines: dict[str, Callable[[], int]], rounds: int) -> None:
    """Print a row: tokens per second of each engine, and the ratio with its range."""
    speeds: dict[str, list[float]] = {"ours": [], "transformers": []}
    for number in range(rounds + 1):  # the first one compiles
        for each, run in engines.items():
            start = time.perf_counter()
            tokens = run()
            if number:
                speeds[each].append(tokens / (time.perf_counter() - start))
    ratios = [
        jax_speed / torch_speed
        for jax_speed, torch_speed in zip(speeds["ours"], speeds["transformers"])
    ]
    cells = [f"{statistics.median(each):,.1f}" if each else "" for each in speeds.values()]
    if ratios:
        middle = statistics.median(ratios)
        cells.append(f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"| {name} |", " | ".join(cells), "|", flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["t5-small", "nllb-600M"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=["decoding", "training"])
    names = ["transformers", "ours"]
    parser.add_argument("--engines", nargs="+", choices=names, default=names)
    flags = parser.parse_args()

    def chosen(engines: dict[str, Callable[[], int]]) -> dict[str, Callable[[], int]]:
        return {name: engines[name] for name in flags.engines}

    jax.config.update("jax_default_matmul_precision", "highest")  # float32 on every CPU
    print("| | ours, tokens/s | transformers | ours / theirs |\n|---|---|---|---|")
    for shape in flags.shapes:
        with tempfile.TemporaryDirectory() as folder:
            torch_model = save(shape, Path(folder)).eval()
            _, jax_model, _ = import_huggingface(Path(folder))
        if "decoding" in flags.parts:
            for batch in (1, 16):
                for beam in (1, 4):
                    engines = chosen(decoding(torch_model, jax_model, batch, beam))
                    compare(f"{shape}, batch {batch}, beam {beam}", engines, flags.rounds)
        if "training" in flags.parts:
            engines = chosen(training(torch_model, jax_model, 16))
            compare(f"{shape}, training", engines, flags.rounds)


if __name__ == "__main__":
    main()
