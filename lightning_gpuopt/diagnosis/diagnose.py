"""Why training waits: measurements in, findings out. Pure: no torch, no clock, no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, Literal, cast

from lightning_gpuopt.diagnosis.causes import epoch, pauses, ranks, step
from lightning_gpuopt.diagnosis.causes.loader import data_findings
from lightning_gpuopt.diagnosis.causes.pipeline import pipeline_findings
from lightning_gpuopt.diagnosis.causes.slowdown import slowdown
from lightning_gpuopt.diagnosis.code_places import with_places
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.record import Finding, Verdict
from lightning_gpuopt.diagnosis.witnesses import disagreement, idle_shares, witness_note
from lightning_gpuopt.measurements.phases import GPU_WORK

Confidence = Literal["high", "medium", "low"]

_LEVELS: Final[tuple[Confidence, ...]] = ("high", "medium", "low")
_INSIDE: Final = ("gpu_sync", "launch_bound", "device_copies")
_APART: Final = 0.1
_SHORT_S: Final = 5.0
_FEW_STEPS: Final = 30
_VERY_FEW_STEPS: Final = 10
_NOISY: Final = 0.15  # standard error of a step's mean time by windows, as a share of it


class StallError(RuntimeError):
    """A stall was found under ``StallDetector(on_stall="raise")``; the text names the cause and the cure.

    Example::

        trainer = Trainer(callbacks=[StallDetector(on_stall="raise")])
        try:
            trainer.fit(model, train_dataloader)
        except StallError as error:
            sys.exit(f"the GPU waits: {error}")
    """


def diagnose(measurement: Measurement, threshold: float) -> list[Finding]:
    """Every cause that takes at least ``threshold`` (0-1) of the wall time without warm-up, largest share first."""
    findings = [
        replace(each, confidence=confidence_of(each.cause, each.share, measurement, threshold))
        for each in _causes(measurement, threshold)
    ]
    findings = with_places(findings, measurement.sampled)
    return _each_gain_once(sorted(findings, key=lambda finding: finding.share, reverse=True))


def confidence_of(cause: str, share: float, measurement: Measurement, threshold: float) -> Confidence:
    """``"high"``, less one level for each doubt.

    Doubts are: a run after warm-up of less than 5 s or 30 steps (of less than 10 steps: two levels); windows whose
    steps differ by more than 15 % of their mean time; a share within a tenth of the threshold; NVML against CUDA
    events; a cause inside the step that was not profiled.
    """
    steps, wall_s = measurement.times.steps, measurement.times.wall_s
    lost = (steps < _FEW_STEPS or wall_s < _SHORT_S) + (steps < _VERY_FEW_STEPS)
    lost += noise(measurement) > _NOISY
    lost += share < 1.1 * threshold
    lost += abs(disagreement(idle_shares(measurement))) > _APART
    lost += cause in _INSIDE and measurement.waterfall.on_gpu and measurement.look is None
    return _LEVELS[min(lost, 2)]


def noise(measurement: Measurement) -> float:
    """Standard error of the mean time of a step, as a share of it, by windows; 0 with less than three."""
    means = [each.seconds / each.steps for each in measurement.history if each.steps]
    if len(means) < 3 or measurement.growth is not None:
        return 0.0
    mean = sum(means) / len(means)
    variance = sum((each - mean) ** 2 for each in means) / (len(means) - 1)
    return math.sqrt(variance / len(means)) / mean if mean > 0 else 0.0


def _each_gain_once(findings: list[Finding]) -> list[Finding]:
    """Without the gain of settings that a larger finding predicts already: it is the same one."""
    seen: list[tuple[object, ...]] = []
    once = []
    for each in findings:
        gain = (each.settings, each.predicted_speedup)
        once.append(replace(each, settings={}, predicted_speedup=None) if gain in seen else each)
        if each.predicted_speedup is not None:
            seen.append(gain)
    return once


def count_stalls(measurement: Measurement, threshold: float) -> int:
    """How many findings :func:`diagnose` would have; quickly, without what makes predictions exact."""
    quick = replace(measurement, workers=replace(measurement.workers, took={}))
    return sum(1 for _ in _causes(quick, threshold))


def verdict_of(findings: list[Finding], *, measured: bool = True, look_missed: bool = False) -> Verdict:
    """The cause of the largest finding; without one ``"compute_bound"``, ``"unknown"`` or ``"not_measured"``."""
    if not measured:
        return "not_measured"
    if findings:
        return cast(Verdict, findings[0].cause)
    return "unknown" if look_missed else "compute_bound"


def remarks(measurement: Measurement, threshold: float) -> list[str]:
    """What takes at least ``threshold`` (0-1) of the time and is none of the causes."""
    waterfall = measurement.waterfall
    notes = []
    others = waterfall.share(waterfall.wait("other"))
    if others >= threshold:
        notes.append(
            f"{others:.0%} of the time lies between Lightning's profiled actions: its own work around each step, and "
            "the program's work outside of hooks."
        )
    own = waterfall.share(waterfall.diagnosis_s)
    if own >= threshold:
        notes.append(
            f"{own:.0%} of the time is StallDetector's own diagnosis, which matters in a run this short, or with a "
            "window_size this small."
        )
    if measurement.hyperparameters:
        notes.append(step.hyperparameters_note(measurement.hyperparameters))
    known = (step.copies_ahead_note(measurement), step.power_cap_note(measurement), witness_note(measurement))
    return [*notes, *(note for note in known if note is not None), *pauses.pause_notes(measurement, threshold)]


def _causes(measurement: Measurement, threshold: float) -> Iterator[Finding]:
    if measurement.waterfall.wall_s <= 0 or not measurement.times.steps:
        return
    throttled = list(step.gpu_throttled(measurement, threshold))
    yield from throttled
    growth = measurement.growth
    if growth is not None and not (throttled and growth.part == GPU_WORK):  # else they are slower for the clocks
        for finding in slowdown(measurement, growth, threshold):
            yield finding
            measurement = replace(measurement, growth_s=growth.waits_s)
    if measurement.late_pipelines is None:
        yield from data_findings(measurement, threshold)
    else:
        yield from pipeline_findings(measurement, threshold)
    yield from step.callbacks(measurement, threshold)
    yield from step.logging(measurement, threshold)
    restarts = list(epoch.validation_restart(measurement, threshold))
    yield from restarts
    yield from step.between_steps(measurement, threshold, sum(each.share for each in restarts))
    yield from epoch.restart(measurement, threshold)
    yield from step.host_to_device(measurement, threshold)
    yield from step.inside_the_step(measurement, threshold)
    yield from pauses.garbage_collection(measurement, threshold)
    yield from pauses.recompilation(measurement, threshold)
    yield from ranks.communication(measurement, threshold)
    stragglers = list(ranks.straggler(measurement, threshold))
    yield from stragglers
    if not stragglers:  # else this is the wait for that rank
        yield from step.signal_broadcast(measurement, threshold)
