"""Word alignments of the training text: links of tokens, batches, invalid files."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import layouts
from random_models import lines_of_words

from transformer_jax.data.batching import Batch, BatchPlan
from transformer_jax.data.corpus import build_corpus
from transformer_jax.data.mixing import Mix
from transformer_jax.data.sources import ParallelText, read_pairs
from transformer_jax.errors import UserError
from transformer_jax.settings.config import (
    BatchConfig,
    Config,
    DataConfig,
    ModelConfig,
    PairsConfig,
    TokenizerConfig,
    TrainingConfig,
)
from transformer_jax.tokenization.subword_sampling import BpeDropout
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.tokenization.words import token_links

LINES = lines_of_words(40)
TOKENIZER = Tokenizer.train(
    [(line, line.upper()) for line in LINES],
    TokenizerConfig(vocab_size=50, user_defined_symbols=("<2x>",)),
)


def written(folder: Path, name: str = "a", **fields: Any) -> PairsConfig:
    """Lines with their words in reverse order as targets, and their alignments."""
    texts = {"en": LINES, "de": [" ".join(line.upper().split()[::-1]) for line in LINES]}
    lengths = [len(line.split()) for line in LINES]
    texts["links"] = [" ".join(f"{i}-{n - 1 - i}" for i in range(n)) for n in lengths]
    for side, lines in texts.items():
        (folder / f"{name}.{side}").write_text("".join(f"{line}\n" for line in lines))
    files = {"source": "en", "target": "de", "alignments": "links"}
    return PairsConfig(**{k: (str(folder / f"{name}.{v}"),) for k, v in files.items()} | fields)


def linked_words(batch: Batch) -> list[tuple[str, str]]:
    """The words of (source, target) tokens that link to each other, in small letters."""
    assert batch.links_BT.shape == batch.target_BT.shape and batch.links_BT.dtype == np.int32
    rows = zip(batch.source_BS, batch.target_BT, batch.links_BT)
    return [
        (spelled(source, links[t] - 1), spelled(target, t))
        for source, target, links in rows
        for t in np.flatnonzero(links)
    ]


def spelled(row: np.ndarray, at: int) -> str:
    """The word of a token, or EOS."""
    names = TOKENIZER.source.tokens(row.tolist())
    if names[at] == "</s>":
        return "</s>"
    first = max(i for i in range(at + 1) if names[i].startswith("▁"))
    end = next(i for i in range(at + 1, len(names)) if names[i][0] in "▁<")
    return "".join(names[first:end]).lower()


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ({(0, 0)}, [1, 2, 3, 0, 6]),  # token by token
        ({(1, 0)}, [4, 4, 5, 0, 6]),  # three tokens on two
        ({(0, 1)}, [0, 0, 0, 1, 6]),  # one token on three
        ({(0, 0), (1, 0)}, [1, 2, 4, 0, 6]),  # a word of three tokens on two words of five
        ({(1, 1), (0, 1), (1, 0)}, [4, 4, 5, 1, 6]),
        (set(), [0, 0, 0, 0, 6]),
    ],
)
def test_links_of_tokens(
    links: set[tuple[int, int]], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source has words of three and two tokens, and the target of three and one."""
    words = iter([[0, 0, 0, 1, 1], [0, 0, 0, 1]])
    monkeypatch.setattr("transformer_jax.tokenization.words.token_words", lambda *_: next(words))
    assert token_links(TOKENIZER, ("", ""), ([], []), links) == expected


@layouts
@pytest.mark.parametrize("kind", ["plain", "sampled", "tagged", "mixed"])
def test_batches_link_each_token_to_its_word(layout: str, kind: str, tmp_path: Path) -> None:
    config = written(tmp_path, tags=("<2x>",) * (kind == "tagged"))
    if kind == "mixed":
        other = written(tmp_path, "b")
        names = ("source", "target", "alignments")
        sides = {name: getattr(config, name) + getattr(other, name) for name in names}
        config = PairsConfig(**sides, tags=("<2x>", ""), weights=(2.0, 1.0))
    sampling = {"sampling": BpeDropout(0.2, 3)} if kind == "sampled" else {}
    data = DataConfig(workers=1)
    corpus = build_corpus(config, TOKENIZER, data, tmp_path, **sampling)  # type: ignore[arg-type]
    batches = BatchConfig(layout=layout, tokens=256, row_length=64, row_multiple=4, buckets=2)  # type: ignore[arg-type]
    plan = BatchPlan(Mix(corpus, config) if kind == "mixed" else corpus, batches, seed=0)
    assert plan.aligned and corpus.num_pairs >= 40
    for step in range(plan.steps_per_epoch):
        batch = plan.batch(step)
        words = linked_words(batch)
        assert len(words) == (batch.target_BT != 0).sum()  # every token has a link
        assert all(source == target for source, target in words)


@layouts
def test_words_without_a_link_have_none_in_any_row(layout: str, tmp_path: Path) -> None:
    config = written(tmp_path)
    only_first_words = "".join(f"0-{len(line.split()) - 1}\n" for line in LINES)
    (tmp_path / "a.links").write_text(only_first_words)
    corpus = build_corpus(config, TOKENIZER, DataConfig(workers=1), tmp_path)
    batches = BatchConfig(layout=layout, tokens=256, row_length=64, row_multiple=4, buckets=2)  # type: ignore[arg-type]
    batch = BatchPlan(corpus, batches, seed=0).batch(0)
    words = linked_words(batch)
    first_words = {line.split()[0] for line in LINES} | {"</s>"}
    assert {source for source, _ in words} <= {f"▁{word}" for word in first_words} | first_words
    assert all(source == target for source, target in words)
    assert 0 < len(words) < (batch.target_BT != 0).sum()


