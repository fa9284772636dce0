"""Everything works without Pallas' Triton backend, which JAX has deprecated."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from transformer_jax import ModelConfig, Transformer
from transformer_jax.model import gpu

PACKAGE = Path(gpu.__file__).resolve().parents[1]
CONFIG = ModelConfig(vocab_size=20, d_model=16, d_ff=32, num_heads=2, num_layers=1)

ON_A_CPU = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None
import jax, jax.numpy as jnp
from flax import nnx
import transformer_jax as tj

for name in tj.__all__:
    getattr(tj, name)
config = tj.ModelConfig(vocab_size=20, d_model=16, d_ff=32, num_heads=2, num_layers=1)
model = tj.Transformer(config, rngs=nnx.Rngs(0))
tokens_BL = jnp.array([[5, 6, 2]])

@jax.jit
def gradient(parameters, key):
    def loss(parameters):
        model = nnx.merge(graph, parameters)
        hidden_BTD = model.hidden(tokens_BL, tokens_BL, dropout_key=key)
        return tj.smoothed_cross_entropy(hidden_BTD, model.output_matrix_VD, tokens_BL).loss

    return jax.grad(loss)(parameters)

graph, parameters = nnx.split(model)
jax.block_until_ready(gradient(parameters, jax.random.key(0)))
engine = tj.Engine(model, tj.DecodingConfig(batch_size=1, max_source_length=4, beam_size=2))
print(len(engine.search([tj.Sentence([5, 6])])))
"""


def test_on_a_cpu_nothing_needs_the_backend() -> None:
    command = [sys.executable, "-c", ON_A_CPU]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr


def test_on_a_gpu_one_warning_announces_the_reference_implementations(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    tokens_BL = jnp.array([[5, 6, 2]])
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    gpu._has_triton.cache_clear()
    with caplog.at_level(logging.WARNING):
        logits_BTV = model(tokens_BL, tokens_BL, dropout_key=jax.random.key(0))
        memory_BSD = model.encode(tokens_BL)
        cache = model.start_cache(memory_BSD, tokens_BL > 0, beam_size=2, max_length=4)
        model.decode_step(jnp.ones((1, 2), int), cache)
    gpu._has_triton.cache_clear()
    assert logits_BTV.shape == (1, 3, 20)
    [message] = caplog.messages
    assert "does not have Pallas' Triton backend" in message and "kernels are off" in message


def test_only_the_kernels_name_the_backend() -> None:
    files = [
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if re.search(r"import.*triton|pallas.triton", file.read_text())
    ]
    assert files == ["model/gpu.py"]
