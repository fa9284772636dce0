"""The training objective: what the model's outputs for a batch cost, with all ``LossSettings``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from transformer_jax.data.batching import Batch
from transformer_jax.devices.sharding import unshard_embeddings
from transformer_jax.model.matmul import compute_dtype
from transformer_jax.model.transformer import abstract_model
from transformer_jax.settings.checks import checked
from transformer_jax.settings.config import LossSettings, ModelConfig
from transformer_jax.training.loss import LossSums, smoothed_cross_entropy
from transformer_jax.training.two_passes import CUT_ID, repeat_rows, two_passes

Parameters = Any  # nested dict of float32 arrays, as returned by nnx.to_pure_dict


def loss_and_sums(
    parameters: Parameters,
    batch: Batch,
    dropout_key: Array | None,
    *,
    config: ModelConfig,
    settings: LossSettings,
    mesh: Mesh,
) -> tuple[Array, LossSums]:
    """Compute a batch's total loss and its sums. Without a key, dropout, R-Drop and SimCut are
    off.
    """
    graph = abstract_model(config).graph
    # A tied matrix is used twice. With this constraint, each device adds the gradients of both uses
    # before XLA sums over devices. Otherwise, XLA would sum each gradient over devices separately.
    model = nnx.merge(graph, unshard_embeddings(parameters, mesh))
    passes = None
    inputs = batch
    if dropout_key is not None and (passes := two_passes(settings)):
        batch = jax.tree.map(repeat_rows, batch)
        inputs, dropout_key = passes.inputs(batch, dropout_key, config)
        if passes.cut_rate:
            model.set_attributes(zero_id=CUT_ID)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # for kernels, which XLA cannot shard
        hidden_BTD, weights_BTS = model.hidden_and_alignment(
            inputs.source_BS,
            inputs.target_BT,
            with_alignment=batch.links_BT is not None,
            source_segments_BS=batch.source_segments_BS,
            target_segments_BT=batch.target_segments_BT,
            dropout_key=dropout_key,
        )
    sums = smoothed_cross_entropy(
        hidden_BTD.astype(compute_dtype(config)),
        nnx.merge(graph, parameters).output_matrix_VD,
        batch.target_BT,
        label_smoothing=settings.label_smoothing,
        pad_id=config.pad_id,
        bias_V=model.output_bias_V,
        mesh=mesh,
        passes=passes,
    )
    if batch.links_BT is not None:
        links = alignment_cross_entropy(weights_BTS, batch.links_BT)
        sums = sums._replace(loss=sums.loss + settings.guided_alignment * links)
    if passes:
        sums = jax.tree.map(lambda x: x / 2, sums)
    return sums.loss, sums


@checked
def alignment_cross_entropy(weights_BTS: Array, links_BT: Array) -> Array:
    """Return the sum of -log(weight) over the links (guided alignment, Garg et al. 2019).

    Args:
      weights_BTS: attention weights, float32.
      links_BT: source position, counted from 1, that each target token links to; 0: none.
    """
    linked_BTS = jax.nn.one_hot(links_BT - 1, weights_BTS.shape[2], dtype=bool)
    # far below any weight that matters; the gradient of log(0) would be NaN
    return -jnp.where(linked_BTS, jnp.log(jnp.maximum(weights_BTS, 1e-30)), 0).sum()
