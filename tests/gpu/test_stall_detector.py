"""StallDetector in a Trainer on a real GPU, whose kernels are of a known length."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt import StallDetector, StallReport
from lightning_gpuopt.timeline.activity import ActivitySpan
from lightning_gpuopt.timeline.kernel_trace import ProfilerLook
from tests.gpu.kernels import milliseconds
from tests.helpers import tiny_trainer

pytestmark = pytest.mark.gpu
STEPS, WARMUP_STEPS = 60, 10


class Samples(Dataset[torch.Tensor]):
    def __init__(self, length: int, seconds: float) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return torch.ones(8)


class Model(LightningModule):
    """A step of one kernel, or of what a subclass puts into ``work``."""

    def __init__(self, kernel: Callable[[float], None], ms: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.kernel, self.ms = kernel, ms

    def work(self, loss: torch.Tensor) -> None:
        self.kernel(self.ms)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).square().mean()
        self.work(loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class ManyTinyKernels(Model):
    """``ms`` of the host's time."""

    def __init__(self, ms: float) -> None:
        super().__init__(lambda ms: None, ms)
        self.small = [torch.zeros(8, device="cuda")]
        tiny(self.small[0], 1000)
        begin_s = time.perf_counter()
        tiny(self.small[0], 1000)
        self.count = round(ms / 1e3 / ((time.perf_counter() - begin_s) / 1000))

    def work(self, loss: torch.Tensor) -> None:
        tiny(self.small[0], self.count)


class ReadsItsLoss(ManyTinyKernels):
    """Waits for a kernel of 15 ms, and then has ``ms`` to issue, which that would hide."""

    def __init__(self, kernel: Callable[[float], None], ms: float) -> None:
        super().__init__(ms)
        self.kernel = kernel

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).square().mean()
        self.kernel(15)
        loss.item()  # the injected wait
        self.work(loss)
        return loss


class Bar(Callback):
    """Reads the loss after every step, as a progress bar does."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["loss"].item()


class NoSynchronize(Callback):
    """CUDA refuses to synchronize in all steps but the first."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARMUP_STEPS + 15:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_end(self, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    on_exception = on_train_end


class Wall(Callback):
    """Wall time of the steps after the warm-up, between two moments at which the GPU has nothing left to do."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx < WARMUP_STEPS:
            self.on_train_end()

    def on_train_end(self, *args: Any) -> None:
        torch.cuda.synchronize()
        self.at_s.append(time.perf_counter())

    def idle_s(self, gpu_ms: float) -> float:
        """What the GPU's own work leaves of it."""
        return self.at_s[-1] - self.at_s[-2] - gpu_ms / 1e3 * (STEPS - WARMUP_STEPS)


@pytest.fixture
def kernel() -> Callable[[float], None]:
    return milliseconds()


def tiny(tensor: torch.Tensor, count: int) -> None:
    """Kernels that are far shorter than their launch."""
    for _ in range(count):
        tensor.add_(1.0)


def fit(
    folder: Path, model: LightningModule, *callbacks: Callback, sample_s: float = 0.0, steps: int = STEPS
) -> StallReport:
    detector = StallDetector(on_stall="ignore", window_size=20, warmup_steps=WARMUP_STEPS, report_dir=folder)
    trainer = tiny_trainer(folder, accelerator="gpu", max_steps=steps, callbacks=[*callbacks, detector])
    trainer.fit(model, DataLoader(Samples(steps, sample_s), batch_size=1, pin_memory=True))
    return detector.report


def causes(report: StallReport) -> list[str]:
    return [finding.cause for finding in report.findings]


def test_a_loader_that_the_gpu_hides_costs_nothing(kernel: Callable[[float], None], tmp_path: Path) -> None:
    report = fit(tmp_path, Model(kernel, 20), sample_s=0.01)
    assert (report.verdict, report.findings) == ("compute_bound", [])
    assert report.gpu_idle_s is not None
    assert report.gpu_idle_s < 1.5e-3 * (STEPS - WARMUP_STEPS)


def test_a_slow_loader(kernel: Callable[[float], None], tmp_path: Path) -> None:
    wall = Wall()
    report = fit(tmp_path, Model(kernel, 10), wall, sample_s=0.03)
    assert causes(report) == ["main_process_loading"]
    assert report.gpu_idle_s == pytest.approx(wall.idle_s(gpu_ms=10), rel=0.05, abs=1e-3 * (STEPS - WARMUP_STEPS))
    assert report.findings[0].share == pytest.approx(20 / 30, abs=0.05)


def test_a_progress_bar_exposes_what_comes_after_it(kernel: Callable[[float], None], tmp_path: Path) -> None:
    report = fit(tmp_path, Model(kernel, 20), Bar(), sample_s=0.015)
    assert causes(report) == ["main_process_loading"]
    assert report.findings[0].evidence["exposed_by"] == "Bar.on_train_batch_end"
    assert report.findings[0].share == pytest.approx(15 / 35, abs=0.07)


def test_a_progress_bar_alone_is_no_finding(kernel: Callable[[float], None], tmp_path: Path) -> None:
    assert causes(fit(tmp_path, Model(kernel, 30), Bar())) == []


def test_a_line_that_waits_for_the_gpu_is_named(kernel: Callable[[float], None], tmp_path: Path) -> None:
    # 15 ms on the GPU, 5 ms of launches: long enough for NVML's readings, of which a look needs 5 s
    report = fit(tmp_path, ReadsItsLoss(kernel, 5.0), steps=450)
    assert report.verdict == "gpu_sync"
    lines, first = inspect.getsourcelines(ReadsItsLoss.training_step)
    line = first + next(number for number, text in enumerate(lines) if "the injected wait" in text)
    assert report.findings[0].evidence["where"].endswith(f"training_step ({Path(__file__).name}:{line})")
    assert torch.cuda.get_sync_debug_mode() == 0


def test_a_host_that_issues_too_slowly(tmp_path: Path) -> None:
    report = fit(tmp_path, ManyTinyKernels(10.0), steps=900)
    assert report.verdict == "launch_bound"
    assert any(note.startswith("torch.profiler recorded") for note in report.notes)
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def test_the_profilers_records_of_tiny_kernels() -> None:
    model = ManyTinyKernels(10.0).cuda()
    batch = torch.ones(1, 8, device="cuda")
    look, spans = ProfilerLook(), []
    torch.cuda.synchronize()
    look.begin()
    while True:
        begin_s = time.perf_counter()
        model.training_step(batch, 0)
        issued_s = time.perf_counter()
        torch.cuda.synchronize()
        spans.append(ActivitySpan(begin_s, time.perf_counter(), begin_s, issued_s))
        if look.step_done():
            break
    seen = look.read(spans)
    assert seen.steps == 3
    assert seen.calls >= 0.9 * model.count
    assert 0 < seen.busy_s < 0.6 * (seen.busy_s + seen.idle_s)
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def test_nothing_synchronizes_after_the_looks(kernel: Callable[[float], None], tmp_path: Path) -> None:
    report = fit(tmp_path, Model(kernel, 5), NoSynchronize(), steps=120)
    assert report.steps == 120
    assert report.gpu_idle_s is not None
