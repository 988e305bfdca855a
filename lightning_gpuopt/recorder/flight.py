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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from lightning_gpuopt.compat.lightning import Trainer, is_good_end, shadow, stage_runner
from lightning_gpuopt.compat.lightning_loops import place_in_epoch
from lightning_gpuopt.compat.torch_internals import nccl_entries
from lightning_gpuopt.loaders.registry import LoaderRegistry
from lightning_gpuopt.measurements.flight import SAVES, SETS_UP, TRAINS, VALIDATES, Doing
from lightning_gpuopt.recorder.after_fit import watch_for_the_end
from lightning_gpuopt.recorder.board import Board
from lightning_gpuopt.recorder.code_places import described, place_of, place_of_methods
from lightning_gpuopt.recorder.handover import Watcher
from lightning_gpuopt.recorder.loader_workers import LoaderWorkers
from lightning_gpuopt.recorder.memory_series import MemoryLog
from lightning_gpuopt.recorder.rank_files import MAX_WAIT_S, RankFiles
from lightning_gpuopt.recorder.ring import AT, DOING, ENDED, reading_in, slot_line
from lightning_gpuopt.recorder.ring_reader import SUFFIX
from lightning_gpuopt.recorder.sample_notes import note_samples_of_ours
from lightning_gpuopt.recorder.stacks import answers_in, start_ticks
from lightning_gpuopt.recorder.worker import BEAT_S
from lightning_gpuopt.timeline.frames import innermost_frames, is_in_loader
from lightning_gpuopt.timeline.slot_clock import SlotClock
from lightning_gpuopt.utils.replaced_method import Replacement
from lightning_gpuopt.utils.time_limit import undisturbed, within

log = logging.getLogger(__name__)

_BEATS_A_SECOND: Final = round(1 / BEAT_S)
# variables that are the same for all ranks of a run, and other in the next one
_JOB: Final = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
)
# where the user's own code of a phase begins
_METHODS: Final = {"forward": ["training_step"], "validation": ["validation_step"]}
_DOING, _SLOT, _SINCE = AT["doing"], AT["slot"], AT["since_ns"]
_STEPS, _PROGRESS, _LONGEST = AT["steps"], AT["progress_ns"], AT["longest_ns"]
_SETS_UP, _TRAINS, _VALIDATES, _SAVES = (DOING.index(each) for each in (SETS_UP, TRAINS, VALIDATES, SAVES))

# how many of a stage have been recorded in this process, by the ranks that take part: these count alike
_recorded: Counter[tuple[str, int]] = Counter()


_FETCHES: Final = "data_wait"
# the module's method for a batch, by the stage
_STEPS_OF: Final = {
    "fit": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}


