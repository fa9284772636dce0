"""Write a tiny pretrained model with random weights in the format of Hugging Face transformers.

    python examples/random_pretrained.py --family nllb --text data/numbers --output nllb-random

The commands of the tutorials for NLLB, T5 and OPUS-MT run on it as on a real model, without a
download. Its vocabulary comes from train.en and train.de in --text, such as the files of
number_names.py. NLLB and T5 require transformers, PyTorch and tokenizers.
"""

from pathlib import Path
from typing import Any, Literal

import tyro
from flax import nnx

import transformer_jax as tj
from transformer_jax.data.sources import read_pairs
from transformer_jax.export.huggingface import export_huggingface

LANGUAGES = ["eng_Latn", "deu_Latn", "fra_Latn"]


def main(family: Literal["nllb", "t5", "opus_mt"], output: Path, text: Path) -> None:
    config = tj.PairsConfig("text", (f"{text}/train.en",), (f"{text}/train.de",))
    pairs = list(read_pairs(config))
    output.mkdir(parents=True)
    write = {"nllb": write_nllb, "t5": write_t5, "opus_mt": write_opus_mt}[family]
    write(pairs, output)
    print(f"{output}: {family} with random weights")


def write_nllb(pairs: list[tuple[str, str]], folder: Path) -> None:
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    special = ["<s>", "<pad>", "</s>", "<unk>"], LANGUAGES
    size = write_tokenizer("bpe", special, pairs, folder)
    sides: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        sizes = {"layers": 2, "attention_heads": 4, "ffn_dim": 256}
        sides |= {f"{side}_{name}": value for name, value in sizes.items()}
    shape = M2M100Config(vocab_size=size, d_model=64, max_position_embeddings=256, **sides)
    M2M100ForConditionalGeneration(shape).save_pretrained(folder)
    settings = '{"tokenizer_class": "NllbTokenizer", "src_lang": "eng_Latn"}'
    (folder / "tokenizer_config.json").write_text(settings)


def write_t5(pairs: list[tuple[str, str]], folder: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    special = ["<pad>", "</s>", "<unk>"], [f"<extra_id_{i}>" for i in range(100)]
    size = write_tokenizer("unigram", special, pairs, folder)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 2, "num_heads": 4}
    shape = T5Config(vocab_size=size, decoder_start_token_id=0, **sizes)
    T5ForConditionalGeneration(shape).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')


def write_tokenizer(kind: str, special: Any, pairs: list[tuple[str, str]], folder: Path) -> int:
    """Write tokenizer.json. Returns its size. ``special`` holds the first and the last tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer({"bpe": models.BPE(unk_token="<unk>"), "unigram": models.Unigram()}[kind])
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    lines = [*(line for pair in pairs for line in pair), "translate English to German: "]
    given: Any = {"vocab_size": 160, "special_tokens": special[0], "show_progress": False}
    of_kind = {"bpe": trainers.BpeTrainer, "unigram": trainers.UnigramTrainer}[kind]
    made.train_from_iterator(lines, of_kind(unk_token="<unk>", **given))
    made.add_special_tokens(special[1])
    made.save(str(folder / "tokenizer.json"))
    return made.get_vocab_size()


def write_opus_mt(pairs: list[tuple[str, str]], folder: Path) -> None:
    tokenizer = tj.Tokenizer.train(pairs, tj.TokenizerConfig(vocab_size=160))
    sizes = {"d_model": 64, "d_ff": 256, "num_heads": 4, "num_layers": 1, "norm_epsilon": 1e-5}
    config = tj.Config(model=tj.ModelConfig(vocab_size=tokenizer.target.vocab_size, **sizes))
    export_huggingface(config, tj.Transformer(config.model, rngs=nnx.Rngs(0)), tokenizer, folder)


if __name__ == "__main__":
    raise SystemExit(tj.run_program(lambda: tyro.cli(main)))
