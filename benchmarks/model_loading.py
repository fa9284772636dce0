"""Bytes and seconds of loading a finished run's model, locally or from an object store.

    python -m benchmarks.model_loading train W           # 22M parameters, five checkpoints
    python -m benchmarks.model_loading train URL
    python -m benchmarks.model_loading load W_OR_URL     # as decode.py does

Bytes are those that the process read (rchar in /proc/self/io, sockets included) while it loaded the
model. For a URL, delete ~/.cache/transformer_jax first.
"""

import sys
import time
from dataclasses import replace

from transformer_jax import Config, ModelConfig, TokenizerConfig, TrainingConfig, train
from transformer_jax.settings.config import BatchConfig, DataConfig, PairsConfig

PAIRS = [f"line {number} of the text" for number in range(200)]


def run(workdir: str) -> None:
    """Train five steps on a few lines, with a checkpoint and an average of all five."""
    for side in ("en", "de"):
        with open(f"/tmp/model_loading.{side}", "w") as file:
            file.write("\n".join(PAIRS) + "\n")
    pairs = PairsConfig("text", ("/tmp/model_loading.en",), ("/tmp/model_loading.de",))
    config = Config(
        model=ModelConfig(d_model=512, d_ff=2048, num_heads=8, num_layers=3, dtype="float32"),
        tokenizer=TokenizerConfig(vocab_size=60),
        data=DataConfig(train=pairs),
        batch=BatchConfig(tokens=256, buckets=1),
        training=TrainingConfig(steps=5, checkpoint_every=1, average=5),
    )
    train(replace(config, seed=1), workdir)


def read_bytes() -> int:
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def load(workdir: str) -> None:
    """Load the model and print what it took."""
    from transformer_jax import load_model, local_workdir

    before = read_bytes()
    start = time.perf_counter()
    load_model(local_workdir(workdir))
    seconds = time.perf_counter() - start
    print(f"{read_bytes() - before:,} bytes read, {seconds:.2f} s")


if __name__ == "__main__":
    {"train": run, "load": load}[sys.argv[1]](sys.argv[2])
