"""Code layout of docs/design.md: import order, branches, short files, few files beside folders."""

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import transformer_jax

ROOT = Path(__file__).resolve().parents[1]
TRUNK = [
    "errors",
    "storage.files",
    "settings.checks",
    "settings.roles",
    "settings.config",
    "settings.config_files",
    "settings.changes",
    "cli",
    "devices.machine",
    "devices.compilation_cache",
    "devices.sharding",
    "devices.distributed",
    "tokenization.special_ids",
    "tokenization.subword_sampling",
    "tokenization.rust_tokenizer",
    "tokenization.subword_model",
    "tokenization.tokenizer",
    "tokenization.words",
    "data.files",
    "data.sources",
    "data.tokenize",
    "data.corpus",
    "data.packing",
    "data.bucketing",
    "data.mixing",
    "data.batching",
    "data.loader",
    "model.dropout",
    "model.gpu",
    "model.positions",
    "model.matmul",
    "model.attention_kernel",
    "model.attention",
    "model.norm_kernel",
    "model.norms",
    "model.decode_kernel",
    "model.kv_cache",
    "model.layers",
    "model.transformer",
    "runs.checkpoint",
    "runs.averaging",
    "runs.remote_workdir",
    "runs.model_folder",
    "pretrained.files",
    "pretrained.weights",
    "pretrained.families",
    "pretrained.tokenizer_files",
    "pretrained.search_settings",
    "pretrained.folder",
    "pretrained.hub",
    "pretrained.loading",
    "pretrained.__main__",
    "decoding.constraints",
    "decoding.lexical_constraints",
    "decoding.logits",
    "decoding.search",
    "decoding.beam_search",
    "decoding.sampling",
    "decoding.continuous_batching",
    "decoding.length_buckets",
    "decoding.ensemble",
    "decoding.devices",
    "decoding.engine",
    "translation.loading",
    "translation.scripts",
    "translation.sentences",
    "translation.segments",
    "translation.alignment",
    "translation.records",
    "translation.markup",
    "translation.glossary",
    "translation.scoring",
    "translation.plan",
    "translation.translator",
    "translation.output_file",
    "evaluation",
    "translation.program",
    "translation.__main__",
    "training.workdir",
    "training.loss",
    "training.optimizer",
    "training.step",
    "training.flops",
    "training.progress",
    "training.saver",
    "training.prepare",
    "training.compiling",
    "training.reporting",
    "training.summary",
    "training.signals",
    "training.evaluator",
    "training.profiler",
    "training.loop",
    "training.__main__",
]
# Folders that import the trunk and their own files; nothing else imports them.
BRANCHES = {"export", "parsing", "report", "serving"}

# Exceptions from the limits below: shorten these lists, never extend them.
LONG_FILES = {"transformer_jax/settings/config.py"}
LONG_FUNCTIONS: set[str] = set()


