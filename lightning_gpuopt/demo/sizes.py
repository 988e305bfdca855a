"""How large the demo's training is on CUDA, where the network as it is would take less than its kernel launches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch.nn.functional import cross_entropy

from lightning_gpuopt.demo.data import PHOTOGRAPHS
from lightning_gpuopt.demo.training import CROP_SIZE, DemoSettings, PhotographNet
from lightning_gpuopt.images.cost import measure_images
from lightning_gpuopt.telemetry.host import usable_cpus

RATIO: Final = 3.0  # a step takes so many times what the loader needs for its batch at its best
MIN_RUN_S: Final = 10.0  # each run is at least so long: NVML's utilization is a mean over up to a second
WIDTHS: Final = (1, 2, 3, 4, 6, 8, 12, 16)
BATCH_SIZES: Final = (32, 64, 128, 256)
MIN_STEP_S: Final = 20e-3  # about ten times what the launches of a step's kernels take
_STEPS: Final = 5


@dataclass(frozen=True)
class Sizes:
    width: int  # the network's channels, in multiples of those on the CPU
    batch_size: int  # images a step
    step_s: float  # that the GPU takes for it
    loader_s: float  # for its batch, at the loader's best


def sizes_for(loader_s: float, image_s: Mapping[int, float], batch_size: int | None = None) -> Sizes:
    """The smallest network and batch (None: chosen) whose step takes long enough; else the largest of both.

    ``loader_s`` is for an image at the loader's best, ``image_s`` a step's share for one of a large batch, by width.
    """
    target_s = least_image_s(loader_s, batch_size)
    width = next((each for each in sorted(image_s) if image_s[each] >= target_s), max(image_s))
    fitting = (each for each in BATCH_SIZES if each * image_s[width] >= MIN_STEP_S)
    batch_size = batch_size or next(fitting, BATCH_SIZES[-1])
    return Sizes(width, batch_size, batch_size * image_s[width], batch_size * loader_s)


def least_image_s(loader_s: float, batch_size: int | None = None) -> float:
    """Seconds that a step has to take for an image; see `sizes_for`."""
    return max(RATIO * loader_s, MIN_STEP_S / (batch_size or BATCH_SIZES[-1]))


def sized(
    settings: DemoSettings,
    batch_size: int | None,
    loader_s: Callable[[DemoSettings], float | None],
    image_s: Callable[[int], float],
) -> tuple[DemoSettings, Sizes] | None:
    """Settings of a run whose step is long enough on this machine; None if a measurement failed.

    ``loader_s`` measures the loader (`loader_at_its_best`), ``image_s`` a width (`image_on_cuda`).
    """
    best_s = loader_s(settings)
    if best_s is None:
        return None

    def measured() -> Iterator[tuple[int, float]]:
        for width in WIDTHS:
            try:
                found_s = image_s(width)
            except torch.cuda.OutOfMemoryError:  # others may use the GPU: what fits is taken
                return
            yield width, found_s
            if found_s >= least_image_s(best_s, batch_size):
                return

    by_width = dict(measured())
    if not by_width:
        return None
    sizes = sizes_for(best_s, by_width, batch_size)
    return replace(settings, width=sizes.width, batch_size=sizes.batch_size, min_s=MIN_RUN_S), sizes


def loader_at_its_best(settings: DemoSettings) -> float | None:
    """Seconds for an image on all CPUs by the fast decoder, from an LMDB of small images; None: not measured."""
    files = sorted((settings.data_dir / "train").glob("*/*.jpg"))
    costs = measure_images(lambda index: files[index].read_bytes(), range(len(files)), CROP_SIZE)
    return None if costs is None else (costs.read_s + costs.small_decode_s) / max(usable_cpus(), 1.0)


def image_on_cuda(width: int) -> float:
    """Seconds that a step of the largest batch takes on the GPU, for each image."""
    batch_size, device = BATCH_SIZES[-1], torch.device("cuda")
    model = PhotographNet(len(PHOTOGRAPHS), width=width).to(device)
    images = torch.zeros(batch_size, 3, CROP_SIZE, CROP_SIZE, device=device)
    labels = torch.zeros(batch_size, dtype=torch.long, device=device)
    optimizer = model.configure_optimizers()
    began_s = math.nan
    for step in range(2 * _STEPS):
        if step == _STEPS:  # the first ones choose their kernels
            torch.cuda.synchronize()
            began_s = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(model.network(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began_s) / _STEPS / batch_size
