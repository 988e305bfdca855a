"""The rules for risks: readings in, risks out; and their place in reports."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from lightning_gpuopt.diagnosis.memory_room import duration, size
from lightning_gpuopt.diagnosis.record import Risk
from lightning_gpuopt.diagnosis.render.html import render_html
from lightning_gpuopt.diagnosis.render.text import render_text
from lightning_gpuopt.diagnosis.report import REPORT_SCHEMA, StallReport
from lightning_gpuopt.diagnosis.risks import risks_of
from lightning_gpuopt.measurements.flight import MemoryReading
from lightning_gpuopt.measurements.risks import BatchesInFlight, CopiedObject, RiskInputs, WorkerMemory
from tests.diagnosis.reports import before

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PATHS = CopiedObject("paths", "a list of 1,281,167 str", 190 * MIB, place="data.py:41")


def readings(private: Sequence[float], rate: int = 100, **known: Any) -> tuple[MemoryReading, ...]:
    """A reading a second of a worker that reads so many samples in it; MiB."""
    return tuple(
        MemoryReading(float(second), rss=GIB, private=int(mib * MIB), samples=rate * second, **known)
        for second, mib in enumerate(private, start=1)
    )


def seen(*workers: Sequence[float], limit_gib: float = 64, used_gib: float = 4, **known: Any) -> RiskInputs:
    rank = (MemoryReading(0.0, limit=int(limit_gib * GIB), current=int(used_gib * GIB), cache=0),)
    memories = tuple(WorkerMemory(number, readings(each)) for number, each in enumerate(workers))
    return RiskInputs(**{"workers": memories, "rank": rank, "num_workers": len(workers)} | known)


def linear(seconds: int, mib_per_s: float, start: float = 40.0) -> list[float]:
    return [start + mib_per_s * second for second in range(seconds)]


def saturating(seconds: int, most: float, time_s: float) -> list[float]:
    """Pages that are copied at random: fewer are left from sample to sample."""
    left, values = most, []
    for _ in range(seconds):
        values.append(40.0 + most - left)
        left *= 1 - 1 / time_s
    return values


class TestWorkerMemory:
    def test_python_objects_that_are_copied(self) -> None:
        (risk,) = risks_of(seen(*[linear(30, 0.4)] * 8, copied=PATHS))
        assert risk.text == (
            "The private memory of each worker grows by 4.1 KiB a sample: reading probably touches `paths`, a "
            "list of 1,281,167 str, about 190 MiB in each worker (data.py:41), and so copies it. 8 workers will have "
            "taken 1.48 GiB in all; 60 GiB are left of the memory cgroup's limit of 64 GiB."
        )
        assert risk.evidence == {
            "growth_kib_per_sample": 4.096,
            "growth_mib_per_minute": 24.0,
            "grown_mib": 11.6,
            "workers": 8.0,
            "limit": "memory cgroup",
            "limit_gib": 64.0,
            "left_gib": 60.0,
            "total_mib": 1520.0,
            "object": "paths, a list of 1,281,167 str",
            "object_mib": 190.0,
            "where": "data.py:41",
        }
        assert risk.advice == (
            "Keep `paths` in one NumPy array (fixed-width strings, bytes or numbers), a pyarrow array or a shared "
            "tensor: workers share it unchanged, which saves about 1.48 GiB over all workers."
        )

    def test_when_the_limit_is_reached(self) -> None:
        (risk,) = risks_of(seen(*[linear(30, 0.4)] * 8, copied=PATHS, limit_gib=5))
        assert risk.text.endswith(" 8 workers reach the memory cgroup's limit of 5 GiB in about 5 minutes.")
        assert risk.evidence["minutes_to_limit"] == 5.3

    def test_ranks_of_one_machine_count_together(self) -> None:
        (risk,) = risks_of(seen(*[linear(30, 0.4)] * 4, copied=PATHS, limit_gib=5, ranks_here=2))
        assert (risk.evidence["workers"], risk.evidence["ranks"]) == (4.0, 2.0)
        assert risk.evidence["minutes_to_limit"] == 5.3

    def test_the_machine_is_the_limit_where_it_is_tighter(self) -> None:
        rank = (MemoryReading(0.0, limit=64 * GIB, current=0, available=GIB),)
        (risk,) = risks_of(seen(*[linear(30, 0.4)] * 8, copied=PATHS, rank=rank, machine_bytes=16 * GIB))
        assert (risk.evidence["limit"], risk.evidence["limit_gib"]) == ("machine", 16.0)
        assert "8 workers reach the machine's limit of 16 GiB in " in risk.text

    @pytest.mark.parametrize("time_s", [5, 12, 60])
    def test_random_reads_copy_ever_fewer_pages(self, time_s: float) -> None:
        (risk,) = risks_of(seen(saturating(30, 190.0, time_s), copied=PATHS))
        assert "`paths`" in risk.text

    def test_what_has_been_copied_altogether(self) -> None:
        (risk,) = risks_of(seen([40.0, 200.0, *[230.0] * 20], copied=PATHS))
        assert risk.text.startswith(
            "The private memory of each worker has grown by 190 MiB: reading probably touches `paths`"
        )

    def test_a_leak_of_the_workers_own(self) -> None:
        leak = "cache (dict) grew from 0 to 12,000 entries"
        observed = seen(linear(30, 1.0), limit_gib=5)
        observed = replace(observed, workers=(replace(observed.workers[0], leak=leak),), copied=PATHS)
        (risk,) = risks_of(observed)
        assert risk.text == (
            f"The private memory of each worker grows by 10.2 KiB a sample: in worker 0, {leak}. "
            "1 worker reaches the memory cgroup's limit of 5 GiB in about 17 minutes."
        )
        assert risk.evidence["grows"] == f"in worker 0, {leak}"

    def test_new_memory_is_no_copy(self) -> None:
        """Pages that a worker copies were its own before, shared: they add to private memory alone."""
        observed = seen(*[linear(30, 0.4)] * 2, copied=PATHS)

        def with_new_memory(share: float) -> RiskInputs:
            return replace(
                observed,
                workers=tuple(
                    replace(
                        each,
                        readings=tuple(
                            replace(one, anonymous=300 * MIB + int(share * (one.private or 0))) for one in each.readings
                        ),
                    )
                    for each in observed.workers
                ),
            )

        assert ["`paths`" in each.text for each in risks_of(with_new_memory(0.0))] == [True]
        assert ["`paths`" in each.text for each in risks_of(with_new_memory(0.4))] == [True]
        assert risks_of(with_new_memory(0.6)) == []

    def test_new_memory_that_grows_evenly_has_a_reason_that_was_not_found(self) -> None:
        observed = seen(*[linear(40, 3.0)] * 2, copied=PATHS)
        allocated = replace(
            observed,
            workers=tuple(
                replace(each, readings=tuple(replace(one, anonymous=one.private) for one in each.readings))
                for each in observed.workers
            ),
        )
        (risk,) = risks_of(allocated)
        assert "what grows is unknown" in risk.text
        assert "object" not in risk.evidence

    def test_new_memory_at_rest_is_no_copy(self) -> None:
        observed = seen([40.0, 200.0, *[230.0] * 20], copied=PATHS)
        (worker,) = observed.workers
        readings = tuple(replace(one, anonymous=one.private) for one in worker.readings)
        assert risks_of(replace(observed, workers=(replace(worker, readings=readings),))) == []

    @pytest.mark.parametrize(("mib", "found"), [(300.0, True), (200.0, False)])
    def test_a_worker_that_has_copied_fast_and_rests(self, mib: float, found: bool) -> None:
        """Of large objects, the reading code may touch a part: `item.label`, not `item.path`."""
        items = CopiedObject("items", "a list of 1,500,000 Item", 1000 * MIB)
        after = [(0, 6.0), (13_824, 86.0), (60_000, mib + 5), (169_000, mib + 6), (180_000, mib + 6)]
        worker = WorkerMemory(
            0,
            tuple(
                MemoryReading(float(second), private=int(mib * MIB), anonymous=900 * MIB, samples=read)
                for second, (read, mib) in enumerate(after)
            ),
        )
        risks = risks_of(replace(seen([1.0]), workers=(worker,), copied=items))
        assert [each.evidence["grown_mib"] for each in risks] == [mib] * found

    def test_what_it_copies_in_its_first_second_counts(self) -> None:
        worker = WorkerMemory(
            0,
            (
                MemoryReading(0.0, private=5 * MIB, anonymous=500 * MIB, samples=0),
                MemoryReading(1.0, private=160 * MIB, anonymous=510 * MIB, samples=50_000),
            ),
        )
        (risk,) = risks_of(replace(seen([1.0]), workers=(worker,), copied=PATHS))
        assert "has grown by 145 MiB: reading probably touches `paths`" in risk.text  # 10 of the 155 MiB are new memory

    @pytest.mark.parametrize(("limit_gib", "found"), [(1.6, True), (4, False)])
    def test_a_fast_leak_is_seen_in_few_readings_where_the_limit_is_near(self, limit_gib: float, found: bool) -> None:
        leak = "Photos.cache (dict) grew from 1 to 1,632 entries and holds about 408 MiB"
        after = [(0, 7.0), (312, 91.0), (752, 202.0), (1200, 313.0), (1632, 424.0)]
        readings = tuple(
            MemoryReading(2.0 * number, private=int(mib * MIB), samples=read)
            for number, (read, mib) in enumerate(after)
        )
        workers = tuple(WorkerMemory(number, readings, leak) for number in range(2))
        observed = replace(seen(limit_gib=limit_gib, used_gib=1.2), workers=workers)
        risks = risks_of(observed)
        assert [each.evidence["grows"] for each in risks] == [f"in worker 0, {leak}"] * found
        assert risks_of(replace(observed, workers=tuple(replace(each, leak="") for each in workers))) == []

    @pytest.mark.parametrize(
        ("private", "keeps", "found"),
        [
            (linear(7, 20.0), 1.0, True),
            (linear(7, 20.0), 0.5, False),  # half of the samples were found in it
            (linear(7, 8.0), 1.0, False),  # little until now
            (linear(4, 60.0), 1.0, False),  # seen too rarely
            (saturating(9, 300.0, 3.0), 1.0, False),  # comes to rest
        ],
        ids=["all", "half", "little", "few", "rests"],
    )
    def test_what_keeps_something_of_each_sample_is_a_leak_from_64_mib_on(
        self, private: list[float], keeps: float, found: bool
    ) -> None:
        leak = "Photos.cache (dict) grew from 96 to 796 entries and holds about 130 MiB"
        observed = seen(private, private)
        workers = tuple(replace(each, leak=leak, keeps=keeps) for each in observed.workers)
        risks = risks_of(replace(observed, workers=workers))
        assert [each.evidence["grows"] for each in risks] == [f"in worker 0, {leak}"] * found

    def test_a_large_cache_that_fills_up_fast_is_no_leak_where_there_is_room(self) -> None:
        leak = "__main__.load (lru_cache) grew from 0 to 2,000 entries and holds about 380 MiB"
        for seconds in range(2, 21):
            observed = seen(linear(seconds, 50.0))
            assert risks_of(replace(observed, workers=(replace(observed.workers[0], leak=leak),))) == []

    @pytest.mark.parametrize("time_s", [3.0, 7.5, 12.0])
    def test_a_cache_of_all_samples_that_fills_up_at_random_is_no_leak(self, time_s: float) -> None:
        leak = "Data.cache (dict) grew from 4 to 2,943 entries and holds about 184 MiB"
        for seconds in range(2, 120, 2):
            observed = seen(*[saturating(seconds, 187.0, time_s)] * 2)
            workers = tuple(replace(each, leak=leak) for each in observed.workers)
            assert risks_of(replace(observed, workers=workers)) == []

    @pytest.mark.parametrize("full_s", [3, 8])
    def test_a_cache_that_has_filled_up_is_no_leak(self, full_s: int) -> None:
        leak = "__main__.load (lru_cache) grew from 0 to 2,000 entries and holds about 95 MiB"
        observed = seen([40.0 + 95.0 * min(second / full_s, 1.0) for second in range(40)])
        assert risks_of(replace(observed, workers=(replace(observed.workers[0], leak=leak),))) == []

    def test_rows_that_are_loaded_with_the_first_sample_are_no_leak(self) -> None:
        leak = "Photos.rows (list) grew from 0 to 100,000 entries and holds about 100 MiB"
        observed = seen([40.0, 90.0, *[140.0] * 40])
        assert risks_of(replace(observed, workers=(replace(observed.workers[0], leak=leak),))) == []

    def test_several_objects_may_be_copied_together(self) -> None:
        grown = saturating(60, 400.0, 12)
        assert risks_of(seen(grown, copied=PATHS)) == []
        (risk,) = risks_of(seen(grown, copied=replace(PATHS, together=380 * MIB)))
        assert "reading probably touches `paths`" in risk.text
        assert risk.evidence["object_mib"] == 190.0

    def test_a_reason_that_was_not_found(self) -> None:
        (risk,) = risks_of(seen(*[linear(40, 3.0)] * 2))
        assert "what grows is unknown" in risk.text

    def test_workers_that_are_not_forked_copy_nothing(self) -> None:
        assert risks_of(seen(linear(30, 0.4), copied=PATHS, forked=False)) == []

    @pytest.mark.parametrize(
        "known",
        [
            {"copied": replace(PATHS, bytes=20 * MIB)},  # small
            {"copied": PATHS, "samples_ahead": 1000},  # workers end before
            {"copied": PATHS, "remaining_s": 20.0},
        ],
        ids=["small", "epoch", "run"],
    )
    def test_what_will_not_matter_is_no_risk(self, known: dict[str, Any]) -> None:
        assert risks_of(seen(linear(30, 0.4), **known)) == []

    def test_little_matters_under_a_tight_limit(self) -> None:
        small = replace(PATHS, bytes=20 * MIB)
        assert [each.risk for each in risks_of(seen(linear(30, 0.4), copied=small, limit_gib=0.25, used_gib=0))]

    def test_nothing_is_known(self) -> None:
        assert risks_of(RiskInputs()) == []
        unread = tuple(MemoryReading(float(second), samples=second) for second in range(1, 50))
        assert risks_of(RiskInputs(workers=(WorkerMemory(0, unread),), copied=PATHS, num_workers=1)) == []


def rank(rss: Sequence[float], **known: Any) -> tuple[MemoryReading, ...]:
    return tuple(MemoryReading(float(second), rss=int(mib * MIB), **known) for second, mib in enumerate(rss))


class TestProcessMemory:
    def test_a_container_that_grows(self) -> None:
        known = {"limit": 8 * GIB, "current": 2 * GIB, "cache": GIB}
        (risk,) = risks_of(RiskInputs(rank=rank(linear(60, 2.0), **known), grows="Model.losses (list) grew"))
        assert risk.risk == "process_memory"
        assert risk.text == (
            "The memory of the training process grows by 120 MiB a minute: Model.losses (list) grew. "
            "It reaches the memory cgroup's limit of 8 GiB in about 60 minutes."
        )
        assert risk.evidence["growth_mib_per_minute"] == 120.0

    def test_mapped_files_and_pages_that_a_fork_left_are_no_leak(self) -> None:
        grown = linear(60, 4.0)
        mapped = tuple(replace(each, private=500 * MIB) for each in rank(grown))
        forked = tuple(replace(each, rss=GIB, private=each.rss) for each in rank(grown))
        both = tuple(replace(each, private=each.rss) for each in rank(grown))
        assert [risks_of(RiskInputs(rank=each)) == [] for each in (mapped, forked, both)] == [True, True, False]

    def test_the_end_of_the_run_comes_first(self) -> None:
        known = {"limit": 8 * GIB, "current": 2 * GIB}
        (risk,) = risks_of(RiskInputs(rank=rank(linear(60, 2.0), **known), remaining_s=60.0))
        assert "minutes_to_limit" not in risk.evidence


class TestSharedMemory:
    def test_batches_in_flight_that_do_not_fit(self) -> None:
        readings = (MemoryReading(0.0, shm_free=64 * MIB, shm_size=64 * MIB),)
        (risk,) = risks_of(RiskInputs(rank=readings, num_workers=8, in_flight=BatchesInFlight(128 * MIB)))
        assert risk.text == (
            "Batches on their way from the workers need 2 GiB of /dev/shm (8 workers x 2 batches of 128 MiB), and 64 "
            "MiB are free: when it is full, a worker ends with a bus error."
        )
        assert risk.evidence == {"shm_size_gib": 0.062, "needed_gib": 2.0, "left_gib": 0.062}

    def test_batches_that_are_there_already_count_once(self) -> None:
        readings = tuple(MemoryReading(0.0, shm_free=free * MIB, shm_size=GIB) for free in (1024, 900))
        assert risks_of(RiskInputs(rank=readings, num_workers=8, in_flight=BatchesInFlight(60 * MIB))) == []

    def test_it_fills_up(self) -> None:
        readings = tuple(MemoryReading(float(at), shm_free=(200 - at) * MIB, shm_size=GIB) for at in range(30))
        (risk,) = risks_of(RiskInputs(rank=readings))
        assert "falls by 60 MiB a minute: its 1 GiB will be full in about 3 minutes" in risk.text
        assert risks_of(RiskInputs(rank=readings, remaining_s=100.0)) == []
        flight = BatchesInFlight(10 * MIB)  # of which the workers make the first few
        assert risks_of(RiskInputs(rank=readings, num_workers=4, in_flight=flight)) == []

    def test_half_of_it_that_was_used_up_in_seconds_is_enough(self) -> None:
        def found(free: Sequence[int], **known: Any) -> list[float | str]:
            readings = tuple(MemoryReading(float(at), shm_free=mib * MIB, shm_size=GIB) for at, mib in enumerate(free))
            return [each.evidence["growth_mib_per_minute"] for each in risks_of(RiskInputs(rank=readings, **known))]

        fills = [200, 175, 150, 125, 100, 75, 50]
        assert found(fills) == [1500.0]
        assert found(fills[:5]) == []  # more is left than was used
        assert found([200, 150, 100, 50]) == []  # too few readings
        ahead = {"num_workers": 4, "in_flight": BatchesInFlight(8 * MIB)}  # of which the workers make the first few
        assert found(fills, **ahead) == []
        assert found(fills, num_workers=4) == []  # what they take is not known yet
        assert found([*fills, 30, 5], **ahead) == [1375.0]


class TestOpenFiles:
    @staticmethod
    def files(counts: Sequence[int]) -> tuple[MemoryReading, ...]:
        return tuple(MemoryReading(float(at), files=each, files_limit=1024) for at, each in enumerate(counts))

    def test_they_grow_towards_the_limit(self) -> None:
        workers = (
            WorkerMemory(0, self.files([20] * 50)),
            WorkerMemory(1, self.files([20 + 2 * at for at in range(50)])),
        )
        (risk,) = risks_of(RiskInputs(workers=workers))
        assert risk.text == (
            "Worker 1 has 118 files open, the limit is 1,024, and 120 more each minute: the limit is reached "
            "in about 8 minutes."
        )
        assert risk.evidence["process"] == "worker 1"

    def test_half_of_them_that_were_opened_in_seconds_are_enough(self) -> None:
        fast = [20, 200, 380, 560, 740]
        (risk,) = risks_of(RiskInputs(workers=(WorkerMemory(0, self.files(fast)),)))
        assert risk.text == (
            "Worker 0 has 740 files open, the limit is 1,024, and 10,800 more each minute: the limit is "
            "reached in about 10 seconds."
        )
        assert risks_of(RiskInputs(rank=self.files(fast[:4]))) == []
        assert risks_of(RiskInputs(rank=self.files([each // 2 for each in fast]))) == []

    def test_many_that_are_opened_at_the_beginning_are_no_risk_where_many_are_left(self) -> None:
        shards = tuple(MemoryReading(at / 4, files=20 + 35 * at, files_limit=4096) for at in range(24))
        assert risks_of(RiskInputs(rank=shards)) == []

    def test_they_are_nearly_used_up(self) -> None:
        (risk,) = risks_of(RiskInputs(rank=self.files([930])))
        assert risk.text == "The training process has 930 files open, the limit is 1,024."

    def test_few_or_a_steady_number_is_no_risk(self) -> None:
        assert risks_of(RiskInputs(rank=self.files([20, 60, 90, *[100] * 50]))) == []


class TestUnevenRanks:
    def test_one_has_fewer(self) -> None:
        (risk,) = risks_of(RiskInputs(batches=dict.fromkeys(range(8), 1000) | {5: 988}))
        assert risk.text == (
            "Rank 5 has 12 batches fewer in this epoch than the others (988, not 1,000): when its batches run out, the "
            "others wait for it in the next collective until it times out."
        )
        assert "limit_train_batches=988" in risk.advice

    def test_several_differ(self) -> None:
        (risk,) = risks_of(RiskInputs(batches={0: 9, 1: 8, 2: 7, 3: 7}))
        assert risk.text.startswith("Ranks 2, 3 have 2 batches fewer in this epoch than rank 0 (7, not 9): ")
        (risk,) = risks_of(RiskInputs(batches={0: 8, 1: 9}))
        assert risk.text.startswith("Rank 0 has 1 batch fewer in this epoch than rank 1 (8, not 9): ")

    def test_all_have_as_many(self) -> None:
        assert risks_of(RiskInputs(batches={0: 9, 1: 9})) == []


def plateau(draw: random.Random, seconds: int) -> list[float]:
    return saturating(seconds, draw.uniform(5, 400), draw.uniform(1.0, max(1.5, seconds / 20)))


def noise(draw: random.Random, seconds: int) -> list[float]:
    return [300 + draw.uniform(-150, 150) for _ in range(seconds)]


def saw_teeth(draw: random.Random, seconds: int) -> list[float]:
    period, height = draw.randint(2, max(seconds // 5, 3)), draw.uniform(10, 500)
    return [100 + height * (second % period) / period for second in range(seconds)]


def steps(draw: random.Random, seconds: int) -> list[float]:
    at = [draw.randrange(seconds) for _ in range(draw.randint(1, 2))]
    heights = [draw.uniform(10, 500) for _ in at]
    return [
        100 + sum(high for high, when in zip(heights, at, strict=True) if second >= when) for second in range(seconds)
    ]


class TestHealthyRuns:
    @pytest.mark.parametrize("kind", [plateau, noise, saw_teeth, steps], ids=lambda kind: kind.__name__)
    def test_none_has_a_risk(self, kind: Callable[[random.Random, int], list[float]]) -> None:
        small = CopiedObject("entries", "a list of 90,000 int", 3 * MIB)
        for seed in range(50):
            draw = random.Random(seed)
            seconds = draw.randint(5, 300)
            series = [[each + draw.uniform(-1, 1) for each in kind(draw, seconds)] for _ in range(draw.randint(1, 4))]
            process = tuple(
                replace(each, limit=64 * GIB, current=9 * GIB, shm_free=int(GIB - each.rss / 2), shm_size=GIB)
                for each in rank(kind(draw, seconds))
                if each.rss is not None
            )
            for copied in (None, small):
                observed = seen(*series, rank=process, copied=copied, grows="Model.losses (list) grew" * (seed % 2))
                assert risks_of(observed) == [], seed


@pytest.mark.parametrize(
    ("bytes_", "words"), [(100, "0.0977 KiB"), (4199, "4.1 KiB"), (190 * MIB, "190 MiB"), (64 * GIB, "64 GiB")]
)
def test_sizes(bytes_: float, words: str) -> None:
    assert size(bytes_) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (1, "about 10 seconds"),
        (55, "about 60 seconds"),
        (2400, "about 40 minutes"),
        (9000, "about 2 hours"),
        (1e6, "about 12 days"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


class TestInReports:
    RISK = Risk("uneven_ranks", "Rank 5 has <12> batches fewer.", {"ranks": "5", "batches_fewer": 12.0}, "Use Join.")

    def report(self) -> StallReport:
        return replace(before(), risks=[self.RISK])

    def test_json_there_and_back(self) -> None:
        data = json.loads(self.report().to_json())
        jsonschema.validate(data, REPORT_SCHEMA)
        assert data["risks"] == [
            {
                "risk": "uneven_ranks",
                "text": "Rank 5 has <12> batches fewer.",
                "evidence": {"ranks": "5", "batches_fewer": 12.0},
                "advice": "Use Join.",
            }
        ]
        assert StallReport.from_json(self.report().to_json()) == self.report()

    def test_a_report_from_before_there_were_risks(self) -> None:
        data = json.loads(before().to_json())
        del data["risks"]
        assert StallReport.from_json(json.dumps(data)) == before()

    def test_in_the_terminal_and_on_the_page(self) -> None:
        lines = render_text(self.report(), 120).splitlines()
        at = lines.index("Risk: uneven_ranks")
        assert lines[at + 1 : at + 3] == ["   Rank 5 has <12> batches fewer.", "   Use Join."]
        page = render_html(self.report())
        assert "<h3>Uneven ranks</h3>" in page
        assert "<p>Rank 5 has &lt;12&gt; batches fewer.</p>" in page
        assert "h-risks" not in render_html(before())
        assert "Risk" not in render_text(before())