@cache
def modules(package: str) -> dict[str, ast.Module]:
    """Syntax trees of a package's modules, by dotted name within the package."""
    files = [path for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py"]
    names = [".".join(path.relative_to(ROOT / package).with_suffix("").parts) for path in files]
    return {name: ast.parse(path.read_text()) for name, path in zip(names, files)}


def imports(package: str, name: str) -> set[str]:
    """Modules of ``package`` that its module ``name`` imports, anywhere in its code."""
    found = set()
    for node in ast.walk(modules(package)[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports by a relative name; expected {package}..."
            found |= {node.module or ""}
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {each.removeprefix(f"{package}.") for each in found} & set(modules(package))


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_the_trunk_imports_only_earlier_modules() -> None:
    library = modules("transformer_jax")
    trunk = [name for name in library if name.split(".")[0] not in BRANCHES]
    assert sorted(trunk) == sorted(TRUNK)
    assert not [name for name in library if "util" in name], "name a module after what it does"
    for name in TRUNK:
        for imported in imports("transformer_jax", name):
            assert imported in TRUNK, f"{name} imports {imported}, of a branch"
            assert TRUNK.index(imported) < TRUNK.index(name), f"{name} imports {imported}"


def test_branches_import_only_the_trunk_and_their_own_files() -> None:
    graph = {}
    for name in modules("transformer_jax"):
        branch = name.split(".")[0]
        if branch in BRANCHES:
            graph[name] = imports("transformer_jax", name)
            others = {each for each in graph[name] if each.split(".")[0] in BRANCHES - {branch}}
            assert not others, f"{name} imports {others}, of another branch"
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_no_module_is_imported_by_its_name_in_a_string() -> None:
    for name in modules("transformer_jax"):
        file = ROOT / "transformer_jax" / f"{name.replace('.', '/')}.py"
        assert not re.search(
            r"(import_module|__import__)\(.?[\"']transformer_jax", file.read_text()
        )


def test_folders_use_the_public_names_of_others() -> None:
    for name, tree in modules("transformer_jax").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "transformer_jax."
            ):
                folder = (node.module or "").split(".")[1]
                if folder != name.split(".")[0]:
                    private = [x.name for x in node.names if x.name.startswith("_")]
                    assert not private, f"{name} imports {private}"


def test_trunk_folders_have_no_import_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for name in TRUNK:
        folder = name.split(".")[0]
        imported = {each.split(".")[0] for each in imports("transformer_jax", name)}
        graph.setdefault(folder, set()).update(imported - {folder})
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_at_most_seven_files_are_beside_the_folders() -> None:
    assert len(list((ROOT / "transformer_jax").glob("*.py"))) <= 7


def test_the_code_map_is_in_import_order() -> None:
    """The trunk follows ``TRUNK``, and each file of a branch is below the files it imports."""
    code_map = (ROOT / "docs" / "code_map.md").read_text()
    rows = re.findall(r"^\| `([\w/]+)\.py` \|", code_map.split("## Outside the package")[0], re.M)
    names = [row.replace("/", ".") for row in rows]
    assert names[: len(TRUNK)] == TRUNK
    for number, name in enumerate(names):
        later = imports("transformer_jax", name) - set(names[:number])
        assert not later, f"docs/code_map.md lists {name} above {later}"


def test_benchmarks_have_no_import_cycle() -> None:
    graph = {name: imports("benchmarks", name) for name in modules("benchmarks")}
    assert graph["train"] == {"in_turn"}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_files_have_at_most_600_lines() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for folder in ("transformer_jax", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {name for name, length in lengths.items() if length > 600} <= LONG_FILES


def test_functions_have_at_most_60_lines() -> None:
    long = {
        f"{name}.{function.name}"
        for name, tree in modules("transformer_jax").items()
        for function in functions(tree)
        if (function.end_lineno or 0) - function.lineno + 1 > 60
    }
    assert long <= LONG_FUNCTIONS


def test_functions_have_at_most_8_parameters() -> None:
    for name, tree in modules("transformer_jax").items():
        for function in functions(tree):
            given = function.args
            named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            own = [each for each in named if each.arg not in ("self", "cls")]
            assert len(own) <= 8, f"{name}.{function.name}"


HELP = """
import contextlib, os, runpy, sys
for program in sys.argv[1:]:
    sys.argv = [program, "--help"]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(open(os.devnull, "w")):
        runpy.run_path(program, run_name="__main__")
    print(program, *sorted({"jax", "matplotlib"} & sys.modules.keys()))
"""


def test_help_does_not_import_jax() -> None:
    programs = ["train.py", "decode.py"]
    programs += [f"transformer_jax/{x}" for x in ("report", "report/heat_maps.py", "serving")]
    command = [sys.executable, "-c", HELP, *programs]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines() == programs


def test_the_package_exports_the_names_in_its_stub() -> None:
    stub = ast.parse((ROOT / "transformer_jax" / "__init__.pyi").read_text())
    [listed] = [ast.literal_eval(node.value) for node in stub.body if isinstance(node, ast.Assign)]
    assert sorted(transformer_jax.__all__) == sorted(listed)
    for name in listed:
        offered = getattr(transformer_jax, name)
        assert isinstance(offered, int) or offered.__module__.startswith("transformer_jax.")


def test_all_subpackages_are_installed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for path in (ROOT / "transformer_jax").rglob("*.py")}
    packages = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert sorted(setuptools["packages"]) == sorted(packages | {"transformer_jax.configs"})
    assert all((folder / "__init__.py").is_file() for folder in folders)


def test_the_makefile_names_existing_tests() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    for variable in ("QUICK", "BRANCHES"):
        [named] = re.findall(rf"^{variable} := (.*)", makefile, re.MULTILINE)
        assert all((ROOT / name).exists() for name in named.split())


def test_the_api_reference_lists_the_public_names() -> None:
    pages = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("api", "settings"))
    documented: dict[str, list[str]] = {}
    for module, block in re.findall(r"^\.\. currentmodule:: (\S+)\n(.*?)```", pages, re.M | re.S):
        documented.setdefault(module, []).extend(re.findall(r"^\.\. auto\w+:: (\w+)", block, re.M))
    attention = ["SentenceAttention", "attention_maps", "save_picture", "sentence_attention"]
    offered = {"transformer_jax": sorted(transformer_jax.__all__)}
    offered["transformer_jax.report.attention"] = attention
    assert {module: sorted(names) for module, names in documented.items()} == offered
