"""The demo's second half: the advice is applied, and the runs stand side by side."""

from __future__ import annotations

import json
import signal
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gpuopt.callbacks.cuda_prefetcher import CudaPrefetcher
from lightning_gpuopt.cli import main
from lightning_gpuopt.cli.demo import MARK
from lightning_gpuopt.demo import steps, training
from lightning_gpuopt.demo.data import Recipe, make
from lightning_gpuopt.demo.steps import Machine, Step, next_step, settings_after
from lightning_gpuopt.demo.table import Run, gain_line, table
from lightning_gpuopt.demo.training import DemoSettings, Outcome
from lightning_gpuopt.diagnosis.record import Finding, Proof
from lightning_gpuopt.diagnosis.report import StallReport, Stretch
from lightning_gpuopt.measurements.loading import LoaderFacts
from tests.demo.test_demo import demo, start, train
from tests.simulators.gpu import simulated_gpu

GAIN: dict[str, float | str] = {
    "storage_step_speedup": 1.5,
    "storage_step_speedup_low": 1.2,
    "storage_step_speedup_high": 1.7,
}
FAST = {"storage_step": "ImageFolderDataModule", "small_images_gain": 2.5, **GAIN}
SMALL = {"storage_step": "lightning-gpuopt lmdb build SRC DST --image-size 146", **GAIN}
CUDA = Machine(on_cuda=True)
CUDA_WITH_DALI = Machine(on_cuda=True, has_dali=True)


def report(evidence: dict[str, Any], cause: str = "main_process_loading", **more: Any) -> StallReport:
    return StallReport(cause, 1.0, {"data_wait": 0.7}, [Finding(cause, 0.7, evidence, "", **more)])


def settings(**changes: Any) -> DemoSettings:
    given: dict[str, Any] = {"epochs": 1, "max_steps": None, "batch_size": 8, "num_workers": 0, "accelerator": "cpu"}
    folders = {"data_dir": Path("data"), "output_dir": Path("run"), "seed": 0, "progress_bar": False}
    return DemoSettings(**{**given, **folders, **changes})


def name_of(
    *reports: StallReport, machine: Machine | None = None, tried: Collection[str] = (), **changes: Any
) -> str | None:
    step = next_step(reports, settings(**changes), machine, tried)
    return step.name if step is not None else None


def sure(workers: int, cause: str = "main_process_loading") -> StallReport:
    return report({}, cause, settings={"num_workers": workers}, predicted_speedup=(3.0, 4.0, 5.0))


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run's report advises the next way of reading images, whatever was measured."""
    read = next_step

    def next_advised(reports: list[StallReport], now: DemoSettings, machine: Machine, tried: set[str]) -> Any:
        evidence = {"files": FAST, "folder": SMALL}.get(now.storage)
        return read([report(evidence)], now, machine, tried) if evidence is not None else None

    monkeypatch.setattr(steps, "next_step", next_advised)
    monkeypatch.setattr(Run, "kept", True)  # a few steps on a busy machine may well be slower


def test_the_steps_follow_the_reports() -> None:
    assert name_of(report(FAST)) == "fast-decoder"
    assert name_of(report(SMALL)) == "smaller-images"
    assert name_of(report(FAST), report(SMALL), storage="folder") == "smaller-images"
    assert name_of(report(FAST), tried={"fast-decoder"}) == "smaller-images"
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


def test_a_loader_that_becomes_slower_is_given_cheaper_images_without_a_prediction() -> None:
    slower = report({"phase": "data_wait"}, cause="slowdown")
    step = next_step([slower], settings())
    assert step is not None
    assert (step.name, step.predicted) == ("fast-decoder", None)
    assert name_of(report({"phase": "forward"}, cause="slowdown")) is None
    assert name_of(report(FAST), slower, storage="folder") == "smaller-images"


