"""Flight records of runs that were never made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_gpuopt.measurements.flight import FlightRecord, MemoryReading

T = 1_700_000_000.0
"""Now, in every test: the moment at which something happens."""

GIB = 2**30
MIB = 2**20


def rank(number: int = 0, written: float = 0.0, **known: Any) -> FlightRecord:
    """A training process in the middle of its training; times are relative to ``T``."""
    defaults: dict[str, Any] = {
        **{"run": "run", "host": "a", "pid": 100 + number, "start_ticks": 1, "rank": number, "doing": "train"},
        **{"steps": 50, "epoch": 1, "batch": 10, "progress_s": T + written - 0.1, "longest_s": 0.5},
        **{"created_s": T - 1000.0, "written_s": T + written, "place": "Net.training_step (net.py:20)"},
    }
    return FlightRecord(**(defaults | known))


def worker(number: int = 0, of: int = 0, written: float = 0.0, **known: Any) -> FlightRecord:
    """A worker that reads sample 48213."""
    defaults: dict[str, Any] = {
        **{"run": "run", "host": "a", "pid": 200 + 10 * of + number, "start_ticks": 1, "rank": of, "worker": number},
        **{"loader": "train", "doing": "reads", "created_s": T - 900.0, "written_s": T + written, "fork": True},
        **{"since_s": T + written - 0.2, "place": "Photos.__getitem__ (data.py:41)", "index": 48213},
        **{"batches_read": 7, "cpu_s": 30.0},
    }
    return FlightRecord(**(defaults | known))


def ranks(count: int, *changed: FlightRecord) -> list[FlightRecord]:
    """So many ranks in training, of which some are otherwise."""
    instead = {each.rank: each for each in changed}
    return [replace(instead.get(n, rank(n)), world_size=count) for n in range(count)]


def error(kind: str, message: str = "", at: float = 0.0, **known: Any) -> dict[str, Any]:
    return {"t": T + at, "event": "exception", "type": kind, "message": message, **known}


def died(number: int, at: float = 0.0, of: int = 0, **how: Any) -> dict[str, Any]:
    pid = 200 + 10 * of + number
    return {"t": T + at, "event": "worker_died", "worker": number, "loader": "train", "pid": pid, **how}


def sent(number: int, at: float = 0.0) -> dict[str, Any]:
    return {"t": T + at, "event": "signal", "signal": number}


def readings(*values: int | None, of: str = "current", every: float = 1.0, **known: Any) -> tuple[MemoryReading, ...]:
    """Readings up to ``T``, one a second."""
    last = len(values) - 1
    return tuple(MemoryReading(T - (last - n) * every, **{of: value}, **known) for n, value in enumerate(values))


def crash(what: str, *frames: tuple[str, str, int]) -> str:
    """What faulthandler writes of a fatal signal; frames innermost first."""
    return f"Fatal Python error: {what}\n\n{stack(*frames, current=True)}"


def stack(*frames: tuple[str, str, int], current: bool = False, others: Sequence[str] = ()) -> str:
    """What faulthandler writes of a process: other threads before its main thread."""
    head = "Current thread" if current else "Thread"
    lines = [f'  File "{file}", line {line} in {name}' for name, file, line in frames]
    return "\n\n".join([*others, "\n".join([f"{head} 0x00007f85a83f7b80 (most recent call first):", *lines])]) + "\n"


LOADER = ("_try_get_data", "/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 1280)
ALL_REDUCE = ("all_reduce", "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 2806)
BARRIER = ("barrier", "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 4700)
BACKWARD = ("_engine_run_backward", "/v/lib/python3.11/site-packages/torch/autograd/graph.py", 823)
STEP = ("training_step", "/home/me/net.py", 22)
GETITEM = ("__getitem__", "/home/me/data.py", 43)
SLEEP = ("wait", "/usr/lib/python3.11/threading.py", 327)
WORKER_LOOP = ("_worker_loop", "/v/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", 351)
