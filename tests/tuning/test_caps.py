from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from lightning_gpuopt.tuning.caps import (
    Cap,
    Room,
    available_memory,
    free_shared_memory,
    prefetch_that_fits,
    room,
    worker_cap,
    worker_memory,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("cpus", "arguments", "cap"),
    [
        (2.0, {}, Cap(16, "max_num_workers")),
        (64.0, {}, Cap(32, "max_num_workers")),
        (0.5, {}, Cap(4, "max_num_workers")),
        (0.1, {}, Cap(1, "max_num_workers")),
        (4.0, {"local_world_size": 4}, Cap(8, "max_num_workers")),
        (4.0, {"max_num_workers": 3, "local_world_size": 4}, Cap(3, "max_num_workers")),
        (4.0, {"max_num_workers": 100}, Cap(100, "max_num_workers")),
        # half of 8 GiB
        (4.0, {"worker_bytes": GIB}, Cap(4, "memory")),
        (4.0, {"worker_bytes": GIB, "local_world_size": 2}, Cap(2, "memory")),
        (4.0, {"worker_bytes": 16 * GIB}, Cap(1, "memory")),
        # four fifths of 1 GiB, less a batch with the consumer
        (4.0, {"batch_bytes": 0.04 * GIB}, Cap(9, "shared_memory")),
        (4.0, {"batch_bytes": 0.04 * GIB, "prefetch_factor": 4}, Cap(4, "shared_memory")),
        (4.0, {"batch_bytes": 0.04 * GIB, "local_world_size": 2}, Cap(4, "shared_memory")),
        (4.0, {"batch_bytes": GIB, "worker_bytes": GIB}, Cap(1, "shared_memory")),
        # what each prepares ahead is memory, too
        (4.0, {"batch_bytes": 0.25 * GIB, "worker_bytes": GIB, "prefetch_factor": 1}, Cap(2, "shared_memory")),
        (4.0, {"batch_bytes": 0.04 * GIB, "worker_bytes": 0.92 * GIB}, Cap(4, "memory")),
    ],
)
def test_the_narrowest_of_cpus_memory_and_shared_memory_is_the_cap(
    cpus: float, arguments: dict[str, int], cap: Cap
) -> None:
    assert worker_cap(Room(cpus, 8 * GIB, GIB), **arguments) == cap  # type: ignore[arg-type]


def test_what_could_not_be_read_limits_nothing() -> None:
    assert worker_cap(Room(2.0), worker_bytes=GIB, batch_bytes=GIB) == Cap(16, "max_num_workers")
    assert worker_cap(Room(2.0, 8 * GIB, GIB)) == Cap(16, "max_num_workers")


def test_the_queue_is_no_deeper_than_fits() -> None:
    assert prefetch_that_fits(Room(2.0, None, GIB), workers=4, batch_bytes=0.04 * GIB) == 4
    assert prefetch_that_fits(Room(2.0, None, GIB), workers=4, batch_bytes=GIB) == 1
    assert prefetch_that_fits(Room(2.0, None, GIB), workers=4, batch_bytes=0) is None
    assert prefetch_that_fits(Room(2.0), workers=4, batch_bytes=1) is None
    # of memory, a quarter
    assert prefetch_that_fits(Room(2.0, 2 * GIB, GIB), workers=4, batch_bytes=0.04 * GIB) == 2


def cgroup(tmp_path: Path, line: str, files: dict[str, str]) -> dict[str, Path]:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(line)
    (tmp_path / "cgroup").mkdir()
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return {"cgroup_root": tmp_path / "cgroup", "proc": tmp_path / "proc"}


MIB = 1 << 20


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


def test_this_machine_has_room(tmp_path: Path) -> None:
    has = room()
    assert 0 < has.cpus <= (os.cpu_count() or 1)
    assert has.memory_bytes is not None
    assert has.memory_bytes > MIB
    assert free_shared_memory(tmp_path / "nowhere") is None
    assert (free_shared_memory(tmp_path) or 0) > 0


def test_a_processs_memory_is_read(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/smaps_rollup").write_text(
        "00-ff ---p 0 00:00 0 [rollup]\nRss: 900 kB\nPrivate_Clean: 4 kB\nPrivate_Dirty:     512 kB\nSwap: 8 kB\n"
    )
    assert worker_memory(7, tmp_path) == 520 * 1024
    assert worker_memory(8, tmp_path) is None
    assert (worker_memory(os.getpid()) or 0) > MIB
