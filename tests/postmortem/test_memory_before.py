"""Memory before the end: what it was, whether it was short, and what grew."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpuopt.measurements.flight import FlightRecord, MemoryReading
from lightning_gpuopt.postmortem.analysis import post_mortem_of
from lightning_gpuopt.postmortem.memory_before import in_words, memory_of
from lightning_gpuopt.postmortem.record import PostMortem
from tests.postmortem.records import GIB, MIB, T, died, rank, readings, worker


def killed(*, of_rank: tuple[MemoryReading, ...] = (), of_worker: tuple[MemoryReading, ...] = ()) -> PostMortem:
    records = [rank(ended="exception", events=(died(3, signal=9),), memory=of_rank), worker(3, memory=of_worker)]
    return post_mortem_of(records, now_s=T, is_alive=lambda _: False, command=None)


def test_a_kill_at_the_limit_is_likely_for_want_of_memory() -> None:
    found = killed(of_rank=readings(2 * GIB, 3 * GIB, int(3.9 * GIB), limit=4 * GIB))
    assert found.ended == "killed"
    assert "because memory ran out" in found.likely
    assert "3.9 GiB of 4.0 GiB" in found.likely


def test_a_kill_far_from_the_limit_is_somebody_s() -> None:
    found = killed(of_rank=readings(GIB, GIB, limit=4 * GIB, available=9 * GIB))
    assert (found.ended, "memory" in found.likely) == ("killed", False)


def test_file_cache_is_no_use_of_memory() -> None:
    found = memory_of(rank(), [rank(memory=readings(4 * GIB, limit=4 * GIB, cache=3 * GIB))], T)
    assert (found.near, found.figures["curve"]) == ("", [[0.0, GIB]])


def test_a_curve_that_rises_to_the_limit_counts() -> None:
    found = memory_of(None, [rank(memory=readings(GIB, 2 * GIB, 3 * GIB, limit=4 * GIB))], T + 1.0)
    assert found.near == "its memory cgroup used 3.0 GiB of 4.0 GiB, rising"


def test_a_machine_without_available_memory() -> None:
    found = memory_of(None, [rank(memory=readings(200 * MIB, of="available"))], T)
    assert found.near == "200 MiB were available on the machine"


def test_what_grew_in_a_worker() -> None:
    before, after = (
        MemoryReading(T - 60.0, private=100 * MIB, samples=1000),
        MemoryReading(T, private=GIB, samples=9000),
    )
    found = memory_of(worker(3, memory=(before, after)), [], T)
    assert found.grown == "private memory grew from 100 MiB to 1.0 GiB in 60 s and 8,000 samples"
    assert "numpy" in killed(of_rank=readings(GIB, limit=GIB), of_worker=(before, after)).advice


def leaking(leak: str, last: int, of_a_worker: bool) -> FlightRecord:
    made = worker(3) if of_a_worker else rank()
    field = "private" if of_a_worker else "rss"
    memory = (MemoryReading(T - 9.0, samples=8, **{field: 100 * MIB}), MemoryReading(T, samples=908, **{field: last}))
    return replace(made, memory=memory, leak=leak)


LEAK = "Photos.cache (dict) grew from 1 to 2,087 entries and holds about 522 MiB"


@pytest.mark.parametrize(
    ("of_a_worker", "what"),
    [
        (True, "private memory grew from 100 MiB to 1.0 GiB in 9 s and 900 samples"),
        (False, "resident memory grew from 100 MiB to 1.0 GiB in 9 s and 900 training batches"),
    ],
)
def test_what_grew_is_named(of_a_worker: bool, what: str) -> None:
    found = memory_of(leaking(LEAK, GIB, of_a_worker), [], T)
    assert (found.grown, found.leak) == (f"{what}: {LEAK}", LEAK)


@pytest.mark.parametrize(("leak", "last"), [(LEAK, 110 * MIB), ("", GIB)])
def test_where_nothing_grew_or_nothing_is_known_to_nothing_is_named(leak: str, last: int) -> None:
    found = memory_of(leaking(leak, last, True), [], T)
    assert (found.leak, "cache" in found.grown) == ("", False)


def test_the_advice_is_to_bound_what_grew() -> None:
    of_rank = readings(GIB, limit=GIB)
    records = [rank(ended="exception", events=(died(3, signal=9),), memory=of_rank), leaking(LEAK, GIB, True)]
    found = post_mortem_of(records, now_s=T, is_alive=lambda _: False, command=None)
    assert found.advice.startswith("bound Photos.cache (dict), or do not keep it: each worker fills its own copy;")
    assert f"900 samples: {LEAK}." in found.text


def test_dev_shm_that_is_full() -> None:
    found = memory_of(None, [rank(memory=readings(0, of="shm_free", shm_size=64 * MIB))], T)
    assert found.shm_full == "0 bytes were free in /dev/shm of 64.0 MiB"


def test_what_is_not_known_is_absent() -> None:
    assert memory_of(None, [], T).figures == {}
    assert in_words({}) == ""


def test_a_curve_is_short_and_ends_at_the_end() -> None:
    found = memory_of(rank(memory=readings(*range(100), of="rss")), [], T)
    assert (found.figures["curve_of"], len(found.figures["curve"])) == ("process", 20)
    assert found.figures["curve"][-1] == [0.0, 99]


def test_readings_after_the_end_do_not_count() -> None:
    after = (*readings(3 * GIB, limit=4 * GIB), MemoryReading(T + 0.5, current=GIB, limit=4 * GIB))
    assert memory_of(None, [rank(memory=after)], T).figures["current_bytes"] == 3 * GIB


def test_readings_of_another_machine_do_not_count() -> None:
    other = rank(1, host="b", memory=readings(4 * GIB, limit=4 * GIB))
    assert memory_of(rank(), [rank(), other], T).near == ""
