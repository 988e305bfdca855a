"""The post-mortem of a run: which of its processes ended first, how, and what that means."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from lightning_gpuopt.measurements.flight import OUTSIDE_OF_FIT, FlightRecord
from lightning_gpuopt.postmortem.advice import advice_of, likely_of
from lightning_gpuopt.postmortem.events import checked
from lightning_gpuopt.postmortem.hangs import UNEVEN_ADVICE, Hang, describe_hang, hang_of
from lightning_gpuopt.postmortem.memory_before import Memory, in_words, memory_of, oom_kills
from lightning_gpuopt.postmortem.process_end import (
    ECHO,
    CommandEnd,
    Death,
    ProcessEnd,
    errors_of,
    exception_in,
    type_of,
)
from lightning_gpuopt.postmortem.rank_deaths import deaths_of
from lightning_gpuopt.postmortem.record import Ended, PostMortem, Process
from lightning_gpuopt.postmortem.stacks import c_frames
from lightning_gpuopt.postmortem.uneven import Uneven, uneven_of
from lightning_gpuopt.postmortem.wording import clock, first_line, key, name_of, signal_name, span
from lightning_gpuopt.postmortem.wording import ranks as ranks_in_words

_BY_SIGNAL: Final[Mapping[int, Ended]] = {
    signal.SIGKILL: "killed",
    signal.SIGBUS: "bus_error",
    signal.SIGSEGV: "segfault",
    signal.SIGABRT: "aborted",
    signal.SIGFPE: "aborted",
    signal.SIGILL: "aborted",
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "terminated",
    signal.SIGQUIT: "terminated",
}
_BY_EXCEPTION: Final[Mapping[str, tuple[Ended, int | None]]] = {
    "KeyboardInterrupt": ("interrupted", int(signal.SIGINT)),
    "SIGTERMException": ("terminated", int(signal.SIGTERM)),
    "SystemExit": ("exited", None),
}
_FROM_OUTSIDE: Final = ("interrupted", "terminated", "killed")
_TOLD_TO_END: Final = ("interrupted", "terminated")  # how somebody ends a run that hangs
# without progress for so long, and for ten times the longest so far, what a run may wait for is worth saying
_QUIET_S: Final = 5.0
# what torch raises for a process that it has started and that has failed
_OF_FORKED: Final = {"ProcessRaisedException", "ProcessExitedException"}
_TOGETHER_S: Final = 60.0  # within this time all ranks of a run begin
_TIME_OUT: Final = re.compile(r"timed? ?-?out", re.IGNORECASE)

_VERBS: Final[Mapping[str, str]] = {
    "killed": "was ended by SIGKILL",
    "out_of_memory": "was ended by the kernel because memory ran out",
    "bus_error": "was ended by a bus error (SIGBUS)",
    "segfault": "crashed with a segmentation fault (SIGSEGV)",
    "interrupted": "was interrupted (Ctrl-C, SIGINT)",
    "terminated": "was asked to end (SIGTERM)",
}


def post_mortem_of(
    records: Sequence[FlightRecord],
    *,
    now_s: float,
    is_alive: Callable[[FlightRecord], bool],
    command: CommandEnd | None = None,
    hang: Hang | None = None,
    stacks: Mapping[int, str] | None = None,
    waits: Mapping[int, str] | None = None,
    ends: Mapping[tuple[str, int], ProcessEnd] | None = None,
) -> PostMortem:
    """Why a run ended, or what it waits for; of several runs in ``records`` the last one counts.

    ``now_s`` is Unix time. ``command`` is None if nobody watched, or where it runs; a ``hang`` of None is looked for
    in the records. ``stacks`` are what ``faulthandler`` wrote and ``waits`` what was waited in, in the kernel, both by
    process id; ``ends`` are known ends of ranks, by machine and process id.
    """
    records = [checked(each) for each in _last_run(records)]
    deaths = deaths_of(records, is_alive, command, ends)
    if command is None and not deaths:
        running = [each for each in records if each.worker is None and not each.ended and is_alive(each)]
        hang = hang or hang_of(running, now_s)
        if hang is None and running:
            return _of_running(records, running, now_s, stacks or {}, waits or {})
    if deaths and hang is None and deaths[0].process.worker is None:  # nobody looked while it ran
        hang = hang_of(_as_running(records), deaths[0].at_s)
    if hang is not None and (not deaths or _how(deaths[0], records, command)[0] in _FROM_OUTSIDE):
        return _of_hang(hang, records, stacks or {}, waits or {}, deaths, command)
    return _of_death(deaths, records, command) if deaths else _without_death(records, command)


def _last_run(records: Sequence[FlightRecord]) -> list[FlightRecord]:
    outside = [each for each in records if _is_outside(each)]
    last = max(outside or records, key=lambda each: each.written_s, default=None)
    if outside and last is not None:  # it may be what became of a fit that failed
        ranks = [each for each in records if each.worker is None and not _is_outside(each)]
        failed = [each for each in ranks if each.ended != "ok" and not each.caught and _leads_to(each, last)]
        last = max(failed, key=lambda each: each.written_s, default=last)
    run = [each for each in records if last is not None and each.run == last.run]
    begun_s = max((each.created_s for each in run if each.worker is None), default=0.0) - _TOGETHER_S
    return [each for each in run if each.written_s >= begun_s]  # a launcher may give every run the same name


def _leads_to(rank: FlightRecord, outside: FlightRecord) -> bool:
    """Whether an exception outside of ``fit`` may come of what ended a rank: of its own process, or forked by it."""
    kinds = {type_of(each) for each in outside.events}
    return (rank.host, rank.pid) == (outside.host, outside.pid) or bool(kinds & _OF_FORKED)


def _is_outside(record: FlightRecord) -> bool:
    return record.run.endswith(OUTSIDE_OF_FIT)


def _as_running(records: Sequence[FlightRecord]) -> list[FlightRecord]:
    """The records as they were before the run was ended from outside: where the exception came that has ended them."""
    return [each if each.ended == "ok" else replace(each, ended="", place=_left_at(each)) for each in records]


def _left_at(record: FlightRecord) -> str:
    errors = errors_of(record) if record.ended else []
    return (exception_in(record, record, errors[-1]).where or "") if errors else record.place


def _how(death: Death, records: Sequence[FlightRecord], command: CommandEnd | None) -> tuple[Ended, int | None]:
    """How a process ended, and by which signal, as far as that is known."""
    if death.error is not None:
        kind = type_of(death.error)
        if kind == "SystemExit" and str(death.error.get("message", "")).strip() in ("", "0", "None"):
            return "ok", None
        return _BY_EXCEPTION.get(kind, ("exception", None))
    if death.signal is not None:
        ended = _BY_SIGNAL.get(death.signal, "killed")
        if ended == "killed" and death.signal == signal.SIGKILL and _kills(death, records, command):
            ended = "out_of_memory"
        return ended, int(death.signal)
    if death.code is not None:
        return "exited", None
    return ("out_of_memory", int(signal.SIGKILL)) if _kills(death, records, command) else ("killed", None)


def _kills(death: Death, records: Sequence[FlightRecord], command: CommandEnd | None) -> int | None:
    return oom_kills(records, death.host, command.oom_kills if command is not None else None)


def _of_death(deaths: Sequence[Death], records: Sequence[FlightRecord], command: CommandEnd | None) -> PostMortem:
    first = deaths[0]
    ended, number = _how(first, records, command)
    kills = _kills(first, records, command)
    memory = memory_of(first.record, records, first.at_s, kills)
    waited = first.kind == ECHO and ended == "exception"
    uneven = uneven_of([each for each in records if each.worker is None]) if waited else None
    several = first.rank.world_size
    process, where, index = first.process, first.where, first.index
    likely, advice = likely_of(ended, first, memory), advice_of(ended, first, memory)
    lines = [_headline(first, ended, several)]
    if first.caught:
        kind = str(first.caught.get("type", "")) or "an exception"
        lines.append(f"Before, fit had ended by {kind}, and the script went on")
    late = _late(first, deaths, records) if waited and uneven is None else None
    if late is not None:
        process, where, index = Process.of(late), late.place or None, None
        joined = f"{_capital(name_of(process, several))} had not joined the collective"
        lines = [joined + (f": it was at {where}" if where else ""), *lines]
        likely = "the others waited in a collective for a rank that came too late"
        advice = "check the line above; the strategy's timeout= sets how long the others wait."
    elif uneven is not None:
        early = uneven.early[0]
        process, where, index = Process.of(early), early.place or None, None
        lines = [f"{_capital(uneven.text)}; {_echo(first, deaths, uneven, several)}"]
        likely, advice = "the others waited in a collective for a rank that had left its epoch", UNEVEN_ADVICE
    elif at := _at(where, index, first):
        lines.append(at)
    if uneven is None:
        if first.record is not None and (frames := c_frames(first.record.crash)):
            lines.append(f"Innermost in C: {', '.join(frames)}")
        lines += _memory_lines(memory, ended)
        lines += _others(deaths[1:], records, command, several)
        from_outside = ended in _TOLD_TO_END or (ended == "killed" and first.process.worker is None)
        if from_outside and (quiet := _quiet(_as_running(records), first.at_s)) is not None:
            found = describe_hang(_as_running(records), {}, {})
            lines.append(f"Before it there was no progress for {span(quiet.quiet_s)}, which is not a hang yet:")
            lines += [_capital(line) for line in found.text.splitlines()]
            likely = f"if it hung, {found.likely}" if found.likely else likely
            advice = found.advice or advice
    return _told(PostMortem(ended, process, where, index, number, memory.figures, likely, advice), lines)


def _quiet(running: Sequence[FlightRecord], at_s: float) -> Hang | None:
    """Whether there was no progress for a while, though it is no hang yet."""
    return hang_of([replace(each, hang_s=None) for each in running], at_s, least_s=_QUIET_S, first_s=_QUIET_S)


def _late(first: Death, deaths: Sequence[Death], records: Sequence[FlightRecord]) -> FlightRecord | None:
    """The rank that others waited for, until a collective of theirs timed out; None if that is not known.

    Those that waited end by the same exception at about the same time. Who was in no collective does not.
    """
    if not _says_timed_out(first.error):
        return None
    waited = {each.process.rank for each in deaths if _says_timed_out(each.error)}
    ranks = [each for each in records if each.worker is None and each.rank not in waited]
    return ranks[0] if len(ranks) == 1 and ranks[0].ended != "ok" else None


def _says_timed_out(error: Mapping[str, object] | None) -> bool:
    return bool(_TIME_OUT.search(str((error or {}).get("message", ""))))


def _headline(death: Death, ended: Ended, world_size: int) -> str:
    who = _capital(name_of(death.process, world_size))
    when = clock(death.at_s)
    error = death.error
    if error is not None and ended == "exception":
        message = first_line(_own_message(str(error.get("message", ""))))
        return f"{who} raised {error.get('type') or 'an exception'} at {when}{': ' if message else ''}{message}"
    if ended == "ok":
        return f"{who} ended itself with exit code 0 at {when}"
    if ended == "exited":
        code = "" if death.code is None else f" with exit code {death.code}"
        return f"{who} exited{code} at {when}, without a recorded exception"
    if ended == "aborted":
        return f"{who} was aborted by {signal_name(death.signal or 0)} at {when}"
    if ended == "killed" and death.signal not in (None, signal.SIGKILL):
        return f"{who} was ended by {signal_name(death.signal or 0)} at {when}"
    if ended == "killed" and death.signal is None:
        return f"{who} vanished at {when}, without an exception"
    return f"{who} {_VERBS[ended]} at {when}"


def _own_message(message: str) -> str:
    """Of an exception that was raised in a worker, its own words, which stand last in what torch makes of it."""
    if not message.startswith("Caught ") or "Original Traceback" not in message:
        return message
    lines = [line for line in message.splitlines() if line.strip()]
    return lines[-1].partition(": ")[2] or lines[-1]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _at(where: str | None, index: int | str | None, death: Death) -> str:
    parts = []
    if index is not None:
        parts.append(f"it read sample {key(index)}")
    elif death.record is not None and death.record.worker is not None and death.record.indices:
        indices = (death.error or {}).get("indices") or death.record.indices
        parts.append(f"it read a batch of samples, {key(indices[0])} to {key(indices[-1])}")
    if where:
        parts.append(f"at {where}")
    return _capital(", ".join(parts)) + "." if parts else ""


def _memory_lines(memory: Memory, ended: Ended) -> list[str]:
    lines = []
    if ended not in ("exited", "interrupted", "terminated") and (words := in_words(memory.figures)):
        lines.append(f"Memory before: {words}.")
    if memory.grown and ended in ("killed", "out_of_memory", "exception", "bus_error"):
        lines.append(f"{_capital(memory.grown)}.")
    return lines


def _others(
    deaths: Sequence[Death], records: Sequence[FlightRecord], command: CommandEnd | None, world_size: int
) -> list[str]:
    """What became of the other ranks, those that ended alike in one line."""
    groups: dict[str, list[int]] = {}
    for each in deaths:
        ended, _ = _how(each, records, command)
        how = f"{(each.error or {}).get('type') or 'an exception'}" if ended == "exception" else ended
        groups.setdefault(how, []).append(each.process.rank)
    return [f"After it: {ranks_in_words(numbers)}: {how}." for how, numbers in groups.items()] if world_size > 1 else []


def _echo(first: Death, deaths: Sequence[Death], uneven: Uneven, world_size: int) -> str:
    others = ranks_in_words(each.process.rank for each in deaths) if deaths else name_of(first.process, world_size)
    kind = (first.error or {}).get("type") or (signal_name(first.signal) if first.signal else "a silent end")
    message = first_line(str((first.error or {}).get("message", "")), 120)
    return f"{others} waited, and ended by {kind} at {clock(first.at_s)}{': ' if message else ''}{message}"


def _of_hang(
    hang: Hang,
    records: Sequence[FlightRecord],
    stacks: Mapping[int, str],
    waits: Mapping[int, str],
    deaths: Sequence[Death],
    command: CommandEnd | None,
) -> PostMortem:
    found = describe_hang(_as_running(records) if deaths else records, stacks, waits)
    at_s = command.at_s if command is not None else hang.since_s + hang.quiet_s
    lines = [
        f"No progress since {clock(hang.since_s)}, for {span(at_s - hang.since_s)} (a hang is {span(hang.limit_s)})",
        *(_capital(line) for line in found.text.splitlines()),
    ]
    number = None
    if deaths:
        ended, number = _how(deaths[0], records, command)
        lines.append(f"Then it was ended from outside: {ended}.")
    elif command is not None:
        lines.append(f"Then it ended with code {command.code}.")
    return _told(replace(_with_memory(found, records, at_s), signal=number), lines)


def _with_memory(found: PostMortem, records: Sequence[FlightRecord], at_s: float) -> PostMortem:
    stuck = next((each for each in records if found.process is not None and each.pid == found.process.pid), None)
    return replace(found, memory=memory_of(stuck, records, at_s).figures)


def _of_running(
    records: Sequence[FlightRecord],
    running: Sequence[FlightRecord],
    now_s: float,
    stacks: Mapping[int, str],
    waits: Mapping[int, str],
) -> PostMortem:
    """The run is still running: what it is at, and what it may wait for, before that counts as a hang."""
    found = describe_hang(records, stacks, waits)
    steps = max(each.steps for each in running)
    quiet = _quiet(running, now_s)
    what = "no hang" if quiet is None else f"no progress for {span(quiet.quiet_s)}, which is not a hang yet"
    lines = [f"The run is still running: {steps:,} steps so far, and {what}"]
    lines += [_capital(line) for line in found.text.splitlines()]
    likely = f"if it hangs, {found.likely}" if quiet is not None and found.likely else ""
    advice = found.advice if likely else ""
    post = replace(_with_memory(found, records, now_s), ended="unknown", likely=likely, advice=advice)
    return _told(post, lines)


def _without_death(records: Sequence[FlightRecord], command: CommandEnd | None) -> PostMortem:
    """No process of ours is known to have died, and none runs."""
    if command is None:
        ranks = [each for each in records if each.worker is None]
        if ranks and all(each.ended == "ok" for each in ranks):
            return _told(PostMortem("ok"), ["The run ended well"])
        return _told(PostMortem("unknown"), ["It is unknown how the run ended"])
    seen = "after fit had ended well" if records else "outside of a recorded fit"
    number = -command.code if command.code < 0 else None
    if command.code == 0:
        return _told(PostMortem("ok"), ["The command ended well"])
    if number is None:
        line = f"The command exited with code {command.code}, {seen}"
        return _told(PostMortem("exited", advice="check the last lines it printed."), [line])
    ended: Ended = _BY_SIGNAL.get(number, "killed")
    if number == signal.SIGKILL and command.oom_kills:
        ended = "out_of_memory"
    post = PostMortem(ended, signal=number)
    return _told(post, [f"The command was ended by {signal_name(number)}, {seen}"])


def _told(post: PostMortem, lines: Sequence[str]) -> PostMortem:
    told = [line if line.endswith((".", ":")) else f"{line}." for line in lines if line]
    if post.likely:
        told.append(f"Likely: {post.likely}.")
    if post.advice:
        told.append(f"What to change: {post.advice}")
    return replace(post, text="\n".join(told))
