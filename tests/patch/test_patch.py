"""``watch --patch`` and ``patch``, as people run them: a slow script, what AutoFix keeps, and the diff of it."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from lightning_gpuopt.cli import main
from lightning_gpuopt.diagnosis.record import Change
from lightning_gpuopt.diagnosis.report import REPORT_SCHEMA, StallReport
from lightning_gpuopt.watch.code_facts import RunCode
from lightning_gpuopt.watch.shared_notes import COMMAND_FILE
from tests.watch import watched_scripts as scripts
from tests.watch.test_watch import ENVIRONMENT, EXECUTED, WATCH

SCRIPT = (
    scripts.PARTS
    + """
if __name__ == "__main__":
    loader = DataLoader(Slow(), 2, num_workers=1)
    trainer(max_steps=int(sys.argv[1]), max_epochs=4).fit(Model(), loader)
"""
)


def git(folder: Path, *arguments: str) -> None:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    subprocess.run(command, check=True, capture_output=True)


def watched(folder: Path, steps: int, *ours: str) -> tuple[Path, str]:
    """The folder of the fit, and stderr; the script is committed in a repository."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    git(folder, "init", "-q")
    git(folder, "add", "train.py")
    git(folder, "commit", "-qm", "x")
    done = EXECUTED([*WATCH, *ours, "--", sys.executable, "train.py", str(steps)], env=ENVIRONMENT, cwd=folder)
    assert done.returncode == 0, done.stderr
    [fit] = (folder / "gpuopt").glob("*/fit-1")
    return fit, done.stderr


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A watched run too short for AutoFix, whose report says that two workers were kept."""
    fit, _ = watched(tmp_path_factory.mktemp("short") / "tree", 30)
    report = StallReport.from_json((fit / "report.json").read_text())
    change = Change("num_workers", 1, 2, (1.5, 1.9, 2.0), 1.8, kept=True)
    replace(report, changes=[change], findings=[]).save_json(fit / "report.json")
    return fit


@pytest.fixture
def tree(short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fit's folder in a copy of the tree, whose run is taken to be there."""
    root = short.parents[2]
    shutil.copytree(root, tmp_path / "tree")
    fit = tmp_path / "tree" / short.relative_to(root)
    code = (fit / "code.json").read_text().replace(str(root), str(tmp_path / "tree"))
    (fit / "code.json").write_text(code)
    monkeypatch.chdir(tmp_path / "tree")
    return fit


