"""The ring: what is written is read back, whatever is half there."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from lightning_gpuopt.recorder import rank_files, ring_reader
from lightning_gpuopt.recorder.board import Board
from lightning_gpuopt.recorder.rank_files import RingFile
from lightning_gpuopt.recorder.ring import (
    AT,
    HEADER_BYTES,
    MAX_WORKERS,
    RANK_BYTES,
    Ring,
    reading_in,
    record_of,
    slot_line,
)
from lightning_gpuopt.recorder.ring_reader import headers_in, records_in, records_of


class Unspeakable:
    def __str__(self) -> str:
        raise ValueError("not even that")


def new_ring(size: int = RANK_BYTES) -> tuple[bytearray, Ring]:
    memory = bytearray(size)
    return memory, Ring(memoryview(memory))


def test_what_was_begun_is_read_back():
    memory, ring = new_ring()
    ring.begin({"host": "node-1", "run": "r", "loader": "train"}, pid=7, start_ticks=8, rank=3, world_size=4, worker=2)
    record = record_of(bytes(memory))
    assert record is not None
    assert (record.host, record.run, record.loader) == ("node-1", "r", "train")
    assert (record.pid, record.start_ticks, record.rank, record.world_size, record.worker) == (7, 8, 3, 4, 2)
    assert (record.index, record.batches, record.turn, record.doing) == (None, None, None, "starts")


def test_bytes_of_nobody_are_no_record():
    memory, _ = new_ring()
    assert record_of(bytes(memory)) is None
    assert record_of(b"GPUOPT02") is None
    assert record_of(b"") is None


def test_times_are_those_of_the_readers_clock(monkeypatch):
    """It has been set since: what took a second took no hour, and is no hour ago."""
    memory, ring = new_ring()
    ring.begin({})
    numbers = ring.numbers
    numbers[AT["written_ns"]] = 7_000_000_000
    ring.log("signal", signal=15)
    monkeypatch.setattr(time, "monotonic", lambda: 8.0)
    for wall_s in (1000.0, 4600.0):
        monkeypatch.setattr(time, "time", lambda now_s=wall_s: now_s)
        record = record_of(bytes(memory))
        assert record is not None
        assert (record.written_s, record.progress_s) == (wall_s - 1.0, 0.0)
        assert record.events[0]["t"] == json.loads(bytes(memory[HEADER_BYTES:]).split(b"\n")[0])["t"] + wall_s - 8.0


def test_times_of_another_machine_are_those_of_its_clock():
    memory, ring = new_ring()
    ring.begin({})
    ring.write("boot", "of-another-machine")
    numbers = ring.numbers
    numbers[AT["created_wall_ns"]], numbers[AT["created_ns"]] = 1_000_000_000_000, 5_000_000_000
    numbers[AT["written_ns"]] = 7_000_000_000
    record = record_of(bytes(memory))
    assert record is not None
    assert (record.created_s, record.written_s, record.progress_s) == (1000.0, 1002.0, 0.0)


def test_a_rank_and_its_workers_have_one_clock(board):
    board.rank.begin({}, written_ns=6_000_000_000)
    board.worker(0).begin({}, worker=0, pid=1, written_ns=7_000_000_000)
    for ring, wall_s in ((board.rank, 1000), (board.worker(0), 5000)):
        ring.write("boot", "of-another-machine")
        ring.numbers[AT["created_wall_ns"]], ring.numbers[AT["created_ns"]] = wall_s * 10**9, 5 * 10**9
    rank, worker = records_of(board.file)
    assert (rank.written_s, worker.written_s) == (1001.0, 1002.0)


@pytest.mark.parametrize(
    ("key", "read"),
    [
        (torch.tensor([1, 2]), "Tensor"),
        (Unspeakable(), "Unspeakable"),
        (5, 5),
        (-3, -3),
        (True, 1),
        (2**70, str(2**70)),
        ("a/b.jpg", "a/b.jpg"),
        (("x", 1), "('x', 1)"),
    ],
)
def test_the_key_of_a_sample(key, read):
    memory, ring = new_ring()
    ring.begin({})
    ring.index(key)
    record = record_of(bytes(memory))
    assert record is not None
    assert record.index == read
    assert ring.noted_index() == read


def test_the_place_of_a_worker_is_where_it_was_seen_last():
    memory, ring = new_ring()
    ring.begin({"place": "its beginning", "reads": "its beginning"}, worker=0)
    ring.index(5)
    ring.write("place", "deep inside")
    record = record_of(memory)
    assert record is not None
    assert (record.place, record.reads) == ("deep inside", "its beginning")


def test_the_place_is_that_of_the_open_slot():
    memory, ring = new_ring()
    ring.begin({"place": "last seen"})
    lines = [
        slot_line(0, "data_wait", ""),
        slot_line(2, "forward", "step"),
        slot_line(reading_in(2), "forward", "read"),
        slot_line(5, "hook", ""),
        slot_line(reading_in(5), "hook", "a sampler, or what else the loader has called"),
    ]
    ring.write("slots", "\n".join([*lines, '[7,"cut'])[:-1])

    def read(slot):
        ring.numbers[AT["slot"]] = slot
        record = record_of(bytes(memory))
        assert record is not None
        return record.phase, record.place

    assert [read(slot) for slot in (-1, 0, 2, 5, 7)] == [
        ("", "last seen"),
        ("data_wait", ""),
        ("forward", "step"),
        ("hook", "a sampler, or what else the loader has called"),
        ("", "last seen"),
    ]
    ring.index(5)
    assert read(2) == ("forward", "read")
    assert read(0) == ("data_wait", "last seen")
    ring.write("reads", "where samples are read")
    assert (read(0), read(2)) == (("data_wait", "where samples are read"), ("forward", "read"))


def test_long_words_are_cut_and_may_be_cut_inside_of_a_letter():
    memory, ring = new_ring()
    ring.begin({"host": "é" * 100})
    record = record_of(bytes(memory))
    assert record is not None
    assert record.host == "é" * 31 + "\N{REPLACEMENT CHARACTER}"


def test_the_log_goes_round_and_keeps_the_last_lines():
    memory, ring = new_ring(HEADER_BYTES + 1000)
    ring.begin({})
    for number in range(100):
        ring.log("memory", number=number)
    record = record_of(bytes(memory))
    assert record is not None
    numbers = [each["number"] for each in record.events]
    assert numbers == list(range(100 - len(numbers), 100))
    assert len(numbers) >= 12


def test_threads_that_log_at_once_lose_no_line():
    memory, ring = new_ring()
    ring.begin({})
    begin = threading.Barrier(4)

    def log(thread):
        begin.wait()
        for number in range(200):
            ring.log("signal", thread=thread, number=number)

    threads = [threading.Thread(target=log, args=(thread,)) for thread in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    record = record_of(bytes(memory))
    assert record is not None
    assert sorted((each["thread"], each["number"]) for each in record.events) == [
        (thread, number) for thread in range(4) for number in range(200)
    ]


def test_a_half_line_and_a_line_of_somebody_else_are_left_out():
    memory, ring = new_ring(HEADER_BYTES + 4000)
    ring.begin({})
    ring.log("signal", signal=15)
    end = HEADER_BYTES + ring.numbers[AT["logged"]]
    junk = b'[1]\n{"t":"x","event":"a"}\n{"event":"a"}\n{"t":1,"event":"ok"}\n{"t":1,"ev'
    memory[end : end + len(junk)] = junk
    ring.numbers[AT["logged"]] += len(junk)
    record = record_of(bytes(memory))
    assert record is not None
    assert [each["event"] for each in record.events] == ["signal", "ok"]


def test_a_line_that_does_not_fit_is_left_out():
    memory, ring = new_ring(HEADER_BYTES + 1000)
    ring.begin({})
    ring.log("exception", frames=["x" * 1000])
    ring.log("signal", signal=2)
    record = record_of(bytes(memory))
    assert record is not None
    assert [each["event"] for each in record.events] == ["signal"]


def test_a_message_that_does_not_fit_is_cut():
    memory, ring = new_ring(HEADER_BYTES + 1000)
    ring.begin({})
    ring.log("exception", type="ValueError", message="語" * 1000)
    record = record_of(bytes(memory))
    assert record is not None
    assert [(each["type"], each["message"]) for each in record.events] == [("ValueError", "語" * 250)]


def test_a_ring_of_numbers_that_make_no_sense_is_read():
    memory, ring = new_ring()
    ring.begin({})
    for at in range(len(AT)):
        ring.numbers[at] = -(2**62)
    ring.write("indices", "[1, ")
    record = record_of(bytes(memory))
    assert record is not None
    assert (record.doing, record.ended, record.indices, record.events) == ("set-up", "", (), ())


@pytest.fixture
def board():
    board = Board()
    board.rank.begin({"host": "h", "run": "r"}, pid=os.getpid(), rank=0)
    yield board
    board.close()


def test_workers_have_rings_by_loader_and_number(board):
    assert [board.slot("train", 0), board.slot("train", 1), board.slot("validation", 0)] == [0, 1, 2]
    assert board.slot("train", 1) == 1
    assert board.slots == 3
    for number in range(MAX_WORKERS):
        board.slot("other", number)
    assert board.slot("other", MAX_WORKERS) is None


def test_a_file_of_as_many_workers_as_there_is_room_for_is_no_larger_than_1_mib(board, tmp_path):
    file = RingFile(tmp_path / "a.ring", board)
    for number in range(MAX_WORKERS):
        ring = board.worker(board.slot("train", number))
        ring.begin({"loader": "train"}, pid=100 + number, worker=number)
        for line in range(30):
            ring.log("exception", type="KeyError", line=line, message="x" * 400)
    file.write()
    file.close()
    assert (tmp_path / "a.ring").stat().st_size == 1 << 20
    _, *workers = records_in(tmp_path)
    assert [each.pid for each in workers] == [100 + number for number in range(MAX_WORKERS)]
    assert [[event["line"] for event in each.events][-10:] for each in workers] == [list(range(20, 30))] * MAX_WORKERS


def test_what_a_worker_may_say_of_an_exception_has_room(board):
    ring = board.worker(board.slot("train", 0))
    ring.begin({}, pid=7, worker=0)
    frames = [f"{'f' * 60} (some/package/and/a/module_of_it.py:{number})" for number in range(12)]
    ring.log("exception", type="t" * 100, message='"' * 2000, where=frames[0], frames=frames)
    (_, worker) = records_of(board.file)
    assert worker.events[0]["frames"] == frames


def test_memory_is_read_by_who_holds_it(board):
    slot = board.slot("train", 0)
    board.worker(slot).begin({"loader": "train"}, pid=11, rank=0, worker=0)
    board.rank.log("memory", rss=5, limit=9, workers=[[slot, 1, 2, 3, 4, 5, 6], ["x"], None])
    board.rank.log("signal", signal=15)
    rank, worker = records_of(board.file)
    assert [each["event"] for each in rank.events] == ["signal"]
    assert [(each.rss, each.limit, each.private) for each in rank.memory] == [(5, 9, None)]
    assert (worker.pid, worker.worker) == (11, 0)
    read = [(each.rss, each.private, each.faults, each.samples, each.files, each.files_limit) for each in worker.memory]
    assert read == [(1, 2, 3, 4, 5, 6)]
    head = headers_in(board.file)
    assert head is not None
    assert (head.pid, head.events) == (os.getpid(), ())


def test_a_file_is_a_copy(board, tmp_path, monkeypatch):
    monkeypatch.setattr(ring_reader, "wall_offset_s", lambda _: 0.0)
    file = RingFile(tmp_path / "recorder" / "a.ring" if (tmp_path / "recorder").mkdir() else tmp_path / "a.ring", board)
    slot = board.slot("train", 3)
    for number in range(5000):
        board.rank.log("memory", rss=number)
        if number % 700 == 0:
            file.write()
    board.worker(slot).begin({"loader": "train"}, pid=12, rank=0, worker=3)
    board.worker(slot).log("exception", type="KeyError")
    file.write()
    assert records_in(tmp_path) == records_of(board.file)
    board.worker(slot).begin({"loader": "train"}, pid=13, rank=0, worker=3)  # its successor
    file.write()
    assert [each.pid for each in records_in(tmp_path)] == [os.getpid(), 13]
    assert records_in(tmp_path) == records_of(board.file)
    file.close()


def test_a_full_disk_is_tried_again_later(board, tmp_path, monkeypatch):
    now = [0.0]
    file = RingFile(tmp_path / "a.ring", board, clock=lambda: now[0])
    written = []
    real = os.pwrite

    def full(*_):
        written.append(now[0])
        raise OSError(28, "full")

    monkeypatch.setattr(rank_files.os, "pwrite", full)
    file.write()
    file.write()
    monkeypatch.setattr(rank_files.os, "pwrite", real)
    file.write()
    assert (written, records_in(tmp_path)) == ([0.0], [])
    now[0] = 10.0
    file.write()
    assert [each.rank for each in records_in(tmp_path)] == [0]
    file.close()


@pytest.mark.parametrize("junk", [b"", b"GPUOPT02" + bytes(50), os.urandom(300_000)], ids=["empty", "short", "random"])
def test_files_of_others_are_passed_over(junk, tmp_path: Path):
    (tmp_path / "x.ring").write_bytes(junk)
    assert records_in(tmp_path) == []


def test_words_of_the_log_are_what_json_can_hold_or_text():
    memory, ring = new_ring()
    ring.begin({})
    ring.log("exception", index=Path("a"))
    record = record_of(bytes(memory))
    assert record is not None
    assert json.loads(json.dumps(record.events[0]["index"])) == "a"