def test_images_that_were_measured_cheaper_are_tried_though_no_gain_is_sure() -> None:
    pil = {"image_decode_ms": 0.6, "image_crop_ms": 0.3, "image_to_float_ms": 0.1}
    assert name_of(report({**pil, "fast_decode_ms": 0.79})) == "fast-decoder"
    assert name_of(report({**pil, "fast_decode_ms": 0.81})) is None
    assert name_of(report({**pil, "fast_decode_ms": 0.1}, cause="gpu_sync")) is None
    assert name_of(report({"fast_decode_ms": 1.0, "small_decode_ms": 0.79}), storage="folder") == "smaller-images"
    assert name_of(report({"fast_decode_ms": 1.0, "small_decode_ms": 0.9}), storage="folder") is None


def test_workers_are_searched_for_once_and_only_for_a_sure_gain() -> None:
    unsure = report({}, settings={"num_workers": 2}, predicted_speedup=(1.0, 1.3, 3.7))
    step = next_step([sure(8)], settings())
    assert step is not None
    assert (step.name, step.predicted) == ("worker-search", (3.0, 4.0, 5.0))
    assert step.changes == {"worker_search": True, "num_workers": 1, "persistent_workers": True}
    assert name_of(sure(8), tried={"worker-search"}) is None
    assert name_of(sure(8), num_workers=8) is None
    assert name_of(sure(8), storage="dali") is None
    assert name_of(unsure) is None


def test_a_search_starts_with_the_workers_that_are_there() -> None:
    step = next_step([sure(8, "slow_transform")], settings(num_workers=4))
    assert step is not None
    assert step.changes["num_workers"] == 4


def test_the_number_that_was_found_is_kept_without_another_search() -> None:
    searching = settings(worker_search=True, num_workers=1, persistent_workers=True)
    assert settings_after(searching, outcome(found_num_workers=6)) == settings(num_workers=6, persistent_workers=True)
    assert settings_after(settings(), outcome()) == settings()


def test_copies_are_made_ahead_on_cuda_with_the_prediction_of_the_finding() -> None:
    exposed = report({}, "host_to_device", predicted_speedup=(1.1, 1.2, 1.3))
    step = next_step([exposed], settings(num_workers=4), CUDA)
    assert step is not None
    assert (step.name, step.changes, step.predicted) == ("prefetch", {"prefetch": True}, (1.1, 1.2, 1.3))
    assert name_of(exposed, num_workers=4) is None
    assert name_of(exposed, machine=CUDA, num_workers=4, prefetch=True) is None
    assert name_of(exposed, machine=CUDA, num_workers=4, tried={"prefetch"}) is None


def test_copies_ahead_without_workers_take_one_and_promise_nothing() -> None:
    exposed = report({}, "host_to_device", predicted_speedup=(1.1, 1.2, 1.3))
    step = next_step([exposed], settings(), CUDA)
    assert step is not None
    assert step.changes == {"prefetch": True, "num_workers": 1, "persistent_workers": True}
    assert step.predicted is None


@pytest.mark.parametrize("cause", ["main_process_loading", "slow_storage", "slow_transform", "cpu_saturated"])
def test_dali_comes_last_and_needs_cuda_and_itself(cause: str) -> None:
    assert name_of(report({}, cause), machine=CUDA_WITH_DALI, storage="lmdb") == "dali"
    assert name_of(report({}, cause), machine=CUDA, storage="lmdb") is None
    assert name_of(report({}, cause), machine=Machine(has_dali=True), storage="lmdb") is None
    assert name_of(report({}, cause), machine=CUDA_WITH_DALI, storage="dali") is None
    assert name_of(sure(8, cause), machine=CUDA_WITH_DALI, storage="lmdb") == "worker-search"


def test_dali_is_not_for_a_gpu_that_is_busy() -> None:
    assert name_of(report({}, "gpu_sync"), machine=CUDA_WITH_DALI) is None


def test_dali_is_looked_for_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "load_dali", lambda: None)
    assert Machine.of(outcome(on_cuda=True)) == CUDA_WITH_DALI
    assert Machine.of(outcome()) == Machine()

    def missing() -> None:
        raise ImportError

    monkeypatch.setattr(steps, "load_dali", missing)
    assert Machine.of(outcome(on_cuda=True)) == CUDA


