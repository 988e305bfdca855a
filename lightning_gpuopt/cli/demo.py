"""``lightning-gpuopt demo``: a real training on real photographs, where its time goes, and the same with the advice."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_number_type
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from lightning_gpuopt.cli import _demo_data
from lightning_gpuopt.cli._parser import UsageError
from lightning_gpuopt.telemetry.keys import METRICS

if TYPE_CHECKING:
    from lightning_gpuopt.cli._demo_steps import Step
    from lightning_gpuopt.cli._demo_table import Run
    from lightning_gpuopt.cli._demo_training import Outcome

SUMMARY = "train a small convnet on real photographs, show where the time goes, apply the advice and train again"

SMALLEST_NUMBER_OF_IMAGES = _demo_data.VALIDATION_PART * len(_demo_data.PHOTOGRAPHS)
"""So many that each class is in the validation images."""

EnoughImages = restricted_number_type(f"int>={SMALLEST_NUMBER_OF_IMAGES}", int, (">=", SMALLEST_NUMBER_OF_IMAGES))

RESULTS = ("report.json", "report.html", "metrics.csv", "stacks.speedscope.json")
"""What a run leaves in its folder."""

MARK = ".lightning-gpuopt-demo"
"""Marks a folder as the demo's: only there does it remove an earlier run's results."""

BEFORE = "before"
"""Folder of the first run's results, where others followed it."""

Seed = restricted_number_type("0..2^32-1", int, [(">=", 0), ("<", 2**32)])


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``demo``."""
    add = parser.add_argument
    add("--data-dir", type=str, default="./demo-data", help="where the images are made, once")
    add("--output-dir", type=str, default="./demo-run", help="where the reports and the metrics go")
    add("--images", type=EnoughImages, default=4000, help="number of JPEGs")
    add("--epochs", type=PositiveInt, default=3, help="passes over the training images")
    add("--max-steps", type=NonNegativeInt, default=0, help="stop after so many steps; 0: at the end of the epochs")
    add("--batch-size", type=PositiveInt, default=32, help="images a step")
    add("--num-workers", type=NonNegativeInt, default=0, help="worker processes of each DataLoader")
    add("--accelerator", choices=["auto", "cpu", "gpu"], default="auto", help="what to train on")
    add("--no-fix", action="store_true", help="only the diagnosis: do not apply the advice and train again")
    add("--seed", type=Seed, default=0, help="of the images, the weights and the order")


def run(options: Namespace) -> int:
    """Make the images where they are not there yet, train, print what was found, and train again with the advice.

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
    _refuse_results_of_others(output_dir)
    _make_room(data_dir.parent, "--data-dir")
    _make_room(output_dir, "--output-dir")
    _prepare_images(data_dir, _demo_data.Recipe(options.images, options.seed))

    from lightning_gpuopt.cli._demo_steps import STEP_NAMES
    from lightning_gpuopt.cli._demo_table import Run
    from lightning_gpuopt.cli._demo_training import Settings, train

    _mark(output_dir)
    for name in ("", BEFORE, *STEP_NAMES):
        _remove_results(output_dir / name)
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
    runs = [Run(settings, train(settings))]
    _print_diagnosis(runs[0].outcome)
    if not options.no_fix:
        _follow_advice(runs)
    _print_end(runs, time.perf_counter() - started)
    return 0


def _follow_advice(runs: list[Run]) -> None:
    """Add a run for each step that the reports advise, and print all of them side by side."""
    from lightning_gpuopt.cli._demo_steps import Machine, next_step
    from lightning_gpuopt.cli._demo_table import table

    output_dir, machine = runs[0].settings.output_dir, Machine.of(runs[0].outcome)
    while True:
        kept, tried = [run for run in runs if run.kept], {run.name for run in runs}
        step = next_step([run.outcome.report for run in kept], kept[-1].settings, machine, tried)
        if step is None:
            break
        runs.append(_apply(step, kept, output_dir / step.name))
    if runs[1:]:
        _put_side_by_side(runs, output_dir)
        print(f"\n{table(runs)}")
        if not all(run.kept for run in runs):
            print("* slower than the run before, taken back")
        print()
    else:
        print("Nothing to apply: the report names nothing that this demo could change")


