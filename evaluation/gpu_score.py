"""Runs the GPU faults, and says how well the detector did."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from evaluation.gains import score as gains_score
from evaluation.gpu_catalogue import GPU_FAULTS
from evaluation.gpu_run import GpuGrade, grade
from tests.simulators.nvml import build

_RIGHT = 0.95
_KEPT = 5 / 6


def score(only: str = "") -> tuple[list[str], bool]:
    """Run the GPU faults and print each grade.

    Args:
        only: words that a fault's name or verdict must have.

    Returns:
        The table and the score, as Markdown, and whether every target was reached.
    """
    grades: list[GpuGrade] = []
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        if library is None:
            raise SystemExit("the GPU faults need a C compiler for the NVML simulator: install cc, or run --cpu")
        for fault in GPU_FAULTS:
            if only in f"{fault.name} {fault.verdict}":
                begin_s = time.perf_counter()
                each = grade(fault, library)
                grades.append(each)
                _print(each, time.perf_counter() - begin_s)
    lines, reached = summary(grades)
    print("\n".join(lines), flush=True)
    return [*table(grades), "", *lines], reached


def _print(each: GpuGrade, seconds: float) -> None:
    mark = "skip" if each.skipped else "ok  " if each.good else "BAD "
    words = f"{mark} {each.fault.verdict:21} {each.verdict:21} {each.fault.name} ({seconds:.1f} s)"
    gain = str(each.gain) if each.gain is not None else ""
    print(" ".join(part for part in (words, each.found, _idle(each), gain, each.skipped) if part), flush=True)
    if mark == "BAD ":
        for part in (each.missing, each.text):
            print("     " + part.replace("\n", "\n     "), flush=True)


def _idle(each: GpuGrade) -> str:
    return "" if each.idle is None else f"{each.idle[0]:.2f} s, {each.idle[1]:.2f} s"


def table(grades: list[GpuGrade]) -> list[str]:
    """The score table, as Markdown."""
    rows = [
        "| injected | right verdict | got | second cause | GPU idle: reported, true | predicted gain of the remedy |",
        "|---|---|---|---|---|---|",
    ]
    for each in grades:
        got = f"not run: {each.skipped}" if each.skipped else each.verdict
        if each.missing:
            got += f" ({each.missing})"
        if each.right and each.extra:
            got += f" (and **{', '.join(each.extra)}**)"
        second = "" if each.second is None else each.fault.second if each.second else f"**not {each.fault.second}**"
        cells = (
            each.fault.name,
            each.fault.verdict,
            got if each.right or each.skipped else f"**{got}**",
            second,
            _idle(each) if each.idle_close is not False else f"**{_idle(each)}**",
            str(each.gain or ("**none predicted**" if each.fault.cure and not each.skipped else "")),
        )
        rows.append(f"| {' | '.join(cells)} |".replace("  |", " |"))
    return rows


def summary(grades: list[GpuGrade]) -> tuple[list[str], bool]:
    """The score in words, and whether every target was reached."""
    ran = [each for each in grades if not each.skipped]
    healthy = [each for each in ran if each.fault.verdict == "compute_bound"]
    right = [each for each in ran if each.right]
    alarms = [each for each in healthy if each.verdict != "compute_bound"]
    extra = [cause for each in ran if each.right for cause in each.extra]
    pairs = [each.second for each in ran if each.second is not None]
    cured = [each.gain for each in ran if each.fault.cure]
    gains = [each for each in cured if each is not None]
    idle = [each.idle_close for each in ran if each.idle_close is not None]
    lines = [
        f"{len(right)} of {len(ran)} verdicts right, {len(alarms)} false alarms in {len(healthy)} healthy runs, "
        f"{sum(pairs)} of {len(pairs)} second causes named, {len(extra)} causes named that were not there.",
        gains_score(gains),
        f"The GPU's idle time was within 5 %, or 1 ms a step, in {sum(idle)} of {len(idle)} runs.",
    ]
    reached = len(right) >= _RIGHT * len(ran) and not alarms and sum(each.kept for each in gains) >= _KEPT * len(cured)
    return lines, reached
