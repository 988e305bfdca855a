"""A batch's way to the device on the side stream: tensor by tensor, or by a ``to`` of its own."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_gpuopt.prefetch.leaves import MOVABLE, Found, is_dense, is_plain, tensors_of_flat
from lightning_gpuopt.prefetch.ring import DestinationRing, DestinationSet
from lightning_gpuopt.prefetch.stream import CopyEvents, CopyTimes, Streams

_TRIALS: Final = 4  # batches on which each of two ways is timed; the first is a warm-up
_nbytes: Final = operator.attrgetter("nbytes")


class FasterOfTwo:
    """Which of two ways costs the training thread less: each is timed on a few batches, then the faster one stays."""

    def __init__(self, first: str, second: str) -> None:
        self._seconds: dict[str, list[float]] = {first: [], second: []}
        self._chosen: str | None = None

    @property
    def way(self) -> str:
        if self._chosen is not None:
            return self._chosen
        return min(self._seconds, key=lambda way: len(self._seconds[way]))

    def took(self, way: str, seconds: float) -> None:
        """A batch has gone this way, in so many seconds of the training thread."""
        if self._chosen is not None:
            return
        self._seconds[way].append(seconds)
        if all(len(times) >= _TRIALS for times in self._seconds.values()):
            self._chosen = min(self._seconds, key=lambda way: min(self._seconds[way][1:]))


class UserCodeError(Exception):
    """Around what the user's own code has raised, which is to end training as it would have."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Staged:
    __slots__ = (
        *("at", "events", "has_begun", "host_s", "moved", "nbytes"),
        *("pageable_bytes", "pinning", "sources", "targets", "way"),
    )

    def __init__(self, events: CopyEvents) -> None:
        self.events = events
        self.moved: Any = None  # on the device; to be used after :meth:`TransferPipeline.deliver`
        self.nbytes = self.pageable_bytes = 0  # copied; those of them not in page-locked memory
        self.at: DestinationSet | None = None
        self.sources: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []
        self.pinning: Future[None] | None = None
        self.has_begun = False
        self.way: str | None = None  # that is timed
        self.host_s = 0.0


