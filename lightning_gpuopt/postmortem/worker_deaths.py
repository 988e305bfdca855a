"""Which workers of a rank died or raised, how, and whether that ended the rank."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from lightning_gpuopt.measurements.flight import PIPE_FILES, FlightRecord
from lightning_gpuopt.postmortem.process_end import (
    ECHO,
    ENDS_BY_ITSELF,
    PLAIN,
    SILENT,
    SOON_S,
    TO_ALL,
    WRITES_EVERY_S,
    Death,
    errors_of,
    exception_in,
    place_of,
    raised_in,
    time_of,
    type_of,
)
from lightning_gpuopt.postmortem.record import Process
from lightning_gpuopt.postmortem.stacks import crash_signal, traceback_frame

# exceptions that end a worker: torch hands over what is an ``Exception``
_NOT_HANDED_OVER: Final = ("SystemExit", "KeyboardInterrupt", "GeneratorExit")
_DIED: Final = re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\)")
_CAUGHT: Final = re.compile(r"Caught (?P<type>\w+) in DataLoader worker process (?P<worker>\d+)")
_TIMED_OUT: Final = re.compile(r"DataLoader timed out after")
_BY_SIGNAL: Final = re.compile(r"is killed by signal: (?P<name>[\w ]+?)\s*(?:\.|$)", re.MULTILINE)
_WITH_CODE: Final = re.compile(r"exited unexpectedly with exit code (?P<code>-?\d+)")
_BROKEN_PIPES: Final = ("ConnectionResetError", "BrokenPipeError", "EOFError", "ConnectionRefusedError")


def worker_error(rank: FlightRecord, workers: Sequence[FlightRecord], error: Mapping[str, Any]) -> Death | None:
    """The exception of a worker that its rank's exception repeats."""
    message = str(error.get("message", ""))
    if _TIMED_OUT.search(message) and (slow := _latest([each for each in workers if each.worker == rank.turn])):
        death = exception_in(slow, rank, {**error, "where": slow.place, "index": slow.index})
        return replace(death, kind=PLAIN)
    caught = _CAUGHT.search(message)
    number = int(caught["worker"]) if caught else None
    unmade = raised_in(error) == "torch/_utils.py"  # one of its class could not be made from a text
    when_s = time_of(error) or rank.written_s
    # the batch that has it comes after one that came no more
    cut_off_s = SOON_S if _is_broken_pipe(error) else -math.inf
    raised = [
        (time_of(each), worker, each)
        for worker in workers
        for each in errors_of(worker)
        if (
            type_of(each) == caught["type"] and worker.worker == number
            if caught
            else _same(each, error) or unmade or when_s - time_of(each) < cut_off_s
        )
        and type_of(each) != "KeyboardInterrupt"
        and time_of(each) <= when_s + WRITES_EVERY_S
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


def dead_workers(
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
        at_s = time_of(each) or rank.written_s
        yield at_s, _dead(rank, workers, at_s, each)
    if not died:
        return
    at_s = time_of(error or {}) or rank.written_s
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
    if last is not None and code is None and type_of(last) == "SystemExit":
        code = _exit_code(str(last.get("message", "")))
    kind = PLAIN
    if by_signal is None and code is None and last is None:
        kind = SILENT
    elif by_signal in TO_ALL and rank.world_size > 1:  # a launcher has told the rank's whole group to end
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
        error=None if last is None or type_of(last) == "SystemExit" else last,
        where=str((last or {}).get("where") or "") or place_of(record),
        index=index if index is not None or record is None else record.index,
    )


def _last_word(record: FlightRecord | None) -> Mapping[str, Any] | None:
    """The exception that ended a worker's loop: one that torch does not hand over, such as of ``sys.exit()``."""
    errors = errors_of(record) if record is not None else []
    if record is None or not errors or type_of(errors[-1]) not in _NOT_HANDED_OVER:
        return None
    return errors[-1]


def _exit_code(message: str) -> int:
    """What Python makes of ``SystemExit``."""
    text = message.strip()
    return 0 if text in ("", "None") else int(text) if re.fullmatch(r"-?\d+", text) else 1


def _signal_called(name: str) -> int | None:
    """The number of a signal by what torch calls it: ``"Killed"``, ``"Segmentation fault"``."""
    wanted = name.strip().lower()
    return next((int(each) for each in signal.Signals if (signal.strsignal(each) or "").lower() == wanted), None)


def ended_rank(death: Death, at_s: float, rank: FlightRecord, error: Mapping[str, Any] | None, gone: bool) -> bool:
    """Whether a worker's death, seen at that time, is what ended its rank, and not the other way round."""
    if error is None:  # it vanished, or waits for ever; or it went on
        return rank.progress_s <= at_s + WRITES_EVERY_S and (not gone or rank.written_s - at_s <= SOON_S)
    message = str(error.get("message", ""))
    if (named := _DIED.search(message)) and str(death.process.pid) in re.findall(r"\d+", named["pids"]):
        return True
    when_s = time_of(error) or rank.written_s
    pipe = _is_broken_pipe(error)
    if not (-2 * WRITES_EVERY_S if pipe else 0.0) <= when_s - at_s <= SOON_S:
        return False
    if type_of(error) in ENDS_BY_ITSELF:  # workers end with it
        return death.signal is not None and death.signal not in TO_ALL
    return pipe or "DataLoader worker" in message or rank.progress_s <= at_s


def _is_broken_pipe(error: Mapping[str, Any]) -> bool:
    if type_of(error) in _BROKEN_PIPES:
        return True
    return type_of(error) == "FileNotFoundError" and raised_in(error).rpartition("/")[2] in PIPE_FILES
