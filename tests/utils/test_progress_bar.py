"""What is seen while fit runs: items in the Trainer's progress bar, and the report printed at the end."""

from __future__ import annotations

import copy
import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar

from lightning_gpuopt import StallDetector, StallError
from lightning_gpuopt.diagnosis.render.text import render_text
from lightning_gpuopt.utils.progress_bar import BarItem, print_once_fit_has_ended
from tests.callbacks.stalls import FAST, Broken, Model, Raiser, Sleeper, SleepyData
from tests.helpers import RecordingLogger, tiny_trainer

pytestmark = pytest.mark.usefixtures("simulated_time")

HALF = {"step_s": 0.01, "dataset": SleepyData(sleep_s=0.005)}
"""Batches of two samples take as long as the step: half of the time is data wait."""


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


class OwnBar(TQDMProgressBar):
    """A user's bar, with metrics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, Any]] = []

    def get_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"mine": 1}


class Watcher(Callback):
    """Asks the bar for its metrics after every step, as the bar itself does."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.logged: set[str] = set()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.seen.append(dict(trainer.progress_bar_callback.get_metrics(trainer, pl_module)))
        self.logged |= {*trainer.callback_metrics, *trainer.logged_metrics, *trainer.progress_bar_metrics}


def fit(tmp_path: Path, *callbacks: Callback, detector: StallDetector | None = None, **kwargs: Any) -> Any:
    """Train for 30 steps; windows end after the steps 13 and 23."""
    detector = detector or StallDetector(on_stall="ignore", **FAST)
    kwargs = {"max_steps": 30, "max_epochs": -1} | kwargs
    trainer = tiny_trainer(tmp_path, callbacks=[detector, *callbacks], **kwargs)
    trainer.fit(Model(**HALF))
    return trainer