def test_the_diff_is_written_beside_the_report_and_nothing_into_the_script(tree, capsys):
    assert main(["patch", str(tree / "report.json")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "proved: num_workers 1 → 2 at train.py:40 (predicted 1.9x (1.5x to 2.0x), measured 1.8x)",
        f"Patch: {tree / 'fix.patch'}",
    ]
    assert Path("train.py").read_text() == SCRIPT
    git(Path(), "apply", str(tree / "fix.patch"))
    assert Path("train.py").read_text() == SCRIPT.replace("2, num_workers=1", "2, num_workers=2")


def test_the_report_gets_its_remedies_as_the_schema_describes_them(tree, capsys):
    assert main(["patch", str(tree), "--out", "a.patch"]) == 0
    data = json.loads((tree / "report.json").read_text())
    jsonschema.validate(data, REPORT_SCHEMA)
    [remedy] = data["remedies"]
    assert remedy == {
        "kind": "num_workers",
        "file": str(Path("train.py").resolve()),
        "line": 40,
        "before": "    loader = DataLoader(Slow(), 2, num_workers=1)",
        "after": "    loader = DataLoader(Slow(), 2, num_workers=2)",
        "proved": True,
        "changes": "nothing",
        "why": "",
    }
    assert Path("a.patch").is_file()
    assert StallReport.from_json(json.dumps(data)).remedies[0].proved


def test_it_is_applied_to_files_that_are_committed_and_unchanged_only(tree, capsys):
    assert main(["patch", str(tree), "--apply"]) == 0
    assert Path("train.py").read_text() == SCRIPT.replace("2, num_workers=1", "2, num_workers=2")
    assert main(["patch", str(tree), "--apply"]) == 0  # it is not the run's file any more
    assert "has changed since the run: run it again" in capsys.readouterr().out
    git(Path(), "checkout", "train.py")
    git(Path(), "rm", "-q", "--cached", "train.py")
    assert main(["patch", str(tree), "--apply"]) == 2
    assert "--apply: expected " in capsys.readouterr().err
    assert Path("train.py").read_text() == SCRIPT


def test_without_what_was_kept_there_is_one_sentence(tree, capsys):
    report = StallReport.from_json((tree / "report.json").read_text())
    replace(report, changes=[]).save_json(tree / "report.json")
    assert main(["patch", str(tree)]) == 0
    assert capsys.readouterr().out == "Nothing to patch: the report has no setting that was kept or is advised.\n"


def test_a_report_without_the_runs_code_is_wrong_usage(tree, capsys):
    (tree / "code.json").unlink()
    assert main(["patch", str(tree)]) == 2
    assert capsys.readouterr().err.startswith("error: expected code.json beside the report, got none")


def test_without_libcst_the_line_that_installs_it(tree, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "libcst", None)
    assert main(["patch", str(tree)]) == 2
    assert 'pip install "lightning-gpuopt[patch]"' in capsys.readouterr().err


KERNEL = """
import linecache
cells = [PARTS, "workers = 1", "loader = DataLoader(Slow(), 2, num_workers=workers)", FIT]
for number, cell in enumerate(cells):
    name = f"/tmp/ipykernel_1/{number}.py"
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
    exec(compile(cell, name, "exec"), globals())
"""


def test_the_cells_of_a_notebook_are_seen_as_they_run(tmp_path, capsys):
    kernel = KERNEL.replace("PARTS", repr(scripts.PARTS)).replace(
        "FIT", repr("trainer(max_steps=8).fit(Model(), loader)")
    )
    (tmp_path / "kernel.py").write_text(kernel)
    done = EXECUTED([*WATCH, "--", sys.executable, "kernel.py"], env=ENVIRONMENT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [fit] = (tmp_path / "gpuopt").glob("*/fit-1")
    report = StallReport.from_json((fit / "report.json").read_text())
    replace(report, changes=[Change("num_workers", 1, 2, measured=1.8, kept=True)], findings=[]).save_json(
        fit / "report.json"
    )
    assert main(["patch", str(fit)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "proved: num_workers 1 → 2 at `workers = 1` (measured 1.8x)",
        "A cell's new text:",
        "workers = 2",
    ]


def test_a_check_that_is_terminated_leaves_no_copy(tree, tmp_path):
    (temporary := tmp_path / "temporary").mkdir()
    waits = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]
    (tree.parent / COMMAND_FILE).write_text(shlex.join(waits))
    environment = {**ENVIRONMENT, "TMPDIR": str(temporary)}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen([*WATCH[:-1], "patch", str(tree), "--check"], env=environment, **pipes) as check:
        assert check.stderr is not None
        assert check.stderr.readline() == b"\n"  # the command runs
        assert list(temporary.glob("gpuopt-check-*"))
        check.terminate()
    assert check.returncode == 143
    assert not list(temporary.glob("gpuopt-check-*"))


def test_a_check_without_a_gain_ends_with_1(tree, capsys):
    assert main(["patch", str(tree), "--check"]) == 1
    assert "Check: not proved: expected 4 windows before and 5 after" in capsys.readouterr().out


@pytest.mark.timed
def test_what_autofix_keeps_is_patched_and_its_gain_is_there_again(tmp_path):
    fit, err = watched(tmp_path, 800, "--fix", "--patch")
    assert "\nproved: num_workers 1 → " in err
    code = RunCode.from_json((fit / "code.json").read_text())
    assert len(code.windows_s) >= 4
    done = EXECUTED([*WATCH[:-1], "patch", str(fit), "--check"], env=ENVIRONMENT, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", proved (" in done.stdout
    assert (tmp_path / "train.py").read_text() == SCRIPT
    assert not (tmp_path / "lightning_logs").exists()


@pytest.mark.parametrize(
    ("number", "said"), [(-1, "num_workers option should be non-negative"), (999, "will create 999 worker processes")]
)
def test_a_loader_that_refuses_its_arguments_shows_no_frame_of_ours(tmp_path, number, said):
    lines = ["import warnings", "from torch.utils.data import DataLoader", "warnings.simplefilter('error')"]
    (tmp_path / "train.py").write_text("\n".join([*lines, f"DataLoader([1], num_workers={number})\n"]))
    done = EXECUTED([*WATCH, "--", sys.executable, "train.py"], env=ENVIRONMENT, cwd=tmp_path)
    assert said in done.stderr
    assert "Traceback" in done.stderr
    assert "lightning_gpuopt_watch.py" not in done.stderr
