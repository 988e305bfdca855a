"""Real trainings that hang for as long as their detector was told, and what ``post-mortem`` says of them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_gpuopt.cli import main
from tests.fork_server import start
from tests.helpers import wait_for
from tests.ranks import free_port

pytestmark = pytest.mark.timed
"""The fit that hangs late does so on a machine that is not busy."""

SCRIPT = str(Path(__file__).with_name("hanging_script.py"))

# kind: rank, worker, index, where
HANGS = {
    "step-lock": (0, None, None, "take_the_lock (hanging_script.py:"),
    "step-loop": (0, None, None, "loop (hanging_script.py:"),
    "step-pipe": (0, None, None, "fill_a_pipe (hanging_script.py:"),
    "data-sleep": (0, 1, 12, "fall_asleep (hanging_script.py:"),
    "samples-lock": (0, 0, 12, "take_the_lock (hanging_script.py:"),
    "rank1-sleep": (1, None, None, "fall_asleep (hanging_script.py:"),
    "hook-sleep": (0, None, None, "fall_asleep (hanging_script.py:"),
    "logger-lock": (0, None, None, "take_the_lock (hanging_script.py:"),
    "validation-sleep": (0, None, None, "fall_asleep (hanging_script.py:"),
    "save-sleep": (0, None, None, "fall_asleep (hanging_script.py:"),
}


@contextmanager
def hanging(kind: str, folder: Path) -> Iterator[list[psutil.Process]]:
    """The processes of such a training, its main one first, once they hang."""
    environment = {**os.environ, "MASTER_PORT": str(free_port())}
    family = [psutil.Process(start([SCRIPT, kind, str(folder)], environment).pid)]
    try:
        wait_for((folder / "stuck").exists)
        family += family[0].children(recursive=True)
        yield family
    finally:
        end(family)


def end(family: list[psutil.Process]) -> None:
    for each in family:
        with suppress(psutil.NoSuchProcess):
            each.kill()
            each.wait()


def wait_for_the_detector(kind: str, folder: Path) -> None:
    """Until the detector of each rank has reported that it hangs."""
    ranks = 1 + kind.startswith("rank1")
    stuck_ns = (folder / "stuck").stat().st_mtime_ns
    wait_for(lambda: sum(each.stat().st_mtime_ns > stuck_ns for each in folder.glob("hang-*.txt")) == ranks)


def said(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["post-mortem", str(folder), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def brief(found: dict[str, Any]) -> tuple[Any, ...]:
    return found["ended"], found["process"]["rank"], found["process"]["worker"], found["index"]


@pytest.mark.parametrize("kind", HANGS)
def test_it_is_a_hang_while_it_hangs_and_after_it_was_killed(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank, worker, index, where = HANGS[kind]
    with hanging(kind, tmp_path) as family:
        wait_for_the_detector(kind, tmp_path)
        hangs = said(tmp_path, capsys)
        end(family)
        killed = said(tmp_path, capsys)
    for found in (hangs, killed):
        assert brief(found) == ("hang", rank, worker, index), found["text"]
        assert found["where"].startswith(where)
        assert "(a hang is 2 s)" in found["text"]
        assert found["memory"]["shm_size_bytes"] >= found["memory"]["shm_free_bytes"] > 0
    assert "Then it was ended from outside: killed." in killed["text"]


def test_a_call_that_keeps_the_interpreters_lock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with hanging("step-c", tmp_path):
        wait_for(lambda: said(tmp_path, capsys)["ended"] == "hang")
        found = said(tmp_path, capsys)
    assert brief(found) == ("hang", 0, None, None)
    assert found["memory"]["rss_bytes"] > 0


@pytest.mark.parametrize("kind", ["step-lock", "data-sleep", "rank1-sleep", "save-sleep"])
def test_after_ctrl_c_it_is_where_it_was(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank, worker, index, where = HANGS[kind]
    with hanging(kind, tmp_path) as family:
        wait_for_the_detector(kind, tmp_path)
        os.killpg(family[0].pid, signal.SIGINT)
        family[0].wait()
        found = said(tmp_path, capsys)
    assert brief(found) == ("hang", rank, worker, index), found["text"]
    assert found["where"].startswith(where)
    assert "Then it was ended from outside: interrupted." in found["text"]
    assert "KeyboardInterrupt" not in found["likely"]
