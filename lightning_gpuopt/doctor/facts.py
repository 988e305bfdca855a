"""What the gatherers bring and the checks look at: plain numbers. A figure that could not be read is None."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "CopyRates",
    "CudaDeviceFacts",
    "CudaFacts",
    "DataFacts",
    "HostFacts",
    "MemoryRates",
    "ReadRates",
    "TorchFacts",
]


@dataclass(frozen=True)
class TorchFacts:
    """The torch that is installed.

    Attributes:
        version: such as ``"2.6.0+cu124"``.
        cuda: CUDA that it was built for, as (major, minor); None for a build without.
        threads: threads that one operation on the CPU may use.
        sharing: how tensors go from worker to worker: ``"file_descriptor"`` or ``"file_system"``.
    """

    version: str
    cuda: tuple[int, int] | None
    threads: int
    sharing: str


@dataclass(frozen=True)
class CopyRates:
    """Copies from host memory to a GPU.

    Attributes:
        pinned_gb_s: GB/s (1e9 bytes) from pinned memory.
        pageable_gb_s: GB/s from ordinary memory.
        generation: generation of the PCIe link while copies ran; None where NVML did not tell.
        lanes: its lanes then; None where NVML did not tell.
    """

    pinned_gb_s: float
    pageable_gb_s: float
    generation: int | None = None
    lanes: int | None = None


@dataclass(frozen=True)
class MemoryRates:
    """Copies within the host's memory, of a buffer that is larger than the caches.

    Attributes:
        one_thread_gb_s: GB/s (1e9 bytes, each read once and written once) with one thread.
        all_threads_gb_s: the same with ``threads``.
        threads: as many as CPUs may be used.
    """

    one_thread_gb_s: float
    all_threads_gb_s: float
    threads: int


@dataclass(frozen=True)
class CudaDeviceFacts:
    """What CUDA says of one device.

    Attributes:
        name: of the model.
        uuid: with or without its prefix; empty where torch does not tell.
        capability: compute capability, as (major, minor).
        copies: how fast copies to it are; None where they were not measured.
    """

    name: str
    uuid: str
    capability: tuple[int, int]
    copies: CopyRates | None = None


@dataclass(frozen=True)
class CudaFacts:
    """What torch's CUDA says.

    Attributes:
        available: whether torch can use a GPU.
        architectures: what torch was compiled for: ``"sm_90"``, ``"compute_90"``.
        devices: by CUDA ordinal.
        failure: why this is not known, or not all of it; empty where all is well.
        refusal: torch's words on why it can use none, though there may be some; empty where it has none.
    """

    available: bool = False
    architectures: tuple[str, ...] = ()
    devices: tuple[CudaDeviceFacts, ...] = ()
    failure: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class HostFacts:
    """What this machine and this container leave to a training process.

    Attributes:
        machine_cpus: CPUs of the machine.
        affinity_cpus: CPUs that this process may run on.
        quota_cpus: CPUs that the cgroup's quota allows; None without one.
        throttled_percent: of the scheduler's periods under the quota, those in which the cgroup was stopped, 0-100 %,
            since it was made; None without a quota.
        free_cpus: CPUs that were idle just now, of those that this process may use.
        memory_total_mib: memory of the machine.
        memory_available_mib: memory that is left to this process, by its cgroup too.
        shm_total_mib: size of ``/dev/shm``; None where there is none.
        shm_free_mib: what of it is free.
        files_limit: files that a process may have open (the soft limit); None without a limit.
        files_open: files that this process has open.
        omp_num_threads: the environment variable, as it is; None where it is not set.
        mkl_num_threads: the same.
        memory_rates: how fast copies within memory are; None where they were not measured.
    """

    machine_cpus: int
    affinity_cpus: int
    quota_cpus: float | None = None
    throttled_percent: float | None = None
    free_cpus: float | None = None
    memory_total_mib: float | None = None
    memory_available_mib: float | None = None
    shm_total_mib: float | None = None
    shm_free_mib: float | None = None
    files_limit: int | None = None
    files_open: int | None = None
    omp_num_threads: str | None = None
    mkl_num_threads: str | None = None
    memory_rates: MemoryRates | None = None

    @property
    def usable_cpus(self) -> float:
        """CPUs that this process may use at once; a quota can make it a fraction."""
        return min(float(self.affinity_cpus), self.quota_cpus if self.quota_cpus is not None else float("inf"))


@dataclass(frozen=True)
class ReadRates:
    """The same samples, in the same random order, read twice.

    Attributes:
        samples: how many.
        cold_per_s: samples/s from the disk; None where the page cache could not be emptied of them.
        warm_per_s: samples/s from the page cache.
        cold_mib_s: MiB/s from the disk.
    """

    samples: int
    cold_per_s: float | None
    warm_per_s: float
    cold_mib_s: float | None = None


@dataclass(frozen=True)
class DataFacts:
    """What a dataset on a disk is like.

    Attributes:
        path: as it was given.
        kind: ``"folder"``, ``"lmdb"`` (one of this package's) or ``"file"``.
        file_system: its type: ``"ext4"``, ``"nfs4"``; empty where not known.
        files: how many files were found.
        complete: whether all files were listed, or the time was over before.
        total_mib: bytes of the files found, in MiB.
        sizes: how many files there are, by the upper end of their size: ``"16_kib"``; ``"more"`` for the rest.
        read: how fast its samples are read at random.
        as_lmdb: how fast the same samples are read from an LMDB of them; None where that was not measured.
        decode_s: seconds of decoding one image with PIL; None where the samples are no images.
        image_folder: whether it is a folder of images in class subfolders, which ``lmdb build`` reads as it is.
        failure: what could not be measured, and why; empty where all was.
    """

    path: str
    kind: str
    file_system: str = ""
    files: int = 0
    complete: bool = True
    total_mib: float = 0.0
    sizes: dict[str, int] = field(default_factory=dict)
    read: ReadRates | None = None
    as_lmdb: ReadRates | None = None
    decode_s: float | None = None
    image_folder: bool = False
    failure: str = ""
