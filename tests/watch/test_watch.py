"""``lightning-gpuopt watch``: real scripts in processes of their own."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_gpuopt.cli import main
from lightning_gpuopt.cli import watch as watch_command
from lightning_gpuopt.diagnosis.record import Change, Finding, RunRecord
from lightning_gpuopt.diagnosis.report import StallReport
from lightning_gpuopt.watch import shared_notes
from lightning_gpuopt.watch.factory import WatchedRun
from lightning_gpuopt.watch.shared_notes import Watch
from lightning_gpuopt.watch.summary import Fit, _found, fits_of, gpu_lines, next_command, render_end, why_none
from tests import fork_server
from tests.ranks import free_port
from tests.watch import watched_scripts as scripts

ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("COLUMNS")} | {"COLUMNS": "80"}

WATCH = [sys.executable, "-m", "lightning_gpuopt", "watch"]
EXECUTED = partial(subprocess.run, capture_output=True, text=True, timeout=100, check=False)
"""As people run it: interpreters that start, and import, by themselves."""

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_notes.tempfile, "NamedTemporaryFile", lambda *_, **__: full())


def start(
    tmp_path: Path, *command: str, ours: tuple[str, ...] = (), new_session: bool = False
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*WATCH, *ours, "--", *command],
        cwd=tmp_path,
        env={**ENVIRONMENT, "MASTER_PORT": str(free_port())},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=new_session,
    )


def watch(
    tmp_path: Path,
    script: str,
    *arguments: str,
    python: tuple[str, ...] = (),
    ours: tuple[str, ...] = (),
    run: Callable[..., subprocess.CompletedProcess[str]] = fork_server.run,
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a watched script."""
    path = tmp_path / "train.py"
    path.write_text(script)
    command = [*WATCH, *ours, "--", sys.executable, *python, str(path), *arguments]
    environment = {**ENVIRONMENT, "MASTER_PORT": str(free_port())}
    done = run(command, env=environment, cwd=tmp_path)
    return done.returncode, done.stdout, done.stderr


def reports(tmp_path: Path) -> list[str]:
    """All files that the watched run has left, hidden ones too, without its own folder's name."""
    [run] = (tmp_path / "gpuopt").iterdir()
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


def test_a_script_that_was_never_written_for_it(tmp_path):
    code, out, err = watch(tmp_path, scripts.PLAIN, "3", run=EXECUTED)
    assert code == 3
    assert out == "callbacks afterwards: ['WatchedRun']\n"
    before, _, ours = err.partition("── lightning-gpuopt watch ")
    assert "lightning_gpuopt" not in before
    assert "The command ended with exit code 3.\nPost-mortem: " in ours
    assert "\nVerdict: main_process_loading   (100 steps" in ours.partition("Post-mortem: ")[2]
    assert re.search(r"where: \d+ % Slow.__getitem__ \(train.py:", ours)
    assert reports(tmp_path) == [
        "command.txt",
        "fit-1/code.json",
        "fit-1/report.html",
        "fit-1/report.json",
        "fit-1/stacks.speedscope.json",
        "post-mortem.json",
    ]
    assert re.search(r"\nReport: gpuopt/\S+/fit-1/report.html\nNext:   lightning-gpuopt watch --fix -- \S+ ", ours)


@pytest.mark.matrix
def test_every_trainer_once_and_the_users_own_detector_is_kept(tmp_path):
    code, out, err = watch(tmp_path, scripts.MANY)
    assert code == 0, err
    assert out.splitlines() == [
        "during: ['WatchedRun', 'QuietDetector']",
        "after: ['Seen', 'WatchedRun']",
        "during: ['WatchedRun', 'QuietDetector', 'WatchedRun']",
        "after: ['Seen', 'WatchedRun', 'WatchedRun']",
        "during: ['StallDetector', 'WatchedRun']",
        "after: ['Seen', 'StallDetector', 'WatchedRun']",
    ]
    assert "4 times fit:\n  fit-1: main_process_loading, 20 steps, " in err
    assert "\n  fit-3: main_process_loading, 20 steps, " in err  # the user's own detector has written it
    assert "\n  fit-4: main_process_loading, 20 steps, " in err
    assert (tmp_path / "own" / "report.json").is_file()
    assert [name for name in reports(tmp_path) if name.endswith("/report.json")] == [
        "fit-1/report.json",
        "fit-2/report.json",
        "fit-3/report.json",  # the user's own detector's
        "fit-4/report.json",
    ]
    [page] = re.findall(r"\nReport: gpuopt/\S+/(fit-\d/report.html)\n", err)
    assert [name for name in reports(tmp_path) if name.endswith(".html")] == [page]  # the one that is shown


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("how", "code", "line"),
    [
        ("raise", 1, "The command ended with exit code 1."),
        ("kill", -signal.SIGKILL, "The command was ended by signal 9."),
        ("interrupt", 1, "The command ended with exit code 1."),
    ],
)
def test_a_script_that_fails_is_reported_as_far_as_it_came(tmp_path, how, code, line):
    returned, _, err = watch(tmp_path, scripts.FAILS, how)
    assert returned == code
    assert line in err
    if how == "kill":
        assert "fit fit-1: the process ended before a report was written." in err
    else:
        assert "Verdict: main_process_loading" in err
    assert not (next((tmp_path / "gpuopt").iterdir()) / ".notes").exists()


