"""Files, settings, flags, names and links in the documentation exist."""

import contextlib
import dataclasses
import functools
import importlib
import io
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import jax
import pytest
import tyro
from flax import nnx

from transformer_jax import Transformer
from transformer_jax.cli import config_in_flags, parse_flags
from transformer_jax.evaluation import evaluate
from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import (
    flatten,
    load_config_file,
    recipe_path,
    to_json,
)
from transformer_jax.training.__main__ import Arguments

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# Commands and names in the log are those of its measurements' commits.
PAGES = [path for path in DOCUMENTS if path.parent.name != "log"]
TABLE_3 = re.findall(
    r"^\| (\S+) \| (?:`(.+?)`)? *\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$",
    (ROOT / "docs" / "from_the_paper.md").read_text(),
    re.MULTILINE,
)
ROWS = runpy.run_path(str(recipe_path("table3")))["ROWS"]
INSTALLED = {
    name: module.split(".__main__")[0]
    for name, module in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "scripts"
    ].items()
}


def _anchors(path: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_exist(path: Path) -> None:
    text = path.read_text()
    pictures = re.findall(r'src(?:set)?="([^"#]*)()"', text)
    for target, anchor in re.findall(r"\]\(([^)#]*)(#[^)]*)?\)", text) + pictures:
        if not target.startswith("http"):
            linked = path.parent / target if target else path
            assert linked.exists(), f"{path.name} links to {target}"
            if anchor:
                assert anchor[1:] in _anchors(linked), f"{path.name} links to {target}{anchor}"


def _exists(name: str) -> bool:
    """Whether the root or the package has a path that a page names."""
    return any((folder / name).exists() for folder in (ROOT, ROOT / "transformer_jax"))


@pytest.mark.parametrize(
    "path", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=lambda p: p.name
)
def test_named_files_and_fields_exist(path: Path) -> None:
    text = path.read_text()
    for name in re.findall(r"\b(?:configs|benchmarks|docs)/\w+\.(?:py|md)", text):
        assert (ROOT / name).exists(), f"{path.name} names {name}"
    for name in re.findall(r"`([\w/]+/\w+\.pyi?)`", text):
        assert _exists(name), f"{path.name} names {name}"
    for name in re.findall(r"^    (?:\$ )?make ([a-z-]+)", text, re.MULTILINE):
        assert f"\n{name}: " in (ROOT / "Makefile").read_text(), f"{path.name} says make {name}"
    fields = set(flatten(Config()))
    sections = {field.split(".")[0] for field in fields if "." in field}
    for flag in re.findall(rf"--((?:{'|'.join(sections)})\.[\w.-]+)", text):
        assert flag.replace("-", "_").replace(".no_", ".") in fields, f"{path.name} names --{flag}"


def _imports(name: str) -> bool:
    """Whether a dotted name within ``transformer_jax`` can be imported."""
    try:
        pkgutil.resolve_name(f"transformer_jax.{name}")
    except (ImportError, AttributeError):
        return False
    return True


def test_names_in_from_the_paper_exist() -> None:
    """Names of code, tests and files."""
    page = (ROOT / "docs" / "from_the_paper.md").read_text()
    quoted = set(re.findall(r"`([^`]+)`", page))
    tests = {name for name in quoted if name.startswith("test_")}
    there = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name in tests if f"def {name}(" not in there]
    files = {name for name in quoted if re.fullmatch(r"[\w/]+\.(py|ipynb|md)", name)}
    assert not [name for name in files if not (ROOT / name).exists()]
    elsewhere = {"nn.Transformer", "jax.nn.gelu"}
    names = {name for name in quoted if re.fullmatch(r"[A-Za-z]\w*(\.\w+)*", name)}
    names -= tests | files | elsewhere
    assert len(names) > 40
    code = "".join(path.read_text() for path in (ROOT / "transformer_jax").rglob("*.py"))
    arguments = {name for name in names if re.fullmatch(r"[a-z]\w*", name)}
    assert not [name for name in arguments if not re.search(rf"\b{name}\b", code)]
    assert not [name for name in names - arguments if not _imports(name)]


def test_the_code_map_lists_every_module() -> None:
    package = ROOT / "transformer_jax"
    modules = {str(path.relative_to(package)) for path in package.rglob("*.py")}
    modules = {path for path in modules if not path.endswith("__init__.py")}
    code_map, outside = (ROOT / "docs/code_map.md").read_text().split("## Outside the package")
    named = re.findall(r"^\| `([\w/]+\.py)` \| .+ \|$", code_map, re.MULTILINE)
    assert not modules - set(named), f"docs/code_map.md lacks {modules - set(named)}"
    assert not set(named) - modules, f"docs/code_map.md names missing {set(named) - modules}"
    assert len(named) == len(modules)
    for path in re.findall(r"`([\w/.]+)`(?=.* \| )", outside):
        assert (ROOT / path).exists(), f"docs/code_map.md names missing {path}"


