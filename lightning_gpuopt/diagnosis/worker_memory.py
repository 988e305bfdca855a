"""Memory of the workers that grows with the samples that they read: how fast, why, and until when. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_gpuopt.diagnosis.memory_room import KIB, MIB, MemoryRoom, duration, room_of, size
from lightning_gpuopt.diagnosis.record import Risk
from lightning_gpuopt.diagnosis.steady_growth import SteadyGrowth, steady_growth
from lightning_gpuopt.measurements.flight import MemoryReading
from lightning_gpuopt.measurements.risks import CopiedObject, RiskInputs, WorkerMemory

_SEEN: Final = 8 * MIB  # a worker has grown by at least so much
_MUCH: Final = 64 * MIB  # what each worker will have taken in all; less matters where it is a share of the limit
_SHARE: Final = 0.05  # of the limit, over all workers
# growth that is no copy is reported where it is as even as this: allocators come to rest, and caches fill up
_EVEN: Final = 0.6
_SHORT_S: Final = 20.0
_FEW: Final = 4
"""In less time, and of fewer readings than else, a leak is reported where workers have taken as much as is left, or
where it keeps something of each sample, and they have grown by much already."""

_EACH: Final = 0.9  # entries for each sample: nothing is found in it that was read before
# what a worker has copied, as a share of the objects that it is put down to; their size is an estimate
_EXPLAINED: Final = (0.25, 1.5)
# where more of the growth is new memory, the worker allocates: a page that it copies it had before, shared
_ALLOCATED: Final = 0.5


@dataclass(frozen=True)
class _Growing:
    """A worker's private memory, in bytes."""

    worker: int  # its number
    grown: int  # since its first reading; of a forked worker that is before its first sample
    copied: int  # of those, what may be pages which it had before, and shared
    exact: bool  # whether these are known to be such pages
    steady: SteadyGrowth | None  # growth by the sample; None if it does not grow, or no more
    bytes_per_s: float  # growth by the second; 0 if it does not
    early: bool  # too few readings or too short a time to tell it from a cache, and little kept of each sample
    leak: str  # what of its own grows, for people
    copies: bool  # whether most of the growth since the first samples may be such pages


def worker_memory(seen: RiskInputs) -> Iterator[Risk]:
    """Workers whose private memory grows: for a leak, for Python objects that they copy, or for a reason unknown."""
    measured = [each for worker in seen.workers if (each := _growing(worker)) is not None]
    steady = [each for each in measured if each.steady is not None and each.steady.grown >= _SEEN]
    named = [each for each in steady if each.leak]
    copied = seen.copied if seen.forked else None
    if named:  # has been seen to grow, where objects to copy are but there
        leaking = [each for each in named if _is_even(each) or _is_soon(seen, each)]
        yield from _risk(seen, leaking, None) if leaking else ()
        return
    if copied is not None:
        most = _EXPLAINED[1] * max(copied.bytes, copied.together)
        growing = [each for each in steady if each.copies and each.copied <= most]
        growing = growing or [each for each in measured if _has_copied(each, copied)]
        if growing and 2 * len(growing) >= len(measured):
            yield from _risk(seen, growing, copied)
            return
    even = [each for each in steady if _is_even(each) and each.steady and each.steady.grown >= _MUCH]
    if even and 2 * len(even) >= len(measured):
        yield from _risk(seen, even, None)


