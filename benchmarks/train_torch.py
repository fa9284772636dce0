"""PyTorch's side of ``train_speed.py``: ``torch.nn.Transformer``, eager or compiled."""

from __future__ import annotations

import math
import shutil
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.in_turn import Skipped
from benchmarks.train_job import BOS_ID, PAD_ID, PRODUCTS, Job, Turns, best_rate


class Model(nn.Module):
    """Embedding, sinusoids, ``nn.Transformer`` and softmax, with one matrix for both ends (section
    3.4), and the loss.

    ``nn.Transformer`` has a norm after each stack and dropout in places where the paper has none;
    both are taken out.
    """

    positions: torch.Tensor
    future: torch.Tensor

    def __init__(self, job: Job, longest: int):
        """``longest``: of all sequences."""
        super().__init__()
        self.embedding = nn.Embedding(job.vocab_size, job.d_model)
        nn.init.normal_(self.embedding.weight, std=job.d_model**-0.5)
        self.transformer = nn.Transformer(
            job.d_model,
            job.num_heads,
            job.num_layers,
            job.num_layers,
            job.d_ff,
            job.dropout,
            layer_norm_eps=job.norm_epsilon,
            batch_first=True,
        )
        self.transformer.encoder.norm = self.transformer.decoder.norm = None
        for layer in (*self.transformer.encoder.layers, *self.transformer.decoder.layers):
            layer.dropout.p = 0.0  # inside the feed-forward layer
        for module in self.transformer.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0  # on attention weights
        self.dropout = nn.Dropout(job.dropout)
        self.loss = nn.CrossEntropyLoss(label_smoothing=job.label_smoothing, ignore_index=PAD_ID)
        angles = (
            torch.arange(longest)[:, None]
            * 10000.0 ** -(torch.arange(0, job.d_model, 2) / job.d_model)[None]
        )
        self.register_buffer(
            "positions",
            torch.stack([angles.sin(), angles.cos()], dim=2).reshape(longest, job.d_model),
        )
        self.register_buffer("future", torch.ones(longest, longest).triu(1).bool())

    def forward(self, source_BS: torch.Tensor, target_BT: torch.Tensor) -> torch.Tensor:
        """Mean loss over the real target tokens; the target is shifted right here."""
        inputs_BT = nn.functional.pad(target_BT[:, :-1], (1, 0), value=BOS_ID)
        length = target_BT.shape[1]
        padding_BS = source_BS == PAD_ID
        hidden_BTD = self.transformer(
            self._embed(source_BS),
            self._embed(inputs_BT),
            tgt_mask=self.future[:length, :length],
            src_key_padding_mask=padding_BS,
            tgt_key_padding_mask=inputs_BT == PAD_ID,
            memory_key_padding_mask=padding_BS,
            tgt_is_causal=True,
        )
        logits_BTV = nn.functional.linear(hidden_BTD, self.embedding.weight)
        return self.loss(logits_BTV.flatten(0, 1), target_BT.flatten())

    def _embed(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        x_BLD = self.embedding(tokens_BL) * self.embedding.embedding_dim**0.5
        return self.dropout(x_BLD + self.positions[: tokens_BL.shape[1]])


class Torch(Turns):
    """The usual loop: forward under autocast where it is bfloat16, loss, backward, fused Adam,
    learning-rate schedule.
    """

    def __init__(self, job: Job, batches: list[tuple[np.ndarray, np.ndarray]], *, compiled: bool):
        """Build the model and move the batches to the device."""
        if job.device == "gpu" and not torch.cuda.is_available():
            raise Skipped("this build of torch sees no GPU")
        if (
            compiled
            and job.device == "cpu"
            and not (shutil.which("g++") or shutil.which("clang++"))
        ):
            raise Skipped("torch.compile needs a C++ compiler on a CPU")
        torch.set_num_threads(job.threads)
        torch.manual_seed(0)
        self._device = torch.device("cuda" if job.device == "gpu" else "cpu")
        self._dtype = getattr(torch, job.dtype)
        self._model = (
            Model(job, max(array.shape[1] for pair in batches for array in pair))
            .to(self._device)
            .train()
        )
        attention = [
            module for module in self._model.modules() if isinstance(module, nn.MultiheadAttention)
        ]
        self.about = {
            "precision": job.dtype,
            "version": torch.__version__,
            "parameters": sum(parameter.numel() for parameter in self._model.parameters()),
            "attention_biases": sum(
                x.in_proj_bias.numel() + x.out_proj.bias.numel() for x in attention
            ),
        }
        self._forward = torch.compile(self._model) if compiled else self._model
        self._optimizer = torch.optim.Adam(
            self._model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9, fused=True
        )
        peak, warmup = (job.d_model * job.warmup_steps) ** -0.5, job.warmup_steps
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer,
            lambda done: peak * min(math.sqrt(warmup / (done + 1)), (done + 1) / warmup),
        )
        placed = [
            tuple(torch.tensor(array, dtype=torch.int64, device=self._device) for array in pair)
            for pair in batches
        ]
        super().__init__(job, self._train, placed, _read)

    def _train(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            loss = self._forward(*batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._schedule.step()
        return loss.detach()

    def extras(self) -> dict[str, Any]:
        """Also what only PyTorch can tell: the device's memory, and what a plain matrix product
        reaches.
        """
        found: dict[str, Any] = {"first_step_seconds": self.first_step_seconds}
        if self._device.type == "cuda":
            found["peak_device_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
        return found | {"product_flops": self._product_flops()}

    def _product_flops(self) -> float:
        size = self._job.product_size
        matrix = torch.randn(size, size, device=self._device).div(size**0.5).to(self._dtype)

        def product() -> None:
            x = matrix
            for _ in range(PRODUCTS):
                x = x @ matrix
            if self._device.type == "cuda":
                torch.cuda.synchronize()

        with torch.inference_mode():
            return best_rate(product, size)


def _read(losses: list[torch.Tensor]) -> list[float]:
    return torch.stack(losses).tolist()
