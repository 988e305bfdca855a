"""What the rules for risks go by: readings of a run's processes, and what is known of its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_gpuopt.measurements.flight import MemoryReading


@dataclass(frozen=True)
class CopiedObject:
    """Python objects of a dataset: reading one counts its references, and so copies its page into a forked worker.

    Whether the code that reads samples touches all of them is not known.

    Attributes:
        name: where they are, as code has it from the dataset on: ``"paths"``, ``"dataset.samples"``.
        what: ``"a list of 1,281,167 str"``.
        bytes: what they take, estimated.
        plain: whether they are strings, bytes or numbers, which fit one array; else they have parts of their own.
        place: file and line that assigns them, ``"data.py:41"``; empty where that is not known.
        together: bytes of all such objects of the dataset, these among them; 0: of these alone.
    """

    name: str
    what: str
    bytes: int
    plain: bool = True
    place: str = ""
    together: int = 0


@dataclass(frozen=True)
class WorkerMemory:
    """What is known of a worker's memory.

    Attributes:
        worker: its number.
        readings: oldest first, of one process; ``samples`` are those that it had read.
        leak: a container of its own that grows and explains what it has grown by, for people: ``"Photos.cache (dict)
            grew from 0 to 12,000 entries and holds about 115 MiB"``; empty where none is known.
        keeps: entries that it has got for each sample that was read; 0 where that is not known, or it has a bound.
    """

    worker: int
    readings: tuple[MemoryReading, ...]
    leak: str = ""
    keeps: float = 0.0


@dataclass(frozen=True)
class BatchesInFlight:
    """What batches take of ``/dev/shm`` on their way from a rank's workers.

    Attributes:
        batch_bytes: of one batch.
        prefetch_factor: batches that each worker makes ahead.
    """

    batch_bytes: int
    prefetch_factor: int = 2


@dataclass(frozen=True)
class RiskInputs:
    """What is known of a run at one moment. What is not known is None or empty.

    Attributes:
        workers: of the training loader.
        rank: readings of the training process, oldest first; ``samples`` are training batches finished.
        num_workers: how many the loader has.
        ranks_here: ranks on this machine, which share its memory and ``/dev/shm``.
        forked: whether the workers were forked; others have a whole copy of the dataset from the beginning.
        copied: the largest Python objects of the dataset.
        grows: what grows in the training process, for people: a container's name and size.
        in_flight: of the loader's batches.
        machine_bytes: memory of the machine.
        remaining_s: seconds until the run will have ended.
        samples_ahead: samples that each worker is still to read before its process ends.
        batches: numbers of batches of this epoch by rank; empty unless those of all ranks are known.
    """

    workers: tuple[WorkerMemory, ...] = ()
    rank: tuple[MemoryReading, ...] = ()
    num_workers: int | None = None
    ranks_here: int = 1
    forked: bool = True
    copied: CopiedObject | None = None
    grows: str = ""
    in_flight: BatchesInFlight | None = None
    machine_bytes: int | None = None
    remaining_s: float | None = None
    samples_ahead: int | None = None
    batches: Mapping[int, int] = field(default_factory=dict)
