"""Models that differ from the paper's: training on several devices, resuming, loading.

Other tests: model outputs in tests/model, decoding in tests/translation/test_translator.py, exports
in tests/export.
"""

import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from runs import ONE, assert_same_runs, changed, no_evaluation, tiny

from transformer_jax.pretrained.loading import load_model
from transformer_jax.settings.config import MeshConfig
from transformer_jax.training.loop import train

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
        "remat": True,
    },
    "t5": {
        **{"norm": "pre", "norm_type": "rms", "activation": "geglu", "feed_forward_bias": False},
        **{"positions": "relative", "relative_buckets": 9, "relative_distance": 12},
        **{"attention_scale": False, "embedding_scale": "none", "output_scale": True},
        **{"num_decoder_layers": 2, "relative_bias": "layer", "decoder_start_id": 0},
    },
    "bart": {
        **{"positions": "learned", "max_positions": 32, "position_offset": 2},
        **{"share_positions": False, "embedding_norm": True, "embedding_scale": "none"},
        **{"attention_bias": True, "softmax_bias": True, "decoder_start_id": 2},
    },
    "m2m_100": {
        **{"norm": "pre", "positions": "tensor2tensor", "position_offset": 2},
        **{"embedding_scale": "tokens", "attention_bias": True, "decoder_start_id": 2},
    },
}


@pytest.mark.devices(8)
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(fields, id=name, marks=[] if name == "t5" else pytest.mark.exhaustive)
        for name, fields in VARIANTS.items()
    ],
)
def test_a_variant_resumes_on_one_or_eight_devices_and_loads(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    """Bit-exactly on one device; with the same losses on eight."""
    config = no_evaluation(tiny(steps=5, checkpoint_every=2, average=1))
    config = changed(config, model=fields)
    first = changed(config, training={"steps": 2})
    train(config, tmp_path / "whole", devices=ONE)
    train(first, tmp_path / "resumed", devices=ONE)
    shutil.copytree(tmp_path / "resumed", tmp_path / "eight")
    train(config, tmp_path / "resumed", devices=ONE)
    train(changed(config, mesh=MeshConfig(2, 2, 2)), tmp_path / "eight")
    state = assert_same_runs(config, tmp_path)
    loaded = nnx.to_pure_dict(nnx.state(load_model(tmp_path / "whole")[1], nnx.Param))
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, loaded), state.parameters)
