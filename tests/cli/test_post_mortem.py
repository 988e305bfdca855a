"""``lightning-gpuopt post-mortem``: which files it reads, what it prints, and a process that hangs now."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from lightning_gpuopt.cli import main
from lightning_gpuopt.postmortem.record import FILE, PostMortem, Process
from lightning_gpuopt.recorder.board import Board
from lightning_gpuopt.recorder.reader import ring_files
from lightning_gpuopt.recorder.ring import AT
from lightning_gpuopt.recorder.ring_file import RingFile
from lightning_gpuopt.watch.mailbox import COMMAND_FILE

KEYS = ["ended", "process", "where", "index", "signal", "memory", "likely", "advice", "text"]
HERE = socket.gethostname()
NO_PID = 2**22 + 1
"""Above the largest process id that Linux gives."""

WRITTEN = PostMortem("segfault", Process(0, 1, 7), "f (a.py:1)", 5, 11, {"rss_bytes": 9}, "", "", "Worker 1 crashed.")


def write_rings(folder, *, run="run-1", host=HERE, ago_s=60.0, error="", rank=0):
    """Rings of a rank and of a worker that read sample 7, both gone, as they were so many seconds ago."""
    folder.mkdir(parents=True, exist_ok=True)
    board = Board()
    slot = board.slot("train", 0)
    then_ns = time.monotonic_ns() - int(ago_s * 1e9)
    known = {"pid": NO_PID, "start_ticks": 1, "rank": rank, "written_ns": then_ns, "progress_ns": then_ns}
    board.rank.begin({"run": run, "host": host, "place": "Net.step (net.py:2)"}, **known, steps=5)
    worker = board.worker(slot)
    worker.begin({"run": run, "host": host, "place": "Data.read (data.py:4)"}, **known, worker=0)
    worker.index(7)
    if error:
        board.rank.log("exception", type="ValueError", message=error, where="Net.step (net.py:3)")
        board.rank.numbers[AT["ended"]] = 2
    file = RingFile(folder / f"rank-{rank}-{run}.ring", board)
    file.write()
    file.close()
    board.close()


def write_post_mortem(folder, post=WRITTEN, *, ago_s=0.0):
    folder.mkdir(parents=True, exist_ok=True)
    post.save(folder / FILE)
    at_s = time.time() - ago_s
    os.utime(folder / FILE, (at_s, at_s))


def watched_run(parent, name="2026-01-01_12-00-00"):
    run = parent / name
    (run / "fit-1").mkdir(parents=True)
    (run / COMMAND_FILE).write_text("python train.py\n")
    return run


def as_json(folder, capsys):
    assert main(["post-mortem", str(folder), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out)
    assert list(found) == KEYS
    return found


def test_what_was_written_is_printed(tmp_path, capsys):
    write_post_mortem(tmp_path)
    assert main(["post-mortem", str(tmp_path)]) == 0
    assert capsys.readouterr() == ("Worker 1 crashed.\n", "")
    assert as_json(tmp_path, capsys) == json.loads(WRITTEN.to_json())


def test_rings_are_read(tmp_path, capsys):
    write_rings(tmp_path / "recorder", error="loss is nan")
    found = as_json(tmp_path, capsys)
    assert (found["ended"], found["where"], found["signal"]) == ("exception", "Net.step (net.py:3)", None)
    assert found["process"] == {"rank": 0, "worker": None, "pid": NO_PID}
    assert main(["post-mortem", str(tmp_path)]) == 0
    assert capsys.readouterr() == (f"{found['text']}\n", "")


@pytest.mark.parametrize(
    "asked", ["", "2026-01-01_12-00-00", "2026-01-01_12-00-00/fit-1", "2026-01-01_12-00-00/recorder"]
)
def test_a_watched_run_is_found_from_each_of_its_folders(asked, tmp_path, capsys):
    write_rings(watched_run(tmp_path) / "recorder", error="loss is nan")
    assert as_json(tmp_path / asked, capsys)["ended"] == "exception"


@pytest.mark.parametrize("asked", ["", "2026-01-01_12-00-00", "2026-01-01_12-00-00/fit-1"])
def test_the_post_mortem_of_a_watched_run_is_found(asked, tmp_path, capsys):
    write_post_mortem(watched_run(tmp_path))
    assert as_json(tmp_path / asked, capsys)["ended"] == "segfault"


def test_the_working_folder_may_be_that_of_a_fit(tmp_path, capsys, monkeypatch):
    run = watched_run(tmp_path)
    write_post_mortem(run)
    monkeypatch.chdir(run / "fit-1")
    assert as_json(".", capsys)["ended"] == "segfault"


def test_the_last_run_of_a_parent_folder_counts(tmp_path, capsys):
    write_post_mortem(watched_run(tmp_path, "a"), ago_s=500)
    write_rings(watched_run(tmp_path, "b") / "recorder", run="run-b", ago_s=400)
    write_rings(watched_run(tmp_path, "c") / "recorder", run="run-c", error="the last", ago_s=300)
    assert "the last" in as_json(tmp_path, capsys)["text"]
    write_post_mortem(watched_run(tmp_path, "d"), ago_s=200)
    assert as_json(tmp_path, capsys)["ended"] == "segfault"


def test_deep_trees_are_not_walked(tmp_path):
    write_rings(tmp_path / "a" / "b" / "recorder")
    assert ring_files(tmp_path) == []
    assert len(ring_files(tmp_path / "a")) == 1


def test_rings_that_are_newer_than_the_post_mortem_count(tmp_path, capsys):
    write_rings(tmp_path / "recorder", error="loss is nan", ago_s=60)
    write_post_mortem(tmp_path, ago_s=90)
    assert as_json(tmp_path, capsys)["ended"] == "exception"
    write_post_mortem(tmp_path, ago_s=30)
    assert as_json(tmp_path, capsys)["ended"] == "segfault"


def test_rings_are_read_where_the_post_mortem_is_broken(tmp_path, capsys):
    write_rings(tmp_path / "recorder", error="loss is nan")
    (tmp_path / FILE).write_bytes(b'{"ended": "\xff')
    assert as_json(tmp_path, capsys)["ended"] == "exception"


def test_a_process_that_vanished(tmp_path, capsys):
    write_rings(tmp_path / "recorder")
    found = as_json(tmp_path, capsys)
    assert (found["ended"], found["where"], found["signal"]) == ("killed", "Net.step (net.py:2)", None)


@pytest.mark.parametrize(("ago_s", "ended"), [(1.0, "unknown"), (60.0, "killed")])
def test_a_process_of_another_machine_is_there_while_it_writes(ago_s, ended, tmp_path, capsys):
    write_rings(tmp_path / "recorder", host="another-machine", ago_s=ago_s)
    assert as_json(tmp_path, capsys)["ended"] == ended


def broken_json(folder):
    (folder / FILE).write_text("{")


def broken_ring(folder):
    (folder / "rank-0.ring").write_bytes(b"GPUOPT01")


NOTHING = {
    "no-such-folder": (lambda folder: folder.rmdir(), "no such folder"),
    "a-file": (lambda folder: (folder.rmdir(), folder.write_text("x")), "no such folder"),
    "empty": (lambda _: None, "without any"),
    "broken-post-mortem": (broken_json, "expected a post-mortem in JSON"),
    "broken-ring": (broken_ring, "without any"),
    "healthy-watched-run": (lambda folder: watched_run(folder), "without any"),
}


@pytest.mark.parametrize(("make", "said"), NOTHING.values(), ids=NOTHING)
def test_where_nothing_can_be_read_it_is_one_line(make, said, tmp_path, capsys):
    folder = tmp_path / "reports"
    folder.mkdir()
    make(folder)
    assert main(["post-mortem", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert str(folder) in err


def test_wrong_usage_is_one_line(capsys):
    assert main(["post-mortem"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


HANGING = """
import socket, sys, threading, time
from pathlib import Path
from lightning_gpuopt.recorder.board import Board
from lightning_gpuopt.recorder.ring import AT
from lightning_gpuopt.recorder.ring_file import RingFile
from lightning_gpuopt.recorder.stacks import StackWriter, start_ticks
import os

