"""Reads a run's files, and translates samples of its dev set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformer_jax import (
    Config,
    Request,
    Translator,
    UserError,
    load_config_file,
    local_workdir,
)
from transformer_jax.data.sources import ParallelText, TextPair, first_pairs
from transformer_jax.devices.compilation_cache import enable_compilation_cache
from transformer_jax.errors import one_line
from transformer_jax.report.attention import SentenceAttention, sentence_attention
from transformer_jax.storage.files import parse_object


@dataclass
class Run:
    """Contents of a run for the report.

    Attributes:
      entries: the lines of metrics.jsonl, and summary.json as an entry of kind "end".
      problems: reasons for missing translations and attention.
      translations: sample translations by (source, reference).
      attention: attention weights by sentence.
    """

    name: str
    workdir: Path
    config: Config
    entries: list[dict[str, Any]]
    problems: list[str] = field(default_factory=list)
    translations: dict[tuple[str, str], str] = field(default_factory=dict)
    attention: dict[str, SentenceAttention] = field(default_factory=dict)

    def curve(self, kind: str, name: str) -> tuple[list[int], list[float]]:
        """Return the steps and values of a field in entries of one kind, without null values (which
        were not finite).
        """
        steps = []
        values = []
        for entry in self.entries:
            if entry["kind"] == kind and entry.get(name) is not None:
                steps.append(entry["step"])
                values.append(entry[name])
        return steps, values

    def latest(self) -> dict[str, Any]:
        """Return the latest value of each field."""
        return {name: value for entry in self.entries for name, value in entry.items()}

    @property
    def status(self) -> str:
        """Status such as "finished, step 4 of 4"."""
        latest = self.latest()
        if latest.get("kind") != "end":
            status = "unfinished"
        elif latest.get("stopped_by"):
            status = f"stopped by {latest['stopped_by']}"
        elif latest.get("stopped_early"):
            status = "stopped early"
        else:
            status = "finished"
        return f"{status}, step {latest.get('step', 0):,} of {self.config.training.steps:,}"


def read_run(location: str) -> Run:
    """Read the run in a work directory or at its URL.

    Raises ``UserError`` if config.json is missing or a file is corrupt.
    """
    workdir = local_workdir(location)
    entries = _objects(workdir / "metrics.jsonl", kind=str, step=int)
    run = Run(location, workdir, load_config_file(workdir), entries)
    for summary in _objects(workdir / "summary.json", steps=int):
        if summary["steps"] >= run.latest().get("step", 0):  # otherwise the run has been resumed
            run.entries.append(summary | {"kind": "end", "step": summary["steps"]})
    return run


def _objects(file: Path, **fields: type) -> list[dict[str, Any]]:
    """Parse the JSON objects in a file, with these ``fields``; none if it does not exist. Ignores
    an incomplete last line of metrics.jsonl, which a run may be writing.
    """
    if not file.exists():
        return []
    try:
        text = file.read_text("utf-8")
        lines = text.split("\n")[:-1] if file.suffix == ".jsonl" else [text]
        return [
            parse_object(line, f"line {line_number}", **fields)
            for line_number, line in enumerate(lines, start=1)
        ]
    except (ValueError, UserError) as error:
        raise UserError(f"{str(file)!r} is corrupt: {error} Fix or delete it.") from None


def take_samples(run: Run, num_lines: int, texts: Sequence[str]) -> None:
    """Translate ``num_lines`` lines of the dev set, and compute attention for ``texts`` (default:
    the first line). Failures are added to ``run.problems``.
    """
    enable_compilation_cache()
    try:
        pairs = _dev_lines(run, num_lines)
        if not pairs and not texts:
            return
        requests = []
        for pair in pairs:
            source, target = pair.languages
            requests.append(Request(pair.source, source_language=source, target_language=target))
        first = requests[0] if requests else Request("")
        translator = Translator.from_workdir(
            run.workdir,
            batch_size=8,
            source_language=first.source_language,
            target_language=first.target_language,
        )
        lines = [(pair.source, pair.target) for pair in pairs]
        run.translations.update(zip(lines, translator.translate(requests)))
        for text in texts or [first.text]:
            run.attention[text] = sentence_attention(translator, text)
    except Exception as error:  # corrupt or missing files, or files just deleted by training
        run.problems.append(f"Translations and attention are incomplete: {one_line(error)}")


def _dev_lines(run: Run, num_lines: int) -> list[TextPair]:
    """Read evenly spaced lines from the part of the dev set that has BLEU, or from all of it."""
    if not num_lines:
        return []
    data = run.config.data
    if not data.dev.is_given:
        run.problems.append("The run has no dev set to translate.")
        return []
    dev = list(ParallelText(data.dev, data.root).text_pairs())
    lines = first_pairs(dev, run.config.training.bleu_sentences or len(dev))
    pairs = [pair for pair in lines if pair.source.strip() and pair.target.strip()]
    return pairs[:: -(-len(pairs) // num_lines)][:num_lines] if pairs else []
