"""Real trainings that die or hang under ``lightning-gpuopt watch``, and what is said of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import psutil
import pytest

from lightning_gpuopt.cli import main
from lightning_gpuopt.postmortem.hangs import hang_of
from lightning_gpuopt.recorder.ring_reader import records_in
from lightning_gpuopt.watch.flight_watch import FlightWatch
from lightning_gpuopt.watch.shared_notes import Watch
from tests import fork_server
from tests.ranks import free_port

pytestmark = pytest.mark.timed
"""Real deaths are seen when they are: on a machine that is busy, a moment too late."""

SCRIPT = str(Path(__file__).with_name("dying_script.py"))


def environment():
    return {**os.environ, "PYTHONFAULTHANDLER": "", "MASTER_PORT": str(free_port())}


def watch(tmp_path, case, workers, before=(), run=fork_server.run):
    ours = [sys.executable, "-m", "lightning_gpuopt", "watch", "--report-dir", str(tmp_path), "--"]
    process = run([*ours, *before, sys.executable, SCRIPT, case, str(workers)], env=environment())
    (folder,) = tmp_path.iterdir()
    return process, folder


# case, workers: exit code, ended, worker, index, line
DEATHS = {
    "worker-killed": ("data-kill", 2, 1, "killed", 1, 101, "Data.__getitem__ (dying_script.py:"),
    "worker-crashed": ("data-crash", 2, 1, "segfault", 1, 101, "dying_script.py:"),
    "worker-aborted": ("data-abort", 2, 1, "aborted", 1, 101, "__getitem__ (dying_script.py:"),
    "worker-quit": ("data-quit", 2, 1, "exited", 1, 101, "Data.__getitem__ (dying_script.py:"),
    "worker-exit": ("data-exit", 2, 1, "exited", 1, 101, "<lambda> (dying_script.py:"),
    "worker-raised": ("data-raise", 2, 1, "exception", 1, 101, "break_out (dying_script.py:"),
    "worker-without-files": ("data-files", 2, 1, "exception", 1, 101, "open_files (dying_script.py:"),
    "worker-bus": ("data-bus", 2, 1, "bus_error", 1, 101, "read_beyond_the_end (dying_script.py:"),
    "worker-terminated": ("data-terminate", 2, 1, "terminated", 1, 101, "Data.__getitem__ (dying_script.py:"),
    "rank-killed": ("step-kill", 0, -9, "killed", None, None, "Model.training_step (dying_script.py:"),
    "rank-killed-beside-workers": ("step-kill", 2, -9, "killed", None, None, "Model.training_step (dying_script.py:"),
    "rank-killed-in-validation": ("validation-kill", 0, -9, "killed", None, None, "Model.validation_step (dying_"),
    "rank-killed-in-a-hook": ("hook-kill", 2, -9, "killed", None, None, "Hook.on_train_batch_end (dying_script.py:"),
    "rank-killed-at-a-sample": ("data-kill", 0, -9, "killed", None, 101, "Data.__getitem__ (dying_script.py:"),
    "rank-crashed": ("step-crash", 0, -11, "segfault", None, None, "dying_script.py:"),
    "rank-aborted": ("step-abort", 2, -6, "aborted", None, None, "training_step (dying_script.py:"),
    "rank-raised": ("step-raise", 2, 1, "exception", None, None, "break_out (dying_script.py:"),
    "rank-raised-at-a-sample": ("data-raise", 0, 1, "exception", None, 101, "break_out (dying_script.py:"),
    "rank-quit": ("step-quit", 0, 7, "exited", None, None, "Model.training_step (dying_script.py:"),
    "rank-exit": ("step-exit", 0, 4, "exited", None, None, "(dying_script.py:"),
    "rank-interrupted": ("step-interrupt", 0, 1, "interrupted", None, None, "(dying_script.py:"),
    "test-killed": ("test-kill", 0, -9, "killed", None, None, "Model.test_step (dying_script.py:"),
    "test-worker-killed": ("data-kill-test", 2, 1, "killed", 1, 101, "Data.__getitem__ (dying_script.py:"),
    "predict-raised": ("data-raise-predict", 0, 1, "exception", None, 101, "break_out (dying_script.py:"),
    "before-fit": ("before-raise", 0, 1, "exception", None, None, "break_out (dying_script.py:"),
    "after-fit": ("after-raise", 2, 1, "exception", None, None, "break_out (dying_script.py:"),
    "caught-and-killed": ("data-raise-caught-kill", 2, -9, "killed", None, None, ""),
    "caught-and-exited": ("data-raise-caught-exit", 0, 3, "exited", None, None, ""),
    "caught-and-raised": ("data-raise-caught-raise", 2, 1, "exception", None, None, "<lambda> (dying_script.py:"),
    "rank-terminated": ("step-terminate", 0, 0, "terminated", None, None, ""),
}


@pytest.mark.parametrize("death", DEATHS.values(), ids=DEATHS)
def test_what_ended_it(death, tmp_path):
    case, workers, code, ended, worker, index, where = death
    process, folder = watch(tmp_path, case, workers)
    assert process.returncode == code, process.stderr
    found = json.loads((folder / "post-mortem.json").read_text())
    assert (found["ended"], found["process"]["rank"], found["process"]["worker"]) == (ended, 0, worker), found
    assert found["index"] == index
    assert where in (found["where"] or "")
    first, it_died, then = process.stderr.partition(f"Post-mortem: {found['text']}\n")
    assert it_died
    assert "Verdict:" not in first
    assert "Verdict:" in then or case != "step-raise"
    assert main(["post-mortem", str(folder)]) == 0


LOADER_DEATHS = {
    "killed": ("kill-samples", "killed", "Data.__getitem__ (dying_script.py:"),
    "killed-of-a-module": ("kill-module", "killed", "Data.__getitem__ (dying_script.py:"),
    "crashed": ("crash-samples", "segfault", "dying_script.py:"),
    "aborted": ("abort-module", "aborted", "__getitem__ (dying_script.py:"),
    "quit": ("quit-samples", "exited", "Data.__getitem__ (dying_script.py:"),
    "exit": ("exit-module", "exited", "<lambda> (dying_script.py:"),
    "raised": ("raise-samples", "exception", "break_out (dying_script.py:"),
    "bus": ("bus-samples", "bus_error", "read_beyond_the_end (dying_script.py:"),
}


@pytest.mark.parametrize("death", LOADER_DEATHS.values(), ids=LOADER_DEATHS)
def test_what_ended_a_process_that_loads_samples(death, tmp_path):
    case, ended, where = death
    process, folder = watch(tmp_path, f"data-{case}", 2)
    assert process.returncode == 1, process.stderr
    found = json.loads((folder / "post-mortem.json").read_text())
    assert (found["ended"], found["process"]["rank"], found["index"]) == (ended, 0, 101), found
    assert found["process"]["worker"] in (0, 1)  # whichever was free took the sample
    assert where in (found["where"] or "")
    assert f"Post-mortem: {found['text']}" in process.stderr


@pytest.mark.parametrize(("case", "workers"), [("data-raise-caught-well", 2), ("step-leave", 0)])
def test_nothing_is_left_of_a_fit_that_was_given_up(case, workers, tmp_path):
    process, folder = watch(tmp_path, case, workers)
    assert (process.returncode, records_in(folder)) == (0, [])
    assert "Post-mortem" not in process.stderr
    assert sorted(each.name for each in folder.rglob("*") if "ring" in each.name or "recorder" in each.name) == []


def test_the_end_of_a_process_is_told_though_its_parent_ends_well(tmp_path):
    process, folder = watch(tmp_path, "step-kill", 0, before=("sh", "-c", '"$@"; true', "sh"))
    assert process.returncode == 0
    found = json.loads((folder / "post-mortem.json").read_text())
    assert (found["ended"], found["process"]["worker"]) == ("killed", None)
    assert f"Post-mortem: {found['text']}" in process.stderr


def test_a_trial_that_failed_before_one_that_ended_well_is_the_scripts_own_affair(tmp_path):
    trials = '"$1" "$2" step-raise 0; "$1" "$2" none 0'
    process, folder = watch(tmp_path, "", 0, before=("sh", "-c", trials, "sh"))
    assert (process.returncode, "Post-mortem" in process.stderr) == (0, False), process.stderr
    assert not (folder / "post-mortem.json").exists()


RANKS = {
    "raised": ("rank1-raise", 0, "exception", "break_out (dying_script.py:"),
    "killed": ("rank1-kill", 2, "killed", "Model.training_step (dying_script.py:"),
    "quit": ("rank1-quit", 0, "exited", "Model.training_step (dying_script.py:"),
    "raised-forked": ("rank1-raise-forked", 0, "exception", "break_out (dying_script.py:"),
    "crashed": ("rank1-crash", 0, "segfault", "dying_script.py:"),
    "uneven": ("uneven", 0, "exception", ""),
}


@pytest.mark.parametrize(("case", "workers", "ended", "where"), RANKS.values(), ids=RANKS)
def test_which_rank_ended_first(case, workers, ended, where, tmp_path):
    _, folder = watch(tmp_path, case, workers)
    found = json.loads((folder / "post-mortem.json").read_text())
    assert (found["ended"], found["process"]["rank"], found["process"]["worker"]) == (ended, 1, None), found
    assert where in (found["where"] or "")
    if case == "uneven":
        assert re.match(r"Rank 1 ended its epoch (\d+ batch(es)? )?early \(25, not \d+", found["text"]), found["text"]


def test_the_kernel_ends_a_worker_for_want_of_memory(tmp_path):
    group = Path("/sys/fs/cgroup/memory") / f"gpuopt-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(1536 << 20))
    except OSError:
        pytest.skip("no memory cgroup (version 1) can be made here")
    try:
        enter = lambda: (group / "cgroup.procs").write_text(str(os.getpid()))  # noqa: E731
        _, folder = watch(tmp_path, "data-eat", 2, run=partial(subprocess.run, preexec_fn=enter, check=False))
    finally:
        group.rmdir()
    found = json.loads((folder / "post-mortem.json").read_text())
    assert (found["ended"], found["process"]["worker"], found["index"]) == ("out_of_memory", 1, 101)
    assert (found["memory"]["limit_bytes"], found["memory"]["oom_kills"]) == (1536 << 20, 1)


HANGS = {
    "a-test": ("data-sleep-test", 2, 1, 101, "fall_asleep", ""),
    "a-lock": ("data-lock", 2, 0, 0, "take_the_lock", "a lock that was held during the fork"),
    "a-sample": ("data-sleep", 2, 1, 101, "fall_asleep", ""),
    "a-step": ("step-sleep", 2, None, None, "fall_asleep", ""),
    "a-rank": ("rank1-sleep", 0, None, None, "fall_asleep", "the others wait for rank 1"),
}


@pytest.mark.parametrize(("case", "workers", "worker", "index", "where", "likely"), HANGS.values(), ids=HANGS)
def test_what_it_waits_for(case, workers, worker, index, where, likely, tmp_path):
    said, heard = [], threading.Event()

    def say(text):
        said.append(text)
        heard.set()

    flight = FlightWatch(tmp_path, say, partial(hang_of, least_s=2.0, times_longest=0.0, first_s=12.0))
    command = [sys.executable, SCRIPT, case, str(workers)]
    watch = Watch(str(tmp_path))
    watch.begin(command)
    child = fork_server.start(command[1:], flight.environment(watch.environment(environment())))
    family = [psutil.Process(child.pid)]
    try:
        flight.started(child.pid)
        assert heard.wait(60)
        family += family[0].children(recursive=True)
        assert child.poll() is None
        assert main(["post-mortem", str(tmp_path), "--json"]) == 0  # while it hangs
    finally:
        for each in family:
            each.kill()
        child.communicate(30)
    found = flight.finish(-signal.SIGKILL)
    assert found is not None
    assert (found.ended, found.process.worker, found.index) == ("hang", worker, index), found.text
    assert where in (found.where or "")
    assert likely in found.likely
    assert where in (tmp_path / "hang-1.txt").read_text()
    assert len(said) == 1


def test_a_healthy_run_leaves_nothing(tmp_path):
    process, folder = watch(tmp_path, "none", 2)
    assert process.returncode == 0
    assert "Post-mortem" not in process.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["command.txt", "fit-1"]
    assert records_in(folder) == []
