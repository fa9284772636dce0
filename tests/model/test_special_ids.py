"""Special token ids in ``ModelConfig``: which ids they are changes no number."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from tests.model.random_weights import random_transformer
from transformer_jax.data.batching import BatchPlan
from transformer_jax.data.corpus import Corpus
from transformer_jax.decoding.engine import Engine
from transformer_jax.decoding.search import Sentence
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.settings.config import BatchConfig, DecodingConfig, ModelConfig
from transformer_jax.training.loss import smoothed_cross_entropy

V = 12
CONFIG = ModelConfig(
    vocab_size=V, d_model=8, d_ff=8, num_heads=2, num_layers=1, dtype="float32", softmax_bias=True
)
NEW_OF_OLD = np.random.default_rng(3).permutation(V)  # 0, 1 and 2 are PAD, BOS and EOS
OTHER = dataclasses.replace(
    CONFIG, **dict(zip(("pad_id", "decoder_start_id", "eos_id"), NEW_OF_OLD[:3].tolist()))
)


def test_a_permutation_of_the_vocabulary_permutes_results() -> None:
    """Batches, logits, the loss and outputs of the search."""
    model = random_transformer(CONFIG)
    other = random_transformer(OTHER)
    old_of_new = np.argsort(NEW_OF_OLD)
    for parameter in (other.target_embedding.matrix, other.softmax_bias):
        assert parameter is not None
        parameter[...] = jnp.asarray(np.asarray(parameter[...])[old_of_new])
    sources, targets = [[5, 6, 7], [8, 9, 3, 4]], [[4, 4], [11, 5, 10]]
    batches = []
    for config, ids in ((CONFIG, np.arange(V)), (OTHER, NEW_OF_OLD)):
        assert len({config.pad_id, config.eos_id, config.decoder_start_id}) == 3
        lists = [[ids[tokens].tolist() for tokens in side] for side in (sources, targets)]
        corpus = Corpus.from_lists(lists[0], lists[1], config.eos_id)
        plan = BatchPlan(corpus, BatchConfig(tokens=64, buckets=1), seed=0, pad_id=config.pad_id)
        batches.append(plan.batch(0))
    np.testing.assert_array_equal(NEW_OF_OLD[batches[0].source_BS], batches[1].source_BS)
    np.testing.assert_array_equal(NEW_OF_OLD[batches[0].target_BT], batches[1].target_BT)

    @nnx.jit
    def logits_and_loss(transformer: Transformer, source_BS: Array, target_BT: Array) -> Any:
        hidden_BTD = transformer.hidden(source_BS, target_BT)
        loss = smoothed_cross_entropy(
            hidden_BTD,
            transformer.output_matrix_VD,
            target_BT,
            pad_id=transformer.config.pad_id,
            bias_V=transformer.output_bias_V,
        )
        return transformer.logits(hidden_BTD), loss

    logits, losses = zip(
        *(
            jax.tree.map(np.asarray, logits_and_loss(transformer, *batch[:2]))
            for transformer, batch in zip((model, other), batches)
        )
    )
    is_real = batches[0].target_BT != CONFIG.pad_id
    np.testing.assert_allclose(logits[0][is_real], logits[1][..., NEW_OF_OLD][is_real], atol=1e-6)
    np.testing.assert_allclose(losses[0].loss, losses[1].loss, rtol=1e-5)
    assert losses[0].tokens == losses[1].tokens == 7

    decoding = DecodingConfig(beam_size=2, max_extra_length=4, batch_size=4)
    [old] = Engine(model, decoding).search([Sentence([5, 6, 7], num_hypotheses=2)])
    [new] = Engine(other, decoding).search(
        [Sentence(NEW_OF_OLD[[5, 6, 7]].tolist(), num_hypotheses=2)]
    )
    assert [NEW_OF_OLD[each.tokens].tolist() for each in old] == [each.tokens for each in new]
    np.testing.assert_allclose([x.score for x in old], [x.score for x in new], rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pad_id": V}, r"model.pad_id is 12; expected an id below the vocabulary's size, 12"),
        ({"eos_id": 0}, r"model.eos_id is 0; expected .* other than model.pad_id"),
        ({"decoder_start_id": V}, r"model.decoder_start_id is 12; expected .* 12"),
    ],
)
def test_impossible_ids_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        dataclasses.replace(CONFIG, **fields)