def outcome(step_s: float = 0.05, gpu_percent: float | None = None, **more: Any) -> Outcome:
    measured = StallReport("main_process_loading", 10.0, {"data_wait": 7.31}, [], steps=100, step_s=step_s)
    gpu = {} if gpu_percent is None else {"gpu/0/utilization": gpu_percent}
    return Outcome(measured, gpu, 98.75, 100, 3200, "cpu", **more)


def after(name: Any, step_s: float, predicted: Any, measured: float, gpu_percent: float | None = None) -> Run:
    step = Step(name, "main_process_loading", (), {}, {}, predicted)
    return Run(settings(), outcome(step_s, gpu_percent), step, Proof("main_process_loading", {}, predicted, measured))


def test_all_steps_fit_into_80_columns() -> None:
    runs = [
        Run(settings(), outcome(0.2, 12.3)),
        after("fast-decoder", 0.1, (1.2, 1.5, 1.7), 2.0, 20.0),
        after("smaller-images", 0.05, (1.2, 1.5, 1.7), 1.61, 41.7),
        after("worker-search", 0.001, (10.0, 40.0, 60.0), 50.0, 98.0),
        after("prefetch", 0.0008, (1.1, 1.2, 1.3), 1.25, 100.0),
        after("dali", 0.001, None, 0.8, 99.0),
    ]
    assert table(runs).splitlines() == [
        "                 samples      step    data      GPU    val.  predicted  measured",
        "                   per s      time    wait    util.    acc.       gain      gain",
        " " + "─" * 79,
        " before              160  200.0 ms  73.1 %   12.3 %  98.8 %          –         –",
        " fast decoder        320  100.0 ms  73.1 %   20.0 %  98.8 %      1.50x     2.00x",
        "                                                             1.20-1.70   outside",
        " smaller images      640   50.0 ms  73.1 %   41.7 %  98.8 %      1.50x     1.61x",
        "                                                             1.20-1.70",
        " worker search    32,000    1.0 ms  73.1 %   98.0 %  98.8 %     40.00x    50.00x",
        "                                                                 10-60",
        " prefetch         40,000    0.8 ms  73.1 %  100.0 %  98.8 %      1.20x     1.25x",
        "                                                             1.10-1.30",
        " DALI             32,000    1.0 ms  73.1 %   99.0 %  98.8 %          –    0.80x*",
    ]


def test_without_a_gpu_there_is_no_column_for_it() -> None:
    assert "GPU" not in table([Run(settings(), outcome())])


def test_a_run_that_is_slower_is_not_kept() -> None:
    assert [after("dali", 0.1, None, measured).kept for measured in (0.99, 1.0, 2.0)] == [False, True, True]
    assert Run(settings(), outcome()).kept


def test_the_line_of_a_gain_says_what_was_predicted() -> None:
    assert gain_line(Proof("slow_storage", {}, (1.2, 1.5, 1.7), 1.61)) == (
        "predicted 1.50x (1.20x to 1.70x), measured 1.61x steps per second"
    )
    assert gain_line(Proof("slow_storage", {}, (1.2, 1.5, 1.7), 2.0)) == (
        "predicted 1.50x (1.20x to 1.70x), measured 2.00x: outside the interval"
    )
    assert gain_line(Proof("slow_storage", {}, None, 1.61)) == "measured 1.61x steps per second"


