"""What a worker's beats note of what grows in it: when they look, and at what."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import Subset

from lightning_gpuopt.recorder import worker
from lightning_gpuopt.recorder.memory_series import out_of_ring
from lightning_gpuopt.recorder.ring import AT, WORKER_BYTES, Ring
from lightning_gpuopt.recorder.worker import Beat
from lightning_gpuopt.telemetry.memory import MemoryFiles, ProcessTimes
from lightning_gpuopt.timeline.worker_clock import TimedCollate

MIB = 1 << 20


class Keeps:
    def __init__(self) -> None:
        self.kept: list[bytes] = []

    def __len__(self) -> int:
        return 1

    def __call__(self, samples: Any) -> Any:
        return samples


class Process:
    """A worker's process, as the kernel would show it; a reading of its private memory takes ``cost_s``, and waits."""

    def __init__(self) -> None:
        self.private: int | None = 100 * MIB
        self.faults, self.rss = 0, 300 * MIB
        self.now_s = self.taken_s = self.cost_s = self.wait_s = 0.0
        self.readings = 0

    def read(self, pid: object) -> tuple[int | None, int]:
        self.readings += 1
        self.now_s += self.cost_s + self.wait_s
        self.taken_s += self.cost_s
        return self.private, self.rss

    def look(self, beat: Beat, after_s: float = 1.0) -> str:
        """Beat until the next look; what is noted then."""
        self.now_s += after_s
        for _ in range(4):
            beat.beat()
        return beat._ring.read("leak")


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    made = Process()
    monkeypatch.setattr(worker, "private_and_anonymous", made.read)
    clocks = {"monotonic": lambda: made.now_s, "thread_time": lambda: made.taken_s, "monotonic_ns": time.monotonic_ns}
    monkeypatch.setattr(worker, "time", SimpleNamespace(**clocks))
    monkeypatch.setattr(
        MemoryFiles, "process", lambda files, pid: ProcessTimes(0, 0.0, made.faults, made.rss, dead=False)
    )
    return made


def beat_over(dataset: Any) -> Beat:
    ring = Ring(memoryview(bytearray(WORKER_BYTES)))
    ring.begin({})
    beat = Beat(ring, threading.get_ident(), dataset)
    beat.begin()
    for _ in worker._FIRST_BEATS_S:
        beat.beat()
    return beat


def test_a_list_of_a_dataset_inside_is_noted(process: Process) -> None:
    dataset = Keeps()
    beat = beat_over(Subset(dataset, [0]))  # type: ignore[arg-type]
    assert process.look(beat) == ""
    dataset.kept += [bytes(MIB) for _ in range(20)]
    process.private, process.faults = 120 * MIB, 5120
    assert process.look(beat) == "Keeps.kept (list) grew from 0 to 20 entries and holds about 20 MiB"


@pytest.mark.parametrize(("samples", "per_mille"), [(20, 1000), (80, 250)])
def test_how_many_of_the_samples_it_keeps_is_noted(samples: int, per_mille: int, process: Process) -> None:
    dataset = Keeps()
    beat = beat_over(dataset)
    numbers = beat._ring.numbers
    numbers[AT["samples"]] = 7
    process.look(beat)
    assert numbers[AT["keeps_per_mille"]] == 0
    dataset.kept += [bytes(MIB) for _ in range(20)]
    numbers[AT["samples"]] += samples
    process.private, process.faults = 120 * MIB, 5120
    process.look(beat)
    assert numbers[AT["keeps_per_mille"]] == per_mille


def test_a_list_of_what_collates_is_noted(process: Process) -> None:
    collate = Keeps()
    beat = beat_over(Keeps())
    beat.collates(TimedCollate(collate))
    process.look(beat)
    collate.kept += [bytes(MIB) for _ in range(20)]
    process.private, process.rss = 120 * MIB, 320 * MIB  # in few faults, of huge pages
    assert process.look(beat) == "collate_fn.kept (list) grew from 0 to 20 entries and holds about 20 MiB"


def test_a_process_without_new_pages_is_not_looked_at(process: Process) -> None:
    beat = beat_over(Keeps())
    process.look(beat)
    process.faults, process.rss = 1000, 305 * MIB
    process.look(beat)
    assert process.readings == 1


