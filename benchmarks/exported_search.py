"""How an exported model's beam search compares with ours and with greedy search, on a run's test
set.

python -m benchmarks.exported_search --workdir runs/demo
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from transformer_jax.checkpoint import load_model
from transformer_jax.cli import parse_flags, run_program
from transformer_jax.data.sources import read_pairs
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.interop.ctranslate2 import export_ctranslate2
from transformer_jax.interop.huggingface import export_huggingface
from transformer_jax.special_ids import BOS_ID, EOS_ID, PAD_ID
from transformer_jax.tokenizer import Tokenizer

Search = Callable[[list[list[int]]], list[list[int]]]


@dataclass(frozen=True)
class Arguments:
    """Compare searches by the length-normalised log-probability of what they find."""

    workdir: str
    """Work directory of a training run, whose config names the test set."""
    lines: int = 1000
    """Lines of the test set to translate."""
    huggingface: bool = True
    """Whether to translate with transformers too, which takes long."""
    beam_size: int = 4
    length_penalty: float = 0.6
    patience: tuple[float, ...] = ()
    """Further values of CTranslate2's patience to try."""


def main() -> int:
    """Print a line for each search."""
    return run_program(lambda: _compare(parse_flags(Arguments)))


def _compare(arguments: Arguments) -> None:
    config, model, tokenizer = load_model(arguments.workdir)
    decoding = dataclasses.replace(
        config.decoding,
        beam_size=arguments.beam_size,
        length_penalty=arguments.length_penalty,
        length_offset=0.0,  # as the other libraries have it
    )
    config = dataclasses.replace(config, decoding=decoding)
    if not config.data.test.is_given:
        raise UserError(f"{arguments.workdir} has no test set; expected a run with data.test.")
    pairs = islice(read_pairs(config.data.test, config.data.root), arguments.lines)
    sources = tokenizer.encode_source([source for source, _ in pairs])

    def ours(lines: list[list[int]]) -> list[list[int]]:
        found = translator.stream(tokenizer.decode_source(line) for line in lines)
        return [tokenizer.target_ids(list(best.tokens)) for best, *_ in found]

    translator = Translator(model, tokenizer, decoding)
    with tempfile.TemporaryDirectory() as folder:
        folders = {name: Path(folder, name) for name in ("ctranslate2", "huggingface")}
        for path in folders.values():
            path.mkdir()
        export_ctranslate2(config, model, tokenizer, folders["ctranslate2"])
        export_huggingface(config, model, tokenizer, folders["huggingface"])
        searches: dict[str, Search] = {
            "ours": ours,
            "ctranslate2 greedy": _ctranslate2(folders["ctranslate2"], tokenizer, beam_size=1),
            "ctranslate2": _ctranslate2(folders["ctranslate2"], tokenizer),
        }
        if arguments.huggingface:
            searches["huggingface"] = _huggingface(folders["huggingface"])
        for value in arguments.patience:
            name = f"ctranslate2, patience {value:g}"
            searches[name] = _ctranslate2(folders["ctranslate2"], tokenizer, patience=value)
        found, seconds = {}, {}
        for name, search in searches.items():
            start = time.perf_counter()
            found[name] = search(sources)
            seconds[name] = time.perf_counter() - start
    scorer = Scorer(model, tokenizer, decoding)
    log_probs, scores = {}, {}
    for name, targets in found.items():
        token_log_probs = scorer.score_tokens(list(zip(sources, targets, strict=True)))
        log_probs[name] = np.array([x.sum() for x in token_log_probs])
        lengths = np.array([len(x) for x in token_log_probs])
        scores[name] = log_probs[name] / lengths**arguments.length_penalty
    print(f"{'':32}{'s':>7}  as ours  mean score  below greedy: score  log P  above/below ours")
    for name in found:
        same = sum(a == b for a, b in zip(found[name], found["ours"], strict=True))
        greedy, our = "ctranslate2 greedy", "ours"
        below = (scores[name] < scores[greedy] - 1e-4).sum()
        below_log_prob = (log_probs[name] < log_probs[greedy] - 1e-4).sum()
        above, under = ((sign * (scores[name] - scores[our]) > 1e-4).sum() for sign in (1, -1))
        print(
            f"{name:32}{seconds[name]:7.1f}  {same:7}  {scores[name].mean():10.5f}  {below:18}  "
            f"{below_log_prob:5}  {above:5}/{under}"
        )


def _ctranslate2(folder: Path, tokenizer: Tokenizer, **changes: float) -> Search:
    def search(sources: list[list[int]]) -> list[list[int]]:
        import ctranslate2

        translator = ctranslate2.Translator(str(folder), inter_threads=1, intra_threads=1)
        settings = json.loads((folder / "generation_config.json").read_text()) | changes
        tokens = [tokenizer.source_tokens(line) for line in sources]
        found = translator.translate_batch(tokens, max_batch_size=64, **settings)
        return [tokenizer.target_ids(each.hypotheses[0]) for each in found]

    return search


def _huggingface(folder: Path) -> Search:
    def search(sources: list[list[int]]) -> list[list[int]]:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import torch
        from transformers import MarianMTModel

        model, found = MarianMTModel.from_pretrained(folder).eval(), []
        for start in range(0, len(sources), 50):
            rows = [torch.tensor([*line, EOS_ID]) for line in sources[start : start + 50]]
            batch = torch.nn.utils.rnn.pad_sequence(rows, True, PAD_ID)
            for row in model.generate(batch, attention_mask=batch != PAD_ID).tolist():
                found.append([i for i in row if i not in (PAD_ID, BOS_ID, EOS_ID)])
        return found

    return search


if __name__ == "__main__":
    sys.exit(main())
