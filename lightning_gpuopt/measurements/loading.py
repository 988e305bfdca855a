"""What the loader of a run did: its settings, queues, workers, pipelines and images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lightning_gpuopt.measurements.loader_description import LoaderDescription
from lightning_gpuopt.measurements.summed import Summed


@dataclass(frozen=True, slots=True)
class QueueTimes(Summed):
    """What was seen at the fetches of the watched loaders, the first of each epoch left out.

    Attributes:
        fetches: fetches seen.
        ready: batches that lay ready at the beginning of a fetch, summed over the fetches.
        empty: fetches that began with nothing ready.
        waits: fetches that had to wait.
        wait_s: seconds of those.
        late_wait_s: those of them that ended with nearly all other batches ready: one late batch held up the rest.
        unpinned_wait_s: those that began with results of workers waiting for the pin-memory thread, and none pinned.
    """

    fetches: int = 0
    ready: int = 0
    empty: int = 0
    waits: int = 0
    wait_s: float = 0.0
    late_wait_s: float = 0.0
    unpinned_wait_s: float = 0.0

    @property
    def mean_ready(self) -> float | None:
        """Batches ready at the beginning of a fetch; None before the first."""
        return self.ready / self.fetches if self.fetches else None


@dataclass(frozen=True, slots=True)
class WorkerTimes(Summed):
    """What all workers of the watched loaders did, summed up. Without workers it is the training process itself.

    Attributes:
        batches: batches made.
        data_wall_s: seconds spent in dataset access (``__getitem__``, ``__getitems__``, or the iterable's ``next``).
        data_cpu_s: CPU seconds of the worker's own thread in it; far less than wall means blocked on I/O or a lock.
        collate_wall_s: seconds spent in ``collate_fn``.
        collate_cpu_s: CPU seconds in it.
        bytes: bytes of the tensors and arrays in ``sized`` of the batches.
        sized: batches whose bytes were counted.
        squares_s2: sum of the squares of the seconds that each batch took, for their spread.
        took: batches by the time that they took: bin ``n`` holds those of 2^(n/4) ns and more.
    """

    batches: int = 0
    data_wall_s: float = 0.0
    data_cpu_s: float = 0.0
    collate_wall_s: float = 0.0
    collate_cpu_s: float = 0.0
    bytes: int = 0
    sized: int = 0
    squares_s2: float = 0.0
    took: dict[int, int] = field(default_factory=dict)

    @property
    def busy_s(self) -> float:
        """Seconds in which workers made batches."""
        return self.data_wall_s + self.collate_wall_s

    @property
    def cpu_s(self) -> float:
        """CPU seconds for it."""
        return self.data_cpu_s + self.collate_cpu_s

    @property
    def batch_bytes(self) -> float | None:
        """Mean bytes of a batch; None before one was counted."""
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
    """What a loader did that decodes in a pipeline of its own, in threads of the training process and on the GPU.

    Attributes:
        batches: batches given.
        wait_s: seconds for which the training process waited for the pipeline to finish a batch.
        read_wait_s: seconds for which it waited for the files of a batch, to put them into the pipeline.
        read_wall_s: seconds that the reading threads took, summed up.
        read_cpu_s: CPU seconds of those threads; far less means blocked on storage.
        decode_cpu_s: CPU seconds of the pipeline's own threads.
    """

    batches: int = 0
    wait_s: float = 0.0
    read_wait_s: float = 0.0
    read_wall_s: float = 0.0
    read_cpu_s: float = 0.0
    decode_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pipelines:
    """The training loaders that decode in pipelines of their own: their settings, and what they did together.

    Attributes:
        times: what they did, summed up.
        num_threads: CPU threads of the pipelines, summed up.
        on_gpu: whether one of them decodes on the GPU.
        loaders: how many there are.
        batch_size: samples of a batch, of the smallest; None where one does not say.
    """

    times: PipelineTimes
    num_threads: int
    on_gpu: bool
    loaders: int = 1
    batch_size: int | None = None

    @property
    def wait_s(self) -> float:
        """Seconds for which the training process waited, for files and for decoded batches."""
        return self.times.wait_s + self.times.read_wait_s

    def with_others(self, others: Sequence[Pipelines]) -> Pipelines:
        """These and others, taken together."""
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
    """The settings of the training loaders that matter for the diagnosis.

    Attributes:
        num_workers: worker processes over all loaders; None where a loader does not say (it is no DataLoader).
        persistent_workers: whether workers live on from epoch to epoch.
        prefetch_factor: batches that each worker prepares ahead; None without workers.
        pin_memory: whether batches come in page-locked memory.
        duplicates: whether more workers would bring samples twice: a loader has an ``IterableDataset`` that does not
            divide its samples among them. None where all datasets are map-style.
    """

    num_workers: int | None = None
    persistent_workers: bool | None = None
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    duplicates: bool | None = None


@dataclass(frozen=True, slots=True)
class LoaderReading:
    """What one training loader is, and has done so far.

    Attributes:
        loader: what it is.
        facts: its settings.
        workers: what was timed in its workers; None where nothing could be.
        wait_s: seconds for which the training process waited for it; None where it is the only loader.
        inner_s: seconds for which a loader of another kind waited for the DataLoader inside it; None where it is one.
    """

    loader: LoaderDescription
    facts: LoaderFacts
    workers: WorkerTimes | None = None
    wait_s: float | None = None
    inner_s: float | None = None

    @property
    def busy_s(self) -> float:
        """Seconds in which a mean worker made batches."""
        return self.workers.busy_s / max(self.facts.num_workers or 1, 1) if self.workers is not None else 0.0

    def since(self, before: LoaderReading | None) -> LoaderReading:
        """What it has done after an earlier reading."""
        if before is None:
            return self
        return replace(
            self,
            workers=self.workers - before.workers if self.workers and before.workers else self.workers,
            wait_s=None if self.wait_s is None else self.wait_s - (before.wait_s or 0.0),
            inner_s=None if self.inner_s is None else self.inner_s - (before.inner_s or 0.0),
        )

    def waited_for(self, wait_s: float) -> LoaderReading:
        """This loader by who does its work: where its own code is slow, not the workers inside it, these do not count.

        Args:
            wait_s: seconds for which the training process has waited for data.
        """
        wait_s = wait_s if self.wait_s is None else self.wait_s
        if self.inner_s is None or self.inner_s >= wait_s / 2 or not self.facts.num_workers:
            return self
        loader = replace(self.loader, kind="iterable", work="training process", num_workers=None)
        return replace(self, loader=loader, facts=LoaderFacts(duplicates=self.facts.duplicates), workers=None)


@dataclass(frozen=True, slots=True)
class ImageSamples:
    """The image files behind the training loader. What was not measured is None.

    Attributes:
        own: whether a dataset of this package reads them: an image folder's or an LMDB's.
        in_lmdb: whether they are stored in an LMDB of this package.
        fast: whether the fast decoder reads them already.
        crop_size: side in pixels of the square RGB images in a batch; None where a batch holds none.
        batch_size: images in a batch.
        small_size: shorter side in pixels of the images behind ``small_decode_s``.
        read_s: seconds to read a file, from the page cache or from storage.
        pil_decode_s: seconds in which PIL decodes an image.
        pil_crop_s: seconds in which PIL crops and resizes it.
        pil_float_s: seconds in which that becomes a float32 tensor.
        fast_decode_s: seconds in which the fast decoder decodes, crops and resizes it; the tensor is uint8.
        small_decode_s: the same, from the image as it is once made smaller.
        file_bytes: mean bytes of a file.
        width: median pixels.
        height: median pixels.
    """

    own: bool = False
    in_lmdb: bool = False
    fast: bool = False
    crop_size: int | None = None
    batch_size: int | None = None
    small_size: int | None = None
    read_s: float | None = None
    pil_decode_s: float | None = None
    pil_crop_s: float | None = None
    pil_float_s: float | None = None
    fast_decode_s: float | None = None
    small_decode_s: float | None = None
    file_bytes: float | None = None
    width: int | None = None
    height: int | None = None
