"""The recipes for clusters parse, name only flags that exist, and do what they say as far as can be
seen without a cluster.
"""

import ast
import dataclasses
import os
import re
import signal
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from transformer_jax.config import Config, Processes
from transformer_jax.config_io import flatten

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "launch"
SAVED = 128 + signal.SIGTERM  # the status of train.py after SIGTERM


def flags_of_train() -> set[str]:
    """The program's own fields, and those of the config."""
    [arguments] = [
        node
        for node in ast.parse(
            (ROOT / "transformer_jax" / "training" / "__main__.py").read_text()
        ).body
        if isinstance(node, ast.ClassDef)
    ]
    own = {
        node.target.id
        for node in arguments.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return (
        (own - {"settings", "processes"})
        | set(flatten(Config()))
        | {field.name for field in dataclasses.fields(Processes)}
    )


@pytest.mark.parametrize(
    "path",
    [LAUNCH / "slurm.sh", LAUNCH / "jobset.yaml", ROOT / "docs" / "clusters.md"],
    ids=lambda p: p.name,
)
def test_flags_exist(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    commands = re.findall(r"(?:train\.py|slurm\.sh) ([^`\n]*)", text)
    commands += re.findall(r"^ +- (--.*)", text, re.MULTILINE)  # arguments in YAML
    commands += re.findall(r"(--coordinator-address\S* .*)", text)
    named = {flag for command in commands for flag in re.findall(r"--([a-z][\w.-]*)", command)}
    unknown = {
        flag
        for flag in named
        if flag.replace("-", "_").replace(".no_", ".") not in flags_of_train()
    }
    assert {"distributed", "workdir"} <= named and not unknown


def job_set() -> tuple[dict[str, Any], dict[str, Any]]:
    """All resources by kind, and the pod's specification."""
    resources = {
        each["kind"]: each for each in yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text())
    }
    [job] = resources["JobSet"]["spec"]["replicatedJobs"]
    return resources, job["template"]["spec"]["template"]["spec"]


def test_job_set_has_what_jax_asks_for() -> None:
    resources, pod = job_set()
    [job] = resources["JobSet"]["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (
        job["replicas"] == 1
        and spec["completionMode"] == "Indexed"
        and spec["parallelism"] == spec["completions"]
    )
    # The account that pods run under may read pods and jobs.
    assert pod["serviceAccountName"] == resources["ServiceAccount"]["metadata"]["name"]
    assert resources["RoleBinding"]["subjects"][0]["name"] == pod["serviceAccountName"]
    assert resources["RoleBinding"]["roleRef"]["name"] == resources["Role"]["metadata"]["name"]
    allowed = {
        (resource, verb)
        for rule in resources["Role"]["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {("pods", "list"), ("jobs", "get")} <= allowed
    assert "jax[k8s]" in (LAUNCH / "Dockerfile").read_text()


def test_job_set_restarts_what_was_saved() -> None:
    resources, pod = job_set()
    [job] = resources["JobSet"]["spec"]["replicatedJobs"]
    [container] = pod["containers"]
    rules = job["template"]["spec"]["podFailurePolicy"]["rules"]
    [codes] = [rule["onExitCodes"] for rule in rules if "onExitCodes" in rule]
    assert (
        codes["values"] == [SAVED]
        and codes["containerName"] == container["name"]
        and pod["restartPolicy"] == "Never"
    )
    [rule] = resources["JobSet"]["spec"]["failurePolicy"]["rules"]
    assert (
        rule["onJobFailureReasons"] == ["PodFailurePolicy"]
        and rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    )
    # The work directory outlives the pods, and the rows divide over the GPUs.
    arguments = dict(x.removeprefix("--").split("=") for x in container["args"] if "=" in x)
    assert any(
        arguments["workdir"].startswith(mount["mountPath"] + "/")
        for mount in container["volumeMounts"]
    )
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    gpus = (
        job["template"]["spec"]["parallelism"] * container["resources"]["limits"]["nvidia.com/gpu"]
    )
    assert int(arguments["batch.row-multiple"]) % gpus == 0


@pytest.mark.parametrize("status", [0, 1, SAVED])
def test_slurm_job_goes_back_into_the_queue_when_it_was_saved(tmp_path: Path, status: int) -> None:
    for name, body in {
        "srun": f'echo "$@" > srun.txt; exit {status}',
        "scontrol": 'echo "$@" > scontrol.txt',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    run = subprocess.run(
        ["bash", LAUNCH / "slurm.sh", "--workdir", "a folder"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"},
    )
    assert run.returncode == status
    assert (
        (tmp_path / "srun.txt")
        .read_text()
        .endswith(".venv/bin/python train.py --distributed --workdir a folder\n")
    )
    queued = tmp_path / "scontrol.txt"
    assert (queued.read_text() == "requeue 17\n") if status == SAVED else not queued.exists()


def test_slurm_script_asks_for_a_signal_and_a_process_for_each_gpu() -> None:
    options = dict(
        re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", (LAUNCH / "slurm.sh").read_text(), re.MULTILINE)
    )
    assert options["ntasks-per-node"] == options["gpus-per-node"] and "requeue" in options
    assert re.fullmatch(r"TERM@\d+", options["signal"])  # without "B:" it goes to the processes


def test_image_is_built_from_files_that_exist() -> None:
    lines = (LAUNCH / "Dockerfile").read_text().splitlines()
    instructions = [line.split() for line in lines if line and not line.startswith("#")]
    assert instructions[0] == ["FROM", "python:3.11-slim"]
    assert {name for name, *_ in instructions} == {
        "FROM",
        "ARG",
        "WORKDIR",
        "COPY",
        "RUN",
        "ENTRYPOINT",
        "CMD",
    }
    for name, *words in instructions:
        if name == "COPY":
            assert all((ROOT / source).exists() for source in words[:-1])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert ["ARG", "EXTRA=cuda"] in instructions and {"cuda", "tpu"} <= set(extras)
