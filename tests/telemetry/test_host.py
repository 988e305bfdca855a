"""Usable CPUs and worker activity, read from files laid out as the kernel lays them out, and from real processes."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt.compat.dataloader import worker_pids
from lightning_gpuopt.telemetry.host import HostWatch, held_by_this_process, usable_cpus, wait_after
from tests.helpers import wait_for

CPUS = sorted(os.sched_getaffinity(0))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class TestUsableCpus:
    def test_without_a_quota_it_is_the_affinity(self, tmp_path: Path) -> None:
        write(tmp_path / "proc/self/cgroup", "0::/\n")
        write(tmp_path / "cgroup/cpu.max", "max 100000\n")
        assert usable_cpus(tmp_path / "cgroup", tmp_path / "proc") == len(CPUS)

    def test_a_v2_quota_can_be_a_fraction(self, tmp_path: Path) -> None:
        write(tmp_path / "proc/self/cgroup", "0::/job/step\n")
        write(tmp_path / "cgroup/job/step/cpu.max", "max 100000\n")
        write(tmp_path / "cgroup/job/cpu.max", "50000 100000\n")
        assert usable_cpus(tmp_path / "cgroup", tmp_path / "proc") == 0.5

    def test_a_v1_quota_is_read_from_the_cpu_controller(self, tmp_path: Path) -> None:
        write(tmp_path / "proc/self/cgroup", "5:memory:/job\n4:cpu,cpuacct:/job\n")
        write(tmp_path / "cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "25000\n")
        write(tmp_path / "cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n")
        assert usable_cpus(tmp_path / "cgroup", tmp_path / "proc") == 0.25

    def test_a_v1_group_without_a_quota_says_minus_one(self, tmp_path: Path) -> None:
        write(tmp_path / "proc/self/cgroup", "4:cpu,cpuacct:/\n")
        write(tmp_path / "cgroup/cpu/cpu.cfs_quota_us", "-1\n")
        write(tmp_path / "cgroup/cpu/cpu.cfs_period_us", "100000\n")
        assert usable_cpus(tmp_path / "cgroup", tmp_path / "proc") == len(CPUS)

    def test_the_hosts_path_in_a_container_falls_back_to_the_mounted_group(self, tmp_path: Path) -> None:
        write(tmp_path / "proc/self/cgroup", "0::/docker/0123abcd\n")
        write(tmp_path / "cgroup/cpu.max", "150000 100000\n")
        assert usable_cpus(tmp_path / "cgroup", tmp_path / "proc") == min(1.5, len(CPUS))

    def test_files_that_cannot_be_read_are_no_quota(self, tmp_path: Path) -> None:
        assert usable_cpus(tmp_path / "cgroup", tmp_path / "proc") == len(CPUS)
        write(tmp_path / "proc/self/cgroup", "0::/\n")
        write(tmp_path / "cgroup/cpu.max", "garbage\n")
        assert usable_cpus(tmp_path / "cgroup", tmp_path / "proc") == len(CPUS)


class Proc:
    """A ``/proc`` of our own, and the clock that goes with it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now_s = 100.0
        self.idle(0.0)

    def idle(self, seconds: float) -> None:
        ticks = round(seconds * os.sysconf("SC_CLK_TCK"))
        lines = [f"cpu  1 1 1 {ticks} 0 0 0 0 0 0", f"cpu{CPUS[0]} 1 1 1 {ticks} 0 0 0 0 0 0", "intr 1"]
        write(self.root / "stat", "\n".join(lines) + "\n")

    def process(self, pid: int, *threads: tuple[float, float]) -> None:
        for number, (ran_s, queued_s) in enumerate(threads):
            write(self.root / f"{pid}/task/{pid + number}/schedstat", f"{ran_s * 1e9:.0f} {queued_s * 1e9:.0f} 7\n")


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def watch_of(proc: Proc, local_ranks: int = 1) -> HostWatch:
    return HostWatch(
        proc=proc.root, cgroup_root=proc.root / "cgroup", clock=lambda: proc.now_s, local_ranks=local_ranks
    )


@pytest.fixture
def watch(proc: Proc) -> HostWatch:
    return watch_of(proc)


