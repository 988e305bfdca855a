"""What the training process does for its loader processes: a thread says what is to be read, and takes in what is done.

It is a thread of its own so that the training thread only has to take a batch out of a queue.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pickle
import queue
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from lightning_gpuopt.compat.dataloader import pin_batch
from lightning_gpuopt.compat.fetchers import is_wrapped
from lightning_gpuopt.loading.datasets import sample_name
from lightning_gpuopt.loading.engine.costs import MOST_THREADS, Costs
from lightning_gpuopt.loading.engine.layout import Layout
from lightning_gpuopt.loading.engine.memory import ASIDE, LOST, PLACED, SKIPPED, Control, Ring, SharedFile, streams_here
from lightning_gpuopt.loading.engine.process import DONE, READ_FIRST, SENT, TICKET, LoaderProcess, run
from lightning_gpuopt.loading.samples import Skipped, none_of
from lightning_gpuopt.telemetry.resources import available_memory

log = logging.getLogger(__name__)

Batches: TypeAlias = "queue.SimpleQueue[tuple[Any, Any]]"
"""Batches, each with what reading it raised. `END` comes after the last."""

END: Final = StopIteration()

_TICKET_NS: Final = 200_000
"""A ticket is for so much work: what taking one costs is little against it."""

_ALIVE_MS: Final = 5_000
"""Milliseconds between two looks whether processes live, where nothing comes."""

_LOOK_MS: Final = 1_000
"""Milliseconds between two looks for samples that nobody reads, once a process has died."""

_ADDED: Final = 32
"""Processes that may be added while others run."""

_PART_OF_MEMORY: Final = 1 / 8
"""Batches that are made ahead take no more of the memory that is free: a node's ranks share it, and so do loaders."""

_COPYING: Final = 4
"""Processes that copy records, where nobody says how many: memory gives no more to others."""

_MOST_SLOTS: Final = 1 << 16
_MOST_ROWS: Final = (1 << 16) - 1
"""Of a ticket, whose slot and rows have two bytes each."""

_HELD: Final = 4
"""Batches of so many times as many as are made ahead are worth a word."""

_JOIN_S: Final = 5.0
"""What torch's workers have to end, too."""


class CannotServe(Exception):
    """The samples of a dataset cannot be put into rows; DataLoader workers load it."""


class NotYet(Exception):
    """The indices of the next batch are not drawn yet."""


