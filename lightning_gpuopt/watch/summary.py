"""What ``watch`` prints when the command has ended: read from the notes and reports of the processes under it.

A page is made of one report alone, the one that is shown: a search for hyperparameters has hundreds of fits.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from lightning_gpuopt.detector.report_files import read_report
from lightning_gpuopt.diagnosis.record import RunRecord
from lightning_gpuopt.diagnosis.render.text import render_text
from lightning_gpuopt.diagnosis.report import StallReport
from lightning_gpuopt.watch.ceiling import CEILING_FILE, Ceiling
from lightning_gpuopt.watch.shared_notes import COMMAND_FILE, Watch

_RULE: Final = "─"
_MAX_LISTED: Final = 20  # fits that are listed: a search for hyperparameters has hundreds
_GPU_KEYS: Final = ("utilization", "sm_activity", "memory_percent", "power_w")
_UNITS: Final = {"utilization": "%", "sm_activity": "% SM activity", "memory_percent": "% of memory", "power_w": "W"}


@dataclass
class Fit:
    folder: Path
    report: StallReport | None = None  # None if the process ended before it was written
    messages: list[str] = field(default_factory=list)  # what the callbacks had to tell
    gpu: dict[str, float] = field(default_factory=dict)  # means over the run, by key
    ended: bool = False  # whether its end was noted
    ceiling: Ceiling | None = None  # under ``--ceiling``; None if nothing was measured
    no_ceiling: str = ""  # why not; empty if nobody knows


def render_end(
    watch: Watch, command: Sequence[str], code: int, report_dir: str | None = None, *, died: str = ""
) -> str:
    """The lines that the command ends with, while the notes are there; a negative ``code`` is a signal's number.

    ``report_dir`` is the run's, where it was named; ``died`` is the post-mortem, or empty.
    """
    notes = watch.notes()
    fits = fits_of(notes)
    width = shutil.get_terminal_size().columns
    lines = [f"── lightning-gpuopt watch {_RULE * max(min(width, 80) - 26, 3)}"]
    if code:
        lines.append(_how_it_ended(code))
    if died:
        lines.append(died)
    with_report = [fit for fit in fits if fit.report is not None and fit.report.steps]
    lines += _listed(
        [f"fit {fit.folder.name}: {_without_report(fit)}" for fit in fits if fit not in with_report], watch
    )
    if not fits:
        problem = watch.problem()
        lines += why_none(notes, command) if problem is None else [problem]
    if with_report:
        lines += _found(with_report, watch, command, report_dir, width)
    if watch.ceiling and fits:
        lines += _ceiling_lines(fits, watch)
    return "\n".join(lines)


def fits_of(notes: Sequence[dict[str, Any]]) -> list[Fit]:
    """The ``fit`` calls that the notes tell of, in their order, with their reports."""
    fits: dict[str, Fit] = {}
    for note in notes:
        if note.get("event") == "fit":  # in a folder that another may have left as it was
            fits[note["folder"]] = Fit(Path(note["folder"]))
        elif note.get("event") == "end":
            fit = fits.setdefault(note["folder"], Fit(Path(note["folder"])))
            fit.ended, fit.messages = True, list(note.get("messages", ()))
            fit.no_ceiling = note.get("no_ceiling", "")
    for fit in fits.values():
        fit.report = read_report(fit.folder)
        fit.gpu = _read_gpu(fit.folder)
        fit.ceiling = _read_ceiling(fit.folder)
    return list(fits.values())


def _read_gpu(folder: Path) -> dict[str, float]:
    try:
        return {key: float(value) for key, value in json.loads((folder / "gpu.json").read_text()).items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _read_ceiling(folder: Path) -> Ceiling | None:
    try:
        return Ceiling(**json.loads((folder / CEILING_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _how_it_ended(code: int) -> str:
    return f"The command was ended by signal {-code}." if code < 0 else f"The command ended with exit code {code}."


def _without_report(fit: Fit) -> str:
    if not fit.ended:
        return "the process ended before a report was written."
    if fit.report is None and fit.messages:
        return " ".join(["no report was written.", *fit.messages])
    return "no training step was measured."


def why_none(notes: Sequence[dict[str, Any]], command: Sequence[str]) -> list[str]:
    errors = [note["error"] for note in notes if note.get("event") == "error"]
    if errors:
        return [
            f"Nothing was measured: the Python of the command cannot use lightning-gpuopt ({errors[0]}). Install it "
            "where the script runs: pip install lightning-gpuopt"
        ]
    ranks = sorted({note["rank"] for note in notes if note.get("event") == "rank"})
    if ranks:
        return [f"Rank {', '.join(map(str, ranks))}: rank 0 has the report."]
    if any(note.get("event") == "trainer" for note in notes):
        return ["Nothing was measured: a Trainer was created, but its fit() was not called."]
    options = takewhile(lambda each: each.startswith("-") and each not in ("-c", "-m"), command[1:])
    isolated = [each for each in options if not each.startswith("--") and set("IE") & {*each}]
    started = f"it was started with {isolated[0]}" if isolated else "python -I, python -E"
    return [
        "Nothing was measured: no Trainer was seen. Possible reasons:",
        "- the script creates no Trainer of Lightning 2.5 or later;",
        f"- its Python ignores PYTHONPATH ({started});",
        "- the environment is reset before it starts (a shell script, a container, srun --export=NONE): keep "
        "PYTHONPATH and LIGHTNING_GPUOPT_WATCH, and make their folders visible there.",
    ]


def _found(fits: list[Fit], watch: Watch, command: Sequence[str], report_dir: str | None, width: int) -> list[str]:
    longest = max(fits, key=lambda fit: (fit.ceiling is not None, fit.report.wall_s if fit.report is not None else 0.0))
    report = longest.report
    assert report is not None
    lines = []
    if len(fits) > 1:
        lines += [
            f"{len(fits)} times fit:",
            *_listed([f"  {_summary(fit)}" for fit in fits], watch),
            f"The {'longest' if longest.ceiling is None else 'one with a ceiling'}, {longest.folder.name}:",
        ]
    lines += [render_text(report, width)]
    lines += gpu_lines(longest.gpu)
    lines += [f"Note: {message}" for message in longest.messages]
    path, page = longest.folder / "report.json", longest.folder / "report.html"
    try:
        report.save_html(page)
    except OSError:  # a disk that is full
        page = path
    lines.append(f"Report: {_short(page)}")
    lines.append(f"Next:   {next_command(report, path, watch, command, report_dir)}")
    return lines


def _ceiling_lines(fits: list[Fit], watch: Watch) -> list[str]:
    """Upper bound of a faster loader's gain: measured, and as predicted for the same run; or why there is none."""
    fit = next((each for each in fits if each.ceiling is not None), None)
    if fit is None or fit.ceiling is None:
        why = [f"  {each.folder.name}: {each.no_ceiling or 'the process ended before'}." for each in fits]
        return ["No ceiling was measured:", *_listed(why, watch)]
    predicted = [] if fit.ceiling.predicted is None else [f"data {fit.ceiling.predicted:.1f}x at most"]
    predicted += [
        f"the advice of {finding.cause} {finding.predicted_speedup[1]:.1f}x"
        for finding in (fit.report.findings if fit.report is not None else ())
        if finding.predicted_speedup is not None
    ][:1]
    lines = [f"Ceiling: {fit.ceiling}."]
    if predicted:
        lines.append(f"         Predicted: {', '.join(predicted)}.")
    return [*lines, "         This run keeps no weights, checkpoints or logs."]


