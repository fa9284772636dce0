"""Number of CPU cores: affinity, and the quotas of containers."""

import math
import os
from pathlib import Path

import pytest

from transformer_jax.devices import machine


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


VERSION_2 = {"proc/self/cgroup": "0::/\n"}
NESTED = {"proc/self/cgroup": "0::/kubepods/pod1/main\n"}
VERSION_1 = {"proc/self/cgroup": "9:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n0::/\n"}
V1_FOLDER = "sys/fs/cgroup/cpu,cpuacct"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, math.inf),  # not Linux, or no /proc
        (VERSION_2, math.inf),
        (VERSION_2 | {"sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
        (VERSION_2 | {"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        (VERSION_2 | {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (NESTED | {"sys/fs/cgroup/kubepods/pod1/main/cpu.max": "50000 100000"}, 0.5),
        (
            NESTED
            | {
                "sys/fs/cgroup/kubepods/cpu.max": "400000 100000",
                "sys/fs/cgroup/kubepods/pod1/cpu.max": "300000 100000",
                "sys/fs/cgroup/kubepods/pod1/main/cpu.max": "max 100000",
            },
            3,
        ),
        (
            VERSION_1
            | {
                f"{V1_FOLDER}/cpu.cfs_quota_us": "300000\n",  # the container's own mount
                f"{V1_FOLDER}/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (
            VERSION_1
            | {
                f"{V1_FOLDER}/docker/1/cpu.cfs_quota_us": "-1\n",
                f"{V1_FOLDER}/docker/1/cpu.cfs_period_us": "100000\n",
            },
            math.inf,
        ),
    ],
)
def test_the_quota_of_a_container(files: dict[str, str], quota: float, tmp_path: Path) -> None:
    assert machine.cpu_quota(written(tmp_path, files)) == quota


@pytest.mark.parametrize(("quota", "cores"), [(math.inf, 8), (9, 8), (2, 2), (1.5, 2), (0.1, 1)])
def test_the_number_of_cores(quota: float, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    assert machine.num_cores() == cores
