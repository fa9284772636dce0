"""Models far from the paper's: training on several devices, resuming, loading.

Other tests: model outputs in tests/model, decoding in tests/decoding/test_translator.py, exports in
tests/interop.
"""

import dataclasses
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from runs import ONE, final_state, no_evaluation, tiny

from transformer_jax.checkpoint import load_model
from transformer_jax.config import BatchConfig, Config, DataConfig, MeshConfig, ModelConfig
from transformer_jax.data.batching import Batch
from transformer_jax.sharding import make_mesh
from transformer_jax.training.loop import train
from transformer_jax.training.step import make_step_functions

VARIANTS: dict[str, dict[str, Any]] = {
    "modern": {
        "norm": "pre",
        "norm_type": "rms",
        "activation": "swiglu",
        "feed_forward_bias": False,
    },
    "gelu": {
        "final_norm": True,
        "norm_bias": False,
        "activation": "gelu",
        "tie_embeddings": "embeddings",
    },
}
variants = pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)


@pytest.mark.devices(8)
@variants
def test_losses_on_eight_devices_are_those_of_one(fields: dict[str, Any]) -> None:
    shape = {"vocab_size": 24, "d_model": 16, "d_ff": 32, "num_heads": 4}
    model = ModelConfig(**shape | {"num_layers": 1} | fields, dtype="float32")
    config = Config(
        model=model,
        data=DataConfig(max_source_length=16, max_target_length=16),
        batch=BatchConfig(tokens=256, row_multiple=8),
    )
    rng = np.random.default_rng(0)
    source, target = (rng.integers(4, 24, (8, length)).astype(np.int32) for length in (7, 6))
    source[1, 3:] = target[1, 4:] = 0

    # drawn once: what draws it takes long to compile
    first = jax.tree.map(
        np.asarray, make_step_functions(config, make_mesh(MeshConfig(), ONE)).init()
    )

    def losses(mesh: MeshConfig, devices: int) -> list[float]:
        placed = dataclasses.replace(config, mesh=mesh)
        run = make_step_functions(placed, make_mesh(mesh, jax.devices()[:devices]))
        places = jax.tree.map(lambda x: x.sharding, run.abstract_state)
        state, found = jax.device_put(first, places), []
        for _ in range(3):
            state, metrics = run.train_step(state, Batch(source, target))
            found.append(float(metrics.sums.loss))
        return found

    np.testing.assert_allclose(losses(MeshConfig(2, 2, 2), 8), losses(MeshConfig(), 1), rtol=1e-5)


@variants
def test_training_resumes_to_the_bit_and_the_checkpoint_loads(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    config = no_evaluation(tiny(steps=4, checkpoint_every=2, average=1))
    model = dataclasses.replace(config.model, **fields)
    config = dataclasses.replace(config, model=model)
    first = dataclasses.replace(config, training=dataclasses.replace(config.training, steps=2))
    train(config, tmp_path / "whole", devices=ONE)
    train(first, tmp_path / "resumed", devices=ONE)
    train(config, tmp_path / "resumed", devices=ONE)
    states = [final_state(config, tmp_path / name) for name in ("whole", "resumed")]
    chex.assert_trees_all_equal(*states)
    loaded = nnx.to_pure_dict(nnx.state(load_model(tmp_path / "whole")[1], nnx.Param))
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, loaded), states[0].parameters)
