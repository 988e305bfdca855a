"""What ended a run, and which process first: causes from their consequences."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from lightning_gpuopt.measurements.flight import OUTSIDE_OF_FIT, FlightRecord
from lightning_gpuopt.postmortem.analysis import post_mortem_of
from lightning_gpuopt.postmortem.process_end import CommandEnd, ProcessEnd
from lightning_gpuopt.postmortem.record import PostMortem, Process
from tests.postmortem.records import (
    GETITEM,
    STEP,
    WORKER_LOOP,
    T,
    crash,
    died,
    error,
    rank,
    ranks,
    readings,
    sent,
    worker,
)

RANK = Process(0, None, 100)
WORKER = Process(0, 3, 203)
HERE, THERE = "Photos.__getitem__ (data.py:41)", "Net.training_step (net.py:20)"


@dataclass(frozen=True)
class Case:
    """A run, and what is to be said of it; processes in ``alive`` are there (by pid)."""

    records: list[FlightRecord]
    ended: str
    process: Process | None = None
    where: str | None = None
    index: int | str | None = None
    signal: int | None = None
    command: CommandEnd | None = None
    alive: tuple[int, ...] = ()
    ends: dict[tuple[str, int], ProcessEnd] = field(default_factory=dict)


def end(code: int, *, kills: int | None = 0, signals: tuple[int, ...] = (), pid: int | None = None) -> CommandEnd:
    return CommandEnd(code, T + 1.0, kills, signals, pid)


def judged(case: Case) -> PostMortem:
    return post_mortem_of(
        case.records,
        now_s=T + 2.0,
        is_alive=lambda each: each.pid in case.alive,
        command=case.command,
        ends=case.ends,
    )


def torch_says(pid: int, by: str) -> str:
    return f"DataLoader worker (pid {pid}) is killed by signal: {by}. "


def fails(*events: dict[str, Any], number: int = 0, **known: Any) -> FlightRecord:
    """A rank whose ``fit`` ended by an exception."""
    return rank(number, ended="exception", events=events, **known)


OUTSIDE = rank(
    run=f"a-100{OUTSIDE_OF_FIT}",
    ended="exception",
    place="",
    events=(error("ValueError", "y", where="main (train.py:3)"),),
)
KILLED = error("RuntimeError", torch_says(203, "Killed"), 0.3, where="step (loop.py:1)")
EXITED = "DataLoader worker (pid(s) 203) exited unexpectedly"
LOST = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"
TIMED_OUT = "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"
CAUGHT = (
    "Caught ValueError in DataLoader worker process 3.\nOriginal Traceback (most recent call last):\n"
    '  File "/v/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 351, in _worker_loop\n'
    '    data = fetcher.fetch(index)\n  File "/home/me/data.py", line 43, in __getitem__\n    raise ValueError("x")\n'
    "ValueError: x\n"
)
SEGFAULT = crash("Segmentation fault", ("imread", "/v/lib/python3.11/site-packages/cv2/a.py", 7), GETITEM, WORKER_LOOP)

RECVFDS = "recvfds (reduction.py:159)"
NO_FILES = error("OSError", "[Errno 24] Too many open files", 0.5, where="Photos.__getitem__ (data.py:43)", index=7)

ONE_RANK = {
    # ---- a worker first ----
    "a worker was killed": Case([fails(died(3, 0.1, signal=9), KILLED), worker(3)], "killed", WORKER, HERE, 48213, 9),
    "torch alone says which worker was killed": Case([fails(KILLED), worker(3)], "killed", WORKER, HERE, 48213, 9),
    "a worker was killed, and the kernel's counter rose": Case(
        [fails(died(3, 0.1, signal=9), KILLED), worker(3)],
        *("out_of_memory", WORKER, HERE, 48213, 9, end(1, kills=1)),
    ),
    "a worker raised, and its batches before came no more": Case(
        [fails(error("EOFError", at=2.5, frames=[RECVFDS])), worker(3, events=(NO_FILES,))],
        *("exception", WORKER, "Photos.__getitem__ (data.py:43)", 7, None),
    ),
    "a worker had raised, long before a pipe broke": Case(
        [fails(error("EOFError", at=32.5, frames=[RECVFDS])), worker(3, events=(NO_FILES,))],
        *("exception", RANK, RECVFDS, None, None),
    ),
    "the surviving rank has read the kernel's counter": Case(
        [fails(died(3, 0.1, signal=9), KILLED, memory=readings(2, 2, 3, of="oom_kills")), worker(3)],
        *("out_of_memory", WORKER, HERE, 48213, 9),
    ),
    "another machine's counter does not matter": Case(
        [
            fails(died(3, 0.1, signal=9), KILLED),
            worker(3),
            rank(1, ended="ok", host="b", memory=readings(2, 3, of="oom_kills")),
        ],
        *("killed", WORKER, HERE, 48213, 9),
    ),
    "a worker's segmentation fault, with its line": Case(
        [fails(died(3, signal=11), error("RuntimeError", torch_says(203, "Segmentation fault"), 0.1)), worker(3)],
        *("segfault", WORKER, HERE, 48213, 11),
    ),
    "the line of faulthandler is newer than the one seen last": Case(
        [fails(died(3, signal=11)), worker(3, crash=SEGFAULT)],
        *("segfault", WORKER, "Photos.__getitem__ (data.py:43)", 48213, 11),
    ),
    "a worker's bus error, by torch's words": Case(
        [
            fails(error("RuntimeError", torch_says(203, "Bus error") + "It is possible that dataloader's workers ...")),
            worker(3),
        ],
        *("bus_error", WORKER, HERE, 48213, 7),
    ),
    "a worker aborted": Case([fails(died(3, signal=6)), worker(3)], "aborted", WORKER, HERE, 48213, 6),
    "a worker divided by zero in C": Case([fails(died(3, signal=8)), worker(3)], "aborted", WORKER, HERE, 48213, 8),
    "a worker was ended by SIGTERM alone": Case(
        [fails(error("RuntimeError", torch_says(203, "Terminated"))), worker(3)],
        *("terminated", WORKER, HERE, 48213, 15),
    ),
    "a worker left by os._exit": Case([fails(died(3, code=7)), worker(3)], "exited", WORKER, HERE, 48213),
    "a worker whose ring is lost": Case([fails(died(3, signal=9))], "killed", WORKER, None, None, 9),
    "of several workers the one that wrote last before": Case(
        [
            fails(error("RuntimeError", "DataLoader worker (pid(s) 203, 201) exited unexpectedly")),
            worker(1, written=-0.1),
            worker(3, written=-3.0),
        ],
        *("killed", WORKER, HERE, 48213),
    ),
    "an exit code in torch's words": Case(
        [fails(error("RuntimeError", "DataLoader worker (pid 203) exited unexpectedly with exit code 3.")), worker(3)],
        *("exited", WORKER, HERE, 48213),
    ),
    "a lost connection to a worker that was killed": Case(
        [
            fails(error("ConnectionResetError", "[Errno 104] Connection reset by peer"), died(3, 0.4, signal=9)),
            worker(3),
        ],
        *("killed", WORKER, HERE, 48213, 9),
    ),
    "a rank waits for ever for a worker that was killed": Case(
        [rank(written=20.0, progress_s=T - 0.1, events=(died(3, signal=9),)), worker(3)],
        *("killed", WORKER, HERE, 48213, 9, None, (100,)),
    ),
    # ---- consequences for workers ----
    "workers that are ended after their rank's exception": Case(
        [
            fails(error("ValueError", "x", where="f (a.py:1)"), died(3, 0.1, signal=9), died(1, 0.2, signal=15)),
            worker(3),
        ],
        *("exception", RANK, "f (a.py:1)"),
    ),
    "workers that end with Ctrl-C": Case(
        [fails(died(3, -0.1, code=1), error("KeyboardInterrupt", where="f (a.py:1)")), worker(3)],
        *("interrupted", RANK, "f (a.py:1)", None, 2),
    ),
    "Ctrl-C in a worker, too": Case(
        [
            fails(error("KeyboardInterrupt", where="f (a.py:1)")),
            worker(3, events=(error("KeyboardInterrupt", at=-0.1),)),
        ],
        *("interrupted", RANK, "f (a.py:1)", None, 2),
    ),
    "SIGTERM to all processes": Case(
        [fails(sent(15), error("RuntimeError", torch_says(203, "Terminated"), 0.1)), worker(3)],
        *("terminated", RANK, THERE, None, 15),
    ),
    "a worker that was killed long before an exception of another kind": Case(
        [fails(died(3, -300.0, signal=9), error("ValueError", "x", where="f (a.py:1)")), worker(3)],
        *("exception", RANK, "f (a.py:1)"),
    ),
    "a run that goes on after a worker was killed": Case(
        [rank(written=1.0, events=(died(3, -20.0, signal=9),)), worker(3)], "unknown", RANK, THERE, alive=(100,)
    ),
    # ---- exceptions ----
    "an exception in the step": Case(
        [fails(error("ValueError", "x", where="Net.loss (net.py:9)"))], "exception", RANK, "Net.loss (net.py:9)"
    ),
    "an exception in a worker": Case(
        [
            fails(error("ValueError", CAUGHT, 5.0)),
            worker(3, index=None, events=(error("ValueError", "x", -2.0, where="Photos.get (data.py:9)", index=77),)),
        ],
        *("exception", WORKER, "Photos.get (data.py:9)", 77),
    ),
    "an exception in a worker that only torch repeats": Case(
        [fails(error("ValueError", CAUGHT)), worker(3, index=None)],
        *("exception", WORKER, "Photos.__getitem__ (data.py:43)"),
    ),
    "an exception of a worker that nobody waited for": Case(
        [fails(error("ValueError", "y", where="f (a.py:1)")), worker(3, events=(error("KeyError", "'k'", -1.0),))],
        *("exception", RANK, "f (a.py:1)"),
    ),
    "a sample that the rank reads itself": Case(
        [
            fails(
                error("OSError", "old", -500.0, index=1),
                error("OSError", "truncated", 0.0, where=HERE, index="a.jpg"),
                error("OSError", "truncated", 0.1, where=HERE),
            )
        ],
        *("exception", RANK, HERE, "a.jpg"),
    ),
    "a MemoryError is an exception": Case(
        [fails(error("MemoryError", "", where=HERE))], "exception", RANK, HERE, command=end(1, kills=0)
    ),
    "CUDA's out of memory is an exception": Case(
        [fails(error("torch.OutOfMemoryError", "CUDA out of memory.", where=THERE))], "exception", RANK, THERE
    ),
    "an exception without a line": Case([fails(error("ValueError"), place="")], "exception", RANK),
    "fit ended by an exception that was not noted": Case([fails()], "exception", RANK, THERE),
    "Lightning's end by SIGTERM": Case(
        [fails(sent(15, -0.2), error("lightning.pytorch.utilities.exceptions.SIGTERMException", where=THERE))],
        *("terminated", RANK, THERE, None, 15),
    ),
    "sys.exit in a hook": Case([fails(error("SystemExit", "3", where=THERE))], "exited", RANK, THERE),
    "sys.exit(0) in a hook": Case([fails(error("SystemExit", "0", where=THERE))], "ok", RANK, THERE),
    # ---- the training process vanished ----
    "vanished without a word": Case([rank()], "killed", RANK, THERE),
    "vanished, and the kernel's counter rose": Case(
        [rank(memory=readings(0, 1, of="oom_kills"))], "out_of_memory", RANK, THERE, None, 9
    ),
    "killed, by the command's code": Case([rank()], "killed", RANK, THERE, None, 9, end(-9, pid=100)),
    "killed in a shell": Case([rank()], "killed", RANK, THERE, None, 9, end(137, pid=99)),
    "out of memory, by the command's counter": Case([rank()], "out_of_memory", RANK, THERE, None, 9, end(-9, kills=2)),
    "a crash, by faulthandler": Case(
        [rank(crash=crash("Segmentation fault", STEP))],
        *("segfault", RANK, "Net.training_step (net.py:22)", None, 11),
    ),
    "another fatal error of Python's": Case(
        [rank(crash=crash("_enter_buffered_busy: could not acquire lock", STEP))],
        *("aborted", RANK, "Net.training_step (net.py:22)", None, 6),
    ),
    "a crash, by the command's code": Case([rank()], "segfault", RANK, THERE, None, 11, end(-11)),
    "os._exit": Case([rank()], "exited", RANK, THERE, None, None, end(7, pid=100)),
    "os._exit(0)": Case([rank()], "ok", None, None, None, None, end(0, pid=100)),
    "told to end, then killed": Case([rank(events=(sent(15, -30.0),))], "terminated", RANK, THERE, None, 15, end(-9)),
    "a signal of long ago": Case([rank(events=(sent(15, -600.0),))], "killed", RANK, THERE, None, 9, end(-9)),
    "a hangup": Case([rank()], "terminated", RANK, THERE, None, 1, end(-1)),
    "a read that was tried again long ago": Case(
        [rank(events=(error("OSError", "x", -500.0, index=1),))], "killed", RANK, THERE
    ),
    # ---- what torch does not hand over ----
    "sys.exit in a worker": Case(
        [
            fails(died(3, 0.1, code=5), error("RuntimeError", EXITED, 0.2)),
            worker(3, events=(error("SystemExit", "5", where="read (data.py:9)", index=77),)),
        ],
        *("exited", WORKER, "read (data.py:9)", 77),
    ),
    "sys.exit(0) in a worker": Case(
        [
            fails(died(3, 0.1, code=0), error("RuntimeError", EXITED, 0.2)),
            worker(3, events=(error("SystemExit", "", where="read (data.py:9)", index=77),)),
        ],
        *("exited", WORKER, "read (data.py:9)", 77),
    ),
    "os._exit(0) in a worker": Case(
        [fails(died(3, 0.1, code=0), error("RuntimeError", EXITED, 0.2)), worker(3)], "exited", WORKER, HERE, 48213
    ),
    "a worker that came to its end": Case(
        [fails(died(2, 0.1, code=0), error("ValueError", "x", 0.2, where="f (a.py:1)")), worker(2)],
        *("exception", RANK, "f (a.py:1)"),
    ),
    "a generator that was closed in a worker": Case(
        [
            fails(error("RuntimeError", EXITED, 0.2)),
            worker(3, events=(error("GeneratorExit", where="read (data.py:9)", index=77),)),
        ],
        *("exception", WORKER, "read (data.py:9)", 77),
    ),
    "one worker was interrupted": Case(
        [
            fails(error("RuntimeError", EXITED, 0.2)),
            worker(3, events=(error("KeyboardInterrupt", where="read (data.py:9)", index=77),)),
        ],
        *("interrupted", WORKER, "read (data.py:9)", 77, 2),
    ),
    "a worker's end is seen by a file that is gone": Case(
        [
            fails(died(3, 0.1, code=5), error("FileNotFoundError", "x", 0.2, frames=["Client (connection.py:508)"])),
            worker(3),
        ],
        *("exited", WORKER, HERE, 48213),
    ),
    "a file of the user's is gone": Case(
        [fails(died(3, -20.0, code=5), error("FileNotFoundError", "x", 0.2, where="f (a.py:1)")), worker(3)],
        *("exception", RANK, "f (a.py:1)"),
    ),
    "a worker that took too long": Case(
        [fails(error("RuntimeError", "DataLoader timed out after 4 seconds", where=THERE), turn=3), worker(3)],
        *("exception", WORKER, HERE, 48213),
    ),
    "an exception that could not be made again": Case(
        [
            fails(
                error("TypeError", "BadPhoto() missing", 0.2, frames=["ExceptionWrapper.reraise (torch/_utils.py:9)"])
            ),
            worker(3, events=(error("data.BadPhoto", "no", where="read (data.py:9)", index=77),)),
        ],
        *("exception", WORKER, "read (data.py:9)", 77),
    ),
    "an exception outside of the user's code": Case(
        [fails(error("OSError", "No space left on device", frames=["save (torch/serialization.py:9)"]))],
        *("exception", RANK, "save (torch/serialization.py:9)"),
    ),
    # ---- no death ----
    "all ended well": Case([rank(ended="ok"), worker(3)], "ok"),
    "all ended well, and the command, too": Case([rank(ended="ok")], "ok", command=end(0)),
    "the script failed after fit": Case([rank(ended="ok")], "exited", command=end(1)),
    "the script was killed after fit": Case([rank(ended="ok")], "killed", signal=9, command=end(-9)),
    "the run goes on": Case([rank(), worker(3)], "unknown", RANK, THERE, alive=(100, 203)),
    "no records": Case([], "unknown"),
    "no records, exit code 0": Case([], "ok", command=end(0)),
    "no records, exit code 2": Case([], "exited", command=end(2)),
    "no records, out of memory": Case([], "out_of_memory", signal=9, command=end(-9, kills=1)),
    "no records, a bus error": Case([], "bus_error", signal=7, command=end(-7)),
    "of two runs the one that wrote last": Case(
        [rank(run="old", written=-900.0, events=(error("ValueError"),), ended="exception"), rank(ended="ok")], "ok"
    ),
    "an earlier run of the same name, with more ranks": Case(
        [rank(ended="ok"), rank(3, -1100.0, created_s=T - 2000.0)], "ok", command=end(0)
    ),
    "an exception outside of fit": Case(
        [rank(ended="ok", written=-9.0), OUTSIDE], "exception", Process(0, None, 100), "main (train.py:3)"
    ),
    "an exception that came of a failed fit": Case(
        [rank(ended="exception", written=-9.0, events=(error("KeyError", "x", -9.0, where="f (a.py:1)"),)), OUTSIDE],
        *("exception", RANK, "f (a.py:1)"),
    ),
    "an exception in a process whose forked rank has failed": Case(
        [
            rank(pid=77, ended="exception", written=-9.0, events=(error("KeyError", "x", -9.0, where="f (a.py:1)"),)),
            replace(OUTSIDE, events=(error("torch.multiprocessing.spawn.ProcessRaisedException", "y"),)),
        ],
        *("exception", Process(0, None, 77), "f (a.py:1)"),
    ),
    "an exception after another process's fit had failed": Case(
        [
            rank(pid=77, ended="exception", written=-9.0, events=(error("KeyError", "x", -9.0, where="f (a.py:1)"),)),
            OUTSIDE,
        ],
        *("exception", RANK, "main (train.py:3)"),
    ),
    "an exception after one of fit that was caught": Case(
        [
            rank(ended="exception", caught=True, written=-9.0, events=(error("KeyError", "x", -9.0),)),
            worker(3),
            OUTSIDE,
        ],
        *("exception", RANK, "main (train.py:3)"),
    ),
    # ---- broken data ----
    "events that say nothing": Case(
        [fails({"event": "exception"}, {"event": "worker_died", "t": None}, {}, place="")],
        "exception",
        RANK,
    ),
    "times that are none": Case(
        [fails({"event": "exception", "t": "soon", "type": None, "message": None, "frames": 7})],
        *("exception", RANK, THERE),
    ),
    "a worker without its rank": Case([worker(3)], "unknown"),
}


@pytest.mark.parametrize("case", ONE_RANK.values(), ids=ONE_RANK)
def test_one_rank(case: Case) -> None:
    found = judged(case)
    assert (found.ended, found.process, found.where, found.index, found.signal) == (
        *(case.ended, case.process, case.where, case.index, case.signal),
    )
    assert found.text
    assert PostMortem.from_json(found.to_json()) == found


FIRST, SECOND = Process(0, None, 100), Process(1, None, 101)

SEVERAL = {
    "one was killed, the other lost its connection": Case(
        ranks(2, rank(1, -0.1), fails(error("RuntimeError", LOST))), "killed", SECOND, THERE
    ),
    "the other waited until a time-out of NCCL's": Case(
        ranks(2, rank(1, -90.0), fails(error("torch.distributed.DistBackendError", "NCCL watchdog timeout"))),
        *("killed", SECOND, THERE),
    ),
    "one raised, the launcher killed the other": Case(
        ranks(2, rank(0, 3.0), fails(error("ValueError", where="f (a.py:1)"), number=1)),
        *("exception", SECOND, "f (a.py:1)", None, None, end(-9, pid=100)),
    ),
    "one raised, the other was told to end": Case(
        ranks(2, fails(error("SIGTERMException", "", 0.2)), fails(error("ValueError", where="f (a.py:1)"), number=1)),
        *("exception", SECOND, "f (a.py:1)"),
    ),
    "one raised, the other lost its connection": Case(
        ranks(2, fails(error("RuntimeError", LOST, 0.2)), fails(error("KeyError", where="f (a.py:1)"), number=1)),
        *("exception", SECOND, "f (a.py:1)"),
    ),
    "one was told to end, and the other by the launcher": Case(
        ranks(2, fails(error("SIGTERMException", "", 0.2)), fails(error("SIGTERMException"), number=1)),
        *("terminated", SECOND, THERE, None, 15),
    ),
    "the first of two exceptions": Case(
        ranks(2, fails(error("ValueError", "", 0.4)), fails(error("KeyError", where="f (a.py:1)"), number=1)),
        *("exception", SECOND, "f (a.py:1)"),
    ),
    "a worker of one was killed": Case(
        [
            *ranks(
                2,
                fails(died(3, 0.1, 1, signal=9), error("RuntimeError", torch_says(213, "Killed"), 0.2), number=1),
                fails(error("RuntimeError", LOST, 0.4)),
            ),
            worker(3, of=1),
        ],
        *("killed", Process(1, 3, 213), HERE, 48213, 9),
    ),
    "one crashed, and the launcher killed the other": Case(
        ranks(2, rank(0, 4.0), rank(1, crash=crash("Bus error", STEP))),
        *("bus_error", SECOND, "Net.training_step (net.py:22)", None, 7, end(-9, pid=100)),
    ),
    "one vanished, and the launcher killed the other": Case(
        ranks(2, rank(0, 4.0), rank(1)), "killed", SECOND, THERE, None, None, end(-9, pid=100)
    ),
    "both vanished at once: rank 0 is the launcher's": Case(
        ranks(2, rank(0, -0.1), rank(1)), "killed", SECOND, THERE, None, None, end(-9, pid=100)
    ),
    "rank 0 was killed": Case(
        ranks(2, rank(0, -0.3), fails(error("RuntimeError", LOST), number=1)),
        *("killed", FIRST, THERE, None, 9, end(-9, pid=100)),
    ),
    "clocks of two machines differ": Case(
        ranks(2, fails(error("RuntimeError", LOST, -1.5)), replace(rank(1), host="b")), "killed", SECOND, THERE
    ),
    "an exception long before another machine's rank vanished": Case(
        ranks(2, fails(error("ValueError", "x", -20.0, where="f (a.py:1)")), replace(rank(1), host="b")),
        *("exception", FIRST, "f (a.py:1)"),
    ),
    "only lost connections": Case(
        ranks(2, fails(error("RuntimeError", LOST, 0.1)), fails(error("RuntimeError", LOST), number=1)),
        *("exception", SECOND, THERE),
    ),
    "all ranks waited for one that had fewer batches": Case(
        ranks(2, fails(error("RuntimeError", LOST), batch=10), rank(1, ended="ok", doing="set-up", batch=10)),
        *("exception", SECOND, THERE),
    ),
    "one was killed, one waits": Case(
        ranks(2, rank(0, 30.0, progress_s=T), rank(1)), "killed", SECOND, THERE, None, None, None, (100,)
    ),
    "a launcher told the workers of the other to end": Case(
        [
            *ranks(
                2, rank(1), fails(died(3, 0.1, signal=15), error("RuntimeError", torch_says(203, "Terminated"), 0.3))
            ),
            worker(3),
        ],
        *("killed", SECOND, THERE),
    ),
    "one was killed, says the kernel": Case(
        ranks(2, rank(0, 0.2), rank(1, 0.1)),
        *("killed", SECOND, THERE, None, 9, end(1, pid=1)),
        ends={("a", 100): ProcessEnd(-9, T + 0.9), ("a", 101): ProcessEnd(-9, T + 0.4)},
    ),
    "one exited, says the kernel": Case(
        ranks(2, rank(0, 0.2), rank(1)),
        *("exited", SECOND, THERE, None, None, end(1, pid=1)),
        ends={("a", 100): ProcessEnd(-15, T + 0.9), ("a", 101): ProcessEnd(3, T + 0.1)},
    ),
    "one crashed, says the kernel": Case(
        ranks(2, rank(0, 0.2), rank(1)),
        "segfault",
        SECOND,
        THERE,
        None,
        11,
        ends={("a", 101): ProcessEnd(-11, T + 0.1)},
    ),
    "another machine's process of that number has ended otherwise": Case(
        ranks(2, rank(0, 0.2), replace(rank(1), host="b", pid=100)),
        *("segfault", FIRST, THERE, None, 11),
        ends={("a", 100): ProcessEnd(-11, T + 0.1)},
        alive=(),
    ),
    "one waited for another in vain": Case(
        ranks(2, fails(error("RuntimeError", TIMED_OUT)), rank(1, 0.3, place="Net.load (net.py:7)")),
        *("exception", SECOND, "Net.load (net.py:7)"),
        alive=(101,),
    ),
    "two waited in vain, and nobody knows for whom": Case(
        ranks(2, fails(error("RuntimeError", TIMED_OUT)), fails(error("RuntimeError", TIMED_OUT, 0.1), number=1)),
        *("exception", FIRST, THERE),
    ),
    "all ended well": Case(ranks(2, rank(0, ended="ok"), rank(1, ended="ok")), "ok"),
}


@pytest.mark.parametrize("case", SEVERAL.values(), ids=SEVERAL)
def test_several_ranks(case: Case) -> None:
    found = judged(case)
    assert (found.ended, found.process, found.where, found.index, found.signal) == (
        *(case.ended, case.process, case.where, case.index, case.signal),
    )


def test_what_the_others_did_is_one_line() -> None:
    lost = [fails(error("RuntimeError", LOST, 0.1), number=n) for n in (0, 1, 3)]
    text = judged(Case(ranks(4, rank(2, -0.2), *lost), "")).text
    assert "After it: ranks 0-1 and 3: RuntimeError." in text.splitlines()


def test_uneven_ranks_are_told_with_their_batches() -> None:
    early = rank(1, ended="ok", doing="set-up", batch=8, batches=8)
    others = [fails(error("RuntimeError", LOST, 0.1 * n), number=n, batch=8, batches=20) for n in (0, 2)]
    text = judged(Case(ranks(3, early, *others), "")).text
    assert text.startswith(
        "Rank 1 ended its epoch 12 batches early (8, not 20); ranks 0 and 2 waited, and ended by RuntimeError at "
    )


def test_a_message_of_a_worker_is_its_own() -> None:
    text = judged(ONE_RANK["an exception in a worker that only torch repeats"]).text
    assert text.splitlines()[0].endswith(": x.")


ADVICE = {
    "ulimit -n": error("RuntimeError", "received 0 items of ancdata"),
    "--shm-size": error("RuntimeError", "unable to write to file </torch_1_2_3>: No space left on device (28)"),
    "ulimit -v": error("MemoryError"),
    "smaller batch": error("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB"),
    "spawn": error("RuntimeError", "Cannot re-initialize CUDA in forked subprocess."),
    "other nodes": error("RuntimeError", LOST),
}


@pytest.mark.parametrize(("advice", "event"), ADVICE.items(), ids=ADVICE)
def test_advice_for_an_exception(advice: str, event: dict[str, Any]) -> None:
    assert advice in judged(Case([fails(event)], "")).advice


def test_the_number_of_an_unknown_signal_is_told() -> None:
    found = judged(Case([fails(died(3, signal=int(signal.SIGRTMIN) + 3))], ""))
    assert (found.ended, found.signal) == ("killed", int(signal.SIGRTMIN) + 3)


AFTERWARDS = {
    # code, seconds after the exception, caught: how it ended
    "uncaught": (1, 0.5, False, "exception"),
    "uncaught, and its tear-down crashes": (-signal.SIGSEGV, 45.0, False, "exception"),
    "caught, and logged": (1, 5.0, True, "exception"),
    "caught, and gone on with": (1, 45.0, True, "exited"),
    "caught, and exited with a code of its own": (3, 1.0, True, "exited"),
    "ended by os._exit at once": (3, 1.0, None, "exception"),
    "ended by os._exit later": (3, 45.0, None, "exited"),
    "killed at once": (-signal.SIGKILL, 1.0, None, "exception"),
    "killed later": (-signal.SIGKILL, 5.0, None, "killed"),
    "crashed soon": (-signal.SIGABRT, 5.0, None, "exception"),
    "crashed later": (-signal.SIGABRT, 45.0, None, "aborted"),
}


@pytest.mark.parametrize(("code", "after_s", "caught", "ended"), AFTERWARDS.values(), ids=AFTERWARDS)
def test_what_came_after_an_exception_of_fit(code, after_s, caught, ended):
    record = rank(ended="exception", caught=caught, events=(error("KeyError", "x", 0.0, where=THERE),))
    found = post_mortem_of(
        [record], now_s=T + 50.0, is_alive=lambda _: False, command=CommandEnd(int(code), T + after_s, 0, (), 100)
    )
    assert (found.ended, found.process, found.where) == (ended, RANK, THERE if ended == "exception" else None)
    assert ("Before, fit had ended by KeyError, and the script went on." in found.text) == (ended != "exception")


@pytest.mark.parametrize("launched", ["by another process", "with others"])
def test_a_launchers_end_says_nothing_of_an_exception_that_was_caught(launched):
    record = rank(ended="exception", caught=True, events=(error("KeyError", "x", 0.0, where=THERE),))
    records = [record] if launched == "by another process" else [replace(record, world_size=2), *ranks(2)[1:]]
    command = CommandEnd(3, T + 45.0, 0, (), 1 if launched == "by another process" else 100)
    found = post_mortem_of(records, now_s=T + 50.0, is_alive=lambda each: each.rank == 1, command=command)
    assert (found.ended, found.process) == ("exception", RANK)
