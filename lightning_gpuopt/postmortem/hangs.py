"""Whether a run makes no progress any more, and who holds it up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lightning_gpuopt.measurements.flight import SAVES, STARTS, VALIDATES, WAITS, FlightRecord
from lightning_gpuopt.postmortem.record import PostMortem, Process
from lightning_gpuopt.postmortem.stacks import (
    Frame,
    collective_of,
    fetches,
    frame_of,
    loads,
    main_thread,
    own_frame,
    reading_thread,
)
from lightning_gpuopt.postmortem.uneven import Uneven, uneven_of
from lightning_gpuopt.postmortem.wording import clock, key, name_of
from lightning_gpuopt.postmortem.wording import ranks as ranks_in_words

_NO_CPU_S: Final = 0.5  # a worker that has used less CPU than this since its start has read nothing
_LOCKS: Final = ("/threading.py", "/multiprocessing/synchronize.py", "/logging/__init__.py")


@dataclass(frozen=True)
class Hang:
    rank: int  # the rank that has made none for longest
    pid: int
    since_s: float  # Unix time when it last did, or began what is open
    quiet_s: float  # seconds since then
    limit_s: float  # seconds that count as a hang


def hang_of(
    records: Sequence[FlightRecord],
    now_s: float,
    *,
    least_s: float = 120.0,
    times_longest: float = 10.0,
    first_s: float = 1800.0,
) -> Hang | None:
    """The rank that has made no progress for too long, the one that is longest without it.

    Too long is what its detector was told (``hang_timeout``). If it was told nothing, it is at least ``least_s``,
    and ``times_longest`` the longest that progress has taken so far, or ``first_s`` before the first step. Records are
    of processes that are alive; workers are ignored. ``now_s`` is Unix time.
    """
    stuck = []
    for record in records:
        if record.worker is not None or record.ended:
            continue
        since_s = record.progress_s or record.created_s
        if record.doing in (VALIDATES, SAVES) and record.since_s:
            since_s = record.since_s
        limit_s = max(least_s, times_longest * record.longest_s) if record.steps else first_s
        limit_s = limit_s if record.hang_s is None else record.hang_s
        if now_s - since_s >= limit_s:
            stuck.append(Hang(record.rank, record.pid, since_s, now_s - since_s, limit_s))
    return max(stuck, key=lambda each: each.quiet_s, default=None)


@dataclass(frozen=True)
class _Rank:
    """A training process in a hang: its main thread, and the collective that it waits in."""

    record: FlightRecord
    frames: list[Frame]
    collective: str = ""
    entry: Mapping[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> str | None:
        frame = own_frame(self.frames)
        return (frame.at(self.record.place, self.record.reads) if frame else self.record.place) or None

    @property
    def waits_for_batch(self) -> bool:
        return self.record.turn is not None or fetches(self.frames)


def describe_hang(records: Sequence[FlightRecord], stacks: Mapping[int, str], waits: Mapping[int, str]) -> PostMortem:
    """Who holds a run up, by stacks of ``faulthandler`` and ``wchan`` (empty: not readable), both by process id.

    ``text`` is what each rank and the worker in turn does, a line each; memory is not looked at.
    """
    several = max((each.world_size for each in records), default=1) > 1
    ranks = [_rank(record, stacks, several) for record in records if record.worker is None]
    if not ranks:
        return PostMortem("hang")
    uneven = uneven_of([each.record for each in ranks])
    stuck = _stuck(ranks, uneven)
    worker = _worker_of(stuck, records, stacks) if stuck.waits_for_batch and uneven is None else None
    if worker is not None and worker.doing == WAITS and _error_of(worker) is None and _is_in_own_code(stuck):
        worker = None  # a sampler of the user's does not come back: nobody has asked the worker
    lines = _lines(ranks, uneven, several)
    if worker is None:
        record, where, index, read = stuck.record, stuck.where, stuck.record.index, None
        likely, advice = _why_rank(stuck, ranks, uneven)
    else:
        record, index = worker, worker.index
        frames = reading_thread(stacks.get(worker.pid, ""))
        frame = own_frame(frames)
        at = frame.at(worker.place, worker.reads) if frame and frame.own else worker.place
        where = at or (frame.at() if frame else None)
        likely, advice = _why_worker(worker, frames, waits.get(worker.pid, ""))
        if (error := _error_of(worker)) is not None:
            where, index = str(error.get("where") or "") or where, error.get("index", index)
            kind = error.get("type") or "an exception"
            likely = f"the worker raised {kind}, which could not be sent on: its class cannot be pickled"
            advice = "check the line above; define the exception's class in a module, so that it can be pickled."
        read = index
    lines += _at(record, where, read, waits, several)
    text = "\n".join(lines)
    return PostMortem("hang", Process.of(record), where, index, likely=likely, advice=advice, text=text)


def _error_of(worker: FlightRecord) -> Mapping[str, Any] | None:
    """The exception that an idle worker has raised for the batch that it is to hand over; Ctrl-C is none."""
    last = worker.events[-1] if worker.events else {}
    raised = last.get("event") == "exception" and last.get("type") != "KeyboardInterrupt"
    return last if worker.doing == WAITS and raised else None


def _is_in_own_code(rank: _Rank) -> bool:
    """Whether the loader has called code of the user's in the training process, as a sampler's."""
    frame = own_frame(rank.frames)
    loader = next((at for at, each in enumerate(rank.frames) if loads(each)), None)
    return frame is not None and frame.own and loader is not None and rank.frames.index(frame) < loader


def _rank(record: FlightRecord, stacks: Mapping[int, str], several: bool) -> _Rank:
    frames = main_thread(stacks.get(record.pid, ""))
    entries = [
        entry
        for event in record.events
        if event.get("event") == "collective"
        for entry in event.get("entries") or ()
        if isinstance(entry, Mapping)
    ]
    last = entries[-1] if entries else {}
    open_one = str(last.get("profiling_name", "")).rpartition(":")[2] if last.get("state") != "completed" else ""
    return _Rank(record, frames, collective_of(frames or frame_of(record.place), several) or open_one, last)


def _stuck(ranks: Sequence[_Rank], uneven: Uneven | None) -> _Rank:
    """The rank that holds the others up."""
    if uneven is not None:
        return next(each for each in ranks if each.record is uneven.early[0])
    running = [each for each in ranks if not each.record.ended] or list(ranks)
    outside = [each for each in running if not each.collective]
    if outside and len(outside) < len(running):
        return min(outside, key=_quiet_since)
    numbers = {each.record.rank: each.entry.get("collective_seq_id") for each in running}
    known = [number for number in numbers.values() if isinstance(number, int)]
    if len(known) == len(running) > 1 and min(known) < max(known):  # it has not joined the last collective
        return min(running, key=lambda each: (each.entry["collective_seq_id"], each.record.rank))
    waiting = [each for each in running if each.waits_for_batch]
    if not waiting and len({each.collective for each in running}) > 1:  # one has taken another way through the code
        alike = Counter(each.collective for each in running)
        return min(running, key=lambda each: (alike[each.collective], not _in_own_call(each), _quiet_since(each)))
    return min(waiting or running, key=_quiet_since)


def _in_own_call(rank: _Rank) -> bool:
    """Whether code of the user's has called the collective."""
    frame = own_frame(rank.frames)
    return frame is not None and frame.own


