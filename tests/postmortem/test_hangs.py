"""Whether a run hangs, and who holds it up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpuopt.measurements.flight import FlightRecord
from lightning_gpuopt.postmortem.analysis import post_mortem_of
from lightning_gpuopt.postmortem.hangs import Hang, describe_hang, hang_of
from lightning_gpuopt.postmortem.process_end import CommandEnd
from lightning_gpuopt.postmortem.record import Process
from lightning_gpuopt.postmortem.wording import clock
from tests.postmortem.records import (
    ALL_REDUCE,
    BACKWARD,
    BARRIER,
    GETITEM,
    LOADER,
    SLEEP,
    STEP,
    WORKER_LOOP,
    T,
    error,
    rank,
    ranks,
    sent,
    stack,
    worker,
)

NEXT_INDEX = ("_next_index", "/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 700)
BARRIER_AT = "barrier (torch/distributed/distributed_c10d.py:4700)"
OTHER_THREAD = stack(SLEEP, ("run", "/home/me/heartbeat.py", 5))


def quiet(seconds: float, number: int = 0, **known: object) -> FlightRecord:
    """A rank without progress for so long."""
    return rank(number, **{"progress_s": T - seconds, "since_s": T - 1.0, **known})


# seconds without progress, what is known, whether it is a hang
LIMITS = {
    "less than two minutes": (119.0, {}, False),
    "two minutes": (120.0, {}, True),
    "ten times the longest so far": (599.0, {"longest_s": 60.0}, False),
    "more than ten times the longest so far": (601.0, {"longest_s": 60.0}, True),
    "before the first step": (1799.0, {"steps": 0}, False),
    "half an hour before the first step": (1800.0, {"steps": 0}, True),
    "no progress at all, since the beginning": (0.0, {"steps": 0, "progress_s": 0.0, "created_s": T - 1801.0}, True),
    "a validation batch that has just begun": (500.0, {"doing": "validation"}, False),
    "a validation batch that is open for long": (5.0, {"doing": "validation", "since_s": T - 130.0}, True),
    "a save that is open for long": (5.0, {"doing": "save", "since_s": T - 130.0}, True),
    "what its detector was told": (5.0, {"hang_s": 5.0, "longest_s": 60.0}, True),
    "what its detector was told, before the first step": (5.0, {"hang_s": 5.0, "steps": 0}, True),
    "less than its detector was told": (599.0, {"hang_s": 600.0}, False),
    "fit has ended": (9999.0, {"ended": "ok"}, False),
}


@pytest.mark.parametrize(("seconds", "known", "hangs"), LIMITS.values(), ids=LIMITS)
def test_what_counts_as_a_hang(seconds: float, known: dict[str, object], hangs: bool) -> None:
    assert (hang_of([quiet(seconds, **known), worker(3)], T) is not None) is hangs


def test_one_rank_that_is_stuck_holds_up_all() -> None:
    found = hang_of([quiet(1.0), quiet(300.0, 1), quiet(200.0, 2)], T)
    assert found == Hang(rank=1, pid=101, since_s=T - 300.0, quiet_s=300.0, limit_s=120.0)


FORKED = {"batches_read": 0, "cpu_s": 0.02, "doing": "starts", "index": None, "place": ""}

# records, stacks, waits: process, where, index, likely
STUCK = {
    "a step": (
        [quiet(300.0)],
        {100: stack(STEP)},
        {},
        Process(0, None, 100),
        "Net.training_step (net.py:22)",
        None,
        "",
    ),
    "a step without stacks": (
        *([quiet(300.0)], {}, {}, Process(0, None, 100), "Net.training_step (net.py:20)", None, ""),
    ),
    "the main thread is the last one": (
        [quiet(300.0)],
        {100: stack(STEP, others=[OTHER_THREAD])},
        *({}, Process(0, None, 100), "Net.training_step (net.py:22)", None, ""),
    ),
    "the worker whose turn it is": (
        [quiet(300.0, turn=3), worker(2, doing="waits"), worker(3)],
        {100: stack(LOADER), 203: stack(GETITEM, WORKER_LOOP)},
        {203: "rpc_wait_bit_killable"},
        *(Process(0, 3, 203), "Photos.__getitem__ (data.py:43)", 48213, "a read or a call that does not return"),
    ),
    "a sampler of the user's, which has asked no worker": (
        [quiet(300.0, turn=3), worker(3, doing="waits", index=None)],
        {100: stack(SLEEP, ("__iter__", "/home/me/sampler.py", 9), NEXT_INDEX, STEP), 203: stack(WORKER_LOOP)},
        *({}, Process(0, None, 100), "__iter__ (sampler.py:9)", None, ""),
    ),
    "a worker whose exception could not be handed over": (
        [
            quiet(300.0, turn=3),
            worker(3, doing="waits", index=None, events=(error("data.BadPhoto", where="f (data.py:9)", index=77),)),
        ],
        {100: stack(LOADER), 203: stack(WORKER_LOOP)},
        *({}, Process(0, 3, 203), "f (data.py:9)", 77),
        "the worker raised data.BadPhoto, which could not be sent on: its class cannot be pickled",
    ),
    "of several loaders' workers those of the validation": (
        [quiet(300.0, turn=3, doing="validation"), worker(3), worker(3, pid=300, loader="validation", index=7)],
        {},
        *({}, Process(0, 3, 300), "Photos.__getitem__ (data.py:41)", 7, "a read or a call that does not return"),
    ),
    "the worker that has been busy for longest, where no turn is known": (
        [quiet(300.0), worker(1, since_s=T - 5.0), worker(3, since_s=T - 300.0)],
        {100: stack(LOADER)},
        *({}, Process(0, 3, 203), "Photos.__getitem__ (data.py:41)", 48213, "a read or a call that does not return"),
    ),
    "a lock that was held at the fork, by the kernel": (
        [quiet(1900.0, turn=0, steps=0), worker(0, **FORKED)],
        {200: stack(("imread", "/home/me/data.py", 9), WORKER_LOOP)},
        {200: "futex_wait_queue"},
        *(Process(0, 0, 200), "imread (data.py:9)", None),
        "a lock that was held during the fork (innermost frame: imread (data.py:9))",
    ),
    "a lock that was held at the fork, by the stack": (
        [quiet(1900.0, turn=0, steps=0), worker(0, **FORKED)],
        {200: stack(("__enter__", "/usr/lib/python3.11/threading.py", 271), GETITEM, WORKER_LOOP)},
        *({200: ""}, Process(0, 0, 200), "__getitem__ (data.py:43)", None),
        "a lock that was held during the fork (innermost frame: __enter__ (threading.py:271))",
    ),
    "a first read that waits for a disk is no lock": (
        [quiet(1900.0, turn=0, steps=0), worker(0, batches_read=0, cpu_s=0.02)],
        {200: stack(GETITEM, WORKER_LOOP)},
        {200: "folio_wait_bit_common"},
        *(Process(0, 0, 200), "Photos.__getitem__ (data.py:43)", 48213, "a read or a call that does not return"),
    ),
    "a worker that was spawned has no such lock": (
        [quiet(1900.0, turn=0, steps=0), worker(0, batches_read=0, cpu_s=0.02, fork=False)],
        {200: stack(GETITEM, WORKER_LOOP)},
        {200: "futex_wait_queue"},
        *(Process(0, 0, 200), "Photos.__getitem__ (data.py:43)", 48213, "a read or a call that does not return"),
    ),
    "the rank that is not in the collective": (
        ranks(3, *(quiet(300.0, n) for n in range(3))),
        {100: stack(BACKWARD, STEP), 101: stack(("slow", "/home/me/net.py", 9), STEP), 102: stack(ALL_REDUCE)},
        *({}, Process(1, None, 101), "slow (net.py:9)", None, "the others wait for rank 1"),
    ),
    "the worker of the rank that is not in the collective": (
        [*ranks(2, quiet(300.0), quiet(300.0, 1, turn=3)), worker(3), worker(3, of=1, index=9)],
        {100: stack(BACKWARD, STEP), 101: stack(LOADER)},
        *({}, Process(1, 3, 213), "Photos.__getitem__ (data.py:41)", 9, "a read or a call that does not return"),
    ),
    "different collectives": (
        ranks(2, quiet(300.0), quiet(301.0, 1)),
        {100: stack(ALL_REDUCE), 101: stack(BARRIER)},
        *({}, Process(1, None, 101), BARRIER_AT, None, "the ranks wait in different collectives"),
    ),
    "different collectives, one of which the user's code has called": (
        ranks(2, quiet(300.0), quiet(301.0, 1)),
        {100: stack(BARRIER, STEP), 101: stack(BACKWARD)},
        *({}, Process(0, None, 100), "Net.training_step (net.py:22)", None, "the ranks wait in different collectives"),
    ),
    "different collectives, in one of which there is one rank only": (
        ranks(3, quiet(302.0), quiet(301.0, 1), quiet(300.0, 2)),
        {100: stack(BARRIER, STEP), 101: stack(BARRIER, STEP), 102: stack(ALL_REDUCE, STEP)},
        *({}, Process(2, None, 102), "Net.training_step (net.py:22)", None, "the ranks wait in different collectives"),
    ),
    "a rank that left its epoch": (
        ranks(2, quiet(300.0, batch=8, batches=20), quiet(290.0, 1, batch=8, batches=8, doing="set-up", place="")),
        {100: stack(BACKWARD, STEP), 101: stack(BARRIER)},
        *({}, Process(1, None, 101), BARRIER_AT, None, "the ranks have different numbers of batches"),
    ),
    "NCCL's flight recorder: who has not joined": (
        ranks(
            2,
            *(
                quiet(
                    *(300.0, n),
                    place="",
                    events=(
                        {
                            **{"t": T, "event": "collective"},
                            "entries": [
                                {"profiling_name": "nccl:all_reduce", "collective_seq_id": 9 - n, "state": "started"}
                            ],
                        },
                    ),
                )
                for n in (0, 1)
            ),
        ),
        *({}, {}, Process(1, None, 101), None, None, "all ranks have joined the collective, or the missing one cannot"),
    ),
    "nothing is known": ([], {}, {}, None, None, None, ""),
}


@pytest.mark.parametrize(
    ("records", "stacks", "waits", "process", "where", "index", "likely"), STUCK.values(), ids=STUCK
)
def test_who_holds_it_up(records, stacks, waits, process, where, index, likely) -> None:  # type: ignore[no-untyped-def]
    found = describe_hang(records, stacks, waits)
    assert (found.process, found.where, found.index) == (process, where, index)
    assert found.likely.startswith(likely)
    assert bool(found.likely) is bool(likely)


def test_ranks_are_told_in_groups() -> None:
    early = quiet(90.0, 5, batch=8, batches=8, doing="set-up", place="")
    records = ranks(8, early, *(quiet(100.0, n, batch=8, batches=20) for n in range(8) if n != 5))
    stacks = {100 + n: stack(ALL_REDUCE) for n in range(8) if n != 5}
    text = describe_hang(records, stacks, {}).text.splitlines()[0]
    since = clock(T - 100.0)
    assert (
        text
        == f"rank 5 ended its epoch 12 batches early (8, not 20); ranks 0-4 and 6-7 wait in all_reduce since {since}"
    )


def judged(
    records: list[FlightRecord], command: CommandEnd | None = None, hang: Hang | None = None, alive: bool = True
):  # type: ignore[no-untyped-def]
    return post_mortem_of(records, now_s=T, is_alive=lambda _: alive, command=command, hang=hang)


BEFORE = Hang(0, 100, T - 300.0, 200.0, 120.0)
ENDS = {
    "it hangs now": ([quiet(300.0)], None, None, True, "hang", None),
    "it was killed": ([quiet(300.0)], CommandEnd(-9, T, 0), BEFORE, False, "hang", 9),
    "it was told to end": ([quiet(300.0, events=(sent(15),))], CommandEnd(-15, T, 0, (15,)), BEFORE, False, "hang", 15),
    "it was interrupted": (
        [quiet(300.0, ended="exception", events=(error("KeyboardInterrupt"),))],
        *(CommandEnd(1, T, 0, (2,)), BEFORE, False, "hang", 2),
    ),
    "it was killed, and nobody had looked": ([quiet(300.0)], None, None, False, "hang", None),
    "it was killed for want of memory": ([quiet(300.0)], CommandEnd(-9, T, 1), BEFORE, False, "out_of_memory", 9),
    "it ended by an exception": (
        [quiet(300.0, ended="exception", events=(error("TimeoutError"),))],
        *(None, BEFORE, False, "exception", None),
    ),
    "it was killed without a hang": ([quiet(60.0)], None, None, False, "killed", None),
}


@pytest.mark.parametrize(("records", "command", "hang", "alive", "ended", "number"), ENDS.values(), ids=ENDS)
def test_how_a_hang_ends(records, command, hang, alive, ended, number) -> None:  # type: ignore[no-untyped-def]
    found = judged(records, command, hang, alive)
    assert (found.ended, found.process, found.signal) == (ended, Process(0, None, 100), number)


def test_a_run_that_was_killed_says_what_it_waited_for() -> None:
    waiting = quiet(60.0, turn=3)
    text = judged([waiting, replace(worker(3), written_s=T)], CommandEnd(-9, T, 0, (), 100), None, False).text
    assert "Before it there was no progress for 60 s, which is not a hang yet:" in text.splitlines()
    assert (
        "It was the turn of worker 3 (pid 203): index 48,213, at Photos.__getitem__ (data.py:41)." in text.splitlines()
    )


def test_what_its_detector_was_told_hides_no_wait() -> None:
    text = judged([quiet(110.0, hang_s=600.0)], CommandEnd(-9, T, 0, (), 100), None, False).text
    assert "Before it there was no progress for 110 s, which is not a hang yet:" in text.splitlines()


def test_a_worker_that_is_stuck_is_named_after_its_run_was_interrupted() -> None:
    stopped = quiet(300.0, turn=3, ended="exception", events=(error("KeyboardInterrupt"),))
    found = judged([stopped, replace(worker(3), written_s=T)], None, BEFORE, False)
    assert (found.ended, found.process, found.index) == ("hang", Process(0, 3, 203), 48213)


def test_ranks_are_told_as_they_were_before_they_were_interrupted() -> None:
    stopped = [
        replace(each, ended="exception", events=(error("KeyboardInterrupt"),)) for each in ranks(2, quiet(300.0))
    ]
    text = judged(stopped, None, BEFORE, False).text
    assert "have ended" not in text
