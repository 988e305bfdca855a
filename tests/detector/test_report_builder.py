"""What Lightning itself costs, workers without work, and data in the hyperparameters: said in the report."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from torch.utils.data import DataLoader

from lightning_gpuopt import StallDetector
from lightning_gpuopt.detector import report_builder
from lightning_gpuopt.detector.report_builder import command_line, data_in_hyperparameters, lightning_work
from tests.callbacks.stalls import FAST, STEPS, Model, SleepyData, run
from tests.diagnosis.numbers import times
from tests.helpers import TinyModel, tiny_trainer


def test_the_parts_of_lightnings_own_work() -> None:
    hooks = {"Bar.on_train_batch_end": 0.2, "Bar.on_train_epoch_end": 9.0, "Mine.on_train_batch_end": 0.5}
    run = times(steps=100, callbacks=hooks, broadcast_s=0.05)
    run = replace(run, loops={"training loop": 0.3, "optimization loop": 0.1, "x": 0.0})
    work = lightning_work(run, frozenset({"Bar"}))
    assert list(work.items()) == [
        ("training loop", 0.003),
        ("Bar", 0.002),
        ("optimization loop", 0.001),
        ("signal broadcast", 0.0005),
    ]


def test_a_report_has_lightnings_own_work_of_a_step(tmp_path: Path) -> None:
    model = Model(dataset=SleepyData(length=400))
    report = run(tmp_path, model, TQDMProgressBar(), enable_progress_bar=True)
    assert {"training loop", "optimization loop", "TQDMProgressBar"} <= set(report.lightning_work)
    assert list(report.lightning_work.values()) == sorted(report.lightning_work.values(), reverse=True)
    other = report.phases["other"]
    loops = sum(report.lightning_work[name] for name in ("training loop", "optimization loop"))
    assert 0 < loops * (report.steps - FAST["warmup_steps"]) <= other
    assert "Lightning's own work: " in str(report)
    assert json.loads(report.to_json())["lightning_work"] == report.lightning_work


class WithFrozenPart(Model):
    """12 bytes of parameters are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)


def test_a_report_has_the_bytes_of_its_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = WithFrozenPart()
    trained = sum(4 * each.numel() for each in model.parameters() if each.requires_grad)
    assert run(tmp_path, model, max_steps=2).environment["gradient_bytes"] == str(trained)
    monkeypatch.setattr(report_builder, "is_sharded", lambda strategy: True)  # a rank has a part of the parameters
    assert "gradient_bytes" not in run(tmp_path, WithFrozenPart(), max_steps=2).environment


@pytest.mark.matrix
def test_fewer_batches_than_workers_is_said(tmp_path: Path) -> None:
    few = Model(dataset=SleepyData(length=4), num_workers=3)
    notes = " ".join(run(tmp_path, few).notes)
    assert "An epoch has 2 batches, fewer than the 3 workers of its loader: 1 of them are not needed." in notes
    enough = Model(dataset=SleepyData(length=400), num_workers=3)
    assert "are not needed" not in " ".join(run(tmp_path, enough).notes)


class Keeps(TinyModel):
    """Its hyperparameters hold a dataset."""

    def __init__(self, dataset: Any, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_a_dataset_in_the_hyperparameters_is_said(tmp_path: Path) -> None:
    detector = StallDetector(on_stall="ignore", **FAST)
    data = SleepyData(length=400)
    trainer = tiny_trainer(tmp_path, callbacks=[detector], max_steps=STEPS)
    trainer.fit(Keeps(data), DataLoader(data, batch_size=2))
    (note,) = [each for each in detector.report.notes if "save_hyperparameters" in each]
    assert "keeps dataset (SleepyData)" in note


def test_large_arrays_count_and_small_ones_do_not() -> None:
    class Owner:
        hparams: Any = None

    owner = Owner()
    owner.hparams = {"rate": 0.1, "mean": torch.zeros(3), "table": torch.zeros(3, 2**21), "loader": DataLoader([0])}
    assert data_in_hyperparameters(owner, None) == ("table (Tensor)", "loader (DataLoader)")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/env/bin/python", "train.py", "--lr", "1"], "python train.py --lr 1"),
        (["python", "-m", "a b", "--api-key", "x1", "--lr=1"], "python -m 'a b' --api-key '***' --lr=1"),
        (["python", "a.py", "--wandb.token=x1", "token=x"], "python a.py '--wandb.token=***' 'token=***'"),
        (["python", "a.py", "--max-tokens", "512", "--keypoints=3"], "python a.py --max-tokens 512 --keypoints=3"),
        (["python", "a.py", "--db", "mysql://me:pw@host/x"], "python a.py --db 'mysql://***@host/x'"),
        (["python", "-c", "x" * 300], f"python -c {'x' * 200}..."),
        ([], ""),
    ],
)
def test_the_command_is_shown_without_its_secrets(words: list[str], shown: str) -> None:
    assert command_line(words) == shown


def test_the_environment_has_the_command_and_the_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.orig_argv", ["/env/bin/python3", "train.py"])
    known = run(tmp_path, Model(), max_steps=2).environment
    assert known["command"] == "python3 train.py"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}", known["date"])
