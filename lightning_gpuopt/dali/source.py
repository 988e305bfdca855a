"""The batches that go into a pipeline: bytes, labels and areas, read ahead of it. Plain Python, without DALI.

What is random about an image is drawn here, from the seed, the epoch and the image's place in it: the pipeline has no
random state, and so nothing of it is lost when training stops, or when the pipeline is made anew.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from lightning_gpuopt.dali.encoded_images import Bytes, EncodedImages, Labels
from lightning_gpuopt.images.crop import draw_area, keyed_generator, resized_center
from lightning_gpuopt.images.errors import CorruptSampleError, is_bad_image, reason_of
from lightning_gpuopt.images.other_decoder import as_ppm, for_other_decoder
from lightning_gpuopt.loading.order import mix
from lightning_gpuopt.loading.sampler import BatchIndices
from lightning_gpuopt.loading.samples import SkippedSamples, keep_heap

PPM: Final = b"P6"  # how the files begin that PIL has decoded: no others of that format are given to DALI
MAX_THREADS: Final = 16
"""A network file system answers that many at a time. From memory one thread is faster: several would only hand the
interpreter's lock to one another, at four times the CPU time."""
_AHEAD: Final = 2  # batches whose files are being read beyond the one that is asked for
# reading that takes so many times its CPU time, and so many seconds a file, mostly waits for storage
_BLOCKED: Final = 3.0
_LATENCY_S: Final = 0.0005
_WAITED: Final = 0.1  # a batch that is waited for this share of the time its files take is late for them


@dataclass(frozen=True)
class EncodedBatch:
    """A batch before it is decoded, of B samples."""

    indices: tuple[int, ...]  # of the samples
    images: list[Bytes]  # their files' bytes, B arrays uint8 [N]
    labels: Labels  # int64 [B]
    # float32 [B, 4 or 5], see `center_area` and `random_area`; None: the pipeline decides
    areas: np.ndarray[Any, Any] | None

    def __len__(self) -> int:
        return len(self.indices)

    def changed(self, images: dict[int, Bytes], gone: Collection[int]) -> EncodedBatch:
        """The batch with other bytes for some of its samples, and without others, by position."""
        kept = [at for at in range(len(self)) if at not in gone]
        return EncodedBatch(
            tuple(self.indices[at] for at in kept),
            [images.get(at, self.images[at]) for at in kept],
            self.labels[kept],
            None if self.areas is None else self.areas[kept],
        )


# what is cut out of an upright image, by its height and width in pixels; 64 bits decide what is random
Area = Callable[[int, int, int], Sequence[float]]


def random_area(height: int, width: int, key: int) -> Sequence[float]:
    """A random-resized crop: top, left, height, width as shares of the image's, and 1 if it is mirrored.

    The same as `RandomCrops` draws for the same key. Shares lie within an image also if its header is misread.
    """
    drawn = draw_area(height, width, keyed_generator(key), flip=True)
    return drawn.top / height, drawn.left / width, drawn.height / height, drawn.width / width, drawn.mirrored


def center_area(short: int, size: int, height: int, width: int, key: int) -> Sequence[float]:
    """The square of `size` in the middle of an image whose shorter side is resized to `short` pixels.

    Top, left, bottom, right of it as shares of the image. Resizing this part of the image is the same as resizing the
    image and cutting out the middle.
    """
    high, wide, top, left = resized_center(height, width, short, size)
    return top / high, left / wide, (top + size) / high, (left + size) / wide


@dataclass(frozen=True)
class ReadTimes:
    """What reading the files took, in all threads."""

    wall_s: float = 0.0
    cpu_s: float = 0.0  # of the threads that read
    wait_s: float = 0.0  # in which the training process waited for a batch's files


class _BatchPart(NamedTuple):
    samples: list[tuple[Bytes, Sequence[float] | None] | None]
    wall_s: float
    cpu_s: float


