"""Python blocks in README.md and docs/ run and print the output in their comments."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

import transformer_jax
from transformer_jax import Config, DecodingConfig

ROOT = Path(__file__).resolve().parents[1]


class Block(NamedTuple):
    file: Path
    line: int  # of the opening fence
    code: str

    def run(self) -> None:
        """Run the block as a program and compare its output with the comments after ``print``
        calls.
        """
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            # Tracebacks show the line in the document.
            code = compile("\n" * self.line + self.code, str(self.file), "exec")
            exec(code, {"__name__": "__main__"})
        printed = output.getvalue().splitlines()
        prints = re.findall(r"^print\(.*?\)(?:  # (.*))?$", self.code, re.MULTILINE)
        if any(prints):
            assert len(printed) == len(prints), (
                "a block with expected output prints one line per print call"
            )
        for line, expected in zip(printed, prints):
            # an explanation follows a colon
            assert not expected or line == expected.split(": ")[0]


def blocks(name: str) -> list[Block]:
    text = (ROOT / name).read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(ROOT / name, text[: match.start()].count("\n") + 1, match[1]) for match in found]


BLOCKS = [
    block
    for name in (
        *("README.md", "docs/library.md", "docs/python.md", "docs/search.md"),
        "docs/serving.md",
        *("docs/parsing.md", "docs/export.md", "docs/own_models.md"),
        *("docs/tutorials/from_flax_wmt.md", "docs/tutorials/one_module.md"),
    )
    for block in blocks(name)
    if "m30k-ct2" not in block.code  # needs a model that only the reader has
    and "nllb" not in block.code  # tests/pretrained/test_pretrained_page.py runs it
]
TRAINS = [block for block in BLOCKS if "train(config, " in block.code]
OTHERS = [block for block in BLOCKS if block not in TRAINS]


_train_anywhere = transformer_jax.train


def _train(config: Config, workdir: str) -> dict[str, Any]:
    decoding = DecodingConfig(max_source_length=16, max_extra_length=8, batch_size=2)
    config = dataclasses.replace(config, decoding=decoding)
    return _train_anywhere(config, workdir, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder where blocks run. It has the work directory of the guide's training block under
    all names that other blocks use.
    """
    folder = tmp_path_factory.mktemp("examples")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        # Few short sentences on one device: each length, width and device takes a compilation.
        patch.setattr(transformer_jax, "train", _train)
        patch.setattr("transformer_jax.decoding.devices.find_devices", lambda: jax.devices()[:1])
        imported = "transformer_jax.translation.translator.pretrained_workdir"
        patch.setattr(imported, lambda _: "runs/toy")  # instead of a download
        runpy.run_path(str(ROOT / "examples" / "number_names.py"))["main"](train=500)
        [training] = TRAINS
        training.run()
        for name in set(re.findall(r'"runs/(\w+)"', "".join(block.code for block in OTHERS))):
            (folder / "runs" / name).symlink_to("toy")
        yield folder


@pytest.mark.parametrize("block", OTHERS, ids=lambda block: f"{block.file.name}:{block.line}")
def test_block_prints_its_documented_output(block: Block, folder: Path) -> None:
    block.run()


def test_a_wrong_comment_after_a_print_fails() -> None:
    Block(ROOT, 1, "print(1 + 1)  # 2: a sum\nprint('any')\n").run()
    with pytest.raises(AssertionError):
        Block(ROOT, 1, "print(1 + 1)  # 3\n").run()
