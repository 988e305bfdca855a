"""What ended each rank, itself or one of its workers: from events, from what vanished, and from the exit code."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from lightning_gpuopt.measurements.flight import PIPE_FILES, FlightRecord
from lightning_gpuopt.postmortem.record import Process
from lightning_gpuopt.postmortem.stacks import crash_signal, crashed_thread, own_frame, traceback_frame

PLAIN: Final = 0
"""It has a reason of its own: an exception, a signal that faulthandler or the parent named, an exit code."""
SILENT: Final = 1
"""The process vanished without a word."""
ECHO: Final = 2
"""An exception that another process's end causes: a lost connection, a time-out of a collective, SIGTERM."""

_WRITES_EVERY_S: Final = 0.5
"""A process that is alive has written within this time."""

_SOON_S: Final = 30.0
"""A worker's death is what ended its rank if that ended so soon after it."""

_TEARDOWN_S: Final = 2.0
"""What ends a process so soon after an exception may be how it comes to its end."""

_NOT_HANDED_OVER: Final = ("SystemExit", "KeyboardInterrupt", "GeneratorExit")
"""Exceptions that end a worker: torch hands over what is an ``Exception``."""

_ENDS_BY_ITSELF: Final = ("KeyboardInterrupt", "SIGTERMException", "SystemExit")
"""Exceptions that Lightning, or Python, makes an exit code of."""

_GRACE_S: Final = 60.0
"""A process that was told to end is killed at last: so long after the signal it is still the signal that ended it."""

_TO_ALL: Final = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
"""Signals that are sent to all processes of a run; a worker's end by one is not the worker's own."""

_DIED: Final = re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\)")
_CAUGHT: Final = re.compile(r"Caught (?P<type>\w+) in DataLoader worker process (?P<worker>\d+)")
_FILE: Final = re.compile(r"\((?P<file>.*):\d+\)$")
_TIMED_OUT: Final = re.compile(r"DataLoader timed out after")
_BY_SIGNAL: Final = re.compile(r"is killed by signal: (?P<name>[\w ]+?)\s*(?:\.|$)", re.MULTILINE)
_WITH_CODE: Final = re.compile(r"exited unexpectedly with exit code (?P<code>-?\d+)")
_BROKEN_PIPES: Final = ("ConnectionResetError", "BrokenPipeError", "EOFError", "ConnectionRefusedError")
_LOST: Final = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|connection lost|broken pipe|(reset|closed) by (remote )?peer|"
    r"\bnccl(Remote|System|Internal)Error|NCCL (communicator|watchdog|timeout)|gloo.*(timed? ?out|op\.preamble)|"
    r"timed out (waiting|after) .*(recv|send|operation|client|rank|collective)|socket time-?out|wait timeout after|"
    r"watchdog caught collective|collective operation timeout|monitoredBarrier|DistStoreError|DistNetworkError|"
    r"failed to (connect|recv|send).*(store|peer|rank)|store.*timed? ?out|op\.preamble\.length|EnforceNotMet|"
    r"caused pair closure",
    re.IGNORECASE | re.DOTALL,
)
"""What gloo, NCCL and torch's stores say where another rank has gone, or does not come."""


@dataclass(frozen=True)
class CommandEnd:
    """How a watched command ended.

    Attributes:
        code: its exit code; where a signal has ended it, minus that signal's number.
        at_s: when, as Unix time in seconds.
        oom_kills: processes of our own cgroup that the kernel has ended for want of memory while it ran; None where
            that could not be read.
        signals: numbers of the signals that were sent to it while it ran.
        pid: its process id: tells whether the code is a rank's own, or a launcher's; None where that is not known.
        host: name of the machine that it ran on; None where that is not known.
    """

    code: int
    at_s: float
    oom_kills: int | None = None
    signals: tuple[int, ...] = ()
    pid: int | None = None
    host: str | None = None

    def is_of(self, rank: FlightRecord) -> bool:
        """Whether the command is a rank's own process."""
        return self.pid == rank.pid and self.host in (None, rank.host)


@dataclass(frozen=True)
class ProcessEnd:
    """How a rank has ended, as the kernel said while its parent had not asked.

    Attributes:
        code: its exit code; where a signal has ended it, minus that signal's number.
        at_s: when, as Unix time in seconds.
    """

    code: int
    at_s: float