class TransferPipeline:
    """Moves batches to one device, ``depth`` ahead of their turn, by the user's own way where there is one."""

    def __init__(
        self,
        streams: Streams,
        device: torch.device,
        depth: int,
        own_transfer: Callable[[Any, Any, int], Any] | None = None,
    ) -> None:
        self.streams = streams
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._own_transfer = own_transfer
        self.ring = DestinationRing(streams, device, depth + 1)
        self._delivered: list[DestinationSet] = []
        self._thread: ThreadPoolExecutor | None = None
        self._pinning = FasterOfTwo("plain", "thread")
        self._opaque = self._has_moved_others = False
        self._reached = streams.new_event()
        self.times = CopyTimes(streams)

    def stage(self, batch: Any, dataloader_idx: int) -> Staged:
        """Begin to move a batch; UserCodeError if the user's transfer or a batch's own ``to`` has raised."""
        began_s = time.perf_counter()
        staged = Staged(self.times.events())
        if self._opaque:  # side-stream memory that is free again may be in use by what the compute stream holds now
            self.streams.record(self._reached)
            self.streams.side_waits(self._reached)
        try:
            if self._own_transfer is not None:
                self._transfer(batch, dataloader_idx, staged)
            else:
                self._stage_leaves(batch, staged)
        except BaseException:
            with self.streams.on_side():
                self.streams.record_on_side(staged.events.ends)
            self.drop(staged)
            raise
        staged.host_s += time.perf_counter() - began_s
        return staged

    def advance(self, staged: Staged, *, wait: bool = False) -> bool:
        """Issue a copy from page-locked memory once that is filled, or ``wait`` for it; whether it is issued."""
        pinning = staged.pinning
        if pinning is None:
            return True
        if not wait and not pinning.done():
            return False
        began_s = time.perf_counter()
        staged.pinning = None
        pinning.result()
        self._issue(staged)
        staged.host_s += time.perf_counter() - began_s
        return True

    def deliver(self, staged: Staged, *, training: bool = True) -> Any:
        """The batch on the device, as its turn has come: the compute stream waits for its copy."""
        self.advance(staged, wait=True)
        events = staged.events
        self.streams.compute_waits_timed(events)
        self.times.used(events, training=training)
        self.times.read()
        if staged.way is not None:
            self._pinning.took(staged.way, staged.host_s)
        if staged.at is not None:
            self._delivered.append(staged.at)
        staged.sources, staged.targets = [], []
        return staged.moved

    @property
    def has_own_ways(self) -> bool:
        """Whether moving a batch runs the user's code: an own transfer, or a ``to`` of something in the last batch."""
        return self._own_transfer is not None or self._has_moved_others

    def drop(self, staged: Staged) -> None:
        """The batch's turn will not come; its memory goes back when the copy is done."""
        if staged.pinning is not None:
            staged.pinning.cancel()
        else:
            self.streams.compute_waits(staged.events.ends)
        if staged.at is not None:
            self._delivered.append(staged.at)

    def release(self) -> None:
        """The steps of all delivered batches have been issued."""
        for each in self._delivered:
            each.release()
        self._delivered.clear()

    def free(self) -> None:
        self.ring.clear()
        self._delivered.clear()

    def close(self) -> None:
        self.free()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None

    def _transfer(self, batch: Any, dataloader_idx: int, staged: Staged) -> None:
        assert self._own_transfer is not None
        with self.streams.on_side():
            self.streams.record_on_side(staged.events.begins)
            try:
                staged.moved = self._own_transfer(batch, self._device, dataloader_idx)
            except Exception as error:
                raise UserCodeError(error) from error
            self.streams.record(staged.events.ends)  # it may have chosen another
        self._opaque = False
        self._protect([staged.moved], staged)

    def _protect(self, moved: list[Any], staged: Staged) -> None:
        """See that the memory of what was moved in its own way outlives its use; the compute stream is current."""
        found = Found(moved)
        self._opaque |= not found.is_all
        for each in found.tensors:
            self.streams.keep_for_compute(each)
            staged.nbytes += each.nbytes

    # ---- Lightning's way: leaf by leaf ----

    def _stage_leaves(self, batch: Any, staged: Staged) -> None:
        flat = tensors_of_flat(batch)
        if flat is not None and (self._on_cuda or all(map(is_dense, flat))):
            staged.sources = flat
            staged.at = self.ring.acquire()
            tensors = self._destinations(flat, staged, staged.at)
            staged.moved = dict(zip(batch, tensors, strict=True)) if type(batch) is dict else type(batch)(tensors)
        else:
            self._stage_any(batch, staged)
        if staged.pinning is None:
            self._issue(staged)

    def _stage_any(self, batch: Any, staged: Staged) -> None:
        sources, plain = staged.sources, []

        def see(leaf: Any) -> Any:
            if is_plain(leaf) and (self._on_cuda or is_dense(leaf)):
                sources.append(leaf)
                plain.append(True)
            else:
                plain.append(False)
            return leaf

        apply_to_collection(batch, MOVABLE, see)
        tensors: Iterator[torch.Tensor] = iter(())
        if sources:
            staged.at = self.ring.acquire()
            tensors = iter(self._destinations(sources, staged, staged.at))
        if len(sources) == len(plain):
            staged.moved = apply_to_collection(batch, MOVABLE, lambda leaf: next(tensors))
        else:
            left, others = iter(plain), []

            def place(leaf: Any) -> Any:
                if next(left):
                    return next(tensors)
                others.append(self._as_it_is(leaf))
                return others[-1]

            with self.streams.on_side():
                self.streams.record_on_side(staged.events.begins)
                staged.has_begun = True
                staged.moved = apply_to_collection(batch, MOVABLE, place)
            self._opaque, self._has_moved_others = False, True
            self._protect(others, staged)

    def _as_it_is(self, leaf: Any) -> Any:
        """Move what is no plain tensor as Lightning does; the side stream is current."""
        try:
            if isinstance(leaf, torch.Tensor):
                return leaf.to(self._device, non_blocking=self._on_cuda)
            moved = leaf.to(self._device)
        except Exception as error:
            raise UserCodeError(error) from error
        return leaf if moved is None else moved

    def _issue(self, staged: Staged) -> None:
        with self.streams.on_side():
            if not staged.has_begun:
                self.streams.record_on_side(staged.events.begins)
            for target, source in zip(staged.targets, staged.sources, strict=True):
                target.copy_(source, non_blocking=True)
            self.streams.record_on_side(staged.events.ends)

    def _destinations(self, sources: list[torch.Tensor], staged: Staged, at: DestinationSet) -> list[torch.Tensor]:
        """The batch's tensors on the device; ``staged`` then has what is to be copied where."""
        staged.nbytes = sum(map(_nbytes, sources))
        # One stands for all: they come from one loader.
        pageable = self._on_cuda and not max(sources, key=_nbytes).is_pinned()
        staged.pageable_bytes = staged.nbytes if pageable else 0
        staged.targets = given = at.destinations(sources)
        if pageable:
            staged.way = self._pinning.way
            if staged.way == "thread":
                self._pin(staged)
        return list(given)

    def _pin(self, staged: Staged) -> None:
        """Bring the tensors to page-locked memory, on a thread; that itself makes no CUDA call."""
        pageable = staged.sources
        staged.sources = pinned = [torch.empty_like(each, pin_memory=True) for each in pageable]
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpuopt-pin")

        def copy() -> None:
            with torch.inference_mode(False), torch.no_grad():
                for target, source in zip(pinned, pageable, strict=True):
                    target.copy_(source)

        staged.pinning = self._thread.submit(copy)