def test_shares_are_means_over_workers_and_their_threads(proc: Proc, watch: HostWatch) -> None:
    proc.process(11, (1.0, 0.0), (1.0, 0.0))
    proc.process(12, (5.0, 5.0))
    watch.workers([11, 12])
    watch.read()
    proc.now_s += 10
    proc.process(11, (4.0, 1.0), (3.0, 0.0))
    proc.process(12, (6.0, 8.0))
    proc.idle(2.5)
    watch.read()
    activity = watch.activity()
    assert activity.seconds == 20.0
    assert activity.worker_cpu == pytest.approx(6 / 20)
    assert activity.worker_queued == pytest.approx(4 / 20)
    assert activity.free_cpus == pytest.approx(0.25)


def test_threads_that_are_busy_are_counted_and_idle_ones_of_a_pool_are_not(proc: Proc, watch: HostWatch) -> None:
    idle = [(5.0, 5.0)] * 6
    proc.process(11, (1.0, 0.0), (1.0, 0.0), (1.0, 0.0), *idle)
    proc.process(12, (1.0, 0.0), (1.0, 0.0))
    watch.workers([11, 12])
    watch.read()
    proc.now_s += 10
    proc.process(11, (9.0, 2.0), (3.0, 4.0), (2.0, 0.0), *idle)  # 10 s, 6 s and 1 s
    proc.process(12, (8.0, 0.0), (3.4, 0.0))  # 7 s and 2.4 s
    watch.read()
    activity = watch.activity()
    assert activity.worker_threads == (2 + 1) / 2
    assert activity.worker_runnable == pytest.approx((10 + 6 + 1 + 7 + 2.4) / 20)
    assert activity.worker_cpus == pytest.approx((8 + 2 + 1 + 7 + 2.4) / 20)