class TestData:
    def test_a_bar_of_tqdm_shows_it(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        detector = StallDetector(on_stall="ignore", prog_bar=True, print_report=False, **FAST)
        fit(tmp_path, TQDMProgressBar(), detector=detector, enable_progress_bar=True)
        out, err = capfd.readouterr()
        assert "data=50 %" in out + err

    def test_a_bar_of_rich_shows_it(self, tmp_path: Path) -> None:
        screen = io.StringIO()
        bar = RichProgressBar(console_kwargs={"file": screen, "force_terminal": True, "width": 200})
        detector = StallDetector(on_stall="ignore", prog_bar=True, print_report=False, **FAST)
        fit(tmp_path, bar, detector=detector, enable_progress_bar=True)
        assert "data: 50 %" in screen.getvalue()

    def test_it_comes_with_the_first_window_beside_a_user_s_own_metrics(self, tmp_path: Path) -> None:
        watcher, logger = Watcher(), RecordingLogger()
        detector = StallDetector(on_stall="ignore", prog_bar=True, **FAST)
        fit(tmp_path, watcher, OwnBar(), detector=detector, logger=logger, enable_progress_bar=True)
        assert watcher.seen == 12 * [{"mine": 1}] + 18 * [{"mine": 1, "data": "50 %"}]
        assert watcher.logged == set()
        assert "data" not in {key for _, metrics in logger.records for key in metrics}

    @pytest.mark.parametrize("hook", [None, "on_train_batch_end", "on_train_start"])
    def test_the_bar_is_as_before_when_fit_has_ended(self, tmp_path: Path, hook: str | None) -> None:
        bar = OwnBar()
        detector = StallDetector(on_stall="ignore", prog_bar=True, **FAST)
        try:
            fit(tmp_path, bar, *([Raiser(hook, at=20)] if hook else []), detector=detector, enable_progress_bar=True)
        except Broken:
            assert hook is not None
        assert "get_metrics" not in vars(bar)
        assert bar.get_metrics() == {"mine": 1}

    def test_without_a_bar_nothing_happens(self, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
        detector = StallDetector(on_stall="ignore", prog_bar=True, **FAST)
        assert fit(tmp_path, detector=detector).global_step == 30
        assert [str(each.message) for each in recwarn if "StallDetector" in str(each.message)] == []

    def test_it_is_not_there_unasked(self, tmp_path: Path) -> None:
        watcher = Watcher()
        fit(tmp_path, watcher, OwnBar(), enable_progress_bar=True)
        assert watcher.seen == 30 * [{"mine": 1}]


@pytest.mark.parametrize("label", ["data", "gpu"])
def test_a_metric_of_the_user_s_by_that_name_is_kept(label: str) -> None:
    item = BarItem(label)
    item.set_percent(42.4)
    assert item.added_to({label: 0.5, "loss": 1.0}) == {label: 0.5, "loss": 1.0}
    assert item.added_to({"loss": 1.0}) == {"loss": 1.0, label: "42 %"}


def test_a_copy_of_a_bar_is_one_of_its_own(tmp_path: Path) -> None:
    class Bar(ProgressBar):
        def get_metrics(self, *args: Any) -> dict[str, Any]:
            return {"bar": self}

    bar = Bar()
    trainer = tiny_trainer(tmp_path, callbacks=[bar], enable_progress_bar=True)
    item = BarItem("data")
    item.set_percent(42.4)
    undo = item.show_in(trainer)
    assert bar.get_metrics() == {"bar": bar, "data": "42 %"}
    twin = copy.deepcopy(bar)
    assert twin.get_metrics() == {"bar": twin}
    undo()
    undo()
    assert bar.get_metrics() == {"bar": bar}


class TestReport:
    def test_it_is_printed_when_fit_has_ended(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("COLUMNS", "70")
        detector = StallDetector(on_stall="ignore", **FAST)
        fit(tmp_path, detector=detector)
        out = capsys.readouterr().out
        assert out == f"{render_text(detector.report, 70)}\n"
        assert out.startswith("Verdict: main_process_loading")

    def test_it_is_printed_after_the_bar_has_ended(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        fit(tmp_path, TQDMProgressBar(), enable_progress_bar=True)
        out = capsys.readouterr().out
        last = out.rindex("Epoch 0:") if "Epoch 0:" in out else 0
        assert out.index("Verdict: ") > last

    def test_not_where_nobody_wants_it(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        fit(tmp_path, detector=StallDetector(on_stall="ignore", print_report=False, **FAST))
        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize("kwargs", [{"fast_dev_run": True}, {"max_steps": 3}], ids=["fast_dev_run", "warm-up"])
    def test_where_nothing_was_diagnosed_it_says_what_a_verdict_needs(
        self, tmp_path: Path, kwargs: dict[str, Any], capsys: pytest.CaptureFixture[str]
    ) -> None:
        fit(tmp_path, **kwargs)
        out = capsys.readouterr().out
        assert out.startswith("Verdict: not_measured")
        assert "a verdict needs at least 4" in " ".join(out.split())

    @pytest.mark.parametrize("bar", [None, TQDMProgressBar, OwnBar, RichProgressBar])
    def test_it_is_printed_once_after_an_interrupt(
        self, tmp_path: Path, bar: type[ProgressBar] | None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        callbacks = [Raiser("on_train_batch_end", KeyboardInterrupt, at=20), *([bar()] if bar is not None else [])]
        with pytest.raises(SystemExit):
            fit(tmp_path, *callbacks, enable_progress_bar=bar is not None)
        assert capsys.readouterr().out.count("Verdict: main_process_loading") == 1

    def test_after_an_interrupt_it_is_printed_by_the_bar_that_is_still_drawn(self, tmp_path: Path) -> None:
        class Printing(OwnBar):
            def print(self, *args: Any, **kwargs: Any) -> None:
                self.shown.append(args)

        bar, detector = Printing(), StallDetector(on_stall="ignore", **FAST)
        interrupt = Raiser("on_train_batch_end", KeyboardInterrupt, at=20)
        with pytest.raises(SystemExit):
            fit(tmp_path, interrupt, bar, detector=detector, enable_progress_bar=True)
        assert bar.shown == [(render_text(detector.report),)]

    def test_not_after_another_exception(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(Broken):
            fit(tmp_path, Raiser("on_train_batch_end", at=20))
        with pytest.raises(StallError):
            fit(tmp_path, Sleeper("on_train_batch_end", 0.1), detector=StallDetector(on_stall="raise", **FAST))
        assert capsys.readouterr().out == ""

    def test_other_ranks_print_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        for first in (True, False):
            trainer: Any = SimpleNamespace(is_global_zero=first, progress_bar_callback=None)
            print_once_fit_has_ended(trainer, "report")
        assert capsys.readouterr().out == "report\n"

    def test_a_terminal_without_bars_gets_something_else(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
        fit(tmp_path)
        sys.stdout.flush()
        assert raw.getvalue().startswith(b"Verdict: main_process_loading")

    def test_a_closed_stdout_ends_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
    ) -> None:
        closed = io.StringIO()
        closed.close()
        monkeypatch.setattr(sys, "stdout", closed)
        assert fit(tmp_path).global_step == 30
        assert [str(each.message) for each in recwarn if "StallDetector" in str(each.message)] == []

    def test_a_reader_that_has_gone_ends_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
    ) -> None:
        class Gone(io.StringIO):
            def write(self, text: str) -> int:
                raise BrokenPipeError

        monkeypatch.setattr(sys, "stdout", Gone())
        assert fit(tmp_path).global_step == 30
        assert [str(each.message) for each in recwarn if "StallDetector" in str(each.message)] == []