def _apply(step: Step, kept: list[Run], output_dir: Path) -> Run:
    """Train once more, with the advice, and hold the report against the run before and the first."""
    from lightning_gpuopt.cli._demo_steps import build, settings_after
    from lightning_gpuopt.cli._demo_table import Run, gain_line, title
    from lightning_gpuopt.cli._demo_training import train
    from lightning_gpuopt.diagnosis.record import Proof
    from lightning_gpuopt.diagnosis.render.html import render_html
    from lightning_gpuopt.diagnosis.report import write_whole

    first, before = kept[0], kept[-1]
    print(f"\nApplying the advice: {title(step.name)}")
    for line in step.code:
        print(f"  {line}", flush=True)
    settings = replace(before.settings, output_dir=output_dir, **step.changes)
    if step.image_size is not None:
        settings = replace(settings, data_dir=output_dir / "images")
        started = time.perf_counter()
        num_bytes = build(first.settings.data_dir, settings.data_dir, step.image_size)
        print(f"  built in {time.perf_counter() - started:.1f} s, {num_bytes / 2**20:.0f} MiB", flush=True)
    outcome = train(settings)
    arguments = step.arguments
    if (found := outcome.found_num_workers) is not None:
        print(f"  NumWorkersFinder found num_workers={found}")
        arguments = {**arguments, "num_workers": found, "persistent_workers": True}
    report, step_s, step_s_before = outcome.report, outcome.report.step_s, before.outcome.report.step_s
    proof = None
    if step_s and step_s_before:
        proof = Proof(step.cause, arguments, step.predicted, step_s_before / step_s)
        earlier = [run.proof for run in kept if run.proof is not None]
        report = replace(report, proofs=[*earlier, proof])  # without those of a search in the midst of the run
        print(f"  {gain_line(proof)}", flush=True)
    report.save_json(output_dir / "report.json")
    baseline = replace(first.outcome.report, findings=[])  # all steps together prove no single finding of the first run
    write_whole(output_dir / "report.html", render_html(report, baseline=baseline))
    return Run(settings_after(settings, outcome), replace(outcome, report=report), step, proof)


def _put_side_by_side(runs: list[Run], folder: Path) -> None:
    """Leave the results of the last run that is built upon in the folder, and those of the first in one below it."""
    (folder / BEFORE).mkdir(exist_ok=True)
    for name in RESULTS:
        if (folder / name).exists():
            (folder / name).replace(folder / BEFORE / name)
    last = [run for run in runs if run.kept][-1]
    source = last.settings.output_dir if last.step is not None else folder / BEFORE
    for name in RESULTS:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def _remove_results(folder: Path) -> None:
    """Those of an earlier demo, which this one is not to be held against."""
    for name in RESULTS:
        (folder / name).unlink(missing_ok=True)


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


def _refuse_results_of_others(folder: Path) -> None:
    if (folder / MARK).exists():
        return
    for name in (*RESULTS, *(f"{BEFORE}/{name}" for name in RESULTS)):
        if (folder / name).exists():
            raise UsageError(
                f"--output-dir: expected a new folder, or one of the demo's, got {folder}, whose {name} the demo has "
                f"not written; name another"
            )


def _mark(folder: Path) -> None:
    try:
        (folder / MARK).touch()
    except OSError as error:
        raise UsageError(
            f"--output-dir: expected a place to write to, got {folder}: {error.strerror}; name another"
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


def _print_diagnosis(outcome: Outcome) -> None:
    chance_percent = 100 / len(_demo_data.PHOTOGRAPHS)
    print(f"\n{outcome.report}\n")
    print(f"Validation accuracy {outcome.accuracy_percent:.1f} % (chance: {chance_percent:.1f} %)")
    units = {metric.key: metric.unit for metric in METRICS}
    print("GPU figures:" if outcome.gpu else f"GPU figures: none, the run was on {outcome.device}", flush=True)
    for key, value in outcome.gpu.items():
        print(f"  {key:<28}{value:9.1f} {units.get(key.rpartition('/')[2], '')}", flush=True)


def _print_end(runs: list[Run], seconds: float) -> None:
    first, last = runs[0], [run for run in runs if run.kept][-1]
    folder = _short(first.settings.output_dir)
    before, after = first.outcome.samples_per_s, last.outcome.samples_per_s
    if last is not first and before and after:
        print(f"{after / before:.1f}x samples per second; same network, seed, and number of samples")
    if runs[1:]:
        print(f"Before and after in one report: {folder / 'report.html'}, report.json")
        print(f"Reports and metrics of each run: {folder}/{{{','.join(run.name for run in runs)}}}")
    else:
        print(f"Report: {folder / 'report.html'} and report.json, metrics: {folder / 'metrics.csv'}")
    print("Your own script, measured like this: lightning-gpuopt watch -- python train.py")
    times = f"{len(runs)} times " if runs[1:] else ""
    print(f"{times}{first.outcome.steps} steps on {first.outcome.device}, {seconds:.0f} s in all")


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
