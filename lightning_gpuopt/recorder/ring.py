"""The ring of a process: numbers and words that are overwritten in place, and a log of lines that goes round.

A ring lies in memory that outlives its process, or is copied to a file. Its writer may be ended between any two
instructions: words may be cut, the last line may be half there. A reader takes what it can make sense of.
"""

from __future__ import annotations

import json
import operator
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from lightning_gpuopt.measurements.flight import (
    COLLATES,
    READS,
    SAVES,
    SETS_UP,
    STARTS,
    TRAINS,
    VALIDATES,
    WAITS,
    Doing,
    FlightRecord,
)

RANK_BYTES: Final = 256 * 1024
WORKER_BYTES: Final = 12 * 1024
MAX_WORKERS: Final = 64
# 1 MiB, and so is a file of them. Memory that is not written to takes none.
TOTAL_BYTES: Final = RANK_BYTES + MAX_WORKERS * WORKER_BYTES
HEADER_BYTES: Final = 8192
WORKER_HEADER_BYTES: Final = 4096  # a worker has no ``slots``
_MAGIC: Final = b"GPUOPT02"

_NUMBERS: Final = (
    *("pid", "start_ticks", "rank", "world_size", "worker", "created_wall_ns", "created_ns", "written_ns"),
    *("ended", "doing", "since_ns", "steps", "epoch", "batch", "batches", "progress_ns", "longest_ns"),
    *("has_index", "index", "batches_read", "samples", "fork", "cpu_ns", "turn", "stack_signal", "logged", "asked"),
    *("slot", "caught", "hang_ns", "keeps_per_mille"),
)
AT: Final = {name: at for at, name in enumerate(_NUMBERS)}  # where a number is among a ring's numbers
# where a word begins, and how many bytes it may have
_WORDS: Final[dict[str, tuple[int, int]]] = {
    "reads": (256, 512),
    "memory": (768, 192),
    "host": (1024, 64),
    "loader": (1088, 32),
    "run": (1120, 160),
    "boot": (1280, 64),
    "place": (1408, 512),
    "key": (1920, 128),
    "indices": (2048, 768),
    "stacks": (2816, 1024),
    "leak": (3840, 256),
    "slots": (WORKER_HEADER_BYTES, HEADER_BYTES - WORKER_HEADER_BYTES),
}
# numbers and words that a record has under the same name
_IN_RECORD: Final = (
    *("pid", "start_ticks", "rank", "world_size", "steps", "epoch", "batch", "batches_read", "stack_signal"),
    *("run", "host", "loader", "reads", "stacks", "leak"),
)
NOT_KNOWN, NOT_CAUGHT, CAUGHT = range(3)  # what became of the exception that ended ``fit``
DOING: Final[tuple[Doing, ...]] = (STARTS, WAITS, READS, COLLATES, SETS_UP, TRAINS, VALIDATES, SAVES)
ENDED: Final = ("", "ok", "exception")
NO_INDEX, NUMBER, KEY = range(3)  # what a ring's index is: none, a number, or a word that is cut where it is long
_MAX_INDEX: Final = 2**63 - 1


