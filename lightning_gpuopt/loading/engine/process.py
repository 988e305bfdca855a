"""A loader process: its threads take samples in their order, and put each into its row of its batch."""

from __future__ import annotations

import os
import pickle
import struct
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from lightning_gpuopt.compat.fetchers import be_a_worker, fetcher_for, wrap_exception
from lightning_gpuopt.loaders.sample_keys import each_of
from lightning_gpuopt.loading.collate import as_it_is
from lightning_gpuopt.loading.engine.costs import Costs
from lightning_gpuopt.loading.engine.layout import Array, Layout, Placer
from lightning_gpuopt.loading.engine.shared_blocks import ASIDE, LOST, PLACED, SKIPPED, Blocks, Control, SharedFile
from lightning_gpuopt.loading.samples import EpochSamples, Skipped
from lightning_gpuopt.timeline.worker_clock import clock_of

# what a thread takes out of the pipe: a slot, how many rows (0: there is nothing more), and the first
TICKET: Final = struct.Struct("<HHI")
DONE: Final = struct.Struct("<q")  # what a thread says of a batch whose last sample is in: its sequence

_FIRST_S: Final = 0.05  # so many seconds of samples, but no more than a batch, show what they cost
SENT: Final = struct.Struct("<qq")  # what stands before something that is sent: the batch's sequence, and the row
# what one of the processes gets in place of the layout, which it is then to find
READ_FIRST: Final = "read the first sample"


@dataclass
class LoaderProcess:
    samples: Any
    # the loader's; it makes the first sample's batch, and others wrap it to time workers
    collate_fn: Callable[[Any], Any]
    control: Control
    blocks: SharedFile  # where batches lie
    tickets: SharedFile  # the pipe with the samples to be read
    done: SharedFile  # the pipe with the batches that are done
    worker_init_fn: Callable[[int], object] | None
    base_seed: int  # of torch's random numbers in workers
    num_workers: int
    most_threads: int  # of each

    @property
    def dataset(self) -> Any:
        """What the user calls the dataset."""
        return self.samples.dataset if isinstance(self.samples, EpochSamples) else self.samples

    def run(self, worker: int, connection: Connection) -> None:
        """The ``main`` of process `worker` (from 0); the layout comes out of the connection, misfits go in."""
        self._worker, self._connection, self._sending = worker, connection, threading.Lock()
        self.control.begin()
        self._failed: Any = None
        try:
            be_a_worker(worker, self.num_workers, self.base_seed, self.dataset)
            try:
                if self.worker_init_fn is not None:
                    self.worker_init_fn(worker)
            except Exception:
                self._failed = wrap_exception(worker)
            order = connection.recv()
            read: list[Any] = []
            if order == READ_FIRST:
                read = self._first_samples()
                order = connection.recv()
            layout, threads = order
            self._layout: Layout = layout
            self._threads: int = threads
            self._batch_size = self.control.indices.shape[1]
            self._memory = Blocks(self.blocks, layout.starts(self._batch_size)[1])
            self._places: dict[int, tuple[list[Array], Placer]] = {}
            if read:
                self._finish_first(read)
            others = [
                threading.Thread(target=self._take_or_end, args=(number,), name="gpuopt-reader", daemon=True)
                for number in range(1, threads)
            ]
            for thread in others:
                thread.start()
            self._take_samples(0)
            for thread in others:
                thread.join()
        except (KeyboardInterrupt, EOFError, BrokenPipeError):
            pass  # the training process raises it, or is gone

    # -- the first samples, which say how all of them lie, and what reading them takes

    def _first_samples(self) -> list[Any]:
        """Read some samples of the first batch, and send their layout and costs; what became of each."""
        layout: Layout | None = None
        read: list[Any] = []
        count = int(self.control.slots[0, 1])
        status = self.control.readers[self._worker]  # as of a process with one thread
        costs, until = Costs(), 0.0
        rows = _FirstRows(self)
        fetcher = fetcher_for(rows, as_it_is)
        for row, index in enumerate(self.control.indices[0, :count].tolist()):
            status[1:] = row, 1, time.monotonic_ns()
            status[0] = 1
            try:
                if self._failed is not None:
                    break
                rows.first = row
                read += fetcher.fetch([index])
            except Exception:  # it is read once more, and then training is told
                break
            if isinstance(read[-1], Skipped):
                continue
            if layout is None:
                layout = Layout.of(read[-1], self.collate_fn)
                if layout is None or self.most_threads == 1:
                    break
                costs.begin()  # the first one opens files, and imports modules
                until = time.monotonic() + _FIRST_S
            if time.monotonic() > until:
                break
        costs.end()
        status[0] = 0
        self._connection.send((layout, len(read), costs))
        return read

    def _finish_first(self, read: list[Any]) -> None:
        place = self.places(int(self.control.slots[0, 4]))[1]
        for row, sample in enumerate(read):
            try:
                self.put(0, row, sample, place)
            except Exception as error:
                self._refuse(0, row, 1, error)
        if self.control.is_done(0, 0):
            self._say_done(0)

    # -- samples

    def _take_or_end(self, thread: int) -> None:
        """As a thread beside the main one: it does not end alone, with samples that nobody would miss."""
        try:
            self._take_samples(thread)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _take_samples(self, thread: int) -> None:
        control, tickets = self.control, self.tickets.fd
        status = control.readers[self._worker * self._threads + thread]
        rows = (_Records if getattr(self.samples, "gathers_batches", False) else _Rows)(self)
        clock = clock_of(self.collate_fn, self._worker * self._threads + thread)
        fetcher = fetcher_for(rows, as_it_is if clock is None else clock)
        while True:
            ticket = os.read(tickets, TICKET.size)
            if len(ticket) < TICKET.size:  # the training process is gone
                return
            slot, count, row = TICKET.unpack(ticket)
            if not count:
                return
            began, sequence = time.monotonic_ns(), int(control.slots[slot, 0])
            status[1:] = row, count, began
            status[0] = sequence + 1
            indices = control.indices[slot, row : row + count].tolist()
            rows.slot, rows.first = slot, row
            try:
                if self._failed is not None:
                    raise _InitFailed
                fetcher.fetch(indices)
            except Exception as error:
                self._refuse(slot, row, count, error)
            _, size, _, _, _, work_ns, _ = control.slots[slot].tolist()
            if control.is_done(slot, sequence, took_ns := time.monotonic_ns() - began):
                self._say_done(sequence)
                if clock is not None:
                    clock.batch_done(work_ns + took_ns, self._layout.row_bytes * size)
            status[0] = 0

    def _say_done(self, sequence: int) -> None:
        os.write(self.done.fd, DONE.pack(sequence))

    def put(self, slot: int, row: int, sample: Any, place: Placer) -> None:
        if not isinstance(sample, Skipped) and place(sample, row):
            self.control.set_state(slot, row, 1, PLACED)
            return
        self._send(slot, row, sample)
        self.control.set_state(slot, row, 1, SKIPPED if isinstance(sample, Skipped) else ASIDE)

    def places(self, block: int) -> tuple[list[Array], Placer]:
        """The columns of a block, and what puts a sample there."""
        found = self._places.get(block)
        if found is None:
            arrays = self._layout.arrays(self._memory.map(block), self._batch_size)
            found = self._places[block] = arrays, self._layout.placer(arrays)
        return found

    def _refuse(self, slot: int, row: int, count: int, error: Exception) -> None:
        """Send what reading a sample raised; the batch raises it when its turn comes."""
        states = self.control.states(slot, row + count)[row:]
        at = row + max(0, states.find(b"\0"))
        wrapped = self._failed if isinstance(error, _InitFailed) else wrap_exception(self._worker)
        try:
            self._send(slot, at, wrapped)
        except Exception:  # its class cannot be sent
            text = f"Caught {wrapped.exc_type.__name__} {wrapped.where}.\nOriginal {wrapped.exc_msg}"
            self._send(slot, at, RuntimeError(text))
        self.control.set_state(slot, at, 1, ASIDE)
        self.control.set_state(slot, at + 1, row + count - at - 1, LOST)

    def _send(self, slot: int, row: int, what: Any) -> None:
        # Bytes that do not need this process any more: torch's own way to send tensors does.
        data = SENT.pack(int(self.control.slots[slot, 0]), row) + pickle.dumps(what)
        with self._sending:
            self._connection.send_bytes(data)


