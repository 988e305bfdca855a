"""Run the fault suite and print its score.

    python -m evaluation [--gpu] [--cpu] [--busy] [--lines] [--what-if] [--predictions] [--only WORDS] [--markdown FILE]

The GPU part first: each of its runs forks from this process, in which nothing has been trained by then.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Trainer

from evaluation import gpu_score, lines, predictions, what_if
from evaluation.catalogue import BESIDE_OTHERS, CONTROLS, FAULTS, WARMUP_STEPS, CannotRun, Fault
from evaluation.gains import Gain
from evaluation.gains import score as gains_score
from evaluation.parts import quiet
from lightning_gpuopt import StallDetector, StallReport

CPU_PART = "On the CPU: the training process waits"
GPU_PART = "On a simulated GPU: the device waits"
BUSY_PART = "On the CPU, next to busy programs: the verdict stays the same"
LINES_PART = "Lines of code: the slow line is named first"
PREDICTIONS_PART = "Predicted gains in randomly drawn runs"
WHAT_IF_PART = "What-if: expected and measured steps"

_PHASE_SHARE = 0.05
_PHASE_S = 0.001


@dataclass(frozen=True)
class Grade:
    """How the detector did on one fault."""

    fault: Fault
    verdict: str
    evidence: dict[str, Any]
    phase_error: str = ""
    gain: Gain | None = None
    skipped: str = ""

    @property
    def right(self) -> bool:
        """The verdict, and what the evidence must name."""
        wanted = self.fault.evidence.items()
        return self.verdict == self.fault.verdict and all(self.evidence.get(name) == value for name, value in wanted)


def train(fault: Fault, settings: dict[str, Any] | None = None) -> tuple[StallReport, dict[str, float]]:
    """Train with the fault; gives the report and what was really injected, in seconds by phase."""
    detector = StallDetector(window_size=50, warmup_steps=WARMUP_STEPS, on_stall="ignore", print_report=False)
    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder)
        model = fault.model()
        model.loader |= settings or {}
        arguments = quiet(tmp, max_steps=fault.steps, max_epochs=-1, callbacks=[detector, *fault.callbacks(tmp)])
        arguments |= fault.trainer(tmp)
        if fault.ranks > 1:
            arguments = {"strategy": "ddp"} | arguments | {"devices": fault.ranks}
        Trainer(**arguments).fit(model)
    return detector.report, model.spent_s


def grade(fault: Fault) -> Grade:
    """Run a fault, and again with the advice followed where that is asked for."""
    try:
        with fault.around() if fault.around is not None else nullcontext():
            if fault.ranks > 1:
                return _grade_ranks(fault)
            report, spent_s = train(fault)
    except CannotRun as reason:
        return Grade(fault, "", {}, skipped=str(reason))
    evidence = report.findings[0].evidence if report.findings else {}
    error = _phase_error(report, spent_s)
    if not fault.gain or not report.findings:
        return Grade(fault, report.verdict, evidence, error)
    after, _ = train(fault, report.findings[0].settings)
    assert report.step_s is not None
    assert after.step_s is not None
    gain = Gain.of(asdict(report.findings[0]), report.step_s, after.step_s)
    return Grade(fault, report.verdict, evidence, error, gain)


def _grade_ranks(fault: Fault) -> Grade:
    """DDP starts its other ranks by running this program again, so it runs in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "evaluation", "--ranks-of", fault.name, "--answer", str(answer)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("LOCAL_", "NODE_"))}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
        if not answer.exists():
            return Grade(fault, f"failed: {run.stderr.strip().splitlines()[-1:]}", {})
        return Grade(fault, **json.loads(answer.read_text()))


def _phase_error(report: StallReport, spent_s: dict[str, float]) -> str:
    """The phase that is furthest from what was injected, if it is too far."""
    worst = ""
    for phase, truth_s in spent_s.items():
        error_s = abs(report.phases[phase] - truth_s)
        if error_s > max(_PHASE_SHARE * truth_s, _PHASE_S * report.steps):
            worst = f"{phase} {report.phases[phase]:.2f} s for {truth_s:.2f} s"
    return worst


def table(grades: list[Grade]) -> list[str]:
    """The score table, as Markdown."""
    rows = ["| injected | right verdict | got | predicted gain of the advice |", "|---|---|---|---|"]
    for each in grades:
        got = f"not run: {each.skipped}" if each.skipped else (each.verdict if each.right else f"**{each.verdict}**")
        rows.append(f"| {each.fault.name} | {each.fault.verdict} | {got} | {each.gain or ''} |")
    return rows


