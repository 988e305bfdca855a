"""What is measured of a run, as plain data: phases, queues, workers, loader settings, host and GPU.

Pure: no torch, no clock, no I/O. Everything that counts from the beginning of a run is :class:`Summed`: a reading less
an earlier one is what happened in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from typing_extensions import Self

PHASES: Final = (
    "data_wait",
    "transfer",
    "forward",
    "backward",
    "optimizer",
    "callbacks",
    "logging",
    "validation",
    "checkpoint",
    "epoch_setup",
    "other",
)

BETWEEN_STEPS: Final = ("validation", "checkpoint", "epoch_setup")
"""Phases that are no part of a training step."""

SIGNAL_BROADCAST: Final = "signal_broadcast"
"""Lightning's broadcast before each step under several ranks: whether a signal told it to stop."""

FIRST_FETCH: Final = "first_fetch"
"""The first fetch of an epoch, a part of ``epoch_setup``: what the workers do until there is a batch."""

GARBAGE_COLLECTION: Final = "garbage_collection"
"""Python's collector at work on the training thread, which does nothing else meanwhile."""

RECOMPILATION: Final = "recompilation"
"""torch.compile at work, which the training thread waits for."""

GPU_WORK: Final = "gpu_work"
"""The part of a lap in which the GPU ran the steps' own work."""

STEP_HOOKS: Final = frozenset(
    {
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_before_batch_transfer",
        "on_after_batch_transfer",
    }
)
"""Hooks that are called in every training step; the others lie between steps."""


class Summed:
    """Readings of one counter, field by field: numbers, and mappings of names to numbers."""

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        """Both stretches together."""
        return self._combined(other, 1)

    def __sub__(self, earlier: Self) -> Self:
        """What came after ``earlier``, which is an earlier reading of the same counter."""
        return self._combined(earlier, -1)

    def _combined(self, other: Self, sign: int) -> Self:
        values = []
        for name in self.__match_args__:  # type: ignore[attr-defined]
            first, second = getattr(self, name), getattr(other, name)
            values.append(_combined(first, second, sign) if isinstance(first, dict) else first + sign * second)
        return type(self)(*values)


def _combined(first: dict[Any, Any], second: dict[Any, Any], sign: int) -> dict[Any, Any]:
    combined = {name: value + sign * second.get(name, 0) for name, value in first.items()}
    if second.keys() - combined.keys():
        combined |= {name: sign * value for name, value in second.items() if name not in combined}
    return combined


