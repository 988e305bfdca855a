"""Which sample a process reads, as its ring has it."""

from __future__ import annotations

import pytest

from lightning_gpuopt.recorder.ring import AT, RANK_BYTES, Ring
from lightning_gpuopt.recorder.sample_notes import Reading


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