class _InitFailed(Exception):
    """The ``worker_init_fn`` raised."""


class _Rows:
    """A dataset for torch's fetcher, whose samples go into their rows of a batch as they are read."""

    notes_each = True  # the flight recorder is told of each sample

    def __init__(self, process: LoaderProcess) -> None:
        self._process = process
        self.reads_for = process.dataset
        self.slot = self.first = 0

    def __len__(self) -> int:
        return len(self._process.samples)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        process, slot, row = self._process, self.slot, self.first
        _, count, epoch, first, block, *_ = process.control.slots[slot].tolist()
        if row == 0:
            process.samples.read_ahead(process.control.indices[slot, :count].tolist())
        place = process.places(block)[1]
        for index in each_of(indices):
            process.put(slot, row, process.samples.read(index, epoch, first + row), place)
            row += 1


class _FirstRows(_Rows):
    """The same if it is not known yet what their layout is."""

    def __getitems__(self, indices: Sequence[int]) -> Any:
        process = self._process
        _, _, epoch, first, *_ = process.control.slots[0].tolist()
        return [process.samples.read(index, epoch, first + self.first) for index in each_of(indices)]


class _Records(_Rows):
    """The same of equal records, many of which are copied at once."""

    notes_each = False

    def __getitems__(self, indices: Sequence[int]) -> Any:
        control, slot = self._process.control, self.slot
        _, count, _, _, block, *_ = control.slots[slot].tolist()
        if self.first == 0:
            self._process.samples.announce(control.indices[slot, :count].tolist())
        arrays, _ = self._process.places(block)
        self._process.samples.read_into(indices, arrays, self.first, block)
        control.set_state(slot, self.first, len(indices), PLACED)