@dataclass(frozen=True)
class Death:
    """What ended a rank.

    Attributes:
        process: the process that it began with: the rank, or a worker of it.
        rank: record of the rank.
        record: of the process; None where there is none.
        at_s: when, as Unix time in seconds; of a process that vanished, when it last wrote.
        kind: ``PLAIN``, ``SILENT`` or ``ECHO``.
        signal: what ended the process; None where none did, or that is not known.
        code: its exit code; None likewise.
        error: the event of the exception; empty where there was none.
        where: the line that it was at; None where that is not known.
        index: the sample that it read; None likewise.
        caught: an exception that had ended ``fit`` before, after which the script went on; None where there was none.
    """

    process: Process
    rank: FlightRecord
    record: FlightRecord | None
    at_s: float
    kind: int = PLAIN
    signal: int | None = None
    code: int | None = None
    error: Mapping[str, Any] | None = None
    where: str | None = None
    index: int | str | None = None
    caught: Mapping[str, Any] | None = None

    @property
    def host(self) -> str:
        """Name of its machine."""
        return self.rank.host


def deaths_of(
    records: Sequence[FlightRecord],
    is_alive: Callable[[FlightRecord], bool],
    command: CommandEnd | None,
    ends: Mapping[tuple[str, int], ProcessEnd] | None = None,
) -> list[Death]:
    """What ended each rank that has ended otherwise than well, the first of all at the beginning.

    Args:
        records: of one run.
        is_alive: whether a record's process is there.
        command: how the command ended; None where nobody watched.
        ends: of the ranks of which that is known, by machine and process id.
    """
    ranks = [record for record in records if record.worker is None]
    gone = [rank for rank in ranks if rank.ended == "" and not is_alive(rank) and not _errors(rank)]
    deaths = []
    for rank in ranks:
        workers = [each for each in records if each.worker is not None and each.rank == rank.rank]
        death = _of_rank(rank, workers, rank in gone, command)
        if death is None and rank in gone:
            death = _vanished(rank, command, gone, (ends or {}).get((rank.host, rank.pid)))
        if death is not None:
            deaths.append(death)
    return _in_order(deaths)


def _in_order(deaths: Sequence[Death]) -> list[Death]:
    """The first one to be seen for the cause, then the others by time."""
    best: Death | None = None
    for kind in (PLAIN, SILENT, ECHO):
        same = [each for each in deaths if each.kind == kind]
        if not same:
            continue
        first = min(same, key=lambda each: each.at_s)
        if kind == SILENT:  # Lightning's launcher kills rank 0 for another's end, not the other way round
            at_once = [each for each in same if each.at_s <= first.at_s + _WRITES_EVERY_S / 2]
            first = min(at_once, key=lambda each: (each.process.rank == 0, each.at_s))
        if best is None or first.at_s + _margin_s(first, best) < best.at_s:
            best = first
    return [] if best is None else [best, *sorted((d for d in deaths if d is not best), key=lambda each: each.at_s)]


def _margin_s(one: Death, other: Death) -> float:
    return _WRITES_EVERY_S + (2.0 if one.host != other.host else 0.0)  # clocks of two machines differ


def _errors(record: FlightRecord) -> list[Mapping[str, Any]]:
    """Exceptions of a process; of a training process that has not ended, recent ones: a read may be tried again."""
    since_s = record.written_s - _GRACE_S if record.worker is None and not record.ended else 0.0
    return [each for each in record.events if each.get("event") == "exception" and _time(each) >= since_s]


def _time(event: Mapping[str, Any]) -> float:
    at_s = event.get("t")
    return float(at_s) if isinstance(at_s, (int, float)) else 0.0


def _last_error(rank: FlightRecord) -> Mapping[str, Any] | None:
    """The exception that ended ``fit``, with the sample that it was raised for, where the rank reads them itself."""
    errors = _errors(rank)
    if not errors:
        return {} if rank.ended == "exception" else None
    last = errors[-1]
    what = last.get("type"), last.get("message")
    same = [each for each in errors if (each.get("type"), each.get("message")) == what]
    index = next((each["index"] for each in same if each.get("index") is not None), None)
    return last if index is None else {**last, "index": index}


