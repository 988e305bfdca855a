from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch.multiprocessing

from lightning_gpuopt.tuning.caps import (
    Cap,
    Room,
    available_memory,
    files_of,
    free_shared_memory,
    prefetch_that_fits,
    processes_left,
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


@pytest.mark.parametrize(
    ("room", "arguments", "cap"),
    [
        # 64 for others, a batch with the consumer; each worker 4 and 2 batches
        (Room(2.0, files=1000), {"batch_tensors": 20}, Cap(16, "max_num_workers")),
        (Room(2.0, files=1000), {"batch_tensors": 50}, Cap(8, "shared_memory")),
        (Room(2.0, files=1000), {"batch_tensors": 50, "prefetch_factor": 4}, Cap(4, "shared_memory")),
        (Room(2.0, files=100), {"batch_tensors": 50}, Cap(1, "shared_memory")),
        (Room(2.0, files=100), {}, Cap(9, "shared_memory")),
        # 32 for others, 4 for each worker
        (Room(2.0, processes=72), {}, Cap(10, "max_num_workers")),
        (Room(2.0, processes=200), {"local_world_size": 4}, Cap(4, "max_num_workers")),
        (Room(2.0, processes=0), {}, Cap(1, "max_num_workers")),
    ],
)
def test_files_and_processes_are_limits_too(room: Room, arguments: dict[str, int], cap: Cap) -> None:
    assert worker_cap(room, **arguments) == cap  # type: ignore[arg-type]


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
from lightning_gpuopt.tuning.caps import files_left
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


def test_each_tensor_of_a_batch_is_a_file() -> None:
    class Sample:
        def __init__(self) -> None:
            self.image, self.boxes = torch.zeros(3), [torch.zeros(2)] * 3

    batch = {"images": torch.zeros(4), "boxes": [torch.zeros(2)] * 300, "names": ["a", "b"], "samples": [Sample()] * 2}
    assert files_of(batch) == 1 + 300 + 8
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        assert files_of(batch) == 0
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


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


def test_where_descriptors_run_out_the_other_sharing_strategy_is_advised() -> None:
    cap = worker_cap(Room(4.0, files=200), batch_tensors=20)
    assert cap == Cap(2, "shared_memory")
    assert "torch.multiprocessing.set_sharing_strategy('file_system')" in str(cap)
    assert str(worker_cap(Room(4.0, files=200))) == "limited by max_num_workers"
    assert str(worker_cap(Room(4.0, shared_memory_bytes=100), batch_bytes=50.0)) == "limited by shared_memory"
