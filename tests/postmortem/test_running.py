"""What is said of a run that goes on: where it is, and what it may wait for."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpuopt.measurements.flight import READS, SETS_UP, TRAINS, FlightRecord, MemoryReading
from lightning_gpuopt.postmortem.analysis import post_mortem_of
from lightning_gpuopt.postmortem.record import PostMortem, Process

NOW = 1_000.0
RANK = FlightRecord(
    run="a", host="here", pid=100, start_ticks=1, rank=0, world_size=1, created_s=0.0, written_s=NOW, doing=TRAINS,
    steps=40, progress_s=NOW - 30.0, longest_s=2.0, turn=1, place="Net.training_step (train.py:9)",
)  # fmt: skip
WORKER = replace(
    RANK, pid=201, worker=1, loader="train", doing=READS, since_s=NOW - 30.0, turn=None, index=48_213, fork=True,
    batches_read=20, cpu_s=9.0, place="Photos.__getitem__ (data.py:41)",
)  # fmt: skip


def said(*records: FlightRecord, waits: dict[int, str] | None = None) -> PostMortem:
    return post_mortem_of(records, now_s=NOW, is_alive=lambda record: True, waits=waits)


def test_a_run_without_progress_that_is_no_hang_yet_says_what_it_waits_for() -> None:
    found = said(RANK, WORKER)
    assert (found.ended, found.process) == ("unknown", Process(0, 1, 201))
    assert (found.where, found.index) == ("Photos.__getitem__ (data.py:41)", 48_213)
    first, turn, likely, advice = found.text.splitlines()
    assert first == "The run is still running: 40 steps so far, and no progress for 30 s, which is not a hang yet."
    assert turn == "It was the turn of worker 1 (pid 201): index 48,213, at Photos.__getitem__ (data.py:41)."
    assert likely == "Likely: if it hangs, a read or a call that does not return: check the line above."
    assert advice.startswith("What to change: DataLoader(timeout=...)")


def test_before_the_first_step_a_lock_from_before_the_fork_is_likely_after_seconds() -> None:
    rank = replace(RANK, doing=SETS_UP, steps=0, progress_s=0.0, created_s=NOW - 8.0, longest_s=0.0)
    found = said(rank, replace(WORKER, batches_read=0, cpu_s=0.0), waits={201: "futex_do_wait"})
    assert found.ended == "unknown"
    assert found.likely.startswith("if it hangs, a lock that was held during the fork")
    assert "no progress for 8 s" in found.text


def test_of_a_run_that_makes_progress_only_its_place_is_said() -> None:
    found = said(replace(RANK, progress_s=NOW - 19.0), WORKER)  # ten times its longest are 20 s
    assert (found.ended, found.process, found.likely, found.advice) == ("unknown", Process(0, 1, 201), "", "")
    assert found.text.splitlines() == [
        "The run is still running: 40 steps so far, and no hang.",
        "It was the turn of worker 1 (pid 201): index 48,213, at Photos.__getitem__ (data.py:41).",
    ]


def test_memory_is_told_of_a_run_that_goes_on() -> None:
    read = (MemoryReading(NOW - 1.0, rss=2, limit=8, current=4),)
    found = said(RANK, replace(WORKER, memory=read))
    figures = {name: found.memory[name] for name in ("rss_bytes", "limit_bytes", "current_bytes")}
    assert figures == {"rss_bytes": 2, "limit_bytes": 8, "current_bytes": 4}
