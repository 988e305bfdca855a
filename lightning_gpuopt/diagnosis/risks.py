"""What is likely to end or to block a run later on: what runs out, and ranks of unequal length. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from lightning_gpuopt.diagnosis.memory_room import GIB, MIB, duration, room_of, size
from lightning_gpuopt.diagnosis.record import Risk
from lightning_gpuopt.diagnosis.steady_growth import SteadyGrowth, steady_growth
from lightning_gpuopt.diagnosis.worker_memory import worker_memory
from lightning_gpuopt.measurements.flight import MemoryReading
from lightning_gpuopt.measurements.risks import RiskInputs

_PROCESS_GROWN: Final = 64 * MIB
# memory of the training process grows at the end by this share of what it grew by at the beginning, or the inverse
_EVEN: Final = 0.5
# readings, after a third of the run, that must show it where no container is known to grow: allocators take long
_LEAST_UNNAMED: Final = 20
_LEAST: Final = 12
_FEW: Final = 4
"""Readings that must show that /dev/shm or descriptors are used up: the first batches take some of both. A few suffice
where as much has been used as is left, and twice as much as batches take."""

_SHM_GROWN: Final = 8 * MIB
_FILES_GROWN: Final = 32
_FILES_FULL: Final = 0.9
_FAR_S: Final = 24 * 3600.0  # what runs out later than in a day is not foreseen, where the end of the run is not known


def risks_of(observed: RiskInputs) -> list[Risk]:
    """The risks of a run, one of each kind at most."""
    rules = (worker_memory, _process_memory, _shared_memory, _open_files, lambda seen: uneven_ranks(seen.batches))
    return [risk for rule in rules for risk in rule(observed)]


def _process_memory(seen: RiskInputs) -> Iterator[Risk]:
    readings = seen.rank if seen.grows else seen.rank[len(seen.rank) // 3 :]
    least = 6 if seen.grows else _LEAST_UNNAMED
    rss = steady_growth([(each.at_s, each.rss) for each in readings if each.rss is not None], least)
    if rss is None or rss.grown < _PROCESS_GROWN or rss.evenness < _EVEN:
        return
    # mapped files count as resident, and pages that a fork has left shared become private again: a leak is both
    private = [(each.at_s, each.private) for each in readings if each.private is not None]
    if private and ((own := steady_growth(private, least)) is None or own.grown < rss.grown / 2):
        return
    room = room_of(seen.rank, seen.machine_bytes)
    reached_s = room.free / (rss.rate * seen.ranks_here) if room is not None else math.inf
    if reached_s > (seen.remaining_s if seen.remaining_s is not None else math.inf):
        reached_s = math.inf
    why = f": {seen.grows}" if seen.grows else ""
    text = f"The memory of the training process grows by {size(rss.rate * 60)} a minute{why}."
    if room is not None and reached_s < math.inf:
        ranks = f"{seen.ranks_here} ranks like this reach" if seen.ranks_here > 1 else "It reaches"
        text += f" {ranks} {room.text} in {duration(reached_s)}."
    evidence: dict[str, float | str] = {
        "growth_mib_per_minute": round(rss.rate * 60 / MIB, 3),
        "grown_mib": round(rss.grown / MIB, 1),
        **(room.evidence if room is not None else {}),
        **({"minutes_to_limit": round(reached_s / 60, 1)} if reached_s < math.inf else {}),
        **({"grows": seen.grows} if seen.grows else {}),
    }
    advice = (
        "Keep numbers, not tensors with their graphs (`loss.item()`, `.detach().cpu()`), and clear what is collected "
        "at the end of each epoch."
    )
    yield Risk("process_memory", text, evidence, advice)


def _shared_memory(seen: RiskInputs) -> Iterator[Risk]:
    known = [(each.at_s, each.shm_free) for each in seen.rank if each.shm_free is not None]
    if not known:
        return
    frees = [free for _, free in known]
    total = next((each.shm_size for each in reversed(seen.rank) if each.shm_size is not None), None)
    evidence: dict[str, float | str] = {"shm_size_gib": round(total / GIB, 3)} if total is not None else {}
    advice = (
        "Give the container more (`--shm-size=8g`, `--ipc=host`, in Kubernetes an emptyDir with medium: Memory), or "
        "have fewer batches in flight: a smaller prefetch_factor, fewer workers."
    )
    flight, workers = seen.in_flight, seen.num_workers or 0
    needed = 0
    if flight is not None and workers:
        needed = flight.batch_bytes * flight.prefetch_factor * workers * seen.ranks_here
        room = max(frees)  # the batches that are there already count as free
        if needed > room:
            ranks = f"{seen.ranks_here} ranks x " if seen.ranks_here > 1 else ""
            text = (
                f"Batches on their way from the workers need {size(needed)} of /dev/shm ({ranks}{workers} workers x "
                f"{flight.prefetch_factor} batches of {size(flight.batch_bytes)}), and {size(room)} are free: when it "
                "is full, a worker ends with a bus error."
            )
            evidence |= {"needed_gib": round(needed / GIB, 3), "left_gib": round(room / GIB, 3)}
            yield Risk("shared_memory", text, evidence, advice)
            return
    few = max(frees[-1], 2 * needed) if flight is not None or not workers else math.inf
    growth = _use([(at_s, -free) for at_s, free in known], few)
    if growth is None or growth.grown < max(_SHM_GROWN, needed):
        return
    reached_s = frees[-1] / growth.rate
    if reached_s <= _horizon_s(seen):
        text = (
            f"Free space in /dev/shm falls by {size(growth.rate * 60)} a minute: its "
            f"{size(total) if total is not None else 'space'} will be full in {duration(reached_s)}, and then a worker "
            "ends with a bus error."
        )
        evidence |= {"growth_mib_per_minute": round(growth.rate * 60 / MIB, 3)}
        evidence |= {"left_gib": round(frees[-1] / GIB, 3), "minutes_to_limit": round(reached_s / 60, 1)}
        yield Risk("shared_memory", text, evidence, f"Look for tensors or queues that are never released. {advice}")


def _use(points: Sequence[tuple[float, float]], few: float) -> SteadyGrowth | None:
    """How something is used up: by many readings, one a second, or by a few that show so much of it."""
    if (growth := steady_growth(list({int(at_s): (at_s, used) for at_s, used in points}.values()), _LEAST)) is not None:
        return growth
    growth = steady_growth(points, _FEW)
    return growth if growth is not None and growth.grown >= few else None


def _open_files(seen: RiskInputs) -> Iterator[Risk]:
    processes = {"The training process": seen.rank}
    processes |= {f"Worker {each.worker}": each.readings for each in seen.workers}
    found = [_files_of(who, readings, _horizon_s(seen)) for who, readings in processes.items()]
    if risks := [each for each in found if each is not None]:
        yield min(risks, key=lambda risk: risk[0])[1]


def _files_of(who: str, readings: Sequence[MemoryReading], horizon_s: float) -> tuple[float, Risk] | None:
    """The risk, and in how many seconds it comes true; None if there is none."""
    known = [(each.at_s, each.files) for each in readings if each.files is not None]
    limit = next((each.files_limit for each in reversed(readings) if each.files_limit), None)
    if not known or limit is None:
        return None
    now = known[-1][1]
    evidence: dict[str, float | str] = {"process": who.lower(), "open_files": float(now), "files_limit": float(limit)}
    text = f"{who} has {now:,} files open, the limit is {limit:,}"
    growth = _use(known, limit - now)
    rate = growth.rate if growth is not None and growth.grown >= _FILES_GROWN else 0.0
    reached_s = max(limit - now, 0) / rate if rate else math.inf
    if rate and reached_s <= horizon_s:
        evidence |= {"files_per_minute": round(rate * 60, 2), "minutes_to_limit": round(reached_s / 60, 1)}
        more = f"{rate * 60:,.0f}" if rate * 60 >= 100 else f"{rate * 60:.3g}"
        text += f", and {more} more each minute: the limit is reached in {duration(reached_s)}."
    elif now >= _FILES_FULL * limit:
        text, reached_s = f"{text}.", horizon_s
    else:
        return None
    advice = (
        "Close files once they are read; if they are the workers' tensors, use "
        'torch.multiprocessing.set_sharing_strategy("file_system"); `ulimit -n` raises the limit.'
    )
    return reached_s, Risk("open_files", text, evidence, advice)


def uneven_ranks(batches: Mapping[int, int]) -> Iterator[Risk]:
    """Find ranks with fewer batches in an epoch than others; ``batches`` are of all ranks."""
    if len(set(batches.values())) < 2:
        return
    fewest, most = min(batches.values()), max(batches.values())
    short = sorted(rank for rank, count in batches.items() if count == fewest)
    full = sorted(rank for rank, count in batches.items() if count == most)
    all_others = len(full) > 1 and len(short) + len(full) == len(batches)
    others = "the others" if all_others else f"rank {full[0]}"
    named = ", ".join(map(str, short[:8])) + " ..." * (len(short) > 8)
    who, its, it = ("Rank {} has", "its", "it") if len(short) == 1 else ("Ranks {} have", "their", "them")
    fewer = most - fewest
    text = (
        f"{who.format(named)} {fewer:,} batch{'es' * (fewer > 1)} fewer in this epoch than {others} ({fewest:,}, not "
        f"{most:,}): when {its} batches run out, the others wait for {it} in the next collective until it times out."
    )
    evidence: dict[str, float | str] = {
        "ranks": named,
        "batches_fewest": float(fewest),
        "batches_most": float(most),
        "batches_fewer": float(fewer),
    }
    advice = (
        "Give all ranks the same number of batches: a DistributedSampler pads them, or truncates them with "
        f"drop_last=True; split a stream evenly, or set Trainer(limit_train_batches={fewest}); torch's Join context "
        "lets ranks finish early."
    )
    yield Risk("uneven_ranks", text, evidence, advice)


def _horizon_s(seen: RiskInputs) -> float:
    return seen.remaining_s if seen.remaining_s is not None else _FAR_S
