"""The flight recorder of a training process: what it and its workers are at, kept so that it outlives them.

Steps, evaluation batches and saves are noted as they end. All else is noted by a thread, four times a second: where
the training thread is, whether workers have died, and, once a second, memory. Nothing is ever ended by it, and what
fails in it is left out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from lightning_gpuopt.compat.dataloader import awaited_worker, has_queues, workers_of
from lightning_gpuopt.compat.fetchers import fetcher_of
from lightning_gpuopt.compat.lightning import Trainer
from lightning_gpuopt.compat.lightning_loops import place_in_epoch
from lightning_gpuopt.compat.torch_internals import nccl_entries
from lightning_gpuopt.loaders.registry import LoaderRegistry, SeenLoader
from lightning_gpuopt.measurements.flight import SAVES, SETS_UP, TRAINS, VALIDATES, Doing
from lightning_gpuopt.recorder.board import Board
from lightning_gpuopt.recorder.handover import Watcher
from lightning_gpuopt.recorder.memory import MemoryLog
from lightning_gpuopt.recorder.reader import STACKS_SUFFIX, SUFFIX, remove
from lightning_gpuopt.recorder.ring import AT, DOING, ENDED, HEADER_BYTES, MAX_WORKERS, reading_in, record_of, slot_line
from lightning_gpuopt.recorder.ring_file import RingFile
from lightning_gpuopt.recorder.stacks import StackWriter, answers_in, start_ticks
from lightning_gpuopt.recorder.worker import (
    BEAT_S,
    Reading,
    WorkerStart,
    described,
    note_fetches,
    note_samples_of_ours,
    place_of,
    place_of_methods,
)
from lightning_gpuopt.timeline.frames import innermost_frames, is_in_loader
from lightning_gpuopt.timeline.slot_clock import SlotClock

log = logging.getLogger(__name__)

_BEATS_A_SECOND: Final = round(1 / BEAT_S)
_RESERVED: Final = 32
"""Rings kept for each loader: as many workers may be added to it while it runs."""

_JOB: Final = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
)
"""Variables that are the same for all ranks of a run, and other in the next one."""

_METHODS: Final = {"forward": ["training_step"], "validation": ["validation_step"]}
"""Where the user's own code of a phase begins."""

_DOING: Final = AT["doing"]
_SLOT: Final = AT["slot"]
_SINCE: Final = AT["since_ns"]
_STEPS: Final = AT["steps"]
_PROGRESS: Final = AT["progress_ns"]
_LONGEST: Final = AT["longest_ns"]
_SETS_UP, _TRAINS, _VALIDATES, _SAVES = (DOING.index(each) for each in (SETS_UP, TRAINS, VALIDATES, SAVES))

_MAX_END_S: Final = 10.0
"""The end of ``fit`` is held up no longer, whatever a file system does."""

_DEATH_POLLS: Final = 100
_DEATH_POLL_S: Final = 0.025

_BY_ITS_LOADER: Final = {"signal": int(signal.SIGTERM)}
"""How a loader ends a worker that does not end by itself."""

_fits = 0


