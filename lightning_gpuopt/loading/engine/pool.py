"""The loader processes, as the training process has them: what they are to read, what is done, and who has died."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import torch

from lightning_gpuopt.compat.fetchers import is_wrapped
from lightning_gpuopt.loading.datasets import sample_name
from lightning_gpuopt.loading.engine.costs import Costs
from lightning_gpuopt.loading.engine.layout import Layout
from lightning_gpuopt.loading.engine.process import DONE, READ_FIRST, SENT, TICKET, LoaderProcess
from lightning_gpuopt.loading.engine.shared_blocks import ASIDE, LOST, SKIPPED, Control, SharedFile

_ALIVE_MS: Final = 5_000  # milliseconds between two looks whether processes live, if nothing comes
_LOOK_MS: Final = 1_000  # milliseconds between two looks for samples that nobody reads, once a process has died


class LoaderPool:
    """Loader processes: they take samples out of a pipe, and say which batches are done in another.

    Once they read, all but `resize` and `end` is for one thread, which calls `wait` again and again.
    """

    def __init__(self, loader: Any, control: Control, blocks: SharedFile, base_seed: int, most_threads: int) -> None:
        self.asked = self.given = 0  # batches asked for so far, and those of them handed over, or dropped
        self.threads = 1  # of each process
        self.processes: list[Any] = []  # with those that have ended
        self.ready: set[int] = set()  # the batches whose samples are all in, by sequence
        self.dead: Any = None  # the process that has died last
        self._control, self._dataset, self._slots = control, loader.dataset, len(control.slots)
        self._connections: list[Connection] = []
        self._sent: dict[int, dict[int, Any]] = {}
        self._errors: dict[int, Exception] = {}
        self._behind: dict[int, Callable[[], object]] = {}
        self._poll = select.poll()
        self._told = self._gone = 0  # processes that were told to end, and that have: each is set by one thread
        take, put = os.pipe()
        tickets, self._tickets = SharedFile(take), SharedFile(put)
        # A description of its own, which does not block, to take out what nobody is to read any more.
        self._left = SharedFile(os.open(f"/proc/self/fd/{take}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        take, put = os.pipe()
        self._done = SharedFile(take)
        os.set_blocking(take, False)
        os.set_blocking(self._tickets.fd, False)
        self._context = loader.multiprocessing_context or torch.multiprocessing.get_context()
        self._work = LoaderProcess(
            loader.dataset,
            loader.collate_fn,
            control,
            blocks,
            tickets,
            SharedFile(put),
            loader.worker_init_fn,
            base_seed,
            loader.num_workers,
            most_threads,
        )
        self.watch(take, self._receive)

    @property
    def running(self) -> list[Any]:
        return [process for process in self.processes if process.sentinel in self._behind]

    @property
    def capacity(self) -> int:
        """Tickets for which the pipe has room, even where every write begins a page of it."""
        return int(fcntl.fcntl(self._tickets.fd, fcntl.F_GETPIPE_SZ)) // 2 // TICKET.size

    def watch(self, fd: int, act: Callable[[], object]) -> None:
        """Have `wait` call a function when there is something to read."""
        self._behind[fd] = act
        self._poll.register(fd, select.POLLIN)

    def _unwatch(self, fd: int) -> bool:
        if self._behind.pop(fd, None) is None:
            return False
        self._poll.unregister(fd)
        return True

    def add(self, count: int) -> None:
        """Start processes. They wait for what `send` is given."""
        for worker in range(len(self.processes), len(self.processes) + count):
            here, there = self._context.Pipe()
            self._connections.append(here)
            process = self._context.Process(target=self._work.run, args=(worker, there), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.watch(here.fileno(), partial(self._receive_from, worker))
            self.watch(process.sentinel, partial(self._died, worker))

    def find_layout(self, timeout_s: float) -> tuple[Layout | None, int, Costs]:
        """Have the first process read the first samples, whose indices are in slot 0, within `timeout_s`.

        Gives their layout in a batch (None: they have none), how many were read, and what that took. RuntimeError if
        the process died, or takes longer.
        """
        try:
            self._connections[0].send(READ_FIRST)
            if timeout_s and not self._connections[0].poll(timeout_s):
                raise RuntimeError(f"DataLoader timed out after {timeout_s} seconds")
            return self._connections[0].recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):
            self._died(0)
            text = f"DataLoader worker (pid {self.processes[0].pid}) ended before it read a sample"
            raise self._errors.pop(0, RuntimeError(text)) from None

    def send(self, layout: Layout, first: int = 0) -> None:
        """Have processes, from number `first` on, begin to take samples of a layout."""
        for connection in self._connections[first:]:
            with contextlib.suppress(OSError):  # of one that has died
                connection.send((layout, self.threads))

    def resize(self, processes: int, layout: Layout) -> int:
        """Have so many processes; those too many end once what they were asked is done. How many there are then."""
        here = len(self.running) - (self._told - self._gone)
        room = len(self._control.readers) // self.threads - len(self.processes)
        wanted = min(processes, here + room)
        if self.threads > 1 or wanted < 1:
            return here
        if wanted > here:
            self.add(wanted - here)
            self.send(layout, here - wanted)
        else:
            self._told += here - wanted
            self._put(TICKET.pack(0, 0, 0) * (here - wanted))
        return wanted

    def end(self, deadline_s: float) -> None:
        """End the processes; from `deadline_s` on, of ``time.monotonic()``, those that do not end are killed."""
        self._take_out()
        with contextlib.suppress(OSError):
            os.write(self._tickets.fd, TICKET.pack(0, 0, 0) * (len(self.running) * self.threads))
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
        for process in self.processes:
            if process.is_alive():
                process.terminate()
                process.join()
        self._behind.clear()  # which hold this object

    def forked(self) -> None:
        """In a process that was forked, these are nobody's."""
        # So that whoever reads sees the end of the pipe when the training process is gone.
        self._tickets.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it is closed already
                connection.close()

    def ask(self, sequence: int, row: int, rows: int) -> None:
        """Have a batch read, from `row` on, by tickets of so many rows; its indices are in its slot."""
        slot = sequence % self._slots
        count = int(self._control.slots[slot, 1])
        self.asked = sequence + 1
        if not self.running:
            self._lose(sequence, 0, None, self.dead)
            return
        self._put(b"".join(TICKET.pack(slot, min(rows, count - at), at) for at in range(row, count, rows)))

    def _put(self, tickets: bytes) -> None:
        written = 0
        with contextlib.suppress(BlockingIOError):
            written = os.write(self._tickets.fd, tickets)
        if written != len(tickets):
            raise RuntimeError("the index pipe is full")

    def _take_out(self) -> list[tuple[int, int, int]]:
        """The tickets that nobody has taken."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while ticket := os.read(self._left.fd, TICKET.size):
                found.append(TICKET.unpack(ticket))
        return found

    def withdraw(self) -> None:
        """Have nothing read any more that nobody has begun to read."""
        ends = 0
        for slot, count, row in self._take_out():
            if not count:  # a process that is to end
                ends += 1
                continue
            self._control.set_state(slot, row, count, LOST)
            self._see(slot, int(self._control.slots[slot, 0]))
        self._put(TICKET.pack(0, 0, 0) * ends)

    def forget(self) -> None:
        """All requested samples have been delivered or dropped."""
        self.ready.clear()
        self._sent.clear()
        self._errors.clear()

    def wait(self) -> None:
        limit_ms = _ALIVE_MS if self.dead is None else _LOOK_MS if self.running else 0
        events = self._poll.poll(limit_ms)
        for fd, _ in events:
            if fd in self._behind:  # a process has two, of which one may end both
                self._behind[fd]()
        if events:
            return
        for worker, process in enumerate(self.processes):  # what it has started may keep its sentinel from saying so
            if process.sentinel in self._behind and not process.is_alive():
                self._died(worker)
        if self.dead is not None and self.given < self.asked:
            self._lose_unread(self.given)

    def reader_of(self, sequence: int) -> int | None:
        """The process that has been reading for a batch for longest."""
        readers = self._control.readers
        here = np.flatnonzero(readers[:, 0] == sequence + 1)
        return int(here[int(readers[here, 3].argmin())]) // self.threads if here.size else None

    def sent(self, sequence: int, states: bytes) -> tuple[dict[int, Any], Any]:
        """What was sent of a finished batch's samples, by row, and what reading one of them raised (None: nothing)."""
        for worker in range(len(self.processes)):  # it was sent before the row was done
            self._receive_from(worker)
        sent = self._sent.pop(sequence, {})
        for row, state in enumerate(states):
            if state in (ASIDE, SKIPPED) and row not in sent:
                sent[row] = RuntimeError("a sample's data is lost with the process that read it")
        raised = (sent[row] for row in sorted(sent) if is_wrapped(sent[row]) or isinstance(sent[row], Exception))
        return sent, self._errors.pop(sequence, None) or next(raised, None)

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for (sequence,) in DONE.iter_unpack(os.read(self._done.fd, 512 * DONE.size)):
                if sequence >= self.given:  # two may have finished it
                    self.ready.add(sequence)

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

    def _died(self, worker: int) -> None:
        """A process has ended: what it was reading is lost."""
        process = self.processes[worker]
        self._receive_from(worker)
        process.join()
        if not self._unwatch(process.sentinel):
            return
        if process.exitcode == 0 and self._gone < self._told:
            self._gone += 1
            return
        self.dead = process
        readers = self._control.readers[worker * self.threads : (worker + 1) * self.threads]
        for sequence, row, count, _ in readers.tolist():
            if sequence > 0:
                self._lose(sequence - 1, row, count, process)
        readers[:, 0] = 0

    def _lose(self, sequence: int, row: int, count: int | None, process: Any) -> None:
        """Rows of a batch (None: all) that nobody has done will never be."""
        slot = sequence % self._slots
        current, of_batch = self._control.slots[slot, :2].tolist()
        if current != sequence:  # it was done, and is taken
            return
        states = self._control.states(slot, of_batch if count is None else row + count)
        lost = [at for at in range(row, len(states)) if not states[at]]
        for at in lost:
            self._control.set_state(slot, at, 1, LOST)
        if lost:  # else it has died before it could say that the batch is done
            index = int(self._control.indices[slot, lost[0]])
            when = "It had not yet read" if count is None else "It was reading"
            text = f"DataLoader worker (pid {process.pid}) {_end_of(process)}. {when} {self._name(index)}."
            self._errors.setdefault(sequence, RuntimeError(text))
        self._see(slot, sequence)

    def _see(self, slot: int, sequence: int) -> None:
        if sequence >= self.given and self._control.is_done(slot, sequence):
            self.ready.add(sequence)

    def _lose_unread(self, sequence: int) -> None:
        """Nothing has come for a while, and a process has died: see whether it took samples along, or left none alive.

        Nobody reads them where no ticket is left, and no thread that is alive reads for the batch.
        """
        left = select.select([self._left.fd], [], [], 0)[0]
        if not self.running or (not left and self.reader_of(sequence) is None):
            self._lose(sequence, 0, None, self.dead)

    def _name(self, index: int) -> str:
        dataset = getattr(self._dataset, "dataset", None)
        try:
            return f"sample {index}" if dataset is None else f"sample {index} ({sample_name(dataset, index)})"
        except Exception:
            return f"sample {index}"


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
