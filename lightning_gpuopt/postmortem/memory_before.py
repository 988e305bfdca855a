"""Memory before the end: limits, last readings, a short curve, and whether it was at its limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightning_gpuopt.measurements.flight import FlightRecord, MemoryReading
from lightning_gpuopt.postmortem.wording import size

_MOST_POINTS: Final = 20
# a reading this long after the end may still be from before it: it is rounded to when it was read
_READ_EVERY_S: Final = 1.0
_NEAR_LIMIT: Final = 0.9
_LITTLE_AVAILABLE: Final = 512 * 2**20  # bytes available on the machine below which the kernel may end a process
_LITTLE_SHM: Final = 8 * 2**20
_LITTLE_SHM_SHARE: Final = 0.05
_GROWN: Final = 32 * 2**20
_GROWN_BY: Final = 1.2
_SLOPE_S: Final = 5.0

_OF_THE_PROCESS: Final = {
    "rss": "rss_bytes",
    "private": "private_bytes",
    "files": "open_files",
    "files_limit": "open_files_limit",
    "gpu_used": "gpu_used_bytes",
    "gpu_total": "gpu_total_bytes",
}
_OF_THE_MACHINE: Final = ("limit", "current", "cache", "peak", "available", "shm_free", "shm_size")


@dataclass(frozen=True)
class Memory:
    figures: dict[str, Any]  # as ``PostMortem.memory``
    near: str = ""  # why memory was short, with figures; empty if it was not
    shm_full: str = ""  # likewise for ``/dev/shm``
    grown: str = ""  # how private memory of the process has grown, with figures
    leak: str = ""  # the container that explains it, for people


def oom_kills(records: Sequence[FlightRecord], host: str, of_command: int | None) -> int | None:
    """By how much the kernel's counter has risen, also in the command's own cgroup; None if nobody could read it."""
    rises = [of_command]
    for record in records:  # ranks of one machine may have cgroups of their own
        known = [each.oom_kills for each in record.memory if each.oom_kills is not None]
        if known and record.host == host:
            rises.append(max(known) - min(known))
    return max((each for each in rises if each is not None), default=None)


def memory_of(
    record: FlightRecord | None, records: Sequence[FlightRecord], at_s: float, kills: int | None = None
) -> Memory:
    """What is known of memory before the end of a process at ``at_s`` (Unix); ``kills``: see :func:`oom_kills`."""
    own = _until(record.memory, at_s) if record is not None else []
    host = record.host if record is not None else None
    machine = sorted(
        (each for other in records if host in (None, other.host) for each in _until(other.memory, at_s)),
        key=lambda each: each.at_s,
    )
    peak = _last(machine, "peak")
    machine = [each for each in machine if each.at_s <= at_s] or machine  # what it held is free again after its end
    figures: dict[str, Any] = {name: _last(own, field) for field, name in _OF_THE_PROCESS.items()}
    figures |= {f"{field}_bytes": _last(machine, field) for field in _OF_THE_MACHINE}
    figures["oom_kills"] = kills
    figures["peak_bytes"] = peak
    figures = {name: value for name, value in figures.items() if value is not None}
    limited = [each for each in machine if each.limit is not None and each.current is not None]
    points = _points(limited, _used) if limited else _points(own, lambda each: each.rss)
    if points:
        figures["curve_of"] = "cgroup" if limited else "process"
        figures["curve"] = [[round(max(0.0, at_s - when_s), 1), value] for when_s, value in _thinned(points)]
    grown = _grown(record, own)
    leak = record.leak if record is not None and grown else ""
    grown = f"{grown}: {leak}" if leak else grown
    return Memory(figures, _near(limited, machine, at_s), _shm_full(machine), grown, leak)


def _until(readings: Sequence[MemoryReading], at_s: float) -> list[MemoryReading]:
    return [each for each in readings if each.at_s <= at_s + _READ_EVERY_S]


def _last(readings: Sequence[MemoryReading], field: str) -> int | None:
    return next((value for each in reversed(readings) if (value := getattr(each, field)) is not None), None)


def _used(reading: MemoryReading) -> int | None:
    return None if reading.current is None else max(0, reading.current - (reading.cache or 0))


def _points(readings: Sequence[MemoryReading], of: Callable[[MemoryReading], int | None]) -> list[tuple[float, int]]:
    return [(each.at_s, value) for each in readings if (value := of(each)) is not None]


def _thinned(points: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """At most so many of them, the last one included."""
    step = -(-len(points) // _MOST_POINTS)
    return points[::-1][::step][::-1] if step > 1 else points


def _near(limited: Sequence[MemoryReading], machine: Sequence[MemoryReading], at_s: float) -> str:
    """Where the curve ends: at the limit of the cgroup, or near no available memory."""
    if limited and (limit := limited[-1].limit):
        used = _points(limited, _used)
        expected = used[-1][1] + _slope(used, at_s)
        if expected >= _NEAR_LIMIT * limit:
            rising = ", rising" if expected > used[-1][1] else ""
            return f"its memory cgroup used {size(used[-1][1])} of {size(limit)}{rising}"
    available = _points(machine, lambda each: each.available)
    if available and available[-1][1] + _slope(available, at_s) <= _LITTLE_AVAILABLE:
        return f"{size(available[-1][1])} were available on the machine"
    return ""


def _slope(points: list[tuple[float, int]], at_s: float) -> float:
    """By how much the curve goes on to the end, as it went in the seconds before."""
    (last_s, last), (first_s, first) = points[-1], next(each for each in points if each[0] >= points[-1][0] - _SLOPE_S)
    rate = (last - first) / (last_s - first_s) if last_s - first_s > 0.1 else 0.0
    return rate * min(_SLOPE_S, max(0.0, at_s + 0.5 - last_s))


def _shm_full(machine: Sequence[MemoryReading]) -> str:
    free, whole = _last(machine, "shm_free"), _last(machine, "shm_size")
    if free is None or free > max(_LITTLE_SHM, _LITTLE_SHM_SHARE * (whole or 0)):
        return ""
    return f"{size(free)} were free in /dev/shm" + (f" of {size(whole)}" if whole else "")


def _grown(record: FlightRecord | None, own: Sequence[MemoryReading]) -> str:
    if record is None:
        return ""
    name = "private" if record.worker is not None else "rss"
    readings = [each for each in own if getattr(each, name) is not None]
    if len(readings) < 2:
        return ""
    first, last = getattr(readings[0], name), getattr(readings[-1], name)
    if last - first < _GROWN or last < _GROWN_BY * first:
        return ""
    what = "private memory" if record.worker is not None else "resident memory"
    text = f"{what} grew from {size(first)} to {size(last)} in {readings[-1].at_s - readings[0].at_s:.0f} s"
    if readings[-1].samples is not None and readings[0].samples is not None:
        unit = "samples" if record.worker is not None else "training batches"
        text += f" and {readings[-1].samples - readings[0].samples:,} {unit}"
    return text


def in_words(figures: dict[str, Any]) -> str:
    """A few figures in a line; empty if nothing is known."""
    parts = []
    for name, what in (("rss_bytes", "resident"), ("private_bytes", "private")):
        if name in figures:
            parts.append(f"{size(figures[name])} {what}")
    used = figures.get("current_bytes")
    if used is not None:
        used = max(0, used - figures.get("cache_bytes", 0))
        limit = f" of {size(figures['limit_bytes'])}" if "limit_bytes" in figures else ""
        peak = f" (at most {size(figures['peak_bytes'])})" if "peak_bytes" in figures and limit else ""
        parts.append(f"the cgroup used {size(used)}{limit}{peak}")
    for name, whole, text in (
        ("available_bytes", "", "{} available"),
        ("shm_free_bytes", "shm_size_bytes", "/dev/shm {} free"),
        ("gpu_used_bytes", "gpu_total_bytes", "the GPU {} in use"),
    ):
        if name in figures:
            parts.append(text.format(size(figures[name])) + (f" of {size(figures[whole])}" if whole in figures else ""))
    if "open_files" in figures:
        limit = f" of {figures['open_files_limit']:,}" if "open_files_limit" in figures else ""
        parts.append(f"{figures['open_files']:,} open files{limit}")
    return "; ".join(parts)
