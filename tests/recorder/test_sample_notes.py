"""Which sample a process reads, as its ring has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from lightning_gpuopt.loaders import sample_keys
from lightning_gpuopt.recorder.ring import AT, RANK_BYTES, Ring
from lightning_gpuopt.recorder.sample_notes import Reading, note_samples_of_ours


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring(memoryview(bytearray(RANK_BYTES)))
    note_samples_of_ours(ring)
    yield ring
    note_samples_of_ours(None)


def test_of_several_threads_all_that_is_read_is_noted_and_an_exception_has_its_own(ring: Ring) -> None:
    both, over = Barrier(2, timeout=60), Barrier(2, timeout=60)

    def read(key: int) -> None:
        reading = Reading(ring, whole=True)
        for _ in sample_keys.each_of([key]):
            both.wait()
            if key == 41:
                reading.failed(ValueError("bad"))
            over.wait()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(read, key) for key in (41, 7)]:
            done.result()
    log = bytes(ring._memory).decode(errors="replace")
    line = log[log.index('{"t":') :].partition("\n")[0]
    assert json.loads(line)["index"] == 41
    assert ring.noted_index() is None
    assert json.loads(ring.read("indices")) == []


def test_an_empty_batch_and_a_dataset_of_ours_inside_of_another_are_read_as_they_are(ring: Ring) -> None:
    assert list(sample_keys.each_of([])) == []
    assert [list(sample_keys.each_of([key, key + 1])) for key in sample_keys.each_of([3, 7])] == [[3, 4], [7, 8]]
    assert ring.noted_index() is None


def test_a_thread_that_has_failed_reads_nothing_any_more(ring: Ring) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(
            lambda: [next(iter(sample_keys.each_of([9]))), Reading(ring, whole=True).failed(OSError())]
        ).result()
    each = iter(sample_keys.each_of([4]))
    assert (next(each), ring.noted_index()) == (4, 4)


def test_while_several_threads_read_none_is_the_one(ring: Ring) -> None:
    first, second = sample_keys.each_of([5]), sample_keys.each_of([3])
    assert next(iter(first)) == 5
    assert ring.noted_index() == 5
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: next(iter(second))).result() == 3
    assert ring.noted_index() is None
    assert json.loads(ring.read("indices")) == [3, 5]


@pytest.mark.parametrize(("numbered", "shown"), [(True, [20, 21, 22]), (False, [7, 5, 3])])
def test_of_fast_samples_whoever_looks_from_beside_sees_the_one_that_is_read(numbered: bool, shown: list[int]) -> None:
    ring = Ring(memoryview(bytearray(RANK_BYTES)))
    reading = Reading(ring, whole=False, numbered=numbered)
    ring.numbers[AT["samples"]] = 17
    reading.begin([0, 1, 2])
    assert list(reading) == [0, 1, 2]
    reading.end(0)
    reading.begin([7, 5, 3])
    seen = []
    for _ in reading:
        reading.show()
        seen.append(ring.numbers[AT["index"]])
    assert seen == shown