@dataclass(frozen=True, slots=True)
class PhaseTimes(Summed):
    """Where the time of a stretch of training went, on the training thread.

    Attributes:
        wall_s: length of the stretch, in seconds.
        steps: training batches finished in it.
        phases: exclusive seconds by phase; every phase is there, and they sum to ``wall_s``.
        callbacks: exclusive seconds by hook of a callback or of the module, ``"MyCallback.on_train_batch_end"``; they
            sum to ``phases["callbacks"]``.
        epochs: epochs begun in it.
        signal_broadcast_s: seconds in the broadcast, before each step under DDP, by which Lightning agrees on whether a
            signal told it to stop; part of ``phases["other"]``.
        first_fetch_s: seconds of the first fetch of each epoch; part of ``phases["epoch_setup"]``.
        validation_setup_s: seconds from the beginning of each validation to its first batch; part of the validation.
        loops: seconds of Lightning's own loops and strategy, by part; they are in ``phases["other"]``.
        collecting: seconds in which Python's garbage collector stopped a step, by what it stopped: a phase, or a hook
            in ``callbacks``; they are part of its seconds.
        compiling: the same of torch.compile.
        batch_hooks: seconds of the module's and data module's hooks around the copy of a batch, by hook,
            ``"MyModel.on_after_batch_transfer"``; part of ``phases["transfer"]``.
    """

    wall_s: float
    steps: int
    phases: dict[str, float]
    callbacks: dict[str, float]
    epochs: int
    signal_broadcast_s: float = 0.0
    first_fetch_s: float = 0.0
    validation_setup_s: float = 0.0
    loops: dict[str, float] = field(default_factory=dict)
    collecting: dict[str, float] = field(default_factory=dict)
    compiling: dict[str, float] = field(default_factory=dict)
    batch_hooks: dict[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float | None:
        """Mean seconds per training batch, without validation, checkpoints, the set-up of epochs and their hooks."""
        if not self.steps:
            return None
        aside_s = sum(self.phases[phase] for phase in BETWEEN_STEPS) + self.phases["callbacks"] - self.step_hooks_s
        return max(self.wall_s - aside_s, 0.0) / self.steps

    @property
    def step_hooks_s(self) -> float:
        """Seconds in those hooks of callbacks and module that are called in every step."""
        return sum(seconds for name, seconds in self.callbacks.items() if name.rpartition(".")[2] in STEP_HOOKS)


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


@dataclass(frozen=True, slots=True)
class HostActivity:
    """What the CPUs did while the workers were watched. A figure that could not be read is None.

    Attributes:
        usable_cpus: CPUs that this process may use at once, its share where several ranks run on this machine: its
            affinity, less what a cgroup's quota forbids.
        seconds: worker-seconds watched: the time watched, times the workers.
        worker_cpu: share of a worker's time spent computing, 0-1, mean over the workers.
        worker_queued: share of a worker's time spent waiting for a CPU, 0-1.
        free_cpus: usable CPUs that nobody used, this process, its workers and all others counted; mean, and this rank's
            share.
        process_cpus: CPUs that this process used, all its threads; mean.
        throttled: share of the scheduler's periods in which a cgroup's quota stopped us, 0-1.
        cpu_pressure: share of the time in which something on this machine waited for a CPU, 0-1 (``/proc/pressure``).
        io_pressure: the same for I/O.
        memory_pressure: the same for memory: reclaim, and pages that come back from swap.
        swapped_in_mib_s: MiB read from swap per second, on the whole machine.
        affinity: CPUs that this process is bound to, where the machine has more.
    """

    usable_cpus: float
    seconds: float
    worker_cpu: float | None
    worker_queued: float | None
    free_cpus: float | None
    process_cpus: float | None = None
    throttled: float | None = None
    cpu_pressure: float | None = None
    io_pressure: float | None = None
    memory_pressure: float | None = None
    swapped_in_mib_s: float | None = None
    affinity: int | None = None


@dataclass(frozen=True, slots=True)
class Collections:
    """What Python's garbage collector did on the training thread, in its steps.

    Attributes:
        counts: collections by generation.
        seconds: of all of them.
        longest_s: seconds of the longest.
        tracked: objects that the collector looks through, once it took long; None where they were not counted.
        where: function, file and line of the program that calls ``gc.collect()``, where most of the time of full
            collections is due to that; else empty.
        where_share: share of all collections' time that is due to that, 0-1.
    """

    counts: tuple[int, int, int] = (0, 0, 0)
    seconds: float = 0.0
    longest_s: float = 0.0
    tracked: int | None = None
    where: str = ""
    where_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Compilations:
    """What torch.compile did in the steps.

    Attributes:
        count: compilations.
        steps: steps in which there was one.
        function: name, file and line of the function for which compiled code did not fit most often; empty where torch
            did not tell.
        reason: why it did not fit, the last time; empty where torch did not tell.
        given_up: functions that run eagerly since they had been compiled too often.
    """

    count: int = 0
    steps: int = 0
    function: str = ""
    reason: str = ""
    given_up: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lap:
    """A window of the run, or several that follow each other, for what changes over the run.

    Attributes:
        steps: steps in it.
        end_step: steps of the run until its end.
        seconds: of its steps, without validation, checkpoints and the set-up of epochs, on a GPU by its own clock.
        parts: seconds of those by what the device waited for or did: a phase, a hook, or ``"gpu_work"``.
        held: what the process and the GPU held at its end, by name: ``rss_mib``, ``open_files``, ``threads``,
            ``gpu_allocated_mib``, ``gpu_reserved_mib``, ``alloc_retries``, and the mean ``sm_clock_mhz``.
        host: seconds that the host took to issue forward, backward and optimizer, where the device is a GPU.
    """

    steps: int
    end_step: int
    seconds: float
    parts: dict[str, float]
    held: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)

    def joined(self, later: Lap) -> Lap:
        """This and the one that follows as one."""
        parts, host = _combined(self.parts, later.parts, 1), _combined(self.host, later.host, 1)
        return Lap(self.steps + later.steps, later.end_step, self.seconds + later.seconds, parts, later.held, host)


@dataclass(frozen=True, slots=True)
class RankWork:
    """What one rank did in a mean step, in seconds.

    Attributes:
        rank: global rank.
        data_wait_s: it waited for its loader; on CUDA: its GPU was idle while it did.
        compute_s: its own work on the training thread, without backward and optimizer, in which ranks wait for one
            another; on CUDA: its GPU's other idle time between steps, and the copy.
        loader_s: its loader needs for a batch: the workers' time over their number; None where not measured.
        forward_s: its GPU needs for ``training_step``; None on other devices, and where ranks wait in it for one
            another.
        communication_s: its GPU ran collectives and nothing else, in the close look: a slower rank waits less in them.
            None without a look; on the CPU: it waited in DDP's reducer.
        metric_sync_s: it waited in reductions of metrics; None on CUDA.
    """

    rank: int
    data_wait_s: float
    compute_s: float
    loader_s: float | None = None
    forward_s: float | None = None
    communication_s: float | None = None
    metric_sync_s: float | None = None


@dataclass(frozen=True, slots=True)
class Outlier:
    """A step that took much longer than the others of its kind.

    Attributes:
        step: number of the training batch in this run, from 0.
        at_s: when it ended, in seconds since the timeline's start.
        seconds: how long it took, without validation, checkpoints and the set-up of epochs.
        phase: the phase in which it lost most, against the mean of the run.
        phase_s: seconds that it spent in that phase.
    """

    step: int
    at_s: float
    seconds: float
    phase: str
    phase_s: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Distribution of step times after warm-up.

    Attributes:
        edges_s: lower edges of the bins that are not empty, in seconds, and the upper edge of the last.
        counts: steps in each bin.
        median_s: half of the steps took less.
        p90_s: nine tenths took less.
        p99_s: 99 of 100 took less.
        slowest_s: the slowest.
        outliers: the slowest outliers, in order of time; at most 100.
        outlier_count: how many there were in all.
        outlier_s: seconds that all of them took more than the median of their kind.
    """

    edges_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    median_s: float | None = None
    p90_s: float | None = None
    p99_s: float | None = None
    slowest_s: float | None = None
    outliers: tuple[Outlier, ...] = ()
    outlier_count: int = 0
    outlier_s: float = 0.0
