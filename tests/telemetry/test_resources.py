"""What a machine and its containers still allow, from files of cgroups and of /proc, and of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lightning_gpuopt.telemetry.resources import available_memory, free_shared_memory, processes_left, worker_memory

MIB = 1 << 20
GIB = 1 << 30


def test_processes_that_a_cgroup_and_its_parents_allow(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/job/step\n")
    (root / "job/step").mkdir(parents=True)
    assert processes_left(root, proc) is None
    for folder, most, now in (("job/step", "max", "7"), ("job", "100", "30"), (".", "500", "480")):
        (root / folder / "pids.max").write_text(f"{most}\n")
        (root / folder / "pids.current").write_text(f"{now}\n")
    assert processes_left(root, proc) == 20
    (root / "pids.current").write_text("600\n")
    assert processes_left(root, proc) == 0


FILES = """
import os, resource, sys
from lightning_gpuopt.telemetry.resources import files_left
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))
opened = len(os.listdir("/proc/self/fd")) - 1
print(256 - files_left() - opened, resource.getrlimit(resource.RLIMIT_NOFILE))
print(1024 - files_left(300) - opened, resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.matrix
def test_the_soft_limit_of_files_is_raised_where_more_are_wanted() -> None:
    run = subprocess.run([sys.executable, "-c", FILES], capture_output=True, text=True, check=True)
    first, second = run.stdout.splitlines()
    assert first == "1 (256, 1024)"  # the folder that is listed is open, too
    assert second == "1 (1024, 1024)"


def cgroup(tmp_path: Path, line: str, files: dict[str, str]) -> dict[str, Path]:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(line)
    (tmp_path / "cgroup").mkdir()
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return {"cgroup_root": tmp_path / "cgroup", "proc": tmp_path / "proc"}


@pytest.mark.parametrize(
    ("line", "files", "left"),
    [
        (
            "0::/job",
            {"job/memory.max": f"{9 * MIB}\n", "job/memory.current": f"{4 * MIB}\n", "job/memory.stat": "anon 1\n"},
            5 * MIB,
        ),
        (  # page cache that can go counts as free; the parent is narrower
            "0::/a/b",
            {
                "a/b/memory.max": "max\n",
                "a/memory.max": f"{8 * MIB}\n",
                "a/memory.current": f"{7 * MIB}\n",
                "a/memory.stat": f"inactive_file {2 * MIB}\n",
            },
            3 * MIB,
        ),
        (
            "4:memory:/job",
            {
                "memory/job/memory.limit_in_bytes": f"{6 * MIB}\n",
                "memory/job/memory.usage_in_bytes": f"{2 * MIB}\n",
                "memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {MIB}\n",
            },
            5 * MIB,
        ),
        (
            "0::/",
            {"memory.max": f"{MIB}\n", "memory.current": f"{2 * MIB}\n", "memory.stat": ""},
            0,
        ),
    ],
)
def test_a_cgroups_limit_is_what_is_available(tmp_path: Path, line: str, files: dict[str, str], left: int) -> None:
    assert available_memory(**cgroup(tmp_path, line, files)) == left


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/", {"memory.max": "max\n"}),
        ("0::/", {"memory.max": "nonsense\n"}),
        ("0::/gone", {}),
        ("2:cpu:/", {"memory/memory.limit_in_bytes": "1\n"}),
        (
            "2:memory:/",
            {"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n", "memory/memory.usage_in_bytes": "1\n"},
        ),
    ],
)
def test_without_a_limit_the_machines_memory_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, files: dict[str, str]
) -> None:
    class Memory:
        available = 123 * GIB

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    assert available_memory(**cgroup(tmp_path, line, files)) == 123 * GIB
    assert available_memory(proc=tmp_path / "nowhere") == 123 * GIB


def test_a_processs_memory_is_read(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/smaps_rollup").write_text(
        "00-ff ---p 0 00:00 0 [rollup]\nRss: 900 kB\nPrivate_Clean: 4 kB\nPrivate_Dirty:     512 kB\nSwap: 8 kB\n"
    )
    assert worker_memory(7, tmp_path) == 520 * 1024
    assert worker_memory(8, tmp_path) is None
    assert (worker_memory(os.getpid()) or 0) > MIB


def test_the_room_for_shared_memory_is_its_file_systems(tmp_path: Path) -> None:
    assert free_shared_memory(tmp_path / "nowhere") is None
    assert (free_shared_memory(tmp_path) or 0) > 0
