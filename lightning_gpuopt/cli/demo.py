"""``lightning-gpuopt demo``: a real training run on real photographs that ends with where its time went."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_number_type
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from lightning_gpuopt.cli import _demo_data
from lightning_gpuopt.cli._parser import UsageError
from lightning_gpuopt.telemetry.keys import METRICS

if TYPE_CHECKING:
    from lightning_gpuopt.cli._demo_training import Outcome

SUMMARY = "train a small convnet on real photographs and show where the time goes"

SMALLEST_NUMBER_OF_IMAGES = _demo_data.VALIDATION_PART * len(_demo_data.PHOTOGRAPHS)
"""So many that each class is in the validation images."""

EnoughImages = restricted_number_type(f"int>={SMALLEST_NUMBER_OF_IMAGES}", int, (">=", SMALLEST_NUMBER_OF_IMAGES))

Seed = restricted_number_type("0..2^32-1", int, [(">=", 0), ("<", 2**32)])


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``demo``."""
    add = parser.add_argument
    add("--data-dir", type=str, default="./demo-data", help="where the images are made, once")
    add("--output-dir", type=str, default="./demo-run", help="where the report and the metrics go")
    add("--images", type=EnoughImages, default=4000, help="number of JPEGs")
    add("--epochs", type=PositiveInt, default=3, help="passes over the training images")
    add("--max-steps", type=NonNegativeInt, default=0, help="stop after so many steps; 0: at the end of the epochs")
    add("--batch-size", type=PositiveInt, default=32, help="images a step")
    add("--num-workers", type=NonNegativeInt, default=0, help="worker processes of each DataLoader")
    add("--accelerator", choices=["auto", "cpu", "gpu"], default="auto", help="what to train on")
    add("--seed", type=Seed, default=0, help="of the images, the weights and the order")


def run(options: Namespace) -> int:
    """Make the images where they are not there yet, train, and print what the callbacks found.

    Returns:
        The exit code 0.

    Raises:
        ImportError: the extra ``[demo]`` is not installed.
        UsageError: a folder cannot be used, or there is no GPU though one was asked for.
    """
    started = time.perf_counter()
    _demo_data.require_packages()
    data_dir, output_dir = Path(options.data_dir).resolve(), Path(options.output_dir).resolve()
    if options.accelerator == "gpu":
        _require_gpu()
    _make_room(data_dir.parent, "--data-dir")
    _make_room(output_dir, "--output-dir")
    _prepare_images(data_dir, _demo_data.Recipe(options.images, options.seed))

    from lightning_gpuopt.cli._demo_training import Settings, train

    settings = Settings(
        data_dir=data_dir,
        output_dir=output_dir,
        epochs=options.epochs,
        max_steps=options.max_steps or None,
        batch_size=options.batch_size,
        num_workers=options.num_workers,
        accelerator=options.accelerator,
        seed=options.seed,
        progress_bar=sys.stdout.isatty(),
    )
    outcome = train(settings)
    _print_outcome(outcome, output_dir, time.perf_counter() - started)
    return 0


def _require_gpu() -> None:
    import torch

    if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        raise UsageError("--accelerator: expected a GPU that PyTorch can use, found none; leave it out to train on CPU")


def _make_room(folder: Path, argument: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{argument}: expected a place to write to, got {folder}: {error.strerror}; name another"
        ) from error


def _prepare_images(folder: Path, recipe: _demo_data.Recipe) -> None:
    try:
        whole = _demo_data.is_whole(folder, recipe)
    except _demo_data.ForeignFolderError as error:
        raise UsageError(f"--data-dir: expected a new or empty folder, or one of the demo's; {error}") from error
    width, height = _demo_data.IMAGE_SIZE
    images = f"{recipe.images} JPEGs of {width}x{height} pixels from {len(_demo_data.PHOTOGRAPHS)} photographs"
    if whole:
        print(f"{images} are in {_short(folder)}")
        return
    print(f"Making {images} in {_short(folder)}", flush=True)
    with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=recipe.images)
        _demo_data.make(folder, recipe, on_image=lambda: progress.advance(task))


def _print_outcome(outcome: Outcome, output_dir: Path, seconds: float) -> None:
    chance_percent = 100 / len(_demo_data.PHOTOGRAPHS)
    print(f"\n{outcome.report}\n")
    print(f"Validation accuracy {outcome.accuracy_percent:.1f} % (chance: {chance_percent:.1f} %)")
    units = {metric.key: metric.unit for metric in METRICS}
    print("GPU figures:" if outcome.gpu else f"GPU figures: none, the run was on {outcome.device}")
    for key, value in outcome.gpu.items():
        print(f"  {key:<28}{value:9.1f} {units.get(key.rpartition('/')[2], '')}")
    print(
        f"Report: {_short(output_dir / 'report.html')} and report.json, metrics: {_short(output_dir / 'metrics.csv')}"
    )
    print(f"{outcome.steps} steps on {outcome.device}, {seconds:.0f} s in all")


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
