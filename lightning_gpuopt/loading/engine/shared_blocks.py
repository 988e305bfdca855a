"""Memory that the loader processes and the training process share, in files that have no name.

It does not come from ``/dev/shm``, whose size does not matter, and nothing of it is left when the last process that has
it ends, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import select
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any, Final

import numpy as np
import torch

from lightning_gpuopt.loading.engine.layout import Array
from lightning_gpuopt.loading.engine.page_locked import PinnableMapping
from lightning_gpuopt.prefetch.stream import copy_streams
from lightning_gpuopt.utils.cuda_events import new_event

log = logging.getLogger(__name__)

TO_DO, PLACED, SKIPPED, ASIDE, LOST = range(5)
"""The states of a batch's rows: nobody has read the sample; it is in its row; it is left out; it was sent, since it
is not like the others, or what it raised was; whoever read it has died."""

_SEQUENCE, _COUNT, _EPOCH, _FIRST, _BLOCK, _WORK, _LONGEST = range(7)


def can_share() -> bool:
    """Whether this machine has memory of that kind."""
    needed = (os, "memfd_create"), (os, "eventfd"), (fcntl, "F_GETPIPE_SZ"), (mmap, "MADV_REMOVE")
    return all(hasattr(module, name) for module, name in needed) and os.path.exists("/proc/self/fd")


class SharedFile:
    """A descriptor that processes inherit, or are given as they are started; closed with this object."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.close: Callable[[], Any] = weakref.finalize(self, os.close, fd)

    @classmethod
    def in_memory(cls, name: str, size: int = 0) -> SharedFile:
        file = cls(os.memfd_create(f"gpuopt-{name}", os.MFD_CLOEXEC))
        os.ftruncate(file.fd, size)
        return file

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.fd),)


def _received(fd: Any) -> SharedFile:
    return SharedFile(fd.detach())


class Control:
    """What is to be read, by whom it is read, and what is done; `file` is None in the process that made it."""

    def __init__(self, slots: int, batch_size: int, readers: int, file: SharedFile | None = None) -> None:
        self._shape = slots, batch_size, readers
        sizes = [8 * 7 * slots, 8 * slots * batch_size, 8 * 4 * readers, slots * batch_size]
        self._file = SharedFile.in_memory("batches", sum(sizes)) if file is None else file
        self.bytes = mmap.mmap(self._file.fd, sum(sizes))
        # sequence, samples, epoch, position of the first in it, block, ns of work, ns of its longest piece
        self.slots: Array = np.ndarray((slots, 7), np.int64, self.bytes)
        self.indices: Array = np.ndarray((slots, batch_size), np.int64, self.bytes, sizes[0])
        # of each thread: its batch's sequence (from 1 on; 0: none), the first row, how many rows, since when in ns
        self.readers: Array = np.ndarray((readers, 4), np.int64, self.bytes, sum(sizes[:2]))
        self._states = sum(sizes[:3])
        self._batch_size = batch_size
        self._thread_lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Control, (*self._shape, self._file)

    def begin(self) -> None:
        """In a process that was started: a lock that a thread of the other held is not held here."""
        self._thread_lock = threading.Lock()

    def open(self, slot: int, sequence: int, indices: list[int], epoch: int, first: int, block: int) -> None:
        count = len(indices)
        self.indices[slot, :count] = indices
        start = self._states + slot * self._batch_size
        self.bytes[start : start + count] = bytes(count)
        self.slots[slot] = sequence, count, epoch, first, block, 0, 0

    def set_state(self, slot: int, row: int, count: int, state: int) -> None:
        start = self._states + slot * self._batch_size + row
        self.bytes[start : start + count] = bytes((state,)) * count

    def states(self, slot: int, count: int) -> bytes:
        start = self._states + slot * self._batch_size
        return self.bytes[start : start + count]

    def is_done(self, slot: int, sequence: int, work_ns: int = 0) -> bool:
        """Whether no row of a batch is left to do; of two that finish its last rows, at least one is told so.

        `work_ns` has just been spent on it. False for a batch that has been taken meanwhile.
        """
        start = self._states + slot * self._batch_size
        # A lock that goes with the process that holds it. It does not know threads.
        with self._thread_lock:
            fcntl.lockf(self._file.fd, fcntl.LOCK_EX)
            try:
                here = self.slots[slot]
                if here[_SEQUENCE] != sequence:
                    return False
                here[_WORK] += work_ns
                here[_LONGEST] = max(int(here[_LONGEST]), work_ns)
                return self.bytes.find(b"\0", start, start + int(here[_COUNT])) < 0
            finally:
                fcntl.lockf(self._file.fd, fcntl.LOCK_UN)