def test_text_without_alignments_has_batches_without_links(tmp_path: Path) -> None:
    config = dataclasses.replace(written(tmp_path), alignments=())
    corpus = build_corpus(config, TOKENIZER, DataConfig(workers=1), tmp_path)
    plan = BatchPlan(corpus, BatchConfig(tokens=512), seed=0)
    assert not plan.aligned and plan.batch(0).links_BT is None


def test_other_alignments_are_another_corpus(tmp_path: Path) -> None:
    aligned = written(tmp_path)
    first = ParallelText(aligned).fingerprint
    assert list(read_pairs(aligned)) == list(
        read_pairs(dataclasses.replace(aligned, alignments=()))
    )
    assert first != ParallelText(dataclasses.replace(aligned, alignments=())).fingerprint
    (tmp_path / "a.links").write_text("\n" * len(LINES))
    assert first != ParallelText(aligned).fingerprint


@pytest.mark.parametrize(
    ("line", "link"),
    [
        ("0-0 0-1", "0-1"),
        ("0-0 1-0", "1-0"),
        ("0", "0"),
        ("0--1", "0--1"),
        ("0:0", "0:0"),
        ("-1-0", "-1-0"),
        ("x-0", "x-0"),
        ("²-0", "²-0"),
        ("0-0 99999999999-0", "99999999999-0"),
    ],
)
def test_links_that_are_not_valid(line: str, link: str, tmp_path: Path) -> None:
    config = written(tmp_path)
    lines = (tmp_path / "a.links").read_text().splitlines()
    assert len(LINES[9].split()) == 1
    (tmp_path / "a.links").write_text("\n".join([*lines[:9], line, *lines[10:]]))
    expected = f"a.links, line 10: link {link!r}; expected SOURCE-TARGET, two words counted from 0"
    with pytest.raises(UserError, match=f"{re.escape(expected)}, in lines of 1 and 1 words"):
        list(read_pairs(config))


@pytest.mark.parametrize("count", [39, 41])
def test_a_file_of_alignments_with_another_number_of_lines(count: int, tmp_path: Path) -> None:
    config = written(tmp_path)
    (tmp_path / "a.links").write_text("\n" * count)
    counts = re.escape(f"different numbers of lines (40 and 40 and {count})")
    with pytest.raises(UserError, match=rf"a.en' and '.*a.de' and '.*a.links' have {counts}"):
        list(read_pairs(config))


def test_a_glob_of_another_number_of_files(tmp_path: Path) -> None:
    config = dataclasses.replace(written(tmp_path), alignments=(str(tmp_path / "a.*"),))
    with pytest.raises(
        UserError, match=r"target .* matches 1 file\(s\) and alignments .* matches 3"
    ):
        ParallelText(config)


TRAIN = PairsConfig(source=("a",), target=("b",))
ALIGNED = dataclasses.replace(TRAIN, alignments=("c",))
MODEL = ModelConfig(alignment_layer=-1)


@pytest.mark.parametrize(
    ("data", "weight", "model", "message"),
    [
        ({"train": TRAIN}, 0.1, MODEL, "guided_alignment is 0.1; expected 0 without data.train.al"),
        (
            {"train": ALIGNED},
            0.1,
            ModelConfig(),
            "model.alignment_layer is None; expected a decoder layer to train with training.guided",
        ),
        (
            {"train": ALIGNED, "dev": ALIGNED},
            0.1,
            MODEL,
            r"data.dev.alignments is \('c',\); expected \(\); only training uses it",
        ),
        (
            {"train": TRAIN, "test": dataclasses.replace(TRAIN, weights=(1.0,))},
            0.0,
            MODEL,
            r"data.test.weights is \(1.0,\); expected \(\); only training uses it",
        ),
        (
            {"train": TRAIN, "dev": dataclasses.replace(TRAIN, temperature=5.0)},
            0.0,
            MODEL,
            "data.dev.temperature is 5.0; expected 1.0; only training uses it",
        ),
    ],
)
def test_settings_that_do_not_fit(
    data: dict[str, PairsConfig], weight: float, model: ModelConfig, message: str
) -> None:
    training = TrainingConfig(guided_alignment=weight)
    config = Config(data=DataConfig(**data), training=training, model=model)
    with pytest.raises(UserError, match=message):
        config.check(config.training_rules())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alignments": ("c", "d")}, "alignments is .*; expected one for each of the 1 items of"),
        ({"alignments": ("c",), "kind": "tsv", "target": ()}, "expected no files, except for text"),
    ],
)
def test_files_that_do_not_fit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        dataclasses.replace(TRAIN, **fields)


@pytest.mark.parametrize("layer", [-3, 2])
def test_a_layer_that_the_model_does_not_have(layer: int) -> None:
    expected = f"model.alignment_layer is {layer}; expected -2 to 1, or None"
    with pytest.raises(UserError, match=expected):
        ModelConfig(num_layers=6, num_decoder_layers=2, alignment_layer=layer)