class ComputesInThreads(Dataset[int]):
    """Each sample is made by four threads, none of which needs the interpreter."""

    def __init__(self, enough: Any) -> None:
        self.enough = enough

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        data = bytes(1 << 20)

        def compute() -> None:
            while not self.enough.is_set():
                hashlib.sha256(data)

        threads = [threading.Thread(target=compute) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return index


@pytest.mark.matrix
def test_a_real_worker_s_threads_are_counted() -> None:
    enough = multiprocessing.Event()
    iterator: Any = iter(DataLoader(ComputesInThreads(enough), batch_size=1, num_workers=1))
    watch = HostWatch()
    try:
        watch.workers(worker_pids([iterator]))
        watch.start()
        wait_for(lambda: (watch.activity().worker_threads or 0) >= 3)
        assert (watch.activity().worker_runnable or 0) > 1.5  # however many CPUs there are: who waits for one counts
    finally:
        watch.stop()
        enough.set()
    assert [int(batch[0]) for batch in iterator] == [0, 1]


def test_a_worker_that_ends_takes_no_time_along(proc: Proc, watch: HostWatch) -> None:
    proc.process(11, (1.0, 0.0))
    watch.workers([11, 4_000_000])
    watch.read()
    proc.now_s += 1
    watch.workers([13])
    proc.process(13, (50.0, 0.0))
    watch.read()
    assert watch.activity().seconds == 0.0
    assert watch.activity().worker_cpu is None
    proc.now_s += 1
    proc.process(13, (50.5, 0.0))
    watch.read()
    assert watch.activity().worker_cpu == pytest.approx(0.5)


def test_a_reset_forgets_the_past_but_not_the_last_reading(proc: Proc, watch: HostWatch) -> None:
    proc.process(11, (0.0, 0.0))
    watch.workers([11])
    watch.read()
    proc.now_s += 1
    proc.process(11, (1.0, 0.0))
    watch.read()
    watch.reset()
    proc.now_s += 1
    watch.read()
    assert (watch.activity().seconds, watch.activity().worker_cpu) == (1.0, 0.0)


def test_without_procfs_the_figures_are_absent(tmp_path: Path) -> None:
    watch = HostWatch(proc=tmp_path / "nowhere", cgroup_root=tmp_path)
    watch.workers([os.getpid()])
    watch.read()
    watch.read()
    activity = watch.activity()
    assert (activity.worker_cpu, activity.worker_queued, activity.free_cpus) == (None, None, None)
    assert (activity.throttled, activity.io_pressure) == (None, None)
    assert (activity.memory_pressure, activity.swapped_in_mib_s) == (None, None)
    assert activity.usable_cpus > 0


@pytest.mark.parametrize(
    ("cgroup", "stat"),
    [
        ("0::/job", "usage_usec 9\nnr_periods {periods}\nnr_throttled {throttled}\nthrottled_usec 900000000\n"),
        ("4:cpu:/job", "nr_periods {periods}\nnr_throttled {throttled}\nthrottled_time 900000000000\n"),
    ],
    ids=["v2", "v1"],
)
def test_throttling_is_the_share_of_periods_in_which_the_quota_stopped_us(proc: Proc, cgroup: str, stat: str) -> None:
    folder = "cgroup/cpu/job" if "cpu" in cgroup else "cgroup/job"
    write(proc.root / "self/cgroup", cgroup + "\n")
    (proc.root / folder).mkdir(parents=True)
    watch = watch_of(proc)
    for periods, throttled in ((10, 7), (60, 27), (110, 47)):
        write(proc.root / folder / "cpu.stat", stat.format(periods=periods, throttled=throttled))
        watch.read()
        proc.now_s += 10
    assert watch.activity().throttled == pytest.approx(40 / 100)
    watch.reset()
    assert watch.activity().throttled is None
    write(proc.root / folder / "cpu.stat", stat.format(periods=120, throttled=57))
    watch.read()
    assert watch.activity().throttled == 1.0


def test_periods_are_those_of_the_innermost_group_that_has_a_quota(proc: Proc) -> None:
    write(proc.root / "self/cgroup", "0::/pod/container\n")
    watch = watch_of(proc)
    for periods, throttled in ((10, 0), (20, 5)):
        write(proc.root / "cgroup/pod/container/cpu.stat", "usage_usec 9\nnr_periods 0\nnr_throttled 0\n")
        write(proc.root / "cgroup/pod/cpu.stat", f"nr_periods {periods}\nnr_throttled {throttled}\n")
        watch.read()
    assert watch.activity().throttled == 0.5


def test_a_group_without_a_quota_is_not_throttled(proc: Proc) -> None:
    write(proc.root / "self/cgroup", "0::/\n")
    write(proc.root / "cgroup/cpu.stat", "usage_usec 9\nnr_periods 0\nthrottled_usec 0\n")
    watch = watch_of(proc)
    watch.read()
    proc.now_s += 10
    watch.read()
    assert watch.activity().throttled is None


def test_pressure_is_the_share_of_time_in_which_something_waited(proc: Proc, watch: HostWatch) -> None:
    def pressure(kind: str, total_us: int) -> None:
        text = f"some avg10=9.99 avg60=0.00 avg300=0.00 total={total_us}\nfull avg10=0.00 total=0\n"
        write(proc.root / "pressure" / kind, text)

    for kind in ("io", "memory"):
        pressure(kind, 1_000_000)
    watch.read()
    proc.now_s += 10
    for kind, total_us in (("io", 2_000_000), ("memory", 4_000_000)):
        pressure(kind, total_us)
    watch.read()
    activity = watch.activity()
    assert activity.io_pressure == pytest.approx(0.1)
    assert activity.memory_pressure == pytest.approx(0.3)


def test_pages_that_come_back_from_swap_are_mib_per_second(proc: Proc, watch: HostWatch) -> None:
    before = "".join(f"nr_number_{index} 123456\n" for index in range(300))  # more than one page of text
    mib = 1024 * 1024 // os.sysconf("SC_PAGE_SIZE")
    for pages in (7, 7 + 30 * mib):
        write(proc.root / "vmstat", f"{before}pswpin {pages}\npswpout 99999999\n")
        watch.read()
        proc.now_s += 10
    assert watch.activity().swapped_in_mib_s == pytest.approx(3.0)


class TestFreeCpus:
    """10 s in which the machine has so much idle, and this process and two workers use so much."""

    @pytest.fixture
    def free(self, proc: Proc, monkeypatch: pytest.MonkeyPatch) -> Callable[..., float | None]:
        monkeypatch.setattr(os, "cpu_count", lambda: len(CPUS))

        def measure(idle: float, process: float = 0.0, workers: float = 0.0, local_ranks: int = 1) -> float | None:
            process_s = itertools.count(5.0, 10 * process)
            monkeypatch.setattr(time, "process_time", lambda: next(process_s))
            watch = watch_of(proc, local_ranks)
            watch.workers([11, 12])
            for elapsed_s in (0, 10):
                proc.now_s += elapsed_s
                proc.idle(elapsed_s * idle)
                for pid in (11, 12):
                    proc.process(pid, (elapsed_s * workers / 2, 0.0))
                watch.read()
            return watch.activity().free_cpus

        write(proc.root / "self/cgroup", "0::/\n")
        return measure

    def quota(self, proc: Proc, text: str) -> None:
        write(proc.root / "cgroup/cpu.max", text)

    def test_without_a_quota_it_is_what_the_machine_has_idle(self, free: Callable[..., float | None]) -> None:
        assert free(idle=0.75, process=1.0, workers=1.5) == pytest.approx(0.75)

    def test_a_quota_leaves_what_we_do_not_use_ourselves(self, proc: Proc, free: Callable[..., float | None]) -> None:
        self.quota(proc, "200000 100000\n")
        assert free(idle=1.0, process=0.8, workers=1.0) == pytest.approx(0.2)

    def test_a_machine_that_has_less_idle_has_no_more_to_give(
        self, proc: Proc, free: Callable[..., float | None]
    ) -> None:
        self.quota(proc, "200000 100000\n")
        assert free(idle=0.25, process=0.5, workers=0.5) == pytest.approx(0.25)

    def test_a_quota_that_is_exceeded_leaves_nothing(self, proc: Proc, free: Callable[..., float | None]) -> None:
        self.quota(proc, "50000 100000\n")
        assert free(idle=1.0, process=0.5, workers=0.5) == 0.0

    def test_local_ranks_share_what_is_idle(self, free: Callable[..., float | None]) -> None:
        assert free(idle=1.0, process=0.8, workers=1.0, local_ranks=4) == pytest.approx(0.25)

    def test_pinned_ranks_have_what_is_idle_on_their_own_cpus(
        self, free: Callable[..., float | None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "cpu_count", lambda: 4 * len(CPUS))
        assert free(idle=0.75, local_ranks=4) == pytest.approx(0.75)

    def test_local_ranks_share_a_quota_and_not_what_each_uses(
        self, proc: Proc, free: Callable[..., float | None]
    ) -> None:
        self.quota(proc, "200000 100000\n")
        assert free(idle=1.0, process=0.4, workers=0.4, local_ranks=2) == pytest.approx(0.2)


class TestUsableCpusOfARank:
    @pytest.fixture
    def usable(self, proc: Proc, monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
        def measure(allowed: int, machine: int, local_ranks: int) -> float:
            monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)))
            monkeypatch.setattr(os, "cpu_count", lambda: machine)
            return watch_of(proc, local_ranks).activity().usable_cpus

        write(proc.root / "self/cgroup", "0::/\n")
        return measure

    def test_ranks_that_may_run_anywhere_share_the_machine(self, usable: Callable[..., float]) -> None:
        assert usable(allowed=128, machine=128, local_ranks=8) == 16.0

    def test_one_rank_has_it_all(self, usable: Callable[..., float]) -> None:
        assert usable(allowed=128, machine=128, local_ranks=1) == 128.0

    def test_a_share_is_at_least_one(self, usable: Callable[..., float]) -> None:
        assert usable(allowed=4, machine=4, local_ranks=8) == 1.0

    def test_pinned_ranks_have_their_own(self, usable: Callable[..., float]) -> None:
        assert usable(allowed=16, machine=128, local_ranks=8) == 16.0

    @pytest.mark.parametrize("allowed", [128, 16], ids=["anywhere", "pinned"])
    @pytest.mark.parametrize(("quota", "share"), [(24, 3.0), (4, 0.5), (1024, 16.0)])
    def test_a_quota_is_shared(
        self, proc: Proc, usable: Callable[..., float], allowed: int, quota: int, share: float
    ) -> None:
        write(proc.root / "cgroup/cpu.max", f"{quota * 100_000} 100000\n")
        assert usable(allowed=allowed, machine=128, local_ranks=8) == share

    def test_without_an_affinity_it_is_a_share_of_the_machine(
        self, usable: Callable[..., float], proc: Proc, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(os, "sched_getaffinity")
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        assert watch_of(proc, local_ranks=2).activity().usable_cpus == 4.0


def test_idle_cpus_of_many_ranks_are_compared_with_a_ranks_share(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(128)))
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    watch = watch_of(proc, local_ranks=8)
    for idle_s in (0, 10):
        ticks = idle_s * os.sysconf("SC_CLK_TCK")
        cpus = [f"cpu{index} 1 1 1 {ticks if index < 40 else 0} 0 0 0 0 0 0" for index in range(128)]
        write(proc.root / "stat", "\n".join(["cpu  1 1 1 0 0 0 0 0 0 0", *cpus, "intr 1"]) + "\n")
        watch.read()
        proc.now_s += 10
    activity = watch.activity()
    assert (activity.free_cpus, activity.usable_cpus) == (pytest.approx(5.0), 16.0)


