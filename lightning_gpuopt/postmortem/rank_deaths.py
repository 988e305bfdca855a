"""What ended each rank, itself or one of its workers: from events, from what vanished, and from the exit code."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from lightning_gpuopt.measurements.flight import FlightRecord
from lightning_gpuopt.postmortem.process_end import (
    ECHO,
    ENDS_BY_ITSELF,
    GRACE_S,
    PLAIN,
    SILENT,
    SOON_S,
    TO_ALL,
    WRITES_EVERY_S,
    CommandEnd,
    Death,
    ProcessEnd,
    errors_of,
    exception_in,
    place_of,
    time_of,
    type_of,
)
from lightning_gpuopt.postmortem.record import Process
from lightning_gpuopt.postmortem.stacks import crash_signal
from lightning_gpuopt.postmortem.worker_deaths import dead_workers, ended_rank, worker_error

_TEARDOWN_S: Final = 2.0  # what ends a process so soon after an exception may be how it comes to its end


def deaths_of(
    records: Sequence[FlightRecord],
    is_alive: Callable[[FlightRecord], bool],
    command: CommandEnd | None,
    ends: Mapping[tuple[str, int], ProcessEnd] | None = None,
) -> list[Death]:
    """What ended each rank that has ended otherwise than well, the first of all at the beginning.

    ``command`` is None if nobody watched; ``ends`` are known ends of ranks, by machine and process id.
    """
    ranks = [record for record in records if record.worker is None]
    gone = [rank for rank in ranks if rank.ended == "" and not is_alive(rank) and not errors_of(rank)]
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
            at_once = [each for each in same if each.at_s <= first.at_s + WRITES_EVERY_S / 2]
            first = min(at_once, key=lambda each: (each.process.rank == 0, each.at_s))
        if best is None or first.at_s + _margin_s(first, best) < best.at_s:
            best = first
    return [] if best is None else [best, *sorted((d for d in deaths if d is not best), key=lambda each: each.at_s)]


def _margin_s(one: Death, other: Death) -> float:
    return WRITES_EVERY_S + (2.0 if one.host != other.host else 0.0)  # clocks of two machines differ


def _last_error(rank: FlightRecord) -> Mapping[str, Any] | None:
    """The exception that ended ``fit``, with the sample that it was raised for, where the rank reads them itself."""
    errors = errors_of(rank)
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
    died = [death for at_s, death in dead_workers(rank, workers, error) if ended_rank(death, at_s, rank, error, gone)]
    if died:
        first = min(died, key=lambda each: each.at_s)
        return _to_all(first, rank, command) or first
    if error is None:
        return None
    return worker_error(rank, workers, error) or exception_in(rank, rank, error)


def _after_it_was_caught(rank: FlightRecord, error: Mapping[str, Any], command: CommandEnd | None) -> Death | None:
    """How the command ended, if its script had caught the exception of ``fit``, and went on; None if not.

    Only for a run of one rank: of several, one that catches an exception waits for the others, or ends for them.
    """
    if command is None or not command.is_of(rank) or rank.world_size > 1 or rank.caught is False:
        return None
    if not rank.ended or type_of(error) in ENDS_BY_ITSELF or not command.code:
        return None
    after_s = command.at_s - (time_of(error) or rank.written_s)
    by_signal = -command.code if command.code < 0 else None
    from_outside = by_signal == signal.SIGKILL or by_signal in TO_ALL
    exits = rank.caught is True and command.code > 1  # 1 is also what those exit with who log an exception and end
    if after_s <= (_TEARDOWN_S if from_outside else SOON_S) and not exits:
        return None
    kind = ECHO if by_signal in TO_ALL else PLAIN
    code = command.code if by_signal is None else None
    return Death(Process.of(rank), rank, rank, command.at_s, kind, by_signal, code, caught=error)


def _to_all(death: Death, rank: FlightRecord, command: CommandEnd | None) -> Death | None:
    """The rank's own end by a signal, where a worker was ended by one that all processes got."""
    if death.signal not in TO_ALL:
        return None
    sent = {each.get("signal") for each in rank.events if each.get("event") == "signal"}
    errors = {type_of(each) for each in errors_of(rank)}
    if command is not None:
        sent |= {*command.signals, -command.code}
    raised = {"KeyboardInterrupt": signal.SIGINT, "SIGTERMException": signal.SIGTERM}
    sent |= {int(number) for name, number in raised.items() if name in errors}
    if death.signal not in sent:
        return None
    return _of_itself(rank, death.at_s, ECHO, death.signal)


def _vanished(
    rank: FlightRecord, command: CommandEnd | None, gone: Sequence[FlightRecord], end: ProcessEnd | None
) -> Death | None:
    """A training process that is there no more, and has said nothing."""
    number, code, kind = crash_signal(rank.crash), None, PLAIN
    if number is None:
        number, code = _code_of(rank, command, gone) if end is None else _split(end.code)
        recent = [each for each in rank.events if time_of(each) >= rank.written_s - GRACE_S]
        told = [each.get("signal") for each in recent if each.get("event") == "signal"]
        deadly = [each for each in told if each in TO_ALL]
        if deadly and number in (None, signal.SIGKILL) and code is None:
            number = deadly[0]
        if code == 0:
            return None
        known = code is not None or (end is not None and number != signal.SIGKILL)
        kind = ECHO if number in TO_ALL else PLAIN if known else SILENT
    return _of_itself(rank, rank.written_s if end is None else end.at_s, kind, number, code)


def _of_itself(rank: FlightRecord, at_s: float, kind: int, by_signal: int | None, code: int | None = None) -> Death:
    where = place_of(rank)
    return Death(Process.of(rank), rank, rank, at_s, kind, by_signal, code, where=where, index=rank.index)


def _split(code: int) -> tuple[int | None, int | None]:
    return (-code, None) if code < 0 else (None, code)


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
