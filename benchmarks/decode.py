"""Decoding speed of our engine, CTranslate2, Hugging Face ``generate``, and another checkout.

    python -m benchmarks.decode --batch-sizes 1 32                  # base, random weights
    python -m benchmarks.decode --workdir W --input F --batch-sizes 32
    python -m benchmarks.decode --against ../older --engines ours

All engines have the same weights and inputs, longest first. Times are from token ids to token ids,
without tokenization and loading. Our engine and CTranslate2 get all sentences at once; Hugging Face
gets one batch per call. CTranslate2 runs in the fastest division of the cores into workers and
threads, which is measured first (``setting``).

*Random weights*: source lengths resemble newstest2014 with a joint BPE vocabulary of 32,000 tokens
(log-normal, mean 27.7 with EOS). Every output is one token longer than its source: our engine
suppresses EOS and stops at its limit. Other engines cannot force the length of single sentences, so
each batch uses its mean length. ``same`` counts equal outputs among sentences of the same forced
length. It ignores the last position, where our engine has EOS. Random weights cause near-ties,
which are decided by float rounding and, in beam search, by the last position, where other engines
may have any token.

``--lengths`` draws source lengths uniformly instead. With ``--output-length``, outputs have that
many tokens, EOS included: a softmax bias makes EOS the best token, and a minimum length forbids it
until then.

*A trained model* (``--workdir``): every engine stops at EOS, or once the output is 50 tokens longer
than the source. Our engine uses each sentence's length, Hugging Face the longest in the batch,
CTranslate2 the longest in the file. Token counts are from each engine's best outputs, EOS included.

The length penalty is length^0.6 in every engine (ours with ``length_offset`` 0). By default, each
engine has its own stopping rule: ours is exact, CTranslate2 has patience 1. ``--patience`` sets it
for both; with 1, Hugging Face gets ``early_stopping=True``, the same rule. ``ours`` computes
in the data type that ``model.dtype`` auto chooses. CTranslate2 and Hugging Face compute in float32
on a CPU and in bfloat16 on a GPU, ``ctranslate2_int8`` with weights in int8. On a GPU, CTranslate2
needs ``pip install nvidia-cublas-cu12``.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.in_turn import Answer, Engine, Table, absolute, finish, measure, parser, workers
from transformer_jax import EOS_ID, PAD_ID, Config, DecodingConfig, load_config_file
from transformer_jax.tokenization.languages import Languages

Ids = list[list[int]]
Search = Callable[[], Ids]


def numbered_tokens(vocab_size: int) -> Any:
    """Make a stand-in tokenizer for random weights, with the attributes that exports use."""
    names = ["<pad>", "<s>", "</s>", "<unk>", *(f"p{i}" for i in range(4, vocab_size))]
    side = SimpleNamespace(
        model=b"",
        segmenter=None,
        vocab_size=vocab_size,
        tokens=lambda ids: [names[i] for i in ids],
        suppressed_ids=lambda _: [],
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
    )
    return SimpleNamespace(
        source=side,
        target=side,
        joint=True,
        languages=Languages(),
        vocabulary=False,
        pretrained=b"",
    )


def load(job: Answer) -> tuple[Config, Any, Any]:
    """Load config, model and tokenizer, or make random weights, the same ones in every process."""
    from flax import nnx

    from transformer_jax import Transformer, load_model

    if job["workdir"]:
        _, model, tokenizer = load_model(job["workdir"])
    else:
        config = load_config_file(job["config"])
        fixed = bool(job["output_length"])
        shape = replace(
            config.model,
            vocab_size=config.tokenizer.vocab_size,
            softmax_bias=config.model.softmax_bias or fixed,
        )
        model = Transformer(shape, rngs=nnx.Rngs(0))
        if fixed:
            model.softmax_bias[...] = model.softmax_bias[...].at[EOS_ID].set(100.0)
        tokenizer = numbered_tokens(shape.vocab_size)
    longest = max(256, *job["lengths"])
    decoding = DecodingConfig(
        beam_size=job["beam_size"],
        length_penalty=0.6,
        length_offset=0.0,
        max_extra_length=job["extra"],
        min_length=max(0, job["output_length"] - 1),
        max_source_length=longest,
        # sources of more than 128 tokens get a quarter of the rows
        batch_size=job["batch_size"] * (4 if longest > 256 else 1),
        **({"patience": job["patience"]} if job["patience"] else {}),  # an older checkout has none
    )
    return Config(model=model.config, decoding=decoding), model, tokenizer


def export(job: Answer) -> Engine:
    """Write the model, its vocabulary and the source sentences to ``job["folder"]``."""
    from transformer_jax.data.text_files import read_lines
    from transformer_jax.export.huggingface import export_huggingface
    from transformer_jax.pretrained.ctranslate2 import export_ctranslate2

    config, model, tokenizer = load(job)
    folder = Path(job["folder"])
    count = job["sentences"]
    if job["workdir"]:
        source = tokenizer.source.encode(list(islice(read_lines(job["input"]), count)))
    else:
        rng = np.random.default_rng(0)
        lengths = rng.lognormal(3.196, 0.513, count).clip(3, 98).astype(int)
        if job["lengths"][1]:
            lengths = rng.integers(*job["lengths"], count, endpoint=True)
        source = [rng.integers(4, config.model.vocab_size, n - 1).tolist() for n in lengths]
    inputs = {
        "ids": sorted(filter(None, source), key=len, reverse=True),
        "source": tokenizer.source.tokens(range(tokenizer.source.vocab_size)),
        "target": tokenizer.target.tokens(range(tokenizer.target.vocab_size)),
    }
    (folder / "source.json").write_text(json.dumps(inputs))
    if set(job["engines"]) & set(OTHERS):
        for write in (export_ctranslate2, export_huggingface):
            place = folder / write.__name__
            place.mkdir()
            write(config, model, tokenizer, place)
    return dict


def ours(job: Answer, ids: Ids, *, dtype: str = "auto", weights: str = "auto") -> Search:
    """Search with our ``Engine`` on each device, with all sentences in one call."""
    from flax import nnx

    from transformer_jax.decoding import devices, engine
    from transformer_jax.model.transformer import abstract_model

    places = devices.devices_for_rows(job["batch_size"])  # first, as it may configure JAX
    config, model, _ = load(job)
    graph = abstract_model(replace(config.model, dtype=dtype)).graph
    model = nnx.merge(graph, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    suppressed_ids = () if job["workdir"] or job["output_length"] else (EOS_ID,)
    share = -(-config.decoding.batch_size // len(places))
    decoding = replace(config.decoding, batch_size=share)
    if weights != "auto":
        decoding = replace(decoding, weights=weights)
    # An older checkout calls the option "suppress".
    is_older = "suppress" in signature(engine.Engine).parameters
    options = {"suppress" if is_older else "suppressed_ids": suppressed_ids}
    start = partial(engine.Engine, model, decoding, **options)
    first = start(device=places[0])
    # An older checkout has no "copy_to".
    copy = getattr(first, "copy_to", lambda place: start(device=place))
    engines = [first, *map(copy, places[1:])]
    sentences = [engine.Sentence(x) for x in ids]
    return lambda: [best.tokens for best, *_ in engine.search_together(engines, sentences)]


ENGINES: dict[str, Callable[[Answer, Ids], Search]] = {
    "ours": ours,
    "ours_float32": partial(ours, dtype="float32"),
    "ours_bfloat16": partial(ours, dtype="bfloat16"),
    "ours_int8": partial(ours, weights="int8"),
}


def batches(job: Answer, ids: Ids) -> Iterator[tuple[Ids, int | None]]:
    """Yield batches of sentences of similar length, each with its output length."""
    for i in range(0, len(ids), job["batch_size"]):
        batch = ids[i : i + job["batch_size"]]
        mean = round(float(np.mean([len(x) + 1 + job["extra"] for x in batch])))
        yield batch, None if job["workdir"] else job["output_length"] or mean


def load_cublas() -> None:
    """Load cuBLAS 12, which CTranslate2 opens by its name.

    The linker finds a loaded library by name, but not the folder of the wheel nvidia-cublas-cu12.
    Raises ``ImportError`` if there is no cuBLAS 12.
    """
    name = "libcublas.so.12"
    installed = [Path(folder) / "nvidia" / "cublas" / "lib" / name for folder in sys.path]
    paths = [path for path in installed if path.exists()]
    try:
        ctypes.CDLL(str(paths[0]) if paths else name)
    except OSError as error:
        raise ImportError(f"{error}; run pip install nvidia-cublas-cu12") from error


def ctranslate2(job: Answer, ids: Ids, *, on_cpu: str, on_gpu: str) -> Search:
    """Search with ``ctranslate2.Translator``, with this ``compute_type`` on a CPU or GPU. On a CPU,
    it runs in its fastest division into workers and threads.
    """
    from ctranslate2 import get_cuda_device_count

    if get_cuda_device_count():
        load_cublas()
        return ctranslate2_workers(job, ids, on_gpu, 1, device="cuda")
    threads = job["threads"]
    divisions = [n for n in range(1, threads + 1) if threads % n == 0]
    searches = {n: ctranslate2_workers(job, ids, on_cpu, n) for n in divisions}
    seconds = {}
    for count, search in searches.items():
        search()  # warm-up
        begin = time.perf_counter()
        search()
        seconds[count] = time.perf_counter() - begin
    best = min(seconds, key=seconds.__getitem__)
    searches[best].setting = f"{best} x {threads // best} threads"  # type: ignore[attr-defined]
    return searches[best]


def ctranslate2_workers(
    job: Answer, ids: Ids, compute_type: str, workers: int, device: str = "cpu"
) -> Search:
    """Search with this many workers. They get all sentences, or all batches, at once."""
    import ctranslate2

    folder = Path(job["folder"])
    names = json.loads((folder / "source.json").read_text())
    target_ids = {token: i for i, token in enumerate(names["target"])}
    translator = ctranslate2.Translator(
        str(folder / "export_ctranslate2"),
        device=device,
        compute_type=compute_type,
        inter_threads=workers,
        intra_threads=job["threads"] // workers,
    )

    def search() -> Ids:
        results = []
        for batch, length in [(ids, None)] if job["workdir"] else batches(job, ids):
            results += translator.translate_batch(
                [[names["source"][i] for i in sentence] for sentence in batch],
                beam_size=job["beam_size"],
                length_penalty=0.6,
                patience=job["patience"] or 1,
                max_batch_size=job["batch_size"],
                max_input_length=0,
                min_decoding_length=length or 1,
                max_decoding_length=length or 1 + len(ids[0]) + job["extra"],
                suppress_sequences=[[names["target"][PAD_ID]]],  # our engine never generates it
                asynchronous=True,
            )
        return [[target_ids[token] for token in x.result().hypotheses[0]] for x in results]

    return search


def huggingface(job: Answer, ids: Ids) -> Search:
    """Search with ``MarianMTModel.generate``, in one call per batch."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    transformers.logging.set_verbosity_error()
    on_gpu = torch.cuda.is_available()
    model = transformers.MarianMTModel.from_pretrained(
        Path(job["folder"]) / "export_huggingface",
        dtype=torch.bfloat16 if on_gpu else torch.float32,
    )
    model.to("cuda" if on_gpu else "cpu")
    model.generation_config.forced_eos_token_id = None  # as in CTranslate2

    def search() -> Ids:
        results = []
        for batch, length in batches(job, ids):
            rows = [torch.tensor([*x, EOS_ID]) for x in batch]
            input_ids = torch.nn.utils.rnn.pad_sequence(rows, True, PAD_ID).to(model.device)
            with torch.inference_mode():
                generated = model.generate(
                    input_ids=input_ids,
                    attention_mask=(input_ids != PAD_ID).long(),
                    num_beams=job["beam_size"],
                    length_penalty=0.6,
                    early_stopping=job["patience"] == 1,
                    do_sample=False,
                    min_new_tokens=length,
                    max_new_tokens=length or 1 + len(batch[0]) + job["extra"],
                )
            special = PAD_ID, EOS_ID
            results += [[i for i in row if i not in special] for row in generated[:, 1:].tolist()]
        return results

    return search


