"""How a process of a run ended, as plain data, and what its events say of that."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from lightning_gpuopt.measurements.flight import FlightRecord
from lightning_gpuopt.postmortem.record import Process
from lightning_gpuopt.postmortem.stacks import crashed_thread, own_frame

# it has a reason of its own: an exception, a signal that faulthandler or the parent named, an exit code
PLAIN: Final = 0
SILENT: Final = 1  # the process vanished without a word
# an exception that another process's end causes: a lost connection, a time-out of a collective, SIGTERM
ECHO: Final = 2
WRITES_EVERY_S: Final = 0.5  # a process that is alive has written within this time
SOON_S: Final = 30.0  # a worker's death is what ended its rank if that ended so soon after it
# a process that was told to end is killed at last: so long after the signal it is still the signal that ended it
GRACE_S: Final = 60.0
# exceptions that Lightning, or Python, makes an exit code of
ENDS_BY_ITSELF: Final = ("KeyboardInterrupt", "SIGTERMException", "SystemExit")
# signals that are sent to all processes of a run; a worker's end by one is not the worker's own
TO_ALL: Final = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
_FILE: Final = re.compile(r"\((?P<file>.*):\d+\)$")
# what gloo, NCCL and torch's stores say where another rank has gone, or does not come
_LOST: Final = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|connection lost|broken pipe|(reset|closed) by (remote )?peer|"
    r"\bnccl(Remote|System|Internal)Error|NCCL (communicator|watchdog|timeout)|gloo.*(timed? ?out|op\.preamble)|"
    r"timed out (waiting|after) .*(recv|send|operation|client|rank|collective)|socket time-?out|wait timeout after|"
    r"watchdog caught collective|collective operation timeout|monitoredBarrier|DistStoreError|DistNetworkError|"
    r"failed to (connect|recv|send).*(store|peer|rank)|store.*timed? ?out|op\.preamble\.length|EnforceNotMet|"
    r"caused pair closure",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True)
class CommandEnd:
    code: int  # its exit code; where a signal has ended it, minus that signal's number
    at_s: float  # Unix time
    # processes of our own cgroup that the kernel ended for want of memory while it ran; None: not readable
    oom_kills: int | None = None
    signals: tuple[int, ...] = ()  # numbers of the signals that were sent to it while it ran
    pid: int | None = None  # tells whether the code is a rank's own, or a launcher's; None: not known
    host: str | None = None  # name of the machine that it ran on; None: not known

    def is_of(self, rank: FlightRecord) -> bool:
        """Whether the command is a rank's own process."""
        return self.pid == rank.pid and self.host in (None, rank.host)


@dataclass(frozen=True)
class ProcessEnd:
    """How a rank has ended, as the kernel said while its parent had not asked."""

    code: int  # its exit code; where a signal has ended it, minus that signal's number
    at_s: float  # Unix time


@dataclass(frozen=True)
class Death:
    process: Process  # the one that it began with: the rank, or a worker of it
    rank: FlightRecord  # record of the rank
    record: FlightRecord | None  # of the process; None if there is none
    at_s: float  # Unix time; of a process that vanished, when it last wrote
    kind: int = PLAIN  # ``PLAIN``, ``SILENT`` or ``ECHO``
    signal: int | None = None  # what ended the process; None: none did, or not known
    code: int | None = None  # its exit code; None likewise
    error: Mapping[str, Any] | None = None  # the event of the exception; empty if there was none
    where: str | None = None  # the line that it was at; None: not known
    index: int | str | None = None  # the sample that it read; None: not known
    # an exception that had ended ``fit`` before, after which the script went on
    caught: Mapping[str, Any] | None = None

    @property
    def host(self) -> str:
        return self.rank.host


def exception_in(record: FlightRecord, rank: FlightRecord, error: Mapping[str, Any]) -> Death:
    """An exception, by its event, as what ended a rank."""
    kind = type_of(error)
    text = f"{error.get('type', '')}: {error.get('message', '')}"
    echo = kind == "SIGTERMException" or (record.worker is None and _LOST.search(text) is not None)
    frames = error.get("frames")
    innermost = str(frames[-1]) if isinstance(frames, (list, tuple)) and frames else ""
    return Death(
        process=Process.of(record),
        rank=rank,
        record=record,
        at_s=time_of(error) or record.written_s,
        kind=ECHO if echo else PLAIN,
        error=error,
        where=str(error.get("where") or "") or innermost or record.place or None,
        index=error.get("index", record.index),
    )


def errors_of(record: FlightRecord) -> list[Mapping[str, Any]]:
    """Exceptions of a process; of a training process that has not ended, recent ones: a read may be tried again."""
    since_s = record.written_s - GRACE_S if record.worker is None and not record.ended else 0.0
    return [each for each in record.events if each.get("event") == "exception" and time_of(each) >= since_s]


def time_of(event: Mapping[str, Any]) -> float:
    """When it was, as Unix time in seconds; 0 if that is not known."""
    at_s = event.get("t")
    return float(at_s) if isinstance(at_s, (int, float)) else 0.0


def type_of(error: Mapping[str, Any]) -> str:
    """The class of an exception, without its module."""
    return str(error.get("type", "")).rpartition(".")[2]


def raised_in(error: Mapping[str, Any]) -> str:
    """The file of the innermost frame, as messages name it; empty if it is not known."""
    frames = error.get("frames") or ("",)
    found = _FILE.search(str(frames[-1]))
    return found["file"] if found else ""


def place_of(record: FlightRecord | None) -> str | None:
    """The line that a process was at: as faulthandler says in a crash, else where it was last seen."""
    if record is None:
        return None
    frame = own_frame(crashed_thread(record.crash)) if record.crash else None
    return (frame.at(record.place, record.reads) if frame else record.place) or None
