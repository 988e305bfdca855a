"""What the flight recorder knows of each process of a run, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

STARTS: Final = "starts"  # a worker starts, until its first batch is asked for
WAITS: Final = "waits"  # a worker waits for work
READS: Final = "reads"  # a worker, or a rank without workers, reads samples
COLLATES: Final = "collates"  # a worker makes a batch of its samples, or hands it over
SETS_UP: Final = "set-up"  # a rank does something outside of its batches: it begins, starts an epoch, ends
TRAINS: Final = "train"  # a rank is in a training batch, or fetches one
VALIDATES: Final = "validation"  # a rank is in an evaluation batch, or fetches one
SAVES: Final = "save"  # a rank saves a checkpoint
# at the end of a run's name: it is no more than an exception that has ended a process outside of ``fit``
OUTSIDE_OF_FIT: Final = "-outside"
# Python's and torch's, in which an exception says that another process's end of a line is gone
PIPE_FILES: Final = ("connection.py", "reductions.py", "reduction.py", "resource_sharer.py")
# what a ring's log has of each reading of a worker, after the number of its ring
OF_A_WORKER: Final = ("rss", "private", "faults", "samples", "files", "files_limit")
Doing = Literal["starts", "waits", "reads", "collates", "set-up", "train", "validation", "save"]

# events of a record, each with the keys that it has beside ``t`` (Unix time in seconds) and ``event``
EVENTS: Final = {
    "exception": "type, message, where (in the user's own code), frames (innermost last, 'name (file:line)'), of a "
    "dataset also index, or the batch's indices",
    "worker_died": "worker, loader, pid, and signal (a number) or code",
    "signal": "signal (a number): one that Lightning handles",
    "uneven_ranks": "batches: numbers of batches of an epoch by rank",
    "collective": "entries of torch's NCCL flight recorder, oldest first",
}


@dataclass(frozen=True)
class MemoryReading:
    """What a process held and what limited it, at one moment, memory in bytes; None: it could not be read."""

    at_s: float  # Unix time
    rss: int | None = None
    # private dirty pages and swap; read now and then, when minor faults say that it may have grown
    private: int | None = None
    # of a worker: bytes of no file, shared with its parent or not; read with ``private``. What a worker allocates adds
    # to both, what it copies of its parent's adds to ``private`` alone.
    anonymous: int | None = None
    faults: int | None = None  # minor page faults of the process so far
    samples: int | None = None  # a worker's samples read; a rank's training batches finished
    limit: int | None = None  # what the memory cgroup allows, the tightest of ours and its parents
    current: int | None = None  # what this cgroup uses, page cache included
    cache: int | None = None  # file cache in it that can be dropped
    peak: int | None = None  # the most the cgroup has used
    oom_kills: int | None = None  # processes of our own cgroup killed for want of memory, since its beginning
    available: int | None = None  # on the machine
    shm_free: int | None = None  # of ``/dev/shm``
    shm_size: int | None = None
    files: int | None = None  # open file descriptors
    files_limit: int | None = None
    gpu_used: int | None = None  # of this rank's GPU, by all
    gpu_total: int | None = None


@dataclass(frozen=True)
class FlightRecord:
    """One process, as its ring shows it; times are Unix times in seconds, by the clock of whoever reads the ring."""

    run: str  # the same for all processes of a run
    host: str
    pid: int
    start_ticks: int  # when the process began, in clock ticks since boot: with ``pid`` it names one process
    rank: int  # global; of a worker, of the rank that it works for
    world_size: int = 1
    worker: int | None = None  # a worker's number; None for a training process
    loader: str = ""  # of a worker: "train" or "validation", with more digits where there are several
    created_s: float = 0.0
    written_s: float = 0.0  # a process that is alive writes four times a second
    ended: str = ""  # how ``fit`` ended: "" (not yet), "ok" or "exception"
    # whether the script caught the exception that ended ``fit``, known at its process's end; None: not known
    caught: bool | None = None
    doing: Doing = SETS_UP
    since_s: float = 0.0
    # line of the user's own code that its main thread was last seen at, now and then: "Photos.__getitem__
    # (data.py:41)"; of a rank, in the phase that is open. Before the first time, the function that it is to call.
    place: str = ""
    reads: str = ""  # where the user's own code begins that reads samples, likewise
    phase: str = ""  # of a rank: the phase or hook that is open, as reports name it
    steps: int = 0  # training batches that have been finished
    epoch: int = 0
    batch: int = 0  # batches of this epoch that have been finished
    batches: int | None = None  # of this epoch; None if that is not known
    progress_s: float = 0.0  # when a step, an evaluation batch, a save or a set-up was last finished
    longest_s: float = 0.0  # the longest time between two of these so far
    hang_s: float | None = None  # ``hang_timeout``; None if its detector does not look for hangs, or has ended
    index: int | str | None = None  # key of the sample that is being read; None: none is, or not known
    indices: tuple[int | str, ...] = ()  # keys of the batch that is being read, the first of many
    batches_read: int = 0  # of a worker: batches that it has handed over
    fork: bool = False  # of a worker: whether it was forked
    cpu_s: float | None = None  # CPU that a worker had used when its rank last looked; None: not known
    turn: int | None = None  # of a rank: the worker whose batch the loop waits for; None: it waits for none
    stack_signal: int = 0  # the real-time signal that makes it write its stacks; 0: none does
    stacks: str = ""  # path of the file that they go to; empty: none
    crash: str = ""  # what faulthandler has written of a fatal signal into it
    leak: str = ""  # the container that explains that it grows, for people
    memory: tuple[MemoryReading, ...] = ()  # oldest first
    events: tuple[Mapping[str, Any], ...] = field(default=())  # oldest first: see :data:`EVENTS`
