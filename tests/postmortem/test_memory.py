"""Memory before the end: figures, the curve, and whether it was at its limit."""

from __future__ import annotations

import pytest

from lightning_gpuopt.postmortem.memory import in_words, memory_of, oom_kills
from tests.postmortem.records import GIB, NODE, NOW, memory, rank, worker

FLAT = {"limit": 4 * GIB, "current": 2 * GIB}


def near(*rows):
    return memory_of(None, [rank(memory=memory(*rows))], NOW).near


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([(-1, FLAT), (0, FLAT)], ""),
        ([(-1, FLAT), (0, {"limit": 4 * GIB, "current": 39 * GIB // 10})], "its memory cgroup used 3.9 GiB of 4.0 GiB"),
        ([(0, {"limit": 4 * GIB, "current": 4 * GIB, "cache": 3 * GIB})], ""),
        (
            [(-3, FLAT), (-1, {"limit": 4 * GIB, "current": 3 * GIB})],
            "its memory cgroup used 3.0 GiB of 4.0 GiB, rising",
        ),
        ([(0, {"available": 100 << 20})], "100 MiB were available on the machine"),
        ([(0, {"available": 8 * GIB})], ""),
        ([(0, {"rss": GIB})], ""),
        ([], ""),
    ],
)
def test_whether_memory_was_short(rows, found):
    text = near(*rows)
    assert text.startswith(found) if found else text == ""


def test_what_is_free_again_after_the_end_is_no_last_reading():
    full = {"limit": 4 * GIB, "current": 4 * GIB}
    found = memory_of(None, [rank(memory=memory((-0.5, full), (0.5, FLAT), (9, FLAT)))], NOW)
    assert (found.figures["current_bytes"], found.near) == (4 * GIB, "its memory cgroup used 4.0 GiB of 4.0 GiB")


def test_figures_are_of_the_process_and_of_its_machine():
    other = rank(1, host="node-2", memory=memory((0, {"limit": 9, "current": 1})))
    own = worker(memory=memory((-2, {"rss": 10}), (-1, {"rss": 30, "private": 20})))
    ranks = rank(memory=memory((-1, {"rss": 99, "limit": 4 * GIB, "current": GIB, "peak": 2 * GIB, "shm_free": 5})))
    assert memory_of(own, [ranks, own, other], NOW, 2).figures == {
        "rss_bytes": 30,
        "private_bytes": 20,
        "limit_bytes": 4 * GIB,
        "current_bytes": GIB,
        "peak_bytes": 2 * GIB,
        "shm_free_bytes": 5,
        "oom_kills": 2,
        "curve_of": "cgroup",
        "curve": [[1.0, GIB]],
    }


def test_without_a_cgroup_the_curve_is_the_process_own():
    own = worker(memory=memory(*[(-60 + each, {"rss": each}) for each in range(60)]))
    figures = memory_of(own, [own], NOW).figures
    assert (figures["curve_of"], len(figures["curve"]), figures["curve"][-1]) == ("process", 20, [1.0, 59])


def test_nothing_known_is_nothing_said():
    assert memory_of(None, [], NOW).figures == {}
    assert in_words({}) == ""


@pytest.mark.parametrize(
    ("free", "whole", "found"),
    [
        (1 << 20, 64 << 20, "1.0 MiB were free in /dev/shm of 64.0 MiB"),
        (2 * GIB, 64 * GIB, "2.0 GiB were free in /dev/shm of 64.0 GiB"),
        (32 << 20, 64 << 20, ""),
        (0, None, "0 bytes were free in /dev/shm"),
    ],
)
def test_whether_shared_memory_was_full(free, whole, found):
    known = {"shm_free": free} | ({"shm_size": whole} if whole else {})
    assert memory_of(None, [rank(memory=memory((0, known)))], NOW).shm_full == found


def test_how_private_memory_has_grown():
    own = worker(memory=memory((-60, {"private": GIB, "samples": 10}), (0, {"private": 2 * GIB, "samples": 1010})))
    found = memory_of(own, [own], NOW)
    assert found.grown == "private memory grew from 1.0 GiB to 2.0 GiB in 60 s and 1,000 samples"
    assert memory_of(worker(memory=memory((0, {"private": GIB}))), [], NOW).grown == ""


def test_kills_are_a_rise_within_one_cgroup():
    counted = [rank(memory=memory((-1, {"oom_kills": 5}))), rank(1, memory=memory((0, {"oom_kills": 0})))]
    assert oom_kills(counted, NODE, None) == 0  # two cgroups of one machine
    rose = rank(2, memory=memory((-1, {"oom_kills": 5}), (0, {"oom_kills": 7})))
    assert oom_kills([*counted, rose], NODE, None) == 2
    assert oom_kills([*counted, rose], "node-2", None) is None
    assert oom_kills([], NODE, 1) == 1


def test_in_words():
    figures = {"rss_bytes": GIB, "current_bytes": 3 * GIB, "cache_bytes": GIB, "limit_bytes": 4 * GIB}
    figures |= {"peak_bytes": 4 * GIB, "shm_free_bytes": 5, "shm_size_bytes": 9, "open_files": 12}
    assert in_words(figures) == (
        "1.0 GiB resident; the cgroup used 2.0 GiB of 4.0 GiB (at most 4.0 GiB); /dev/shm 5 bytes free of 9 bytes; "
        "12 open files"
    )