def test_a_worker_whose_thread_ends_is_still_read(proc: Proc, watch: HostWatch) -> None:
    proc.process(11, (1.0, 0.0), (0.0, 0.0))
    watch.workers([11])
    watch.read()
    proc.now_s += 1
    (proc.root / "11/task/12/schedstat").unlink()
    (proc.root / "11/task/12").rmdir()
    proc.process(11, (1.5, 0.0))
    watch.read()
    assert (watch.activity().seconds, watch.activity().worker_cpu) == (1.0, 0.5)


def test_a_thread_that_begins_is_seen_within_a_few_readings(proc: Proc, watch: HostWatch) -> None:
    proc.process(11, (0.0, 0.0))
    watch.workers([11])
    watch.read()
    for second in range(1, 6):
        proc.now_s += 1
        proc.process(11, (0.0, 0.0), (0.5 * second, 0.0))
        watch.read()
    assert watch.activity().worker_cpu == 0.5


def test_other_readings_open_no_list_of_threads(proc: Proc, watch: HostWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = []
    list_folder = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: listed.append(folder) or list_folder(folder))
    proc.process(11, (0.0, 0.0))
    watch.workers([11])
    for _ in range(10):
        watch.read()
    assert listed == [f"/proc/{os.getpid()}/fd", f"{proc.root}/11/task"] * 2