def test_what_is_slower_is_taken_back_and_the_rest_builds_upon_the_run_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "data", Recipe(128))
    trained: list[DemoSettings] = []
    asked: list[str] = []

    def measured(now: DemoSettings) -> Outcome:
        trained.append(now)
        step_s = {"files": 0.4, "folder": 0.5, "lmdb": 0.2}[now.storage]
        followed = Finding("main_process_loading", 0.7, {}, "", {"num_workers": 0})
        made = StallReport(followed.cause, 10.0, {"data_wait": 7.0}, [followed], steps=15, step_s=step_s)
        made = replace(made, loader=LoaderFacts(num_workers=0))
        now.output_dir.mkdir(exist_ok=True)
        made.save_json(now.output_dir / "report.json")
        (now.output_dir / "metrics.csv").write_text(now.storage)
        return Outcome(made, {}, 50.0, 15, 120, "cpu")

    def next_advised(reports: list[StallReport], now: DemoSettings, machine: Machine, tried: set[str]) -> Any:
        asked.append(now.storage)
        return next_step([report(SMALL if "fast-decoder" in tried else FAST)], now, machine, tried)

    monkeypatch.setattr(training, "train", measured)
    monkeypatch.setattr(steps, "next_step", next_advised)
    assert main(demo(tmp_path)) == 0
    assert [each.storage for each in trained] == ["files", "folder", "lmdb"]
    assert asked == ["files", "files", "lmdb"]
    out = capsys.readouterr().out
    assert "0.80x*\n" in out
    assert "\n* slower than the run before, undone\n" in out
    assert "\n2.0x samples per second; " in out
    assert (tmp_path / "run/metrics.csv").read_text() == "lmdb"
    assert (tmp_path / "run/before/metrics.csv").read_text() == "files"
    last = json.loads((tmp_path / "run/report.json").read_text())
    assert [(proof["settings"]["datamodule"], proof["measured"]) for proof in last["proofs"]] == [
        ("LMDBDataModule", 2.0)
    ]
    page = (tmp_path / "run/report.html").read_text()
    assert page.count("<li>main_process_loading: ") == 1  # in the list of what was predicted