class BatchSource:
    """Reads batches ahead, in threads.

    Without ``area`` the pipeline decides what is cut out; without ``skipped`` unreadable samples are errors.
    """

    def __init__(
        self, images: EncodedImages, area: Area | None, *, seed: int = 0, skipped: SkippedSamples | None = None
    ) -> None:
        keep_heap()
        self.images = images
        self.area = area
        self.seed = seed
        self.skipped = skipped
        self._left_out: set[int] = set()
        self._by_pil: set[int] = set()
        self._pools: dict[int, ThreadPoolExecutor] = {}
        self._resting: list[ThreadPoolExecutor] = []
        self.times = ReadTimes()
        self._slow = False

    def batches(self, plan: Iterable[BatchIndices]) -> Generator[EncodedBatch, None, None]:
        """The batches of these samples, in order; CorruptSampleError for one, or with skipping for a whole batch."""
        reading: deque[tuple[BatchIndices, list[Future[_BatchPart]]]] = deque()
        try:
            for indices in plan:
                reading.append((indices, self._begin(indices)))
                if len(reading) > _AHEAD:
                    yield self._finish(*reading.popleft())
            while reading:
                yield self._finish(*reading.popleft())
        finally:
            for _, parts in reading:
                for part in parts:
                    part.cancel()

    def leave_out(self, index: int, error: Exception) -> None:
        """Leave a sample out from now on, and note it; CorruptSampleError if samples are not to be left out."""
        if self.skipped is None:
            raise error
        self._left_out.add(index)
        self.skipped.add(self.images.name(index), error)

    def release(self) -> None:
        """Let the threads end once they have read what was begun; the next batch starts new ones."""
        self._resting, self._pools = list(self._pools.values()), {}
        for pool in self._resting:
            pool.shutdown(wait=False)

    def close(self) -> None:
        pools = [*self._resting, *self._pools.values()]
        self._resting, self._pools = [], {}
        for pool in pools:
            pool.shutdown(wait=True, cancel_futures=True)

    def _begin(self, indices: BatchIndices) -> list[Future[_BatchPart]]:
        self.images.read_ahead(indices)
        threads = MAX_THREADS if self._slow else 1
        if threads not in self._pools:
            self._pools[threads] = ThreadPoolExecutor(threads, thread_name_prefix="gpuopt-read")
        pool = self._pools[threads]
        parts = min(threads, len(indices))
        bounds = [len(indices) * part // parts for part in range(parts + 1)]
        return [pool.submit(self._read, indices, start, stop) for start, stop in pairwise(bounds)]

    def _read(self, indices: BatchIndices, start: int, stop: int) -> _BatchPart:
        began, cpu_began = time.perf_counter(), time.thread_time()
        samples = [self._one(indices, at) for at in range(start, stop)]
        return _BatchPart(samples, time.perf_counter() - began, time.thread_time() - cpu_began)

    def _one(self, indices: BatchIndices, at: int) -> tuple[Bytes, Sequence[float] | None] | None:
        """A sample's bytes and area; None if it is left out."""
        index = indices[at]
        if index in self._left_out:
            return None
        try:
            image, height, width = self._file(index)
            if self.area is None:
                return image, None
            return image, self.area(height, width, mix(self.seed, indices.epoch, indices.first + at))
        except CorruptSampleError as error:
            self.leave_out(index, error)
            return None

    def _file(self, index: int) -> tuple[Bytes, int, int]:
        """A sample's image file, height and width. DALI may crash at bytes that it does not know: it gets none."""
        given = self.images.read(index)
        try:
            decode = as_ppm if index in self._by_pil else for_other_decoder
            data, height, width = decode(given.data)
            return np.frombuffer(data, np.uint8), height, width
        except Exception as error:
            if not is_bad_image(error):
                raise
            raise self.undecodable(index, error) from error

    def undecodable(self, index: int, error: Exception) -> CorruptSampleError:
        reason = f"{type(error).__name__}: {reason_of(error)}"
        return CorruptSampleError(
            f"{self.images.name(index)}: it is not an image that can be decoded ({reason}); replace or remove it"
        )

    def decode_by_pil(self, index: int) -> None:
        self._by_pil.add(index)

    def _finish(self, indices: BatchIndices, reading: list[Future[_BatchPart]]) -> EncodedBatch:
        began = time.perf_counter()
        parts = [part.result() for part in reading]
        waited_s = time.perf_counter() - began
        wall_s, cpu_s = sum(part.wall_s for part in parts), sum(part.cpu_s for part in parts)
        before = self.times
        self.times = ReadTimes(before.wall_s + wall_s, before.cpu_s + cpu_s, before.wait_s + waited_s)
        samples = [sample for part in parts for sample in part.samples]
        blocked = wall_s > max(_BLOCKED * cpu_s, _LATENCY_S * len(samples))
        # Threads that queue for a CPU look blocked, too; but then it is not the files that are waited for.
        self._slow = blocked and (self._slow or waited_s > _WAITED * wall_s)
        found = [(index, *sample) for index, sample in zip(indices, samples, strict=True) if sample is not None]
        if not found:
            raise none_left(len(samples))
        here, images, areas = zip(*found, strict=True)
        drawn = None if self.area is None else np.array(areas, np.float32)
        return EncodedBatch(here, list(images), self.images.labels[list(here)], drawn)


def none_left(size: int) -> CorruptSampleError:
    """The error for a batch in which no sample can be decoded: with several ranks, all must have as many batches."""
    return CorruptSampleError(
        f"none of the {size} samples of a batch can be read, and a batch cannot be empty, since all ranks need equally "
        "many; skipped.csv lists the samples: remove them, or use larger batches"
    )