def _quiet_since(rank: _Rank) -> tuple[float, int]:
    return rank.record.progress_s or rank.record.created_s, rank.record.rank


def _worker_of(rank: _Rank, records: Sequence[FlightRecord], stacks: Mapping[int, str]) -> FlightRecord | None:
    """The worker whose turn it is; where nobody knows, the one that has been busy for longest."""
    evaluates = rank.record.doing == VALIDATES
    own = [each for each in records if each.worker is not None and each.rank == rank.record.rank and not each.ended]
    own = [each for each in own if each.loader.startswith("validation") == evaluates] or own
    if rank.record.turn is not None:
        own = [each for each in own if each.worker == rank.record.turn]
        return max(own, key=lambda each: each.created_s, default=None)
    busy = [each for each in own if each.doing != WAITS]
    return min(busy, key=lambda each: each.since_s or each.created_s, default=None)


def _lines(ranks: Sequence[_Rank], uneven: Uneven | None, several: bool) -> list[str]:
    """What the ranks do, those that do the same in one line."""
    if not several:
        return []
    groups: dict[str, list[_Rank]] = {}
    for each in ranks:
        groups.setdefault(_doing(each), []).append(each)
    parts = [uneven.text] if uneven is not None else []
    early = [each.rank for each in uneven.early] if uneven is not None else []
    for doing, group in groups.items():
        numbers = [each.record.rank for each in group if each.record.rank not in early]
        if numbers:
            since_s = max(each.record.progress_s or each.record.created_s for each in group)
            verb = doing if len(numbers) > 1 else _singular(doing)
            parts.append(f"{ranks_in_words(numbers)} {verb} since {clock(since_s)}")
    return ["; ".join(parts)]


