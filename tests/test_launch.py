"""Launch files for clusters and containers: valid, consistent, with existing flags."""

import ast
import dataclasses
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from transformer_jax.cli import parse_flags
from transformer_jax.serving import flags as serving
from transformer_jax.settings.config import Config, Processes
from transformer_jax.settings.config_files import flatten

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "launch"
SAVED = 128 + signal.SIGTERM  # exit status of train.py after SIGTERM
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
INSTRUCTIONS = {
    *("FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "VOLUME", "USER", "EXPOSE", "HEALTHCHECK"),
    *("STOPSIGNAL", "ENTRYPOINT", "CMD"),
}


def flags_of_train() -> set[str]:
    """The program's own flags and all config fields."""
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
    """All resources by kind, and the pod specification."""
    resources = {
        each["kind"]: each for each in yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text())
    }
    [job] = resources["JobSet"]["spec"]["replicatedJobs"]
    return resources, job["template"]["spec"]["template"]["spec"]


def test_job_set_meets_the_requirements_of_jax() -> None:
    resources, pod = job_set()
    [job] = resources["JobSet"]["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (
        job["replicas"] == 1
        and spec["completionMode"] == "Indexed"
        and spec["parallelism"] == spec["completions"]
    )
    # the pods' service account can read pods and jobs
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


def test_job_set_restarts_after_a_save() -> None:
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
    # the work directory is on a volume, and batch rows are a multiple of the number of GPUs
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
def test_slurm_job_is_requeued_after_a_save(tmp_path: Path, status: int) -> None:
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


def test_slurm_script_requests_a_signal_and_one_process_per_gpu() -> None:
    options = dict(
        re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", (LAUNCH / "slurm.sh").read_text(), re.MULTILINE)
    )
    assert options["ntasks-per-node"] == options["gpus-per-node"] and "requeue" in options
    assert re.fullmatch(r"TERM@\d+", options["signal"])  # without "B:", it is sent to the processes


def instructions(recipe: str) -> dict[str, list[str]]:
    """A Dockerfile's arguments, by instruction."""
    text = re.sub(r"^#.*\n", "", (LAUNCH / recipe).read_text(), flags=re.MULTILINE)
    found: dict[str, list[str]] = {}
    for line in filter(None, text.replace("\\\n", "").split("\n")):
        name, rest = line.split(" ", 1)
        found.setdefault(name, []).append(rest)
    return found


@pytest.mark.parametrize("recipe", ["Dockerfile", "Dockerfile.serve"])
def test_images_are_built_from_files_that_exist(recipe: str) -> None:
    found = instructions(recipe)
    assert found.keys() <= INSTRUCTIONS and found["FROM"] == ["python:3.11-slim"]
    sources = [source for each in found["COPY"] for source in each.split()[:-1]]
    assert "transformer_jax" in sources and all((ROOT / source).exists() for source in sources)
    [(name, default)] = [each.split("=") for each in found["ARG"]]
    assert {*default.split(","), "cuda", "tpu"} <= set(EXTRAS)
    assert f"${{{name}}}]" in found["RUN"][0]


def served(flags: list[str]) -> tuple[serving.Arguments, str]:
    """Parsed flags of transformer-serve, and the path of its model."""
    arguments = parse_flags(serving.Arguments, flags)
    [model] = arguments.workdir
    return arguments, model


def test_image_of_the_service() -> None:
    found = instructions("Dockerfile.serve")
    program, *flags = json.loads(found["ENTRYPOINT"][0]) + json.loads(found["CMD"][0])
    assert program in PROJECT["scripts"]
    arguments, model = served(flags)
    assert arguments.host == "0.0.0.0" and found["EXPOSE"] == [str(arguments.port)]
    assert found["STOPSIGNAL"] == ["SIGTERM"] and int(found["USER"][0].split(":")[0]) > 0
    # the volume is for compiled functions, and belongs to the user
    [volume] = found["VOLUME"]
    assert found["ENV"] == [f"XDG_CACHE_HOME={volume}"] and found["RUN"][-1].endswith(volume)
    page = (ROOT / "docs" / "deployment.md").read_text()
    assert f":{model}:ro" in page and f":{volume} " in page
    [waiting] = re.findall(r"--stop-timeout (\d+)", page)
    assert int(waiting) >= arguments.limits.timeout + 5  # longer than a request can take


def test_health_check_of_the_image() -> None:
    """The service responds with 503 until it has compiled its functions."""
    [check] = instructions("Dockerfile.serve")["HEALTHCHECK"]
    flags, command = check.split(" CMD ")
    assert "--start-period=" in flags
    python, *rest, code = json.loads(command)
    assert (python, rest) == ("python", ["-c"]) and "/health" in code
    statuses = [503, 200]

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses.pop(0) if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        here = code.replace(" 8000,", f" {server.server_port},")
        ends = [subprocess.run([sys.executable, "-c", here]).returncode for _ in range(2)]
        server.shutdown()
    assert here != code and ends == [1, 0]


def test_deployment_of_the_service() -> None:
    resources = {
        each["kind"]: each for each in yaml.safe_load_all((LAUNCH / "serve.yaml").read_text())
    }
    template = resources["Deployment"]["spec"]["template"]
    pod = template["spec"]
    [container] = pod["containers"]
    image = instructions("Dockerfile.serve")
    arguments, model = served(json.loads(image["ENTRYPOINT"][0])[1:] + container["args"])

    # the deployment, the service, Prometheus and the probes find the pods
    labels = template["metadata"]["labels"].items()
    assert resources["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels
    assert resources["Service"]["spec"]["selector"].items() <= labels
    [port] = container["ports"]
    assert port["containerPort"] == arguments.port
    assert [each["targetPort"] for each in resources["Service"]["spec"]["ports"]] == [port["name"]]
    notes = template["metadata"]["annotations"]
    assert notes["prometheus.io/scrape"] == "true"
    assert notes["prometheus.io/port"] == str(arguments.port)
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert probes == [{"path": "/health", "port": port["name"]}] * 3
    app = (ROOT / "transformer_jax" / "serving" / "app.py").read_text()
    assert all(f'"{path}"' in app for path in ("/health", notes["prometheus.io/path"]))

    # enough time to finish requests; mounted volumes; permissions
    [_, pause] = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] >= int(pause) + arguments.limits.timeout + 5
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    assert {each["name"] for each in mounts.values()} == {each["name"] for each in pod["volumes"]}
    assert mounts.keys() == {model, *image["VOLUME"], "/tmp"} and mounts[model]["readOnly"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert str(pod["securityContext"]["runAsUser"]) == image["USER"][0].split(":")[0]
