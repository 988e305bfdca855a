"""StallDetector's hints for settings, from real Trainers on a simulated GPU of compute capability 9.0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_gpuopt import StallDetector, StallReport
from lightning_gpuopt.detector import run_settings
from lightning_gpuopt.detector.run_settings import RunSettingsWatch
from lightning_gpuopt.diagnosis.record import Hint
from tests.callbacks import gpu_fit
from tests.callbacks.conftest import nvml  # noqa: F401
from tests.callbacks.gpu_fit import follow
from tests.helpers import TinyModel, tiny_trainer
from tests.simulators.gpu import SimulatedGpu, SimulatedModule, Step, Work, simulated_gpu
from tests.simulators.nvml import Gpu, Simulator
from tests.simulators.simulated_time import SimulatedTime

BUSY = Step(Work(0.01, kernels=4, host_s=0.002), Work(0.02, kernels=4, host_s=0.002))
MANY_KERNELS = Step(Work(0.004, kernels=20, host_s=0.016), Work(0.004, kernels=20, host_s=0.016))
GIB = 2**30


@pytest.fixture
def gpu(simulated_time: SimulatedTime) -> Iterator[SimulatedGpu]:
    with simulated_gpu(simulated_time, copy_s=0.0005) as device:
        yield device


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Torch's global settings as they were."""
    benchmark, precision = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    yield
    torch.backends.cudnn.benchmark = benchmark
    torch.set_float32_matmul_precision(precision)


class Convolutional(SimulatedModule):
    """A convolution, and one product of matrices."""

    def __init__(self, gpu: SimulatedGpu, step: Step = BUSY, *, sizes: tuple[int, ...] = (8,)) -> None:
        super().__init__(gpu, step, batches=1000)
        self.net: nn.Module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(4, 1)
        self.sizes = sizes

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.step.forward.issue(self.gpu)
        loss: torch.Tensor = self.head(self.net(batch).flatten(1)).pow(2).mean()
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Pictures(self.sizes), batch_size=2)