def _of_rank(
    rank: FlightRecord, workers: Sequence[FlightRecord], gone: bool, command: CommandEnd | None
) -> Death | None:
    """What ended a rank, where it is known: a worker's death, an exception."""
    if rank.ended == "ok":
        return None
    error = _last_error(rank)
    if error is not None and (later := _after_it_was_caught(rank, error, command)) is not None:
        return later
    died = [death for at_s, death in _dead_workers(rank, workers, error) if _ended_rank(death, at_s, rank, error, gone)]
    if died:
        first = min(died, key=lambda each: each.at_s)
        return _to_all(first, rank, command) or first
    if error is None:
        return None
    return _worker_error(rank, workers, error) or exception_in(rank, rank, error)


def _after_it_was_caught(rank: FlightRecord, error: Mapping[str, Any], command: CommandEnd | None) -> Death | None:
    """How the command ended, where its script had caught the exception of ``fit``, and went on; None where not.

    Only for a run of one rank: of several, one that catches an exception waits for the others, or ends for them.
    """
    if command is None or not command.is_of(rank) or rank.world_size > 1 or rank.caught is False:
        return None
    if not rank.ended or _type(error) in _ENDS_BY_ITSELF or not command.code:
        return None
    after_s = command.at_s - (_time(error) or rank.written_s)
    by_signal = -command.code if command.code < 0 else None
    from_outside = by_signal == signal.SIGKILL or by_signal in _TO_ALL
    exits = rank.caught is True and command.code > 1  # 1 is also what those exit with who log an exception and end
    if after_s <= (_TEARDOWN_S if from_outside else _SOON_S) and not exits:
        return None
    return Death(
        process=Process(rank.rank, None, rank.pid),
        rank=rank,
        record=rank,
        at_s=command.at_s,
        kind=ECHO if by_signal in _TO_ALL else PLAIN,
        signal=by_signal,
        code=command.code if by_signal is None else None,
        caught=error,
    )


def exception_in(record: FlightRecord, rank: FlightRecord, error: Mapping[str, Any]) -> Death:
    """An exception as what ended a rank.

    Args:
        record: of the process that raised it.
        rank: of the rank.
        error: the event.
    """
    kind = _type(error)
    text = f"{error.get('type', '')}: {error.get('message', '')}"
    echo = kind == "SIGTERMException" or (record.worker is None and _LOST.search(text) is not None)
    frames = error.get("frames")
    innermost = str(frames[-1]) if isinstance(frames, (list, tuple)) and frames else ""
    index = error.get("index", record.index)
    process = Process(record.rank, record.worker, record.pid)
    return Death(
        process=process,
        rank=rank,
        record=record,
        at_s=_time(error) or record.written_s,
        kind=ECHO if echo else PLAIN,
        error=error,
        where=str(error.get("where") or "") or innermost or record.place or None,
        index=index,
    )


def _type(error: Mapping[str, Any]) -> str:
    return str(error.get("type", "")).rpartition(".")[2]


def _worker_error(rank: FlightRecord, workers: Sequence[FlightRecord], error: Mapping[str, Any]) -> Death | None:
    """The exception of a worker that its rank's exception repeats."""
    message = str(error.get("message", ""))
    if _TIMED_OUT.search(message) and (slow := _latest([each for each in workers if each.worker == rank.turn])):
        death = exception_in(slow, rank, {**error, "where": slow.place, "index": slow.index})
        return replace(death, kind=PLAIN)
    caught = _CAUGHT.search(message)
    number = int(caught["worker"]) if caught else None
    unmade = _raised_in(error) == "torch/_utils.py"  # one of its class could not be made from a text
    raised = [
        (_time(each), worker, each)
        for worker in workers
        for each in _errors(worker)
        if (_type(each) == caught["type"] and worker.worker == number if caught else _same(each, error) or unmade)
        and _type(each) != "KeyboardInterrupt"
        and _time(each) <= (_time(error) or rank.written_s) + _WRITES_EVERY_S
    ]
    if raised:
        _, worker, its = min(raised, key=lambda each: each[0])
        return exception_in(worker, rank, its)
    if caught is None:
        return None
    known = _latest([each for each in workers if each.worker == number])
    death = exception_in(known or rank, rank, {**error, "where": None, "frames": None})
    frame = traceback_frame(message)
    where = frame.at(known.place if known else "") if frame else (known.place if known else None) or None
    pid = known.pid if known else None
    return replace(death, process=Process(rank.rank, number, pid), where=where, kind=PLAIN)


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return (one.get("type"), one.get("message")) == (other.get("type"), other.get("message"))


