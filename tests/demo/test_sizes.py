"""How large the demo's training is on CUDA, from figures of a loader and of a GPU that are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gpuopt.cli import main
from lightning_gpuopt.demo import demonstration, sizes
from lightning_gpuopt.demo.data import Recipe, make
from lightning_gpuopt.demo.sizes import Sizes, sized, sizes_for
from lightning_gpuopt.demo.training import DemoSettings, LongEnough, PhotographNet
from tests.demo.test_demo import demo, train
from tests.demo.test_steps import settings
from tests.simulators.gpu import simulated_gpu


def sgd(module: Any) -> torch.optim.Optimizer:
    """AdamW asks torch for a device that is not simulated."""
    return torch.optim.SGD(module.parameters(), lr=0.01)


H100 = {1: 8e-6, 2: 20e-6, 3: 45e-6, 4: 80e-6, 6: 180e-6, 8: 320e-6}
"""Seconds for an image, by width: the first one is of the launches."""


@pytest.mark.parametrize(
    ("loader_s", "expected"),
    [
        (30e-6, Sizes(6, 128, 128 * 180e-6, 128 * 30e-6)),  # 16 CPUs: 3 x 30 us
        (1e-6, Sizes(4, 256, 256 * 80e-6, 256 * 1e-6)),  # the loader is no matter: 20 ms for 256 images
        (100e-6, Sizes(8, 64, 64 * 320e-6, 64 * 100e-6)),
        (1e-3, Sizes(8, 64, 64 * 320e-6, 64 * 1e-3)),  # no width is enough
    ],
)
def test_the_step_takes_three_times_the_loader_s_best_and_ten_times_its_launches(
    loader_s: float, expected: Sizes
) -> None:
    assert sizes_for(loader_s, H100) == expected


def test_a_batch_that_was_asked_for_is_kept() -> None:
    assert sizes_for(30e-6, H100, batch_size=32) == Sizes(8, 32, 32 * 320e-6, 32 * 30e-6)
    assert sizes_for(30e-6, H100, batch_size=512).width == 6


def test_no_wider_network_is_measured_than_is_needed() -> None:
    asked: list[int] = []

    def image_s(width: int) -> float:
        asked.append(width)
        return H100[width]

    found = sized(settings(), None, lambda now: 20e-6, image_s)
    assert found is not None
    assert (asked, found[1].width) == ([1, 2, 3, 4], 4)
    now = found[0]
    assert (now.width, now.batch_size, now.min_s) == (4, 256, 10.0)
    assert sized(settings(), None, lambda now: None, image_s) is None


@pytest.mark.parametrize(("fits", "width"), [(2, 2), (0, None)])
def test_where_memory_ends_the_widest_that_fits_is_taken(fits: int, width: int | None) -> None:
    def image_s(width: int) -> float:
        if width > fits:
            raise torch.cuda.OutOfMemoryError
        return 1e-9

    found = sized(settings(), None, lambda now: 20e-6, image_s)
    assert (found and found[1].width) == width


def test_the_loader_is_measured_on_all_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, Recipe(128))
    seconds = iter(range(10**6))
    measure = sizes.measure_images
    monkeypatch.setattr(sizes, "measure_images", lambda *given: measure(*given, clock=lambda: float(next(seconds))))
    monkeypatch.setattr(sizes, "usable_cpus", lambda: 4.0)
    monkeypatch.setattr("lightning_gpuopt.images.cost.MAX_IMAGES", 1)
    now = settings(data_dir=tmp_path)
    assert sizes.loader_at_its_best(now) is None  # its half a second is over: each look at the clock is one
    monkeypatch.setattr(
        sizes, "measure_images", lambda *given: measure(*given, clock=lambda: next(seconds) * 0.125, budget_s=9.0)
    )
    assert sizes.loader_at_its_best(now) == (0.125 + 0.125) / 4
    assert sizes.loader_at_its_best(settings(data_dir=tmp_path / "none")) is None


def test_the_channels_are_multiplied() -> None:
    images = torch.zeros(2, 3, 128, 128)
    for width in (1, 3):
        network = PhotographNet(8, width=width).network
        assert [each.out_channels for each in network.modules() if isinstance(each, torch.nn.Conv2d)] == [
            channels * width for channels in (16, 32, 64, 128)
        ]
        assert network(images).shape == (2, 8)


def test_validation_counts_what_the_network_gets_right(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = PhotographNet(4).eval()
    monkeypatch.setattr(module, "log", lambda *args, **kwargs: None)  # no Trainer runs it
    images = torch.rand(8, 3, 64, 64)
    guessed = module.network(images).argmax(1)
    wrong = (guessed[:2] + 1) % 4
    module.validation_step((images, torch.cat([wrong, guessed[2:]])), 0)
    assert module.accuracy.compute() == 0.75


def test_epochs_are_added_until_the_run_is_long_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 4.0, 8.0, 12.0])

    def of_the_clock(least_s: float) -> LongEnough:
        return LongEnough(least_s, lambda: next(seconds))

    monkeypatch.setattr("lightning_gpuopt.demo.training.LongEnough", of_the_clock)
    outcome = train(tmp_path, images=128, batch_size=60, min_s=10.0)
    assert (outcome.steps, outcome.samples) == (3 * 2, 3 * 120)
    assert outcome.accuracy_percent >= 0.0
    lines = (tmp_path / "run/metrics.csv").read_text()
    assert lines.count("\n") >= 2


@pytest.mark.parametrize(("accelerator", "given"), [("auto", ["--batch-size", "64"]), ("auto", []), ("cpu", [])])
def test_only_a_run_on_cuda_is_sized(
    accelerator: str, given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[DemoSettings] = []

    def on_cuda(now: DemoSettings, batch_size: int | None, *measure: Any) -> tuple[DemoSettings, Sizes]:
        return sized(now, batch_size, lambda now: 30e-6, H100.__getitem__) or pytest.fail("no sizes")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sizes, "sized", on_cuda)
    monkeypatch.setattr(demonstration, "demonstrate", lambda now, **more: shown.append(now))
    arguments = [each for each in demo(tmp_path) if each not in ("--batch-size", "8")]
    assert main([*arguments, "--accelerator", accelerator, *given]) == 0
    expected = {("auto", 0): (6, 128, 10.0), ("auto", 2): (8, 64, 10.0), ("cpu", 0): (1, 32, 0.0)}
    assert (shown[0].width, shown[0].batch_size, shown[0].min_s) == expected[accelerator, len(given)]


def test_a_step_is_measured_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_STEPS", 2)
    monkeypatch.setattr(sizes, "BATCH_SIZES", (8,))
    monkeypatch.setattr(PhotographNet, "configure_optimizers", sgd)
    with simulated_gpu():
        assert 0.0 < sizes.image_on_cuda(2) < 1.0
