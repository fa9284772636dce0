"""Table 3 of the paper: mean and standard deviation over seeds, next to the paper's results.

    python train.py --config table3:A-h1 --workdir runs/table3/A-h1/seed-1 --seed 1
    python examples/table3.py --folder runs/table3

reads the runs in FOLDER/ROW/seed-N. Perplexity and BLEU are from the dev set after the last step.
Unfinished runs are ignored.
"""

import json
import runpy
from pathlib import Path
from statistics import mean, stdev

import tyro

import transformer_jax as tj

RECIPE = Path(__file__).parents[1] / "configs" / "table3.py"


def main(folder: Path) -> None:
    lines = [
        "| row | perplexity: paper | here | BLEU: paper | here | finished seeds |",
        "|---" * 6 + "|",
    ]
    for row, paper in runpy.run_path(str(RECIPE))["ROWS"].items():
        runs = sorted(folder.glob(f"{row}/seed-*/"))
        results = [last_evaluation(run) for run in runs if is_finished(run)]
        perplexity = spread(results, "dev_perplexity", digits=2)
        bleu = spread(results, "dev_bleu", digits=1)
        seeds = f"{len(results)} of {len(runs)}"
        if runs:
            cells = [row, f"{paper.perplexity:.2f}", perplexity, str(paper.bleu), bleu, seeds]
            lines.append(f"| {' | '.join(cells)} |")
    if len(lines) == 2:
        raise SystemExit(f"{folder} has no runs of Table 3; expected folders such as base/seed-1.")
    print("\n".join(lines))


def is_finished(run: Path) -> bool:
    """Check that all steps are done or early stopping ended the run."""
    if not (run / "summary.json").exists():
        return False
    summary = json.loads((run / "summary.json").read_text())
    steps = tj.load_config_file(run / "config.json").training.steps
    done = summary["steps"] >= steps or summary["stopped_early"]
    return summary["stopped_by"] is None and done


def last_evaluation(run: Path) -> dict[str, float]:
    """Read the last dev set results in metrics.jsonl; none without a dev set."""
    entries = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{}, *(entry for entry in entries if entry["kind"] == "dev")][-1]


def spread(results: list[dict[str, float]], name: str, *, digits: int) -> str:
    """Format the mean and standard deviation over seeds, or a dash if no seed has a value."""
    values = [result[name] for result in results if name in result]
    if len(values) > 1:
        return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"
    return f"{values[0]:.{digits}f}" if values else "–"


if __name__ == "__main__":
    raise SystemExit(tj.run_program(lambda: tyro.cli(main)))
