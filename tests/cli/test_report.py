"""``lightning-gpuopt report``: the table, the comparison, the page, and one line for what is no report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_gpuopt.cli import main
from lightning_gpuopt.diagnosis.compare import compare
from lightning_gpuopt.diagnosis.render.html import render_html
from lightning_gpuopt.diagnosis.render.text import render_comparison, render_text
from tests.diagnosis.reports import after, before


@pytest.fixture(autouse=True)
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``before.json`` and ``after.json`` in the working folder, in a terminal of 80 columns."""
    before().save_json(tmp_path / "before.json")
    after().save_json(tmp_path / "after.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def test_one_report_is_shown_as_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "before.json"]) == 0
    assert capsys.readouterr() == (f"{render_text(before())}\n", "")


def test_two_reports_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "before.json", "after.json"]) == 0
    assert capsys.readouterr() == (f"{render_comparison(compare(before(), after()))}\n", "")


def test_the_terminal_s_width_is_used(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["report", "before.json"]) == 0
    assert capsys.readouterr().out == f"{render_text(before(), width=60)}\n"


def test_the_page_is_written_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "before.json", "--html", "pages/report.html"]) == 0
    assert (tmp_path / "pages/report.html").read_text(encoding="utf-8") == render_html(before())
    assert main(["report", "before.json", "after.json", "--html", "both.html"]) == 0
    assert (tmp_path / "both.html").read_text(encoding="utf-8") == render_html(after(), baseline=before())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            "report nowhere.json",
            "expected a report.json, got nowhere.json: No such file or directory; "
            "StallDetector leaves one in its report_dir",
        ),
        (
            "report before.json nowhere.json",
            "expected a report.json, got nowhere.json: No such file or directory; "
            "StallDetector leaves one in its report_dir",
        ),
        ("report .", "expected a report.json, got .: Is a directory; StallDetector leaves one in its report_dir"),
        (
            "report other.json",
            "other.json: expected a stall report of schema version 1, got 2; "
            "give a report.json that StallDetector wrote",
        ),
        (
            "report before.json --html before.json/page.html",
            "--html: expected a place to write to, got before.json/page.html: File exists; name another",
        ),
        ("report before.json --html .", "--html: expected a place to write to, got .: Is a directory; name another"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_exit_code_2(
    arguments: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text('{"schema_version": 2}')
    assert main(arguments.split()) == 2
    assert capsys.readouterr().err == f"error: {complaint}\n"


@pytest.mark.parametrize("content", [b"", b"no JSON", b"\xff\xfe", b"[1]", b'{"schema_version": 1}'])
def test_what_is_no_report_is_one_line_and_exit_code_2(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_bytes(content)
    assert main(["report", "other.json"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: other.json: ")
    assert err.endswith("; give a report.json that StallDetector wrote\n")


def test_it_imports_neither_torch_nor_lightning() -> None:
    code = (
        "import sys; from lightning_gpuopt.cli import main;"
        "main(['report', 'before.json', 'after.json', '--html', 'page.html']);"
        "print({'torch', 'lightning', 'pytorch_lightning'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
