"""StallDetector in real Trainers: true verdicts, whole books, and no trace left behind."""

from __future__ import annotations

import copy
import gc
import gzip
import json
import multiprocessing
import pickle
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_gpuopt import StallDetector, StallError, StallReport
from lightning_gpuopt._measured import PHASES
from lightning_gpuopt.diagnosis.report import REPORT_SCHEMA
from lightning_gpuopt.timeline.profiler import TimelineProfiler
from tests.helpers import FEATURES, RecordingLogger, TinyModel, final_weights, tiny_trainer

STEPS = 30
FAST = {"window_size": 10, "warmup_steps": 3}


class SleepyData(Dataset[Any]):
    """Samples that take their time, or the CPU's."""

    def __init__(self, length: int = 64, sleep_s: float = 0.0, spin_s: float = 0.0) -> None:
        self.length, self.sleep_s, self.spin_s = length, sleep_s, spin_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        time.sleep(self.sleep_s)
        end = time.thread_time() + self.spin_s
        while time.thread_time() < end:
            pass
        return [torch.full((FEATURES,), float(index)).sin()]


class Sleeper(Callback):
    def __init__(self, hook: str, seconds: float) -> None:
        setattr(self, hook, lambda *args, **kwargs: time.sleep(seconds))


class SlowLogger(RecordingLogger):
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        time.sleep(0.01)
        super().log_metrics(metrics, step)


class Model(TinyModel):
    """TinyModel with a step of a given length and any loader."""

    def __init__(self, step_s: float = 0.0, validation_s: float = 0.0, **loader: Any) -> None:
        super().__init__()
        self.step_s, self.validation_s = step_s, validation_s
        self.loader = {"dataset": SleepyData(), "batch_size": 2} | loader

    def in_step(self, batch_idx: int) -> None:
        time.sleep(self.step_s)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        time.sleep(self.validation_s)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(**self.loader)


def run(
    tmp_path: Path, model: Model, *callbacks: Callback, detector: StallDetector | None = None, **kwargs: Any
) -> StallReport:
    detector = detector or StallDetector(on_stall="ignore", **FAST)
    kwargs = {"max_steps": STEPS, "max_epochs": -1} | kwargs
    tiny_trainer(tmp_path, callbacks=[detector, *callbacks], **kwargs).fit(model)
    return detector.report


class TestVerdicts:
    def test_a_step_that_computes_is_compute_bound(self, tmp_path: Path) -> None:
        report = run(tmp_path, Model(step_s=0.02))
        assert (report.verdict, report.findings) == ("compute_bound", [])

    def test_a_loader_in_the_training_process(self, tmp_path: Path) -> None:
        report = run(tmp_path, Model(step_s=0.002, dataset=SleepyData(sleep_s=0.004)))
        assert report.verdict == "main_process_loading"
        assert report.findings[0].settings["num_workers"] >= 2

    def test_workers_that_wait_for_storage(self, tmp_path: Path) -> None:
        data = SleepyData(sleep_s=0.01, length=400)
        report = run(tmp_path, Model(dataset=data, num_workers=1), max_steps=60)
        assert report.verdict == "slow_storage"
        assert report.findings[0].evidence["worker_cpu_percent"] < 50

    def test_workers_that_compute(self, tmp_path: Path) -> None:
        data = SleepyData(spin_s=0.01, length=400)
        report = run(tmp_path, Model(dataset=data, num_workers=1), max_steps=60)
        # how many CPUs are free is the machine's affair
        assert report.verdict in ("slow_transform", "cpu_saturated")
        assert report.findings[0].evidence["num_workers"] == 1

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

    def test_workers_started_for_every_epoch(self, tmp_path: Path) -> None:
        report = run(tmp_path, Model(dataset=SleepyData(length=8), num_workers=2), max_steps=24)
        assert report.verdict == "epoch_restart"
        assert report.findings[0].settings == {"persistent_workers": True}

    def test_persistent_workers_do_not_restart(self, tmp_path: Path) -> None:
        model = Model(dataset=SleepyData(length=8), num_workers=2, persistent_workers=True, step_s=0.02)
        assert run(tmp_path, model, max_steps=24).verdict == "compute_bound"

    def test_warm_up_does_not_count(self, tmp_path: Path) -> None:
        class Compiling(Model):
            def in_step(self, batch_idx: int) -> None:
                time.sleep(0.5 if self.global_step == 0 else 0.02)

        slow_at_first = Sleeper("on_train_start", 1.0)
        report = run(tmp_path, Compiling(), slow_at_first)
        assert report.verdict == "compute_bound"
        assert report.phases["forward"] > 0.5
        assert report.step_s is not None
        assert report.step_s < 0.1


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
        assert detector.report.wall_s == pytest.approx(witness.wall_s, rel=0.02)

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
        assert report.phases["forward"] > STEPS * 0.02

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
            assert metrics["step/time_s"] > 0.01

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
        assert (report.verdict, report.steps) == ("compute_bound", 1)
        assert any("warm-up" in note for note in report.notes)