def _growing(worker: WorkerMemory) -> _Growing | None:
    read = [each for each in worker.readings if each.samples is not None and each.private is not None]
    points = [(each.samples or 0, each.private or 0, each.at_s) for each in read if each.samples]
    if len(read) < 2 or not points:
        return None
    steady = steady_growth([(samples, private) for samples, private, _ in points])
    early = steady is None or points[-1][2] - points[0][2] < _SHORT_S
    if steady is None and worker.leak:
        steady = steady_growth([(each.samples or 0, each.private or 0) for each in read], _FEW)
    early = early and not (steady is not None and worker.keeps >= _EACH and steady.grown >= _MUCH)
    half = points[len(points) // 2 :]
    took_s, samples = half[-1][2] - half[0][2], half[-1][0] - half[0][0]
    rate = steady.rate * samples / took_s if steady is not None and took_s > 0 else 0.0
    grown, allocated = _growth(read)
    since = _growth([each for each in read if each.samples])
    return _Growing(
        worker.worker,
        grown,
        grown - max(allocated or 0, 0),
        exact=allocated is not None,
        steady=steady,
        bytes_per_s=rate,
        early=early,
        leak=worker.leak,
        copies=(since[1] or 0) <= _ALLOCATED * since[0],
    )


def _growth(readings: Sequence[MemoryReading]) -> tuple[int, int | None]:
    """By how much private memory has grown, and by how much anonymous memory: a page that is copied was anonymous."""
    private = [each.private for each in readings if each.private is not None]
    anonymous = [each.anonymous for each in readings if each.private is not None and each.anonymous is not None]
    return private[-1] - private[0], anonymous[-1] - anonymous[0] if len(anonymous) > 1 else None


def _has_copied(worker: _Growing, copied: CopiedObject) -> bool:
    """Whether a worker has copied these objects meanwhile; it may have come to rest."""
    least = max(_MUCH, _EXPLAINED[0] * copied.bytes)
    most = _EXPLAINED[1] * max(copied.bytes, copied.together)
    return (worker.exact or worker.copies) and least <= worker.copied <= most


def _is_even(worker: _Growing) -> bool:
    """Whether it has grown for long enough, and as fast at the end as at the beginning: a cache fills ever slower."""
    return not worker.early and worker.steady is not None and worker.steady.evenness >= _EVEN


def _is_soon(seen: RiskInputs, worker: _Growing) -> bool:
    """Whether workers reach the limit when they grow by as much again as they have."""
    room = _room(seen)
    return room is not None and worker.grown * _processes(seen) >= room.free


def _processes(seen: RiskInputs) -> int:
    return max(seen.num_workers or 0, len(seen.workers)) * seen.ranks_here


def _room(seen: RiskInputs) -> MemoryRoom | None:
    return room_of(seen.rank, seen.machine_bytes) or room_of(seen.workers[0].readings, seen.machine_bytes)


def _risk(seen: RiskInputs, growing: list[_Growing], copied: CopiedObject | None) -> Iterator[Risk]:
    """The risk, where what is ahead matters."""
    processes, room = _processes(seen), _room(seen)
    rates = [each.steady.rate for each in growing if each.steady is not None]
    per_sample = statistics.median(rates) if rates else None
    per_s = statistics.median(each.bytes_per_s for each in growing)
    grown = statistics.median(each.grown if copied is None else each.copied for each in growing)
    ahead = _ahead(seen, per_sample, per_s)
    if copied is not None:
        ahead = min(ahead, max(max(copied.bytes, copied.together) - grown, 0))
    everywhere = (grown + ahead) * processes
    limit = room.limit or room.free if room is not None else math.inf
    if grown + ahead < _MUCH and everywhere < _SHARE * limit:
        return
    reached_s = room.free / (per_s * processes) if room is not None and per_s > 0 else math.inf
    if room is None or ahead * processes < room.free or reached_s > (seen.remaining_s or math.inf):
        reached_s = math.inf
    leak = next((f"in worker {each.worker}, {each.leak}" for each in growing if each.leak), "")
    evidence: dict[str, float | str] = {
        **({"growth_kib_per_sample": round(per_sample / KIB, 3)} if per_sample is not None else {}),
        **({"growth_mib_per_minute": round(per_s * 60 / MIB, 3)} if per_s else {}),
        "grown_mib": round(grown / MIB, 1),
        "workers": float(processes // seen.ranks_here),
        **({"ranks": float(seen.ranks_here)} if seen.ranks_here > 1 else {}),
        **(room.evidence if room is not None else {}),
        **({"minutes_to_limit": round(reached_s / 60, 1)} if reached_s < math.inf else {}),
        **({"total_mib": round(everywhere / MIB, 1)} if everywhere < math.inf else {}),
    }
    if copied is not None:
        evidence |= {"object": f"{copied.name}, {copied.what}", "object_mib": round(copied.bytes / MIB, 1)}
        evidence |= {"where": copied.place} if copied.place else {}
    elif leak:
        evidence["grows"] = leak
    text = _how(per_sample, grown, copied, leak) + _until(room, processes, reached_s, everywhere)
    yield Risk("worker_memory", text, evidence, _advice(copied, leak, processes))


def _ahead(seen: RiskInputs, per_sample: float | None, per_s: float) -> float:
    """Bytes by which a worker that goes on like this still grows; infinity where the end is not known."""
    if per_sample is None:
        return 0.0
    known = [seen.samples_ahead * per_sample] if seen.samples_ahead is not None else []
    known += [seen.remaining_s * per_s] if seen.remaining_s is not None else []
    return min(known, default=math.inf)


def _how(per_sample: float | None, grown: float, copied: CopiedObject | None, leak: str) -> str:
    how = "The private memory of each worker "
    how += f"grows by {size(per_sample)} a sample" if per_sample is not None else f"has grown by {size(grown)}"
    if copied is None:
        return f"{how}: {leak}." if leak else f"{how}, after {size(grown)} until now; what grows is unknown."
    place = f" ({copied.place})" if copied.place else ""
    return (
        f"{how}: reading probably touches `{copied.name}`, {copied.what}, about {size(copied.bytes)} in each "
        f"worker{place}, and so copies it."
    )


def _until(room: MemoryRoom | None, processes: int, reached_s: float, everywhere: float) -> str:
    workers = "1 worker" if processes == 1 else f"{processes} workers"
    if reached_s < math.inf and room is not None:
        return f" {workers} reach{'es' * (processes == 1)} {room.text} in {duration(reached_s)}."
    if everywhere < math.inf:
        left = f"; {size(room.free)} are left of {room.text}" if room is not None and room.limit is not None else ""
        return f" {workers} will have taken {size(everywhere)} in all{left}."
    return ""


def _advice(copied: CopiedObject | None, leak: str, processes: int) -> str:
    if copied is not None:
        how = (
            f"Keep `{copied.name}` in one NumPy array (fixed-width strings, bytes or numbers), a pyarrow array or a "
            "shared tensor"
            if copied.plain
            else f"Keep `{copied.name}` as columns, one NumPy or pyarrow array for each field, or as one buffer of "
            "bytes with offsets"
        )
        return (
            f"{how}: workers share it unchanged, which saves about {size(copied.bytes * processes)} over all workers."
        )
    if leak:
        return (
            "Limit its size, or do not keep it in the dataset: each worker fills a copy of its own, which lives as "
            "long as the worker (with persistent_workers=True, as long as the run)."
        )
    return (
        "Look for what the dataset, its transforms or a library keep between samples; without persistent_workers each "
        "epoch starts new workers."
    )