def summary(grades: list[Grade]) -> tuple[list[str], bool]:
    """The score in words, and whether every target was reached."""
    ran = [each for each in grades if not each.skipped]
    right = [each for each in ran if each.right]
    alarms = [each for each in ran if each.fault in CONTROLS and each.verdict != "compute_bound"]
    off = [each for each in ran if each.phase_error]
    gains = [each.gain for each in ran if each.gain is not None]
    lines = [
        f"{len(right)} of {len(ran)} verdicts right, {len(alarms)} false alarms in "
        f"{len([each for each in ran if each.fault in CONTROLS])} controls, "
        f"{len(off)} phases off by more than 5 % and 1 ms a step.",
        gains_score(gains),
    ]
    lines += [f"  phase off: {each.fault.name}: {each.phase_error}" for each in off]
    kept = sum(each.kept for each in gains)
    reached = len(right) >= 0.95 * len(ran) and not alarms and not off and 5 * kept >= 4 * len(gains)
    return lines, reached


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m evaluation", description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="only the faults on the simulated GPU")
    parser.add_argument("--cpu", action="store_true", help="only the faults of the training process")
    parser.add_argument("--busy", action="store_true", help="only the faults of data, next to busy programs")
    parser.add_argument("--lines", action="store_true", help="only the lines that are injected")
    parser.add_argument("--what-if", action="store_true", help="only the forecasts of changed runs")
    parser.add_argument("--predictions", action="store_true", help="only drawn runs, whose advice is followed")
    parser.add_argument("--only", default="", help="only faults whose name or verdict has these words")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file; a part that is not run stays")
    parser.add_argument("--ranks-of", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if options.ranks_of:
        fault = next(each for each in FAULTS if each.name == options.ranks_of)
        report, _ = train(fault)
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            evidence = report.findings[0].evidence if report.findings else {}
            options.answer.write_text(json.dumps({"verdict": report.verdict, "evidence": evidence}))
        return 0
    every = not (options.gpu or options.cpu or options.busy or options.lines or options.what_if or options.predictions)
    reached = True
    for heading, wanted, run in (
        (GPU_PART, options.gpu, gpu_score.score),
        (CPU_PART, options.cpu, lambda only: score(FAULTS, only)),
        (BUSY_PART, options.busy, lambda only: score(BESIDE_OTHERS, only)),
        (LINES_PART, options.lines, lines.score),
        (WHAT_IF_PART, options.what_if, lambda only: what_if.score(only, train)),
        (PREDICTIONS_PART, options.predictions, lambda only: predictions.score(only, grade, when_and_where)),
    ):
        if every or wanted:
            table_and_score, part_reached = run(options.only)
            reached = reached and part_reached
            if options.markdown:
                write_part(options.markdown, heading, [*table_and_score, "", when_and_where()])
    return 0 if reached else 1


def score(faults: list[Fault], only: str) -> tuple[list[str], bool]:
    """Run faults of the training process.

    Args:
        faults: those.
        only: words that a fault's name or verdict must have.

    Returns:
        The table and the score, as Markdown, and whether every target was reached.
    """
    grades: list[Grade] = []
    for fault in faults:
        if only not in f"{fault.name} {fault.verdict}":
            continue
        begin = time.perf_counter()
        each = grade(fault)
        grades.append(each)
        mark = "skip" if each.skipped else "ok  " if each.right else "BAD "
        seconds = time.perf_counter() - begin
        print(f"{mark} {fault.verdict:21} {each.verdict:21} {fault.name} ({seconds:.1f} s) {each.gain or each.skipped}")
        if not each.right and not each.skipped:
            print(f"     {each.evidence}")
        sys.stdout.flush()
    lines, reached = summary(grades)
    print("\n".join(lines), flush=True)
    return [*table(grades), "", *lines], reached


def when_and_where() -> str:
    """The date, and on what a part was run."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, Lightning {lightning.__version__}"
    return f"Run on {date.today()}: {len(os.sched_getaffinity(0))} CPU cores, {versions}."


def write_part(path: Path, heading: str, lines: list[str]) -> None:
    """Write one part of the Markdown file; the introduction and the other parts are not changed.

    Args:
        path: the file.
        heading: the part's.
        lines: its table and score.
    """
    parts = dict.fromkeys((CPU_PART, BUSY_PART, GPU_PART, LINES_PART, WHAT_IF_PART, PREDICTIONS_PART), "")
    introduction = ""
    if path.exists():
        introduction, *rest = f"\n{path.read_text()}".split("\n## ")
        for text in rest:
            found, _, body = text.partition("\n")
            if found in parts:
                parts[found] = body.strip()
            elif body.startswith("| injected |"):  # from before there were two parts
                parts[CPU_PART] = body.strip()
    parts[heading] = "\n".join(lines)
    written = [introduction.strip(), *(f"## {name}\n\n{body}" for name, body in parts.items() if body)]
    path.write_text("\n\n".join(each for each in written if each) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
