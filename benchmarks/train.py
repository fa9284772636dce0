"""Training speed of our step, PyTorch's ``torch.nn.Transformer``, and another checkout.

    python -m benchmarks.train                                        # base, on a CPU
    python -m benchmarks.train --pairs 784 --steps 40 --dtype bfloat16    # base, on a GPU
    python -m benchmarks.train --config multi30k --against ../older --engines ours
    python -m benchmarks.train --engines ours --devices 8 --fsdp 8    # each device has --pairs

A turn is ``--steps`` steps (forward, backward, Adam) on batches of random tokens, without padding,
that are already on the device.

All engines train the same model: the paper's post-norm encoder and decoder, ReLU, one matrix for
embeddings and softmax, dropout on embeddings and sublayer outputs, label smoothing, Adam.
Parameters, norms and loss are float32, matmuls in ``--dtype`` (PyTorch: autocast). Other models,
such as pre-norm, have no PyTorch counterpart here. Differences:

- PyTorch's attention has biases. A check confirms that all other parameter counts agree.
- ``nn.Transformer`` also has dropout on attention weights and in the feed-forward layer, and a norm
  after each stack. They are removed, which makes it faster.
- PyTorch materializes the logits of the whole batch. Our step materializes the logits of a chunk of
  positions at a time.
- Our step also has a learning-rate schedule and computes the gradient norm.
- With float32 on a GPU, XLA uses TF32 for matmuls. By default, PyTorch does not.

The first losses must be near ln V. ``model TFLOP/s`` counts the model's matmuls
(``training.metrics``); MFU is its fraction of the device's peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.in_turn import Answer, Engine, finish, measure, parser, workers
from transformer_jax import BOS_ID, EOS_ID, PAD_ID, Config, load_config_file

ENGINES = ("ours", "torch_eager", "torch_compile")
_NUM_BATCHES = 4


def read_config(job: Answer) -> Config:
    """Read the recipe of this engine's checkout, and set its vocabulary size."""
    config = load_config_file(job["config"])
    size = config.tokenizer.vocab_size
    return replace(config, model=replace(config.model, vocab_size=size, dtype=job["dtype"]))


def make_batches(job: Answer, vocab_size: int) -> np.ndarray:
    """Make random tokens that end in EOS, int32 [batches, sides, pairs, length]."""
    shape = _NUM_BATCHES, 2, job["pairs"] * job["devices"], job["length"]
    tokens = np.random.default_rng(0).integers(4, vocab_size, shape, np.int32)
    tokens[..., -1] = EOS_ID
    return tokens


def ours(job: Answer) -> Engine:
    """Run the training step of ``train.py``."""
    import jax

    from transformer_jax import Batch, MeshConfig, batch_sharding, make_mesh
    from transformer_jax.training.step import make_step_functions

    config = read_config(job)
    devices = jax.devices()[: job["devices"]]
    mesh = make_mesh(MeshConfig(fsdp=job["fsdp"]), devices)
    functions = make_step_functions(config, mesh)
    state = functions.init()
    pairs = (Batch(*sides) for sides in make_batches(job, config.model.vocab_size))
    batches = cycle([jax.device_put(pair, batch_sharding(mesh)) for pair in pairs])

    def run() -> Answer:
        nonlocal state
        sums = []
        for batch in islice(batches, job["steps"]):
            state, metrics = functions.train_step(state, batch)
            sums.append(metrics.sums)
        memory = devices[0].memory_stats() or {}
        return {
            "losses": [float(x.loss / x.tokens) for x in jax.device_get(sums)],
            "parameters": sum(x.size for x in jax.tree.leaves(state.parameters)),
            "platform": devices[0].platform,
            "device gb": memory.get("peak_bytes_in_use", 0) / 1e9,
        }

    return run


