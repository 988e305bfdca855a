"""The workers of a rank's loaders: has their rings begun, and sees how they end."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from lightning_gpuopt.compat.dataloader import awaited_worker, has_queues, numbered_workers
from lightning_gpuopt.compat.fetchers import fetcher_of
from lightning_gpuopt.loaders.registry import SeenLoader
from lightning_gpuopt.measurements.flight import PIPE_FILES
from lightning_gpuopt.recorder.board import Board
from lightning_gpuopt.recorder.code_places import place_of_reading
from lightning_gpuopt.recorder.ring import AT, MAX_WORKERS
from lightning_gpuopt.recorder.sample_notes import Reading, note_fetches
from lightning_gpuopt.recorder.stacks import StackWriter
from lightning_gpuopt.recorder.worker import WorkerStart

log = logging.getLogger(__name__)

_RESERVED: Final = 32  # rings kept for a training loader: as many workers may be added to it while it runs
_DEATH_POLLS: Final = 100
_DEATH_POLL_S: Final = 0.025

_BY_ITS_LOADER: Final = {"signal": int(signal.SIGTERM)}  # how a loader ends a worker that does not end by itself
_MOST_KEPT: Final = 64
_BY_ITSELF: Final = {"code": 0}
_DIED: Final = re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<pids>\d+(?:, ?\d+)*)\)")


class LoaderWorkers:
    """Subscribes to a Trainer's loaders, and gives each worker's ring its ``words`` and ``numbers``."""

    def __init__(
        self, board: Board, words: dict[str, str], numbers: dict[str, int], stacks: StackWriter | None
    ) -> None:
        self.reading: Reading | None = None
        self._board = board
        self._words, self._numbers, self._stacks = words, numbers, stacks
        self._names: weakref.WeakKeyDictionary[SeenLoader, str] = weakref.WeakKeyDictionary()
        self._iterators: dict[str, list[weakref.ref[Any]]] = {}
        self._workers: dict[int, tuple[str, int, Any]] = {}
        self._dead: set[int] = set()
        self._ended_as_usual: deque[dict[str, Any]] = deque(maxlen=_MOST_KEPT)
        self._died = self._stopped = False

    def loader_seen(self, seen: SeenLoader) -> None:
        """Nothing is done before its workers start."""

    def start_workers(self, seen: SeenLoader, create: Callable[[], Any]) -> Any:
        """Make an iterator whose workers begin their rings before anything else."""
        undo: Callable[[], None] | None = None
        try:
            undo = self._place_start(seen)
        except Exception:  # a loader of somebody's own, which does not let itself be changed
            log.debug("the workers of a loader are not recorded", exc_info=True)
        try:
            iterator = create()
        finally:
            if undo is not None:
                undo()
        try:
            self._started(seen, iterator, recorded=undo is not None)
        except Exception:
            log.debug("an iterator is not recorded", exc_info=True)
        return iterator

    def _place_start(self, seen: SeenLoader) -> Callable[[], None] | None:
        """Have the next iterator's workers begin their rings; returns the undo, None if there is nothing to do."""
        loader: Any = seen.inner
        before = loader.worker_init_fn
        if self._stopped or not loader.num_workers or isinstance(before, WorkerStart):
            return None
        name = self._name_of(seen)
        for worker in range(max(2 * loader.num_workers, _RESERVED if seen.is_training else 0)):
            self._board.slot(name, worker)
        loader.worker_init_fn = WorkerStart(before, self._board, name, self._words, self._numbers, self._stacks)

        def undo() -> None:
            loader.worker_init_fn = before

        return undo

    def _started(self, seen: SeenLoader, iterator: Any, *, recorded: bool) -> None:
        if not recorded:
            fetcher = fetcher_of(iterator)
            if fetcher is not None and not self._stopped:
                self.reading = note_fetches(fetcher, self._board.rank, whole=False)
                self._board.rank.write("reads", place_of_reading(fetcher.dataset))
            return
        name = self._name_of(seen)
        with contextlib.suppress(TypeError):  # an iterator without a place for weak references
            alive = [each for each in self._iterators.get(name, []) if each() is not None]
            self._iterators[name] = [*alive, weakref.ref(iterator)]
        self._find(name, iterator)

    def _name_of(self, seen: SeenLoader) -> str:
        if seen not in self._names:
            kind = "train" if seen.is_training else "validation"
            taken = set(self._names.values())
            names = [kind, *(f"{kind}-{number}" for number in range(1, MAX_WORKERS))]
            self._names[seen] = next(each for each in names if each not in taken)
        return self._names[seen]

    def _find(self, name: str, iterator: Any) -> None:
        for worker, process in numbered_workers(iterator):
            slot = self._board.slot(name, worker)
            if slot is not None and (slot not in self._workers or self._workers[slot][2] is not process):
                self._workers[slot] = (name, worker, process)
                self._dead.discard(slot)

    def turn(self, kind: str, *, look_for_new: bool) -> int:
        """1 + the worker whose batch the loop waits for, of ``"train"`` or ``"validation"`` loaders; 0: none."""
        for name, iterators in list(self._iterators.items()):
            for iterator in [each() for each in iterators if name.startswith(kind)]:
                if iterator is None or not has_queues(iterator):
                    continue
                if look_for_new:
                    self._find(name, iterator)
                if (worker := awaited_worker(iterator)) is not None:
                    return worker + 1
        return 0

    @property
    def living(self) -> dict[int, tuple[int, str, int]]:
        """Process id, loader and number in it of those that are not known to have died, by ring."""
        return {slot: each for slot, each in self.all.items() if slot not in self._dead}

    @property
    def all(self) -> dict[int, tuple[int, str, int]]:
        """The same of all."""
        return {slot: (process.pid, name, worker) for slot, (name, worker, process) in list(self._workers.items())}

    def ask_for_stacks(self) -> None:
        for slot in self.living:
            self._board.worker(slot).numbers[AT["asked"]] += 1

    def look(self) -> None:
        """Note which have died, and how, without taking that from whoever waits for them."""
        for slot, (loader, worker, process) in list(self._workers.items()):
            ended = _end_of(process) if slot not in self._dead else None
            if ended is None:
                continue
            self._dead.add(slot)
            death = {"worker": worker, "loader": loader, "pid": process.pid, **ended}
            if ended in (_BY_ITS_LOADER, _BY_ITSELF):
                self._ended_as_usual.append(death)
            else:
                self._died = True
                self._board.rank.log("worker_died", **death)

    def await_death(self, message: str, raised_in: str) -> None:
        """See which has died, where an exception's ``message``, from frame ``raised_in``, says that one has.

        What it leaves open is closed before its parent can see its end.
        """
        named = {int(pid) for found in _DIED.finditer(message) for pid in found["pids"].split(",")}
        pipe = bool(self._workers) and any(f"{each}:" in raised_in for each in PIPE_FILES)
        for _ in range(_DEATH_POLLS if named or pipe else 1):
            for slot, (_, _, process) in list(self._workers.items()):
                with contextlib.suppress(ValueError, AssertionError):  # its loader has let go of it
                    _ = process.exitcode if slot not in self._dead else None
            self.look()
            dead = {self._workers[slot][2].pid for slot in self._dead if slot in self._workers}
            if (named and named <= dead) or (pipe and self._died):
                break
            time.sleep(_DEATH_POLL_S if named or pipe else 0.0)
        for death in self._ended_as_usual:
            if pipe or death["pid"] in named:
                self._board.rank.log("worker_died", **death)

    def stop(self) -> None:
        self._stopped = True
        self._workers.clear()


def _end_of(process: Any) -> dict[str, int] | None:
    """How a worker has ended, as ``{"signal": 9}`` or ``{"code": 1}``; None while it runs, or where nobody knows."""
    code = getattr(getattr(process, "_popen", None), "returncode", None)
    if code is None:
        try:
            found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except (OSError, AttributeError, TypeError, ValueError):  # closed, or a fork server's child
            return None
        if found is None:
            return None
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
    return {"code": int(code)} if code >= 0 else {"signal": -int(code)}
