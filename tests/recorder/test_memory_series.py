"""What a rank reads of its workers' memory: theirs they have read themselves, into their rings."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from lightning_gpuopt.measurements.flight import MemoryReading
from lightning_gpuopt.recorder.board import Board
from lightning_gpuopt.recorder.memory_series import MemoryLog, PrivateMemory, in_ring, out_of_ring
from lightning_gpuopt.recorder.ring import AT
from lightning_gpuopt.recorder.ring_reader import records_of
from lightning_gpuopt.telemetry.memory import MemoryFiles, ProcessTimes

MIB, GIB = 1 << 20, 1 << 30
FIRST = PrivateMemory(0, 6 * MIB, 300 * MIB)
LATER = PrivateMemory(512, 80 * MIB, 301 * MIB)


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board()
    made.rank.begin({}, pid=1)
    yield made
    made.close()


@pytest.fixture
def rss() -> dict[int, int]:
    """Resident bytes of processes, where they are others than usual."""
    return {}


@pytest.fixture(autouse=True)
def living(monkeypatch: pytest.MonkeyPatch, rss: dict[int, int]) -> dict[int, bool]:
    """Whether each worker's process lives."""
    lives: dict[int, bool] = {}
    monkeypatch.setattr(
        MemoryFiles,
        "process",
        lambda files, pid: ProcessTimes(0, 1.0, 7, rss.get(pid, 400 * MIB), dead=not lives.get(pid, True)),
    )
    return lives


def begin(board: Board, pid: int, word: str = "") -> int:
    slot = board.slot("train", 0)
    assert slot is not None
    board.worker(slot).begin({"memory": word}, worker=0, pid=pid, samples=700)
    return slot


def of_worker(log: MemoryLog, slot: int) -> list[tuple[int | None, int | None, int | None]]:
    return [(each.samples, each.private, each.anonymous) for each in log.workers[slot][3].items]


def test_a_workers_first_reading_counts_though_it_has_gone_on(board: Board) -> None:
    slot = begin(board, 9, in_ring(FIRST, LATER))
    log = MemoryLog(board, torch.device("cpu"), clock=lambda: 50.0)
    log.read({slot: (9, "train", 0)})
    assert of_worker(log, slot) == [FIRST, LATER]
    first: MemoryReading = log.workers[slot][3].items[0]
    assert first.at_s == board.worker(slot).numbers[AT["created_ns"]] / 1e9 + log._offset_s


def test_each_reading_of_a_worker_counts_once(board: Board) -> None:
    slot = begin(board, 9, in_ring(FIRST, FIRST))
    log = MemoryLog(board, torch.device("cpu"))
    log.read({slot: (9, "train", 0)})
    log.read({slot: (9, "train", 0)})
    board.worker(slot).write("memory", in_ring(FIRST, LATER))
    log.read({slot: (9, "train", 0)})
    assert of_worker(log, slot) == [FIRST, (700, None, None), LATER]


def test_the_next_worker_of_a_ring_begins_anew(board: Board) -> None:
    slot = begin(board, 9, in_ring(FIRST, LATER))
    log = MemoryLog(board, torch.device("cpu"))
    log.read({slot: (9, "train", 0)})
    begin(board, 10, in_ring(FIRST, LATER))
    log.read({slot: (10, "train", 0)})
    assert of_worker(log, slot) == [FIRST, LATER]
    assert log.workers[slot][2] == 10


def test_a_ring_that_is_still_of_the_worker_before_says_nothing(board: Board) -> None:
    slot = begin(board, 9, in_ring(FIRST, LATER))
    log = MemoryLog(board, torch.device("cpu"))
    log.read({slot: (10, "train", 0)})
    assert of_worker(log, slot) == [(None, None, None)]


def test_a_worker_that_has_ended_keeps_what_was_read(board: Board, living: dict[int, bool]) -> None:
    slot = begin(board, 9, in_ring(FIRST, FIRST))
    log = MemoryLog(board, torch.device("cpu"))
    log.read({slot: (9, "train", 0)})
    living[9] = False
    log.read({slot: (9, "train", 0)})
    assert of_worker(log, slot) == [FIRST]


def test_a_worker_that_ends_and_has_no_memory_any_more_is_not_read(board: Board, rss: dict[int, int]) -> None:
    slot = begin(board, 9, in_ring(FIRST, FIRST))
    log = MemoryLog(board, torch.device("cpu"))
    log.read({slot: (9, "train", 0)})
    rss[9] = 0
    log.read({slot: (9, "train", 0)})
    assert [each.rss for each in log.workers[slot][3].items] == [400 * MIB]


@pytest.mark.parametrize("word", ["", "[[0,1", "[[0,1,2],[3]]", "[1,2]", "{}"])
def test_a_word_that_is_half_there_is_none(board: Board, word: str) -> None:
    slot = begin(board, 9, word)
    log = MemoryLog(board, torch.device("cpu"))
    log.read({slot: (9, "train", 0)})
    assert (out_of_ring(word), of_worker(log, slot)) == (None, [(700, None, None)])


def test_the_largest_word_has_room(board: Board) -> None:
    large = PrivateMemory(10**12, 1 << 44, 1 << 44)
    slot = begin(board, 9, in_ring(large, large))
    assert out_of_ring(board.worker(slot).read("memory")) == (large, large)


def test_what_grows_in_the_training_process_is_in_its_record(board: Board) -> None:
    log = MemoryLog(board, torch.device("cpu"))
    log.note_leak("Net.seen (list) grew from 0 to 900 entries")
    assert records_of(board.file)[0].leak == "Net.seen (list) grew from 0 to 900 entries"
    log.note_leak("")
    assert records_of(board.file)[0].leak == ""


def test_open_files_of_workers_are_read(board: Board) -> None:
    slot = begin(board, os.getpid())
    log = MemoryLog(board, torch.device("cpu"))
    log.read({slot: (os.getpid(), "train", 0)})
    own, of_worker = log.rank.items[0], log.workers[slot][3].items[0]
    assert (of_worker.files, of_worker.files_limit) == (own.files, own.files_limit)
    assert records_of(board.file)[1].memory[0].files == own.files


def test_a_reading_is_due_as_soon_as_much_more_is_used_than_ever(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    used = {"free": 100 * MIB, "opened": 100}
    monkeypatch.setattr(MemoryFiles, "shared", lambda files: (used["free"], GIB))
    monkeypatch.setattr(MemoryFiles, "descriptors", lambda files, pid="self": (used["opened"], 1024))
    log = MemoryLog(board, torch.device("cpu"))
    log.read({})

    def is_due(mib: int, opened: int) -> bool:
        used.update(free=mib * MIB, opened=opened)
        return log.is_used_up()

    assert [is_due(100, 100), is_due(93, 131), is_due(92, 90), is_due(99, 132)] == [False, False, True, True]
    is_due(92, 132)
    log.read({})
    assert [is_due(93, 163), is_due(85, 100), is_due(84, 100), is_due(92, 164)] == [False, False, True, True]