def _rows_of_files_to_change() -> list[str]:
    _, section = (ROOT / "CONTRIBUTING.md").read_text().split("## Files to change")
    table, _ = section.split("\nCode paths ")
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    return rows


@pytest.mark.parametrize("row", _rows_of_files_to_change(), ids=lambda row: row.split(" |")[0][2:])
def test_files_and_names_in_the_table_of_contributing_exist(row: str) -> None:
    """Files, folders, targets of make, and names in the code."""
    code = "".join(path.read_text() for path in (ROOT / "transformer_jax").rglob("*.py[i]"))
    code += "".join(path.read_text() for path in (ROOT / "transformer_jax").rglob("*.py"))
    for name in re.findall(r"`([^`]+)`", row):
        if name.startswith("make "):
            assert f"\n{name[5:]}: " in (ROOT / "Makefile").read_text(), name
        elif re.search(r"\.\w+$|/$", name) and not re.fullmatch(r"[A-Z]\w+\.\w+", name):
            assert _exists(name), name
        elif not name.startswith("/"):
            assert all(re.search(rf"\b{part}\b", code) for part in name.split(".")), name


def test_the_readme_is_short_and_repeats_documented_results() -> None:
    readme = (ROOT / "README.md").read_text()
    table = readme.split("## Results")[1].split("\n## ")[0]
    headline = readme.split("**")[1]
    figures = set(re.findall(r"\d+(?:[.,]\d+)+|\d{3}", headline + table))
    pages = "".join(
        (ROOT / "docs" / f"{name}.md").read_text() for name in ("results", "performance")
    )
    assert len(figures) > 15 and table.count("\n| ") <= 1 + 7
    assert not [figure for figure in figures if figure not in pages]
    assert len(readme.splitlines()) <= 120


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_are_short(path: Path) -> None:
    """The log keeps every measurement, so that a page can be read in one sitting."""
    limits = {"README.md": 850, "results.md": 2000, "performance.md": 2500}
    words = len(path.read_text().split())
    assert words <= limits.get(path.name, 3000)


QUESTIONS = """
How do I resume on another number of devices? | training.md#stop-and-resume | another number
Which file do I give to CTranslate2? | export.md#export-a-model | `ctranslate2.Translator`
Why is BLEU 0? | troubleshooting.md#bleu-is-0-or-very-low | 4-grams
Does big fit in 16 GB? | troubleshooting.md#out-of-memory | on 16 GB
How do I add my own tokens? | training.md#tokenizers | --tokenizer.user-defined-symbols
How do I use my own SentencePiece model? | training.md#tokenizers | --tokenizer.model my.model
Why does the first step take so long? | troubleshooting.md#slow-first-step-slow-training | compil
Why is my GPU not used? | troubleshooting.md#slow-first-step-slow-training | A GPU is not used
How do I stop early? | training.md#stop-and-resume | --training.patience
Which formats can my text have? | training.md#input-formats | Parquet
How do I train in several languages? | techniques.md#several-corpora | target languages
How do I freeze parameters? | techniques.md#frozen-parameters | --training.freeze
How do I fine-tune NLLB? | tutorials/nllb.md#fine-tune-on-a-parquet-file | finetune_nllb
How do I score translations? | decoding.md#scoring | --score-targets
How do I print an n-best list? | decoding.md#n-best-lists-and-alignments | --nbest 4
How do I translate HTML? | markup.md#html-xml-and-placeholders | --format html
How do I enforce terms? | markup.md#glossaries | --glossary
How do I put the server behind nginx? | deployment.md#behind-a-proxy | nginx
Which limits does the server have? | serving.md#limits | --max-characters
How do I train on Slurm? | clusters.md#slurm | sbatch
How do I shard the optimizer state? | training.md#several-devices | --mesh.fsdp
How do I search with my own model? | search.md#beam-search-over-your-own-step | step_fn
How do I load my own PyTorch weights? | own_models.md#weights | model_from_arrays
How do I plot attention? | decoding.md#attention-plots | heat_maps
What is out of scope? | design.md#out-of-scope | decoder-only
"""


@pytest.mark.parametrize(
    "line", QUESTIONS.strip().splitlines(), ids=lambda line: line.split("?")[0]
)
def test_questions_are_answered_two_clicks_from_the_index(line: str) -> None:
    """The index links to the page, and the page's contents to the section."""
    _, link, answer = line.split(" | ")
    page, anchor = link.split("#")
    index = (ROOT / "docs" / "index.md").read_text()
    assert f"({page})" in index or f"({page}#" in index
    sections = re.split(r"^#+ ", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)
    [section] = [
        text
        for text in sections
        if re.sub(r"[^\w\- ]", "", text.split("\n")[0].lower()).replace(" ", "-") == anchor
    ]
    assert answer in " ".join(section.split())


