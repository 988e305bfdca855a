"""StallDetector in real Trainers: true verdicts, whole books, and no trace left behind."""

from __future__ import annotations

import copy
import gzip
import json
import pickle
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, IterableDataset

from lightning_gpuopt import StallDetector, StallError
from lightning_gpuopt.cli import main
from lightning_gpuopt.detector import session
from lightning_gpuopt.detector.progress import ProgressWatch
from lightning_gpuopt.detector.session import DetectorSession
from lightning_gpuopt.diagnosis.report import REPORT_SCHEMA, Finding
from lightning_gpuopt.measurements.loading import LoaderFacts
from lightning_gpuopt.measurements.phases import PHASES
from lightning_gpuopt.timeline.profiler import TimelineProfiler
from lightning_gpuopt.watch.factory import QuietDetector
from tests.callbacks.stalls import FAST, STEPS, Broken, Model, Raiser, Sleeper, SleepyData, run
from tests.helpers import FEATURES, Clock, RecordingLogger, final_weights, tiny_trainer

pytestmark = pytest.mark.usefixtures("simulated_time")


def of(seconds: float) -> object:
    """So long, but for the microseconds that reading the simulated clock takes."""
    return pytest.approx(seconds, abs=1e-3)


class SlowLogger(RecordingLogger):
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        time.sleep(0.01)
        super().log_metrics(metrics, step)


class TestVerdicts:
    def test_a_step_that_computes_is_compute_bound(self, tmp_path: Path) -> None:
        report = run(tmp_path, Model(step_s=0.02))
        assert (report.verdict, report.findings) == ("compute_bound", [])
        assert report.step_s == of(0.02)

    def test_a_loader_in_the_training_process(self, tmp_path: Path) -> None:
        report = run(tmp_path, Model(step_s=0.002, dataset=SleepyData(sleep_s=0.004)))
        assert report.verdict == "main_process_loading"
        assert report.findings[0].share == pytest.approx(0.8, abs=0.05)
        assert report.findings[0].settings["num_workers"] >= 2

    @pytest.mark.parametrize("kind", [StallDetector, QuietDetector])
    def test_the_detector_itself_is_no_cause_but_a_note(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[StallDetector]
    ) -> None:
        monkeypatch.setattr(DetectorSession, "see_batch", lambda *arguments: time.sleep(0.01))
        detector = kind(warmup_steps=2, window_size=10, on_stall="ignore", report_dir=tmp_path)
        tiny_trainer(tmp_path, callbacks=[detector], max_steps=STEPS).fit(Model(step_s=0.01))
        assert detector.report.findings == []
        assert any("of the time is StallDetector's own diagnosis" in note for note in detector.report.notes)

    def test_a_slow_callback_is_named(self, tmp_path: Path) -> None:
        report = run(tmp_path, Model(), Sleeper("on_train_batch_end", 0.01))
        assert report.verdict == "callback"
        assert report.findings[0].evidence["callback"] == "Sleeper"
        assert report.findings[0].evidence["hook"] == "on_train_batch_end"

    def test_a_slow_logger(self, tmp_path: Path) -> None:
        class Logging(Model):
            def on_before_zero_grad(self, optimizer: Any) -> None:
                self.log("loss", 1.0, on_step=True)

        report = run(tmp_path, Logging(), logger=SlowLogger(), log_every_n_steps=1)
        assert report.verdict == "logging"

    def test_a_logger_called_by_the_user(self, tmp_path: Path) -> None:
        class Direct(Model):
            def in_step(self, batch_idx: int) -> None:
                self.logger.log_metrics({"x": 1.0}, step=batch_idx)

        report = run(tmp_path, Direct(), logger=SlowLogger(), log_every_n_steps=1000)
        assert report.verdict == "logging"

    @pytest.mark.parametrize("hook", ["on_before_batch_transfer", "on_after_batch_transfer"])
    def test_a_hook_around_the_copy_is_a_callback_and_work_for_the_workers(self, tmp_path: Path, hook: str) -> None:
        def works(self: Any, batch: Any, dataloader_idx: int) -> Any:
            time.sleep(0.01)
            return batch

        model = type("Augments", (Model,), {hook: works})(step_s=0.01)
        report = run(tmp_path, model)
        (finding,) = report.findings
        assert (finding.cause, finding.share) == ("callback", pytest.approx(0.5, abs=0.05))
        assert (finding.evidence["callback"], finding.evidence["hook"]) == ("Augments", hook)
        assert "do its work in the workers" in finding.advice
        assert finding.predicted_speedup is not None
        assert finding.predicted_speedup[1] == pytest.approx(2.0, abs=0.1)
        assert report.phases["transfer"] == pytest.approx(0.01 * report.steps, abs=0.01)

    def test_slow_checkpoints(self, tmp_path: Path) -> None:
        class Saving(Model):
            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                time.sleep(0.02)

        checkpoint = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1)
        report = run(tmp_path, Saving(), checkpoint, enable_checkpointing=True)
        assert report.verdict == "checkpoint"

    def test_slow_validation(self, tmp_path: Path) -> None:
        report = run(tmp_path, Model(validation_s=0.02), limit_val_batches=3, val_check_interval=5, max_epochs=1)
        assert report.verdict == "validation"

    def test_a_validation_loader_that_is_slow_to_start_is_validation(self, tmp_path: Path) -> None:
        class Starting(Model):
            def val_dataloader(self) -> DataLoader[Any]:
                time.sleep(0.3)
                return super().val_dataloader()

        model = Starting()
        report = run(
            tmp_path,
            model,
            limit_val_batches=1,
            reload_dataloaders_every_n_epochs=1,
            max_steps=96,
            num_sanity_val_steps=0,
        )
        assert report.verdict == "validation"
        assert report.phases["other"] < report.phases["validation"]

    def test_warm_up_does_not_count(self, tmp_path: Path) -> None:
        class Compiling(Model):
            def in_step(self, batch_idx: int) -> None:
                time.sleep(0.5 if self.global_step == 0 else 0.02)

        slow_at_first = Sleeper("on_train_start", 1.0)
        report = run(tmp_path, Compiling(), slow_at_first)
        assert report.verdict == "compute_bound"
        assert report.phases["forward"] == of(0.5 + (STEPS - 1) * 0.02)
        assert report.step_s == of(0.02)


