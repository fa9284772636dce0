"""What the runs of a table have reached, beside the paper's figures: Markdown and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from transformer_jax.config_io import flatten, load_config_file
from transformer_jax.errors import UserError
from transformer_jax.pictures.drawing import rows_picture, save_picture
from transformer_jax.storage import write_atomically
from transformer_jax.table3.runs import Run, Table, read_json

_HEADER = (
    "row | here | million parameters: paper | ours | perplexity: paper | ours | BLEU: paper | ours"
    " | seeds"
)


class Figures(NamedTuple):
    """Of a run: on the dev set, at its last step, if it is finished, or else why not."""

    run: Run
    parameters: int | None
    perplexity: float | None
    bleu: float | None
    note: str


Found = Mapping[str, Sequence[Figures]]
"""By row."""


def collect(workdir: Path, table: Table) -> Found:
    """What the runs of each row have reached, in the order of table and seeds; no row of which
    nothing is there.
    """
    if not (workdir / "base.json").exists():
        raise UserError(f"{str(workdir)!r} holds no base.json; expected the --workdir of a table.")
    base, found = load_config_file(workdir / "base.json"), {}
    for row in table.rows:
        seeds = sorted(int(log.stem[5:]) for log in (workdir / row).glob("seed-*.log"))
        if seeds:
            config = table.change(row, base)
            folders = {seed: workdir / row / f"seed-{seed}" for seed in seeds}
            runs = [Run(row, replace(config, seed=n), folder) for n, folder in folders.items()]
            found[row] = [_figures(run) for run in runs]
    return found


def _figures(run: Run) -> Figures:
    entries = read_json(run.folder / "metrics.jsonl", lines=True)
    last = {entry["kind"]: entry for entry in entries}
    dev, parameters = last.get("dev", {}), last.get("start", {}).get("parameters")
    if run.is_finished:
        return Figures(run, parameters, dev["dev_perplexity"], dev.get("dev_bleu"), "")
    step = max((entry["step"] for entry in entries), default=0)
    note = run.failure or f"at step {step:,} of {run.config.training.steps:,}"
    return Figures(run, parameters, None, None, note)


def as_markdown(found: Found, table: Table, base: Mapping[str, Any]) -> str:
    """The table; ``base``: the flattened settings that a row's are compared with."""
    lines = [f"| {_HEADER} |", "|---" * (_HEADER.count("|") + 1) + "|"]
    for row, figures in found.items():
        paper, done = table.rows[row], [each for each in figures if not each.note]
        settings = flatten(figures[0].run.config) | {"seed": base["seed"]}
        changed = [f"{n.split('.')[1]} {v}" for n, v in settings.items() if v != base[n]]
        counts = [each.parameters / 1e6 for each in figures if each.parameters]
        notes = [f"; seed {each.run.config.seed} {each.note}" for each in figures if each.note]
        cells = [
            *(row, ", ".join(changed)),
            *(paper.million_parameters, _mean(counts[:1], 2)),
            *(f"{paper.perplexity:.2f}", _mean(values(figures, "perplexity"), 2)),
            *(paper.bleu, _mean(values(figures, "bleu"), 1)),
            f"{len(done)} of {len(figures)}{''.join(notes)}".replace("|", "/"),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", *agreement(found, table)]).strip() + "\n"


def values(figures: Sequence[Figures], name: str) -> list[float]:
    """``perplexity`` or ``bleu`` of the seeds that have it."""
    return [value for each in figures if (value := getattr(each, name)) is not None]


def _mean(numbers: Sequence[float], digits: int) -> str:
    """Mean, with the standard deviation of several numbers; a dash for none."""
    if not numbers:
        return "–"
    spread = f" ± {stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{mean(numbers):.{digits}f}{spread}"


def agreement(found: Found, table: Table) -> Iterator[str]:
    """How far the order of the rows is the paper's."""
    from scipy.stats import spearmanr

    for name in ("perplexity", "bleu"):
        ours = {row: mean(here) for row in found if (here := values(found[row], name))}
        theirs = [getattr(table.rows[row], name) for row in ours]
        if len(set(ours.values())) > 2 and len(set(theirs)) > 1:
            correlation = spearmanr(list(ours.values()), theirs).statistic
            yield (
                f"Rank correlation with the paper's {name} over {len(ours)} rows: "
                f"{correlation:+.2f} (1: the same order)."
            )


def draw(found: Found, table: Table, output: Path) -> None:
    """How far each row is from base, here and in the paper; not while base has no figures."""
    panels = {}
    for name, label, above in (
        ("perplexity", "perplexity, % above base", lambda x, base: 100 * (x / base - 1)),
        ("bleu", "BLEU, points above base", lambda x, base: x - base),
    ):
        paper = [getattr(table.rows[row], name) for row in found]
        if base := values(found.get("base", ()), name):
            theirs = [above(value, getattr(table.rows["base"], name)) for value in paper]
            ours = [[above(x, mean(base)) for x in values(each, name)] for each in found.values()]
            panels[label] = theirs, ours
    if panels:
        save_picture(rows_picture(list(found), panels), output)


def write_table(workdir: Path, table: Table) -> str:
    """Write table3.md and table3.png of what is there; returns the former."""
    found = collect(workdir, table)
    text = as_markdown(found, table, flatten(load_config_file(workdir / "base.json")))
    write_atomically(workdir / "table3.md", text)
    draw(found, table, workdir / "table3.png")
    return text
