"""The kernel's counters of memory, from trees of files made for the tests, and from this machine's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_gpuopt.telemetry.memory import CgroupMemory, MemoryFiles

GIB = 1 << 30


def tree(tmp_path: Path, cgroup: str, groups: dict[str, dict[str, str]], proc: dict[str, str] | None = None):
    """Where procfs and the cgroups are: files by folder, the root of the cgroups is ``""``."""
    for name, text in {"self/cgroup": cgroup, **(proc or {})}.items():
        (tmp_path / "proc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc" / name).write_text(text)
    (tmp_path / "cgroup").mkdir()
    for folder, contents in groups.items():
        (tmp_path / "cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (tmp_path / "cgroup" / folder / name).write_text(text)
    return MemoryFiles(tmp_path / "proc", tmp_path / "cgroup", tmp_path)


def v2(limit: int | str, current: int, peak: int = 0, cache: int = 0, **more: str) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{current}\n",
        "memory.peak": f"{peak}\n",
        "memory.stat": f"anon 5\nfile 7\ninactive_file {cache}\n",
        **{name.replace("_", "."): text for name, text in more.items()},
    }


def test_our_own_cgroup(tmp_path):
    group = v2(2 * GIB, GIB, GIB + 5, 77)
    found = tree(tmp_path, "0::/job\n", {"job": group}).cgroup()
    assert found == CgroupMemory(limit=2 * GIB, current=GIB, cache=77, peak=GIB + 5)


def test_the_parent_that_leaves_least_counts(tmp_path):
    groups = {"": v2("max", 9 * GIB), "pod": v2(3 * GIB, 2 * GIB, cache=GIB // 2), "pod/job": v2(2 * GIB, GIB // 4)}
    assert tree(tmp_path, "0::/pod/job\n", groups).cgroup().limit == 3 * GIB


def test_without_a_limit_our_own_figures_are_known(tmp_path):
    groups = {"": v2("max", 9 * GIB), "job": v2("max", GIB)}
    found = tree(tmp_path, "0::/job\n", groups).cgroup()
    assert (found.limit, found.current) == (None, GIB)


def test_version_1_has_a_huge_number_where_there_is_no_limit(tmp_path):
    def v1(limit):
        return {
            "memory.limit_in_bytes": f"{limit}\n",
            "memory.usage_in_bytes": "500\n",
            "memory.max_usage_in_bytes": "600\n",
            "memory.stat": "cache 9\ntotal_inactive_file 40\n",
        }

    groups = {"memory": v1(9223372036854771712), "memory/job": v1(GIB)}
    found = tree(tmp_path, "4:memory:/job\n2:cpu:/x\n", groups).cgroup()
    assert found == CgroupMemory(limit=GIB, current=500, cache=40, peak=600)
    (tmp_path / "other").mkdir()
    groups = {"memory": v1(9223372036854771712)}
    assert tree(tmp_path / "other", "4:memory:/\n", groups).cgroup().limit is None


@pytest.mark.parametrize(
    ("groups", "kills"),
    [
        ({"job": {"memory.events.local": "oom 9\noom_kill 2\n", "memory.events": "oom_kill 7\n"}}, 2),
        ({"job": {"memory.events": "low 0\noom_kill 7\n"}}, 7),
        ({"": {"memory.events": "oom_kill 7\n"}}, 7),  # in a container only the root is there
        ({"job": {"memory.events": "nonsense"}}, None),
        ({"job": {}}, None),
    ],
    ids=["local", "all-below", "container", "broken", "none"],
)
def test_processes_that_the_kernel_has_ended(groups, kills, tmp_path):
    assert tree(tmp_path, "0::/job\n", groups).oom_kills() == kills


def test_version_1_counts_them_as_well(tmp_path):
    groups = {"memory/job": {"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"}}
    assert tree(tmp_path, "4:memory:/job\n", groups).oom_kills() == 3


def test_without_any_of_the_files_nothing_is_known(tmp_path):
    nothing = MemoryFiles(tmp_path / "proc", tmp_path / "cgroup", tmp_path / "shm")
    assert nothing.cgroup() == CgroupMemory()
    assert (nothing.oom_kills(), nothing.available(), nothing.shared()) == (None, None, (None, None))
    assert (nothing.process("self"), nothing.process(1), nothing.descriptors()[0]) == (None, None, None)


def test_what_is_available_on_the_machine(tmp_path):
    found = tree(tmp_path, "0::/\n", {}, {"meminfo": "MemTotal: 99 kB\nMemAvailable:   12 kB\n"})
    assert found.available() == 12 * 1024
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable: many\n")
    assert found.available() is None


def test_a_process_by_its_stat(tmp_path):
    stat = "7 (a) b) c) S 1 2 3 4 5 6 700 8 9 10 100 50 13 14 15 16 17 18 4242 20 3 22"
    main = "7 (a) S 1 2 3 4 5 6 7 8 9 10 30 20 13 14 15 16 17 18 4242 20 3 22"
    found = tree(tmp_path, "0::/\n", {}, {"7/stat": stat, "7/task/7/stat": main}).process(7)
    assert found is not None
    page, ticks = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
    assert (found.start_ticks, found.faults, found.rss, found.dead) == (4242, 700, 3 * page, False)
    assert found.cpu_s == 50 / ticks  # of the main thread


def test_this_machine_says_something():
    found = MemoryFiles()
    own = found.process("self")
    assert own is not None
    assert own.rss > 1 << 20
    free, size = found.shared()
    assert free is not None
    assert size is not None
    assert size >= free
    assert found.available()
    assert found.descriptors()[0]


EAT = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
from lightning_gpuopt.telemetry.memory import MemoryFiles
files = MemoryFiles()
print(files.oom_kills(), files.cgroup().limit, flush=True)
child = os.fork()
if not child:
    kept = []
    while True:
        kept.append(bytearray(1 << 20))
os.waitpid(child, 0)
print(files.oom_kills(), flush=True)
"""


def test_a_real_kill_for_want_of_memory_is_counted():
    group = Path("/sys/fs/cgroup/memory") / f"gpuopt-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no memory cgroup (version 1) can be made here")
    try:
        (group / "memory.limit_in_bytes").write_text(str(200 << 20))
        out = subprocess.run([sys.executable, "-c", EAT, str(group)], stdout=subprocess.PIPE, text=True, check=True)
        before, limit, after = out.stdout.split()
        assert (int(limit), int(after) - int(before)) == (200 << 20, 1)
    finally:
        group.rmdir()
