"""What stands in for torch's iterator over worker processes."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

import numpy as np

from lightning_gpuopt.compat.dataloader import BaseIterator
from lightning_gpuopt.compat.fetchers import can_be_a_worker, raise_here
from lightning_gpuopt.loading.collate import Collate, as_it_is, is_as_imported
from lightning_gpuopt.loading.engine.engine import END, Batches, CannotServe, Engine, NotYet
from lightning_gpuopt.loading.engine.shared_blocks import can_share
from lightning_gpuopt.loading.sampler import (
    BatchIndices,
    ElasticBatchSampler,
    ElasticSampler,
    Later,
    may_be_read_ahead,
    most_samples,
)
from lightning_gpuopt.loading.samples import EpochSamples
from lightning_gpuopt.timeline.worker_clock import untimed

_UNKNOWN: Final = -1
_MOST_INDEX: Final = 1 << 63

# share of batches whose samples may be of several kinds: putting one together takes ten times as long, or so
_FEW: Final = 1 / 32


def why_not_served(loader: Any) -> str | None:
    """Why a loader's samples cannot be put into rows in shared memory, as far as is known before one is read."""
    collate_fn = untimed(loader.collate_fn)
    if collate_fn is as_it_is:
        is_known = getattr(loader.dataset, "gathers_batches", False)
    else:
        is_known = type(collate_fn) is Collate
    if not is_known:
        return "its collate_fn is not torch's default_collate"
    if not is_as_imported():
        return "default_collate has functions of the program's own"
    if collate_fn is not as_it_is and type(loader.dataset) is not EpochSamples:
        return "its dataset returns whole batches (__getitems__)"
    if most_samples(loader.batch_sampler) is None:
        theirs = getattr(loader.batch_sampler, "batches", loader.batch_sampler)
        return f"it is not known in advance how large the batches of a {type(theirs).__name__} are"
    # One process reads the samples in a fixed order; of several, whichever is free takes the next.
    if getattr(loader, "keeps_readers", False) and loader.num_workers > 1:
        return "its dataset holds a random generator, whose draws depend on which process reads which sample"
    if getattr(loader, "torch_is_faster", False):
        return "its samples differ in shape or type"
    if not can_share():
        return "this system has no memory files (memfd_create, Linux 3.17 or later) for processes to fill batches in"
    return None if can_be_a_worker() else "this version of torch is unknown"


class _Drawn:
    """Indices that the training thread draws, each in its turn: a sampler of the user's may draw random numbers.

    Those without a place in an epoch get one: ``epoch``, and how many samples were drawn before.
    """

    def __init__(self, sampler: Iterator[Any], epoch: int, most_samples: int) -> None:
        self._sampler, self._epoch, self._first, self._most = sampler, epoch, 0, most_samples
        self._indices: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.outstanding = 0  # batches that were drawn, and have not come
        self._has_ended = False

    def next(self) -> Any:
        """Draw a batch's indices, for who asks for it himself."""
        drawn = next(self._sampler)
        why = None
        # of other integers the dataset would get an int, and might give that back
        if not all(type(index) in (int, np.int64) and abs(index) < _MOST_INDEX for index in drawn):
            why = CannotServe("its sampler gives other keys than whole numbers")
        elif len(drawn) > self._most:
            why = CannotServe(f"its batch sampler gives {len(drawn)} samples, more than its batch_size")
        if why is not None:
            why.begun = drawn, self._sampler
            raise why
        if not isinstance(drawn, BatchIndices):
            drawn = BatchIndices(drawn, self._epoch, self._first)
        self._first += len(drawn)
        self.outstanding += 1
        return drawn

    def draw(self, batches: int) -> None:
        """Draw as many batches' indices as are missing from so many outstanding ones."""
        while self.outstanding < batches and not self._has_ended:
            try:
                self._indices.put((self.next(), None))
            except Later:
                return
            except Exception as error:  # StopIteration, or what the sampler raises
                self._has_ended = True
                self._indices.put((None, error))

    def __iter__(self) -> _Drawn:
        return self

    def __next__(self) -> Any:
        try:
            indices, error = self._indices.get_nowait()
        except queue.Empty:
            raise NotYet from None
        if error is not None:
            raise error
        return indices