@pytest.mark.matrix
def test_a_python_without_the_package_trains_as_before_and_that_is_said(tmp_path):
    code, out, err = watch(tmp_path, scripts.NO_PACKAGE, run=EXECUTED)
    assert (code, out) == (0, "trained\n")
    assert "Nothing was measured: the Python of the command cannot use lightning-gpuopt (ModuleNotFoundError: " in err
    assert list((tmp_path / "gpuopt").iterdir()) == []


def test_a_command_without_a_trainer(tmp_path):
    code, out, err = watch(tmp_path, "print('no training here')", python=("-I",), run=EXECUTED)
    assert (code, out) == (0, "no training here\n")
    assert "Nothing was measured: no Trainer was seen. Possible reasons:" in err
    assert "(it was started with -I)" in err
    assert list((tmp_path / "gpuopt").iterdir()) == []


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, pytest.param(signal.SIGUSR1, marks=pytest.mark.matrix)]
)
def test_signals_are_sent_on_and_the_end_is_the_same(tmp_path, number):
    waits = "import signal, sys\nprint('up', flush=True)\nsignal.pause()"
    process = start(tmp_path, sys.executable, "-c", waits)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == -number


COUNTS = """
import os, signal, sys
signals = {signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
told, tell = os.pipe()
who = "worker" if (pid := os.fork()) == 0 else "script"
if who == "script":
    os.read(told, 1)
os.write(1, f"{who} is up\\n".encode())
os.write(tell, b".")
while (number := signal.sigwait(signals)) != signal.SIGUSR2:
    os.write(1, f"{who} {number.name}\\n".encode())
if who == "script":
    os.kill(pid, signal.SIGUSR2)
    os.waitpid(pid, 0)
"""
"""A script with a process of its own, which both tell of each signal until SIGUSR2 ends them."""


def signalled(tmp_path: Path, send: Callable[[int], None], lines: int) -> list[str]:
    """What the script and its process got of signals that are sent to a watch, of which so many are waited for.

    Each is sent when those before were taken: the kernel makes one of two that wait. What is sent last comes last.
    """
    process = start(tmp_path, sys.executable, "-c", COUNTS, new_session=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["worker is up\n", "script is up\n"]
    got = []
    for _ in range(3):
        send(process.pid)
        got += sorted(process.stdout.readline() for _ in range(lines))
    process.send_signal(signal.SIGUSR2)
    rest, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    return [*got, *rest.splitlines(keepends=True)]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGUSR1, marks=pytest.mark.matrix), signal.SIGINT])
def test_a_signal_to_the_group_comes_once_to_each_of_its_processes(tmp_path, number):
    for _ in range(3):
        assert (
            signalled(tmp_path, lambda pid: os.killpg(pid, number), 2)
            == [
                f"script {number.name}\n",
                f"worker {number.name}\n",
            ]
            * 3
        )


def test_a_signal_to_the_command_alone_comes_once_to_the_script_alone(tmp_path):
    assert signalled(tmp_path, lambda pid: os.kill(pid, signal.SIGUSR1), 1) == ["script SIGUSR1\n"] * 3


def test_a_signal_to_both_processes_of_the_command_and_to_the_script_comes_once(tmp_path):
    def send(pid: int) -> None:  # as Slurm does with all processes of a step, one after the other
        for each in (pid, *psutil.Process(pid).children()):
            os.kill(each if isinstance(each, int) else each.pid, signal.SIGUSR1)

    assert signalled(tmp_path, send, 1) == ["script SIGUSR1\n"] * 3


