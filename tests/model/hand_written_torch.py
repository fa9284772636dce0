"""A Transformer as people write it by hand in PyTorch, with the layer names of a tutorial."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

UNK, PAD, SOS, EOS = range(4)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.fc_q = nn.Linear(width, width)
        self.fc_k = nn.Linear(width, width)
        self.fc_v = nn.Linear(width, width)
        self.fc_o = nn.Linear(width, width)

    def forward(self, query: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer, x in ((self.fc_q, query), (self.fc_k, memory), (self.fc_v, memory))
        )
        out = F.scaled_dot_product_attention(q, k, v, mask)
        return self.fc_o(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc_1 = nn.Linear(width, inner)
        self.fc_2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_2(F.relu(self.fc_1(x)))


class Layer(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, *, has_memory: bool) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.self_attention = Attention(width, heads)
        if has_memory:
            self.enc_attn_layer_norm = nn.LayerNorm(width)
            self.encoder_attention = Attention(width, heads)
        self.ff_layer_norm = nn.LayerNorm(width)
        self.positionwise_feedforward = FeedForward(width, inner)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        x = self.self_attn_layer_norm(x + self.self_attention(x, x, mask))
        if hasattr(self, "encoder_attention"):
            x = self.enc_attn_layer_norm(x + self.encoder_attention(x, memory, memory_mask))
        return self.ff_layer_norm(x + self.positionwise_feedforward(x))


class Stack(nn.Module):
    def __init__(self, vocabulary: int, width: int, inner: int, heads: int, *, layers: int) -> None:
        super().__init__()
        self.tok_embedding = nn.Embedding(vocabulary, width)
        self.pos_embedding = nn.Embedding(100, width)
        has_memory = isinstance(self, Decoder)
        self.layers = nn.ModuleList(
            Layer(width, inner, heads, has_memory=has_memory) for _ in range(layers)
        )

    def forward(self, tokens: Tensor, mask: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        positions = self.pos_embedding(torch.arange(tokens.shape[1]))
        x = self.tok_embedding(tokens) * self.tok_embedding.embedding_dim**0.5 + positions
        for layer in self.layers:
            x = layer(x, mask, memory, memory_mask)
        return x


class Decoder(Stack):
    def __init__(self, vocabulary: int, width: int, *sizes: int, layers: int) -> None:
        super().__init__(vocabulary, width, *sizes, layers=layers)
        self.fc_out = nn.Linear(width, vocabulary)


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Stack(30, 16, 32, 2, layers=2)
        self.decoder = Decoder(40, 16, 32, 2, layers=1)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits of the token after each token of ``target``, which begins with <sos>."""
        is_source = (source != PAD)[:, None, None]
        memory = self.encoder(source, is_source, source, is_source)
        length = target.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = (target != PAD)[:, None, None] & causal
        return self.decoder.fc_out(self.decoder(target, mask, memory, is_source))
