"""Code layout of docs/design.md: import order, branches, short files, plain lines, unique names."""

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
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
    "tokenization.rows",
    "tokenization.subword_sampling",
    "tokenization.segmenters",
    "tokenization.vocabulary",
    "tokenization.languages",
    "tokenization.learning",
    "tokenization.subword_model",
    "tokenization.tokenizer",
    "tokenization.new_pieces",
    "tokenization.words",
    "data.text_files",
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
    "runs.manifest",
    "runs.checkpoint_folder",
    "runs.averaging",
    "runs.model_folder",
    "runs.mirror",
    "runs.progress",
    "runs.checkpoints",
    "runs.workdir",
    "runs.remote_workdir",
    "pretrained.files",
    "pretrained.weights",
    "pretrained.families",
    "pretrained.search_settings",
    "pretrained.export_files",
    "pretrained.ctranslate2",
    "pretrained.ctranslate2_cache",
    "pretrained.config_file",
    "pretrained.marian",
    "pretrained.architecture",
    "pretrained.tokenizer_files",
    "pretrained.new_tokens",
    "pretrained.folder",
    "pretrained.hub",
    "pretrained.encoder",
    "pretrained.loading",
    "decoding.constraints",
    "decoding.lexical_constraints",
    "decoding.logits",
    "decoding.ranking",
    "decoding.search",
    "decoding.beam_search",
    "decoding.sampling",
    "decoding.continuous_batching",
    "decoding.length_buckets",
    "decoding.scheduler",
    "decoding.ensemble",
    "decoding.devices",
    "decoding.compiled_search",
    "decoding.engine",
    "decoding.workers",
    "pretrained.verify",
    "pretrained.__main__",
    "translation.loading",
    "translation.scripts",
    "translation.sentences",
    "translation.segments",
    "translation.alignment",
    "translation.documents.tokens",
    "translation.documents.placeholders",
    "translation.documents.html_tokens",
    "translation.documents.xml_tokens",
    "translation.documents.formats",
    "translation.requests",
    "translation.input_file",
    "translation.output_formats",
    "translation.documents.items",
    "translation.documents.line",
    "translation.documents.placing",
    "translation.markup",
    "translation.glossary",
    "translation.scoring",
    "translation.tags",
    "translation.plan",
    "translation.ctranslate2_engine",
    "translation.engine_choice",
    "translation.translator",
    "translation.async_translator",
    "translation.output_file",
    "evaluation",
    "translation.flags",
    "translation.program",
    "translation.__main__",
    "training.two_passes",
    "training.loss",
    "training.objective",
    "training.optimizer",
    "training.step",
    "training.texts",
    "training.start_model",
    "training.prepare",
    "training.compiling",
    "training.watchdog",
    "training.metrics",
    "training.reporting",
    "training.signals",
    "training.evaluator",
    "training.profiler",
    "training.summary",
    "training.loop",
    "training.__main__",
]
# Folders that import the trunk and their own files; nothing else imports them.
BRANCHES = {"export", "parsing", "report", "serving"}

# Names without a meaning of their own. Write what the value is: ``files``, not ``found``.
PRONOUNS = {
    *("found", "its", "said", "theirs", "ours", "kept", "most", "them", "this", "those", "other"),
    *("others", "one", "same", "told", "asked", "given", "whole", "rest", "gone"),
}
# Packed assignments and pronoun names per 100 lines of code in each folder of the package.
PLAIN = 0.4, 0.3
# Names that several classes or public functions have: shorten this list, never extend it.
REPEATED_NAMES = {"main", "Arguments", "checked_flags", "supports"}
# Folders that are not plain yet: lower these limits, never raise them.
NOT_PLAIN_YET: dict[str, tuple[float, float]] = {}
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


def test_docstrings_describe_existing_parameters() -> None:
    stale = set[str]()
    for name, tree in modules("transformer_jax").items():
        for function in functions(tree):
            parameters = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
            described = re.search(r"^Args:\n((?: .*\n?)*)", ast.get_docstring(function) or "", re.M)
            for names in re.findall(r"^  (\w.*?): ", described[1] if described else "", re.M):
                if names != "Default":
                    stale |= {
                        f"{name}.{function.name}: {parameter}"
                        for parameter in re.findall(r"\w+", names)
                        if parameter not in parameters
                    }
    assert not stale


def code_lines(tree: ast.Module, text: str) -> int:
    """Number of lines that are not blank, a comment or part of a docstring."""
    documentation: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    end = statement.end_lineno or statement.lineno
                    documentation.update(range(statement.lineno, end + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in documentation
        for number, line in enumerate(text.splitlines(), 1)
    )


def is_packed_assignment(node: ast.AST) -> bool:
    """Whether one statement assigns several values that are not one thing: ``a, b = x, y``.

    Unpacking a single value and swapping variables do not count.
    """
    if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)):
        return False
    if not isinstance(node.value, ast.Tuple):
        return False
    names = {ast.unparse(name) for name in node.targets[0].elts}
    return names != {ast.unparse(value) for value in node.value.elts}


def pronouns_stored(node: ast.AST) -> list[str]:
    """The pronoun, if this node assigns to a variable or declares a parameter of that name."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        name = node.id
    else:
        name = node.arg if isinstance(node, ast.arg) else ""
    return [name] if name in PRONOUNS else []


def test_packed_assignments_and_pronoun_names_are_rare() -> None:
    num_lines = Counter[str]()
    packed: dict[str, list[str]] = {}
    pronouns: dict[str, list[str]] = {}
    for file in sorted((ROOT / "transformer_jax").rglob("*.py")):
        relative = file.relative_to(ROOT / "transformer_jax")
        folder = relative.parts[0] if len(relative.parts) > 1 else ""
        text = file.read_text()
        tree = ast.parse(text)
        num_lines[folder] += code_lines(tree, text)
        for node in ast.walk(tree):
            if is_packed_assignment(node):
                place = f"{relative}:{node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]
                packed.setdefault(folder, []).append(place)
            for name in pronouns_stored(node):
                place = f"{relative}:{node.lineno}: {name}"  # type: ignore[attr-defined]
                pronouns.setdefault(folder, []).append(place)
    for folder, count in num_lines.items():
        limits = NOT_PLAIN_YET.get(folder, PLAIN)
        advice = (
            ("packed assignments", "Write one assignment a line", packed),
            ("names that are pronouns", "Name what the value is", pronouns),
        )
        for limit, (kind, remedy, places) in zip(limits, advice):
            rate = 100 * len(places.get(folder, [])) / count
            assert rate <= limit, "\n".join(
                [
                    f"transformer_jax/{folder} has {rate:.2f} {kind} per 100 lines of code; "
                    f"expected at most {limit}. {remedy}:",
                    *places.get(folder, []),
                ]
            )


def test_a_name_means_one_class_or_function() -> None:
    definitions: dict[str, list[str]] = {}
    for module, tree in modules("transformer_jax").items():
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        public = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        ]
        for definition in [*classes, *public]:
            definitions.setdefault(definition.name, []).append(module)
    repeated = {name: places for name, places in definitions.items() if len(places) > 1}
    unexpected = {name: repeated[name] for name in repeated.keys() - REPEATED_NAMES}
    assert not unexpected, "several modules define the same name; rename all but one"
    assert not REPEATED_NAMES - repeated.keys(), "remove these names from REPEATED_NAMES"


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