def _latest(records: Sequence[FlightRecord]) -> FlightRecord | None:
    return max(records, key=lambda each: each.written_s, default=None)


def _dead_workers(
    rank: FlightRecord, workers: Sequence[FlightRecord], error: Mapping[str, Any] | None
) -> Iterator[tuple[float, Death]]:
    """Workers that died, each with when its rank saw it: by the rank's events, or by torch's words in its exception."""
    told = [each for each in rank.events if each.get("event") == "worker_died"]
    message = str((error or {}).get("message", ""))
    died = _DIED.search(message)
    named = [int(pid) for pid in re.findall(r"\d+", died["pids"])] if died else []
    for each in told:
        if each.get("signal") is None and each.get("code") == 0 and each.get("pid") not in named:
            continue
        at_s = _time(each) or rank.written_s
        yield at_s, _dead(rank, workers, at_s, each)
    if not died:
        return
    at_s = _time(error or {}) or rank.written_s
    by_signal, with_code = _BY_SIGNAL.search(message), _WITH_CODE.search(message)
    how = {
        "signal": _signal_called(by_signal["name"]) if by_signal else None,
        "code": int(with_code["code"]) if with_code else None,
    }
    for pid in named:
        if pid not in {each.get("pid") for each in told}:
            yield at_s, _dead(rank, workers, at_s, {"pid": pid, **how})


def _dead(rank: FlightRecord, workers: Sequence[FlightRecord], at_s: float, event: Mapping[str, Any]) -> Death:
    record = _latest([worker for worker in workers if worker.pid == event.get("pid")])
    number, by_signal, code = event.get("worker"), event.get("signal"), event.get("code")
    if number is None:
        number = record.worker if record is not None and record.worker is not None else -1
    if by_signal is None and code is not None and code < 0:
        by_signal, code = -code, None
    if by_signal is None and code is None and record is not None:
        by_signal = crash_signal(record.crash)
    last = _last_word(record) if by_signal is None else None
    if last is not None and code is None and _type(last) == "SystemExit":
        code = _exit_code(str(last.get("message", "")))
    kind = PLAIN
    if by_signal is None and code is None and last is None:
        kind = SILENT
    elif by_signal in _TO_ALL and rank.world_size > 1:  # a launcher has told the rank's whole group to end
        kind = ECHO
    index = last.get("index") if last is not None else None
    return Death(
        process=Process(rank.rank, number, event.get("pid")),
        rank=rank,
        record=record,
        at_s=min(at_s, record.written_s) if record is not None and record.written_s else at_s,
        kind=kind,
        signal=by_signal,
        code=code,
        error=None if last is None or _type(last) == "SystemExit" else last,
        where=str((last or {}).get("where") or "") or place_of(record),
        index=index if index is not None or record is None else record.index,
    )


def _last_word(record: FlightRecord | None) -> Mapping[str, Any] | None:
    """The exception that ended a worker's loop: one that torch does not hand over, such as of ``sys.exit()``."""
    errors = _errors(record) if record is not None else []
    if record is None or not errors or _type(errors[-1]) not in _NOT_HANDED_OVER:
        return None
    return errors[-1]


def _exit_code(message: str) -> int:
    """What Python makes of ``SystemExit``."""
    text = message.strip()
    return 0 if text in ("", "None") else int(text) if re.fullmatch(r"-?\d+", text) else 1


def place_of(record: FlightRecord | None) -> str | None:
    """The line that a process was at: as faulthandler says in a crash, else where it was last seen."""
    if record is None:
        return None
    frame = own_frame(crashed_thread(record.crash)) if record.crash else None
    return (frame.at(record.place, record.reads) if frame else record.place) or None


def _signal_called(name: str) -> int | None:
    """The number of a signal by what torch calls it: ``"Killed"``, ``"Segmentation fault"``."""
    wanted = name.strip().lower()
    return next(
        (int(each) for each in signal.Signals if (signal.strsignal(each) or "").lower() == wanted),
        None,
    )