class Pictures(Dataset[torch.Tensor]):
    """Batches of two of one size; the sizes take turns."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> torch.Tensor:
        size = self.sizes[index // 2 % len(self.sizes)]
        return torch.ones(3, size, size)


def fit(gpu: SimulatedGpu, folder: Path, model: SimulatedModule, **trainer: Any) -> StallReport:
    detector = StallDetector(on_stall="ignore", window_size=20, report_dir=folder, print_report=False)
    return gpu_fit.fit(gpu, folder, model, detector=detector, **trainer)


def hints(report: StallReport) -> dict[str, Hint]:
    return {hint.name: hint for hint in report.hints}


def test_a_script_with_the_defaults(gpu: SimulatedGpu, tmp_path: Path) -> None:
    torch.set_float32_matmul_precision("highest")
    report = fit(gpu, tmp_path, Convolutional(gpu), benchmark=False)
    assert report.verdict == "compute_bound"
    found = hints(report)
    assert list(found) == ["precision", "cudnn_benchmark"]
    assert found["cudnn_benchmark"].evidence == {"convolutions": 1, "batches_seen": 6}  # 1, 2, 4 ... 32
    assert found["precision"].evidence["work_percent"] > 90
    assert StallReport.from_json((tmp_path / "report.json").read_text()).hints == report.hints


def test_a_script_that_has_set_all_of_it(gpu: SimulatedGpu, tmp_path: Path) -> None:
    report = fit(gpu, tmp_path, Convolutional(gpu), benchmark=True, precision="bf16-true")
    assert (report.verdict, report.hints) == ("compute_bound", [])


def test_a_script_that_casts_by_itself(gpu: SimulatedGpu, tmp_path: Path) -> None:
    class Casts(Convolutional):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):  # the simulated device's numbers are the CPU's
                return super().training_step(batch, batch_idx).float()

    assert "precision" not in hints(fit(gpu, tmp_path, Casts(gpu)))


def test_a_model_of_matrix_products(gpu: SimulatedGpu, tmp_path: Path) -> None:
    torch.set_float32_matmul_precision("highest")
    model = SimulatedModule(gpu, BUSY, batches=1000)
    assert list(hints(fit(gpu, tmp_path, model))) == ["precision", "float32_matmul_precision"]
    torch.set_float32_matmul_precision("high")
    assert list(hints(fit(gpu, tmp_path, SimulatedModule(gpu, BUSY, batches=1000)))) == ["precision"]


def test_batches_of_several_shapes_are_no_case_for_the_benchmark(gpu: SimulatedGpu, tmp_path: Path) -> None:
    report = fit(gpu, tmp_path, Convolutional(gpu, sizes=(8, 9, 10)), benchmark=False)
    assert "cudnn_benchmark" not in hints(report)


def test_a_run_that_waits_for_data_is_told_of_its_data_only(gpu: SimulatedGpu, tmp_path: Path) -> None:
    import time

    class Slow(Pictures):
        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.05)  # simulated time
            return super().__getitem__(index)

    model = Convolutional(gpu)
    model.train_dataloader = lambda: DataLoader(Slow((8,)), batch_size=2)  # type: ignore[method-assign]
    report = fit(gpu, tmp_path, model, benchmark=False)
    assert (report.verdict, report.hints) == ("main_process_loading", [])


def test_data_parallel(gpu: SimulatedGpu, tmp_path: Path) -> None:
    class Replicated(nn.DataParallel):  # type: ignore[type-arg]
        """As on two GPUs, without their copies."""

        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module, self.device_ids = module, [0, 1]

        def forward(self, batch: torch.Tensor) -> Any:
            return self.module(batch)

    model = Convolutional(gpu)
    model.net = Replicated(model.net)
    found = hints(fit(gpu, tmp_path, model))
    assert found["data_parallel"].setting == 'Trainer(devices=2, strategy="ddp")'
    assert found["data_parallel"].text.startswith("Sequential is in nn.DataParallel on 2 GPUs")


def test_memory_for_a_larger_batch_where_steps_are_too_short(
    gpu: SimulatedGpu,
    nvml: Simulator,  # noqa: F811
    simulated_time: SimulatedTime,
    tmp_path: Path,
) -> None:
    nvml.machine(Gpu())
    follow(gpu, nvml, simulated_time)
    gpu.memory["allocated_bytes.all.peak"] = 17 * GIB  # 1 GiB stays allocated after a step; of 80 GiB 2 are reserved
    report = fit(gpu, tmp_path, Convolutional(gpu, MANY_KERNELS), precision="bf16-true", max_steps=165)
    assert report.verdict == "launch_bound"
    hint = hints(report)["batch_size"]
    assert (hint.setting, hint.evidence["batch_factor"]) == ("batch_size=8 at most", 4.4)  # (72 - 1) / (17 - 1)


def test_an_allocator_of_somebody_s_own_costs_the_hints_of_memory_only(
    gpu: SimulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: Any = None) -> Any:
        raise NotImplementedError

    for name in ("memory_stats", "mem_get_info", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    assert list(hints(fit(gpu, tmp_path, Convolutional(gpu), benchmark=False))) == ["precision", "cudnn_benchmark"]


def test_only_a_few_batches_and_losses_are_looked_at(
    gpu: SimulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: dict[str, int] = {"batches": 0, "losses": 0}

    def counting(name: str, function: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            looked[name] += 1
            return function(*arguments)

        return counted

    monkeypatch.setattr(run_settings, "_shapes_in", counting("batches", lambda batch: iter(())))
    monkeypatch.setattr(RunSettingsWatch, "_look_at", counting("losses", RunSettingsWatch._look_at))
    fit(gpu, tmp_path, Convolutional(gpu))
    assert looked == {"batches": 6, "losses": 4}


def test_on_the_cpu_there_are_none(tmp_path: Path) -> None:
    detector = StallDetector(on_stall="ignore", warmup_steps=1, print_report=False)
    tiny_trainer(tmp_path, callbacks=[detector], max_steps=20).fit(TinyModel())
    assert detector.report.hints == []


def test_shapes_of_nested_batches() -> None:
    image, label = torch.ones(2, 3), torch.ones(2)
    batch = {"image": image, "more": [(label, "name")], "count": 3}
    assert list(run_settings._shapes_in(batch)) == [(2, 3), (2,)]
    assert list(run_settings._shapes_in(TensorDataset(image))) == []
