"""Fine-tune an OPUS-MT model (Hugging Face's MarianMT) on your own text.

    hf download Helsinki-NLP/opus-mt-en-de --local-dir opus-mt-en-de
    python examples/finetune_opus_mt.py --model opus-mt-en-de --text FOLDER

imports the model and fine-tunes it on train.en and train.de in FOLDER. Before and after, it
translates dev.en and prints chrF against dev.de, with three sample lines. Without --text it uses
the files of number_names.py. Without --model it starts from a tiny model with random weights, which
only demonstrates the workflow.
"""

from dataclasses import replace
from pathlib import Path

import tyro
from flax import nnx

import transformer_jax as tj
from transformer_jax.data.sources import read_pairs
from transformer_jax.interop.huggingface import export_huggingface
from transformer_jax.interop.huggingface_import import import_huggingface


def pairs_of(text: Path, split: str) -> tj.PairsConfig:
    return tj.PairsConfig("text", (f"{text}/{split}.en",), (f"{text}/{split}.de",))


def make_random_model(folder: Path, pairs: tj.PairsConfig) -> Path:
    """Create a MarianMT folder with random weights and a vocabulary for this text."""
    tokenizer = tj.Tokenizer.train(read_pairs(pairs), tj.TokenizerConfig(vocab_size=160))
    sizes = {"d_model": 64, "d_ff": 256, "num_heads": 4, "num_layers": 1, "norm_epsilon": 1e-5}
    config = tj.Config(model=tj.ModelConfig(vocab_size=tokenizer.target.vocab_size, **sizes))
    folder.mkdir(parents=True)
    export_huggingface(config, tj.Transformer(config.model, rngs=nnx.Rngs(0)), tokenizer, folder)
    return folder


def main(
    model: Path | None = None,
    text: Path = Path("data/numbers"),
    workdir: Path = Path("runs/opus"),
    steps: int = 300,
) -> None:
    if workdir.exists():
        raise SystemExit(f"{workdir} already exists; remove it or choose another --workdir.")
    train_pairs, dev_pairs = pairs_of(text, "train"), pairs_of(text, "dev")
    rate = 5e-5 if model else 3e-3  # higher for random weights
    folder = model or make_random_model(workdir / "random", train_pairs)
    imported, untuned, tokenizer = import_huggingface(folder)
    tj.save_model(workdir / "imported", imported, untuned, tokenizer)

    config = replace(
        imported,
        data=replace(imported.data, train=train_pairs),
        batch=tj.BatchConfig(tokens=2048, buckets=1),
        optimizer=tj.OptimizerConfig(peak_learning_rate=rate, warmup_steps=max(steps // 10, 1)),
        training=tj.TrainingConfig(
            steps=steps, start_from=str(workdir / "imported"), checkpoint_every=steps, average=1
        ),
    )
    tj.train(config, workdir / "tuned")

    sources, references = zip(*read_pairs(dev_pairs))
    for run in ("imported", "tuned"):
        lines = tj.Translator.from_workdir(workdir / run).translate(sources)
        print(f"{run}: chrF {tj.chrf(lines, references).value:.1f}")
        print(*(f"  {source} -> {line}" for source, line in zip(sources[:3], lines)), sep="\n")


if __name__ == "__main__":
    tyro.cli(main)
