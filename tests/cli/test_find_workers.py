"""``lightning-gpuopt find-workers``: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_gpuopt.cli import main
from lightning_gpuopt.cli.find_workers import render
from lightning_gpuopt.tuning import find
from lightning_gpuopt.tuning.search_result import Measured, NumWorkersResult, Trial
from tests.tuning.test_search import World

MODULE = """
from torch.utils.data import DataLoader, IterableDataset
from tests.tuning.datasets import Broken, Numbers, Stream

not_callable = 3
make_loader = lambda: DataLoader(Numbers(), 4)
make_stream = lambda: DataLoader(Stream(100_000), 4)
make_broken = lambda: DataLoader(Broken(), 4)
make_list = lambda: [1]
def make_file():
    dataset = Numbers()
    dataset.file = open(__file__)
    return DataLoader(dataset, 4)
def fails(): raise OSError("the disk is gone")
"""

RESULT = NumWorkersResult(
    6, (Trial(1, 30.0, 0.033), Trial(8, 171.0, 0.001), Trial(6, 170.0, 0.001)), "consumer", 170.0, 2, False, True
)


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory."""
    name = f"module_{tmp_path.parent.name.replace('-', '_')}_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_lame.py").write_text("import no_such_library")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    return name


def run(*arguments: str) -> int:
    return main(["find-workers", *arguments])


def test_the_trials_are_shown_as_a_table_and_a_plot() -> None:
    assert render(RESULT).splitlines() == [
        "workers  batches/s  wait ms",
        "      1       30.0     33.0  ███████",
        "      6      170.0      1.0  ████████████████████████████████████████ ◀",
        "      8      171.0      1.0  ████████████████████████████████████████",
        "",
        "num_workers=6, 170.0 batches/s expected",
        "limited by consumer: the loader is as fast as its consumer",
        "DataLoader(..., num_workers=6, prefetch_factor=2, pin_memory=False, persistent_workers=True)",
    ]


def test_a_search_without_a_trial_shows_the_choice_only() -> None:
    assert render(NumWorkersResult(0, (), "shared_memory")).splitlines() == [
        "num_workers=0",
        "limited by shared_memory: the batches of more workers would not fit into /dev/shm",
    ]


@pytest.mark.parametrize(("function", "how"), [("make_loader", []), ("make_stream", ["--iterable"])])
def test_a_module_here_is_found_and_measured(
    module: str, function: str, how: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"{module}:{function}", "--step-time", "20", "--max-num-workers", "1", "--max-seconds", "60", *how) == 0
    out, err = capsys.readouterr()
    assert (out.splitlines()[0], err) == ("workers  batches/s  wait ms", "")
    assert "num_workers=1, " in out


def test_what_was_measured_is_shown_as_text_and_as_json(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def trial(loader: Any, sampling: Any, num_workers: int, *, step_time_s: float, **_: Any) -> Measured:
        return World(wall_s=0.032, step_s=step_time_s).try_(num_workers)

    monkeypatch.setattr(find, "run_trial", trial)
    assert run(f"{module}:make_loader", "--step-time", "50") == 0
    assert "limited by consumer" in capsys.readouterr().out
    assert run(f"{module}:make_loader", "--step-time", "50", "--json") == 0
    fields = json.loads(capsys.readouterr().out)
    assert (fields["num_workers"], fields["limited_by"], fields["settings"]["num_workers"]) == (1, "consumer", 1)


@pytest.mark.matrix
def test_where_the_bars_cannot_be_written_the_figures_can(module: str, tmp_path: Path) -> None:
    code = "from lightning_gpuopt.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", code, "find-workers", f"{module}:make_loader", "--step-time", "20"]
    command += ["--max-num-workers", "1", "--max-seconds", "60"]
    plain = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    done = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "num_workers=1" in done.stdout


def test_every_switch_reaches_the_search(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []

    def instead(*arguments: Any) -> NumWorkersResult:
        given.append(arguments[1:])
        return RESULT

    monkeypatch.setattr("lightning_gpuopt.tuning.find.find_num_workers", instead)
    switches = "--step-time 50 --max-num-workers 3 --max-seconds 4 --tolerance 0.1 --local-world-size 2 --iterable"
    assert run(f"{module}:make_stream", *switches.split()) == 0
    assert run(f"{module}:make_loader") == 0
    assert given == [(0.05, 3, 4.0, 0.1, 2, True), (0.0, None, 10.0, 0.05, 1, False)]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("train", "expected MODULE:FUNCTION, such as train:make_loader, got train"),
        (":make", "expected MODULE:FUNCTION"),
        ("nowhere:make", "nowhere: there is no such module here or among those installed"),
        ("nowhere.inside:make", "nowhere.inside: there is no such module"),
        ("./HERE:make", "expected MODULE:FUNCTION"),
        ("HERE:missing", "HERE:missing: HERE has no missing; expected a function that returns a DataLoader"),
        ("HERE:not_callable", "HERE:not_callable: expected a function that returns a DataLoader, got 3"),
        ("HERE:make_list", "HERE:make_list: expected a torch.utils.data.DataLoader, got [1]"),
        ("HERE:make_stream", "HERE:make_stream: expected a map-style dataset, or --iterable, since"),
        (
            "HERE:make_file",
            "HERE:make_file: expected a dataset that workers can share, but its dataset",
        ),
        ("HERE_lame:make", "No module named 'no_such_library'"),
        ("HERE:make_loader --tolerance 0", "--tolerance: Not of type"),
        ("HERE:make_loader --max-seconds 0", "--max-seconds: Not of type"),
        ("HERE:make_loader --max-seconds inf", "--max-seconds: Not of type"),
        ("HERE:make_loader --step-time -1", "--step-time: Not of type NonNegativeFloat"),
        ("", "find-workers.loader"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    module: str, arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments.replace("HERE", module).split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert complaint.replace("HERE", module) in err


@pytest.mark.parametrize(
    ("function", "error"), [("make_broken", "error: KeyError: "), ("fails", "error: OSError: the disk is gone")]
)
def test_an_error_in_the_dataset_is_one_line_and_exit_code_1(
    module: str, function: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"{module}:{function}") == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(error)


def test_the_help_is_quick() -> None:
    code = (
        "import sys; from lightning_gpuopt.cli import main; main(['find-workers', '--help']);"
        "print({'torch', 'lightning', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
