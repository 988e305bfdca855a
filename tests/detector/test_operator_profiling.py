"""The operators of a CPU's steps, recorded by torch's own profiler in a real fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpuopt import StallDetector, StallReport
from lightning_gpuopt.detector import looks, operator_profiling
from lightning_gpuopt.detector.kernel_profiling import Profile


class Net(LightningModule):
    """Takes about a millisecond a step.

    Args:
        last: batch after which training is asked to stop; None: the Trainer's own end.
    """

    def __init__(self, last: int | None = None) -> None:
        super().__init__()
        self.last = last
        self.layers = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trainer.should_stop = batch_idx == self.last
        loss: torch.Tensor = self.layers(batch[0]).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(64 * 64, 256)), batch_size=64)


def fit(folder: Path, profile: Profile, model: Net | None = None, **trainer: Any) -> StallReport:
    detector = StallDetector(
        threshold=0.99, on_stall="ignore", warmup_steps=5, window_size=10, report_dir=folder, profile=profile
    )
    arguments: dict[str, Any] = {
        "max_steps": 30,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    Trainer(**arguments | trainer, callbacks=[detector]).fit(model or Net())
    return detector.report


def test_products_are_the_linear_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "has_compiled", lambda: False)  # other tests of this process may have
    report = fit(tmp_path, "on")
    assert sum(report.kernel_kinds.values()) == pytest.approx(1.0)
    assert report.kernel_kinds["matmul"] > 0.1
    assert report.kernel_kinds["optimizer"] > 0
    assert report.kernel_kinds["matmul_tensor_core"] == 0.0
    products = [each for each in report.kernels if each.kind == "matmul"]
    assert products[0].name in ("aten::addmm", "aten::mm")
    assert products[0].module in ("layers.0", "layers.2")
    assert products[0].calls_per_step == {"aten::addmm": 2.0, "aten::mm": 3.0}[products[0].name]
    assert set(report.kernel_summary) == {"ms_per_step", "unassigned_share"}
    assert 0 < report.kernel_summary["unassigned_share"] < 0.9  # the loss, and the optimizer
    assert "Operators of a step, " in str(report)


@pytest.mark.parametrize("profile", ["auto", "off"])
def test_a_run_of_seconds_is_left_alone(tmp_path: Path, profile: Profile) -> None:
    report = fit(tmp_path, profile)
    assert (report.kernels, report.kernel_kinds) == ([], {})
    assert not any("What the steps compute" in note for note in report.notes)


def test_what_it_cost_is_told(tmp_path: Path) -> None:
    report = fit(tmp_path, "on")
    (note,) = [each for each in report.notes if "torch.profiler" in each]
    assert re.fullmatch(r"torch.profiler recorded a step's operators, which took \d+\.\d\d s\.", note)


def test_a_step_of_too_many_operations_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_profiling, "_MAX_NODES", 5)
    report = fit(tmp_path, "on")
    assert report.kernels == []
    assert (
        "The step's operators could not be recorded with torch.profiler: a step has more than 5 operations."
        in report.notes
    )


@pytest.mark.parametrize(("profile", "name"), [("on", "_LONG_STEP_S"), ("auto", "_LONGEST_S")])
def test_nor_a_step_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: Profile, name: str
) -> None:
    monkeypatch.setattr(operator_profiling, "_LEAST_S", 0.0)
    monkeypatch.setattr(operator_profiling, name, 0.0)
    report = fit(tmp_path, profile)
    assert report.kernels == []
    assert any("could not be recorded with torch.profiler: a step takes 0.0 s" in note for note in report.notes)


def test_a_module_that_is_saved_meanwhile_is_whole(tmp_path: Path) -> None:
    class Saves(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            torch.save(self.layers, tmp_path / "layers.pt")

    assert fit(tmp_path, "on", Saves()).kernels


def test_a_longer_one_is_looked_at_in_its_last_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_profiling, "_LEAST_S", 0.0)
    report = fit(tmp_path, "auto")
    assert report.findings == []
    assert report.kernel_kinds["matmul"] > 0.1


def test_without_a_foreseen_end_it_says_how_to_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_profiling, "_LEAST_S", 0.0)
    report = fit(tmp_path, "auto", Net(last=30), max_steps=-1, max_epochs=-1)
    assert (report.findings, report.kernels) == ([], [])
    assert any(note.startswith("What the steps compute was not looked at") for note in report.notes)


def test_a_profiler_of_the_programs_own_is_left_alone(tmp_path: Path) -> None:
    own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    report = fit(tmp_path, "on")
    assert report.kernels == []
    (note,) = [each for each in report.notes if "torch.profiler" in each]
    assert note == (
        "The step's operators could not be recorded with torch.profiler: the program has a torch.profiler of its own."
    )
    del own