def torch_loss(config: Config, longest: int) -> tuple[Any, Callable[[Any, Any], Any]]:
    """Adapt ``nn.Transformer`` to the paper. Returns its modules and a function that shifts the
    target right and computes the mean loss for source and target.
    """
    import torch
    from torch import nn
    from torch.nn import functional

    model = config.model
    transformer = nn.Transformer(
        model.d_model,
        model.num_heads,
        model.num_layers,
        model.num_layers,
        model.d_ff,
        model.dropout,
        layer_norm_eps=model.norm_epsilon,
        batch_first=True,
    )
    transformer.encoder.norm = transformer.decoder.norm = None
    for module in transformer.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0  # on attention weights
        elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            module.dropout.p = 0.0  # in the feed-forward layer
    embedding = nn.Embedding(model.vocab_size, model.d_model)
    nn.init.normal_(embedding.weight, std=model.d_model**-0.5)
    frequencies = 10000.0 ** -(torch.arange(0, model.d_model, 2) / model.d_model)
    angles = torch.arange(longest)[:, None] * frequencies
    modules = nn.ModuleDict({"transformer": transformer, "embedding": embedding})
    modules.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], 2).flatten(1))
    modules.register_buffer("future", torch.ones(longest, longest).triu(1).bool())

    def embed(tokens_BL: torch.Tensor) -> torch.Tensor:
        x_BLD = embedding(tokens_BL) * model.d_model**0.5 + modules.positions[: tokens_BL.shape[1]]
        return functional.dropout(x_BLD, model.dropout, modules.training)

    def loss(source_BS: torch.Tensor, target_BT: torch.Tensor) -> torch.Tensor:
        inputs_BT = functional.pad(target_BT[:, :-1], (1, 0), value=BOS_ID)
        length = target_BT.shape[1]
        hidden_BTD = transformer(
            embed(source_BS),
            embed(inputs_BT),
            tgt_mask=modules.future[:length, :length],
            src_key_padding_mask=source_BS == PAD_ID,
            tgt_key_padding_mask=inputs_BT == PAD_ID,
            memory_key_padding_mask=source_BS == PAD_ID,
            tgt_is_causal=True,
        )
        return functional.cross_entropy(
            functional.linear(hidden_BTD, embedding.weight).flatten(0, 1),
            target_BT.flatten(),
            ignore_index=PAD_ID,
            label_smoothing=config.training.label_smoothing,
        )

    return modules, loss


def pytorch(job: Answer, *, compiled: bool) -> Engine:
    """Run a standard PyTorch loop: forward pass under autocast, loss, backward pass, fused Adam."""
    import torch

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    config = read_config(job)
    dtype = getattr(torch, job["dtype"])
    modules, loss = torch_loss(config, job["length"])
    modules.to(device).train()
    loss = torch.compile(loss) if compiled else loss
    optimizer = torch.optim.Adam(modules.parameters(), 1e-5, (0.9, 0.98), 1e-9, fused=True)
    tokens = torch.tensor(make_batches(job, config.model.vocab_size), dtype=torch.int64)
    batches = cycle(tokens.to(device))
    parameters = sum(
        x.numel() for name, x in modules.named_parameters() if "attn" not in name or x.ndim > 1
    )

    def run() -> Answer:
        losses = []
        for source, target in islice(batches, job["steps"]):
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                value = loss(source, target)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.detach())
        return {
            "losses": torch.stack(losses).tolist(),
            "parameters": parameters,  # without the attention's biases
            "platform": "gpu" if cuda else "cpu",
            "device gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0,
        }

    return run


def start(name: str, job: Answer) -> Engine:
    """Start the engine ``name``. Raises ``ImportError`` if it cannot run."""
    return pytorch(job, compiled="compile" in name) if "torch" in name else ours(job)


def main() -> None:
    """Measure the engines in turn, and report."""
    flags = parser(__doc__)
    add = flags.add_argument
    add("--config", default="wmt14_base", help="recipe or file; default: wmt14_base")
    add("--pairs", type=int, default=32, help="sentence pairs per step and device")
    add("--length", type=int, default=32)
    add("--steps", type=int, default=4)
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    add("--devices", type=int, default=1, help="devices for our engine; other engines use one")
    add("--fsdp", type=int, default=1, help="number of devices that shard the parameters")
    arguments = flags.parse_args()
    if arguments.devices > 1 and list(arguments.engines) != ["ours"]:
        flags.error("--engines ours is required with several devices")
    if Path(arguments.config).exists():
        arguments.config = str(Path(arguments.config).absolute())
    job = vars(arguments)
    from transformer_jax.training.metrics import training_flops  # an older checkout has none

    config = read_config(job)
    pairs = job["pairs"] * job["devices"]
    length = job["length"]
    tokens = job["steps"] * pairs * length
    flops = job["steps"] * training_flops(config, pairs, length, length)
    with workers("train", arguments.engines, job) as engines:
        table, rounds = measure(
            engines, arguments.rounds, lambda x: tokens / x["seconds"], "target tokens/s"
        )
    for name, row in table.items():
        first = rounds[0][name]
        seconds = tokens / row["target tokens/s"]
        row["ms a step"] = 1e3 * seconds / job["steps"]
        row["model TFLOP/s"] = flops / seconds / 1e12
        row["tokens/s per device"] = row["target tokens/s"] / job["devices"]
        row["compiling, s"] = first["seconds"] - seconds
        # initial logits are about N(0, 1), which adds about 0.5
        assert abs(first["losses"][0] - math.log(config.model.vocab_size)) < 1.5, f"{name}: {first}"
    models = {(answer["parameters"], answer["platform"]) for answer in rounds[0].values()}
    assert len(models) == 1, f"parameters or platforms differ: {models}"
    finish(table, rounds, arguments)


if __name__ == "__main__":
    main()
