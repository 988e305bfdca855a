"""When risks are looked for, and what becomes of what grows in the training process."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt import StallDetector
from lightning_gpuopt.detector import memory_risks
from lightning_gpuopt.detector.memory_risks import MemoryRisks
from lightning_gpuopt.measurements.flight import MemoryReading
from lightning_gpuopt.measurements.risks import RiskInputs
from lightning_gpuopt.recorder.memory_series import new_series
from tests.helpers import FEATURES, TinyModel, tiny_trainer

MIB = 1 << 20


class Run:
    """A fit as the recorder and the watches show it; its training process keeps a list."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.rank = new_series()
        self.workers: dict[int, Any] = {}
        self.leaks: list[str] = []
        self.looks: list[RiskInputs] = []
        self.sent: list[int] = []
        self.kept: list[bytes] = []
        self.memory = self
        self.facts = SimpleNamespace(num_workers=0, prefetch_factor=None)
        self.note_leak = self.leaks.append
        self.look = self.looks.append
        self.readings: Callable[[], dict[str, Any]] = dict

    def send(self) -> None:
        self.sent.append(len(self.looks))

    def holds(self, mib: int) -> None:
        self.rank.add(MemoryReading(self.now_s, rss=mib * MIB))


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def risks(run: Run, monkeypatch: pytest.MonkeyPatch) -> MemoryRisks:
    monkeypatch.setattr(MemoryRisks, "_ahead", lambda self, workers: {})
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    seen: Any = run
    return MemoryRisks(trainer, seen, seen, seen, lambda: {"Run": run}, lambda: run.now_s)


def test_at_first_risks_are_looked_for_more_often(run: Run, risks: MemoryRisks) -> None:
    found = []
    for second in range(160):
        run.now_s = float(second)
        before = len(run.looks)
        risks.look()
        found += [second] * (len(run.looks) - before)
    assert found == [*range(0, 122, 2), 130, 140, 150]


def test_what_grows_in_the_training_process_is_noted_for_its_post_mortem(run: Run, risks: MemoryRisks) -> None:
    run.holds(500)
    risks.look()
    run.kept += [bytes(MIB) for _ in range(70)]
    run.holds(570)
    run.now_s = 2.0
    risks.look()
    leak = "Run.kept (list) grew from 0 to 70 entries and holds about 70 MiB"
    assert run.leaks == ["", leak]
    assert [each.grows for each in run.looks] == ["", leak]


def test_the_last_look_is_sent(run: Run, risks: MemoryRisks) -> None:
    risks.look()
    assert run.sent == []
    risks.look_now()
    assert run.sent == [2]


def test_it_is_sent_though_nothing_could_be_looked_for(
    run: Run, risks: MemoryRisks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_risks, "local_ranks_of", lambda trainer: 1 // 0)
    risks.look_now()
    assert (run.looks, run.sent) == ([], [0])


class OpensFiles(Dataset[torch.Tensor]):
    """Opens a file for each sample, and keeps it."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        sleep(0.01)
        self.kept.append(os.open(os.devnull, os.O_RDONLY))
        return torch.ones(FEATURES)

    def close(self) -> None:
        while self.kept:
            os.close(self.kept.pop())


@pytest.mark.timed
@pytest.mark.parametrize(("workers", "process"), [(0, "the training process"), (1, "worker 0")])
def test_files_that_are_used_up_within_seconds_are_a_risk(workers: int, process: str, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    detector, data = StallDetector(report_dir=tmp_path, print_report=False), OpensFiles()
    trainer = tiny_trainer(tmp_path, max_steps=-1, max_epochs=1, callbacks=[detector])
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 500, before[1]))
    try:
        with pytest.raises((OSError, EOFError, RuntimeError)):
            trainer.fit(Model(), DataLoader(data, 4, num_workers=workers))
    finally:
        data.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    (risk,) = detector.report.risks
    assert (risk.risk, risk.evidence["process"]) == ("open_files", process)
    assert "the limit is reached in" in risk.text


class Model(TinyModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).pow(2).mean()
