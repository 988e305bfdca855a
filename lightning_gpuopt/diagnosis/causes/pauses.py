"""What stops the host from outside, whatever it was doing: Python's garbage collector, and torch.compile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from lightning_gpuopt.diagnosis.causes.common import finding_of, per_step
from lightning_gpuopt.diagnosis.causes.table import CAUSES
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.measurements.host import Compilations
from lightning_gpuopt.measurements.phases import GARBAGE_COLLECTION, RECOMPILATION

# steps with a compilation after the warm-up; fewer are a late first one, or the smaller last batch of an epoch
_AGAIN_AND_AGAIN: Final = 3
_MIN_PAUSES: Final = 3  # a single collection takes no more of all of them than one in so many
_SIZES: Final = ("size mismatch", "stride mismatch", ".size()", "rank mismatch")
_NUMBER: Final = re.compile(r"== -?\d+(\.\d+)?\b")


def garbage_collection(measurement: Measurement, threshold: float) -> Iterator[Finding]:
    seconds = measurement.waterfall.wait(GARBAGE_COLLECTION)
    if _one_took_most(measurement) or measurement.waterfall.share(seconds) < threshold:
        return
    evidence, collections = per_step(seconds, measurement), measurement.collections
    advice = CAUSES[GARBAGE_COLLECTION].advice
    if collections is not None:
        for generation, count in enumerate(collections.counts):
            evidence[f"generation_{generation}_per_step"] = round(count / measurement.times.steps, 3)
        evidence["longest_pause_ms"] = round(collections.longest_s * 1e3, 3)
        if collections.tracked is not None:
            evidence["objects_tracked"] = collections.tracked
        if collections.where:
            evidence["where"] = f"{collections.where_share * 100:.0f} % {collections.where}"
            advice = CAUSES[GARBAGE_COLLECTION].cases["asked"].format(where=collections.where)
    yield finding_of(GARBAGE_COLLECTION, seconds, measurement, evidence, advice)


def _one_took_most(measurement: Measurement) -> bool:
    """Whether one collection takes over a third of the collection time; full ones are rare, so one proves nothing."""
    collections = measurement.collections
    return collections is not None and collections.longest_s * _MIN_PAUSES > collections.seconds


def recompilation(measurement: Measurement, threshold: float) -> Iterator[Finding]:
    """Compilations in the steps that the device waits for, if they come again and again."""
    compilations, seconds = measurement.compilations, measurement.waterfall.wait(RECOMPILATION)
    if compilations.steps < _AGAIN_AND_AGAIN or measurement.waterfall.share(seconds) < threshold:
        return
    compiling_s = sum(measurement.times.compiling.values())
    evidence = per_step(seconds, measurement) | {
        "compilations": compilations.count,
        "ms_per_compilation": round(compiling_s / max(compilations.count, 1) * 1e3, 3),
    }
    if compilations.function:
        evidence |= {"function": compilations.function, "reason": compilations.reason}
    advice = f"{CAUSES[RECOMPILATION].advice} {_remedy(compilations)}"
    yield finding_of(RECOMPILATION, seconds, measurement, evidence, advice)


def _remedy(compilations: Compilations) -> str:
    cases = CAUSES[RECOMPILATION].cases
    if not compilations.function:
        return cases["unknown"]
    case = "other"
    if any(words in compilations.reason for words in _SIZES):
        case = "sizes"
    elif _NUMBER.search(compilations.reason):
        case = "number"
    return f"{compilations.function} was recompiled: {compilations.reason}. {cases[case]}"


def pause_notes(measurement: Measurement, threshold: float) -> list[str]:
    """Collections and compilations that are no finding, and functions that torch.compile has given up."""
    compilations, waterfall = measurement.compilations, measurement.waterfall
    notes = []
    collecting = waterfall.share(waterfall.wait(GARBAGE_COLLECTION))
    if collecting >= threshold and measurement.collections is not None and _one_took_most(measurement):
        notes.append(
            f"Python's garbage collector took {collecting:.0%} of the time, most of it in one collection of "
            f"{measurement.collections.longest_s:.2f} s: in a longer run this share shrinks."
        )
    share = waterfall.share(waterfall.wait(RECOMPILATION))
    if 0 < compilations.steps < _AGAIN_AND_AGAIN and share >= threshold:
        notes.append(
            f"torch.compile took {share:.0%} of the time, in {compilations.steps} of {measurement.times.steps} steps "
            "after the warm-up: in a longer run this share shrinks, and a larger warmup_steps excludes it."
        )
    notes += [
        f"torch.compile gave up on {name} after too many recompilations: it now runs eagerly."
        for name in compilations.given_up
    ]
    return notes
