"""Our side of ``train_speed.py``: the loop's training step on batches that are on the device."""

from __future__ import annotations

from typing import Any, Literal, cast

import jax
import numpy as np

from benchmarks.train_job import PRODUCTS, Job, Turns, best_rate
from transformer_jax.config import Config, MeshConfig, ModelConfig, OptimizerConfig, TrainingConfig
from transformer_jax.data.batching import Batch
from transformer_jax.sharding import batch_sharding, make_mesh
from transformer_jax.training.step import make_step_functions
from transformer_jax.training.summary import environment


def prepare() -> dict[str, Any]:
    """Where engines run, and what machine this is."""
    return {"device": jax.default_backend(), "environment": environment()}


class Ours(Turns):
    """``make_step_functions(...).train_step`` on one device, its state donated."""

    def __init__(self, job: Job, batches: list[tuple[np.ndarray, np.ndarray]]):
        """Initialise the state and move the batches to the device."""
        shape = {
            name: getattr(job, name)
            for name in ("vocab_size", "d_model", "d_ff", "num_heads", "num_layers")
        }
        dtype = cast(Literal["float32", "bfloat16"], job.dtype)
        config = Config(
            model=ModelConfig(
                **shape, dropout=job.dropout, norm_epsilon=job.norm_epsilon, dtype=dtype
            ),
            optimizer=OptimizerConfig(warmup_steps=job.warmup_steps),
            training=TrainingConfig(label_smoothing=job.label_smoothing),
        )
        mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        step_functions = make_step_functions(config, mesh)
        self._state = step_functions.init()
        self._train_step = step_functions.train_step
        parameters = sum(leaf.size for leaf in jax.tree.leaves(self._state.parameters))
        self.about = {"precision": job.dtype, "version": jax.__version__, "parameters": parameters}
        placed = [
            jax.device_put(Batch(source, target), batch_sharding(mesh))
            for source, target in batches
        ]
        super().__init__(job, self._train, jax.block_until_ready(placed), _read)

    def program(self) -> str:
        """The compiled step as HLO."""
        lowered = self._train_step.lower(self._state, self._batches[0])  # type: ignore[attr-defined]
        return lowered.compile().as_text()

    def _train(self, batch: Batch) -> Any:
        self._state, metrics = self._train_step(self._state, batch)
        return metrics.sums

    def extras(self) -> dict[str, Any]:
        """Also what only JAX can tell: the device's memory, and what a plain matrix product
        reaches.
        """
        statistics = jax.devices()[0].memory_stats() or {}
        found: dict[str, Any] = {"first_step_seconds": self.first_step_seconds}
        if "peak_bytes_in_use" in statistics:
            found["peak_device_gb"] = round(statistics["peak_bytes_in_use"] / 1e9, 3)
        return found | {"product_flops": product_flops(self._job.product_size, self._job.dtype)}


def product_flops(size: int, dtype: str) -> float:
    """The best rate of products of square matrices, FLOP/s."""
    matrix = (jax.random.normal(jax.random.key(0), (size, size)) / size**0.5).astype(dtype)

    @jax.jit
    def product(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, PRODUCTS, lambda _, y: y @ matrix, x)

    return best_rate(lambda: jax.block_until_ready(product(matrix)), size)


def _read(sums: list[Any]) -> list[float]:
    return [float(each.loss / each.tokens) for each in jax.device_get(sums)]
