"""What stands in for torch's iterator over worker processes."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from typing import Any, Final

from lightning_gpuopt.compat.dataloader import BaseIterator
from lightning_gpuopt.compat.fetchers import can_be_a_worker, raise_here
from lightning_gpuopt.loading.collate import Collate, as_it_is
from lightning_gpuopt.loading.engine.engine import END, Batches, CannotServe, Engine, NotYet
from lightning_gpuopt.loading.sampler import ElasticBatchSampler, ElasticSampler
from lightning_gpuopt.loading.samples import EpochSamples
from lightning_gpuopt.timeline.worker_clock import TimedCollate

_UNKNOWN: Final = -1

# share of batches whose samples may be of several kinds: putting one together takes ten times as long, or so
_FEW: Final = 1 / 32


def can_serve(loader: Any) -> bool:
    """Whether a loader's samples may be put into rows in shared memory, as far as is known before one is read."""
    collate_fn = loader.collate_fn
    while isinstance(collate_fn, TimedCollate):
        collate_fn = collate_fn.collate_fn
    gathers = getattr(loader.dataset, "gathers_batches", False)
    known = gathers if collate_fn is as_it_is else type(collate_fn) is Collate and type(loader.dataset) is EpochSamples
    # One process reads the samples in a fixed order; of several, whichever is free takes the next.
    fixed = getattr(loader, "keeps_readers", False) and loader.num_workers > 1
    return bool(known and not fixed and not getattr(loader, "torch_is_faster", False) and can_be_a_worker())


class _Drawn:
    """Indices that the training thread draws, each in its turn: a sampler of the user's may draw random numbers."""

    def __init__(self) -> None:
        self._indices: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def draw(self, indices: Iterator[Any]) -> None:
        try:
            self._indices.put((next(indices), None))
        except Exception as error:  # StopIteration, or what the sampler raises
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


def _rest_of(first: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    """The first items, and the others. Nobody calls `iter` on these: a sampler that is its own iterator begins anew."""
    yield from first
    while True:
        try:
            item = next(rest)
        except StopIteration:
            return
        yield item


class EngineIterator(BaseIterator):  # type: ignore[misc]
    """A DataLoader's iterator whose loader processes fill batches sample by sample.

    Others may ask it what they ask torch's: its workers, and which batches are on their way. CannotServe if samples
    have no fixed layout in a batch; RuntimeError if a process died before it had read one.
    """

    _engine: Engine | None = None
    _drawn: _Drawn | None = None
    _is_over = False

    resizes = True

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._prefetch_factor = loader.prefetch_factor
        self._is_ours = type(loader.batch_sampler) is ElasticBatchSampler and type(loader.sampler) is ElasticSampler
        try:
            first = self._next_index()
        except StopIteration:
            raise CannotServe("there is nothing to read") from None
        self._engine = Engine(
            loader, first, self._base_seed, self._pin_memory, getattr(self, "_pin_memory_device", None)
        )
        self._begin([], self._engine.ahead - 1)

    def __next__(self) -> Any:
        return self._next_data()

    def _next_data(self) -> Any:
        engine = self._engine
        if self._is_over or engine is None:
            raise StopIteration
        try:
            batch, error = self._batches.get(timeout=self._timeout or None)
        except queue.Empty:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds") from None
        if error is None:
            engine.take()
            if self._drawn is None:
                engine.wake()
            else:
                self._try_put_index()
            return batch
        if error is END:
            self._is_over = True
            if not self._persistent_workers:
                self._shutdown_workers()
            raise StopIteration
        engine.take()
        self._try_put_index()
        engine.wake()
        try:
            raise_here(error)
        finally:
            del error  # which would hold this frame, and with it the processes

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        assert self._engine is not None
        first = []
        with contextlib.suppress(StopIteration):
            first = [self._next_index()]  # so that the sampler knows of the epoch, here
        self._begin(first, self._engine.ahead)

    def _begin(self, first: list[Any], ahead: int) -> None:
        """Begin an epoch; of a user's sampler the indices of `ahead` batches are drawn at once."""
        assert self._engine is not None
        indices, self._drawn = _rest_of(first, self._sampler_iter), None
        # The order of this package's own sampler is the same whichever thread draws it.
        if not self._is_ours:
            self._drawn = _Drawn()
            for _ in range(ahead):
                self._drawn.draw(indices)
        self._indices = indices
        self._batches: Batches = self._engine.begin(indices if self._drawn is None else self._drawn)
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
        return self._engine is not None and self._engine.collated > _FEW * self._engine.taken

    def resize(self, num_workers: int) -> int:
        """Have so many processes from now on, as far as that can be; how many there are then."""
        if self._engine is not None:
            before = self._engine.ahead
            self._num_workers = self._engine.resize(num_workers)
            for _ in range(self._engine.ahead - before):
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
        """The batches on their way: by whom the one is read whose turn it is; a second part where it can be taken."""
        engine = self._engine
        if engine is None or self._is_over:
            return {}
        awaited, ready = engine.taken, self._batches.qsize()
        found: dict[int, tuple[Any, ...]] = {
            sequence: (_UNKNOWN, None) if sequence < awaited + ready else (_UNKNOWN,)
            for sequence in range(awaited, engine.pool.asked)
        }
        if not ready and found and (reader := engine.pool.reader_of(awaited)) is not None:
            found[awaited] = (reader,)
            for sequence in found.keys() - {awaited}:
                if sequence in engine.pool.ready:
                    found[sequence] = (_UNKNOWN, None)
        return found

    @property
    def _tasks_outstanding(self) -> int:
        return sum(len(task) == 1 for task in self._task_info.values())

    def _try_put_index(self) -> None:
        """Draw one more batch's indices, where these are not drawn by the feeding thread."""
        if self._drawn is not None and self._engine is not None:
            self._drawn.draw(self._indices)
            self._engine.wake()

    @property
    def _data_queue(self) -> Any:
        return _NOTHING

    _worker_result_queue = _data_queue


class _Nothing:
    """A queue in which nothing lies: `_task_info` has the batches."""

    def qsize(self) -> int:
        return 0


_NOTHING: Final = _Nothing()