class FlightRecorder:
    """Records one ``fit``, ``validate``, ``test`` or ``predict``; OSError: no memory for rings, as off Linux.

    Rings are written to ``folder`` (None: nowhere), under ``watch`` to its folder.
    """

    def __init__(self, trainer: Trainer, folder: Path | None, stage: str = "fit") -> None:
        which = stage, trainer.world_size
        _recorded[which] += 1
        number = f"{stage}-{_recorded[which]}"
        self.each_second: Callable[[], None] = lambda: None  # called on the recorder's thread
        self._trainer: Callable[[], Trainer | None] = weakref.ref(trainer)
        self._board = Board()
        self._ring = self._board.rank
        self._numbers = self._ring.numbers
        self._main = threading.get_ident()
        self._beats = 0
        self._timeline: SlotClock | None = None
        self._slots: dict[int, str] = {}
        self._name_of: Callable[[int], str] = (_FETCHES, stage).__getitem__
        self._named = 0
        self._owners: Sequence[object] = ()
        self._signalled = False
        self._stop, self._due = threading.Event(), threading.Event()
        host, pid, rank = socket.gethostname(), os.getpid(), trainer.global_rank
        run = f"{_job(trainer.world_size) or f'{host}-{pid}'}-{number}"
        watcher = Watcher.of_this_process()
        local = Path(watcher.folder) if watcher is not None else folder
        name = f"rank-{rank}-{host}-{pid}-{number}-{trainer.world_size}{SUFFIX}"
        self._files = RankFiles.open(local / name, run, rank, self._board) if local is not None else None
        self._stacks = stacks = self._files.stacks if self._files is not None else None
        words = {"host": host, "run": run, "stacks": stacks.path if stacks is not None else ""}
        ids = {"rank": rank, "world_size": trainer.world_size}
        place = place_of_methods((_STEPS_OF.get(stage, ""),), trainer.lightning_module)
        if stage != "fit":  # there is no timeline: before a batch, and in one
            self._slots = {0: slot_line(0, _FETCHES, ""), 1: slot_line(1, stage, place)}
        now = time.monotonic_ns()
        self._ring.begin(
            {**words, "slots": "\n".join(self._slots.values())},
            **ids,
            pid=pid,
            start_ticks=start_ticks(),
            doing=_SETS_UP,
            slot=-1 if stage == "fit" else 0,
            since_ns=now,
            progress_ns=now,
            written_ns=now,
            stack_signal=stacks.signal if stacks is not None else 0,
        )
        if watcher is not None:
            watcher.give(self._board.file)
        self.memory = MemoryLog(self._board, trainer.strategy.root_device)
        self._workers = LoaderWorkers(self._board, words, ids, stacks)
        self._unsubscribe = LoaderRegistry.of(trainer).subscribe(self._workers, trainer)
        self._leave_run = self._watch_stage(trainer)
        note_samples_of_ours(self._ring)
        self._thread = threading.Thread(target=self._run, name="gpuopt-recorder", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # no more threads, or no memory for one
            self._stop_recording(ENDED.index("ok"))
            if self._files is not None:
                self._files.close()
                self._files.remove()
            self._board.close()
            raise

    def _watch_stage(self, trainer: Trainer) -> Callable[[], None]:
        """See what ends it as that is raised: a callback may not be told, or may be kept from it by another one."""
        runner = stage_runner(trainer)
        if runner is None:
            return lambda: None
        name, run = runner

        def run_recorded() -> Any:
            try:
                return run()
            except BaseException as error:
                if not is_good_end(error):
                    self.failed(error)
                raise

        return shadow(trainer, name, Replacement(run, run_recorded))

    # ---- what the training thread does ----

    def step_done(self) -> None:
        numbers = self._numbers
        now = time.monotonic_ns()
        waited = now - numbers[_PROGRESS]
        if waited > numbers[_LONGEST]:
            numbers[_LONGEST] = waited
        numbers[_PROGRESS] = now
        numbers[_STEPS] += 1
        numbers[_DOING] = _TRAINS

    def batch_begins(self) -> None:
        """A batch of ``validate``, ``test`` or ``predict`` has come."""
        self.begins(VALIDATES)
        self._numbers[_SLOT] = 1

    def batch_ends(self) -> None:
        """It was finished: a step of these."""
        self.progress(VALIDATES)
        self._numbers[_STEPS] += 1
        self._numbers[_SLOT] = 0

    def progress(self, doing: Doing) -> None:
        """Something was finished, and ``doing`` begins."""
        numbers = self._numbers
        now = time.monotonic_ns()
        numbers[_LONGEST] = max(numbers[_LONGEST], now - numbers[_PROGRESS])
        numbers[_PROGRESS] = numbers[_SINCE] = now
        numbers[_DOING] = DOING.index(doing)

    def begins(self, doing: Doing) -> None:
        """``doing`` begins, and nothing was finished."""
        self._numbers[_SINCE] = time.monotonic_ns()
        self._numbers[_DOING] = DOING.index(doing)

    def hangs_after(self, timeout_s: float | None) -> None:
        """Note how long without progress is a hang, for who reads the ring; None: it is not looked for any more."""
        if self.goes_on:  # what has ended stays as it was
            self._numbers[AT["hang_ns"]] = int((timeout_s or 0.0) * 1e9)
            self._due.set()  # a call that keeps the interpreter's lock may come before the next beat

    def hang_begins(self) -> None:
        """Write the file: whoever ends the process now is to find the hang in it. Not on the training thread."""
        self._numbers[AT["written_ns"]] = time.monotonic_ns()
        self._write_file()

    @contextmanager
    def saving(self) -> Iterator[None]:
        before = DOING[self._numbers[_DOING]]
        self.begins(SAVES)
        yield
        self.progress(before)  # where it fails, nothing was finished

    def follow(self, timeline: SlotClock, owners: Sequence[object]) -> None:
        """Keep which slot of a timeline is open: of the places that were seen, the one in that slot is where it died.

        ``owners`` are the callbacks, and whoever else has hooks of the user's own; the module last.
        """
        self._owners = owners
        self._name_slots(timeline)
        self._ring.show("slots", "\n".join(self._slots.values()))  # it may end before the next beat
        self._name_of = timeline.name_of
        self._timeline = timeline  # from here on the recorder's thread names them
        self._numbers[_SLOT] = timeline.shown[0]
        timeline.shown = self._numbers[_SLOT : _SLOT + 1]

    def forget(self, timeline: SlotClock) -> None:
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
        """Log one of :data:`~lightning_gpuopt.measurements.flight.EVENTS`, with what JSON can hold."""
        self._ring.log(event, **known)

    @property
    def goes_on(self) -> bool:
        return not self._stop.is_set()

    @property
    def steps(self) -> int:
        return self._numbers[_STEPS]

    def is_forked(self, slot: int) -> bool:
        return bool(self._board.worker(slot).numbers[AT["fork"]])

    def leak_of(self, slot: int) -> tuple[str, float]:
        """What grows in the worker of a ring, for people, and its entries for each sample; empty if nothing does."""
        ring = self._board.worker(slot)
        return ring.read("leak"), ring.numbers[AT["keeps_per_mille"]] / 1000

    # ---- beside the training thread ----

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            self.memory.read({})  # before anything can end this process
        self._write_file()  # not on the training thread: a file system may not answer
        while True:
            due = self._due.wait(BEAT_S)
            self._due.clear()
            if self._stop.is_set():
                return
            try:
                self.beat()
                if due:
                    self._write_file()
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
            self._ring.show("place", place)
        if (timeline := self._timeline) is not None:
            self._name_slots(timeline)
        if place and slot == self._numbers[_SLOT] >= 0:
            key = slot if not reads else reading_in(slot)
            self._slots[key] = slot_line(key, self._name_of(slot), place)
        self._ring.show("slots", "\n".join(self._slots.values()))
        each_second = self._beats % _BEATS_A_SECOND == 0
        kind = "validation" if self._numbers[_DOING] == _VALIDATES else "train"
        self._numbers[AT["turn"]] = self._workers.turn(kind, look_for_new=each_second) if reads else 0
        del frame
        epoch, batch, batches = place_in_epoch(trainer)
        self._numbers[AT["epoch"]], self._numbers[AT["batch"]] = epoch, batch
        self._numbers[AT["batches"]] = -1 if batches is None else batches
        if not self._signalled and getattr(trainer, "received_sigterm", False):
            self._signalled = True
            self._ring.log("signal", signal=int(signal.SIGTERM))
        if self._workers.reading is not None:
            self._workers.reading.show()
        self._workers.look()
        if each_second or self.memory.is_used_up():
            self.memory.read(self._workers.living)
        if each_second:
            self._write_file()
            if self._stacks is not None and self._stacks.is_asked_for():
                self._workers.ask_for_stacks()
                if entries := nccl_entries():
                    self._ring.log("collective", entries=entries)
                self._stacks.write(self._main)
            self.each_second()

    def _write_file(self) -> None:
        if self._files is not None:
            self._files.write()

    def stacks_of_workers(self) -> dict[int, str]:
        """The stacks of the workers that run, by process id; they write them, without being disturbed otherwise."""
        if self._stacks is None:
            return {}
        path = self._stacks.path
        before = os.path.getsize(path)
        self._workers.ask_for_stacks()
        return answers_in({path: before}, {pid for pid, _, _ in self._workers.living.values()})

    # ---- the end ----

    def failed(self, error: BaseException) -> None:
        """``fit`` ends by an exception; called as it is raised, when workers may have died without our notice.

        On a thread of its own: where a worker dies, torch's handler of SIGCHLD raises in the main one, wherever it is.
        """
        if self._stop.is_set():
            return
        self._stop.set()  # where a beat would look now, the loops have been left
        with contextlib.suppress(Exception):  # whatever goes wrong, fit ends by its own exception
            undisturbed(
                MAX_WAIT_S, lambda: self._record_failure(error), lambda raised: "DataLoader worker (pid" in str(raised)
            )

    def _record_failure(self, error: BaseException) -> None:
        known = described(error)
        parts: tuple[Callable[[], object], ...] = (
            lambda: self._workers.await_death(known["message"], (known["frames"] or [""])[-1]),
            lambda: self.memory.read(self._workers.all),  # the dead ones keep what was read of them
            lambda: self._ring.log("exception", **known),
            lambda: watch_for_the_end(self._ring, known),
            lambda: self._stop_recording(ENDED.index("exception")),
            self._close,
        )
        for part in parts:
            try:
                part()
            except Exception:
                log.debug("a part of the end was not recorded", exc_info=True)

    def ended(self) -> None:
        """``fit`` has ended well: nothing is kept. May be called more than once, also after :meth:`failed`."""
        if self._stop.is_set():
            return
        self._stop_recording(ENDED.index("ok"))
        with contextlib.suppress(Exception):
            within(MAX_WAIT_S, lambda _: self._close(remove=True), clean_up_s=0.0)

    def _stop_recording(self, ended: int) -> None:
        self._stop.set()
        self._due.set()
        self._unsubscribe()
        self._leave_run()
        note_samples_of_ours(None)
        self._numbers[AT["ended"]] = ended
        self._numbers[AT["written_ns"]] = time.monotonic_ns()
        self._workers.stop()

    def _close(self, *, remove: bool = False) -> None:
        self._thread.join(timeout=3.0)
        if self._thread.is_alive():  # in a write that does not return: what it has open must not become another file
            return
        if self._files is not None:
            self._files.write()
            self._files.close()
            if remove:
                self._files.remove()
        self._board.close()


def _job(world_size: int) -> str:
    """What names a run of several ranks; empty for one of one rank."""
    return "-".join(os.environ[name] for name in _JOB if os.environ.get(name)) if world_size > 1 else ""
