"""What ended a run, and which of its processes first."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from lightning_gpuopt.postmortem.deaths import ECHO, PLAIN, SILENT, deaths_of
from lightning_gpuopt.postmortem.record import Process
from tests.postmortem.records import (
    AT_READ,
    AT_STEP,
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

NO_DEATH = (None, None, None)
RANK = (Process(0, None, 100), AT_STEP, None)
WORKER = (Process(0, 1, 1001), AT_READ, 48_213)
OOM = memory((-9, {"oom_kills": 2}), (0, {"oom_kills": 3}))
CAUGHT = "Caught ValueError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n"
BY_TORCH = (
    f'{CAUGHT}  File "/venv/lib/python3.12/site-packages/torch/utils/data/_utils/worker.py", line 9, in _worker_loop\n'
    '  File "/home/me/data.py", line 44, in __getitem__\nValueError: bad image\n'
)


def failed(*errors, **known):
    return rank(ended="exception", events=errors, **known)


def bound(number, *, code=None):
    """A rank whose worker 1 dies of a signal, which torch makes an exception of."""
    how = {"signal": int(number)} if code is None else {"code": code}
    words = torch_says(1, f"is killed by signal: {signal.strsignal(number)}. ")
    return failed(died(1, at=-1, **how), raised("RuntimeError", words)), worker(0), worker(1, at=-1)


# records, how the command ended: ended, (process, where, index), signal
ENDS = {
    # a worker
    "worker-killed": (bound(KILL), command(1), "killed", WORKER, KILL),
    "worker-segfault": (bound(signal.SIGSEGV), command(1), "segfault", WORKER, 11),
    "worker-bus-error": (bound(signal.SIGBUS), command(1), "bus_error", WORKER, 7),
    "worker-aborted": (bound(signal.SIGABRT), command(1), "aborted", WORKER, 6),
    "worker-fpe": (bound(signal.SIGFPE), command(1), "aborted", WORKER, 8),
    "worker-illegal": (bound(signal.SIGILL), command(1), "aborted", WORKER, 4),
    "worker-terminated-alone": (bound(signal.SIGTERM), command(1), "terminated", WORKER, TERM),
    "worker-interrupted-alone": (bound(signal.SIGINT), command(1), "interrupted", WORKER, INT),
    "worker-exited": (bound(KILL, code=3), command(1), "exited", WORKER, None),
    "worker-negative-code": (bound(KILL, code=-9), command(1), "killed", WORKER, KILL),
    "worker-killed-nobody-watched": (bound(KILL), None, "killed", WORKER, KILL),
    "worker-killed-by-torchs-words": (
        (failed(raised("RuntimeError", torch_says(1))), worker(1, at=-1)),
        command(1),
        "killed",
        WORKER,
        KILL,
    ),
    "worker-bus-error-by-torchs-words": (
        (
            failed(raised("RuntimeError", torch_says(1, "is killed by signal: Bus error. It is possible that"))),
            worker(1, at=-1),
        ),
        command(1),
        "bus_error",
        WORKER,
        7,
    ),
    "worker-exit-code-by-torchs-words": (
        (
            failed(raised("RuntimeError", torch_says(1, "exited unexpectedly with exit code 3. Details are lost"))),
            worker(1, at=-1),
        ),
        command(1),
        "exited",
        WORKER,
        None,
    ),
    "worker-lost-without-a-word": (
        (failed(raised("RuntimeError", "DataLoader worker (pid(s) 1001) exited unexpectedly")), worker(1, at=-1)),
        command(1),
        "killed",
        WORKER,
        None,
    ),
    "worker-crash-text": (
        (
            failed(raised("RuntimeError", "DataLoader worker (pid(s) 1001) exited unexpectedly")),
            worker(1, at=-1, crash=crash()),
        ),
        command(1),
        "segfault",
        (Process(0, 1, 1001), "Photos.__getitem__ (data.py:44)", 48_213),
        11,
    ),
    "worker-without-a-ring": (
        (failed(died(1, at=-1, signal=KILL), raised("RuntimeError", torch_says(1))),),
        command(1),
        "killed",
        (Process(0, 1, 1001), None, None),
        KILL,
    ),
    "worker-without-ring-and-event": (
        (failed(raised("RuntimeError", torch_says(1))),),
        command(1),
        "killed",
        (Process(0, -1, 1001), None, None),
        KILL,
    ),
    "worker-out-of-memory": (
        (replace(bound(KILL)[0], memory=OOM), worker(1, at=-1)),
        command(1),
        "out_of_memory",
        WORKER,
        KILL,
    ),
    "worker-out-of-memory-watch-saw": (bound(KILL), command(1, oom_kills=1), "out_of_memory", WORKER, KILL),
    "worker-killed-watch-saw-no-rise": (bound(KILL), command(1, oom_kills=0), "killed", WORKER, KILL),
    "worker-bus-error-despite-a-rise": (bound(signal.SIGBUS), command(1, oom_kills=1), "bus_error", WORKER, 7),
    "worker-broke-a-pipe": (
        (failed(died(1, at=0.2, signal=KILL), raised("ConnectionResetError", "[Errno 104]")), worker(1)),
        command(1),
        "killed",
        WORKER,
        KILL,
    ),
    "worker-ended-after-its-rank": (
        (failed(raised("ValueError", "x", where=AT_STEP), died(1, at=2, signal=KILL)), worker(1, at=2)),
        command(1),
        "exception",
        RANK,
        None,
    ),
    "worker-ended-well": (
        (failed(died(1, at=-1, code=0), raised("ValueError", "x", where=AT_STEP)), worker(1)),
        command(1),
        "exception",
        RANK,
        None,
    ),
    "worker-died-long-before": (
        (failed(died(1, at=-90, signal=KILL), raised("ValueError", "x", where=AT_STEP)), worker(1, at=-90)),
        command(1),
        "exception",
        RANK,
        None,
    ),
    "worker-killed-and-its-rank-vanished": (
        (rank(events=[died(1, at=-1, signal=KILL)], progress_s=NOW - 2), worker(1, at=-1)),
        command(-9),
        "killed",
        WORKER,
        KILL,
    ),
    "worker-died-and-its-rank-went-on": (
        (rank(events=[died(1, at=-9, signal=KILL)]), worker(1, at=-9)),
        command(-11),
        "segfault",
        RANK,
        11,
    ),
    "worker-raised": (
        (
            failed(raised("ValueError", BY_TORCH, at=0.1)),
            worker(1, index=None, events=[raised("ValueError", "bad image", index=7, where="f (data.py:9)")]),
        ),
        command(1),
        "exception",
        (Process(0, 1, 1001), "f (data.py:9)", 7),
        None,
    ),
    "worker-raised-by-torchs-words": (
        (failed(raised("ValueError", BY_TORCH)), worker(1)),
        command(1),
        "exception",
        (Process(0, 1, 1001), "Photos.__getitem__ (data.py:44)", 48_213),
        None,
    ),
    "worker-out-of-python-memory": (
        (
            failed(raised("MemoryError", CAUGHT.replace("ValueError", "MemoryError"), at=0.1)),
            worker(1, events=[raised("MemoryError", index=48_213, where=AT_READ)]),
        ),
        command(1),
        "exception",
        WORKER,
        None,
    ),
    "rank-raised-what-a-worker-raises-too": (
        (
            failed(raised("ValueError", "loss is nan", where=AT_STEP)),
            worker(1, events=[raised("ValueError", "bad image", at=-0.1, index=7)]),
        ),
        command(1),
        "exception",
        RANK,
        None,
    ),
    # a training process
    "rank-killed": ((rank(),), command(-9), "killed", RANK, KILL),
    "rank-killed-as-a-shell-says": ((rank(),), command(137, pid=7), "killed", RANK, KILL),
    "rank-vanished": ((rank(),), None, "killed", RANK, None),
    "rank-out-of-memory": ((rank(),), command(-9, oom_kills=1), "out_of_memory", RANK, KILL),
    "rank-segfault": ((rank(),), command(-11), "segfault", RANK, 11),
    "rank-bus-error": ((rank(),), command(-7), "bus_error", RANK, 7),
    "rank-aborted": ((rank(),), command(-6), "aborted", RANK, 6),
    "rank-hung-up": ((rank(),), command(-1), "terminated", RANK, 1),
    "rank-ended-by-an-odd-signal": ((rank(),), command(-10), "killed", RANK, 10),
    "rank-odd-signal-despite-a-rise": ((rank(),), command(-10, oom_kills=1), "killed", RANK, 10),
    "rank-crash-text": (
        (rank(crash=crash("Bus error", name="training_step", file="/home/me/net.py")),),
        None,
        "bus_error",
        (Process(0, None, 100), "Net.training_step (net.py:44)", None),
        7,
    ),
    "rank-exited": ((rank(),), command(4), "exited", RANK, None),
    "rank-exited-in-a-wrapper": ((rank(),), command(4, pid=7), "exited", RANK, None),
    "rank-exited-with-0": ((rank(),), command(0), "ok", NO_DEATH, None),
    "rank-raised": ((failed(raised("ValueError", "x", where=AT_STEP)),), command(1), "exception", RANK, None),
    "rank-raised-nothing-known": ((failed(),), None, "exception", RANK, None),
    "rank-raised-at-a-sample": (
        (failed(raised("OSError", "x", where=AT_READ, index="a.jpg")),),
        command(1),
        "exception",
        (Process(0, None, 100), AT_READ, "a.jpg"),
        None,
    ),
    "rank-memory-error": ((failed(raised("MemoryError", "")),), command(1, oom_kills=1), "exception", RANK, None),
    "rank-gpu-out-of-memory": (
        (failed(raised("torch.OutOfMemoryError", "CUDA out of memory. Tried")),),
        command(1),
        "exception",
        RANK,
        None,
    ),
    "rank-system-exit": ((failed(raised("SystemExit", "4")),), command(4), "exited", RANK, None),
    "rank-interrupted": ((failed(raised("KeyboardInterrupt")),), command(1), "interrupted", RANK, INT),
    "rank-interrupted-with-workers": (
        (failed(died(1, at=-0.1, signal=INT), raised("KeyboardInterrupt")), worker(1, at=-0.1)),
        command(130, signals=(INT,)),
        "interrupted",
        RANK,
        INT,
    ),
    "rank-sigterm-exception": (
        (failed(raised("lightning.pytorch.utilities.exceptions.SIGTERMException")),),
        command(143),
        "terminated",
        RANK,
        TERM,
    ),
    "rank-and-worker-told-to-end": (
        (failed(died(1, at=-0.1, signal=TERM), raised("RuntimeError", torch_says(1))), worker(1, at=-0.1)),
        command(1, signals=(TERM,)),
        "terminated",
        RANK,
        TERM,
    ),
    "rank-killed-after-sigterm": ((rank(events=[told(TERM, at=-20)]),), command(-9), "terminated", RANK, TERM),
    "rank-killed-long-after-sigterm": ((rank(events=[told(TERM, at=-90)]),), command(-9), "killed", RANK, KILL),
    # nothing, or after it
    "no-records-killed": ((), command(-9), "killed", NO_DEATH, KILL),
    "no-records-out-of-memory": ((), command(-9, oom_kills=1), "out_of_memory", NO_DEATH, KILL),
    "no-records-exited": ((), command(2), "exited", NO_DEATH, None),
    "no-records-ok": ((), command(0), "ok", NO_DEATH, None),
    "no-records-nobody-watched": ((), None, "unknown", NO_DEATH, None),
    "ended-well": ((rank(ended="ok"), worker()), None, "ok", NO_DEATH, None),
    "ended-well-then-crashed": ((rank(ended="ok"),), command(-11), "segfault", NO_DEATH, 11),
    "ended-well-then-exited": ((rank(ended="ok"),), command(3), "exited", NO_DEATH, None),
}


@pytest.mark.parametrize(("records", "end", "ended", "known", "number"), ENDS.values(), ids=ENDS)
def test_what_ended_it(records, end, ended, known, number):
    found = judged(*records, end=end)
    assert (found.ended, (found.process, found.where, found.index), found.signal) == (ended, known, number), found.text


GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:29500"
LOST = {
    "gloo-closed": ("RuntimeError", GLOO),
    "gloo-reset": ("RuntimeError", "[pair.cc:598] Read error [10.0.0.1]:2345: Connection reset by peer"),
    "gloo-timed-out": ("RuntimeError", "[unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation"),
    "gloo-application": ("RuntimeError", "[pair.cc:548] Application timeout caused pair closure"),
    "gloo-refused": ("RuntimeError", "[pair.cc:144] no error: Connection refused"),
    "gloo-sizes": ("RuntimeError", "[enforce fail at pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"),
    "nccl-remote": ("torch.distributed.DistBackendError", "NCCL error in: x.cpp:1970, ncclRemoteError: A call failed"),
    "nccl-system": ("torch.distributed.DistBackendError", "ncclSystemError: System call (e.g. socket) failed"),
    "nccl-aborted": ("torch.distributed.DistBackendError", "NCCL communicator was aborted on rank 1."),
    "nccl-watchdog": ("RuntimeError", "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"),
    "store": ("torch.distributed.DistStoreError", "Socket Timeout"),
    "store-gone": ("torch.distributed.DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed."),
    "barrier": ("RuntimeError", "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 30000 ms"),
}


@pytest.mark.parametrize(("kind", "message"), LOST.values(), ids=LOST)
def test_a_lost_connection_is_not_the_cause(kind, message):
    lost = rank(0, of=2, ended="exception", events=[raised(kind, message, at=0.1)])
    found = judged(lost, rank(1, of=2, at=-0.2), end=command(1))
    assert (found.ended, found.process) == ("killed", Process(1, None, 101)), found.text
    assert judged(lost, end=command(1)).process == Process(0, None, 100)  # where nobody else is known


def two(first, second):
    """Two ranks, of which rank 1 is to be found."""
    return [replace(first, world_size=2), replace(second, world_size=2)]


# records: the ended of rank 1's process, its worker
FIRST = {
    "exceptions-by-time": (
        two(failed(raised("ValueError", at=3)), rank(1, ended="exception", events=[raised("KeyError", "a", at=1)])),
        ("exception", None),
    ),
    "launcher-ends-the-others": (
        two(
            failed(raised("SIGTERMException", at=0.1)),
            rank(1, ended="exception", events=[raised("ValueError", "x", at=0)]),
        ),
        ("exception", None),
    ),
    "launcher-ends-the-others-before-they-wrote": (
        two(
            rank(0, at=-0.2, events=[told(TERM, at=-0.2)]),
            rank(1, ended="exception", events=[raised("ValueError", "x", at=0)]),
        ),
        ("exception", None),
    ),
    "launcher-kills-rank-0": (two(rank(0, at=-0.05), rank(1, at=0)), ("killed", None)),
    "vanished-before-an-exception": (
        two(failed(raised("ValueError", "x", at=5)), rank(1, at=-5)),
        ("killed", None),
    ),
    "vanished-after-an-exception": (
        two(rank(0, at=2), rank(1, ended="exception", events=[raised("ValueError", "x", at=0)])),
        ("exception", None),
    ),
    "crash-before-a-lost-connection": (
        two(failed(raised("RuntimeError", GLOO, at=0.1)), rank(1, at=-0.1, crash=crash())),
        ("segfault", None),
    ),
    "worker-before-a-lost-connection": (
        [
            *two(
                failed(raised("RuntimeError", GLOO, at=0.3)),
                rank(
                    1,
                    ended="exception",
                    events=[
                        died(1, rank=1, at=-1, signal=KILL),
                        raised("RuntimeError", torch_says(1, rank=1), at=0.1),
                    ],
                ),
            ),
            worker(1, rank=1, at=-1),
        ],
        ("killed", 1),
    ),
    "another-machine-a-little-behind": (
        two(
            replace(rank(0, at=-1.5), host="node-2"),
            rank(1, ended="exception", events=[raised("ValueError", "x", at=0)]),
        ),
        ("exception", None),
    ),
}


@pytest.mark.parametrize(("records", "expected"), FIRST.values(), ids=FIRST)
def test_the_first_rank_outranks_the_others(records, expected):
    ended, number = expected
    found = judged(*records, end=command(1, pid=7))
    assert (found.ended, found.process.rank, found.process.worker) == (ended, 1, number), found.text


def test_what_kind_of_death_each_is():
    ranks = [
        replace(failed(raised("RuntimeError", GLOO, at=0.2)), world_size=3),
        rank(1, of=3, at=0.1),
        rank(2, of=3, ended="exception", events=[raised("ValueError", "x", at=0.3)]),
    ]
    found = deaths_of(ranks, lambda _: False, None)
    assert [(each.process.rank, each.kind) for each in found] == [(2, PLAIN), (1, SILENT), (0, ECHO)]