def test_a_terminals_ctrl_c_comes_once_and_does_not_hide_a_later_signal(tmp_path):
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(tmp_path)
        command = [*WATCH, "--", sys.executable, "-c", COUNTS]
        os.execve(sys.executable, command, ENVIRONMENT)
    with os.fdopen(terminal, "rb", buffering=0) as stream:
        lines = iter(lambda: stream.readline().decode().strip(), "")
        assert [next(lines) for _ in range(2)] == ["worker is up", "script is up"]
        os.write(terminal, b"\x03")
        assert sorted(next(lines).removeprefix("^C") for _ in range(2)) == ["script SIGINT", "worker SIGINT"]
        # the kernel keeps one signal of a kind: what comes after another kind has come through is no part of Ctrl-C
        os.kill(pid, signal.SIGUSR1)
        assert next(lines) == "script SIGUSR1"
        os.kill(pid, signal.SIGINT)
        assert next(lines) == "script SIGINT"
        os.kill(pid, signal.SIGUSR2)
        assert next(lines).startswith("── lightning-gpuopt watch")
        with suppress(OSError):  # Linux: the other side of the terminal is closed
            while stream.read(4096):
                pass
    assert os.waitpid(pid, 0)[1] == 0


def test_no_process_of_the_command_is_left_when_it_is_killed(tmp_path):
    process = start(tmp_path, sys.executable, "-c", COUNTS, new_session=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["worker is up\n", "script is up\n"]
    children = psutil.Process(process.pid).children()
    [witness] = [each for each in children if each.cmdline()[1:3] == ["-m", "lightning_gpuopt"]]
    process.kill()
    psutil.wait_procs([witness], timeout=20)
    assert not witness.is_running()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)


def test_a_command_that_handles_its_signal_ends_as_it_likes(tmp_path):
    handles = (
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nprint('up', flush=True)\n"
        "signal.pause()"
    )
    process = start(tmp_path, sys.executable, "-c", handles)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 7


def test_wrong_usage(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["watch"]) == 2
    assert capsys.readouterr().err == (
        "error: watch: expected a command after --, got none; for example: lightning-gpuopt watch -- python train.py\n"
    )
    assert main(["watch", "python", "train.py"]) == 2
    assert capsys.readouterr().err == (
        "error: unrecognized arguments: python train.py; see 'lightning-gpuopt watch --help'; the command to run goes "
        "after --: lightning-gpuopt watch [--fix [--exact] | --ceiling] [--patch] [--report-dir DIR] -- COMMAND "
        "...\n"
    )
    assert main(["watch", "--", "no-such-program"]) == 2
    assert capsys.readouterr().err == (
        "error: watch: expected a command that can be run, got no-such-program: No such file or directory; for "
        "example: lightning-gpuopt watch -- python train.py\n"
    )
    (tmp_path / "file").write_text("")
    assert main(["watch", "--report-dir", "file", "--", "true"]) == 2
    assert "--report-dir: expected a writable path" in capsys.readouterr().err
    assert list((tmp_path / "gpuopt").iterdir()) == []


