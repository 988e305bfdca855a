"""Rings as others read them: from files in a report's folder, or from memory that their process has handed over."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from lightning_gpuopt.measurements.flight import OF_A_WORKER, FlightRecord, MemoryReading
from lightning_gpuopt.recorder.ring import (
    HEADER_BYTES,
    MAX_WORKERS,
    RANK_BYTES,
    WORKER_BYTES,
    WORKER_HEADER_BYTES,
    number_in,
    record_of,
    wall_offset_s,
)
from lightning_gpuopt.recorder.stacks import ASK_SUFFIX, crashes_in
from lightning_gpuopt.recorder.stacks import is_alive as is_alive

_ELSEWHERE_S: Final = 60.0
FOLDER: Final = "recorder"
SUFFIX: Final = ".ring"
STACKS_SUFFIX: Final = ".stacks"
_FIELDS: Final = frozenset(each.name for each in fields(MemoryReading)) - {"at_s"}


def records_in(folder: Path) -> list[FlightRecord]:
    """The records of all rings in a folder, such as a report's, in its ``recorder``, and in those one level below."""
    found: list[FlightRecord] = []
    for path in ring_files(folder):
        try:
            with path.open("rb") as file:
                found += records_of(file.fileno())
        except OSError:
            continue
    return found


def ring_files(folder: Path) -> list[Path]:
    patterns = (f"*{SUFFIX}", f"{FOLDER}/*{SUFFIX}", f"*/*{SUFFIX}", f"*/{FOLDER}/*{SUFFIX}")
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def records_of(file: int) -> list[FlightRecord]:
    """The records of a training process and its workers, from its rings' memory or a copy; may raise OSError."""
    data = os.pread(file, RANK_BYTES, 0)
    offset_s = wall_offset_s(data)  # one for all, or what came first could come last
    rank = record_of(data, offset_s)
    if rank is None:
        return []
    readings: dict[int | None, list[MemoryReading]] = {}
    events = []
    for event in rank.events:
        if event["event"] == "memory":
            for slot, reading in _readings(event):
                readings.setdefault(slot, []).append(reading)
        else:
            events.append(event)
    crashes = crashes_in(rank.stacks) if rank.stacks else []
    died = [(each.get("pid"), each.get("signal")) for each in events if each["event"] == "worker_died"]
    of_worker = {pid: crash for pid, number in died if (crash := _take(crashes, number))}
    rank = replace(
        rank, events=tuple(events), memory=tuple(readings.get(None, ())), crash=crashes[0] if crashes else ""
    )
    workers = [
        replace(worker, memory=tuple(readings.get(slot, ())), crash=of_worker.get(worker.pid, ""))
        for slot in _used_slots(file)
        if (worker := record_of(os.pread(file, WORKER_BYTES, RANK_BYTES + slot * WORKER_BYTES), offset_s))
    ]
    return [rank, *workers]


def _take(crashes: list[str], number: Any) -> str:
    """Take out the first one by a signal; all processes write into one file, and faulthandler names none of them."""
    called = (signal.strsignal(number) or "").lower() if _is_number(number) and 0 < number < signal.NSIG else ""
    for crash in crashes:
        if called and crash.partition(": ")[2].lower().replace("-", " ").startswith(called):
            crashes.remove(crash)
            return crash
    return ""


def headers_in(file: int) -> FlightRecord | None:
    """A training process's record without its log; None if nobody has begun it."""
    return record_of(os.pread(file, HEADER_BYTES, 0))


def header_in(path: Path) -> FlightRecord | None:
    """The same of a file; None also if it cannot be read."""
    try:
        with path.open("rb") as file:
            return headers_in(file.fileno())
    except OSError:
        return None


def writes_elsewhere(record: FlightRecord, now_s: float) -> bool:
    """Whether a process of another machine counts as alive at this Unix time: a file server may be behind."""
    return record.host != socket.gethostname() and now_s - record.written_s < _ELSEWHERE_S


def _used_slots(file: int) -> Iterator[int]:
    for slot in range(MAX_WORKERS):
        head = os.pread(file, WORKER_HEADER_BYTES, RANK_BYTES + slot * WORKER_BYTES)
        if len(head) == WORKER_HEADER_BYTES and number_in(head, "pid"):
            yield slot


def _readings(event: dict[str, Any] | Any) -> Iterator[tuple[int | None, MemoryReading]]:
    """What a line of the log says of the training process, and of its workers by slot."""
    at_s = float(event["t"])
    yield None, MemoryReading(at_s, **{name: event[name] for name in _FIELDS if _is_number(event.get(name))})
    workers: Sequence[Any] = event.get("workers") or ()
    for row in workers:
        if isinstance(row, list) and len(row) == 1 + len(OF_A_WORKER) and _is_number(row[0]):
            known = {name: value for name, value in zip(OF_A_WORKER, row[1:], strict=True) if _is_number(value)}
            yield row[0], MemoryReading(at_s, **known)


def _is_number(value: object) -> bool:
    return isinstance(value, int)


def remove(path: Path) -> None:
    """Remove a ring's file and what belongs to it, and its folder where nothing else is in it."""
    for each in (path, path.with_suffix(STACKS_SUFFIX), path.with_suffix(ASK_SUFFIX)):
        each.unlink(missing_ok=True)
    try:
        path.parent.rmdir()
    except OSError:
        return
