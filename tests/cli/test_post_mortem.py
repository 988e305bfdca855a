"""``lightning-gpuopt post-mortem``: where it looks, and what it prints."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_gpuopt.cli import main
from lightning_gpuopt.measurements.flight import FlightRecord
from lightning_gpuopt.postmortem.record import FILE, PostMortem, Process
from lightning_gpuopt.recorder import ring_reader
from tests.postmortem.records import rank

SAVED = PostMortem("segfault", Process(0, 1, 7), text="It crashed.")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a watched run with a post-mortem, and a fit in it."""
    folder = tmp_path / "gpuopt" / "2026-01-01_00-00-00"
    (folder / "fit-1").mkdir(parents=True)
    SAVED.save(folder / FILE)
    return folder


@pytest.mark.parametrize("part", ["", "..", "fit-1"])
def test_a_post_mortem_is_found_from_watch_s_folder_a_run_s_and_a_fit_s(
    part: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["post-mortem", os.path.normpath(run / part)]) == 0
    assert capsys.readouterr() == ("It crashed.\n", "")


def test_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["post-mortem", str(run), "--json"]) == 0
    out, err = capsys.readouterr()
    assert (PostMortem.from_json(out), err) == (SAVED, "")


WRONG = {
    "nothing": "expected a post-mortem.json or the rings of a run",
    "no folder": "no such folder",
    "damaged": "expected a post-mortem in JSON",
}


@pytest.mark.parametrize(("case", "line"), WRONG.items(), ids=WRONG)
def test_nothing_to_read_is_one_line(case: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if case == "damaged":
        (tmp_path / FILE).write_text("{")
    assert main(["post-mortem", str(tmp_path / "none" if case == "no folder" else tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, line in err, err.count("\n")) == ("", True, 1)


def recorded(monkeypatch: pytest.MonkeyPatch, *records: FlightRecord) -> None:
    """Have these be what rings say; of processes that are not there."""

    def read(folder: Path) -> Sequence[FlightRecord]:
        return records

    monkeypatch.setattr(ring_reader, "records_in", read)


def test_rings_that_are_newer_than_the_post_mortem_count(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(monkeypatch, rank(ended="ok", written_s=(run / FILE).stat().st_mtime + 1.0))
    assert main(["post-mortem", str(run)]) == 0
    assert capsys.readouterr().out == "The run ended well.\n"


def test_rings_that_are_older_do_not_count(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(monkeypatch, rank(ended="ok", written_s=(run / FILE).stat().st_mtime - 1.0))
    assert main(["post-mortem", str(run)]) == 0
    assert capsys.readouterr().out == "It crashed.\n"


@pytest.mark.parametrize(("age_s", "ended"), [(5.0, "unknown"), (3600.0, "killed")])
def test_a_process_of_another_machine_is_there_while_it_writes(
    age_s: float, ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = time.time()
    recorded(monkeypatch, rank(host="elsewhere", written_s=now_s - age_s, progress_s=now_s - age_s))
    assert main(["post-mortem", str(tmp_path), "--json"]) == 0
    assert PostMortem.from_json(capsys.readouterr().out).ended == ended


def test_it_imports_no_torch(run: Path) -> None:
    code = (
        f"import sys; from lightning_gpuopt.cli import main; main(['post-mortem', {str(run)!r}]); "
        "print([name for name in ('torch', 'lightning', 'numpy') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "It crashed.\n[]\n"