def test_every_page_is_two_clicks_from_the_index() -> None:
    reached = {ROOT / "docs" / "index.md"}
    for _ in range(2):
        for page in list(reached):
            links = re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", page.read_text())
            reached |= {(page.parent / link).resolve() for link in links}
    pages = set((ROOT / "docs").rglob("*.md"))
    assert not pages - reached


def test_the_readme_says_what_the_demo_prints() -> None:
    """The lines that the Makefile translates, their German names, and the format of the score."""
    said = re.findall(r"^#   +(.*)", (ROOT / "README.md").read_text(), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    numbers = re.findall(r"'(.*?)'", makefile.split("NUMBERS := ")[1].split("\n\n")[0])
    names = runpy.run_path(str(ROOT / "examples" / "number_names.py"))
    german = [names["name"](n, "de", "", "") for n in (42, 17_608, 999_001)]
    german[1] = names["styled"](german[1], 3)  # a capital and a period
    scores = evaluate(german, german)
    assert said == [
        str(scores).splitlines()[-1],
        "Three lines to translate:",
        *numbers,
        *german,
    ]
    assert "Three lines to translate:" in makefile


def test_the_recorded_run_is_the_same_in_light_and_dark() -> None:
    texts = []
    for theme in ("light", "dark"):
        root = ElementTree.parse(ROOT / "docs" / f"run-{theme}.svg").getroot()
        texts.append([text for text in root.itertext() if "keyframes" not in text])
    assert texts[0] == texts[1]
    said = re.findall(r"^#   (\w.*)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert said[0] == "exact match 100.00%" and said[0] in texts[0]


@functools.cache
def _flags(program: str) -> set[str]:
    """Flags in the help text of a program or subcommand."""
    name, *task = program.split()
    is_folder = (ROOT / name.replace(".", "/")).is_dir()
    main = importlib.import_module(name + ".__main__" * is_folder).main
    with contextlib.redirect_stdout(io.StringIO()) as text, pytest.raises(SystemExit):
        main([*task, "--help"])
    return set(re.findall(r"--([a-z][\w.-]*)", text.getvalue()))


@pytest.mark.parametrize(
    ("page", "programs", "command"),
    [
        ("decoding", ("translation", "report.heat_maps"), "decode.py"),
        ("markup", ("translation",), "decode.py"),
        ("serving", ("serving", "translation"), "transformer-serve"),
    ],
)
def test_flags_on_a_page_exist(page: str, programs: tuple[str, ...], command: str) -> None:
    flags = set().union(*(_flags(f"transformer_jax.{program}") for program in programs))
    text = (ROOT / "docs" / f"{page}.md").read_text().replace("\\\n", "")
    text = re.sub(r"srun .*? sh|docker build.*|docker run .* transformer-serve", "", text)
    lines = "\n".join(line for line in text.split("\n") if command in line or "`--" in line)
    # a dot marks a training setting
    named = set(re.findall(r"--([a-z-]+)(?![a-z.-])", lines))
    assert len(named) > 2 and not named - flags, f"docs/{page}.md names {named - flags}"


def test_documented_table_3_matches_its_recipe() -> None:
    documented = {
        row: (int(size), float(ppl), float(bleu)) for row, _, size, _, ppl, bleu in TABLE_3
    }
    assert documented == {row: paper[1:] for row, paper in ROWS.items()}
    assert list(documented) == list(ROWS) and len(TABLE_3) == 20


def _num_parameters(module: nnx.Module) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)))


@pytest.mark.parametrize(
    ("row", "flags", "paper", "ours"),
    [
        pytest.param(*row[:4], marks=[pytest.mark.exhaustive] if number % 4 else [])
        for number, row in enumerate(TABLE_3)
    ],
    ids=[row[0] for row in TABLE_3],
)
def test_flags_and_sizes_of_table_3_match_its_recipe(
    row: str, flags: str, paper: str, ours: str
) -> None:
    base = load_config_file(ROOT / "configs" / "wmt14_base.py")
    config = tyro.cli(Config, args=flags.split(), default=base)
    assert config == load_config_file(f"table3:{row}")
    sizes = {"vocab_size": config.tokenizer.vocab_size, "num_layers": 1}
    one_layer = dataclasses.replace(config.model, **sizes)
    model = nnx.eval_shape(lambda: Transformer(one_layer, rngs=nnx.Rngs(0)))
    layers = _num_parameters(model.encoder) + _num_parameters(model.decoder)
    millions = (_num_parameters(model) + (config.model.num_layers - 1) * layers) / 1e6
    assert round(millions, 1) == float(ours)
    # The paper's sizes fit about 41,000 tokens; one matrix holds all embeddings.
    with_41000 = millions + 4000 * config.model.d_model / 1e6
    assert abs(with_41000 / int(paper) - 1) < 0.026
    assert row == "big" or abs(with_41000 - int(paper)) < 0.7


