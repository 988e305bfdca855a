"""``lightning-gpuopt demo``: trains on photographs, shows where the time goes, and trains again with the advice."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_number_type
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from lightning_gpuopt.cli._parser import UsageError, writing_to
from lightning_gpuopt.demo import data
from lightning_gpuopt.demo.folders import BEFORE, MARK, RESULTS, from_here

SUMMARY = "train a small convnet on real photographs, show where the time goes, apply the advice and train again"

MIN_IMAGES = data.VALIDATION_PART * len(data.PHOTOGRAPHS)  # so many that each class is in the validation images
EnoughImages = restricted_number_type(f"int>={MIN_IMAGES}", int, (">=", MIN_IMAGES))

Seed = restricted_number_type("0..2^32-1", int, [(">=", 0), ("<", 2**32)])


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--data-dir", type=str, default="./demo-data", help="where the images are created, once")
    add("--output-dir", type=str, default="./demo-run", help="where reports and metrics are saved")
    add("--images", type=EnoughImages, default=4000, help="number of JPEGs")
    add("--epochs", type=PositiveInt, default=3, help="passes over the training images; on CUDA enough for 10 s")
    add("--max-steps", type=NonNegativeInt, default=0, help="stop after this many steps; 0: at the end of the epochs")
    add(
        "--batch-size", type=PositiveInt, default=None, help="images per step (default: 32; on CUDA chosen for the GPU)"
    )
    add("--num-workers", type=NonNegativeInt, default=0, help="worker processes of each DataLoader")
    add("--accelerator", choices=["auto", "cpu", "gpu"], default="auto", help="device to train on")
    add("--no-fix", action="store_true", help="diagnose only: do not apply the advice and train again")
    add("--seed", type=Seed, default=0, help="seed of the images, the weights and the order")


def run(options: Namespace) -> int:
    """Make the images where they are not there yet, train, print what was found, and train again with the advice."""
    started = time.perf_counter()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # none of torch.profiler's own lines; read when torch is imported
    data.require_packages()
    data_dir, output_dir = Path(options.data_dir).resolve(), Path(options.output_dir).resolve()
    if options.accelerator == "gpu":
        _require_gpu()
    _refuse_results_of_others(output_dir)
    for folder, argument in ((data_dir.parent, "--data-dir"), (output_dir, "--output-dir")):
        with writing_to(argument, folder):
            folder.mkdir(parents=True, exist_ok=True)
    _prepare_images(data_dir, data.Recipe(options.images, options.seed))

    import torch

    from lightning_gpuopt.demo import sizes
    from lightning_gpuopt.demo.demonstration import demonstrate
    from lightning_gpuopt.demo.training import DemoSettings

    with writing_to("--output-dir", output_dir):
        (output_dir / MARK).touch()
    settings = DemoSettings(
        data_dir=data_dir,
        output_dir=output_dir,
        epochs=options.epochs,
        max_steps=options.max_steps or None,
        batch_size=options.batch_size or 32,
        num_workers=options.num_workers,
        accelerator=options.accelerator,
        seed=options.seed,
        progress_bar=sys.stdout.isatty(),
    )
    if options.accelerator != "cpu" and torch.cuda.is_available():
        found = sizes.sized(settings, options.batch_size, sizes.loader_at_its_best, sizes.image_on_cuda)
        if found is not None:
            settings, of = found
            print(
                f"For this GPU: {of.width} times the channels, batches of {of.batch_size}: a step of "
                f"{of.step_s * 1e3:.0f} ms;\nthe loader needs {of.loader_s * 1e3:.0f} ms at its best",
                flush=True,
            )
    demonstrate(settings, fix=not options.no_fix, started=started)
    return 0


def _require_gpu() -> None:
    import torch

    if not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        raise UsageError("--accelerator: expected a GPU that PyTorch can use, found none; omit it to train on the CPU")


def _refuse_results_of_others(folder: Path) -> None:
    if (folder / MARK).exists():
        return
    for name in (*RESULTS, *(f"{BEFORE}/{name}" for name in RESULTS)):
        if (folder / name).exists():
            raise UsageError(
                f"--output-dir: expected a new folder, or one of the demo's, got {folder}, whose {name} the demo did "
                "not write; choose another"
            )


def _prepare_images(folder: Path, recipe: data.Recipe) -> None:
    try:
        whole = data.is_whole(folder, recipe)
    except data.ForeignFolderError as error:
        raise UsageError(f"--data-dir: expected a new or empty folder, or one of the demo's; {error}") from error
    width, height = data.IMAGE_SIZE
    images = f"{recipe.images} JPEGs of {width}x{height} pixels from {len(data.PHOTOGRAPHS)} photographs"
    if whole:
        print(f"{images} are in {from_here(folder)}")
        return
    print(f"Making {images} in {from_here(folder)}", flush=True)
    with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=recipe.images)
        data.make(folder, recipe, on_image=lambda: progress.advance(task))