class TestBooks:
    @pytest.mark.parametrize(
        "kwargs",
        [
            {},
            {"accumulate_grad_batches": 4},
            {"limit_val_batches": 2, "val_check_interval": 0.5},
            {"profiler": "simple"},
            {"gradient_clip_val": 1.0, "max_epochs": 3, "max_steps": -1},
        ],
        ids=["plain", "accumulate", "validation", "profiler", "clip"],
    )
    def test_the_phases_sum_to_the_wall_time(self, tmp_path: Path, kwargs: dict[str, Any]) -> None:
        report = run(tmp_path, Model(), **kwargs)
        assert tuple(report.phases) == PHASES
        assert sum(report.phases.values()) == pytest.approx(report.wall_s, rel=1e-6)
        assert sum(each.wall_s for each in report.timeline) == pytest.approx(report.wall_s, rel=1e-6)
        assert sum(each.steps for each in report.timeline) == report.steps

    def test_the_wall_time_is_that_from_train_start_to_train_end(self, tmp_path: Path) -> None:
        class Witness(Callback):
            def on_train_start(self, *args: Any) -> None:
                self.start = time.perf_counter()

            def on_train_end(self, *args: Any) -> None:
                self.wall_s = time.perf_counter() - self.start

        witness = Witness()
        detector = StallDetector(on_stall="ignore", **FAST)
        tiny_trainer(tmp_path, callbacks=[witness, detector], max_steps=STEPS).fit(Model(step_s=0.01))
        assert witness.wall_s == pytest.approx(STEPS * 0.01, rel=0.02)
        assert detector.report.wall_s == of(witness.wall_s)

    def test_manual_optimization_is_booked(self, tmp_path: Path) -> None:
        class Manual(Model):
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False

            def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(self.layer(batch[0]).pow(2).mean())
                optimizer.step()

        report = run(tmp_path, Manual())
        assert report.steps == STEPS
        for phase in ("forward", "backward", "optimizer"):
            assert report.phases[phase] > 0

    def test_a_step_that_fetches_for_itself(self, tmp_path: Path) -> None:
        class Fetching(Model):
            def training_step(self, dataloader_iter: Iterator[Any]) -> torch.Tensor:
                batch, _, _ = next(dataloader_iter)
                time.sleep(0.02)
                return self.layer(batch[0]).pow(2).mean()

        report = run(tmp_path, Fetching())
        assert report.verdict == "compute_bound"
        assert report.phases["forward"] == of(STEPS * 0.02)

    def test_an_unsized_loader(self, tmp_path: Path) -> None:
        class Endless(IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                while True:
                    time.sleep(0.003)
                    yield [torch.zeros(FEATURES)]

        report = run(tmp_path, Model(dataset=Endless()))
        assert (report.verdict, report.steps) == ("main_process_loading", STEPS)

    def test_several_loaders_and_loaders_that_are_none(self, tmp_path: Path) -> None:
        class Plain:
            def __iter__(self) -> Iterator[list[torch.Tensor]]:
                return iter([[torch.zeros(2, FEATURES)]] * 32)

            def __len__(self) -> int:
                return 32

        class Mixed(Model):
            def train_dataloader(self) -> Any:
                return {"a": DataLoader(SleepyData(), batch_size=2), "b": Plain()}

            def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
                time.sleep(0.02)
                return self.layer(batch["a"][0] + batch["b"][0]).pow(2).mean()

        report = run(tmp_path, Mixed())
        assert (report.verdict, report.steps) == ("compute_bound", STEPS)

    def test_another_profiler_keeps_its_own_account(self, tmp_path: Path) -> None:
        profiler = SimpleProfiler()
        run(tmp_path, Model(), profiler=profiler)
        assert len(profiler.recorded_durations["[Strategy]SingleDeviceStrategy.training_step"]) == STEPS
        assert profiler.current_actions == {}


class TestLogging:
    def test_each_window_is_logged_after_warm_up(self, tmp_path: Path) -> None:
        logger = RecordingLogger()
        run(tmp_path, Model(), Sleeper("on_train_batch_end", 0.03), logger=logger)
        assert logger.steps("step/") == [12, 22]
        for _, metrics in logger.records:
            shares = [metrics.pop(f"step/{phase}_percent") for phase in PHASES]
            assert sum(shares) == pytest.approx(100)
            assert metrics.pop("stall/count") == 1
            assert list(metrics) == ["step/time_s"]
            assert metrics["step/time_s"] == of(0.03)

    def test_a_run_shorter_than_a_window_is_logged_as_one(self, tmp_path: Path) -> None:
        logger = RecordingLogger()
        run(tmp_path, Model(), logger=logger, max_steps=8)
        assert len(logger.steps("step/time_s")) == 1

    def test_every_logger_gets_the_figures(self, tmp_path: Path) -> None:
        loggers = [RecordingLogger(), CSVLogger(tmp_path / "csv")]
        run(tmp_path, Model(), logger=loggers)
        assert len(loggers[0].steps("step/")) == 2
        assert "step/data_wait_percent" in Path(loggers[1].log_dir, "metrics.csv").read_text()

    def test_without_a_logger_the_report_is_the_same(self, tmp_path: Path) -> None:
        assert run(tmp_path, Model(), logger=False).steps == STEPS


class TestTelling:
    def test_each_cause_is_warned_of_once(self, tmp_path: Path) -> None:
        detector = StallDetector(**FAST)
        with pytest.warns(UserWarning, match="StallDetector") as caught:
            run(tmp_path, Model(), Sleeper("on_train_batch_end", 0.01), detector=detector, max_steps=60)
        told = [str(each.message) for each in caught if "StallDetector" in str(each.message)]
        assert len(told) == 1
        assert "callback Sleeper takes" in told[0]
        assert "Sleeper.on_train_batch_end" in told[0]

    def test_a_run_shorter_than_a_window_is_told_at_its_end(self, tmp_path: Path) -> None:
        with pytest.warns(UserWarning, match="callback Sleeper takes"):
            run(tmp_path, Model(), Sleeper("on_train_batch_end", 0.01), detector=StallDetector(), max_steps=9)

    def test_raise_ends_training_with_cause_and_cure(self, tmp_path: Path) -> None:
        detector = StallDetector(on_stall="raise", **FAST)
        with pytest.raises(StallError, match=r"callback Sleeper takes \d+ % of the time\. Sleeper.on_train_batch_end"):
            run(tmp_path, Model(), Sleeper("on_train_batch_end", 0.01), detector=detector)
        assert detector.report.steps == 13
        assert detector.report.verdict == "callback"

    def test_a_compute_bound_run_is_quiet(self, tmp_path: Path) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(tmp_path, Model(step_s=0.02), detector=StallDetector(**FAST))
        assert [str(each.message) for each in caught if "StallDetector" in str(each.message)] == []


class TestReportFile:
    def test_it_lies_in_the_log_dir(self, tmp_path: Path) -> None:
        logger = CSVLogger(tmp_path / "logs")
        report = run(tmp_path, Model(), logger=logger)
        data = json.loads(Path(logger.log_dir, "gpuopt", "report.json").read_text())
        jsonschema.validate(data, REPORT_SCHEMA)
        assert data["verdict"] == report.verdict
        assert data["phases"] == report.phases
        assert data["environment"]["torch"] == torch.__version__
        assert data["loader_costs"]["num_workers"] == 0
        assert sum(data["loader_costs"]["counts"]) == data["loader_costs"]["batches"] == STEPS - 3

    def test_it_lies_where_it_was_asked_for(self, tmp_path: Path) -> None:
        detector = StallDetector(on_stall="ignore", report_dir=tmp_path / "here")
        run(tmp_path, Model(), detector=detector)
        assert (tmp_path / "here" / "report.json").is_file()

    def test_a_folder_by_its_address_is_written_through_fsspec(self, tmp_path: Path) -> None:
        detector = StallDetector(on_stall="ignore", report_dir=f"file://{tmp_path}/there")
        run(tmp_path, Model(), detector=detector)
        jsonschema.validate(json.loads((tmp_path / "there" / "report.json").read_text()), REPORT_SCHEMA)

    def test_a_folder_that_cannot_be_written_is_told_once(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        detector = StallDetector(on_stall="ignore", report_dir=tmp_path / "file" / "below")
        with pytest.warns(UserWarning, match="could not write") as caught:
            run(tmp_path, Model(), detector=detector)
        assert len([each for each in caught if "could not write" in str(each.message)]) == 1
        assert detector.report.steps == STEPS

    def test_fast_dev_run_leaves_no_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        report = run(tmp_path, Model(), fast_dev_run=True)
        assert list(tmp_path.rglob("report.json")) == []
        assert (report.verdict, report.steps) == ("not_measured", 1)

    def test_a_run_without_a_steady_step_is_not_measured(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        detector = StallDetector(report_dir=tmp_path / "short")
        why = "No training has run yet: a verdict needs at least 6 steps."
        assert (detector.report.verdict, detector.report.why_not_measured) == ("not_measured", why)
        tiny_trainer(tmp_path, callbacks=[detector], max_steps=3).fit(Model(dataset=SleepyData(sleep_s=0.01)))
        why = "Only 3 steps have run, warm-up included: nothing is diagnosed, a verdict needs at least 6."
        file = tmp_path / "short" / "report.json"
        for text in (capsys.readouterr().out, self.shown(capsys, file)):
            first, *lines = text.splitlines()
            assert first.startswith("Verdict: not_measured   (3 steps in ")
            assert " ".join(lines[:2]).startswith(why)
            assert text.count("nothing is diagnosed") == 1
        assert json.loads(file.read_text())["verdict"] == "not_measured"
        page = file.with_name("report.html").read_text()
        assert f'<h1>Not measured</h1>\n<p class="lead">{why}</p>' in page
        assert "Nothing takes enough of the time" not in page
        enough = run(tmp_path, Model(step_s=0.02), detector=StallDetector(report_dir=tmp_path / "enough"), max_steps=6)
        assert (enough.verdict, enough.why_not_measured) == ("compute_bound", "")
        files = [str(tmp_path / "enough" / "report.json"), str(file)]
        assert main(["report", *files, "--fail-if-slower", "5"]) == 1
        printed = capsys.readouterr()
        assert printed.err == f"Not judged: the later run has no step after its warm-up. {why}\n"
        assert f"The later run was not measured. {why}" in " ".join(printed.out.split())

    @pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
    def test_all_figures_of_a_table_are_of_the_steps_since_the_last_change(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        class Faster(Model):
            def train_dataloader(self) -> DataLoader[Any]:
                slow = self.trainer.current_epoch == 0
                return DataLoader(SleepyData(sleep_s=0.015 if slow else 0.0), batch_size=2, pin_memory=not slow)

        detector = StallDetector(3e-2, window_size=10, warmup_steps=3, on_stall="ignore", report_dir=tmp_path)
        loop = {"max_epochs": 2, "max_steps": -1, "reload_dataloaders_every_n_epochs": 1}
        report = run(tmp_path, Faster(step_s=0.02), detector=detector, **loop)
        assert (report.verdict, report.steps, report.measured_steps) == ("compute_bound", 64, 28)
        assert (report.step_s, report.phases["data_wait"]) == (of(0.02), pytest.approx(31 * 0.03, abs=0.02))
        rows = self.rows(capsys.readouterr().out)
        assert rows["where"] == ["the", "time", "went", "last", "28", "steps", "share", "whole", "run", "share"]
        assert self.numbers(rows["forward"]) == pytest.approx([0.56, 100, 1.28, 57], abs=1)
        assert self.numbers(rows["data_wait"]) == pytest.approx([0, 0, 0.93, 41], abs=1)
        file = str(tmp_path / "report.json")
        assert main(["report", file, file]) == 0
        printed = capsys.readouterr().out
        assert "the last 28 of 64 steps before, the last 28 of 64 steps after" in " ".join(printed.split())
        rows = self.rows(printed)
        assert self.numbers(rows["step"]) == pytest.approx([20, 20], abs=1)
        assert self.numbers(rows["forward"]) == pytest.approx([20, 100, 20, 100], abs=1)
        assert self.numbers(rows["data_wait"]) == pytest.approx([0, 0, 0, 0], abs=1)

    def test_advice_that_was_followed_for_a_few_steps_only_has_no_measured_gain(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        slow = Finding("main_process_loading", 0.5, {}, "", {"prefetch_factor": 4}, (1.1, 1.2, 1.3))
        first = run(tmp_path, Model(), detector=StallDetector(report_dir=tmp_path), max_steps=36)
        advised = replace(first, findings=[slow], loader=LoaderFacts(), step_s=0.08)
        advised.save_json(tmp_path / "report.json")
        detector = StallDetector(report_dir=tmp_path, on_stall="ignore")
        loader = {"num_workers": 1, "prefetch_factor": 4}
        (proof,) = run(tmp_path, Model(step_s=0.02, **loader), detector=detector, max_steps=16).proofs
        assert (proof.steps, proof.kept) == ((31, 11), None)
        assert "measured not enough steps (31 steps before, 11 after)" in " ".join(capsys.readouterr().out.split())

    @staticmethod
    def rows(text: str) -> dict[str, list[str]]:
        """A table's lines by their first words."""
        return {words[0]: words[1:] for line in text.splitlines() if (words := line.split())}

    @staticmethod
    def numbers(words: list[str]) -> list[float]:
        return [float(each.strip("()")) for each in words if each.strip("()").replace(".", "").isdecimal()]

    @staticmethod
    def shown(capsys: pytest.CaptureFixture[str], file: Path) -> str:
        assert main(["report", str(file)]) == 0
        return capsys.readouterr().out


def snapshot(trainer: Trainer) -> tuple[Any, ...]:
    loop = trainer.fit_loop.epoch_loop.val_loop
    return (
        trainer.profiler,
        dict(vars(trainer.strategy)).keys(),
        set(vars(loop)) & {"run"},
        [set(vars(logger)) & {"log_metrics", "save"} for logger in trainer.loggers],
        {thread.name for thread in threading.enumerate() if thread.name.startswith("gpuopt")},
    )


class TestAsBefore:
    def trainer(self, tmp_path: Path, *callbacks: Callback, **kwargs: Any) -> Trainer:
        return tiny_trainer(tmp_path, callbacks=list(callbacks), logger=RecordingLogger(), **{"max_steps": 12} | kwargs)

    def test_the_trainer_is_as_before_after_fit(self, tmp_path: Path) -> None:
        trainer = self.trainer(tmp_path, StallDetector(on_stall="ignore"))
        before = snapshot(trainer)
        trainer.fit(Model())
        assert snapshot(trainer)[0] is before[0]
        assert snapshot(trainer)[2:] == before[2:]
        assert "backward" not in vars(trainer.strategy)

    @pytest.mark.parametrize(
        "hook", ["on_train_start", "on_train_batch_end", "on_validation_end", "on_train_epoch_end"]
    )
    @pytest.mark.parametrize("first", [True, False], ids=["detector-first", "detector-last"])
    def test_the_trainer_is_as_before_after_an_exception(self, tmp_path: Path, hook: str, first: bool) -> None:
        detector = StallDetector(on_stall="ignore", **FAST)
        callbacks = [detector, Raiser(hook)] if first else [Raiser(hook), detector]
        trainer = self.trainer(tmp_path, *callbacks, limit_val_batches=1, max_steps=64, max_epochs=2)
        before = snapshot(trainer)
        with pytest.raises(Broken):
            trainer.fit(Model())
        assert snapshot(trainer)[0] is before[0]
        assert snapshot(trainer)[2:] == before[2:]
        if hook != "on_train_start":
            assert detector.report.steps >= 4
            assert (tmp_path / "gpuopt" / "report.json").is_file()

    def test_an_exception_in_setup_is_not_made_worse(self, tmp_path: Path) -> None:
        trainer = self.trainer(tmp_path, Raiser("setup", at=0), StallDetector())
        with pytest.raises(Broken):
            trainer.fit(Model())

    def test_ctrl_c_leaves_a_report(self, tmp_path: Path) -> None:
        detector = StallDetector(on_stall="ignore", **FAST)
        trainer = self.trainer(tmp_path, detector, Raiser("on_train_batch_end", KeyboardInterrupt))
        before = snapshot(trainer)
        with pytest.raises(SystemExit):
            trainer.fit(Model())
        assert snapshot(trainer)[0] is before[0]
        assert snapshot(trainer)[2:] == before[2:]
        assert (tmp_path / "gpuopt" / "report.json").is_file()

    def test_the_same_detector_fits_again_in_the_same_and_in_a_new_trainer(self, tmp_path: Path) -> None:
        detector = StallDetector(on_stall="ignore", **FAST)
        trainer = self.trainer(tmp_path, detector)
        trainer.fit(Model())
        assert detector.report.steps == 12
        trainer.fit_loop.epoch_loop.max_steps = 20
        trainer.fit(Model())
        assert detector.report.steps == 8
        fresh = self.trainer(tmp_path, detector, max_steps=15)
        fresh.fit(Model())
        assert detector.report.steps == 15

    def test_outside_of_fit_it_does_nothing(self, tmp_path: Path) -> None:
        detector = StallDetector()
        trainer = self.trainer(tmp_path, detector, limit_val_batches=2)
        trainer.validate(Model(), verbose=False)
        assert detector.report.wall_s == 0
        assert detector.report.notes == ["No training has run yet: a verdict needs at least 6 steps."]

    def test_the_sanity_check_is_not_counted(self, tmp_path: Path) -> None:
        report = run(tmp_path, Model(validation_s=0.05), limit_val_batches=2, num_sanity_val_steps=2, max_steps=10)
        assert report.phases["validation"] == 0.0

    def test_nothing_to_train_is_no_error(self, tmp_path: Path) -> None:
        report = run(tmp_path, Model(), limit_train_batches=0)
        assert report.notes == ["No training has run yet: a verdict needs at least 4 steps."]

    def test_weights_are_the_same_with_and_without_it(self, tmp_path: Path) -> None:
        plain = final_weights(tiny_trainer(tmp_path, max_steps=40))
        watched = final_weights(tiny_trainer(tmp_path, max_steps=40, callbacks=[StallDetector(**FAST)]))
        assert plain.keys() == watched.keys()
        assert all(torch.equal(plain[name], watched[name]) for name in plain)

    def test_our_own_failure_is_told_and_training_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(self: Any) -> None:
            raise ArithmeticError("a bug of ours")

        monkeypatch.setattr("lightning_gpuopt.detector.session.DetectorSession.close_window", fail)
        trainer = self.trainer(tmp_path, StallDetector(**FAST), max_steps=40)
        before = snapshot(trainer)
        with pytest.warns(
            UserWarning, match="disables itself, training continues: ArithmeticError: a bug of ours"
        ) as caught:
            trainer.fit(Model())
        assert len([each for each in caught if "disables itself" in str(each.message)]) == 1
        assert trainer.global_step == 40
        assert snapshot(trainer)[0] is before[0]
        assert snapshot(trainer)[2:] == before[2:]

    def test_after_our_own_failure_no_recording_goes_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        detector = StallDetector(on_stall="ignore", capture_trace=True, report_dir=tmp_path / "r", **FAST)

        class Break(Callback):
            def on_train_batch_end(self, *args: Any) -> None:
                if detector._session is not None and detector._session.profiling._trace.is_recording:
                    monkeypatch.setattr(detector._session, "step_done", lambda: 1 / 0)

        with pytest.warns(UserWarning, match="disables itself"):
            run(tmp_path, Model(), Sleeper("on_train_batch_end", 0.01), Break(), detector=detector)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            pass  # refused while another one records

    def test_the_profiler_in_place_during_training_is_ours(self, tmp_path: Path) -> None:
        seen = []

        class Look(Callback):
            def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
                seen.append(type(trainer.profiler))

        run(tmp_path, Model(), Look(), max_steps=2)
        assert seen == [TimelineProfiler, TimelineProfiler]


def test_the_report_can_be_read_while_training_runs(tmp_path: Path) -> None:
    reports = []

    class Look(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            reports.append(detector.report)

    detector = StallDetector(on_stall="ignore", **FAST)
    run(tmp_path, Model(), Look(), detector=detector, max_steps=5)
    assert [report.steps for report in reports] == [1, 2, 3, 4, 5]
    assert all(sum(report.phases.values()) == pytest.approx(report.wall_s, rel=1e-6) for report in reports)


def test_two_detectors_in_one_trainer_are_refused(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, callbacks=[StallDetector(), StallDetector()])
    with pytest.raises(MisconfigurationException, match="Two StallDetectors"):
        trainer.fit(Model())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"threshold": 0}, r"threshold: expected a share .* got 0"),
        ({"threshold": 10}, r"threshold: .* got 10"),
        ({"threshold": "0.1"}, r"threshold: .* got '0.1'"),
        ({"window_size": 0}, r"window_size: expected a number of batches, at least 1, got 0"),
        ({"window_size": 2.5}, r"window_size: .* got 2.5"),
        ({"warmup_steps": -1}, r"warmup_steps: .* got -1"),
        ({"hang_timeout": 0}, r"hang_timeout: expected seconds above 0, or None, got 0"),
        ({"window_size": True}, r"window_size: .* got True"),
        ({"hang_timeout": float("nan")}, r"hang_timeout: .* got nan"),
        ({"report_dir": 5}, r"report_dir: expected a path, or None, got 5"),
        ({"nvtx": "no"}, r"nvtx: .* got 'no'"),
        ({"profile": "sometimes"}, r"profile: expected one of 'auto', 'on', 'off', got 'sometimes'"),
        ({"profile": False, "capture_trace": True}, r'capture_trace=True records .* profile="off" forbids that'),
        ({"on_stall": "shout"}, r"on_stall: expected one of 'warn', 'raise', 'ignore', got 'shout'"),
    ],
)
def test_wrong_arguments_are_refused_in_words(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StallDetector(**kwargs)


@pytest.mark.parametrize(("text", "word"), [("on", "on"), ("off", "off"), ("auto", "auto"), ("'off'", "off")])
def test_what_yaml_makes_of_the_words_of_profile_is_understood(text: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "fit.yaml").write_text(f"detector:\n  profile: {text}\n")
    parser = ArgumentParser()
    parser.add_class_arguments(StallDetector, "detector")
    parser.add_argument("--config", action="config")
    asked = parser.parse_args(["--config", str(tmp_path / "fit.yaml")]).detector.profile
    assert StallDetector(profile=asked).profile == word


def test_it_pickles_before_and_after_fit(tmp_path: Path) -> None:
    detector = pickle.loads(pickle.dumps(StallDetector(**FAST)))
    run(tmp_path, Model(), detector=detector)
    assert pickle.loads(pickle.dumps(detector)).report.steps == STEPS


class TestSeveralLoadersAndEpochs:
    def test_a_slow_hook_of_the_module_is_named(self, tmp_path: Path) -> None:
        class Slow(Model):
            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                time.sleep(0.01)

        report = run(tmp_path, Slow())
        assert report.verdict == "callback"
        assert report.findings[0].evidence["callback"] == "Slow"
        assert report.findings[0].evidence["hook"] == "on_train_batch_end"

    def test_a_callback_in_validation_is_named_and_is_no_part_of_the_step(self, tmp_path: Path) -> None:
        report = run(
            tmp_path,
            Model(step_s=0.005),
            Sleeper("on_validation_batch_end", 0.1),
            limit_val_batches=2,
            val_check_interval=5,
            max_epochs=1,
        )
        finding = report.findings[0]
        assert (finding.cause, finding.evidence["hook"]) == ("callback", "on_validation_batch_end")
        assert finding.predicted_speedup is None
        assert report.step_s == of(0.005)

    def test_a_sampler_that_is_slow_to_begin_is_a_finding(self, tmp_path: Path) -> None:
        class SlowStart(torch.utils.data.SequentialSampler):
            def __iter__(self) -> Iterator[int]:
                time.sleep(0.2)
                return super().__iter__()

        data = SleepyData(length=16)
        report = run(tmp_path, Model(dataset=data, sampler=SlowStart(data)), max_steps=32)
        assert report.verdict == "epoch_restart"
        assert report.findings[0].evidence["largest_part"] == "making the loader's iterator"

    @pytest.mark.parametrize("wrapped", [True, False], ids=["in a DataLoader", "as it is"])
    def test_an_iterable_that_reads_an_index_in_each_epoch_is_a_finding(self, tmp_path: Path, wrapped: bool) -> None:
        class Indexed(torch.utils.data.IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                time.sleep(0.6)
                for index in range(10):
                    yield [torch.full((FEATURES,), float(index))] if wrapped else [torch.ones(2, FEATURES)]

        class Streams(Model):
            def train_dataloader(self) -> Any:
                return DataLoader(Indexed(), batch_size=2) if wrapped else Indexed()

        report = run(tmp_path, Streams(step_s=0.05), max_steps=35)
        assert report.verdict == "epoch_restart"
        assert report.findings[0].evidence["largest_part"] == "filling a buffer or reading an index"
        assert "read an index once" in report.findings[0].advice
        assert "Nothing is left to gain" not in str(report)

    def test_a_loader_that_cannot_be_touched_trains_as_without_us(self, tmp_path: Path) -> None:
        class Frozen(DataLoader[Any]):
            ready = False

            def __setattr__(self, name: str, value: Any) -> None:
                if self.ready and name == "collate_fn":
                    raise RuntimeError("frozen")
                super().__setattr__(name, value)

        class Own(Model):
            def train_dataloader(self) -> Any:
                loader = Frozen(SleepyData(), batch_size=2)
                loader.ready = True
                return loader

        report = run(tmp_path, Own())
        assert report.steps == STEPS
        assert any("could not be timed inside its workers" in note for note in report.notes)

    def test_a_loader_that_cannot_be_timed_is_noted(self, tmp_path: Path) -> None:
        class Plain:
            def __iter__(self) -> Iterator[list[torch.Tensor]]:
                return iter([[torch.zeros(2, FEATURES)]] * 64)

            def __len__(self) -> int:
                return 64

        class Own(Model):
            def train_dataloader(self) -> Any:
                return Plain()

        report = run(tmp_path, Own())
        assert any("could not be timed inside its workers" in note for note in report.notes)


class TestCopiesInMidFit:
    def test_what_we_shadow_pickles_as_the_original(self, tmp_path: Path) -> None:
        copies: dict[str, Any] = {}

        class Copy(Callback):
            def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
                copies["logger"] = pickle.loads(pickle.dumps(trainer.logger))
                copies["detector"] = pickle.loads(pickle.dumps(detector))
                copies["deep"] = copy.deepcopy(detector)
                copies["seam"] = pickle.loads(pickle.dumps(vars(trainer.strategy)["process_dataloader"])).__name__

        detector = StallDetector(on_stall="ignore", **FAST)
        run(tmp_path, Model(), Copy(), detector=detector, logger=CSVLogger(tmp_path), max_steps=3)
        assert copies["seam"] == "process_dataloader"
        assert isinstance(copies["logger"], CSVLogger)
        for twin in (copies["detector"], copies["deep"]):
            assert twin.report.notes == ["No training has run yet: a verdict needs at least 4 steps."]


def test_validation_batches_and_saves_are_progress_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    clock = Clock()

    class Watched(ProgressWatch):
        """Looks at each second of the test's clock; its thread has nothing to do."""

        def __init__(self, trainer: Trainer, recorder: Any = None, timeout_s: float | None = None, *write: Any) -> None:
            super().__init__(trainer, recorder, timeout_s, tell, clock)
            watches.append(self)

    def tell(quiet_s: float) -> None:
        told.append(f"{where}: {quiet_s:.0f} s")

    def passes(seconds: int, what: str) -> None:
        nonlocal where
        where = what
        for _ in range(seconds):
            clock.now_s += 1
            if watches:
                watches[-1].look()

    class Takes(Callback):
        def on_validation_batch_end(self, *args: Any) -> None:
            passes(9, "validation")

        def on_save_checkpoint(self, trainer: Trainer, *args: Any) -> None:
            passes(9 if trainer.global_step < 8 else 15, f"save at {trainer.global_step}")

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            passes(5, "step")
            if trainer.global_step % 4 == 0:
                trainer.save_checkpoint(tmp_path / "last.ckpt")
            passes(5, "step")

    where = ""
    watches: list[ProgressWatch] = []
    monkeypatch.setattr(session, "ProgressWatch", Watched)
    detector = StallDetector(on_stall="ignore", report_dir=tmp_path / "report", hang_timeout=10.5)
    trainer = {"max_steps": 8, "limit_val_batches": 3, "val_check_interval": 2}
    run(tmp_path, Model(), Takes(), detector=detector, **trainer)
    assert told == ["save at 8: 11 s"]


def test_without_a_hang_there_is_no_file(tmp_path: Path) -> None:
    detector = StallDetector(on_stall="ignore", report_dir=tmp_path / "report", hang_timeout=600.0)
    run(tmp_path, Model(), detector=detector)
    assert list((tmp_path / "report").glob("hang-*")) == []


class TestTraceAndRanges:
    def test_a_stall_is_recorded_once(self, tmp_path: Path) -> None:
        detector = StallDetector(on_stall="ignore", report_dir=tmp_path / "r", capture_trace=True, **FAST)
        run(tmp_path, Model(), Sleeper("on_train_batch_end", 0.01), detector=detector)
        trace = json.loads(gzip.decompress((tmp_path / "r" / "trace.json.gz").read_bytes()))
        steps = [event for event in trace["traceEvents"] if event.get("name") == "Optimizer.step#SGD.step"]
        assert len(steps) == 5

    @pytest.mark.parametrize("window_size", [1, *(pytest.param(each, marks=pytest.mark.matrix) for each in (2, 10))])
    def test_five_steps_are_recorded_whatever_the_window(self, tmp_path: Path, window_size: int) -> None:
        recorded: list[bool] = []

        class Sees(Callback):
            def on_train_batch_start(self, *args: Any) -> None:
                recorded.append(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]

        detector = StallDetector(
            on_stall="ignore", report_dir=tmp_path / "r", capture_trace=True, window_size=window_size, warmup_steps=3
        )
        run(tmp_path, Model(), Sleeper("on_train_batch_end", 0.01), Sees(), detector=detector, max_steps=40)
        assert len(recorded) == 40
        assert recorded.count(True) == 5

    def test_a_run_without_a_stall_records_nothing(self, tmp_path: Path) -> None:
        detector = StallDetector(on_stall="ignore", report_dir=tmp_path / "r", capture_trace=True, **FAST)
        run(tmp_path, Model(step_s=0.02), detector=detector)
        assert not (tmp_path / "r" / "trace.json.gz").exists()

    def test_another_profiler_that_records_is_left_alone(self, tmp_path: Path) -> None:
        detector = StallDetector(on_stall="ignore", report_dir=tmp_path / "r", capture_trace=True, **FAST)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            report = run(tmp_path, Model(), Sleeper("on_train_batch_end", 0.01), detector=detector)
        assert report.steps == STEPS

    @pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a torch that is built with CUDA has NVTX")
    def test_ranges_without_cuda_are_noted(self, tmp_path: Path) -> None:
        report = run(tmp_path, Model(), detector=StallDetector(on_stall="ignore", nvtx=True, **FAST))
        assert "No NVTX ranges: this torch is built without CUDA." in report.notes
        assert report.steps == STEPS


def test_steps_that_stand_out_are_listed_with_their_cause(tmp_path: Path) -> None:
    class Spiky(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            time.sleep(0.2 if batch_idx == 20 else 0.0)

    report = run(tmp_path, Model(step_s=0.01), Spiky())
    slowest = max(report.step_times.outliers, key=lambda each: each.seconds)
    # the detector stands before the callback: the time shows in the step after it
    assert (slowest.step, slowest.phase) == (21, "callbacks")
    assert slowest.phase_s == of(0.2)
    assert report.step_times.median_s == of(0.01)
    assert sum(report.step_times.counts) == STEPS - FAST["warmup_steps"]