@pytest.mark.example
@pytest.mark.usefixtures("advised")
def test_the_table_holds_the_figures_of_the_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(demo(tmp_path)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    runs = [tmp_path / "run" / name for name in ("before", "fast-decoder", "smaller-images")]
    reports = [json.loads((run / "report.json").read_text()) for run in runs]
    assert [each["steps"] for each in reports] == [15, 15, 15]
    lines = out.splitlines()
    rows = {line[:15].strip(): line[15:].split() for line in lines if line.startswith((" before ", " fast ", " small"))}
    step_s = [each["step_s"] for each in reports]
    columns = list(zip(*rows.values(), strict=True))
    assert list(rows) == ["before", "fast decoder", "smaller images"]
    assert columns[0] == tuple(f"{8 / each:,.0f}" for each in step_s)
    assert columns[1] == tuple(f"{each * 1e3:.1f}" for each in step_s)
    waits = []
    for each in reports:
        parts = each["timeline"][-1:]  # what is behind the warm-up, as the step's time
        waits.append(sum(part["phases"]["data_wait"] for part in parts) / sum(part["wall_s"] for part in parts))
    assert columns[3] == tuple(f"{each * 100:.1f}" for each in waits)
    assert columns[7] == ("–", "1.50x", "1.50x")
    gains = [step_s[0] / step_s[1], step_s[1] / step_s[2]]
    assert columns[8] == ("–", *(f"{each:.2f}x" for each in gains))
    assert [proof["measured"] for proof in reports[2]["proofs"]] == gains
    assert f"{8 / step_s[2] / (8 / step_s[0]):.1f}x samples per second" in out
    assert lines[-4:-1] == [
        f"Before and after in one report: {tmp_path}/run/report.html, report.json",
        f"Reports and metrics of each run: {tmp_path}/run/{{before,fast-decoder,smaller-images}}",
        "Your own script, measured like this: lightning-gpuopt watch -- python train.py",
    ]
    assert lines[-1].startswith("3 times 15 steps on cpu, ")
    for name in ("report.json", "report.html", "metrics.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (runs[2] / name).read_bytes()
    assert "Before and after" not in (runs[0] / "report.html").read_text()
    page = (tmp_path / "run/report.html").read_text()
    assert "Before and after" in page
    assert "The runs differ" not in page
    assert "None of the settings" not in page
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 80


@pytest.mark.example
@pytest.mark.usefixtures("advised")
def test_a_second_demo_in_the_same_folder_replaces_the_first(tmp_path: Path) -> None:
    (tmp_path / "run/smaller-images/images/train.lmdb.half-built").mkdir(parents=True)
    (tmp_path / "run" / MARK).touch()
    for _ in range(2):
        assert main(demo(tmp_path, "--max-steps", "8")) == 0
    images = tmp_path / "run/smaller-images/images"
    assert sorted(path.name for path in images.iterdir()) == ["train.lmdb", "val.lmdb"]
    last = json.loads((tmp_path / "run/report.json").read_text())
    assert (last["steps"], len(last["proofs"])) == (8, 2)


@pytest.mark.example
@pytest.mark.usefixtures("advised")
def test_no_fix_trains_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(demo(tmp_path, "--no-fix")) == 0
    out = capsys.readouterr().out
    assert "Applying" not in out
    assert "\n15 steps on cpu, " in out
    written = {path.name for path in (tmp_path / "run").iterdir()} - {"hparams.yaml"}  # Lightning before 2.6 has it
    written -= {"stacks.speedscope.json"}  # where a look had begun before so short a run was over
    assert written == {"report.json", "report.html", "metrics.csv", MARK}


@pytest.mark.example
def test_a_run_without_a_finding_for_it_has_nothing_to_apply(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "next_step", lambda *given: None)
    assert main(demo(tmp_path)) == 0
    assert "Nothing to apply" in capsys.readouterr().out
    assert not (tmp_path / "run/before").exists()


@pytest.mark.example
def test_a_search_says_what_it_found(tmp_path: Path) -> None:
    found = train(tmp_path, images=128, num_workers=1, persistent_workers=True, worker_search=True, storage="folder")
    assert found.found_num_workers == found.report.loader.num_workers
    assert found.found_num_workers >= 1
    assert (found.steps, found.samples) == (8, 120)


@pytest.mark.example
def test_dali_trains_on_the_same_images_from_a_folder_and_from_an_lmdb(tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali")
    folder = train(tmp_path, images=128, storage="dali")
    steps.build(tmp_path / "data", tmp_path / "lmdb", 146)
    lmdb = train(tmp_path, images=128, storage="dali", data_dir=tmp_path / "lmdb")
    for trained in (folder, lmdb):
        assert (trained.steps, trained.samples, trained.found_num_workers) == (8, 120, None)


@pytest.mark.example
def test_copies_are_made_ahead_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainers: list[Any] = []

    def sgd(module: Any) -> torch.optim.Optimizer:  # AdamW asks torch for a device that is not simulated
        return torch.optim.SGD(module.parameters(), lr=0.01)

    monkeypatch.setattr(training.PhotographNet, "configure_optimizers", sgd)
    with simulated_gpu() as gpu:

        def on_the_gpu(**arguments: Any) -> Any:
            trainers.append(real(**{**arguments, **gpu.trainer_arguments()}))
            return trainers[-1]

        real = training.Trainer
        monkeypatch.setattr(training, "Trainer", on_the_gpu)
        workers = {"num_workers": 1, "persistent_workers": True}
        ahead = train(tmp_path, images=128, storage="folder", prefetch=True, **workers)
    [prefetcher] = [each for each in trainers[0].callbacks if isinstance(each, CudaPrefetcher)]
    assert (prefetcher.stats["staged"], prefetcher.stats["direct"]) == (8 + 1, 0)  # training and validation
    assert (ahead.samples, ahead.on_cuda) == (120, True)


def test_a_build_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(source: Path, path: Path, **more: Any) -> None:
        path.with_name(f".{path.name}.unfinished").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, "build_lmdb", stop)
    with pytest.raises(KeyboardInterrupt):
        steps.build(tmp_path / "data", tmp_path / "run/images", 146)
    assert [path.name for path in (tmp_path / "run").iterdir()] == []


@pytest.mark.example
def test_ctrl_c_in_the_second_training_ends_it(tmp_path: Path) -> None:
    process = start(*demo(tmp_path, "--images", "256", "--epochs", "2"))
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    if not any(line.startswith("Applying the advice") for line in lines):
        pytest.skip("this machine's figures advise nothing")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")


def test_waiting_for_data_is_of_the_steps_that_the_step_time_is_of() -> None:
    warm_up, steady = Stretch(0.0, 1.0, 5, {"data_wait": 1.0}), Stretch(1.0, 1.0, 95, {"data_wait": 0.25})
    made = StallReport("x", 2.0, {"data_wait": 1.25}, [], steps=100, step_s=0.01, measured_steps=95)
    run = Run(settings(), Outcome(replace(made, timeline=[warm_up, steady]), {}, 98.75, 100, 3200, "cpu"))
    assert "25.0 %" in table([run])