class EngineIterator(BaseIterator):  # type: ignore[misc]
    """A DataLoader's iterator whose loader processes fill batches sample by sample.

    Others may ask it what they ask torch's: its workers, and which batches are on their way. CannotServe if samples
    have no fixed layout in a batch; Later if the sampler gives nothing yet; RuntimeError if a process died before it
    had read one.
    """

    _engine: Engine | None = None
    _drawn: _Drawn | None = None
    _is_over = False

    resizes = reads_by_sample = True

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._prefetch_factor = loader.prefetch_factor
        self._is_ours = type(loader.batch_sampler) is ElasticBatchSampler and type(loader.sampler) is ElasticSampler
        self._reads_ahead = may_be_read_ahead(loader.batch_sampler)
        self._begin_drawing(loader)
        try:
            first = self._next_indices()
        except Later:
            raise
        except StopIteration:
            raise CannotServe("there is nothing to read") from None
        try:
            self._engine = Engine(
                loader, first, self._base_seed, self._pin_memory, getattr(self, "_pin_memory_device", None)
            )
        except CannotServe as reason:
            reason.begun = first, self._sampler_iter
            raise
        self._begin([])

    def __next__(self) -> Any:
        return self._next_data()

    def _next_data(self) -> Any:
        engine = self._engine
        if self._is_over or engine is None:
            raise StopIteration
        batch, error = self._get_data()
        if error is None:
            self._taken(engine)
            return batch
        if error is END:
            self._is_over = True
            if not self._persistent_workers:
                self._shutdown_workers()
            raise StopIteration
        self._taken(engine)
        try:
            raise_here(error)
        finally:
            del error  # which would hold this frame, and with it the processes

    def _get_data(self) -> tuple[Any, Any]:  # under torch's name, by which stacks are read
        try:
            return self._batches.get(timeout=self._timeout or None)
        except queue.Empty:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds") from None

    def _taken(self, engine: Engine) -> None:
        self._num_yielded += 1
        if self._drawn is not None:
            self._drawn.outstanding -= 1
            self._try_put_index()
        engine.take()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._begin_drawing(loader)
        first = []
        with contextlib.suppress(StopIteration):
            first = [self._next_indices()]  # so that the sampler knows of the epoch, here
        self._begin(first)

    def _begin_drawing(self, loader: Any) -> None:
        # The order of this package's own sampler is the same whichever thread draws it.
        most, epoch = most_samples(loader.batch_sampler) or 0, getattr(loader, "epochs", 0)
        self._drawn = None if self._is_ours else _Drawn(self._sampler_iter, epoch, most)

    def _next_indices(self) -> Any:
        return self._next_index() if self._drawn is None else self._drawn.next()

    def _begin(self, first: list[Any]) -> None:
        """Begin an epoch with these batches, which the engine was not asked for yet."""
        assert self._engine is not None
        rest = self._sampler_iter if self._drawn is None else self._drawn
        self._try_put_index()
        self._batches: Batches = self._engine.begin(chain(first, rest))
        self._is_over = False

    def _shutdown_workers(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.end()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._shutdown_workers()

    @property
    def torch_is_faster(self) -> bool:
        """Whether torch's workers would be faster: many batches have samples that are put together in this process."""
        engine = self._engine
        return engine is not None and engine.collated > max(1, _FEW * engine.pool.given)

    def resize(self, num_workers: int) -> int:
        """Have so many processes from now on, as far as that can be; how many there are then."""
        if self._engine is not None:
            self._num_workers = self._engine.resize(num_workers)
            self._try_put_index()
        return self._num_workers

    # -- what others ask of torch's iterator

    @property
    def _workers(self) -> list[Any]:
        return [] if self._engine is None else self._engine.pool.running

    @property
    def _rcvd_idx(self) -> int:
        return 0 if self._engine is None else self._engine.taken

    @property
    def _send_idx(self) -> int:
        return 0 if self._engine is None else self._engine.pool.asked

    @property
    def _task_info(self) -> dict[int, tuple[Any, ...]]:
        """The batches on their way, by whom the next one is read; with a second part if one is finished out of turn."""
        engine = self._engine
        if engine is None or self._is_over:
            return {}
        awaited = engine.taken
        found: dict[int, tuple[Any, ...]] = {
            sequence: (_UNKNOWN, None) if sequence in engine.pool.ready else (_UNKNOWN,)
            for sequence in range(awaited, engine.pool.asked)
        }
        if found and not self._batches.qsize() and (reader := engine.pool.reader_of(awaited)) is not None:
            found[awaited] = (reader,)
        return found

    @property
    def _tasks_outstanding(self) -> int:
        return sum(len(task) == 1 for task in self._task_info.values())

    def _try_put_index(self) -> None:
        """Draw the indices of as many batches as are made ahead, if the feeding thread does not draw them."""
        if self._drawn is not None and self._engine is not None:
            self._drawn.draw(self._engine.far if self._reads_ahead else self._engine.ahead)
            self._engine.wake()

    @property
    def _data_queue(self) -> Any:
        """The batches that can be taken, in their order."""
        return self._batches

    _worker_result_queue = _data_queue