class Ring:
    """One ring, to write; ``memory`` is all zero if it is new, and the log begins after ``header_bytes``.

    ``numbers``, by :data:`AT`, are written in place on the hot path: a call costs more than what it would do.
    """

    def __init__(self, memory: memoryview, header_bytes: int = HEADER_BYTES) -> None:
        self._memory = memory
        self._header_bytes = header_bytes
        self.numbers = memory[8 : 8 + 8 * len(_NUMBERS)].cast("q")
        self._log_bytes = len(memory) - header_bytes
        self._logging = threading.Lock()
        self._shown: dict[str, str] = {}

    def begin(self, words: dict[str, str], **numbers: int) -> None:
        """Begin anew, for a process whose earlier log, if there is one, is kept no longer."""
        self._memory[:8] = bytes(8)  # no reader takes it while it is half
        self._shown.clear()
        own = self.numbers
        for at in range(len(_NUMBERS)):
            own[at] = 0
        own[AT["batches"]] = own[AT["worker"]] = own[AT["slot"]] = -1
        own[AT["created_wall_ns"]], own[AT["created_ns"]] = time.time_ns(), time.monotonic_ns()
        for name, value in numbers.items():
            own[AT[name]] = value
        for name in _words_before(self._header_bytes):
            self.write(name, boot_id() if name == "boot" else words.get(name, ""))
        self._memory[:8] = _MAGIC

    def write(self, name: str, word: str) -> None:
        """Overwrite a word of :data:`_WORDS`; it is cut where it is too long."""
        at, most = _WORDS[name]
        text = word.encode(errors="replace")[: most - 1]
        self._memory[at : at + len(text) + 1] = text + b"\0"

    def show(self, name: str, word: str) -> None:
        """The same, if it is another one than was shown last."""
        if self._shown.get(name) != word:
            self._shown[name] = word
            self.write(name, word)

    def log(self, event: str, **known: Any) -> None:
        """Add a line of what JSON can hold; the oldest go where there is no more room."""
        line = {"t": round(time.monotonic(), 3), "event": event, **known}
        while len(text := _encoded(line)) > self._log_bytes:
            if not line.get("message"):
                return
            line["message"] = line["message"][: len(line["message"]) // 2]
        with self._logging:  # two threads log
            logged = self.numbers[AT["logged"]]
            at = logged % self._log_bytes
            first = text[: self._log_bytes - at]
            log = self._memory[self._header_bytes :]
            log[at : at + len(first)] = first
            log[: len(text) - len(first)] = text[len(first) :]
            self.numbers[AT["logged"]] = logged + len(text)

    def index(self, key: object) -> None:
        """Note which sample is being read, by its key."""
        numbers = self.numbers
        key = key_of(key)
        if type(key) is int and -_MAX_INDEX <= key <= _MAX_INDEX:
            numbers[_INDEX] = key
            numbers[_HAS_INDEX] = NUMBER
        else:
            self.write("key", str(key))
            numbers[_HAS_INDEX] = KEY

    def read(self, name: str) -> str:
        at, most = _WORDS[name]
        return _word(bytes(self._memory[: at + most]), name)

    def noted_index(self) -> int | str | None:
        has = self.numbers[_HAS_INDEX]
        if has == KEY:
            return self.read("key")
        return self.numbers[_INDEX] if has == NUMBER else None


def key_of(key: object) -> int | str:
    """A key of a dataset, as a number or a text; it is the user's, and what cannot be told of it is its class."""
    if type(key) is int:
        return key
    try:
        return operator.index(key) if hasattr(key, "__index__") else str(key)
    except Exception:  # such as an array of several
        return type(key).__name__


_INDEX: Final = AT["index"]
_HAS_INDEX: Final = AT["has_index"]


def _words_before(header_bytes: int) -> list[str]:
    return [name for name, (at, _) in _WORDS.items() if at < header_bytes]


def header_bytes_of(data: bytes | memoryview) -> int:
    """Where the log of a ring begins that somebody has begun."""
    return WORKER_HEADER_BYTES if number_in(data, "worker") >= 0 else HEADER_BYTES


def is_used(data: bytes | memoryview) -> bool:
    return bytes(data[:8]) == _MAGIC


@cache
def boot_id() -> str:
    """What names this start of the machine, all containers on it included; empty if that cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def wall_offset_s(data: bytes | memoryview) -> float:
    """What makes a Unix time of the monotonic times in a ring.

    Since this machine's last start, by its clock as it is now: it may have been set since the ring was begun, and who
    reads compares with what it says now. Else by the clock as it was then.
    """
    if (boot := _word(bytes(data[:HEADER_BYTES]), "boot")) and boot == boot_id():
        return time.time() - time.monotonic()
    return (number_in(data, "created_wall_ns") - number_in(data, "created_ns")) / 1e9


def record_of(data: bytes, offset_s: float | None = None) -> FlightRecord | None:
    """What a ring says, without ``memory`` and ``crash``; None if it is none, or of another version.

    Lines of the log may be missing; without ``offset_s`` (:func:`wall_offset_s`) it is the ring's own.
    """
    if len(data) < WORKER_HEADER_BYTES or not is_used(data) or len(data) < (header := header_bytes_of(data)):
        return None
    numbers = dict(zip(_NUMBERS, memoryview(data)[8 : 8 + 8 * len(_NUMBERS)].cast("q"), strict=True))
    words = {name: _word(data, name) for name in _words_before(header)}
    known: dict[str, Any] = numbers | words
    slots, slot = _slots(words.get("slots", "")), numbers["slot"]
    is_worker = numbers["worker"] >= 0
    phase, place = slots.get(slot, ("", words["place"]))
    if not is_worker:  # of which only the phase that is open counts
        _, read = slots.get(reading_in(slot), ("", ""))
        place = read or words["reads"] or words["place"] if numbers["has_index"] else place or read
    indexed: dict[int, int | str] = {NUMBER: numbers["index"], KEY: words["key"]}

    offset_s = wall_offset_s(data) if offset_s is None else offset_s

    def wall_s(name: str) -> float:
        return numbers[name] / 1e9 + offset_s if numbers[name] else 0.0

    return FlightRecord(
        **{name: known[name] for name in _IN_RECORD},
        worker=numbers["worker"] if is_worker else None,
        created_s=wall_s("created_ns"),
        written_s=wall_s("written_ns"),
        ended=_of(ENDED, numbers["ended"], ""),
        caught={NOT_CAUGHT: False, CAUGHT: True}.get(numbers["caught"]),
        doing=_of(DOING, numbers["doing"], STARTS if is_worker else SETS_UP),
        since_s=wall_s("since_ns"),
        place=place,
        phase=phase,
        batches=numbers["batches"] if numbers["batches"] >= 0 else None,
        progress_s=wall_s("progress_ns"),
        longest_s=numbers["longest_ns"] / 1e9,
        hang_s=numbers["hang_ns"] / 1e9 if numbers["hang_ns"] else None,
        index=indexed.get(numbers["has_index"]),
        indices=_indices(words["indices"]),
        fork=bool(numbers["fork"]),
        cpu_s=numbers["cpu_ns"] / 1e9 if numbers["cpu_ns"] else None,
        turn=numbers["turn"] - 1 if numbers["turn"] else None,
        events=tuple({**each, "t": each["t"] + offset_s} for each in _lines(data[header:], numbers["logged"])),
    )


def number_in(data: bytes | memoryview, name: str) -> int:
    at = 8 + 8 * AT[name]
    return int.from_bytes(data[at : at + 8], "little", signed=True)


def _of(names: tuple[Any, ...], number: int, otherwise: Any) -> Any:
    return names[number] if 0 <= number < len(names) else otherwise


def _word(data: bytes, name: str) -> str:
    at, most = _WORDS[name]
    return data[at : at + most].partition(b"\0")[0].decode(errors="replace")


def _indices(word: str) -> tuple[int | str, ...]:
    try:
        found = json.loads(word) if word else []
    except ValueError:
        return ()
    return tuple(found) if isinstance(found, list) else ()


def reading_in(slot: int) -> int:
    """Stands for a slot while a sample is read in it."""
    return -2 - slot


def slot_line(slot: int, name: str, place: str) -> str:
    """A line of the word ``slots``; ``place``: where the user's code was last seen in it, or begins; empty: unknown."""
    return json.dumps([slot, name, place], separators=(",", ":"))


def _slots(word: str) -> dict[int, tuple[str, str]]:
    found = {}
    for line in word.split("\n"):
        try:
            slot, name, place = json.loads(line)
        except (ValueError, TypeError):
            continue
        if isinstance(slot, int) and isinstance(name, str) and isinstance(place, str):
            found[slot] = name, place
    return found


def _lines(log: bytes, logged: int) -> Iterator[dict[str, Any]]:
    """The lines of the log, oldest first; those that were overwritten, or are half there, are left out."""
    if not log or logged <= 0:
        return
    at = logged % len(log)
    text = log[:logged] if logged <= len(log) else log[at:] + log[:at]
    for line in text.split(b"\n"):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("t"), (int, float)) and isinstance(event.get("event"), str):
            yield event


def _encoded(line: dict[str, Any]) -> bytes:
    text = json.dumps(line, separators=(",", ":"), default=str, ensure_ascii=False)
    return text.encode(errors="replace") + b"\n"
