"""What the training process does for its loader processes: a thread says what is to be read, and hands batches over.

It is a thread of its own so that the training thread only has to take a batch out of a queue.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import torch

from lightning_gpuopt.compat.dataloader import pin_batch
from lightning_gpuopt.loading import collate
from lightning_gpuopt.loading.engine.costs import MOST_THREADS, Costs, LookAhead
from lightning_gpuopt.loading.engine.layout import Layout
from lightning_gpuopt.loading.engine.pool import LoaderPool
from lightning_gpuopt.loading.engine.shared_blocks import PLACED, SKIPPED, BlockRing, Control, SharedFile
from lightning_gpuopt.loading.sampler import most_samples
from lightning_gpuopt.loading.samples import Skipped, none_of
from lightning_gpuopt.telemetry.resources import available_memory

log = logging.getLogger(__name__)

# batches, each with what reading it raised. `END` comes after the last.
Batches: TypeAlias = "queue.SimpleQueue[tuple[Any, Any]]"
END: Final = StopIteration()

# A ticket is for so much work: what taking and timing one costs is little against it, also where batches have just
# emptied the CPU's caches.
_TICKET_NS: Final = 1_000_000
_ADDED: Final = 32  # processes that may be added while others run
# batches that are made ahead take no more of the memory that is free: a node's ranks share it, and so do loaders
_PART_OF_MEMORY: Final = 1 / 8
_COPYING: Final = 4  # processes that copy records, if nobody says how many: memory gives no more to others
_LEAST_SLOTS: Final = 256
_MOST_SLOTS: Final = 1 << 16
_MOST_ROWS: Final = (1 << 16) - 1  # of a ticket, whose slot and rows have two bytes each
_LOOK_EVERY: Final = 8
MAX_AHEAD_BYTES: Final = 1 << 30
"""Of batches made ahead to bridge slow samples, if nobody says how many."""
_HELD: Final = 4  # batches of so many times as many as are made ahead are worth a word
_JOIN_S: Final = 5.0  # what torch's workers have to end, too


class CannotServe(Exception):
    """The samples of a dataset cannot be put into rows; DataLoader workers load it."""

    # the first indices of the epoch, and the sampler's iterator after them
    begun: tuple[Any, Iterator[Any]] | None = None


class NotYet(Exception):
    """The indices of the next batch are not drawn yet."""


class Engine:
    """Loader processes, and the thread that feeds them.

    `first` are the indices of the first batch; `pins` is whether batches are in page-locked memory. CannotServe if
    samples have no fixed layout in a batch; RuntimeError if a process died before it had read one.
    """

    def __init__(self, loader: Any, first: Any, base_seed: int, pins: bool, device: str | None) -> None:
        # batches that the training thread has taken; those made here, as their samples are not like the first one
        self.taken = self.collated = 0
        self._pins, self._device = pins, device
        uses_cuda = pins or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._device_index = torch.cuda.current_device() if uses_cuda and torch.cuda.is_available() else None
        self._dataset, self._collate_fn = loader.dataset, loader.collate_fn
        self._copies = getattr(loader.dataset, "gathers_batches", False)
        self._most_threads = 1 if self._copies or loader.dataset.seeds else MOST_THREADS
        self._prefetch_factor = loader.prefetch_factor
        # There are slots for processes that are added later, too.
        self._slots = min(_MOST_SLOTS, max(_LEAST_SLOTS, self._prefetch_factor * (loader.num_workers + _ADDED)))
        self.ahead = self.far = self._fitting = self._slots  # batches that are made ahead: at least, and now
        self._size = max(most_samples(loader.batch_sampler) or 0, len(first))
        self._control = Control(self._slots, self._size, loader.num_workers * self._most_threads + _ADDED)
        blocks = SharedFile.in_memory("memory")
        self.pool = LoaderPool(loader, self._control, blocks, base_seed, self._most_threads)
        self._ring: BlockRing | None = None
        self._look = LookAhead()
        self._failure: Exception | None = None  # of the feeding thread
        self._is_ending = False
        self._commands: queue.SimpleQueue[tuple[Iterator[Any], Batches] | None] = queue.SimpleQueue()
        self._wake = SharedFile(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self.pool.watch(self._wake.fd, self._woken)
        self._pid = os.getpid()
        self._feeder = threading.Thread(target=self._feed, name="gpuopt-feeder", daemon=True)
        _engines.add(self)
        try:
            self._start(loader, first, blocks)
        except BaseException:
            self.end()
            raise

    def _start(self, loader: Any, first: Any, blocks: SharedFile) -> None:
        pool, processes = self.pool, loader.num_workers
        self._open(0, first, 0)
        shares = self._most_threads > 1 and loader.shares_cpus
        if self._copies and loader.shares_cpus:
            processes = min(processes, _COPYING)
        pool.add(1 if shares else processes)
        layout, read, costs = (self._dataset.layout, 0, Costs()) if self._copies else pool.find_layout(loader.timeout)
        if layout is None:
            raise CannotServe(
                "a sample has parts that have no fixed layout" if read else "its first sample is not read"
            )
        self._layout: Layout = layout
        pool.threads = costs.threads()
        if shares:
            processes, pool.threads = costs.share(loader.num_workers)
            pool.add(processes - 1)
        pool.threads = min(pool.threads, self._most_threads)
        self._ring = BlockRing(blocks, layout.starts(self._size)[1])
        self._ring.is_copied_here = self._pins
        self._ring.registers = self._pins and loader.pins_in_place
        room, most = int(_PART_OF_MEMORY * available_memory()), loader.max_ahead_bytes
        self._fitting = max(2, min(room, most or room) // self._ring.num_bytes)
        self._bridging = max(2, (most or MAX_AHEAD_BYTES) // self._ring.num_bytes)
        self._set_ahead(processes)
        self._rows = self._least_rows
        self._ring.take()  # the first batch's
        pool.send(layout)
        pool.ask(0, read, self._rows)
        self._feeder.start()

    def _set_ahead(self, processes: int) -> None:
        assert self._ring is not None
        self.ahead = min(self._slots, max(2, self._prefetch_factor * processes), self._fitting)
        self.readers = processes * self.pool.threads
        self._look_ahead(0)

    def _look_ahead(self, batches: int) -> None:
        """Make so many batches ahead, as far as memory allows, and ``prefetch_factor`` of each process at least."""
        assert self._ring is not None
        self.far = max(self.ahead, min(batches, self._bridging, self._fitting, self._slots))
        self._least_rows = max(1, -(-self.far * self._size // self.pool.capacity))
        self._ring.spare = self.far + 2
        self._ring.most = max(self._ring.most, _HELD * self._ring.spare)

    # -- what the training thread calls

    def resize(self, processes: int) -> int:
        """Have so many processes from now on, as far as that can be; how many there are then."""
        number = self.pool.resize(processes, self._layout)
        if number:
            self._set_ahead(number)
        self.wake()
        return number

    def begin(self, indices: Iterator[Any]) -> Batches:
        """The batches of a new epoch, whose indices the feeding thread draws; what is left of the last is dropped."""
        if self._failure is not None:
            raise self._failure
        batches: Batches = queue.SimpleQueue()
        assert self._ring is not None
        self._commands.put((indices, batches))
        self.wake()
        return batches

    def take(self) -> None:
        """Note that the training thread, which calls this, takes a batch: there is room for another."""
        self.taken += 1
        if self._ring is not None:
            self._ring.note_streams()
        self.wake()

    def wake(self) -> None:
        """Have the feeding thread look what is to be done."""
        os.eventfd_write(self._wake.fd, 1)

    def end(self) -> None:
        """End the processes; what they have made and nobody has taken is gone."""
        if self._pid != os.getpid():
            return
        self._pid, self._is_ending = 0, True
        self._commands.put(None)
        self.wake()
        if self._feeder.is_alive() and self._feeder is not threading.current_thread():
            self._feeder.join(_JOIN_S)
        self.pool.end(time.monotonic() + _JOIN_S)
        if self._ring is not None:
            self._ring.end()
        _engines.discard(self)

    def forked(self) -> None:
        """In a process that was forked, this is nobody's."""
        self._pid = 0
        self.pool.forked()

    # -- the feeding thread

    def _feed(self) -> None:
        batches: Batches | None = None
        collate.thread.collates_as_worker = True
        if self._device_index is not None:  # of the rank: else this thread would be at home on the first
            torch.cuda.set_device(self._device_index)
            torch.set_num_threads(1)  # of copies to page-locked memory
        try:
            while (command := self._commands.get()) is not None:
                if batches is not None:
                    self._settle()
                indices, batches = command
                self._feed_epoch(indices, batches)
        except Exception as error:  # of this thread's own; training is told, and goes no further
            log.debug("the feeding thread has failed", exc_info=True)
            self._failure = error
            if batches is not None:
                batches.put((None, error))
                batches.put((None, END))

    def _feed_epoch(self, indices: Iterator[Any], batches: Batches) -> None:
        """Make an epoch's batches, until another command comes."""
        pool, ring = self.pool, self._ring
        assert ring is not None
        end: Exception | None = None
        while self._commands.empty():
            while end is None and pool.asked - self.taken < self.far:
                try:
                    of_batch = next(indices)
                    self._open(pool.asked, of_batch, ring.take())
                    pool.ask(pool.asked, 0, max(self._rows, self._least_rows))
                except NotYet:
                    break
                except Exception as raised:  # StopIteration, or what a sampler raises
                    end = raised
            if pool.given in pool.ready:
                batches.put(self._hand_over(pool.given))
                pool.given += 1
            elif end is not None and pool.given == pool.asked:
                if type(end) is not StopIteration:
                    batches.put((None, end))
                batches.put((None, END))
                return
            else:
                pool.wait()

    def _open(self, sequence: int, indices: Any, block: int) -> None:
        epoch, first = getattr(indices, "epoch", 0), getattr(indices, "first", 0)
        self._control.open(sequence % self._slots, sequence, indices, epoch, first, block)

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake.fd)

    def _settle(self) -> None:
        """Have nothing on its way: what nobody has begun to read is not read, and what is being read is waited for."""
        pool, ring = self.pool, self._ring
        assert ring is not None
        pool.withdraw()
        while pool.given < pool.asked:
            while pool.given not in pool.ready:
                pool.wait()
                if self._is_ending:
                    return
            ring.give_back(int(self._control.slots[pool.given % self._slots, 4]))
            pool.given += 1
        self.taken = pool.asked
        pool.forget()

    # -- batches

    def _hand_over(self, sequence: int) -> tuple[Any, Any]:
        """A batch whose rows are all done, or what reading it raised."""
        self.pool.ready.discard(sequence)
        control, slot, ring = self._control, sequence % self._slots, self._ring
        assert ring is not None
        _, count, _, _, block, work_ns, longest_ns = control.slots[slot].tolist()
        self._look.note(work_ns / self.readers, longest_ns, time.monotonic_ns())
        if sequence % _LOOK_EVERY == 0:
            self._look_ahead(self._look.batches())
        at_once = -(-count // (2 * self.readers))
        self._rows = min(_TICKET_NS * count // (work_ns + 1), at_once, _MOST_ROWS)
        states = control.states(slot, count)
        sent: dict[int, Any] = {}
        if states.count(PLACED) != count:
            sent, error = self.pool.sent(sequence, states)
            if error is not None:
                ring.give_back(block)
                return None, error
        try:
            batch = self._assembled(ring.lend(block), slot, states, sent)
            return (pin_batch(batch, self._device) if self._pins else batch), None
        except Exception as raised:
            return None, raised

    def _assembled(self, memory: memoryview, slot: int, states: bytes, sent: dict[int, Any]) -> Any:
        size, count = self._size, len(states)
        if not sent:
            return self._layout.assemble(self._layout.tensors(memory, size, count))
        kept = [row for row in range(count) if states[row] != SKIPPED]
        if not kept:
            raise none_of(count, sent[max(sent)])
        arrays = self._layout.arrays(memory, size)
        if not all(isinstance(what, Skipped) for what in sent.values()):
            # Samples that are not like the first one.
            samples = [sent[row] if row in sent else self._layout.sample(arrays, row) for row in kept]
            self.collated += 1
            self._dataset.given = self._control.indices[slot, kept].tolist()
            return self._collate_fn(samples)
        for array in arrays:
            array[: len(kept)] = array[kept]
        return self._layout.assemble(self._layout.tensors(memory, size, len(kept)))


_engines: Final[weakref.WeakSet[Engine]] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_engines):
        engine.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