path, quiet_s, beats = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "beats"
board, stacks = Board(), StackWriter(str(path.with_suffix(".stacks")))
now = time.monotonic_ns()
then = now - quiet_s * 10**9
board.rank.begin(
    {"run": "r", "host": socket.gethostname(), "place": "Net.seen_before (net.py:1)", "stacks": stacks.path},
    pid=os.getpid(), start_ticks=start_ticks(), steps=5, doing=5, progress_ns=then, since_ns=then,
    written_ns=now if beats else now - 9 * 10**9, stack_signal=stacks.signal,
)
file = RingFile(path, board)
file.write()
main = threading.get_ident()

def beat():
    while not threading.Event().wait(0.02):
        board.rank.numbers[AT["written_ns"]] = time.monotonic_ns()
        file.write()
        if stacks.is_asked_for():
            stacks.write(main)

def waits_for_ever():
    if beats:
        threading.Thread(target=beat, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()

exec(compile("def training_step(): waits_for_ever()", "/home/me/net.py", "exec"))
training_step()
"""


@pytest.fixture
def hanging(tmp_path, request):
    """A process without progress for a while, whose recorder beats, or has stopped."""
    quiet_s, beats = request.param
    path = tmp_path / "recorder" / "rank-0.ring"
    path.parent.mkdir()
    command = [sys.executable, "-c", HANGING, str(path), str(quiet_s), beats]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.mark.parametrize("hanging", [(300, "beats"), (300, "stopped")], indirect=True)
def test_a_process_that_hangs_now(hanging, tmp_path, capsys):
    write_post_mortem(tmp_path)  # of an earlier run: a process that lives counts more
    found = as_json(tmp_path, capsys)
    assert (found["ended"], found["process"]) == ("hang", {"rank": 0, "worker": None, "pid": hanging.pid})
    assert found["where"] == "waits_for_ever (<string>:34)"
    assert hanging.poll() is None


@pytest.mark.parametrize("hanging", [(5, "beats")], indirect=True)
def test_a_process_that_goes_on(hanging, tmp_path, capsys):
    found = as_json(tmp_path, capsys)
    assert (found["ended"], found["process"]) == ("unknown", None)
    assert found["text"] == "The run goes on: 5 steps so far, and no hang."
    assert hanging.poll() is None
