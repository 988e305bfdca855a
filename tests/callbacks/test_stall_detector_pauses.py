"""StallDetector and what stops the step from outside: real collections and compilations in real Trainers."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.callback
from lightning.pytorch import Callback, Trainer

from evaluation.parts import Model, quiet
from evaluation.pause_parts import CollectsAfterEachStep, Compiles, KeepsObjects
from lightning_gpuopt import StallDetector, StallReport

LOADER: dict[str, Any] = {"dataset": torch.ones(1000, 8)}


class FailsAt(Callback):
    """Ends training by an error."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.step:
            raise ZeroDivisionError


def fit(folder: Path, model: Model, *callbacks: Callback, steps: int = 25) -> StallReport:
    detector = StallDetector(on_stall="ignore", window_size=10, warmup_steps=5, report_dir=folder)
    Trainer(**quiet(folder, max_steps=steps, max_epochs=-1, callbacks=[*callbacks, detector])).fit(model)
    return detector.report


@pytest.mark.parametrize("callbacks", [[], [FailsAt(7)]], ids=["at the end", "after an error"])
def test_what_watches_collections_and_compilations_is_taken_away(tmp_path: Path, callbacks: list[Callback]) -> None:
    handler = torch._dynamo.callback.callback_handler
    before = (list(gc.callbacks), list(handler.start_callbacks), list(handler.end_callbacks))
    during: list[int] = []

    class Looks(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            during.append(len(gc.callbacks) + len(handler.start_callbacks) + len(handler.end_callbacks))

    try:
        fit(tmp_path, Model(LOADER, step_s=0.0), Looks(), *callbacks, steps=10)
    except ZeroDivisionError:
        assert callbacks
    assert (list(gc.callbacks), list(handler.start_callbacks), list(handler.end_callbacks)) == before
    assert set(during) == {sum(map(len, before)) + 3}


def test_a_callback_that_collects_is_named_once(tmp_path: Path) -> None:
    # few steps: collections that take longer from some step on, beside other programs, would be a slowdown
    report = fit(tmp_path, KeepsObjects(LOADER, step_s=0.0, objects=100_000), CollectsAfterEachStep(), steps=55)
    assert [each.cause for each in report.findings][:1] == ["garbage_collection"]
    assert "callback" not in [each.cause for each in report.findings]
    evidence = report.findings[0].evidence
    assert evidence["generation_2_per_step"] == 1.0
    assert re.fullmatch(r"\d+ % .*on_train_batch_end \(pause_parts.py:\d+\)", str(evidence["where"]))
    assert sum(report.phases.values()) == pytest.approx(report.wall_s)


@pytest.mark.matrix
def test_a_function_that_is_compiled_again_and_again_is_named(tmp_path: Path) -> None:
    report = fit(tmp_path, Compiles(LOADER, step_s=0.0, size=lambda step: 8 + step))
    finding = report.findings[0]
    assert finding.cause == "recompilation"
    assert finding.evidence["compilations"] == 20
    assert str(finding.evidence["function"]).startswith("scaled_sum (")
    assert "drop_last=True" in finding.advice


def test_without_torchs_callbacks_training_goes_on_and_a_note_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._dynamo.callback, "callback_handler", torch._dynamo.callback.CompilationCallbackHandler)
    monkeypatch.delattr(torch._dynamo.callback.CompilationCallbackHandler, "remove_end_callback")
    report = fit(tmp_path, Model(LOADER, step_s=0.0))
    assert report.steps == 25
    (note,) = (each for each in report.notes if "torch.compile" in each)
    assert "could not be detected" in note
    assert "remove_end_callback" in note