def _listed(lines: list[str], watch: Watch) -> list[str]:
    more = len(lines) - _MAX_LISTED
    return lines if more <= 0 else [*lines[:_MAX_LISTED], f"  ... and {more} more, in {_short(Path(watch.folder))}"]


def _summary(fit: Fit) -> str:
    assert fit.report is not None
    step = f", {fit.report.step_s * 1e3:.1f} ms a step" if fit.report.step_s else ""
    return f"{fit.folder.name}: {fit.report.verdict}, {fit.report.steps} steps{step}"


def gpu_lines(figures: dict[str, float]) -> list[str]:
    """One line for each GPU: its means over the run."""
    gpus = dict.fromkeys(key.rpartition("/")[0] for key in figures if key.endswith("/utilization"))
    lines = []
    for gpu in gpus:
        known = [(key, figures[f"{gpu}/{key}"]) for key in _GPU_KEYS if f"{gpu}/{key}" in figures]
        lines.append(f"{gpu}: " + ", ".join(f"{value:.0f} {_UNITS[key]}" for key, value in known))
    return lines


def next_command(
    report: RunRecord, path: Path, watch: Watch, command: Sequence[str], report_dir: str | None = None
) -> str:
    """What to run now, by a report; ``report_dir`` is where reports go, if that was named."""
    if not watch.fix and any(finding.settings or finding.cause == "host_to_device" for finding in report.findings):
        folder = f" --report-dir {shlex.quote(report_dir)}" if report_dir is not None else ""
        return f"lightning-gpuopt watch --fix{folder} -- {shlex.join(command)}"
    earlier = _earlier(watch, command)
    if earlier is not None:
        return f"lightning-gpuopt report {shlex.quote(_short(earlier))} {shlex.quote(_short(path))}"
    workers = next((each.settings["num_workers"] for each in report.findings if each.settings.get("num_workers")), None)
    in_vain = any(each.setting == "num_workers" and each.kept is False for each in report.changes)
    if workers is not None and not in_vain:
        return f"lightning-gpuopt what-if {shlex.quote(_short(path))} --num-workers {workers}"
    return f"lightning-gpuopt report {shlex.quote(_short(path))}"


def _earlier(watch: Watch, command: Sequence[str]) -> Path | None:
    """The first report of the latest run before, of the same command and in the same folder; None without one."""
    here, same = Path(watch.folder), shlex.join(command)
    runs = []
    with suppress(OSError):
        for folder in here.parent.iterdir():
            report, noted = folder / "fit-1" / "report.json", folder / COMMAND_FILE
            if (
                folder != here
                and report.is_file()
                and noted.is_file()
                and os.fsdecode(noted.read_bytes()).strip() == same
            ):
                runs.append((report.stat().st_mtime, report))
    return max(runs)[1] if runs else None


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