class Broken(Exception):
    pass


class Raiser(Callback):
    def __init__(self, hook: str, error: type[BaseException] = Broken, at: int = 5) -> None:
        def fail(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            if trainer.global_step >= at or hook == "on_train_start":
                raise error

        setattr(self, hook, fail)


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
        assert detector.report.notes == ["No training has run yet."]

    def test_the_sanity_check_is_not_counted(self, tmp_path: Path) -> None:
        report = run(tmp_path, Model(validation_s=0.05), limit_val_batches=2, num_sanity_val_steps=2, max_steps=10)
        assert report.phases["validation"] == 0.0

    def test_nothing_to_train_is_no_error(self, tmp_path: Path) -> None:
        report = run(tmp_path, Model(), limit_train_batches=0)
        assert report.notes == ["No training has run yet."]

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

        monkeypatch.setattr("lightning_gpuopt.callbacks._observed_fit.ObservedFit.close_window", fail)
        trainer = self.trainer(tmp_path, StallDetector(**FAST), max_steps=40)
        before = snapshot(trainer)
        with pytest.warns(
            UserWarning, match="disables itself, training goes on: ArithmeticError: a bug of ours"
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
                if detector._trace is not None:
                    monkeypatch.setattr(detector._run, "step_done", lambda: 1 / 0)

        with pytest.warns(UserWarning, match="disables itself"):
            run(tmp_path, Model(), Sleeper("on_train_batch_end", 0.01), Break(), detector=detector)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            pass  # refused while another one records
        assert detector._trace is None

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
        ({"on_stall": "shout"}, r"on_stall: expected one of 'warn', 'raise', 'ignore', got 'shout'"),
    ],
)
def test_wrong_arguments_are_refused_in_words(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StallDetector(**kwargs)


def test_it_pickles_before_and_after_fit(tmp_path: Path) -> None:
    detector = pickle.loads(pickle.dumps(StallDetector(**FAST)))
    run(tmp_path, Model(), detector=detector)
    assert pickle.loads(pickle.dumps(detector)).report.steps == STEPS


class TestWorkersInsideATrainer:
    """The loader's workers are timed, and nothing about the batches changes."""

    def test_the_data_wait_is_taken_apart(self, tmp_path: Path) -> None:
        data = SleepyData(sleep_s=0.01, length=400)
        report = run(tmp_path, Model(dataset=data, num_workers=1), max_steps=60)
        evidence = report.findings[0].evidence
        assert evidence["dataset_ms_per_batch"] >= 20.0
        assert evidence["dataset_cpu_ms_per_batch"] < 10.0
        assert evidence["workers_busy_percent"] > 60.0
        assert evidence["batch_mib"] == pytest.approx(2 * FEATURES * 4 / 2**20, abs=1e-3)
        assert report.findings[0].predicted_speedup is not None

    def test_the_users_loader_is_as_before(self, tmp_path: Path) -> None:
        def collate(samples: list[Any]) -> Any:
            return torch.utils.data.default_collate(samples)

        loader = DataLoader(SleepyData(length=400), batch_size=2, num_workers=1, collate_fn=collate)
        before = dict(vars(loader))
        detector = StallDetector(on_stall="ignore", **FAST)
        tiny_trainer(tmp_path, callbacks=[detector], max_steps=STEPS).fit(TinyModel(), loader)
        assert dict(vars(loader)) == before
        assert detector.report.loader.num_workers == 1

    @pytest.mark.parametrize("persistent", [False, True], ids=["plain", "persistent"])
    def test_no_worker_outlives_fit(self, tmp_path: Path, persistent: bool) -> None:
        model = Model(dataset=SleepyData(length=400), num_workers=2, persistent_workers=persistent)
        gc.disable()  # workers must end because nothing holds them, not because a collection comes by
        try:
            run(tmp_path, model)
            assert multiprocessing.active_children() == []
        finally:
            gc.enable()

    def test_no_worker_outlives_an_exception(self, tmp_path: Path) -> None:
        model = Model(dataset=SleepyData(length=400), num_workers=2)
        gc.disable()
        try:
            with pytest.raises(Broken):
                run(tmp_path, model, Raiser("on_train_batch_end"))
            assert multiprocessing.active_children() == []
        finally:
            gc.enable()

    @pytest.mark.parametrize("method", ["spawn", "forkserver"])
    def test_workers_that_are_started_anew(self, tmp_path: Path, method: str) -> None:
        data = SleepyData(sleep_s=0.01, length=200)
        model = Model(dataset=data, num_workers=1, multiprocessing_context=method)
        report = run(tmp_path, model, max_steps=STEPS)
        assert report.verdict == "slow_storage"
        assert report.findings[0].evidence["dataset_ms_per_batch"] >= 20.0

    def test_a_collate_function_that_does_not_pickle(self, tmp_path: Path) -> None:
        model = Model(dataset=SleepyData(length=200), num_workers=1, collate_fn=lambda samples: default(samples))
        default = torch.utils.data.default_collate
        assert run(tmp_path, model).steps == STEPS

    def test_order_and_random_numbers_are_as_without_it(self, tmp_path: Path) -> None:
        class Noise(Dataset[Any]):
            def __len__(self) -> int:
                return 128

            def __getitem__(self, index: int) -> list[torch.Tensor]:
                return [torch.rand(FEATURES) + index]

        def seen(callbacks: list[Callback]) -> tuple[list[torch.Tensor], torch.Tensor]:
            batches: list[torch.Tensor] = []

            class Watching(Model):
                def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
                    batches.append(batch[0].clone())
                    return super().training_step(batch, batch_idx)

            seed_everything(5, verbose=False)
            model = Watching(dataset=Noise(), num_workers=2, shuffle=True)
            tiny_trainer(tmp_path, callbacks=callbacks, max_steps=STEPS).fit(model)
            return batches, torch.rand(3)

        plain, after_plain = seen([])
        watched, after_watched = seen([StallDetector(on_stall="ignore", **FAST)])
        assert len(plain) == STEPS
        assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
        assert torch.equal(after_plain, after_watched)

    def test_reloaded_loaders_with_other_settings_prove_the_advice(self, tmp_path: Path) -> None:
        class Growing(Model):
            def train_dataloader(self) -> DataLoader[Any]:
                workers = 1 if self.current_epoch == 0 else 8
                data = SleepyData(sleep_s=0.01, length=80)
                return DataLoader(data, batch_size=2, num_workers=workers)

        model = Growing(step_s=0.005)
        report = run(tmp_path, model, max_steps=80, reload_dataloaders_every_n_epochs=1)
        (proof,) = [each for each in report.proofs if each.cause == "slow_storage"]
        assert proof.predicted is not None
        assert proof.measured > 1.5
        assert report.loader.num_workers == 8

    def test_the_report_of_an_earlier_run_is_what_a_new_one_is_held_against(self, tmp_path: Path) -> None:
        def report(workers: int) -> StallReport:
            detector = StallDetector(on_stall="ignore", report_dir=tmp_path / "report", **FAST)
            data = SleepyData(sleep_s=0.01, length=400)
            return run(tmp_path, Model(dataset=data, num_workers=workers, step_s=0.005), detector=detector)

        first = report(1)
        second = report(first.findings[0].settings["num_workers"])
        assert first.proofs == []
        assert [proof.cause for proof in second.proofs] == ["slow_storage"]
        assert first.step_s is not None
        assert second.step_s is not None
        assert second.proofs[0].measured == pytest.approx(first.step_s / second.step_s)

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


class TestSeveralLoadersAndEpochs:
    def test_workers_of_the_last_epoch_end_before_the_next_begins(self, tmp_path: Path) -> None:
        counts = []

        class Count(Callback):
            def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                if batch_idx == 0:
                    counts.append(len(multiprocessing.active_children()))

        model = Model(dataset=SleepyData(length=8), num_workers=2)
        run(tmp_path, model, Count(), max_steps=16)
        assert counts == [2, 2, 2, 2]

    @pytest.mark.parametrize("slow_first", [True, False], ids=["slow-first", "slow-last"])
    def test_of_several_loaders_the_narrow_one_is_told(self, tmp_path: Path, slow_first: bool) -> None:
        class Two(Model):
            def train_dataloader(self) -> Any:
                slow = DataLoader(SleepyData(sleep_s=0.02, length=200), batch_size=2, num_workers=1)
                fast = DataLoader(SleepyData(length=200), batch_size=2, num_workers=1)
                return [slow, fast] if slow_first else [fast, slow]

            def training_step(self, batch: list[Any], batch_idx: int) -> torch.Tensor:
                return self.layer(batch[0][0] + batch[1][0]).pow(2).mean()

        report = run(tmp_path, Two())
        assert report.verdict == "slow_storage"
        assert report.findings[0].evidence["dataset_ms_per_batch"] >= 40.0
        assert report.findings[0].evidence["num_workers"] == 1

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
        assert report.step_s is not None
        assert report.step_s < 0.03

    def test_the_beginning_of_epochs_is_remarked_on_where_no_setting_helps(self, tmp_path: Path) -> None:
        class SlowStart(torch.utils.data.SequentialSampler):
            def __iter__(self) -> Iterator[int]:
                time.sleep(0.2)
                return super().__iter__()

        data = SleepyData(length=16)
        report = run(tmp_path, Model(dataset=data, sampler=SlowStart(data)), max_steps=32)
        assert any("the beginning of epochs" in note for note in report.notes)

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
            assert twin.report.notes == ["No training has run yet."]


class TestHang:
    def test_stacks_and_workers_are_written_and_training_goes_on(self, tmp_path: Path) -> None:
        written = tmp_path / "report"

        def stuck_in_step() -> list[str]:
            """What was written of the step below: a busy machine may be so slow that it counts as hung elsewhere."""
            texts = [path.read_text() for path in written.glob("hang-*.txt")]
            return [text for text in texts if "in in_step" in text]

        class Hanging(Model):
            def in_step(self, batch_idx: int) -> None:
                deadline = time.monotonic() + 10
                while batch_idx >= 3 and not stuck_in_step() and time.monotonic() < deadline:
                    time.sleep(0.01)

        detector = StallDetector(on_stall="ignore", report_dir=written, hang_timeout=2.0)
        model = Hanging(dataset=SleepyData(length=100), num_workers=2)
        with pytest.warns(UserWarning, match="no step was finished for"):
            run(tmp_path, model, detector=detector, max_steps=8)
        assert "Workers of the training loader: 2" in stuck_in_step()[0]
        assert detector.report.steps == 8
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("gpuopt")]

    def test_without_a_hang_there_is_no_file(self, tmp_path: Path) -> None:
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

    def test_a_run_without_a_stall_records_nothing(self, tmp_path: Path) -> None:
        detector = StallDetector(on_stall="ignore", report_dir=tmp_path / "r", capture_trace=True, **FAST)
        run(tmp_path, Model(step_s=0.02), detector=detector)
        assert not (tmp_path / "r" / "trace.json.gz").exists()

    def test_another_profiler_that_records_is_left_alone(self, tmp_path: Path) -> None:
        detector = StallDetector(on_stall="ignore", report_dir=tmp_path / "r", capture_trace=True, **FAST)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            report = run(tmp_path, Model(), Sleeper("on_train_batch_end", 0.01), detector=detector)
        assert report.steps == STEPS

    def test_ranges_without_cuda_are_noted(self, tmp_path: Path) -> None:
        if torch.cuda.is_available():
            pytest.skip("NVTX is there")
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
    assert slowest.phase_s >= 0.2
    assert report.step_times.median_s is not None
    assert report.step_times.median_s < 0.1
    assert sum(report.step_times.counts) == STEPS - FAST["warmup_steps"]