def test_what_it_has_of_its_own_is_known_from_its_first_moment_on(process: Process) -> None:
    beat = beat_over(Keeps())
    assert out_of_ring(beat._ring.read("memory")) == ((0, 100 * MIB, 300 * MIB), (0, 100 * MIB, 300 * MIB))
    process.look(beat)
    process.private, process.faults, beat._ring.numbers[AT["samples"]] = 140 * MIB, 10_000, 512
    process.look(beat)
    assert out_of_ring(beat._ring.read("memory")) == ((0, 100 * MIB, 300 * MIB), (512, 140 * MIB, 300 * MIB))


def test_it_is_read_before_the_first_beat(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def ends(beat: Beat) -> None:
        seen.append(out_of_ring(beat._ring.read("memory")))
        if len(seen) == 1:
            raise RuntimeError("the next one may see more")
        raise SystemExit

    monkeypatch.setattr(Beat, "beat", ends)
    ring = Ring(memoryview(bytearray(WORKER_BYTES)))
    ring.begin({})
    with pytest.raises(SystemExit):
        Beat(ring, threading.get_ident()).run()
    assert seen == [((0, 100 * MIB, 300 * MIB), (0, 100 * MIB, 300 * MIB))] * 2


def test_where_private_memory_cannot_be_read_nothing_is_shown(process: Process) -> None:
    process.private = None
    beat = beat_over(Keeps())
    process.look(beat)
    process.faults = 10_000
    process.look(beat)
    assert out_of_ring(beat._ring.read("memory")) is None


def test_at_first_it_is_looked_at_each_second_that_it_grows(process: Process) -> None:
    beat = beat_over(Keeps())
    for look in range(1, 6):
        process.faults = 10_000 * look
        process.look(beat)
    assert process.readings == 5  # the first look takes the figure of the beginning


@pytest.mark.parametrize(("grown", "looks"), [(63 * MIB, [0, 0, 0, 0, 1, 0]), (64 * MIB, [1] * 6)])
def test_later_only_much_growth_is_looked_at_each_second(process: Process, grown: int, looks: list[int]) -> None:
    beat = beat_over(Keeps())
    process.look(beat)
    process.faults = 10_000
    process.look(beat, after_s=150.0)
    found = []
    for look in range(2, 8):
        before = process.readings
        process.faults += 10_000
        process.rss += grown if look == 2 or looks[0] else 0
        process.look(beat)
        found.append(process.readings - before)
    assert found == looks


def test_readings_that_take_long_are_few(process: Process) -> None:
    process.cost_s = 0.05
    beat = beat_over(Keeps())  # at 0.05 s; the next one 5 s later, as one part in 100 of the time
    process.look(beat)
    process.faults = 10_000
    process.look(beat, after_s=3.9)
    assert process.readings == 1
    process.look(beat)
    assert process.readings == 2


def test_time_that_others_have_the_core_does_not_count(process: Process) -> None:
    process.wait_s = 0.05
    beat = beat_over(Keeps())
    process.look(beat)
    for look in range(1, 4):
        process.faults = 10_000 * look
        process.look(beat)
    assert process.readings == 4


def test_later_on_they_are_a_tenth(process: Process) -> None:
    beat = beat_over(Keeps())
    process.look(beat)
    process.now_s, process.cost_s = 150.0, 0.05
    process.faults = 10_000
    process.look(beat)
    process.faults = 20_000
    process.look(beat, after_s=49.9)
    assert process.readings == 2
    process.look(beat)
    assert process.readings == 3


def test_a_large_process_is_not_held_up_at_its_start(process: Process) -> None:
    process.rss = 5 << 30
    beat = beat_over(Keeps())
    assert process.readings == 0
    process.look(beat)
    process.faults = 10_000
    process.look(beat)
    assert process.readings == 1


def test_what_grows_in_a_large_process_is_noted(process: Process) -> None:
    process.rss = 5 << 30
    dataset = Keeps()
    beat = beat_over(dataset)
    process.look(beat)
    dataset.kept += [bytearray(MIB) for _ in range(20)]
    process.private, process.faults = 25 * MIB, 10_000
    assert process.look(beat) == "Keeps.kept (list) grew from 0 to 20 entries and holds about 20 MiB"


def test_where_nothing_can_be_seen_the_beats_go_on(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any, **options: Any) -> None:
        raise RuntimeError("not now")

    monkeypatch.setattr(worker, "Growing", refuses)
    beat = beat_over(Keeps())
    assert process.look(beat) == ""
    assert process.readings == 1
