"""The command that measures everything on an accelerator, at toy size on a CPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import accelerator, accelerator_parts
from benchmarks.accelerator import Part


def run(monkeypatch: pytest.MonkeyPatch, output: Path, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["accelerator", "--output", str(output), *flags])
    return accelerator.main()


def test_every_part_fills_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But the speeds' and the warm recipe's, whose programs have tests of their own or ran here."""
    names = ["peaks", "multi30k", "resume", "profile", "compile_warm"]
    assert run(monkeypatch, tmp_path, "--toy", "--parts", *names) == 0
    table = (tmp_path / "results.md").read_text()
    assert capsys.readouterr().out.strip() == table.strip()
    assert "CPU cores" in table.splitlines()[0]
    for what in (
        "bfloat16 products of 128 x 128",
        "configs/demo.py from nothing to its test BLEU, cold cache",
        "| resumed at step 2 of 4 | the same bits |",
        "kernels of a tiny step, all",
        "compiling the tiny step again",
    ):
        assert what in table
    states = json.loads((tmp_path / "parts.json").read_text())
    assert {name: state["outcome"] for name, state in states.items()} == dict.fromkeys(
        names, "done"
    )
    [recipe] = json.loads((tmp_path / "multi30k.json").read_text())["runs"]
    assert recipe["steps"] == 4 and len(recipe["dev_bleu"]) == 2
    assert 0 < recipe["first_step_seconds"] < recipe["first_evaluation_seconds"] < recipe["seconds"]


SLEEPER = """
import pathlib, subprocess, sys, time
file = sys.argv[sys.argv.index("--output") + 1]
child = f"import time, pathlib; time.sleep(2); pathlib.Path({file + '.child'!r}).touch()"
subprocess.Popen([sys.executable, "-c", child])
time.sleep(60)
"""
PARTS = {
    "peaks": ("import sys, pathlib\npathlib.Path(sys.argv[-1]).write_text('{}')\n", 9),
    "slow": (SLEEPER, 1.5),
    "broken": ("raise SystemExit('error: no luck')\n", 9),
    "long": ("", 9),
}


def test_a_part_that_fails_is_told_and_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that does not end, with all that it started, and one for which no time is left."""
    parts = {}
    for name, (code, limit) in PARTS.items():
        (tmp_path / f"{name}.py").write_text(code)
        seconds = 1000 if name == "long" else 0
        rows: Any = lambda found: iter([("a row", "7", "")])  # noqa: E731
        parts[name] = Part(f"what {name} measures", name, "", "", seconds, limit, rows)
    monkeypatch.setattr(accelerator, "PARTS", parts)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run(monkeypatch, tmp_path / "out", "--parts", *parts, "--minutes", "1") == 1
    table = capsys.readouterr().out
    assert "| what slow measures | failed: not done after 2 s | see slow.log |" in table
    assert "| what broken measures | failed: exit status 1 | see broken.log |" in table
    assert "| what long measures | left out: needs about 1000 s" in table
    assert "no luck" in (tmp_path / "out" / "broken.log").read_text()
    # a later call adds to what is there
    (tmp_path / "broken.py").write_text(PARTS["peaks"][0].replace("{}", '{"a": 1}'))
    assert run(monkeypatch, tmp_path / "out", "--parts", "broken") == 0
    table = capsys.readouterr().out
    assert "| a row | 7 |  |" in table and "what slow measures" in table
    time.sleep(2)
    assert not (tmp_path / "out" / "slow.json.child").exists()


def test_no_accelerator_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["accelerator_parts", "peaks", "--output", str(tmp_path / "peaks.json")]
    )
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    assert accelerator_parts.main() == 2
    said = capsys.readouterr().err
    assert "sees no accelerator here, only [" in said and "pip install '.[cuda]'" in said


def test_kernels_of_a_profile_are_given_to_parts() -> None:
    program = """\
HloModule jit_step

ENTRY %main (x: f32[8,10]) -> f32[8,10] {
  %x = f32[8,10]{1,0} parameter(0)
  %add.1 = f32[8,10]{1,0} add(%x, %x), metadata={op_name="jit(step)/jvp(loss)/add"}
  ROOT %sub.2 = f32[8,10]{1,0} subtract(%add.1, %x), metadata={op_name="jit(step)/embedding/sub"}
}
"""
    times = {"add.1": (0.5, 1), "sub_2": (0.25, 2), "memset": (0.125, 1)}
    found = accelerator_parts.by_part(program, times)
    assert {name: seconds for name, seconds in found.items() if seconds} == {
        "loss: rest": 0.5,
        "embedding": 0.25,
        "without a name in the program": 0.125,
    }


XPLANE = """
planes { name: "/host:CPU" lines { name: "Stream" events { metadata_id: 1 duration_ps: 7 } }
  event_metadata { key: 1 value { id: 1 name: "not the device" } } }
planes { name: "/device:GPU:0"
  lines { name: "Stream #14(Compute)"
    events { metadata_id: 1 duration_ps: 2000000 stats { metadata_id: 1 ref_value: 2 } }
    events { metadata_id: 1 offset_ps: 2000000 duration_ps: 1000000
      stats { metadata_id: 1 ref_value: 2 } }
    events { metadata_id: 2 offset_ps: 3000000 duration_ps: 500000 } }
  lines { name: "Launch Stats" events { metadata_id: 2 duration_ps: 9000000 } }
  event_metadata { key: 1 value { id: 1 name: "loop_add_fusion" } }
  event_metadata { key: 2 value { id: 2 name: "Memset" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "loop_add_fusion.3" } } }
"""


@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")  # JAX's, on Python 3.12
def test_kernels_are_read_from_a_profile(tmp_path: Path) -> None:
    """The device's streams alone, and by the operation where the profile names it."""
    file = tmp_path / "a.xplane.pb"
    file.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(XPLANE))
    assert accelerator_parts.kernel_times(file) == {
        "loop_add_fusion.3": (pytest.approx(3e-6), 2),
        "Memset": (pytest.approx(5e-7), 1),
    }
