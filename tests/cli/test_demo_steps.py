"""The demo's second half: the advice is applied, and the runs stand side by side."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from lightning_gpuopt.cli import _demo_steps, main
from lightning_gpuopt.cli._demo_steps import next_step
from lightning_gpuopt.cli._demo_training import Settings
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.diagnosis.report import StallReport
from tests.cli.test_demo import demo, start

GAIN: dict[str, float | str] = {
    "storage_step_speedup": 1.5,
    "storage_step_speedup_low": 1.2,
    "storage_step_speedup_high": 1.7,
}
FAST = {"storage_step": "ImageFolderDataModule", "small_images_gain": 2.5, **GAIN}
SMALL = {"storage_step": "lightning-gpuopt lmdb build SRC DST --image-size 146", **GAIN}


def report(evidence: dict[str, Any], cause: str = "main_process_loading", **more: Any) -> StallReport:
    return StallReport(cause, 1.0, {"data_wait": 0.7}, [Finding(cause, 0.7, evidence, "", **more)])


def settings(**changes: Any) -> Settings:
    given: dict[str, Any] = {"epochs": 1, "max_steps": None, "batch_size": 8, "num_workers": 0, "accelerator": "cpu"}
    folders = {"data_dir": Path("data"), "output_dir": Path("run"), "seed": 0, "progress_bar": False}
    return Settings(**{**given, **folders, **changes})


def name_of(*reports: StallReport, **changes: Any) -> str | None:
    step = next_step(reports, settings(**changes))
    return step.name if step is not None else None


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run's report advises the next way of reading images, whatever was measured."""
    read = next_step

    def next_advised(reports: list[StallReport], now: Settings) -> Any:
        evidence = {"files": FAST, "folder": SMALL}.get(now.storage)
        return read([report(evidence)], now) if evidence is not None else None

    monkeypatch.setattr(_demo_steps, "next_step", next_advised)


def test_the_steps_follow_the_reports() -> None:
    assert name_of(report(FAST)) == "fast-decoder"
    assert name_of(report(SMALL)) == "smaller-images"
    assert name_of(report(FAST), report(SMALL), storage="folder") == "smaller-images"
    assert name_of(report(SMALL), storage="lmdb") is None
    assert name_of(report({})) is None
    assert name_of(StallReport("compute_bound", 1.0, {"data_wait": 0.0}, [])) is None


def test_an_earlier_report_advises_smaller_images_while_loading_is_still_the_bottleneck() -> None:
    step = next_step([report(FAST), report({})], settings(storage="folder"))
    assert step is not None
    assert (step.name, step.predicted) == ("smaller-images", None)
    assert name_of(report(FAST), report({}, cause="gpu_sync"), storage="folder") is None


def test_the_prediction_is_that_of_the_report() -> None:
    step = next_step([report(FAST)], settings())
    assert step is not None
    assert step.predicted == (1.2, 1.5, 1.7)
    assert step.changes == {"storage": "folder"}


def test_more_workers_are_tried_once_and_only_for_a_sure_gain() -> None:
    sure = report({}, settings={"num_workers": 8}, predicted_speedup=(3.0, 4.0, 5.0))
    unsure = report({}, settings={"num_workers": 2}, predicted_speedup=(1.0, 1.3, 3.7))
    assert name_of(sure) == "more-workers"
    assert name_of(sure, num_workers=6, persistent_workers=True) is None
    assert name_of(unsure) is None


@pytest.mark.usefixtures("advised")
def test_the_table_holds_the_figures_of_the_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(demo(tmp_path)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    runs = [tmp_path / "run" / name for name in ("", "fast-decoder", "smaller-images")]
    reports = [json.loads((run / "report.json").read_text()) for run in runs]
    assert [each["steps"] for each in reports] == [15, 15, 15]
    rows = {line[:21].strip(): line[21:].split() for line in out.partition("samples per second")[2].splitlines()}
    rates = out.partition("samples per second")[2].split("\n")[0].split()
    step_s = [each["step_s"] for each in reports]
    assert rates == [f"{8 / each:,.0f}" for each in step_s]
    assert rows["step time"] == " ".join(f"{each * 1e3:.1f} ms" for each in step_s).split()
    waits = [each["phases"]["data_wait"] / each["wall_s"] for each in reports]
    assert rows["waiting for data"] == " ".join(f"{each * 100:.1f} %" for each in waits).split()
    assert rows["predicted gain"] == ["–", "1.50x", "1.50x"]
    gains = [step_s[0] / step_s[1], step_s[1] / step_s[2]]
    assert rows["measured gain"] == ["–", *(f"{each:.2f}x" for each in gains)]
    assert [proof["measured"] for proof in reports[2]["proofs"]] == gains
    assert f"{8 / step_s[2] / (8 / step_s[0]):.1f}x samples per second" in out
    assert out.splitlines()[-1].startswith("3 times 15 steps on cpu, ")
    assert f"Before and after: {runs[2]}/report.html" in out
    page = (runs[2] / "report.html").read_text()
    assert "Before and after" in page
    assert "The runs differ" not in page
    assert "None of the settings" not in page
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80


@pytest.mark.usefixtures("advised")
def test_a_second_demo_in_the_same_folder_replaces_the_first(tmp_path: Path) -> None:
    (tmp_path / "run/smaller-images/images/train.lmdb.half-built").mkdir(parents=True)
    for _ in range(2):
        assert main(demo(tmp_path, "--max-steps", "8")) == 0
    images = tmp_path / "run/smaller-images/images"
    assert sorted(path.name for path in images.iterdir()) == ["train.lmdb", "val.lmdb"]
    last = json.loads((tmp_path / "run/smaller-images/report.json").read_text())
    assert (last["steps"], len(last["proofs"])) == (8, 2)


@pytest.mark.usefixtures("advised")
def test_no_fix_trains_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(demo(tmp_path, "--no-fix")) == 0
    out = capsys.readouterr().out
    assert "Applying" not in out
    assert "\n15 steps on cpu, " in out
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"report.json", "report.html", "metrics.csv"}


def test_a_run_without_a_finding_for_it_has_nothing_to_apply(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_demo_steps, "next_step", lambda reports, now: None)
    assert main(demo(tmp_path)) == 0
    assert "Nothing to apply" in capsys.readouterr().out


def test_a_build_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(source: Path, path: Path, **more: Any) -> None:
        path.with_name(f".{path.name}.unfinished").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(_demo_steps, "build_lmdb", stop)
    with pytest.raises(KeyboardInterrupt):
        _demo_steps.build(tmp_path / "data", tmp_path / "run/images", 146)
    assert [path.name for path in (tmp_path / "run").iterdir()] == []


def test_ctrl_c_in_the_second_training_ends_it(tmp_path: Path) -> None:
    process = start(*demo(tmp_path, "--images", "256", "--epochs", "2"))
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    if not any(line.startswith("Applying the advice") for line in lines):
        pytest.skip("this machine's figures advise nothing")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")