def test_a_report_that_cannot_be_shown_changes_no_exit_code(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    breaks = (
        "import json, os, pathlib\n"
        "folder = pathlib.Path(json.loads(os.environ['LIGHTNING_GPUOPT_WATCH'])['folder'])\n"
        "(folder / '.notes' / 'bad.json').write_text('[1]')\n"
        "raise SystemExit(5)"
    )
    assert main(["watch", "--", sys.executable, "-c", breaks]) == 5
    assert "cannot be shown: AttributeError" in capfd.readouterr().err


def test_a_fit_that_never_trains_leaves_nothing(tmp_path):
    watch = Watch(str(tmp_path))
    watch.begin(["python", "train.py"])
    model, loader = BoringModel(), DataLoader(RandomDataset(32, 64))
    model.lr = 0.1
    trainer = Trainer(max_epochs=1, callbacks=[WatchedRun(watch)], default_root_dir=tmp_path / "own", **QUIET)
    Tuner(trainer).lr_find(model, loader, num_training=5)  # within a fit that it ends before training
    assert not (tmp_path / "fit-1").exists()
    assert "\nfit fit-1: no training step was measured." in render_end(watch, ["python", "train.py"], 0)
    trainer.fit(model, loader)
    [fit] = fits_of(watch.notes())
    assert fit.folder.name == "fit-1"
    assert fit.report.steps == 64
    assert "no training step" not in render_end(watch, ["python", "train.py"], 0)


def test_a_folder_in_which_nothing_can_be_written_any_more(tmp_path, monkeypatch):
    watch = Watch(str(tmp_path))
    watch.begin(["python", "train.py"])
    full_disk(monkeypatch)
    assert watch.problem() == (f"The folder of the reports cannot be written to: {tmp_path}: No space left on device")
    assert "no Trainer was seen" not in render_end(watch, ["python", "train.py"], 0)


def test_a_disk_that_is_full_from_the_start_keeps_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Watch, "begin", lambda *_: full())
    assert main(["watch", "--report-dir", str(tmp_path), "--", "true"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_is_no_text_of_any_encoding(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"caf\xe9")
    assert main(["watch", "--", sys.executable, "-c", "import os, sys; print(os.fsencode(sys.argv[1]))", name]) == 0
    assert capfd.readouterr().out == "b'caf\\xe9'\n"


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_stream_that_is_closed_changes_no_exit_code_and_no_output(tmp_path, monkeypatch, capfd, closed):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, closed, None)  # as Python has it after "watch ... >&-"
    assert main(["watch", "--", "sh", "-c", "exit 4"]) == 4
    assert capfd.readouterr().out == ""


def test_a_folder_that_is_removed_meanwhile(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["watch", "--", sys.executable, "-c", "import shutil; shutil.rmtree('gpuopt')"]) == 0
    assert "The folder of the reports was removed: " in capfd.readouterr().err


def test_what_stands_behind_the_dashes_is_the_commands_own(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["watch", "--", sys.executable, "-c", "import sys; print(sys.argv[1:])", "--debug", "--", "--fix"]) == 0
    assert capfd.readouterr().out == "['--debug', '--', '--fix']\n"


def test_two_runs_at_the_same_second_have_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.setattr(watch_command.time, "strftime", lambda _: "now")
    assert [watch_command._make_folder(tmp_path).name for _ in range(3)] == ["now", "now_2", "now_3"]


def test_two_processes_make_a_folder_each_for_their_fits(tmp_path):
    watches = [Watch(str(tmp_path)), Watch(str(tmp_path))]
    assert [each.new_fit().name for each in watches] == ["fit-1", "fit-2"]


def test_the_users_python_path_comes_first():
    environment = Watch("/run").environment({"PYTHONPATH": "/mine"})
    first, ours = environment["PYTHONPATH"].split(os.pathsep)
    assert first == "/mine"
    assert sorted(path.name for path in Path(ours).iterdir() if path.name != "__pycache__") == [
        "lightning_gpuopt_watch-1.dist-info",
        "lightning_gpuopt_watch.py",
    ]
    assert json.loads(environment["LIGHTNING_GPUOPT_WATCH"]) == {
        "folder": "/run",
        "fix": False,
        "exact": False,
        "ceiling": False,
        "steps": 0,
    }


class TestWords:
    def test_why_nothing_was_measured(self):
        assert why_none([{"event": "trainer"}], ["python"]) == [
            "Nothing was measured: a Trainer was created, but its fit() was not called."
        ]
        assert why_none([], ["python", "train.py"])[2] == ("- its Python ignores PYTHONPATH (python -I, python -E);")

    def test_an_option_of_the_script_is_none_of_python(self):
        assert "(python -I, python -E)" in why_none([], ["python", "-c", "pass", "-lrE", "3"])[2]
        assert "(it was started with -sI)" in why_none([], ["python", "-u", "-sI", "train.py"])[2]

    def test_another_rank_than_0(self):
        assert why_none([{"event": "trainer"}, {"event": "rank", "rank": 1}], ["python"]) == [
            "Rank 1: rank 0 has the report."
        ]

    def test_a_fit_without_an_end(self, tmp_path):
        [fit] = fits_of([{"event": "fit", "folder": str(tmp_path)}])
        assert (fit.ended, fit.report) == (False, None)

    def test_of_hundreds_of_fits_a_few_are_listed(self, tmp_path):
        report = StallReport("compute_bound", 1.0, {}, [], steps=3)
        fits = [Fit(tmp_path / f"fit-{number}", report) for number in range(1, 301)]
        lines = _found(fits, Watch(str(tmp_path)), ["python"], None, 80)
        assert lines[0] == "300 times fit:"
        assert lines[1:21] == [f"  fit-{number}: compute_bound, 3 steps" for number in range(1, 21)]
        assert lines[21:23] == [f"  ... and 280 more, in {tmp_path}", "The longest, fit-1:"]
        assert list(tmp_path.rglob("*.html")) == [tmp_path / "fit-1" / "report.html"]
        assert f"Report: {tmp_path / 'fit-1' / 'report.html'}" in lines

    def test_a_page_that_cannot_be_written(self, tmp_path):
        (tmp_path / "report.html").mkdir()
        fit = Fit(tmp_path, StallReport("compute_bound", 1.0, {}, [], steps=3))
        lines = _found([fit], Watch(str(tmp_path)), ["python"], None, 80)
        assert f"Report: {tmp_path / 'report.json'}" in lines

    def test_gpus(self):
        figures = {"gpu/0/utilization": 31.2, "gpu/0/memory_percent": 92.0, "gpu/0/power_w": 150.4}
        assert gpu_lines({**figures, "gpu/1/utilization": 99.0}) == [
            "gpu/0: 31 %, 92 % of memory, 150 W",
            "gpu/1: 99 %",
        ]

    def test_the_next_command(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (run := tmp_path / "runs" / "2").mkdir(parents=True)
        path, command = run / "fit-1" / "report.json", ["python", "my train.py"]
        finding = Finding("slow_transform", 0.5, {}, "more", {"num_workers": 6})
        stalled = RunRecord("slow_transform", 1.0, {}, [finding])
        fine = RunRecord("compute_bound", 1.0, {}, [])
        without, fixed = Watch(str(run)), Watch(str(run), fix=True)
        assert next_command(stalled, path, without, command) == ("lightning-gpuopt watch --fix -- python 'my train.py'")
        assert next_command(stalled, path, without, command, "my runs") == (
            "lightning-gpuopt watch --fix --report-dir 'my runs' -- python 'my train.py'"
        )
        assert next_command(stalled, path, fixed, command) == (
            "lightning-gpuopt what-if runs/2/fit-1/report.json --num-workers 6"
        )
        assert next_command(fine, path, without, command) == "lightning-gpuopt report runs/2/fit-1/report.json"
        (earlier := tmp_path / "runs" / "1" / "fit-1").mkdir(parents=True)
        (earlier / "report.json").write_text("{}")
        (earlier.parent / "command.txt").write_text("python other.py\n")
        assert next_command(fine, path, fixed, command) == "lightning-gpuopt report runs/2/fit-1/report.json"
        tried = replace(stalled, changes=[Change("num_workers", 4, 8, measured=1.0, kept=False)])
        assert next_command(tried, path, fixed, command) == "lightning-gpuopt report runs/2/fit-1/report.json"
        (earlier.parent / "command.txt").write_text("python 'my train.py'\n")
        assert next_command(fine, path, fixed, command) == (
            "lightning-gpuopt report runs/1/fit-1/report.json runs/2/fit-1/report.json"
        )


@pytest.mark.timed
def test_a_script_that_is_mended_while_it_runs(tmp_path):
    code, out, err = watch(tmp_path, scripts.STARVES, ours=("--fix",))
    assert (code, out) == (0, "ended\n")
    before, _, ours = err.partition("── lightning-gpuopt watch ")
    assert "AutoFix" not in before
    assert re.search(
        r"\nChanges while training ran:\n  num_workers 1 → \d: predicted .*, measured [^\n]*, kept\n", ours
    )
    assert re.search(r"\nTo have them from the start:\n  DataLoader\(\.\.\., num_workers=\d", ours)
    outcome, verdict, table = (ours.index(each) for each in ("Changes while", "\nVerdict: ", "\n where the time went"))
    assert outcome < verdict < table


@pytest.mark.matrix
class TestLaunchers:
    def test_lightnings_own_processes(self, tmp_path):
        code, out, err = watch(tmp_path, scripts.RANKS)
        assert code == 0, err
        assert sorted(out.splitlines()) == ["rank 0 ended", "rank 1 ended"]
        assert [name for name in reports(tmp_path) if name.endswith("report.json")] == ["fit-1/report.json"]

    def test_one_watched_rank_of_two(self, tmp_path):
        (tmp_path / "train.py").write_text(scripts.RANKS)
        common = {**ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        ours = [sys.executable, "-m", "lightning_gpuopt", "watch", "--"]
        ranks = [
            subprocess.Popen(
                [*command, sys.executable, "train.py"],
                cwd=tmp_path,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank, command in enumerate((ours, []))
        ]
        try:
            outputs = [rank.communicate(timeout=100) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert [rank.returncode for rank in ranks] == [0, 0]
        assert [out for out, _ in outputs] == ["rank 0 ended\n", "rank 1 ended\n"]
        assert "Verdict: " in outputs[0][1]

    def test_torchrun(self, tmp_path):
        path = tmp_path / "train.py"
        path.write_text(scripts.RANKS)
        process = start(
            tmp_path, sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path)
        )
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        assert sorted(out.splitlines()) == ["rank 0 ended", "rank 1 ended"]
        assert [name for name in reports(tmp_path) if name.endswith("report.json")] == ["fit-1/report.json"]

    def test_lightning_cli(self, tmp_path):
        code, _, err = watch(tmp_path, scripts.CLI)
        assert code == 0, err
        assert "Verdict: main_process_loading" in err
