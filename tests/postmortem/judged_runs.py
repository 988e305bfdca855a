"""Flight records of processes that never were, and how a run of them is judged. Times are seconds after ``NOW``."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

from lightning_gpuopt.measurements.flight import READS, TRAINS, FlightRecord, MemoryReading
from lightning_gpuopt.postmortem.analysis import post_mortem_of
from lightning_gpuopt.postmortem.process_end import CommandEnd
from lightning_gpuopt.postmortem.record import PostMortem

NOW = 1_700_000_000.0
GIB = 2**30
RANK_PID = 100
"""Of rank 0; that of rank N is N more."""

NODE = "node-1"
AT_READ = "Photos.__getitem__ (data.py:41)"
AT_STEP = "Net.training_step (net.py:12)"


def rank(number: int = 0, *, of: int = 1, at: float = 0.0, events: Sequence[Any] = (), **known: Any) -> FlightRecord:
    """A training process that last wrote then."""
    given: dict[str, Any] = {
        **{"run": "run-1", "host": NODE, "pid": RANK_PID + number, "start_ticks": 1, "rank": number, "world_size": of},
        **{"created_s": NOW - 600, "written_s": NOW + at, "progress_s": NOW + at - 0.1, "since_s": NOW + at - 0.1},
        **{"doing": TRAINS, "steps": 50, "place": AT_STEP, "longest_s": 1.0, "events": tuple(events)},
    }
    return FlightRecord(**(given | known))


def worker(
    number: int = 0, *, rank: int = 0, at: float = 0.0, events: Sequence[Any] = (), **known: Any
) -> FlightRecord:
    """A worker that last wrote then."""
    given: dict[str, Any] = {
        **{"run": "run-1", "host": NODE, "pid": 1000 + 10 * rank + number, "start_ticks": 1, "rank": rank},
        **{"worker": number, "loader": "train", "created_s": NOW - 600, "written_s": NOW + at, "since_s": NOW + at},
        **{"doing": READS, "place": AT_READ, "index": 48_213, "batches_read": 7, "fork": True, "events": tuple(events)},
    }
    return FlightRecord(**(given | known))


def raised(kind: str, message: str = "", *, at: float = 0.0, **known: Any) -> dict[str, Any]:
    """The event of an exception."""
    return {"t": NOW + at, "event": "exception", "type": kind, "message": message, **known}


def died(number: int = 0, *, rank: int = 0, at: float = 0.0, **how: Any) -> dict[str, Any]:
    """The event of a worker's death."""
    pid = 1000 + 10 * rank + number
    return {"t": NOW + at, "event": "worker_died", "worker": number, "loader": "train", "pid": pid, **how}


def told(number: int, *, at: float = 0.0) -> dict[str, Any]:
    """The event of a signal that Lightning handles."""
    return {"t": NOW + at, "event": "signal", "signal": int(number)}


def torch_says(number: int = 0, how: str = "is killed by signal: Killed. ", *, rank: int = 0) -> str:
    return f"DataLoader worker (pid {1000 + 10 * rank + number}) {how}"


def command(code: int, *, at: float = 1.0, pid: int | None = RANK_PID, **known: Any) -> CommandEnd:
    """How a command ended; without more, the one that was rank 0 itself."""
    return CommandEnd(code, NOW + at, pid=pid, **known)


def memory(*rows: tuple[float, dict[str, int]]) -> tuple[MemoryReading, ...]:
    return tuple(MemoryReading(NOW + at, **known) for at, known in rows)


def judged(
    *records: FlightRecord, end: CommandEnd | None = None, alive: Sequence[int] = (), at: float = 1.0, **known: Any
) -> PostMortem:
    """The post-mortem of a run, of which the processes with these ids run on."""
    return post_mortem_of(records, now_s=NOW + at, is_alive=lambda each: each.pid in alive, command=end, **known)


KILL, TERM, INT = int(signal.SIGKILL), int(signal.SIGTERM), int(signal.SIGINT)


def crash(what: str = "Segmentation fault", *, file: str = "/home/me/data.py", name: str = "__getitem__") -> str:
    """What faulthandler writes of a fatal signal."""
    return (
        f"Fatal Python error: {what}\n\nThread 0x00007f0000000001 (most recent call first):\n"
        '  File "/usr/lib/python3.12/threading.py", line 355 in wait\n\n'
        "Current thread 0x00007f0000000002 (most recent call first):\n"
        '  File "/usr/lib/python3.12/ctypes/__init__.py", line 519 in string_at\n'
        f'  File "{file}", line 44 in {name}\n'
        '  File "/venv/lib/python3.12/site-packages/torch/utils/data/_utils/fetch.py", line 52 in fetch\n'
    )
