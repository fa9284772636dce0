"""Weights of a PyTorch Transformer that was written by hand, in our model.

Reads the state dict of the model in Ben Trevett's tutorial "Attention is All You Need"
(pytorch-seq2seq), the usual starting point of such code, and translates token ids with beam search.
For another model, change the names and the config.

    python examples/own_pytorch_model.py --weights tut6-model.pt --num-heads 8 --source 2 14 27 3

prints the number of parameters and the token ids of the translation.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import tyro

import transformer_jax as tj

# Our name of each layer in the tutorial's encoder and decoder layers.
LINEAR_LAYERS = {
    "fc_q": "query",
    "fc_k": "key",
    "fc_v": "value",
    "fc_o": "output",
    "fc_1": "inner",
    "fc_2": "output",
}
BLOCKS = {
    "self_attention": "self_attention",
    "encoder_attention": "cross_attention",
    "positionwise_feedforward": "feed_forward",
    "self_attn_layer_norm": "self_attention_residual.norm",
    "enc_attn_layer_norm": "cross_attention_residual.norm",
    "ff_layer_norm": "feed_forward_residual.norm",
}
ENDS = {
    "encoder.tok_embedding.weight": "source_embedding.matrix",
    "encoder.pos_embedding.weight": "source_embedding.position_matrix",
    "decoder.tok_embedding.weight": "target_embedding.matrix",
    "decoder.pos_embedding.weight": "target_embedding.position_matrix",
    "decoder.fc_out.weight": "softmax_matrix",  # [V, D], as in PyTorch
    "decoder.fc_out.bias": "softmax_bias",
}


def read_config(state: Mapping[str, np.ndarray], num_heads: int) -> tj.ModelConfig:
    """Derive the config from the shapes of the arrays. The number of heads is not in them."""
    source_vocab_size, d_model = state["encoder.tok_embedding.weight"].shape
    d_ff, _ = state["encoder.layers.0.positionwise_feedforward.fc_1.weight"].shape

    def count_layers(side: str) -> int:
        return len({name.split(".")[2] for name in state if name.startswith(f"{side}.layers.")})

    return tj.ModelConfig(
        source_vocab_size=source_vocab_size,
        vocab_size=len(state["decoder.tok_embedding.weight"]),
        d_model=d_model,
        d_ff=d_ff,
        num_heads=num_heads,
        num_layers=count_layers("encoder"),
        num_decoder_layers=count_layers("decoder"),
        norm_epsilon=1e-5,
        attention_bias=True,
        positions="learned",
        max_positions=len(state["encoder.pos_embedding.weight"]),
        embedding_scale="tokens",
        tie_embeddings="none",
        softmax_bias=True,
        # The tutorial's vocabularies begin with <unk> <pad> <sos> <eos>.
        pad_id=1,
        decoder_start_id=2,
        eos_id=3,
        dtype="float32",
    )


def convert(state: Mapping[str, np.ndarray], config: tj.ModelConfig) -> dict[str, np.ndarray]:
    """Rename and reshape the arrays: PyTorch's linear layers are [out, in], ours [in, out]."""
    shapes = tj.parameter_shapes(config)
    arrays = {}
    for their_name, array in state.items():
        if their_name in ENDS:
            arrays[ENDS[their_name]] = array
            continue
        side, _, number, block, *linear_layer, kind = their_name.split(".")
        name = f"{side}.layers.{number}.{BLOCKS[block]}"
        if linear_layer:
            name += f".{LINEAR_LAYERS[linear_layer[0]]}.{'kernel' if kind == 'weight' else 'bias'}"
        else:
            name += ".scale" if kind == "weight" else ".bias"
        arrays[name] = array.T.reshape(shapes[name])  # [D, H * K] becomes [D, H, K]
    return arrays


def main(weights: Path, source: tuple[int, ...], num_heads: int = 8) -> None:
    """Translate token ids with the weights in a state dict.

    Args:
      weights: file that ``torch.save(model.state_dict(), ...)`` wrote.
      source: token ids of the source with <sos> (2) and <eos> (3), as the tutorial encodes them.
      num_heads: number of attention heads.
    """
    tensors = torch.load(weights, map_location="cpu", weights_only=True)
    state = {name: tensor.numpy() for name, tensor in tensors.items()}
    config = read_config(state, num_heads)
    model = tj.model_from_arrays(config, convert(state, config))
    print(f"{sum(array.size for array in state.values()):,} parameters")
    engine = tj.Engine(model, tj.DecodingConfig(batch_size=1))
    [[hypothesis]] = engine.search([tj.Sentence(source[:-1])])  # the engine adds EOS
    print(*hypothesis.tokens)


if __name__ == "__main__":
    raise SystemExit(tj.run_program(lambda: tyro.cli(main)))