def _doing(rank: _Rank) -> str:
    if rank.record.ended:
        return "have ended"
    if rank.collective:
        return f"wait in {rank.collective}"
    if rank.waits_for_batch:
        turn = "" if rank.record.turn is None else f" of worker {rank.record.turn}"
        return f"wait for a batch{turn}"
    return f"are at {rank.where or rank.record.phase or rank.record.doing}"


def _singular(doing: str) -> str:
    verb, _, rest = doing.partition(" ")
    return f"{ {'wait': 'waits', 'have': 'has', 'are': 'is'}[verb] } {rest}"


def _at(
    record: FlightRecord, where: str | None, index: int | str | None, waits: Mapping[int, str], several: bool
) -> list[str]:
    """The line about the process that is held to be stuck."""
    parts = []
    if index is not None:
        parts.append(f"index {key(index)}")
    if where:
        parts.append(f"at {where}")
    elif record.phase:
        parts.append(f"in {record.phase}")
    wait = waits.get(record.pid, "").strip("0\n ")
    if wait:
        parts.append(f"in the kernel it waits in {wait}")
    turn = "it was the turn of " if record.worker is not None else ""
    return [f"{turn}{name_of(Process.of(record), 2 if several else 1)}" + (f": {', '.join(parts)}" if parts else "")]


def _why_rank(stuck: _Rank, ranks: Sequence[_Rank], uneven: Uneven | None) -> tuple[str, str]:
    if uneven is not None:
        return "the ranks have different numbers of batches", UNEVEN_ADVICE
    running = [each for each in ranks if not each.record.ended]
    if stuck.collective and len(running) > 1:
        names = {each.collective for each in running}
        if len(names) > 1:
            return (
                "the ranks wait in different collectives: one of them took another path through the code",
                "let every rank call the same collectives in the same order: none inside 'if rank == 0' or a condition "
                "on the batch; self.log(..., sync_dist=True) in every rank or in none.",
            )
        return (
            "all ranks have joined the collective, or the missing one cannot be seen from here",
            "check the network between the nodes; TORCH_NCCL_TRACE_BUFFER_SIZE=2000 records which rank joined what, "
            "and the strategy's timeout= ends such a run.",
        )
    if len(running) > 1:
        return (
            f"the others wait for {ranks_in_words([stuck.record.rank])}",
            "check the line above; the strategy's timeout= ends such a run instead of letting it wait.",
        )
    return "", "check the line above: it waits for something that does not come."


# for ranks with different numbers of batches
UNEVEN_ADVICE: Final = (
    "give every rank the same number of batches: drop_last=True with a DistributedSampler, limit_train_batches=N, or "
    "truncate an IterableDataset to the same length on each rank; torch's Join context lets ranks finish early."
)


def _why_worker(worker: FlightRecord, frames: Sequence[Frame], wait: str) -> tuple[str, str]:
    if _fork_lock(worker, frames, wait.strip("0\n ")):
        innermost = f" (innermost frame: {frames[0].at(worker.place, worker.reads)})" if frames else ""
        if not frames and worker.place:
            innermost = f" (innermost frame: {worker.place})"
        return (
            f"a lock that was held during the fork{innermost}",
            "use spawn or forkserver: DataLoader(multiprocessing_context='forkserver'); or start no threads in the "
            "training process before workers start (cv2.setNumThreads(0), no use of the library before fit).",
        )
    busy = "a read or a call that does not return"
    return (
        f"{busy}: check the line above" if worker.place or frames else busy,
        "DataLoader(timeout=...) turns such a wait into an exception; read the sample alone to see whether it returns.",
    )


def _fork_lock(worker: FlightRecord, frames: Sequence[Frame], wait: str) -> bool:
    """Whether a forked worker seems to wait for a lock that nobody will release."""
    if not worker.fork or worker.batches_read or (worker.cpu_s is not None and worker.cpu_s > _NO_CPU_S):
        return False
    if wait:
        return wait.startswith("futex")
    if frames and frames[0].file.replace("\\", "/").endswith(_LOCKS):
        return True
    # what the kernel says cannot be read: no CPU time and no word since its start are what there is
    return worker.cpu_s is not None and (worker.doing == STARTS or bool(frames))
