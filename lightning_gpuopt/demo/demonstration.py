"""The demonstration: train, follow the advice of each report, train again, and hold the runs side by side."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

from lightning_gpuopt.demo import steps, training
from lightning_gpuopt.demo.data import PHOTOGRAPHS
from lightning_gpuopt.demo.folders import BEFORE, RESULTS, from_here, remove_results
from lightning_gpuopt.demo.steps import STEP_NAMES, Machine, Step, build, settings_after
from lightning_gpuopt.demo.table import Run, gain_line, table, title
from lightning_gpuopt.demo.training import DemoSettings, Outcome
from lightning_gpuopt.diagnosis.record import Proof
from lightning_gpuopt.diagnosis.render.html import render_html
from lightning_gpuopt.telemetry.keys import METRICS
from lightning_gpuopt.utils.whole_file import write_whole


def demonstrate(settings: DemoSettings, *, fix: bool, started: float) -> None:
    """Train, print what was found, and with ``fix`` train again; ``started`` is by ``time.perf_counter``."""
    for name in ("", BEFORE, *STEP_NAMES):
        remove_results(settings.output_dir / name)
    runs = [Run(settings, training.train(settings))]
    _print_diagnosis(runs[0].outcome)
    if fix:
        follow_advice(runs)
    _print_end(runs, time.perf_counter() - started)


def follow_advice(runs: list[Run]) -> None:
    """Add a run for each step that the reports advise, and print all of them side by side."""
    output_dir, machine = runs[0].settings.output_dir, Machine.of(runs[0].outcome)
    while True:
        kept, tried = [run for run in runs if run.kept], {run.name for run in runs}
        step = steps.next_step([run.outcome.report for run in kept], kept[-1].settings, machine, tried)
        if step is None:
            break
        runs.append(_apply(step, kept, output_dir / step.name))
    if runs[1:]:
        _put_side_by_side(runs, output_dir)
        print(f"\n{table(runs)}")
        if not all(run.kept for run in runs):
            print("* slower than the run before, undone")
        print()
    else:
        print("Nothing to apply: the report advises nothing that this demo can change")


def _apply(step: Step, kept: list[Run], output_dir: Path) -> Run:
    """Train once more, with the advice, and hold the report against the run before and the first."""
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
    outcome = training.train(settings)
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
    """Put the results of the last kept run into the folder, and those of the first run into a folder below it."""
    (folder / BEFORE).mkdir(exist_ok=True)
    for name in RESULTS:
        if (folder / name).exists():
            (folder / name).replace(folder / BEFORE / name)
    last = [run for run in runs if run.kept][-1]
    source = last.settings.output_dir if last.step is not None else folder / BEFORE
    for name in RESULTS:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def _print_diagnosis(outcome: Outcome) -> None:
    chance_percent = 100 / len(PHOTOGRAPHS)
    print(f"\n{outcome.report}\n")
    print(f"Validation accuracy {outcome.accuracy_percent:.1f} % (chance: {chance_percent:.1f} %)")
    units = {metric.key: metric.unit for metric in METRICS}
    print("GPU figures:" if outcome.gpu else f"GPU figures: none, the run was on {outcome.device}", flush=True)
    for key, value in outcome.gpu.items():
        print(f"  {key:<28}{value:9.1f} {units.get(key.rpartition('/')[2], '')}", flush=True)


def _print_end(runs: list[Run], seconds: float) -> None:
    first, last = runs[0], [run for run in runs if run.kept][-1]
    folder = from_here(first.settings.output_dir)
    before, after = first.outcome.samples_per_s, last.outcome.samples_per_s
    if last is not first and before and after:
        same = (
            "network, seed, and number of samples"
            if len({run.outcome.samples for run in runs}) == 1
            else "network, seed"
        )
        print(f"{after / before:.1f}x samples per second; same {same}")
    if runs[1:]:
        print(f"Before and after in one report: {folder / 'report.html'}, report.json")
        print(f"Reports and metrics of each run: {folder}/{{{','.join(run.name for run in runs)}}}")
    else:
        print(f"Report: {folder / 'report.html'} and report.json, metrics: {folder / 'metrics.csv'}")
    print("Your own script, measured like this: lightning-gpuopt watch -- python train.py")
    times = f"{len(runs)} times " if runs[1:] else ""
    print(f"{times}{first.outcome.steps} steps on {first.outcome.device}, {seconds:.0f} s in all")