OTHERS: dict[str, Callable[[Answer, Ids], Search]] = {
    "ctranslate2": partial(ctranslate2, on_cpu="float32", on_gpu="bfloat16"),
    "ctranslate2_int8": partial(ctranslate2, on_cpu="int8", on_gpu="int8_bfloat16"),
    "huggingface": huggingface,
}


def start(name: str, job: Answer) -> Engine:
    """Start the engine ``name``. Raises ``ImportError`` if its package is missing."""
    if name == "export":
        return export(job)
    ids = json.loads((Path(job["folder"]) / "source.json").read_text())["ids"]
    search = (ENGINES | OTHERS).get(name, ours)(job, ids)
    last = -1 if name in OTHERS and not job["workdir"] else None  # our engine has EOS there

    def run() -> Answer:
        outputs = [x[:last] for x in search()]
        setting = getattr(search, "setting", "")
        return {"outputs": outputs, "tokens": sum(len(x) + 1 for x in outputs), "setting": setting}

    return run


def main() -> None:
    """Measure each batch size, and report."""
    flags = parser(__doc__)
    add = flags.add_argument
    add("--config", default="wmt14_base", help="recipe for random weights; default: wmt14_base")
    add("--workdir", type=absolute, help="work directory of a trained model; needs --input")
    add("--input", type=absolute, help="text to translate")
    add("--sentences", type=int, default=128)
    add("--lengths", type=int, nargs=2, default=[0, 0], help="range of source lengths in tokens")
    add("--output-length", type=int, default=0)
    add("--beam-size", type=int, default=4)
    add("--patience", type=float, help="stopping rule of our engine and CTranslate2")
    add("--batch-sizes", type=int, nargs="+", default=[1, 32, 128, 512])
    add("--engines", nargs="+", choices=[*ENGINES, *OTHERS], default=["ours", *OTHERS])
    arguments = flags.parse_args()
    if bool(arguments.workdir) != bool(arguments.input):
        flags.error("use --workdir and --input together")
    table: Table = {}
    extra = 50 if arguments.workdir else arguments.output_length or 1
    for size in arguments.batch_sizes:
        with tempfile.TemporaryDirectory() as folder:
            job = vars(arguments) | {"folder": folder, "batch_size": size, "extra": extra}
            with workers("decode", ["export"], job | {"against": None}):
                pass
            with workers("decode", arguments.engines, job) as engines:
                rows, rounds = measure(
                    engines, arguments.rounds, lambda x: x["tokens"] / x["seconds"], "tokens/s"
                )
        expected = next(iter(rounds[-1].values()))["outputs"]
        for name, row in rows.items():
            pairs = list(zip(expected, rounds[-1][name]["outputs"], strict=True))
            pairs = [(a, b) for a, b in pairs if arguments.workdir or len(a) == len(b)]
            row["same"] = f"{sum(a == b for a, b in pairs):,} of {len(pairs):,}"
            row["first run, s"] = rounds[0][name]["seconds"]
            row["setting"] = rounds[-1][name]["setting"]
            table[f"batch {size}, {name}"] = row
    finish(table, None, arguments)


if __name__ == "__main__":
    main()
