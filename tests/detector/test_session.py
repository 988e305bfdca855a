"""How often a run is diagnosed while it goes on."""

from __future__ import annotations

import time
from typing import Any

import pytest
from lightning.pytorch import Trainer

from evaluation.parts import Data, Model, quiet
from lightning_gpuopt import StallDetector
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
