"""What the rules for risks go by: readings of a run's processes, and what is known of its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_gpuopt.measurements.flight import MemoryReading


@dataclass(frozen=True)
class CopiedObject:
    """Python objects of a dataset: reading one counts its references, and so copies its page into a forked worker.

    Whether the code that reads samples touches all of them is not known.
    """

    name: str  # where they are, as code has it from the dataset on: "dataset.samples"
    what: str  # "a list of 1,281,167 str"
    bytes: int  # estimated
    plain: bool = True  # strings, bytes or numbers, which fit one array; else they have parts of their own
    place: str = ""  # file and line that assigns them, "data.py:41"; empty: not known
    together: int = 0  # bytes of all such objects of the dataset; 0: of these alone


@dataclass(frozen=True)
class WorkerMemory:
    worker: int
    readings: tuple[MemoryReading, ...]  # oldest first, of one process; ``samples`` are those that it had read
    # a container of its own that explains its growth, for people: "Photos.cache (dict) grew from 0 to 12,000 entries
    # and holds about 115 MiB"; empty if none is known
    leak: str = ""
    keeps: float = 0.0  # entries per sample read; 0: not known, or it has a bound


@dataclass(frozen=True)
class BatchesInFlight:
    """What batches take of ``/dev/shm`` on their way from a rank's workers; ``batch_bytes`` is of one."""

    batch_bytes: int
    prefetch_factor: int = 2


@dataclass(frozen=True)
class RiskInputs:
    """What is known of a run at one moment; None or empty: not known."""

    workers: tuple[WorkerMemory, ...] = ()  # of the training loader
    rank: tuple[MemoryReading, ...] = ()  # of the training process, oldest first; ``samples`` are training batches
    num_workers: int | None = None
    ranks_here: int = 1  # ranks on this machine, which share its memory and ``/dev/shm``
    forked: bool = True  # others have a whole copy of the dataset from the beginning
    copied: CopiedObject | None = None  # the largest Python objects of the dataset
    grows: str = ""  # in the training process, for people: a container's name and size
    in_flight: BatchesInFlight | None = None
    machine_bytes: int | None = None  # memory of the machine
    remaining_s: float | None = None  # until the run will have ended
    samples_ahead: int | None = None  # that each worker is still to read before its process ends
    # of this epoch by rank; empty unless those of all ranks are known
    batches: Mapping[int, int] = field(default_factory=dict)
