"""What ``watch`` does for runs that die or hang: it holds the rings of all processes, looks for hangs, and judges."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from typing_extensions import override

from lightning_gpuopt.measurements.flight import FlightRecord
from lightning_gpuopt.postmortem.analysis import post_mortem_of
from lightning_gpuopt.postmortem.hangs import Hang, hang_of
from lightning_gpuopt.postmortem.process_end import CommandEnd
from lightning_gpuopt.postmortem.record import FILE, PostMortem
from lightning_gpuopt.recorder import ring_reader
from lightning_gpuopt.recorder.handover import Taker, Watcher
from lightning_gpuopt.recorder.stacks import ask, wait_of
from lightning_gpuopt.telemetry.memory import MemoryFiles
from lightning_gpuopt.watch.child import ChildWatcher
from lightning_gpuopt.watch.rank_ends import RankEnds

log = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 1.0
_LOOK_AT_MOST_EVERY_S: Final = 0.01
# ends of a ``fit`` after which a script's exit code is 0, since Lightning handles the signal
_TOLD_TO_END: Final = ("terminated", "interrupted")
# rings held at once, of a script that fits again and again; beyond it the oldest go, whose processes are gone
_MAX_HELD: Final = 512


class FlightWatch(ChildWatcher):
    """Watches the processes of a command, on a thread of its own, from its start to its end."""

    def __init__(
        self,
        folder: Path,
        say: Callable[[str], None],
        hang_of: Callable[[Sequence[FlightRecord], float], Hang | None] = hang_of,
    ) -> None:
        self._folder = folder
        self._say = say
        self._hang_of = hang_of
        self._files = MemoryFiles()
        self._oom_kills = self._files.oom_kills()
        self._held: list[int] = []
        self._pid: int | None = None
        self._signals: list[int] = []
        self._hang: Hang | None = None
        self._hangs = 0
        self._ended_well_s = 0.0
        self._stacks: dict[int, str] = {}
        self._waits: dict[int, str] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._taker: Taker | None = None
        with contextlib.suppress(OSError):
            self._taker = Taker()
        self._ends = RankEnds(self._taker.file if self._taker is not None else None)

    def environment(self, before: Mapping[str, str]) -> dict[str, str]:
        """The environment of the command, with what it has besides."""
        address = self._taker.address if self._taker is not None else ""
        return Watcher(str(self._folder / ring_reader.FOLDER), address).environment(before)

    @override
    def started(self, pid: int) -> None:
        self._pid = pid
        self._thread = threading.Thread(target=self._run, name="gpuopt-flight-watch", daemon=True)
        self._thread.start()

    @override
    def signalled(self, number: int) -> None:
        self._signals.append(number)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._ends.wait(_LOOK_EVERY_S)
                self.look(time.time())
                self._stop.wait(_LOOK_AT_MOST_EVERY_S)
            except Exception:
                log.debug("the processes could not be inspected", exc_info=True)
                self._stop.wait(_LOOK_EVERY_S)

    def look(self, now_s: float) -> None:
        """Take new rings, let go of those of fits that ended well, and look for a hang; in Unix time, seconds."""
        self._take()
        heads = {file: record for file in self._held if (record := ring_reader.headers_in(file)) is not None}
        going = {record.run for record in heads.values() if record.ended != "ok"}
        for file, record in heads.items():
            if record.run not in going:  # all its ranks have ended well
                self._ended_well_s = max(self._ended_well_s, record.written_s)
                self._held.remove(file)
                os.close(file)
        ranks = [each for each in heads.values() if each.run in going and ring_reader.is_alive(each)]
        self._ends.watch(ranks)
        hang = self._hang_of(ranks, now_s)
        if hang is None and self._hang is not None and ranks:  # it was overcome
            self._hang = None
            self._stacks, self._waits = {}, {}
        elif hang is not None and self._hang is None:
            self._hang = hang
            self._report(now_s)

    def _take(self) -> None:
        if self._taker is not None:
            self._held += self._taker.take()
        while len(self._held) > _MAX_HELD:
            os.close(self._held.pop(0))

    def _report(self, now_s: float) -> None:
        """Have all processes write their stacks, and say who holds up the run. Nothing is ended."""
        records = [each for each in self.records() if ring_reader.is_alive(each)]
        self._stacks = ask(records)
        self._waits = {each.pid: wait_of(each.pid) for each in records}
        found = self._judge(now_s, None)
        self._hangs += 1
        path = self._folder / f"hang-{self._hangs}.txt"
        stacks = "".join(f"\nStacks of process {pid}:\n\n{text}" for pid, text in self._stacks.items())
        try:
            path.write_text(f"{found.text}\n{stacks}", encoding="utf-8")
            found.save(self._folder / FILE)
            where = f"All stacks: {path}"
        except OSError as error:
            where = f"The stacks could not be written to {path}: {error.strerror}"
        self._say(f"lightning-gpuopt watch: {found.text}\n{where}. The command keeps waiting.")

    def records(self) -> list[FlightRecord]:
        """What is known of all processes: from the memory that is held, and from files of those on other machines."""
        found = []
        for file in self._held:
            with contextlib.suppress(OSError):
                found += ring_reader.records_of(file)
        held = {(each.host, each.pid, each.start_ticks) for each in found}
        return found + [
            each for each in ring_reader.records_in(self._folder) if (each.host, each.pid, each.start_ticks) not in held
        ]

    def _judge(self, now_s: float, command: CommandEnd | None) -> PostMortem:
        records = self.records()
        ranks = [each for each in records if each.worker is None and each.ended == "exception"]
        failed_s = min((each.written_s for each in ranks), default=0.0)  # who still runs elsewhere has written since

        def is_there(record: FlightRecord) -> bool:
            return ring_reader.is_alive(record) or (
                ring_reader.writes_elsewhere(record, now_s) and record.written_s >= failed_s
            )

        return post_mortem_of(
            records,
            now_s=now_s,
            is_alive=is_there,
            command=command,
            hang=self._hang,
            stacks=self._stacks,
            waits=self._waits,
            ends=self._ends.ends,
        )

    def finish(self, code: int) -> PostMortem | None:
        """Why the command ended with this exit code (negative: a signal's number); None if it ended well."""
        self._stop.set()
        self._ends.wake()
        if self._thread is not None:
            self._thread.join(timeout=10.0)
        self._take()
        now_s, kills = time.time(), self._files.oom_kills()
        rose = kills - self._oom_kills if kills is not None and self._oom_kills is not None else None
        try:
            found = self._judge(
                now_s, CommandEnd(code, now_s, rose, tuple(self._signals), self._pid, socket.gethostname())
            )
            if not code and not self._matters(found):
                self._remove_traces()
                return None
            with contextlib.suppress(OSError):  # it is printed all the same
                found.save(self._folder / FILE)
            return found
        finally:
            self.close()

    def _matters(self, found: PostMortem) -> bool:
        """Whether to tell what happened though the exit code is 0: another process ended, and no later one well.

        An exception that the script caught, and what the process does after ``fit``, is its own affair.
        """
        if found.ended in _TOLD_TO_END:
            return True
        process = found.process
        if found.ended == "ok" or process is None:
            return False
        own = [each for each in self.records() if (each.worker, each.rank) == (None, process.rank)]
        return all(each.pid != self._pid and not each.caught and each.written_s > self._ended_well_s for each in own)

    def _remove_traces(self) -> None:
        """The command ended well: nothing is left of a hang that was overcome, or a ``fit`` that was given up.

        What tells of a process that vanished without the command's notice stays, and of a run that goes on.
        """
        with contextlib.suppress(OSError):
            (self._folder / FILE).unlink(missing_ok=True)
        records = {
            path: record
            for path in ring_reader.ring_files(self._folder)
            if (record := ring_reader.header_in(path)) is not None
        }
        here = socket.gethostname()
        going = {each.run for each in records.values() if each.host != here or ring_reader.is_alive(each)}
        for path, record in records.items():
            if record.run not in going and (record.ended or record.pid == self._pid):
                with contextlib.suppress(OSError):
                    ring_reader.remove(path)

    def close(self) -> None:
        """Let go of everything; may be called more than once."""
        self._stop.set()
        if self._taker is not None:
            self._taker.close()
            self._taker = None
        if self._thread is None or not self._thread.is_alive():
            self._ends.close()
        while self._held:
            os.close(self._held.pop())
