"""``lightning-gpuopt report``: the table, the comparison, the page, and one line for what is no report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_gpuopt.cli import main
from lightning_gpuopt.diagnosis.compare import compare, comparison_data
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
        ("report .", "expected a report.json, got .: none in that folder; StallDetector leaves one in report_dir"),
        (
            "report other.json",
            "other.json: expected a stall report of schema version 1, got 2; "
            "give a report.json that StallDetector wrote",
        ),
        (
            "report before.json --html before.json/page.html",
            "--html: expected a writable path, got before.json/page.html: File exists; choose another",
        ),
        (
            "report before.json --fail-if-slower 5%",
            "--fail-if-slower: expected two reports to compare, got one; give the one of the run after",
        ),
        *(
            (
                f"report before.json after.json --fail-if-slower {percent}",
                f"--fail-if-slower: expected a percentage, 0 or more, got {percent}; give one such as 5%",
            )
            for percent in ("abc", "-5", "nan", "inf", "%", "5%%")
        ),
        ("report before.json --html .", "--html: expected a writable path, got .: Is a directory; choose another"),
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


def test_one_report_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "before.json", "--json"]) == 0
    assert capsys.readouterr() == (f"{before().to_json()}\n", "")


def test_two_reports_as_json_with_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "before.json", "after.json", "--json", "--html", "both.html"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads(json.dumps(comparison_data(compare(before(), after()))))
    assert err == ""
    assert (tmp_path / "both.html").exists()


@pytest.mark.parametrize("percent", ["5", "5%", "5.0 %"])
def test_the_gate_fails_a_slower_run_and_says_where(percent: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "after.json", "before.json", "--fail-if-slower", percent]) == 1
    out, err = capsys.readouterr()
    assert out == f"{render_comparison(compare(after(), before()))}\n"
    assert err == "Slower by 100.0 %, 5 % allowed: data_wait takes 60 ms a step, 1 ms before.\n"


def test_the_gate_lets_the_others_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "after.json", "before.json", "--fail-if-slower", "100%"]) == 0
    assert main(["report", "before.json", "after.json", "--fail-if-slower", "0"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("Faster by 50.0 %, 0 % allowed.\n")
    assert err == ""


def test_the_gate_s_outcome_is_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "after.json", "before.json", "--fail-if-slower", "5", "--json"]) == 1
    out, err = capsys.readouterr()
    gate = json.loads(out)["gate"]
    assert (gate["outcome"], gate["allowed_percent"], gate["phase"]) == ("slower", 5, "data_wait")
    assert err.startswith("Slower by 100.0 %")
    assert main(["report", "before.json", "after.json", "--fail-if-slower", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gate"]["outcome"] == "passed"


def test_what_cannot_be_judged_does_not_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replace(after(), step_s=None).save_json(tmp_path / "short.json")
    assert main(["report", "before.json", "short.json", "--fail-if-slower", "5"]) == 1
    assert capsys.readouterr().err == "Not judged: the later run has no step after its warm-up.\n"


def test_it_imports_neither_torch_nor_lightning() -> None:
    code = (
        "import sys; from lightning_gpuopt.cli import main;"
        "main(['report', 'before.json', 'after.json', '--html', 'page.html']);"
        "print({'torch', 'lightning', 'pytorch_lightning'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("folder", ["runs/2026-11-27/fit-1", "runs/2026-11-27", "runs"])
def test_a_folder_stands_for_the_last_report_in_it(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (report, place) in enumerate([(after(), "2026-11-26/fit-1"), (before(), "2026-11-27/fit-1")]):
        report.save_json(f"runs/{place}/report.json")
        os.utime(f"runs/{place}/report.json", (number, number))
    assert main(["report", folder]) == 0
    assert capsys.readouterr() == (f"{render_text(before())}\n", "")