class Blocks:
    """Memory of batches, by number, in one file that grows; a block has `num_bytes`."""

    def __init__(self, file: SharedFile, num_bytes: int) -> None:
        self.file = file
        self.num_bytes = max(1, -(-num_bytes // mmap.ALLOCATIONGRANULARITY)) * mmap.ALLOCATIONGRANULARITY
        self._maps: dict[int, PinnableMapping] = {}

    def map(self, number: int) -> PinnableMapping:
        if number not in self._maps:
            self._maps[number] = PinnableMapping(self.file.fd, self.num_bytes, offset=number * self.num_bytes)
        return self._maps[number]


class _Lent:
    __slots__ = ("copied", "holder", "number")

    def __init__(self, number: int, memory: memoryview, may_be_read: bool) -> None:
        self.number = number
        # what each tensor of the batch, and each view of one, holds; dead once nobody has any
        self.holder = weakref.ref(memory)
        # what must be over on the device before the block may be written to; None: not yet known
        self.copied: list[torch.cuda.Event] | None = None if may_be_read else []


class BlockRing(Blocks):
    """The blocks in the training process: handed over with their batches, and used again when nobody has these.

    Beyond `most` blocks copies are waited for, and it is said that batches are held; free ones beyond `spare` give
    their memory back.
    """

    def __init__(self, file: SharedFile, num_bytes: int) -> None:
        super().__init__(file, num_bytes)
        self.streams: frozenset[Any] = frozenset()  # to which training gives work, and on which it may copy batches
        self.most = self.spare = 0
        # Whether batches are copied here before they are handed over, so that no device reads the blocks (but for those
        # that are registered), and whether blocks are registered with CUDA as they are lent.
        self.is_copied_here = self.registers = self._may_be_read = False
        self._number = 0
        self._free: list[int] = []
        self._lent: list[_Lent] = []
        self._kept: list[tuple[SharedFile, list[_Lent]]] = []
        self._empty: set[int] = set()
        self._lock = threading.Lock()
        _rings.add(self)

    def take(self) -> int:
        """A block that nobody reads."""
        number = self._free_block()
        if number is None and self._number >= self.most and self._wait_for_copies():
            number = self._free_block()
        if number is not None:
            return number
        number, self._number = self._number, self._number + 1
        if self._number == self.most + 1:
            warnings.warn(
                f"{self._number} batches of {self.num_bytes / 2**20:.1f} MiB are held by the program or in flight, and "
                "each held batch takes memory: keep a copy (.clone()) of what you need from a batch",
                stacklevel=2,
            )
        os.ftruncate(self.file.fd, self._number * self.num_bytes)
        return number

    def _free_block(self) -> int | None:
        with self._lock:
            self._take_back()
            if not self._free:
                return None
            number = self._free.pop()  # the one that was freed last: it is in the caches
            self._empty.discard(number)
            return number

    def lend(self, number: int) -> memoryview:
        """A block for a batch; it is lent until the last object that holds the view goes."""
        block = self.map(number)
        if self.registers:
            try:
                block.register()
            except Exception as error:
                self.registers = False
                warnings.warn(f"batches are copied, not page-locked in place; CUDA's error: {error}", stacklevel=2)
        memory = memoryview(block)
        may_be_read = block.is_registered or not self.is_copied_here
        self._may_be_read |= may_be_read and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        with self._lock:
            self._lent.append(_Lent(number, memory, may_be_read))
        return memory

    def note_streams(self) -> None:
        """Of the training thread, which has a stream of its own, as it takes a batch."""
        if self._may_be_read:
            here = streams_here()
            if not self.streams.issuperset(here):
                self.streams = self.streams.union(here)

    def give_back(self, number: int) -> None:
        """A block that was not lent is free."""
        self._free.append(number)

    def _wait_for_copies(self) -> bool:
        """Wait for copies of the batch that was dropped first; whether there was one."""
        with self._lock:
            copied = next((lent.copied for lent in self._lent if lent.copied and lent.holder() is None), None)
        with contextlib.suppress(RuntimeError):  # as in _is_free
            for event in copied or ():
                event.synchronize()
            return copied is not None
        return False

    def _take_back(self) -> None:
        here, kept = [], []
        for file, held in self._kept:  # the end of the pipe: the process that had them, too, is gone
            gone = bool(select.select([file.fd], [], [], 0)[0])
            here += held if gone else []
            kept += [] if gone else [(file, held)]
        self._kept, here = kept, [*here, *self._lent]
        self._lent = []
        for lent in here:
            if self._is_free(lent):
                self._free.append(lent.number)
            else:
                self._lent.append(lent)
        for number in self._free[: max(0, len(self._free) - self.spare)]:
            if number not in self._empty:
                self._give_back_memory(number)

    def _is_free(self, lent: _Lent) -> bool:
        if lent.holder() is not None:
            return False
        try:
            if lent.copied is None:
                lent.copied = self._record()  # after whatever was done with the batch
            return all(event.query() for event in lent.copied)  # type: ignore[no-untyped-call]
        except RuntimeError:  # while a CUDA graph is captured, or after an error, which training is told of
            log.debug("events of a batch's copies cannot be asked for now", exc_info=True)
            lent.copied = None
            return False

    def _record(self) -> list[torch.cuda.Event]:
        """Events on each stream that may be copying a batch. torch records none for memory that is not its own."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return []
        streams = {*self.streams, *streams_here(), *copy_streams}
        events = [new_event(blocking=True) for _ in streams]
        for event, stream in zip(events, streams, strict=True):
            event.record(stream)
        return events

    def _give_back_memory(self, number: int) -> None:
        block = self.map(number)
        with contextlib.suppress(RuntimeError):  # it keeps its memory
            block.unregister()  # or a device would go on to read the pages that it had
            block.madvise(mmap.MADV_REMOVE)
            self._empty.add(number)

    def forking(self) -> SharedFile | None:
        """What this process holds is not written to while the process that is about to be forked lives.

        Gives the end of a pipe that the other process is to keep; None: it gets nothing that is held.
        """
        with self._lock:
            held = [lent for lent in self._lent if lent.holder() is not None]
            if not held:
                return None
            take, put = map(SharedFile, os.pipe())
            self._kept.append((take, held))
            self._lent = [lent for lent in self._lent if lent not in held]
        return put

    def end(self) -> None:
        """Free what nobody holds; what batches hold lives on with them."""
        if any(block.is_registered for block in self._maps.values()):
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize()  # not all that copies may be there any more to record events
        with self._lock:
            kept = [lent for _, held in self._kept for lent in held]
            used = {lent.number for lent in (*kept, *self._lent) if lent in kept or not self._is_free(lent)}
            for number in range(self._number):
                if number not in used | self._empty:
                    self._give_back_memory(number)
            self._maps.clear()
        _rings.discard(self)


def streams_here() -> tuple[Any, ...]:
    """The streams to which this thread gives work to a device; none if CUDA is not in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ()
    return torch.cuda.current_stream(), torch.cuda.default_stream()


_rings: Final[weakref.WeakSet[BlockRing]] = weakref.WeakSet()

_LOADERS: Final = frozenset({"torch.utils.data.dataloader", "lightning_gpuopt.loading.engine.iterator"})


def _before_fork() -> None:
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_globals.get("__name__") in _LOADERS:  # a process that loads does nothing with others' batches
            return
    _ends.extend(end for ring in list(_rings) if (end := ring.forking()) is not None)


_ends: Final[list[SharedFile]] = []  # kept in a process that was forked, for as long as it lives
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_ends.clear)