class Engine:
    """Loader processes, and the thread that feeds them.

    Args:
        loader: the DataLoader; its dataset reads single samples, or copies records.
        first: the indices of the first batch.
        base_seed: of torch's random numbers in workers.
        pins: whether batches are copied to page-locked memory.
        device: what they are copied to later.

    Attributes:
        processes: the loader processes, with those that have ended.
        ahead: batches that are made ahead.
        control: what is read, and by whom.
        asked: batches that the processes were asked for so far.
        taken: batches that the training thread has taken so far; it sets this, and calls `wake`.

    Raises:
        CannotServe: Samples have no fixed layout in a batch.
        RuntimeError: A process has died before it had read a sample.
    """

    def __init__(self, loader: Any, first: Any, base_seed: int, pins: bool, device: str | None) -> None:
        self.asked = self.taken = self._given = 0
        self.processes: list[Any] = []
        self._pins, self._device = pins, device
        uses_cuda = pins or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._device_index = torch.cuda.current_device() if uses_cuda and torch.cuda.is_available() else None
        self._dataset, self._collate_fn = loader.dataset, loader.collate_fn
        self._copies = getattr(loader.dataset, "gathers_batches", False)
        self._most_threads = 1 if self._copies or loader.dataset.seeds else MOST_THREADS
        self._threads = 1
        self._prefetch_factor = loader.prefetch_factor
        # Places for what comes of processes that are added later.
        self._slots = min(_MOST_SLOTS, max(2, self._prefetch_factor * (loader.num_workers + _ADDED)))
        self.ahead = self._slots
        # The last batch of a rank may be larger by one.
        self._size = max(loader.batch_sampler.batch_size + 1, len(first))
        self.control = Control(self._slots, self._size, loader.num_workers * self._most_threads + _ADDED)
        self._connections: list[Connection] = []
        self._ready: set[int] = set()
        self._sent: dict[int, dict[int, Any]] = {}
        self._errors: dict[int, Exception] = {}
        self._fitting = self._slots
        self._behind: dict[int, Callable[[], object]] = {}
        self._poll = select.poll()
        self._dead: Any = None  # the last process that has died
        self._failure: Exception | None = None  # of the feeding thread
        self._is_ending = False
        self._leaving = 0  # processes that were told to end
        self._commands: queue.SimpleQueue[tuple[Iterator[Any], Batches] | None] = queue.SimpleQueue()
        self._wake = SharedFile(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._open_pipes()
        self._ring: Ring | None = None
        self._pid = os.getpid()
        self._feeder = threading.Thread(target=self._feed, name="gpuopt-feeder", daemon=True)
        _engines.add(self)
        try:
            self._start(loader, first, base_seed)
        except BaseException:
            self.end()
            raise

    def _open_pipes(self) -> None:
        take, put = os.pipe()
        self._take_tickets, self._tickets = SharedFile(take), SharedFile(put)
        # A description of its own, which does not block, to take out what nobody is to read any more.
        self._left = SharedFile(os.open(f"/proc/self/fd/{take}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        take, put = os.pipe()
        self._done, self._say_done = SharedFile(take), SharedFile(put)
        os.set_blocking(take, False)
        os.set_blocking(self._tickets.fd, False)

    def _set_ahead(self, processes: int) -> None:
        self.ahead = min(self._slots, max(2, self._prefetch_factor * processes), self._fitting)
        # All tickets have room, even where every write begins a page of the pipe's.
        capacity = fcntl.fcntl(self._tickets.fd, fcntl.F_GETPIPE_SZ) // 2 // TICKET.size
        self._least_rows = max(1, -(-self.ahead * self._size // capacity))
        self._readers = processes * self._threads
        if self._ring is not None:
            self._ring.spare = self.ahead + 2
            self._ring.most = max(self._ring.most, _HELD * self._ring.spare)

    def _start(self, loader: Any, first: Any, base_seed: int) -> None:
        self._context = loader.multiprocessing_context or torch.multiprocessing.get_context()
        blocks = SharedFile.in_memory("memory")
        self._work = LoaderProcess(
            loader.dataset,
            loader.collate_fn,
            self.control,
            blocks,
            self._take_tickets,
            self._say_done,
            loader.worker_init_fn,
            base_seed,
            loader.num_workers,
            self._most_threads,
        )
        self._open(0, first, 0)
        self._watch(self._done.fd, self._receive)
        self._watch(self._wake.fd, self._woken)
        shares, processes = self._most_threads > 1 and loader.shares_cpus, loader.num_workers
        if self._copies and loader.shares_cpus:
            processes = min(processes, _COPYING)
        self._add_processes(1 if shares else processes)
        self._layout, read, costs = self._find_layout(loader.timeout)
        self._threads = costs.threads()
        if shares:
            processes, self._threads = costs.share(loader.num_workers)
            self._add_processes(processes - 1)
        self._threads = min(self._threads, self._most_threads)
        self._ring = Ring(blocks, self._layout.starts(self._size)[1])
        self._ring.is_copied_here = self._pins
        self._fitting = max(2, int(_PART_OF_MEMORY * available_memory() // self._ring.num_bytes))
        self._set_ahead(processes)
        self._rows = self._least_rows
        self._ring.take()  # the first batch's
        for connection in self._connections:
            with contextlib.suppress(OSError):  # of one that has died
                connection.send((self._layout, self._threads))
        self._ask(0, read)
        self._feeder.start()

    def _add_processes(self, count: int) -> None:
        for worker in range(len(self.processes), len(self.processes) + count):
            here, there = self._context.Pipe()
            self._connections.append(here)
            process = self._context.Process(target=run, args=(self._work, worker, there), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self._watch(here.fileno(), partial(self._receive_from, worker))
            self._watch(process.sentinel, partial(self._died, worker))

    def _watch(self, fd: int, act: Callable[[], object]) -> None:
        self._behind[fd] = act
        self._poll.register(fd, select.POLLIN)

    def _find_layout(self, timeout_s: float) -> tuple[Layout, int, Costs]:
        """How the samples lie in a batch, how many of the first batch's were read to find it, and what that took."""
        if self._copies:
            return self._dataset.layout, 0, Costs()
        try:
            self._connections[0].send(READ_FIRST)
            if timeout_s and not self._connections[0].poll(timeout_s):
                raise RuntimeError(f"DataLoader timed out after {timeout_s} seconds")
            layout, read, costs = self._connections[0].recv()
        except (EOFError, OSError):
            self._died(0)
            text = f"DataLoader worker (pid {self.processes[0].pid}) ended before it read a sample"
            raise self._errors.pop(0, RuntimeError(text)) from None
        if layout is None:
            raise CannotServe("a sample has parts that have no fixed layout")
        return layout, read, costs

    # -- what the training thread calls

    def resize(self, processes: int) -> int:
        """Have so many processes from now on; how many there are then.

        Those that are too many end when what they were asked for is done.
        """
        here = len(self.running) - self._leaving
        room = int(self.control.readers.shape[0]) // self._threads - len(self.processes)
        wanted = min(processes, here + room)
        if self._threads > 1 or wanted < 1:
            return here
        if wanted > here:
            self._add_processes(wanted - here)
            for connection in self._connections[here - wanted :]:
                with contextlib.suppress(OSError):
                    connection.send((self._layout, self._threads))
        else:
            self._leaving += here - wanted
            os.write(self._tickets.fd, TICKET.pack(0, 0, 0) * (here - wanted))
        self._set_ahead(wanted)
        self.wake()
        return wanted

    @property
    def running(self) -> list[Any]:
        """The processes that have not ended."""
        return [process for process in self.processes if process.sentinel in self._behind]

    def begin(self, indices: Iterator[Any]) -> Batches:
        """Begin an epoch; what is left of the one before is dropped.

        Args:
            indices: of each batch; they are drawn in the feeding thread.

        Returns:
            Its batches.
        """
        if self._failure is not None:
            raise self._failure
        batches: Batches = queue.SimpleQueue()
        assert self._ring is not None
        self._ring.streams = streams_here()
        self._commands.put((indices, batches))
        self.wake()
        return batches

    def wake(self) -> None:
        """Have the feeding thread look what is to be done."""
        os.eventfd_write(self._wake.fd, 1)

    def reader_of(self, sequence: int) -> int | None:
        """Who has been reading for a batch for longest: the thread's number among those of all processes."""
        readers = self.control.readers
        here = np.flatnonzero(readers[:, 0] == sequence + 1)
        return int(here[int(readers[here, 3].argmin())]) if here.size else None

    def is_ready(self, sequence: int) -> bool:
        """Whether all samples of a batch are in."""
        return sequence in self._ready

    def end(self) -> None:
        """End the processes; what they have made and nobody has taken is gone."""
        if self._pid != os.getpid():
            return
        self._pid, self._is_ending = 0, True
        self._commands.put(None)
        self.wake()
        if self._feeder.is_alive() and self._feeder is not threading.current_thread():
            self._feeder.join(_JOIN_S)
        self._left_tickets()
        with contextlib.suppress(OSError):
            os.write(self._tickets.fd, TICKET.pack(0, 0, 0) * (len(self.running) * self._threads))
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + _JOIN_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            if process.is_alive():
                process.terminate()
                process.join()
        if self._ring is not None:
            self._ring.end()
        self._behind.clear()  # which hold this object
        _engines.discard(self)

    def forked(self) -> None:
        """In a process that was forked, this is nobody's."""
        self._pid = 0
        # So that whoever reads sees the end of the pipe when the training process is gone.
        self._tickets.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it is closed already
                connection.close()

    # -- the feeding thread

    def _feed(self) -> None:
        batches: Batches | None = None
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
        end: Exception | None = None
        while self._commands.empty():
            while end is None and self.asked - self.taken < self.ahead:
                try:
                    of_batch = next(indices)
                    self._open(self.asked, of_batch, self._take_block())
                    self._ask(self.asked, 0)
                except NotYet:
                    break
                except Exception as raised:  # StopIteration, or what a sampler raises
                    end = raised
            if self._given in self._ready:
                batches.put(self._hand_over(self._given))
                self._given += 1
            elif end is not None and self._given == self.asked:
                if type(end) is not StopIteration:
                    batches.put((None, end))
                batches.put((None, END))
                return
            else:
                self._wait()

    def _take_block(self) -> int:
        assert self._ring is not None
        return self._ring.take()

    def _open(self, sequence: int, indices: Any, block: int) -> None:
        epoch, first = getattr(indices, "epoch", 0), getattr(indices, "first", 0)
        self.control.open(sequence % self._slots, sequence, indices, epoch, first, block)

    def _ask(self, sequence: int, row: int) -> None:
        slot, rows = sequence % self._slots, max(self._rows, self._least_rows)
        count = int(self.control.slots[slot, 1])
        self.asked = sequence + 1
        if not self.running:
            self._lose(sequence, 0, None, self._dead)
            return
        tickets = b"".join(TICKET.pack(slot, min(rows, count - at), at) for at in range(row, count, rows))
        self._put_tickets(tickets)

    def _put_tickets(self, tickets: bytes) -> None:
        written = 0
        with contextlib.suppress(BlockingIOError):
            written = os.write(self._tickets.fd, tickets)
        if written != len(tickets):
            raise RuntimeError("the pipe with what is to be read is full")

    def _wait(self) -> None:
        limit_ms = _ALIVE_MS if self._dead is None else _LOOK_MS if self.running else 0
        events = self._poll.poll(limit_ms)
        for fd, _ in events:
            if fd in self._behind:  # a process has two, of which one may end both
                self._behind[fd]()
        if events:
            return
        for worker, process in enumerate(self.processes):  # what it has started may keep its sentinel from saying so
            if process.sentinel in self._behind and not process.is_alive():
                self._died(worker)
        if self._dead is not None and self._given < self.asked:
            self._lose_unread(self._given, self._dead)

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake.fd)

    def _settle(self) -> None:
        """Have nothing on its way: what nobody has begun to read is not read, and what is being read is waited for."""
        assert self._ring is not None
        ends = 0
        for slot, count, row in self._left_tickets():
            if not count:  # a process that is to end
                ends += 1
                continue
            self.control.set_state(slot, row, count, LOST)
            sequence = int(self.control.slots[slot, 0])
            if self.control.is_done(slot, sequence):
                self._ready.add(sequence)
        self._put_tickets(TICKET.pack(0, 0, 0) * ends)
        while self._given < self.asked:
            while self._given not in self._ready:
                self._wait()
                if self._is_ending:
                    return
            self._ring.give_back(int(self.control.slots[self._given % self._slots, 4]))
            self._given += 1
        self.taken = self.asked
        self._ready.clear()
        self._sent.clear()
        self._errors.clear()

    def _left_tickets(self) -> list[tuple[int, int, int]]:
        found = []
        with contextlib.suppress(BlockingIOError):
            while ticket := os.read(self._left.fd, TICKET.size):
                found.append(TICKET.unpack(ticket))
        return found

    # -- batches

    def _hand_over(self, sequence: int) -> tuple[Any, Any]:
        """A batch whose rows are all done, or what reading it raised."""
        self._ready.discard(sequence)
        control, slot, ring = self.control, sequence % self._slots, self._ring
        assert ring is not None
        _, count, _, _, block, work_ns = control.slots[slot].tolist()
        at_once = -(-count // (2 * self._readers))
        self._rows = max(self._least_rows, min(_TICKET_NS * count // (work_ns + 1), at_once, _MOST_ROWS))
        states = control.states(slot, count)
        sent: dict[int, Any] = {}
        if states.count(PLACED) != count:
            sent = self._sent_for(sequence, states)
            error = self._errors.pop(sequence, None)
            if (error := error or _first_error(sent)) is not None:
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
            self._dataset.given = self.control.indices[slot, kept].tolist()
            return self._collate_fn(samples)
        for array in arrays:
            array[: len(kept)] = array[kept]
        return self._layout.assemble(self._layout.tensors(memory, size, len(kept)))

    def _sent_for(self, sequence: int, states: bytes) -> dict[int, Any]:
        """What was sent of a batch whose rows are all done."""
        for worker in range(len(self.processes)):  # it was sent before the row was done
            self._receive_from(worker)
        sent = self._sent.pop(sequence, {})
        for row, state in enumerate(states):
            if state in (ASIDE, SKIPPED) and row not in sent:
                sent[row] = RuntimeError("what was sent of a sample is lost with the process that has read it")
        return sent

    # -- what comes from the processes

    def _receive(self) -> None:
        """Take in which batches are done."""
        with contextlib.suppress(BlockingIOError):
            for (sequence,) in DONE.iter_unpack(os.read(self._done.fd, 512 * DONE.size)):
                if sequence >= self._given:  # two may have finished it
                    self._ready.add(sequence)

    def _receive_from(self, worker: int) -> None:
        """Take in what a process has sent of single samples."""
        connection = self._connections[worker]
        try:
            while connection.poll():
                data = connection.recv_bytes()
                sequence, row = SENT.unpack_from(data)
                self._sent.setdefault(sequence, {})[row] = _unpickled(data[SENT.size :])
        except (EOFError, OSError):  # its death is seen by its sentinel
            with contextlib.suppress(OSError):
                self._unwatch(connection.fileno())

    def _unwatch(self, fd: int) -> bool:
        if self._behind.pop(fd, None) is None:
            return False
        self._poll.unregister(fd)
        return True

    def _died(self, worker: int) -> None:
        """A process has ended: what it was reading is lost."""
        process = self.processes[worker]
        self._receive_from(worker)
        process.join()
        if not self._unwatch(process.sentinel):
            return
        if process.exitcode == 0 and self._leaving:
            self._leaving -= 1
            return
        self._dead = process
        readers = self.control.readers[worker * self._threads : (worker + 1) * self._threads]
        for sequence, row, count, _ in readers.tolist():
            if sequence > 0:
                self._lose(sequence - 1, row, count, process)
        readers[:, 0] = 0

    def _lose(self, sequence: int, row: int, count: int | None, process: Any) -> None:
        """Rows of a batch (None: all) that nobody has done will never be."""
        slot = sequence % self._slots
        current, of_batch = self.control.slots[slot, :2].tolist()
        if current != sequence:  # it was done, and is taken
            return
        states = self.control.states(slot, of_batch if count is None else row + count)
        lost = [at for at in range(row, len(states)) if not states[at]]
        if not lost:  # it has died before it could say that the batch is done
            if self.control.is_done(slot, sequence):
                self._ready.add(sequence)
            return
        for at in lost:
            self.control.set_state(slot, at, 1, LOST)
        index = int(self.control.indices[slot, lost[0]])
        when = "It had not yet read" if count is None else "It was reading"
        text = f"DataLoader worker (pid {process.pid}) {_end_of(process)}. {when} {self._name(index)}."
        self._errors.setdefault(sequence, RuntimeError(text))
        if self.control.is_done(slot, sequence):
            self._ready.add(sequence)

    def _lose_unread(self, sequence: int, dead: Any) -> None:
        """Nothing has come for a while, and a process has died: see whether it took samples along, or left none alive.

        Nobody reads them where no ticket is left, and no thread that is alive reads for the batch.
        """
        left = select.select([self._left.fd], [], [], 0)[0]
        if not self.running or (not left and self.reader_of(sequence) is None):
            self._lose(sequence, 0, None, dead)

    def _name(self, index: int) -> str:
        dataset = getattr(self._dataset, "dataset", None)
        try:
            return f"sample {index}" if dataset is None else f"sample {index} ({sample_name(dataset, index)})"
        except Exception:
            return f"sample {index}"


def _first_error(sent: dict[int, Any]) -> Any:
    raised = (sent[row] for row in sorted(sent) if is_wrapped(sent[row]) or isinstance(sent[row], Exception))
    return next(raised, None)


def _unpickled(data: bytes) -> Any:
    """What was sent, or the exception with which that cannot be read."""
    try:
        return pickle.loads(data)
    except Exception as error:
        return error


def _end_of(process: Any) -> str:
    """How a process has ended, in torch's words."""
    code = process.exitcode
    if code is None:  # another has waited for it
        return "has ended"
    if code >= 0:
        return f"exited unexpectedly with exit code {code}"
    return f"is killed by signal: {signal.strsignal(-code) or -code}"


_engines: Final[weakref.WeakSet[Engine]] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_engines):
        engine.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