class FlightRecorder:
    """Records one ``fit``, from its set-up to its end.

    Args:
        trainer: the Trainer, in ``setup``.
        folder: where rings are written to; None: nowhere. Under ``watch`` they go to its folder.

    Attributes:
        each_second: called on the recorder's thread.
        memory: what has been read of memory.

    Raises:
        OSError: there is no memory for rings, as on other systems than Linux.
    """

    def __init__(self, trainer: Trainer, folder: Path | None) -> None:
        global _fits
        _fits += 1
        self.each_second: Callable[[], None] = lambda: None
        self._trainer: Callable[[], Trainer | None] = weakref.ref(trainer)
        self._board = Board()
        self._ring = self._board.rank
        self._numbers = self._ring.numbers
        self._main = threading.get_ident()
        self._beats = 0
        self._timeline: SlotClock | None = None
        self._slots: dict[int, str] = {}
        self._named = 0
        self._owners: Sequence[object] = ()
        self._words: dict[str, str] = {}
        self._signalled = False
        self._names: weakref.WeakKeyDictionary[SeenLoader, str] = weakref.WeakKeyDictionary()
        self._iterators: dict[str, Callable[[], Any]] = {}
        self._workers: dict[int, tuple[str, int, Any]] = {}
        self._dead: set[int] = set()
        self._ended_by_loaders: list[dict[str, Any]] = []
        self._reading: Reading | None = None
        self._stop = threading.Event()
        self._stacks: StackWriter | None = None
        self._file: RingFile | None = None
        host, pid, rank = socket.gethostname(), os.getpid(), trainer.global_rank
        run = f"{_job(trainer.world_size) or f'{host}-{pid}'}-{_fits}"
        watcher = Watcher.of_this_process()
        local = Path(watcher.folder) if watcher is not None else folder
        if local is not None:
            self._open_files(local / f"rank-{rank}-{host}-{pid}-{_fits}{SUFFIX}", run, rank)
        stacks = self._stacks
        self._known = {"host": host, "run": run, "stacks": stacks.path if stacks is not None else ""}
        place = place_of_methods(("training_step",), trainer.lightning_module)
        self._ids = {"rank": rank, "world_size": trainer.world_size}
        now = time.monotonic_ns()
        self._ring.begin(
            {**self._known, "place": place},
            **self._ids,
            pid=pid,
            start_ticks=start_ticks(),
            doing=_SETS_UP,
            since_ns=now,
            progress_ns=now,
            written_ns=now,
            stack_signal=stacks.signal if stacks is not None else 0,
        )
        if watcher is not None:
            watcher.give(self._board.file)
        self._write_file()
        self.memory = MemoryLog(self._board, trainer.strategy.root_device)
        self._unsubscribe = LoaderRegistry.of(trainer).subscribe(self, trainer)
        note_samples_of_ours(self._ring)
        self._thread = threading.Thread(target=self._run, name="gpuopt-recorder", daemon=True)
        self._thread.start()

    def _open_files(self, path: Path, run: str, rank: int) -> None:
        """Without files it goes on in memory: under ``watch`` that is enough."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for earlier in path.parent.glob(f"rank-*{SUFFIX}"):
                record = record_of(earlier.read_bytes()[:HEADER_BYTES])
                if record is not None and (record.run, record.rank) == (run, rank):
                    remove(earlier)  # of a job that has started again under the same name
            self._stacks = StackWriter(str(path.with_suffix(STACKS_SUFFIX).absolute()))
            self._file = RingFile(path, self._board)
        except OSError:
            log.debug("no rings are written to %s", path.parent, exc_info=True)

    # ---- what the training thread does ----

    def step_done(self) -> None:
        """A training batch was finished."""
        numbers = self._numbers
        now = time.monotonic_ns()
        waited = now - numbers[_PROGRESS]
        if waited > numbers[_LONGEST]:
            numbers[_LONGEST] = waited
        numbers[_PROGRESS] = now
        numbers[_STEPS] += 1
        numbers[_DOING] = _TRAINS

    def progress(self, doing: Doing) -> None:
        """Something was finished, and something else begins.

        Args:
            doing: what begins.
        """
        numbers = self._numbers
        now = time.monotonic_ns()
        numbers[_LONGEST] = max(numbers[_LONGEST], now - numbers[_PROGRESS])
        numbers[_PROGRESS] = numbers[_SINCE] = now
        numbers[_DOING] = DOING.index(doing)

    def begins(self, doing: Doing) -> None:
        """Something begins, and nothing was finished.

        Args:
            doing: what.
        """
        self._numbers[_SINCE] = time.monotonic_ns()
        self._numbers[_DOING] = DOING.index(doing)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around the save of a checkpoint."""
        before = DOING[self._numbers[_DOING]]
        self.begins(SAVES)
        try:
            yield
        finally:
            self.progress(before)

    def follow(self, timeline: SlotClock, owners: Sequence[object]) -> None:
        """Keep which slot of a timeline is open: of the places that were seen, the one in that slot is where it died.

        Args:
            timeline: of the training thread.
            owners: the callbacks, and whoever else has hooks of the user's own; the module last.
        """
        self._owners = owners
        self._name_slots(timeline)
        self._timeline = timeline  # from here on the recorder's thread names them
        self._numbers[_SLOT] = timeline.shown[0]
        timeline.shown = self._numbers[_SLOT : _SLOT + 1]

    def forget(self, timeline: SlotClock) -> None:
        """The timeline has ended."""
        timeline.shown = [0]
        self._timeline, self._numbers[_SLOT], self._owners = None, -1, ()

    def _name_slots(self, timeline: SlotClock) -> None:
        """Note the names of slots that are new, and where the user's own code of them begins."""
        for slot in range(self._named, timeline.slots):
            if slot in timeline.pauses.kinds:  # never open
                continue
            name = timeline.name_of(slot)
            owner, _, hook = name.rpartition(".")
            hooks = [hook] if owner else _METHODS.get(name, [])
            owners = [each for each in self._owners if owner in ("", type(each).__name__)]
            self._slots[slot] = slot_line(slot, name, place_of_methods(hooks, *owners))
        self._named = timeline.slots

    def note(self, event: str, **known: Any) -> None:
        """Log an event.

        Args:
            event: one of :data:`~lightning_gpuopt.measurements.flight.EVENTS`.
            **known: what JSON can hold.
        """
        self._ring.log(event, **known)

    @property
    def steps(self) -> int:
        """Training batches that have been finished."""
        return self._numbers[_STEPS]

    def is_forked(self, slot: int) -> bool:
        """Whether the worker of a ring was forked."""
        return bool(self._board.worker(slot).numbers[AT["fork"]])

    def leak_of(self, slot: int) -> str:
        """What grows in the worker of a ring, for people; empty where nothing is known to."""
        return self._board.worker(slot).read("leak")

    # ---- loaders ----

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
        """Have the next iterator's workers begin their rings; returns the undo, None where there is nothing to do."""
        loader: Any = seen.inner
        before = loader.worker_init_fn
        if self._stop.is_set() or not loader.num_workers or isinstance(before, WorkerStart):
            return None
        name = self._name_of(seen)
        for worker in range(max(loader.num_workers, _RESERVED)):
            self._board.slot(name, worker)
        loader.worker_init_fn = WorkerStart(before, self._board, name, self._known, self._ids, self._stacks)

        def undo() -> None:
            loader.worker_init_fn = before

        return undo

    def _started(self, seen: SeenLoader, iterator: Any, *, recorded: bool) -> None:
        if not recorded:
            fetcher = fetcher_of(iterator)
            if fetcher is not None and not self._stop.is_set():
                self._reading = note_fetches(fetcher, self._ring, whole=False)
            return
        name = self._name_of(seen)
        with contextlib.suppress(TypeError):  # an iterator without a place for weak references
            self._iterators[name] = weakref.ref(iterator)
        self._find_workers(name, iterator)

    def _name_of(self, seen: SeenLoader) -> str:
        if seen not in self._names:
            kind = "train" if seen.is_training else "validation"
            taken = set(self._names.values())
            names = [kind, *(f"{kind}-{number}" for number in range(1, MAX_WORKERS))]
            self._names[seen] = next(each for each in names if each not in taken)
        return self._names[seen]

    def _find_workers(self, name: str, iterator: Any) -> None:
        for worker, process in enumerate(workers_of(iterator)):
            slot = self._board.slot(name, worker)
            if slot is not None and (slot not in self._workers or self._workers[slot][2] is not process):
                self._workers[slot] = (name, worker, process)
                self._dead.discard(slot)

    # ---- beside the training thread ----

    def _run(self) -> None:
        while not self._stop.wait(BEAT_S):
            try:
                self.beat()
            except Exception:
                log.debug("a beat of the flight recorder failed", exc_info=True)

    def beat(self) -> None:
        """Note what can be seen from outside of the training thread."""
        self._beats += 1
        if (trainer := self._trainer()) is None:
            return
        self._numbers[AT["written_ns"]] = time.monotonic_ns()
        slot = self._numbers[_SLOT]
        frame = innermost_frames().get(self._main)
        reads = is_in_loader(frame)
        if place := place_of(frame):  # while it waits for a batch, its last one stays
            self._write("place", place)
        if (timeline := self._timeline) is not None:
            self._name_slots(timeline)
            if place and slot == self._numbers[_SLOT] >= 0:
                key = slot if not reads else reading_in(slot)
                self._slots[key] = slot_line(key, timeline.name_of(slot), place)
            self._write("slots", "\n".join(self._slots.values()))
        self._numbers[AT["turn"]] = self._turn() if reads else 0
        del frame
        epoch, batch, batches = place_in_epoch(trainer)
        self._numbers[AT["epoch"]], self._numbers[AT["batch"]] = epoch, batch
        self._numbers[AT["batches"]] = -1 if batches is None else batches
        if not self._signalled and getattr(trainer, "received_sigterm", False):
            self._signalled = True
            self._ring.log("signal", signal=int(signal.SIGTERM))
        if self._reading is not None:
            self._reading.show()
        self.look_at_workers()
        if self._beats % _BEATS_A_SECOND == 0:
            self.memory.read(_mapped(self._living()))
            self._write_file()
            if self._stacks is not None and self._stacks.is_asked_for():
                self._ask_workers()
                if entries := nccl_entries():
                    self._ring.log("collective", entries=entries)
                self._stacks.write(self._main)
            self.each_second()

    def _ask_workers(self) -> None:
        for slot, _ in self._living():
            self._board.worker(slot).numbers[AT["asked"]] += 1

    def _write_file(self) -> None:
        if self._file is not None:
            self._file.write()

    def _write(self, name: str, word: str) -> None:
        if self._words.get(name) != word:
            self._words[name] = word
            self._ring.write(name, word)

    def _turn(self) -> int:
        """1 + the worker whose batch the loop waits for; 0 where it waits for none."""
        kind = "validation" if self._numbers[_DOING] == _VALIDATES else "train"
        for name, behind in list(self._iterators.items()):
            iterator = behind()
            if iterator is None or not name.startswith(kind) or not has_queues(iterator):
                continue
            if self._beats % _BEATS_A_SECOND == 0:
                self._find_workers(name, iterator)  # some may have been added
            if (worker := awaited_worker(iterator)) is not None:
                return worker + 1
        return 0

    def _living(self) -> list[tuple[int, tuple[str, int, Any]]]:
        return [(slot, each) for slot, each in list(self._workers.items()) if slot not in self._dead]

    def look_at_workers(self) -> None:
        """Note which workers have died, and how, without taking that from whoever waits for them."""
        for slot, (loader, worker, process) in self._living():
            ended = _end_of(process)
            if ended is None:
                continue
            self._dead.add(slot)
            death = {"worker": worker, "loader": loader, "pid": process.pid, **ended}
            if ended == _BY_ITS_LOADER:
                self._ended_by_loaders.append(death)
            elif ended != {"code": 0}:
                self._ring.log("worker_died", **death)

    def stacks_of_workers(self) -> dict[int, str]:
        """The stacks of the workers that run, by process id; they write them, without being disturbed otherwise."""
        if self._stacks is None:
            return {}
        path = self._stacks.path
        before = os.path.getsize(path)
        self._ask_workers()
        return answers_in({path: before}, {process.pid for _, (_, _, process) in self._living()})

    # ---- the end ----

    def failed(self, error: BaseException) -> None:
        """``fit`` ends by an exception; called in its hook, where workers may have died without our notice.

        On a thread of its own: where a worker dies, torch's handler of SIGCHLD raises in the main one, wherever it is.
        """
        if self._stop.is_set():
            return
        recording = threading.Thread(target=self._record_failure, args=(error,), daemon=True)
        end_s = time.monotonic() + _MAX_END_S
        while time.monotonic() < end_s:
            try:
                if recording.ident is None:
                    recording.start()
                recording.join(_MAX_END_S)
                return
            except Exception:  # torch's: what it says of a worker is recorded
                continue

    def _record_failure(self, error: BaseException) -> None:
        for part in (
            lambda: self._await_death(error),
            lambda: self.memory.read(_mapped(self._workers.items())),  # the dead ones keep what was read of them
            lambda: self._ring.log("exception", **described(error)),
            lambda: self._close(ENDED.index("exception")),
        ):
            try:
                part()
            except Exception:
                log.debug("a part of the end was not recorded", exc_info=True)

    def _await_death(self, error: BaseException) -> None:
        """See which worker has died. What it leaves open is closed before its parent can see its end."""
        from_worker = isinstance(error, (ConnectionError, EOFError)) or "DataLoader worker" in str(error)
        for _ in range(_DEATH_POLLS if from_worker and self._workers else 1):
            for _, (_, _, process) in self._living():
                with contextlib.suppress(ValueError, AssertionError):  # its loader has let go of it
                    _ = process.exitcode
            self.look_at_workers()
            if self._dead:
                break
            time.sleep(_DEATH_POLL_S if from_worker else 0.0)
        if from_worker:
            for death in self._ended_by_loaders:
                self._ring.log("worker_died", **death)

    def ended(self) -> None:
        """``fit`` has ended well: nothing is kept. May be called more than once, also after :meth:`failed`."""
        with contextlib.suppress(Exception):
            if self._close(ENDED.index("ok")) and self._file is not None:
                self._remove_rings(self._file.path)

    def _remove_rings(self, own: Path) -> None:
        """Remove the rings of all ranks, once all have ended well: while others run, how this one ended may matter."""
        rings = {}
        for path in own.parent.glob(f"rank-*{SUFFIX}"):
            with contextlib.suppress(OSError):
                record = record_of(path.read_bytes()[:HEADER_BYTES])
                if record is not None and record.run == self._known["run"]:
                    rings[path] = record.ended
        if all(ended == "ok" for ended in rings.values()):
            for path in rings:
                remove(path)

    def _close(self, ended: int) -> bool:
        """Stop recording; False where that was done before."""
        if self._stop.is_set():
            return False
        self._stop.set()
        self._thread.join(timeout=3.0)
        self._unsubscribe()
        note_samples_of_ours(None)
        self._numbers[AT["ended"]] = ended
        self._numbers[AT["written_ns"]] = time.monotonic_ns()
        self._workers.clear()
        if self._thread.is_alive():  # in a write that does not return: what it has open must not become another file
            return True
        if self._file is not None:
            self._file.write()
            self._file.close()
        if self._stacks is not None:
            self._stacks.close()
        self._board.close()
        return True


def _job(world_size: int) -> str:
    """What names a run of several ranks; empty for one of one rank."""
    return "-".join(os.environ[name] for name in _JOB if os.environ.get(name)) if world_size > 1 else ""


def _mapped(workers: Iterable[tuple[int, tuple[str, int, Any]]]) -> dict[int, tuple[int, str, int]]:
    """Process id, loader and number in it, by ring."""
    return {slot: (process.pid, loader, worker) for slot, (loader, worker, process) in list(workers)}


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
