"""A model of BART-large's shape, to decode with random weights. BART also normalizes embeddings."""

from transformer_jax import Config, ModelConfig
from transformer_jax.settings.config import TokenizerConfig


def get_config() -> Config:
    """12 + 12 layers, 406 million parameters."""
    model = ModelConfig(
        d_model=1024,
        d_ff=4096,
        num_heads=16,
        num_layers=12,
        attention_bias=True,
        activation="gelu",
        positions="learned",
        softmax_bias=True,
    )
    return Config(model=model, tokenizer=TokenizerConfig(vocab_size=50_265))
