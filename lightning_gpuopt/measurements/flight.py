"""What the flight recorder knows of each process of a run, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

STARTS: Final = "starts"
"""A worker starts, until its first batch is asked for."""

WAITS: Final = "waits"
"""A worker waits for work."""

READS: Final = "reads"
"""A worker, or a rank without workers, reads samples."""

COLLATES: Final = "collates"
"""A worker makes a batch of its samples, or hands it over."""

SETS_UP: Final = "set-up"
"""A rank does something outside of its batches: it begins, starts an epoch, ends."""

TRAINS: Final = "train"
"""A rank is in a training batch, or fetches one."""

VALIDATES: Final = "validation"
"""A rank is in an evaluation batch, or fetches one."""

SAVES: Final = "save"
"""A rank saves a checkpoint."""

OUTSIDE_OF_FIT: Final = "-outside"
"""At the end of a run's name: it is no more than an exception that has ended a process outside of ``fit``."""

PIPE_FILES: Final = ("connection.py", "reductions.py", "reduction.py", "resource_sharer.py")
"""Python's and torch's, in which an exception says that another process's end of a line is gone."""

OF_A_WORKER: Final = ("rss", "private", "faults", "samples", "files", "files_limit")
"""What a ring's log has of each reading of a worker, after the number of its ring."""

Doing = Literal["starts", "waits", "reads", "collates", "set-up", "train", "validation", "save"]

EVENTS: Final = {
    "exception": "type, message, where (in the user's own code), frames (innermost last, 'name (file:line)'), of a "
    "dataset also index, or the batch's indices",
    "worker_died": "worker, loader, pid, and signal (a number) or code",
    "signal": "signal (a number): one that Lightning handles",
    "uneven_ranks": "batches: numbers of batches of an epoch by rank",
    "collective": "entries of torch's NCCL flight recorder, oldest first",
}
"""Events of a record, each with the keys that it has beside ``t`` (Unix time in seconds) and ``event``."""


@dataclass(frozen=True)
class MemoryReading:
    """What a process held and what limited it, at one moment. What could not be read is None.

    Attributes:
        at_s: Unix time in seconds.
        rss: bytes that were resident.
        private: bytes that only this process had (private dirty pages and swap); read now and then, when minor
            faults say that it may have grown.
        anonymous: of a worker: bytes of no file, shared with its parent or not; read with ``private``. What a worker
            allocates adds to both, what it copies of its parent's adds to ``private`` alone.
        faults: minor page faults of the process so far.
        samples: of a worker: samples that it had read; of a rank: training batches finished.
        limit: bytes that the memory cgroup allows (the tightest of ours and its parents).
        current: bytes that this cgroup uses, page cache included.
        cache: of those, file cache that can be dropped.
        peak: the most it has used.
        oom_kills: processes of our own cgroup that the kernel has ended for want of memory, since its beginning.
        available: bytes available on the machine.
        shm_free: free bytes in ``/dev/shm``.
        shm_size: its size in bytes.
        files: open file descriptors.
        files_limit: how many are allowed.
        gpu_used: bytes in use on this rank's GPU.
        gpu_total: its size in bytes.
    """

    at_s: float
    rss: int | None = None
    private: int | None = None
    anonymous: int | None = None
    faults: int | None = None
    samples: int | None = None
    limit: int | None = None
    current: int | None = None
    cache: int | None = None
    peak: int | None = None
    oom_kills: int | None = None
    available: int | None = None
    shm_free: int | None = None
    shm_size: int | None = None
    files: int | None = None
    files_limit: int | None = None
    gpu_used: int | None = None
    gpu_total: int | None = None


@dataclass(frozen=True)
class FlightRecord:
    """One process, as its ring shows it. Times are Unix times in seconds, by the clock of whoever reads the ring.

    Attributes:
        run: the same for all processes of a run.
        host: name of the machine.
        pid: process id.
        start_ticks: when the process began, in clock ticks since boot: with ``pid`` it names one process.
        rank: global rank of the training process; of a worker, of the one that it works for.
        world_size: ranks of the run.
        worker: a worker's number; None for a training process.
        loader: of a worker: ``"train"`` or ``"validation"``, with more digits where there are several.
        created_s: when the ring was made.
        written_s: when its process last wrote to it; a process that is alive writes four times a second.
        ended: how ``fit`` ended: ``""`` (not yet), ``"ok"`` or ``"exception"``.
        caught: of a rank whose ``fit`` ended by an exception: whether its script caught it, known once its process has
            come to its end; None: not known.
        doing: what it does now.
        since_s: since when.
        place: line of the user's own code that its main thread was last seen at, now and then, as
            ``"Photos.__getitem__ (data.py:41)"``; of a rank, in the phase that is open. Before the first time, the
            function that it is to call; empty where that is not known.
        reads: where the user's own code begins that reads samples, likewise.
        phase: of a rank: the phase or hook that is open, as reports name it.
        steps: training batches that have been finished.
        epoch: the epoch.
        batch: batches of this epoch that have been finished.
        batches: batches of this epoch; None where that is not known.
        progress_s: when a step, an evaluation batch, a save or a set-up was last finished.
        longest_s: the longest time in seconds between two of these so far.
        hang_s: seconds without progress that its detector counts as a hang (``hang_timeout``); None where it does not
            look for one, or has ended.
        index: key of the sample that is being read; None where none is, or where it is not known.
        indices: keys of the batch that is being read, the first of them where they are many.
        batches_read: of a worker: batches that it has handed over.
        fork: of a worker: whether it was forked.
        cpu_s: of a worker: seconds of CPU that it had used when its rank last looked; None where that is not known.
        turn: of a rank: number of the worker whose batch the training loop waits for; None where it waits for none.
        stack_signal: the real-time signal that makes it write its stacks; 0: none does.
        stacks: path of the file that they go to; empty: none.
        crash: what faulthandler has written of a fatal signal into it; empty: nothing.
        leak: the container that explains that it grows, for people; empty where none is known to.
        memory: readings, oldest first.
        events: what happened, oldest first: see :data:`EVENTS`.
    """

    run: str
    host: str
    pid: int
    start_ticks: int
    rank: int
    world_size: int = 1
    worker: int | None = None
    loader: str = ""
    created_s: float = 0.0
    written_s: float = 0.0
    ended: str = ""
    caught: bool | None = None
    doing: Doing = SETS_UP
    since_s: float = 0.0
    place: str = ""
    reads: str = ""
    phase: str = ""
    steps: int = 0
    epoch: int = 0
    batch: int = 0
    batches: int | None = None
    progress_s: float = 0.0
    longest_s: float = 0.0
    hang_s: float | None = None
    index: int | str | None = None
    indices: tuple[int | str, ...] = ()
    batches_read: int = 0
    fork: bool = False
    cpu_s: float | None = None
    turn: int | None = None
    stack_signal: int = 0
    stacks: str = ""
    crash: str = ""
    leak: str = ""
    memory: tuple[MemoryReading, ...] = ()
    events: tuple[Mapping[str, Any], ...] = field(default=())
