"""A whole run: which of several, live or gone, hung before or not, and what is said in words."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest

from lightning_gpuopt.measurements.flight import VALIDATES
from lightning_gpuopt.postmortem.hangs import Hang
from lightning_gpuopt.postmortem.record import PostMortem, Process
from lightning_gpuopt.postmortem.wording import clock
from tests.postmortem.judged_runs import (
    AT_READ,
    AT_STEP,
    GIB,
    INT,
    KILL,
    NOW,
    TERM,
    command,
    crash,
    died,
    judged,
    memory,
    raised,
    rank,
    told,
    torch_says,
    worker,
)

HANG = Hang(0, 100, NOW - 300, 280.0, 120.0)
STUCK = {"progress_s": NOW - 300, "since_s": NOW - 300}


def test_the_last_of_several_runs_counts():
    before = rank(run="run-0", pid=50, at=-900, crash=crash())
    found = judged(before, rank(ended="exception", events=[raised("ValueError", "x")]), end=None)
    assert (found.ended, found.process.pid) == ("exception", 100)
    assert judged(before, rank(ended="ok")).ended == "ok"


def test_a_live_rank_whose_worker_has_died():
    found = judged(rank(events=[died(1, at=-0.2, signal=KILL)]), worker(1, at=-0.5), alive=(100,))
    assert (found.ended, found.process) == ("killed", Process(0, 1, 1001))


def test_a_live_run_that_hangs():
    found = judged(rank(turn=1, **STUCK), worker(0), worker(1), alive=(100, 1000, 1001))
    assert (found.ended, found.process, found.index) == ("hang", Process(0, 1, 1001), 48_213)
    assert found.text.splitlines()[:2] == [
        f"No progress since {clock(NOW - 300)}, for 5 min (a hang is 2 min).",
        f"It was the turn of worker 1 (pid 1001): index 48,213, at {AT_READ}.",
    ]


# how it ended after a hang: what it is called, the signal
AFTERWARDS = {
    "ctrl-c": ({"ended": "exception", "events": [raised("KeyboardInterrupt")]}, 130, "hang", INT),
    "sigterm": ({"events": [told(TERM)]}, -15, "hang", TERM),
    "sigterm-exception": ({"ended": "exception", "events": [raised("SIGTERMException")]}, 143, "hang", TERM),
    "kill": ({}, -9, "hang", KILL),
    "code": ({"ended": "ok"}, 1, "hang", None),
    "watchdog": ({}, -6, "aborted", 6),
    "crash": ({"crash": crash()}, -11, "segfault", 11),
    "exception": ({"ended": "exception", "events": [raised("ValueError", "x")]}, 1, "exception", None),
}


@pytest.mark.parametrize(("known", "code", "ended", "number"), AFTERWARDS.values(), ids=AFTERWARDS)
def test_a_run_that_hung_before_it_was_ended(known, code, ended, number):
    found = judged(rank(**(STUCK | known)), end=command(code), hang=HANG)
    assert (found.ended, found.signal) == (ended, number), found.text


@pytest.mark.parametrize("case", ["ctrl-c", "sigterm", "sigterm-exception", "watchdog", "exception", "kill", "crash"])
def test_nobody_watched_a_run_that_hung_before_it_was_ended(case):
    known, _, ended, _ = AFTERWARDS[case]
    expected = "hang" if case == "watchdog" else ended  # how it vanished, nobody knows
    found = judged(rank(**(STUCK | known)))
    assert (found.ended, found.process) == (expected, Process(0, None, 100)), found.text


def test_a_hang_that_ends_for_want_of_memory_is_no_hang():
    memory_rose = memory((-9, {"oom_kills": 0}), (0, {"oom_kills": 1}))
    assert judged(rank(memory=memory_rose, **STUCK), end=command(-9), hang=HANG).ended == "out_of_memory"


def test_a_validation_that_had_begun_late_is_no_hang():
    known = STUCK | {"doing": VALIDATES, "since_s": NOW - 20}
    assert judged(rank(**known), end=None).ended == "killed"


def test_several_ranks_in_words():
    lost = [raised("RuntimeError", "Connection closed by peer", at=0.2)]
    records = [rank(each, of=4, ended="exception", events=lost) for each in (0, 1, 3)]
    found = judged(*records, rank(2, of=4, at=0, crash=crash()), worker(1, rank=2), end=command(1, pid=7))
    assert found.text.splitlines() == [
        f"Rank 2 (pid 102) crashed with a segmentation fault (SIGSEGV) at {clock(NOW)}.",
        "At __getitem__ (data.py:44).",
        "After it: ranks 0-1 and 3: RuntimeError.",
        f"What to change: {found.advice}",
    ]


def test_one_rank_in_words():
    full = {"limit": 4 * GIB, "current": 4 * GIB, "oom_kills": 0}
    grown = memory((-60, {"private": GIB}), (-2, {"private": 2 * GIB}))
    says = torch_says(1)
    events = [died(1, at=-1, signal=KILL), raised("RuntimeError", says)]
    records = (
        rank(ended="exception", events=events, memory=memory((-2, full))),
        worker(1, at=-1, memory=grown),
    )
    found = judged(*records, end=command(1))
    assert found.text.splitlines() == [
        f"Worker 1 (pid 1001) was ended by SIGKILL at {clock(NOW - 1)}.",
        f"It read sample 48,213, at {AT_READ}.",
        "Memory before: 2.0 GiB private; the cgroup used 4.0 GiB of 4.0 GiB.",
        "Private memory grew from 1.0 GiB to 2.0 GiB in 58 s.",
        "Likely: it was ended because memory ran out, by the kernel or by an agent of the cluster: its memory cgroup "
        "used 4.0 GiB of 4.0 GiB.",
        f"What to change: {found.advice}",
    ]


def test_a_batch_that_was_asked_for_at_once_in_words():
    found = judged(
        rank(ended="exception", events=[died(1, at=-1, signal=KILL), raised("RuntimeError", torch_says(1))]),
        worker(1, at=-1, index=None, indices=(4, 9, 2)),
        end=command(1),
    )
    assert (found.index, found.text.splitlines()[1]) == (None, f"It read a batch of samples, 4 to 2, at {AT_READ}.")


def test_the_batch_that_raised_counts_and_not_what_its_worker_has_read_since():
    words = "Caught OSError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\nOSError: full"
    read = worker(1, index=None, indices=(111, 112), events=[raised("OSError", "full", at=-1, indices=[90, 95])])
    found = judged(rank(ended="exception", events=[raised("OSError", words)]), read, end=command(1))
    assert "read a batch of samples, 90 to 95" in found.text


def test_an_exception_in_words():
    words = "Caught OSError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\nOSError: full"
    found = judged(rank(ended="exception", events=[raised("OSError", words)]), worker(1), end=command(1))
    assert found.text.splitlines()[0] == f"Worker 1 (pid 1001) raised OSError at {clock(NOW)}: full."


def test_c_frames_are_shown():
    text = crash() + '\n  Binary file "/lib/libjpeg.so.8", at decode+0x10 [0x7]\n'
    assert "Innermost in C: libjpeg.so.8 decode+0x10." in judged(rank(crash=text), end=command(-11)).text.splitlines()


def test_ranks_of_unequal_length_end_in_a_lost_connection():
    early = rank(1, of=2, doing="set-up", batch=88, batches=88, at=-5, ended="ok")
    lost = rank(0, of=2, batch=88, batches=100, ended="exception", events=[raised("RuntimeError", "Broken pipe")])
    found = judged(lost, early, end=command(1))
    assert (found.ended, found.process, found.where) == ("exception", Process(1, None, 101), AT_STEP)
    assert found.text.startswith(
        "Rank 1 ended its epoch 12 batches early (88, not 100); rank 0 waited, and ended by RuntimeError at "
    )


BROKEN = [None, "x", -1, 2**70, 1.5, math.nan, [], [None], {}, {"a": "b"}, True]
KEYS = {
    "exception": "type message where frames index indices t",
    "worker_died": "worker pid signal code loader t",
    "signal": "signal t",
    "uneven_ranks": "batches t",
    "collective": "entries t",
}


def broken_events():
    whole = {
        "exception": raised("RuntimeError", torch_says(1)),
        "worker_died": died(1, at=-1, signal=KILL),
        "signal": told(TERM),
        "uneven_ranks": {"t": NOW, "event": "uneven_ranks", "batches": {"0": 5, "1": 6}},
        "collective": {"t": NOW, "event": "collective", "entries": [{"collective_seq_id": 1}]},
    }
    for event, keys in KEYS.items():
        for key, value in product(keys.split(), BROKEN):
            yield {**whole[event], key: value}
        yield {"event": event}
    yield "no event"


@pytest.mark.parametrize("ended", ["", "exception"])
def test_broken_events_are_never_an_error(ended):
    for event in broken_events():
        for of_worker, of_rank in (((event,), ()), ((), (event,)), ((), (event, *broken_pair()))):
            records = rank(of=2, ended=ended, events=of_rank), rank(1, of=2, at=-3), worker(1, events=of_worker)
            for end, hang in product((None, command(1), command(-9)), (None, HANG)):
                found = judged(*records, end=end, hang=hang)
                assert PostMortem.from_json(found.to_json()) == found
                assert found.text


def broken_pair():
    return died(1, at=-1, signal=KILL), raised("RuntimeError", torch_says(1))


@pytest.mark.parametrize("at_s", [0.0, -1.0, 1e30])
def test_clocks_that_are_far_off(at_s):
    found = judged(replace(rank(at=0), written_s=at_s, progress_s=at_s, created_s=at_s, since_s=at_s), end=command(-9))
    assert (found.ended, found.process, found.where) == ("killed", Process(0, None, 100), AT_STEP)


@pytest.mark.parametrize("quiet_s", [4.0, 40.0])
def test_a_run_that_was_interrupted_before_it_counted_as_a_hang(quiet_s):
    interrupted = {"ended": "exception", "events": [raised("KeyboardInterrupt")]}
    found = judged(rank(progress_s=NOW - quiet_s, turn=3, **interrupted), worker(3), end=command(1))
    assert (found.ended, found.process) == ("interrupted", Process(0, None, 100)), found.text
    waited = "Before it there was no progress for 40 s, which is not a hang yet:" in found.text
    assert waited is (quiet_s == 40.0), found.text
    assert ("48,213" in found.text and "Photos.__getitem__ (data.py:41)" in found.text) is waited, found.text
    assert found.likely.startswith("if it hung, ") is waited