def _ended_rank(death: Death, at_s: float, rank: FlightRecord, error: Mapping[str, Any] | None, gone: bool) -> bool:
    """Whether a worker's death, seen at that time, is what ended its rank, and not the other way round."""
    if error is None:  # it vanished, or waits for ever; or it went on
        return rank.progress_s <= at_s + _WRITES_EVERY_S and (not gone or rank.written_s - at_s <= _SOON_S)
    message = str(error.get("message", ""))
    if (named := _DIED.search(message)) and str(death.process.pid) in re.findall(r"\d+", named["pids"]):
        return True
    when_s = _time(error) or rank.written_s
    pipe = _is_broken_pipe(error)
    if not (-2 * _WRITES_EVERY_S if pipe else 0.0) <= when_s - at_s <= _SOON_S:
        return False
    if _type(error) in _ENDS_BY_ITSELF:  # workers end with it
        return death.signal is not None and death.signal not in _TO_ALL
    return pipe or "DataLoader worker" in message or rank.progress_s <= at_s


def _is_broken_pipe(error: Mapping[str, Any]) -> bool:
    if _type(error) in _BROKEN_PIPES:
        return True
    return _type(error) == "FileNotFoundError" and _raised_in(error).rpartition("/")[2] in PIPE_FILES


def _raised_in(error: Mapping[str, Any]) -> str:
    """The file of the innermost frame, as messages name it; empty where it is not known."""
    frames = error.get("frames") or ("",)
    found = _FILE.search(str(frames[-1]))
    return found["file"] if found else ""


def _to_all(death: Death, rank: FlightRecord, command: CommandEnd | None) -> Death | None:
    """The rank's own end by a signal, where a worker was ended by one that all processes got."""
    if death.signal not in _TO_ALL:
        return None
    sent = {each.get("signal") for each in rank.events if each.get("event") == "signal"}
    errors = {_type(each) for each in _errors(rank)}
    if command is not None:
        sent |= {*command.signals, -command.code}
    raised = {"KeyboardInterrupt": signal.SIGINT, "SIGTERMException": signal.SIGTERM}
    sent |= {int(number) for name, number in raised.items() if name in errors}
    if death.signal not in sent:
        return None
    return Death(
        process=Process(rank.rank, None, rank.pid),
        rank=rank,
        record=rank,
        at_s=death.at_s,
        kind=ECHO,
        signal=death.signal,
        where=place_of(rank),
        index=rank.index,
    )


def _vanished(
    rank: FlightRecord, command: CommandEnd | None, gone: Sequence[FlightRecord], end: ProcessEnd | None
) -> Death | None:
    """A training process that is there no more, and has said nothing."""
    number, code, kind = crash_signal(rank.crash), None, PLAIN
    if number is None:
        number, code = _code_of(rank, command, gone) if end is None else _split(end.code)
        told = [each.get("signal") for each in rank.events if each.get("event") == "signal" and _recent(each, rank)]
        deadly = [each for each in told if each in _TO_ALL]
        if deadly and number in (None, signal.SIGKILL) and code is None:
            number = deadly[0]
        if code == 0:
            return None
        known = code is not None or (end is not None and number != signal.SIGKILL)
        kind = ECHO if number in _TO_ALL else PLAIN if known else SILENT
    process = Process(rank.rank, None, rank.pid)
    at_s = rank.written_s if end is None else end.at_s
    return Death(process, rank, rank, at_s, kind, number, code, None, place_of(rank), rank.index)


def _split(code: int) -> tuple[int | None, int | None]:
    """The signal, or the exit code."""
    return (-code, None) if code < 0 else (None, code)


def _recent(event: Mapping[str, Any], rank: FlightRecord) -> bool:
    return _time(event) >= rank.written_s - _GRACE_S


def _code_of(
    rank: FlightRecord, command: CommandEnd | None, gone: Sequence[FlightRecord]
) -> tuple[int | None, int | None]:
    """The signal or the exit code of a rank, as far as the command's code tells."""
    if command is None:
        return None, None
    alone = len(gone) == 1 and rank.world_size == 1
    own = command.is_of(rank) if command.pid is not None else alone or rank.rank == 0
    if command.code < 0:  # of a launcher that was ended itself, only if there is nobody else to ask
        return (-command.code, None) if own or len(gone) == 1 else (None, None)
    if command.code > 128 and (own or alone or rank.rank == 0):  # as shells and launchers tell a signal
        return command.code - 128, None
    if (own and (alone or command.pid is not None)) or (alone and command.code > 1):  # 1 may be a launcher's own
        return None, command.code
    return (None, 0) if command.code == 0 and own else (None, None)