def _command_lines(path: Path) -> list[str]:
    """Indented lines and lines in ``sh`` fences."""
    lines, fence = [], None
    for line in path.read_text().replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            fence = line[3:] if fence is None else None
        elif fence == "sh" or (fence is None and line.startswith("    ")):
            lines.append(line)
    return lines


def _training_commands() -> list[tuple[str, list[str]]]:
    """Flags of each documented ``train.py`` command, except commands that start from the config in
    a work directory. Removes pipes and comments, and replaces loop variables with a value.
    """
    commands = []
    for path in PAGES:
        for line in _command_lines(path):
            found = re.search(
                r'(?:train\.py|slurm\.sh|RUN="python train.py) '
                r"((?:'[^']*'|[^'])*?)(?:  #|[\"<>|]|$)",
                line,
            )
            if found and "..." not in found[1]:
                words = found[1].replace("$row", "C-N2").replace("$seed", "1")
                flags = shlex.split(words)
                names = [flags[i + 1] for i, flag in enumerate(flags) if flag == "--config"]
                if not any(name == "C" or name.endswith("config.json") for name in names):
                    commands.append((path.name, flags))
    return commands


@pytest.mark.parametrize(("name", "flags"), _training_commands(), ids=str)
def test_documented_training_commands_can_be_parsed(
    name: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "config.json").write_text(to_json(Config()))
    folder = "transformer_jax.pretrained.loading.local_workdir"
    monkeypatch.setattr(folder, lambda _: tmp_path)  # the model that finetune_* recipes start from
    flags = [flag for flag in flags if flag != "FLAGS"]
    arguments = parse_flags(Arguments, flags, defaults=config_in_flags(flags))
    assert arguments.settings.data.train.is_given
    is_distributed = {"--distributed", "--num-processes"} & set(flags)
    if name == "clusters.md" and (is_distributed or arguments.config.endswith("big.py")):
        assert arguments.settings.batch.row_multiple % 16 == 0  # at least 16 devices


def _other_commands() -> dict[str, set[str]]:
    """Flags in the documented commands of each program (or subcommand) except ``train.py``."""
    programs: dict[str, set[str]] = {}
    names = "|".join(INSTALLED)
    for path in PAGES:
        for line in _command_lines(path):
            command, *_ = re.split(
                r"  #|[<>]", line.replace("python decode.py", "transformer-decode")
            )
            for module, installed, rest in re.findall(
                rf"^.*?(?:python -m (transformer_jax\S+(?: [a-z]+)?)|({names}))(?: (.*)|$)",
                command,
            ):
                flags = re.findall(r"--([a-z][\w.-]*)", rest)
                programs.setdefault(module or INSTALLED[installed], set()).update(flags)
    return programs


@pytest.mark.parametrize("program", _other_commands())
def test_flags_of_other_documented_commands_exist(program: str) -> None:
    flags = _other_commands()[program]
    unknown = flags - _flags(program)
    assert flags and not unknown, f"the documents give {program} --{unknown}"


def test_documented_commands_are_found() -> None:
    assert len(_training_commands()) >= 10
    assert len(_other_commands()) >= 8 and "transformer_jax.serving" in _other_commands()


def test_commands_of_a_single_page_can_be_checked() -> None:
    """``docs/check_commands.py PAGE`` runs the commands of that page only."""
    program = runpy.run_path(str(ROOT / "docs" / "check_commands.py"))
    script = program["script"](ROOT / "README.md")
    assert re.findall(r"== ([\w./]+):", script) and "docs/tutorials/" not in script
    command = [sys.executable, str(ROOT / "docs" / "check_commands.py"), "docs/nowhere.md"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "nowhere.md is not a file; expected a page" in done.stderr


# The output of a command that refuses a folder that exists.
NEW_FOLDER = r"(?:random_pretrained\.py.* --output|pretrained import.* --workdir) (\S+)"


def test_commands_of_all_pages_can_run_in_one_clone() -> None:
    """Blocks hold whole commands, and no two import a model into the same folder."""
    program = runpy.run_path(str(ROOT / "docs" / "check_commands.py"))
    new_folders = Counter[str]()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))):
        script = program["script"](page)
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        for line in script.replace("\\\n", " ").splitlines():
            assert not line.startswith("-"), f"{page.name}: {line} is not a command"
            new_folders.update(re.findall(NEW_FOLDER, line))
    assert new_folders["nllb-random"] == 1 and set(new_folders.values()) == {1}
