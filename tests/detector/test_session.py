"""How often a run is diagnosed while it goes on."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from evaluation.parts import Data, Model, quiet
from lightning_gpuopt import StallDetector
from lightning_gpuopt.detector.accumulator import SteadyStateAccumulator
from lightning_gpuopt.detector.session import DetectorSession


@pytest.mark.parametrize(("costs_s", "diagnoses"), [(0.0, 20), (0.0025, 7), (1.0, 4)])
@pytest.mark.usefixtures("simulated_time")
def test_a_diagnosis_waits_for_200_times_what_the_last_one_took_and_a_second_at_most(
    costs_s: float, diagnoses: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    found = []

    def find(*args: Any) -> None:
        time.sleep(costs_s)
        found.append(args)

    monkeypatch.setattr(DetectorSession, "_find", find)
    # 20 windows of 0.2 s after the warm-up
    detector = StallDetector(on_stall="ignore", window_size=5, warmup_steps=5, report_dir=tmp_path)
    model: Any = Model({"dataset": Data(), "num_workers": 0}, step_s=0.04)
    Trainer(**quiet(tmp_path, max_steps=105, max_epochs=-1, callbacks=[detector])).fit(model)
    assert len(found) == diagnoses


@pytest.mark.parametrize(("wanted", "measured"), [({}, 0), ({"logger": True}, 4), ({"listener": True}, 4)])
def test_a_window_is_measured_where_somebody_wants_to_know(
    wanted: dict[str, bool], measured: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    seen: list[Any] = []
    window = SteadyStateAccumulator.window
    monkeypatch.setattr(SteadyStateAccumulator, "window", lambda *args: seen.append(window(*args)) or seen[-1])
    detector = StallDetector(on_stall="ignore", window_size=5, warmup_steps=5, report_dir=tmp_path)
    if "listener" in wanted:
        listener: Any = SimpleNamespace(
            changes=[], notes=[], window_closed=lambda *args: False, training_ended=lambda: None
        )
        detector.add_listener(listener)
    model: Any = Model({"dataset": Data(), "num_workers": 0}, step_s=0.0)
    logger = CSVLogger(tmp_path) if "logger" in wanted else False
    Trainer(**quiet(tmp_path, max_steps=25, max_epochs=-1, callbacks=[detector], logger=logger)).fit(model)
    assert len(seen) == measured
    assert detector.report.step_s is not None
