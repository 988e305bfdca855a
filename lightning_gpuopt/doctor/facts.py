"""What the gatherers bring and the checks look at: plain numbers. A figure that could not be read is None."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TorchFacts:
    version: str  # such as ``"2.6.0+cu124"``
    cuda: tuple[int, int] | None  # that it was built for, (major, minor); None for a build without
    threads: int  # that one operation on the CPU may use
    sharing: str  # between workers: ``"file_descriptor"`` or ``"file_system"``


@dataclass(frozen=True)
class CopyRates:
    """Copies from host memory to a GPU, in GB/s (1e9 bytes)."""

    pinned_gb_s: float
    pageable_gb_s: float  # from ordinary memory
    generation: int | None = None  # of the PCIe link while copies ran; None if NVML did not tell
    lanes: int | None = None  # of it then; None if NVML did not tell


@dataclass(frozen=True)
class MemoryRates:
    """Copies within the host's memory, of a buffer larger than the caches; each byte is read and written once."""

    one_thread_gb_s: float  # 1e9 bytes/s
    all_threads_gb_s: float
    threads: int  # as many as CPUs may be used


@dataclass(frozen=True)
class CudaDeviceFacts:
    name: str  # of the model
    uuid: str  # with or without its prefix; empty if torch does not tell
    capability: tuple[int, int]  # (major, minor)
    copies: CopyRates | None = None  # None if they were not measured


@dataclass(frozen=True)
class CudaFacts:
    available: bool = False  # whether torch can use a GPU
    architectures: tuple[str, ...] = ()  # what torch was compiled for: ``"sm_90"``, ``"compute_90"``
    devices: tuple[CudaDeviceFacts, ...] = ()  # by CUDA ordinal
    failure: str = ""  # why this is not known, or not all of it; empty if all is well
    refusal: str = ""  # torch's words on why it can use none, though there may be some; else empty


@dataclass(frozen=True)
class HostFacts:
    """What this machine and this container leave to a training process."""

    machine_cpus: int
    affinity_cpus: int  # that this process may run on
    quota_cpus: float | None = None  # by the cgroup; None without a quota
    throttled_percent: float | None = None  # 0-100 % of the scheduler's periods; None without a quota
    free_cpus: float | None = None  # idle just now, of those that this process may use
    memory_total_mib: float | None = None
    memory_available_mib: float | None = None  # to this process, by its cgroup too
    shm_total_mib: float | None = None  # of ``/dev/shm``; None if there is none
    shm_free_mib: float | None = None
    files_limit: int | None = None  # that a process may have open (the soft limit); None without one
    files_open: int | None = None  # by this process
    omp_num_threads: str | None = None  # the environment variable; None if it is not set
    mkl_num_threads: str | None = None  # the same
    memory_rates: MemoryRates | None = None  # None if they were not measured

    @property
    def usable_cpus(self) -> float:
        """CPUs that this process may use at once; a quota can make it a fraction."""
        return min(float(self.affinity_cpus), self.quota_cpus if self.quota_cpus is not None else float("inf"))


@dataclass(frozen=True)
class ReadRates:
    """The same samples, in the same random order, read twice."""

    samples: int
    cold_per_s: float | None  # samples/s from the disk; None if the page cache could not be emptied of them
    warm_per_s: float  # samples/s from the page cache
    cold_mib_s: float | None = None  # from the disk


@dataclass(frozen=True)
class DataFacts:
    path: str  # as it was given
    kind: str  # ``"folder"``, ``"lmdb"`` (one of this package's) or ``"file"``
    file_system: str = ""  # its type: ``"ext4"``, ``"nfs4"``; empty if not known
    files: int = 0  # that were found
    complete: bool = True  # whether all files were listed before the time was over
    total_mib: float = 0.0  # of the files found
    # files by the upper end of their size: ``"16_kib"``, or ``"more"``
    sizes: dict[str, int] = field(default_factory=dict)
    read: ReadRates | None = None  # samples at random
    as_lmdb: ReadRates | None = None  # the same samples from an LMDB; None if that was not measured
    decode_s: float | None = None  # of one image with PIL; None if the samples are no images
    image_folder: bool = False  # images in class subfolders, which ``lmdb build`` reads as it is
    failure: str = ""  # what could not be measured, and why; empty if all was
