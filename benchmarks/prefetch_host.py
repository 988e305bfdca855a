"""What CudaPrefetcher costs the training thread, for ``benchmarks/prefetch.py``; and loaders that cost it nothing."""

from __future__ import annotations

import itertools
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from gpu_parts import quiet_trainer
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt import CudaPrefetcher

HOST_TARGET_US = 50.0
"""A step, above an empty callback, for batches of up to :data:`FEW` tensors."""
FEW = 4
LEAF_TARGET_US = 2.0
"""For each tensor more."""
AUTO_TARGET_US = 2.0

READY_BATCHES = 4
WORKERS = 2


def target(what: str, measured: float, limit: float, unit: str, *, least: bool = False) -> dict[str, Any]:
    passed = measured >= limit if least else measured <= limit
    bound = "at least" if least else "at most"
    return {"what": what, "measured": measured, "limit": limit, "unit": unit, "bound": bound, "passed": passed}


# ---- batches that cost their loader nothing ----

_ready: list[Any] = []


def _ready_batch(index: int) -> Any:
    return _ready[index % len(_ready)]


class Ticket:
    """What a worker sends: the process that receives it gets one of its own ready batches."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __reduce__(self) -> tuple[Any, ...]:
        return _ready_batch, (self.index,)


class Tickets(Dataset[Ticket]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Ticket:
        return Ticket(index)


class ReadyBatches:
    """The same without workers: a loader in the training process that may be looked ahead of."""

    draws_random_state = False

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return map(_ready_batch, range(self.length))


class QueuedBatches(ReadyBatches):
    """The same from a queue that is never empty, without the noise of real workers."""

    draws_random_state = True

    def __iter__(self) -> Iterator[Any]:
        return _Queued(self.length)


class _Queued:
    """Behaves as torch's iterator over workers and a pin-memory thread that are always ahead."""

    _dataset_kind = 0
    _persistent_workers = False
    _tasks_outstanding = 0

    def __init__(self, length: int) -> None:
        self._length = length
        self._data_queue: queue.Queue[tuple[int, Any]] = queue.Queue()
        self._task_info: dict[int, tuple[Any, ...]] = {}
        self._rcvd_idx = self._send_idx = 0
        for _ in range(READY_BATCHES):
            self._try_put_index()

    def _try_put_index(self) -> None:
        if self._send_idx < self._length:
            self._data_queue.put((self._send_idx, _ready_batch(self._send_idx)))
            self._task_info[self._send_idx] = (0,)
            self._send_idx += 1

    def _next_data(self) -> Any:
        if self._rcvd_idx == self._length:
            raise StopIteration
        index, batch = self._data_queue.get()
        self._rcvd_idx += 1
        del self._task_info[index]
        self._try_put_index()
        return batch

    __next__ = _next_data

    def __iter__(self) -> Iterator[Any]:
        return self


def make_ready(batches: Iterable[list[torch.Tensor]], *, pinned: bool) -> None:
    """Replace the ready batches."""
    _ready[:] = [[each.pin_memory() for each in batch] if pinned else batch for batch in batches]


def worker_loader(length: int, *, pinned: bool) -> DataLoader[Any]:
    return DataLoader(Tickets(length), batch_size=None, num_workers=WORKERS, pin_memory=pinned)


# ---- host time ----


def refuse_idle(callbacks: Iterable[Callback]) -> None:
    """A prefetcher that has staged nothing would be no slower than none, and no faster."""
    if any(isinstance(each, CudaPrefetcher) and not each.stats["staged"] for each in callbacks):
        sys.exit("prefetch.py: CudaPrefetcher staged no batch, so these figures would not be its own")


class Clocked(LightningModule):
    """A step of next to nothing, between readings of this thread's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.began_ns: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.began_ns.append(time.thread_time_ns())
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def step_us(callback: Callback, loader: Any, accelerator: str) -> float:
    """Median microseconds of this thread from step to step, in the second half of a run."""
    model = Clocked()
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(folder, [callback], accelerator=accelerator, max_epochs=1).fit(model, loader)
    if getattr(callback, "enabled", None) is True:
        refuse_idle([callback])
    late_ns = model.began_ns[len(model.began_ns) // 2 :]
    return statistics.median(after - before for before, after in itertools.pairwise(late_ns)) / 1e3


def added_us(
    make: Callable[[], Callback], loader: Callable[[], Any], rounds: int, accelerator: str
) -> tuple[float, float]:
    """What a callback adds to an empty one, the median of the rounds' differences; and the empty one's median step."""
    empty, differences = [], []
    for number in range(rounds):
        turns: list[Callable[[], Callback]] = [Callback, make]
        taken = {each: step_us(each(), loader(), accelerator) for each in turns[:: 1 - 2 * (number % 2)]}
        empty.append(taken[Callback])
        differences.append(taken[make] - taken[Callback])
    return statistics.median(differences), statistics.median(empty)


def own_move_us(device: torch.device) -> float:
    """What Lightning takes to move the ready batch."""
    taken_us = []
    for _ in range(200):
        begin_ns = time.thread_time_ns()
        move_data_to_device(_ready[0], device)
        taken_us.append((time.thread_time_ns() - begin_ns) / 1e3)
    return statistics.median(taken_us)


def measure_host(accelerator: str, rounds: int, steps: int, *, quick: bool) -> dict[str, Any]:
    """Microseconds of the training thread for batches of so many tensors."""
    on_gpu = accelerator == "gpu"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    rows, targets = [], []

    def ours() -> Callback:
        return CudaPrefetcher(enabled=True)

    for count in (1, 4, 100) if quick else (1, 2, 4, 8, 100, 500):
        make_ready([[torch.zeros(8) for _ in range(count)] for _ in range(READY_BATCHES)], pinned=on_gpu)
        added, empty = added_us(ours, lambda: QueuedBatches(steps), rounds, accelerator)
        here, _ = added_us(ours, lambda: ReadyBatches(steps), rounds, accelerator)
        own = own_move_us(device)
        rows.append(
            {
                "tensors": count,
                "empty_us": empty,
                "own_move_us": own,
                "whole_us": own + added,
                "added_us": added,
                "in_process_us": here,
            }
        )
        what = f"{count} tensors on the {accelerator.upper()}: host time a step above Lightning's own move"
        targets.append(target(what, added, HOST_TARGET_US + LEAF_TARGET_US * max(0, count - FEW), "us"))
        print(f"  host time on the {accelerator.upper()}, {count} tensors", file=sys.stderr)
    return {"accelerator": accelerator, "rows": rows, "targets": targets}


def measure_auto(rounds: int, steps: int) -> dict[str, Any]:
    """What ``enabled="auto"`` costs a Trainer on the CPU."""
    make_ready([[torch.zeros(8)]], pinned=False)
    measured, _ = added_us(CudaPrefetcher, lambda: ReadyBatches(steps), rounds, "cpu")
    return target('enabled="auto" on a CPU, step above Callback()', measured, AUTO_TARGET_US, "us")
