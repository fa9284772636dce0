"""Programs in examples/ run at reduced size and print the output that their docstrings describe."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import operator
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import sacrebleu
import torch
import transformers
from flax import nnx
from hand_written_torch import Seq2Seq
from random_models import lines_of_words, make_model, train_tokenizer

import transformer_jax
from transformer_jax.export.__main__ import main as export
from transformer_jax.parsing.__main__ import main as parsing
from transformer_jax.parsing.trees import read_parses
from transformer_jax.pretrained.__main__ import main as pretrained
from transformer_jax.training.__main__ import main as train
from transformer_jax.translation.__main__ import main as decode

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))
EXAMPLES = [path for path in EXAMPLES if path.stem != "attention_is_all_you_need"]  # test_one_file


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """``run(name, **arguments of its main)``: the example's output, on one device.

    ``num_layers`` replaces the number in its config.
    """
    one = jax.devices()[:1]
    monkeypatch.setattr(
        transformer_jax, "train", functools.partial(transformer_jax.train, devices=one)
    )
    monkeypatch.setattr("transformer_jax.decoding.devices.find_devices", lambda: one)

    def run(name: str, num_layers: int | None = None, **arguments: Any) -> str:
        [path] = [path for path in EXAMPLES if path.stem == name]
        main = runpy.run_path(str(path))["main"]
        if num_layers:
            config = dataclasses.replace(main.__globals__["CONFIG"], num_layers=num_layers)
            main.__globals__["CONFIG"] = config
        main(**arguments)
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_short_and_show_their_command(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert f"\n    python examples/{path.name}" in docstring
    assert f'run("{path.stem}"' in Path(__file__).read_text(), "an example that no test runs"


@pytest.mark.exhaustive
def test_copy_task(run: Callable[..., str]) -> None:
    printed = run("copy_task", num_layers=1, steps=100)
    [loss] = re.findall(r"^step 100: loss (.*)$", printed, re.MULTILINE)
    assert float(loss) < 2  # about ln 20 = 3 at first
    source, copy = re.findall(r"^(?:source|copy  ) \[(.*)\]$", printed, re.MULTILINE)
    assert len(source.split(",")) > 1 and len(copy.split(",")) > 1
    [exact] = re.findall(r"^(\d+) of 200 new sequences are copied exactly$", printed, re.MULTILINE)
    assert int(exact) > 20


@pytest.mark.exhaustive
def test_a_vision_transformer_classifies_digits(run: Callable[..., str]) -> None:
    printed = run("digits_vit", steps=60)
    [accuracy] = re.findall(r"accuracy on 360 test images: ([\d.]+)%", printed)
    assert float(accuracy) >= 80


def test_a_hand_written_pytorch_model_gives_the_same_logits(
    run: Callable[..., str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    theirs = Seq2Seq().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    weights = tmp_path / "model.pt"
    torch.save(theirs.state_dict(), weights)
    source = (2, 14, 27, 3)
    printed = run("own_pytorch_model", weights=weights, source=source, num_heads=2)
    parameters, translation = printed.splitlines()
    num_parameters = sum(parameter.numel() for parameter in theirs.parameters())
    assert parameters == f"{num_parameters:,} parameters"
    assert all(0 <= int(token) < 40 for token in translation.split())

    [path] = [path for path in EXAMPLES if path.stem == "own_pytorch_model"]
    example = runpy.run_path(str(path))
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    config = example["read_config"](state, 2)
    model = transformer_jax.model_from_arrays(config, example["convert"](state, config))
    source_BS = torch.tensor([[*source], [2, 9, 3, 1]])  # the second one is padded
    target_BT = torch.tensor([[11, 12, 3], [39, 3, 1]])
    with torch.no_grad():
        expected_BTV = theirs(
            source_BS, torch.nn.functional.pad(target_BT[:, :-1], (1, 0), value=2)
        )
    logits = nnx.jit(lambda model: model(source_BS.numpy(), target_BT.numpy()))
    logits_BTV = logits(model)
    np.testing.assert_allclose(logits_BTV[0], expected_BTV[0], atol=2e-5)
    np.testing.assert_allclose(logits_BTV[1, :2], expected_BTV[1, :2], atol=2e-5)


def test_a_language_model_samples_number_names(run: Callable[..., str]) -> None:
    printed = run("language_model", num_layers=1, steps=60)
    assert len(printed.splitlines()) == 11
    right, new = re.findall(r"\d+", printed.splitlines()[-1].replace("500", ""))
    assert int(right) >= 50 and 0 < int(new) < int(right)


@pytest.mark.parametrize(
    "family",
    ["opus_mt", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("nllb", "t5"))],
)
def test_recipes_fine_tune_random_pretrained_models(
    family: str, run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the programs: import, train, decode, export, and the export in transformers."""
    text, name = tmp_path / "text", str(tmp_path / family)
    run("number_names", folder=text, train=2000, dev=32, test=1)
    run("random_pretrained", family=family, text=text, output=tmp_path / family)
    monkeypatch.chdir(text)
    monkeypatch.setattr("transformer_jax.training.loop.train", transformer_jax.train)
    codes = ["eng_Latn", "deu_Latn"] if family == "nllb" else []
    names = ("source-language", "target-language")
    languages = [word for pair in zip(names, codes) for word in (f"--{pair[0]}", pair[1])]
    assert pretrained(["import", "--input", name, "--workdir", "imported", *languages]) == 0
    flags = ["--config", f"finetune_{family}:imported", "--workdir", "tuned"]
    flags += ["--data.train.source", "train.en", "--data.train.target", "train.de"]
    flags += ["--data.workers", "1", "--batch.tokens", "2048", "--batch.buckets", "1"]
    flags += ["--training.steps", "20", "--training.log-every", "5"]
    flags += ["--optimizer.warmup-steps", "5"]
    rate = "0.05" if family == "t5" else "0.01"  # higher for random weights
    assert train([*flags, "--optimizer.peak-learning-rate", rate]) == 0
    if family == "nllb":
        before, after = (_target_matrix(folder) for folder in ("imported", "tuned"))
        assert (before == after).all()  # frozen
    metrics = map(json.loads, Path("tuned/metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in metrics if line["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.1
    command = ["--workdir", "tuned", "--input", "dev.en", "--output", "dev.out"]
    assert decode([*command, "--beam-size", "1"]) == 0
    assert len(Path("dev.out").read_text().splitlines()) == 32
    command = ["--workdir", "tuned", "--format", "huggingface", "--output", "exported"]
    assert export(command) == 0
    theirs = {"nllb": "M2M100ForConditionalGeneration", "t5": "T5ForConditionalGeneration"}
    loaded = getattr(transformers, theirs.get(family, "MarianMTModel"))
    _, info = loaded.from_pretrained("exported", output_loading_info=True)
    assert not any(info.values())
    tokenizer, line = transformers.AutoTokenizer.from_pretrained("exported"), "seventeen"
    assert tokenizer.decode(tokenizer(line).input_ids, skip_special_tokens=True) == line


def _target_matrix(folder: str) -> Any:
    _, model, _ = transformer_jax.load_model(folder)
    return model.target_embedding.matrix[...]


def test_pairs_are_cleaned(run: Callable[..., str], tmp_path: Path) -> None:
    """Also with the scores of a model: in its language, one pair is far less likely."""
    good = [("seven", "SEVEN"), ("one two", "ONE TWO"), ("two", "TWO")]
    bad = [
        ("two", "TWO"),
        ("", "ONE"),
        ("one", "один"),
        ("one", "ONE TWO SIX TEN ZERO FIVE"),
        ("xyz" * 167, "uvw" * 167),
    ]
    lines = [good[0], *bad[:2], good[1], *bad[2:], good[2]]
    lines.insert(1, ("two", "TWO"))
    for side, name in enumerate(("a.en", "a.de")):
        text = "".join(f"{pair[side]}\n" for pair in lines)
        (tmp_path / name).write_text(text)
    given = {"source": str(tmp_path / "a.en"), "target": str(tmp_path / "a.de")}
    printed = run("clean_pairs", **given, output=tmp_path / "clean")
    expected = {"kept": 3, "duplicate": 2, "empty": 1, "script": 1, "ratio": 1, "long": 1}
    assert ast.literal_eval(printed.strip()) == expected
    sides = [(tmp_path / "clean" / f"rules.{side}").read_text() for side in ("source", "target")]
    assert list(zip(*map(str.splitlines, sides), strict=True)) == [good[0], good[2], good[1]]
    (tmp_path / "one").write_text("one\n")
    with pytest.raises(transformer_jax.UserError, match="different numbers of lines"):
        run("clean_pairs", **given | {"target": str(tmp_path / "one")}, output=tmp_path / "new")
    folder, model = tmp_path / "model", make_model(tokenizer := train_tokenizer(lines_of_words(60)))
    folder.mkdir()
    transformer_jax.save_model(folder, transformer_jax.Config(model=model.config), model, tokenizer)
    for _ in range(2):  # the second run has nothing left to score
        run("clean_pairs", **given, output=tmp_path / "clean", workdir=str(folder), keep=0.67)
        [file] = (tmp_path / "clean").glob("scores-*")
        scores = [*map(float, file.read_text().split())]
        kept = (tmp_path / "clean" / "target").read_text().splitlines()
        rules = sides[1].splitlines()
        worst = min(range(3), key=lambda i: scores[i] / (1 + len(rules[i])))
        assert len(scores) == 3 and kept == [x for i, x in enumerate(rules) if i != worst]
    given |= {"output": tmp_path / "clean", "workdir": str(folder), "keep": 1.0}
    printed = run("clean_pairs", **given, max_characters=6)  # other rules than before
    assert "'kept': 2" in printed and "2 of 2 pairs kept by score" in printed
    assert (tmp_path / "clean" / "target").read_text() == "SEVEN\nTWO\n"


def corrupted(
    pairs: list[tuple[str, str]], seed: int = 0
) -> tuple[list[tuple[str, str]], list[str]]:
    """Pairs of which a fifth are replaced or repeated with noise, and the kind of noise of each."""
    draw = random.Random(seed)
    targets = [target for _, target in pairs]
    sources = [source for source, _ in pairs]
    kinds: dict[str, Callable[[str, str], tuple[str, str]]] = {
        "empty": lambda s, t: (s, ""),
        "only punctuation": lambda s, t: ("...", t),
        "copy of the source": lambda s, t: (s, s),
        "copy of the target": lambda s, t: (t, t),
        "source before the target": lambda s, t: (s, f"{s} {t}"),
        "swapped": lambda s, t: (t, s),
        "another target": lambda s, t: (s, draw.choice(targets)),
        "another source": lambda s, t: (draw.choice(sources), t),
        "NUL": lambda s, t: (s, f"{t[:3]}\0{t[3:]}"),
        "ESC": lambda s, t: (f"{s}\x1b[0m", t),
        "replacement character": lambda s, t: (s, f"{t}\ufffd"),
        "wrong encoding": lambda s, t: (s, f"{t} für".encode().decode("latin-1")),
        "truncated": lambda s, t: (s, t[: len(t) // 2]),
        "doubled": lambda s, t: (s, f"{t} {t}"),
        "repeated word": lambda s, t: (s, f"{t.split()[0]} " * 8),
        "tags": lambda s, t: (s, f"<p>{t}</p>"),
        "entity": lambda s, t: (s, f"{t}&nbsp;"),
        "address": lambda s, t: (f"{s} http://x.org", t),
        "other number": lambda s, t: (f"{s} 12", f"{t} 77"),
        "other script": lambda s, t: (s, "Привет, как дела?"),
        "random letters": lambda s, t: (s, "".join(draw.choices("abcdefg ", k=len(t) + 5))),
        "duplicate": lambda s, t: (s, t),
        "duplicate but for case": lambda s, t: (s.upper(), t.lower()),
        "duplicate but for space": lambda s, t: (f" {s}", t.replace(" ", "  ")),
    }
    noisy = list(pairs)
    labels = [""] * len(pairs)
    for number, i in enumerate(draw.sample(range(len(pairs)), len(pairs) // 5)):
        name = list(kinds)[number % len(kinds)]
        if name.startswith("duplicate"):
            noisy.append(kinds[name](*pairs[i]))
            labels.append(name)
        else:
            noisy[i] = kinds[name](*pairs[i])
            labels[i] = name
    return noisy, labels


@pytest.mark.exhaustive
def test_most_noise_is_found_in_real_text(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "tatoeba_de_en"
    sides = [list(transformer_jax.read_lines(str(folder / f"dev.{x}.gz"))) for x in ("en", "de")]
    sides = [
        [*side, *islice(transformer_jax.read_lines(str(folder / f"train.{x}.gz")), 0, 160_000, 8)]
        for side, x in zip(sides, ("en", "de"))
    ]
    pairs, labels = corrupted(list(zip(*sides, strict=True)))
    [path] = [path for path in EXAMPLES if path.stem == "clean_pairs"]
    example = runpy.run_path(str(path))
    files = [tmp_path / "all.en", tmp_path / "all.de"]
    example["write"](pairs, files)
    reasons = example["find_reasons"](pairs)
    removed = [bool(reason) for reason in reasons]
    is_noise = [bool(label) for label in labels]
    true_positives = sum(map(operator.and_, removed, is_noise))
    assert true_positives / sum(is_noise) >= 0.85
    assert true_positives / sum(removed) >= 0.95


def test_lengths_are_compared_with_the_usual_ratio_of_the_corpus(tmp_path: Path) -> None:
    """English has about three times as many characters as Chinese."""
    draw = random.Random(0)
    pairs = []
    for _ in range(3000):
        weights = [1 / (n + 5) for n in range(200)]
        numbers = draw.choices(range(200), weights, k=draw.randint(4, 30))
        source = " ".join(f"word{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in numbers)
        pairs.append((source, "".join(chr(0x4E00 + n) for n in numbers)))
    pairs[7] = (pairs[7][0], pairs[7][1] * 5)
    [path] = [path for path in EXAMPLES if path.stem == "clean_pairs"]
    reasons = runpy.run_path(str(path))["find_reasons"](pairs)
    assert reasons[7] in ("ratio", "repeated")
    assert sum(map(bool, reasons)) < 30


def test_shards_of_a_translated_corpus_are_joined(run: Callable[..., str], tmp_path: Path) -> None:
    """Also by the shard that was stopped within a line, as back-translations, by an ensemble."""
    lines, tokenizer = lines_of_words(7), train_tokenizer(lines_of_words(60))
    (tmp_path / "text").write_text("".join(f"{line}\n" for line in [*lines, ""]))
    folder, model = tmp_path / "model", make_model(tokenizer)
    folder.mkdir()
    transformer_jax.save_model(folder, transformer_jax.Config(model=model.config), model, tokenizer)
    given = {"workdir": (str(folder),), "input": str(tmp_path / "text"), "max_ratio": 1e9}
    whole = tmp_path / "whole"
    assert "7 of 8 pairs kept" in run("translate_corpus", **given, output=whole)
    assert (whole / "source").read_text().splitlines() == lines
    translations = (whole / "0-of-1").read_text().splitlines()
    assert (whole / "target").read_text().splitlines() == translations[:-1] and translations[0]
    (shards := tmp_path / "shards").mkdir()
    (shards / "1-of-3").write_bytes(f"{translations[1]}\nunfiné".encode()[:-1])
    assert "shards [1, 2] of 3 are not" in run(
        "translate_corpus", **given, output=shards, shard="0/3", swap=True
    )
    twice = given | {"workdir": (str(folder), str(folder))}
    run("translate_corpus", **twice, output=shards, shard="2/3", swap=True)
    assert not (shards / "source").exists()
    assert "7 of 8" in run("translate_corpus", **given, output=shards, shard="1/3", swap=True)
    assert (shards / "target").read_text().splitlines() == lines
    assert (shards / "source").read_text() == (whole / "target").read_text()
    wrong = [pair for pair in zip(lines, translations) if max(map(len, pair)) > 10]
    kept = run("translate_corpus", **given | {"max_ratio": 0.0}, output=whole)
    assert f"{7 - len(wrong)} of 8 pairs kept" in kept and wrong
    for i, text in enumerate(["A\rB\n" * 4, "C\n" * 4]):  # only \n ends a line
        (shards / f"{i}-of-2").write_bytes(text.encode())
    assert "7 of 8" in run("translate_corpus", **given, output=shards, shard="0/2")
    assert (shards / "target").read_bytes() == b"A\rB\nC\n" * 3 + b"A\rB\n"
    with pytest.raises(SystemExit, match="2"):
        run("translate_corpus", **given, output=shards, shard="2/2")


def test_aligned_number_names(run: Callable[..., str], tmp_path: Path) -> None:
    """Without "and" and "und", each word links to one word, and equal digits have equal names."""
    run("aligned_numbers", folder=tmp_path, train=300, dev=20, test=20)
    names: dict[str, set[str]] = {}
    for split in ("train", "dev", "test"):
        files = [(tmp_path / f"{split}.{suffix}").read_text() for suffix in ("en", "de", "links")]
        for en, de, links in zip(*(text.splitlines() for text in files), strict=True):
            source, target = en.split(), de.split()
            sure = [tuple(map(int, link.split("-"))) for link in links.split() if "-" in link]
            ignored = {int(link.split("?")[1]) for link in links.split() if "?" in link}
            assert sorted(i for i, _ in sure) == [i for i, w in enumerate(source) if w != "and"]
            und = [j for j, word in enumerate(target) if word == "und"]
            assert sorted([j for _, j in sure] + und) == [*range(len(target))]
            assert ignored == set(und if split != "train" else [])
            for i, j in sure:
                names.setdefault(source[i], set()).add(target[j])
    assert names["seven"] == {"sieben"} and names["thousand"] == {"tausend"} and len(names) == 29
    assert all(len(found) == 1 for found in names.values())


def test_number_names(run: Callable[..., str], tmp_path: Path) -> None:
    printed = run("number_names", folder=tmp_path / "new", train=30, test=500).splitlines()
    counts = {"train": 30, "dev": 200, "test": 500}
    files = {
        tmp_path / "new" / f"{name}.{side}": counts[name]
        for name in counts
        for side in ("en", "de")
    }
    assert [len(file.read_text().splitlines()) for file in files] == [*files.values()]
    assert [line.split(",")[0] for line in printed] == [
        f"{file}: {count} lines" for file, count in files.items()
    ]


def test_figures(run: Callable[..., str], tmp_path: Path) -> None:
    printed = run("figures", folder=tmp_path / "new")
    assert printed.splitlines() == [
        f"{tmp_path}/new/{name}.svg" for name in ("positions", "schedule")
    ]
    assert "4,000 warmup steps" in (tmp_path / "new" / "schedule.svg").read_text()


def test_artificial_trees(run: Callable[..., str], tmp_path: Path) -> None:
    check_text_for_parsing(run("artificial_trees", trees=7, seed=3), tmp_path, tags={"XX"})


def test_recombined_trees(run: Callable[..., str], tmp_path: Path) -> None:
    given = tmp_path / "given.mrg"
    given.write_text(
        "(S (NP (D a) (N cat)) (VP (V saw) (NP (NP (N rain)) (PP (P in) (NP (N May))))))\n"
        "(S (PP (P at) (NP (N night))) (NP (N dogs)) (VP (V bark)))\n"
    )
    printed = run("recombined_trees", like=(given,), trees=7, seed=3)
    check_text_for_parsing(printed, tmp_path, tags=set("DNPV"))


def check_text_for_parsing(printed: str, folder: Path, *, tags: set[str]) -> None:
    """Check that ``prepare`` and ``restore`` keep all seven trees."""
    file, output = folder / "printed.trees", folder / "new" / "train"
    file.write_text(printed)
    parses = list(read_parses(file))
    assert len(parses) == len(printed.splitlines()) == 7
    assert set().union(*(parse.tags for parse in parses)) <= tags
    for numbered in ("--numbered", "--no-numbered"):
        assert parsing(["prepare", numbered, "--trees", str(file), "--output", str(output)]) == 0
        assert list(read_parses(f"{output}.mrg")) == parses
        assert ("#" in Path(f"{output}.words").read_text()) == (numbered == "--numbered")
        files = ["--words", f"{output}.words", "--sequences", f"{output}.sequences"]
        assert parsing(["restore", *files, "--output", f"{output}.back"]) == 0
        for parse, restored in zip(parses, read_parses(f"{output}.back"), strict=True):
            assert (parse.words, parse.constituents) == (restored.words, restored.constituents)


def test_bleu_as_in_the_paper(run: Callable[..., str], tmp_path: Path) -> None:
    """Splits Moses tokens at hyphens."""

    def score(hypotheses: list[str], references: list[str], language: str = "de", **flags: Any):
        for name, lines in ("hypotheses", hypotheses), ("references", references):
            (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
        files = {"hypotheses": tmp_path / "hypotheses", "references": tmp_path / "references"}
        return run("paper_bleu", language=language, **files, **flags)

    hypotheses = [
        "Er nutzt das „rich-text“-Format, sagt Dr. Müller.",
        "Es geht nicht weiter - nie.",
    ]
    references = [
        "Sie nutzt das „Rich-text“-Format, sagt Dr. Müller.",
        "Es geht weiter - oder nie.",
    ]
    ours = [
        "Er nutzt das &quot; rich ##AT##-##AT## text &quot; -Format , sagt Dr. Müller .",
        "Es geht nicht weiter - nie .",
    ]
    theirs = [
        "Sie nutzt das &quot; Rich ##AT##-##AT## text &quot; -Format , sagt Dr. Müller .",
        "Es geht weiter - oder nie .",
    ]
    settings = {"tokenize": "none", "smooth_method": "none", "force": True}
    expected = sacrebleu.corpus_bleu(ours, [theirs], **settings)
    assert expected.score > transformer_jax.bleu(hypotheses, references).value
    found = score(hypotheses, references)
    assert found.endswith(f" = {str(expected).removeprefix('BLEU = ')}\n")
    tokenizer = f"moses-de-sacremoses-{version('sacremoses')}+compounds-split"
    assert f"|tok:{tokenizer}|smooth:none|" in found
    assert "|tok:none+compounds-split|" in score(ours[:1], theirs[:1], tokenized=True)
    # The hyphen is a token, so no 4-gram matches.
    assert " = 0.00 " in score(["a rich-text b"], ["a rich text b"])
    with pytest.raises(SystemExit, match="'german' is not one of .*de, .*fr"):
        score(hypotheses, references, language="german")
    with pytest.raises(SystemExit, match="have 2 and 1 lines; expected the same number"):
        score(hypotheses, references[:1])


def test_table_3(run: Callable[..., str], tmp_path: Path) -> None:
    """Means over finished seeds, next to the paper's results."""

    def write_run(name: str, seed: int, *, of: int = 10, **summary: Any) -> None:
        folder = tmp_path / name / f"seed-{seed}"
        folder.mkdir(parents=True)
        config = transformer_jax.Config(training=transformer_jax.TrainingConfig(steps=of))
        (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
        bleu = {} if name == "E" else {"dev_bleu": 20}
        lines = [
            {"kind": "dev", "dev_perplexity": 50.0, "dev_bleu": 1.0},
            {"kind": "dev", "dev_perplexity": 5.0 + seed, **bleu},
            {"kind": "save"},
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if summary:
            (folder / "summary.json").write_text(json.dumps(summary))

    done = {"steps": 10, "stopped_by": None, "stopped_early": False}
    write_run("base", 1, **done)
    write_run("base", 2, of=90, **done | {"stopped_early": True})
    write_run("base", 3, **done | {"stopped_by": "SIGTERM"})
    write_run("base", 4, of=90, **done)
    write_run("A-h1", 1)
    write_run("E", 1, **done)
    write_run("another", 1, **done)
    assert run("table3", folder=tmp_path).splitlines() == [
        "| row | perplexity: paper | here | BLEU: paper | here | finished seeds |",
        "|---|---|---|---|---|---|",
        "| base | 4.92 | 6.50 ± 0.71 | 25.8 | 20.0 ± 0.0 | 2 of 4 |",
        "| A-h1 | 5.29 | – | 24.9 | – | 0 of 1 |",
        "| E | 4.92 | 6.00 | 25.7 | – | 1 of 1 |",
    ]
    with pytest.raises(SystemExit, match="another has no runs of Table 3"):
        run("table3", folder=tmp_path / "another")


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("recombined_trees", "--like missing", "'missing': No such file or directory; check the"),
        ("recombined_trees", "--like /dev/null", "There are no trees; expected at least one in"),
        ("paper_bleu", "--hypotheses missing --references b --language de", "'missing': No such"),
    ],
)
def test_errors_are_one_line(
    name: str,
    flags: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [path] = [path for path in EXAMPLES if path.stem == name]
    monkeypatch.setattr("sys.argv", [str(path), *flags.split()])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(path), run_name="__main__")
    assert exit.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_corpus_is_not_overwritten(side: str, run: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / side).write_text("one\n")
    given = str(tmp_path / side)
    pair = {"source": "x", "target": "x"} | {side: given}
    message = f"{side}' is also an input; expected another file"
    with pytest.raises(transformer_jax.UserError, match=message):
        run("clean_pairs", **pair, output=tmp_path)
    with pytest.raises(transformer_jax.UserError, match=message):
        run("translate_corpus", workdir=("W",), input=given, output=tmp_path)


def test_trees_can_be_piped_to_a_program_that_stops_reading() -> None:
    [path] = [path for path in EXAMPLES if path.stem == "artificial_trees"]
    command = f"{sys.executable} {path} --trees 3000 | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("( (S ") and not done.stderr
