"""What the loader of a run did: its settings, queues, workers, pipelines and images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from typing_extensions import override

from lightning_gpuopt.measurements.counters import Summed
from lightning_gpuopt.measurements.loader_description import LoaderDescription


@dataclass(frozen=True, slots=True)
class QueueTimes(Summed):
    """What was seen at the fetches of the watched loaders, the first of each epoch left out."""

    fetches: int = 0
    ready: int = 0  # batches that lay ready at the beginning of a fetch, summed up
    empty: int = 0  # fetches that began with nothing ready
    waits: int = 0  # fetches that had to wait
    wait_s: float = 0.0  # of those
    late_wait_s: float = 0.0  # those that ended with nearly all other batches ready: one late batch held up the rest
    unpinned_wait_s: float = 0.0  # those that began with unpinned results of workers, and none pinned


@dataclass(frozen=True, slots=True)
class WorkerTimes(Summed):
    """What all workers of the watched loaders did, summed up; without workers it is the training process itself."""

    batches: int = 0
    data_wall_s: float = 0.0  # in dataset access: ``__getitem__``, ``__getitems__``, or the iterable's ``next``
    data_cpu_s: float = 0.0  # of the worker's own thread in it; far less than wall means blocked on I/O or a lock
    collate_wall_s: float = 0.0
    collate_cpu_s: float = 0.0
    bytes: int = 0  # of the tensors and arrays in ``sized`` of the batches
    sized: int = 0  # batches whose bytes were counted
    squares_s2: float = 0.0  # sum of the squares of the seconds that each batch took, for their spread
    took: dict[int, int] = field(default_factory=dict)  # batches by time: bin ``n`` holds those of 2^(n/4) ns and more

    @property
    def busy_s(self) -> float:
        return self.data_wall_s + self.collate_wall_s

    @property
    def cpu_s(self) -> float:
        return self.data_cpu_s + self.collate_cpu_s

    @property
    def batch_bytes(self) -> float | None:
        return self.bytes / self.sized if self.sized else None

    @property
    def unevenness(self) -> float | None:
        """Variance of the seconds that a batch takes over the square of their mean: 0 is even; None before a batch."""
        if not self.batches or not self.busy_s:
            return None
        mean = self.busy_s / self.batches
        return max(self.squares_s2 / self.batches / mean**2 - 1.0, 0.0)


@dataclass(frozen=True, slots=True)
class PipelineTimes(Summed):
    """What a loader did that decodes in a pipeline of its own, in threads of the training process and on the GPU."""

    batches: int = 0
    wait_s: float = 0.0  # the training process waited for the pipeline to finish a batch
    read_wait_s: float = 0.0  # it waited for a batch's files, to put them into the pipeline
    read_wall_s: float = 0.0  # of the reading threads, summed up
    read_cpu_s: float = 0.0  # of those threads; far less means blocked on storage
    decode_cpu_s: float = 0.0  # of the pipeline's own threads


@dataclass(frozen=True, slots=True)
class Pipelines(Summed):
    """The training loaders that decode in pipelines of their own: their settings, and what they did together."""

    times: PipelineTimes
    num_threads: int  # CPU threads, summed up
    on_gpu: bool  # whether one of them decodes on the GPU
    loaders: int = 1
    batch_size: int | None = None  # the smallest; None if one does not say

    @property
    def wait_s(self) -> float:
        return self.times.wait_s + self.times.read_wait_s

    @override
    def __sub__(self, earlier: Pipelines) -> Pipelines:
        return replace(self, times=self.times - earlier.times)

    def with_others(self, others: Sequence[Pipelines]) -> Pipelines:
        every = [self, *others]
        sizes = [each.batch_size for each in every if each.batch_size is not None]
        return Pipelines(
            sum((each.times for each in others), self.times),
            sum(each.num_threads for each in every),
            any(each.on_gpu for each in every),
            sum(each.loaders for each in every),
            min(sizes) if len(sizes) == len(every) else None,
        )


@dataclass(frozen=True, slots=True)
class LoaderFacts:
    """The settings of the training loaders that matter for the diagnosis."""

    num_workers: int | None = None  # over all loaders; None if one does not say: no DataLoader
    persistent_workers: bool | None = None
    prefetch_factor: int | None = None  # None without workers
    pin_memory: bool | None = None
    sample_parallel: bool | None = None  # True: each sample is a task of the workers, not each batch
    # more workers would bring samples twice: an ``IterableDataset`` does not divide its samples; None if all
    # datasets are map-style
    duplicates: bool | None = None


@dataclass(frozen=True, slots=True)
class LoaderReading(Summed):
    """What one training loader is, and has done so far."""

    loader: LoaderDescription
    facts: LoaderFacts
    workers: WorkerTimes = field(default_factory=WorkerTimes)  # timed in its workers; nothing if that could not be
    wait_s: float | None = None  # the training process waited for it; None: it is the only loader
    inner_s: float | None = None  # a loader of another kind waited for the DataLoader inside; None: it is one

    @property
    def busy_s(self) -> float:
        return self.workers.busy_s / max(self.facts.num_workers or 1, 1)

    def waited_for(self, wait_s: float) -> LoaderReading:
        """This loader by who does its work: where its own code is slow, not its workers, these do not count."""
        wait_s = wait_s if self.wait_s is None else self.wait_s
        if self.inner_s is None or self.inner_s >= wait_s / 2 or not self.facts.num_workers:
            return self
        loader = replace(self.loader, kind="iterable", work="training process", num_workers=None)
        return replace(self, loader=loader, facts=LoaderFacts(duplicates=self.facts.duplicates), workers=WorkerTimes())


@dataclass(frozen=True, slots=True)
class ImageSamples:
    """The image files behind the training loader; None: not measured."""

    own: bool = False  # read by a dataset of this package: an image folder's or an LMDB's
    in_lmdb: bool = False  # stored in an LMDB of this package
    fast: bool = False  # whether the fast decoder reads them already
    crop_size: int | None = None  # side in pixels of square RGB images in a batch; None: it holds none
    batch_size: int | None = None  # images in a batch
    small_size: int | None = None  # shorter side in pixels of the images behind ``small_decode_s``
    read_s: float | None = None  # of a file, from the page cache or from storage
    pil_decode_s: float | None = None
    pil_crop_s: float | None = None  # crop and resize
    pil_float_s: float | None = None  # to a float32 tensor
    fast_decode_s: float | None = None  # decode, crop and resize to a uint8 tensor
    small_decode_s: float | None = None  # the same, from the image as it is once made smaller
    file_bytes: float | None = None  # mean
    width: int | None = None  # median, pixels
    height: int | None = None  # median, pixels