@pytest.mark.parametrize(("reading_cpu_s", "wait_s"), [(0.0, 0.2), (0.001, 0.2), (0.005, 1), (0.1, 20), (2.0, 20)])
def test_dear_readings_are_further_apart(reading_cpu_s: float, wait_s: float) -> None:
    assert wait_after(reading_cpu_s, interval_s=0.2) == pytest.approx(wait_s)


def test_the_thread_waits_by_what_its_own_reading_took(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    cpu_s = iter([3.0, 3.005])
    watch = HostWatch(proc=proc.root, clock=lambda: proc.now_s, cpu_clock=lambda: next(cpu_s))
    monkeypatch.setattr(watch._stop, "wait", lambda wait_s: waits.append(wait_s) or True)
    watch._run()
    assert waits == [pytest.approx(1.0)]


@pytest.mark.timed
def test_a_real_busy_process_is_seen_busy_and_a_sleeping_one_asleep() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    asleep = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\ninput()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        for process in (busy, asleep):
            assert process.stdout is not None
            process.stdout.readline()
        wait_for(lambda: psutil.Process(asleep.pid).status() == psutil.STATUS_SLEEPING)
        shares = []
        for process in (busy, asleep):
            watch = HostWatch()
            watch.workers([process.pid])
            while (activity := watch.activity()).seconds < 0.3:
                watch.read()
                threading.Event().wait(0.05)
            assert activity.worker_cpu is not None
            assert activity.worker_queued is not None
            shares.append(activity.worker_cpu + activity.worker_queued)
        assert shares[0] > shares[1]
    finally:
        busy.kill()
        asleep.kill()
        busy.communicate()
        asleep.communicate()


def test_the_thread_reads_until_it_is_stopped(proc: Proc) -> None:
    proc.process(11, (0.0, 0.0))
    read_twice = threading.Event()
    readings = []

    def clock() -> float:
        readings.append(1)
        if len(readings) >= 8:
            read_twice.set()
        return float(len(readings))

    watch = HostWatch(interval_s=0.001, proc=proc.root, clock=clock)
    watch.workers([11])
    watch.start()
    assert read_twice.wait(10)
    watch.stop()
    assert "gpuopt-host" not in {thread.name for thread in threading.enumerate()}
    watch.stop()


def test_what_this_process_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    held = held_by_this_process()
    assert held["rss_mib"] > 10
    assert held["open_files"] >= 3
    assert held["threads"] >= 1


def test_without_proc_it_is_not_known_what_this_process_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "Process", refused)
    assert held_by_this_process() == {}
