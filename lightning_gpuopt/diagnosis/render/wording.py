"""What reports say in words, in the terminal and on the page: causes, evidence, predictions, numbers."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from lightning_gpuopt.diagnosis.causes.table import FACTS_SHOWN, cause_of
from lightning_gpuopt.diagnosis.code_places import finding_name, is_in_user_code
from lightning_gpuopt.diagnosis.compare import Comparison, Gate
from lightning_gpuopt.diagnosis.record import ENOUGH_STEPS, Change, Finding, HotSpots, Proof, Risk, RunRecord, Stretch
from lightning_gpuopt.diagnosis.refuted import COSTS_MORE
from lightning_gpuopt.measurements.code_location import INSTALLED, short
from lightning_gpuopt.measurements.loader_costs import Interval
from lightning_gpuopt.measurements.loader_model import HEADROOM_LEFT
from lightning_gpuopt.measurements.phases import BETWEEN_STEPS

# share of the run that steps and their number may leave over before the report says which steps are meant
_ADDS_UP: Final = 0.02
_SMALL_KIND: Final = 0.005  # share of a kind of kernel below which it is left out
PRICE_VARIABLE: Final = "GPUOPT_GPU_HOUR_PRICE"  # environment variable with the price of one GPU-hour, in any currency
_LEAST_STANDSTILL_S: Final = 60.0  # GPU-seconds below which standing still is not summed up
_UNITS: Final = {"ms": "ms", "s": "s", "kib": "KiB", "mib": "MiB", "gib": "GiB", "mhz": "MHz", "percent": "%"}
_RATES: Final = {"gb_per_s": ("rate", "GB/s"), "swap_mib_per_s": ("swap", "MiB/s")}
_NAME: Final = re.compile(rf"(?:(?P<what>\w+)_)?(?P<unit>{'|'.join(_UNITS)})(?P<per>_per_\w+)?(?P<rest>_max)?")


def words(cause: str) -> str:
    """A cause as a heading: ``"Slow storage"``."""
    text = cause.replace("_", " ").replace("gpu", "GPU")
    return text[:1].upper() + text[1:]


def number(value: float) -> str:
    """A number with three significant digits; whole numbers keep all of theirs."""
    return f"{value:.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.3g}"


def percent(share: float) -> str:
    """A share, 0-1, as a whole percentage, or with a digit more where it is small."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{share * 100:.0f} %" if share >= 0.0995 or share == 0 else f"{share * 100:.1f} %"


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    if 0 < seconds < 1e-3:
        return f"{number(seconds * 1e6)} µs"
    if 0 < seconds < 1:
        return f"{number(seconds * 1e3)} ms"
    if seconds < 120:
        return f"{number(seconds)} s"
    if seconds < 600:
        return "{} min {:02d} s".format(*divmod(round(seconds), 60))
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else "{} h {:02d} min".format(*divmod(minutes, 60))


def places(finding: Finding, report: RunRecord) -> list[HotSpots]:
    """The hot spots of a finding: one or none."""
    if not is_in_user_code(finding):
        return []
    name = finding_name(finding)
    return [each for each in report.hot_spots if each.finding == name and each.seconds > 0]


def _path(file: str) -> str:
    return short(file) if any(folder in file.split(os.sep) for folder in INSTALLED) else file


def place_rows(spots: HotSpots) -> list[tuple[str, ...]]:
    """Function, file and line, share, and transform of each place; the user's own files with their whole path."""
    return [
        (each.name, f"{_path(each.file)}:{each.line}", percent(each.seconds / spots.seconds), each.transform)
        for each in spots.places
    ]


def gain(interval: Interval) -> str:
    """A predicted speed-up with its interval: ``"2.1x (1.8x to 2.4x)"``."""
    digits = _digits(interval[0])
    low, mid, high = (f"{factor:.{digits}f}x" for factor in interval)
    return f"{mid} ({low} to {high})"


def speedup(factor: float) -> str:
    """A speed-up: ``"2.1x"``."""
    return f"{factor:.{_digits(factor)}f}x"


def _digits(factor: float) -> int:
    """After the point: two where one would round a small gain away."""
    return 1 if factor >= 1.2 else 2


def evidence(finding: Finding | Risk) -> list[tuple[str, str]]:
    """A finding's or a risk's evidence as (what, value with unit); the unit comes from the name."""
    return [_fact(name, value) for name, value in finding.evidence.items()]


def deciding_evidence(finding: Finding) -> list[tuple[str, str]]:
    """Those few of a finding's evidence that decided, as :func:`evidence` gives them."""
    known = {name: value for name, value in finding.evidence.items() if name != "where"}
    keys = [key for key in cause_of(finding.cause).decided_by.split() if key in known] or [*known]
    return [_fact(key, known[key]) for key in keys[:FACTS_SHOWN]]


def deciding_facts(finding: Finding) -> str:
    return ", ".join(f"{what} {value}" for what, value in deciding_evidence(finding))


def _fact(name: str, value: float | str) -> tuple[str, str]:
    text = value if isinstance(value, str) else number(value)
    if name in _RATES:
        return _RATES[name][0], f"{text} {_RATES[name][1]}"
    match = _NAME.fullmatch(name)
    if match is None or isinstance(value, str):
        return name.replace("_", " "), text
    what = f"{match['what'] or 'time'}{match['per'] or ''}{match['rest'] or ''}"
    return what.replace("_", " "), f"{text} {_UNITS[match['unit']]}"


def arguments(settings: dict[str, Any]) -> str:
    """Settings as keyword arguments: ``"num_workers=6, persistent_workers=True"``."""
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def proof_line(proof: Proof) -> str:
    """What was predicted of a setting, and what was measured in how many steps; no figure where they are too few."""
    predicted = f"predicted {gain(proof.predicted)}, " if proof.predicted is not None else ""
    figure = speedup(proof.measured) if proof.enough else "not enough steps"
    steps = f" ({_both(proof.steps)})" if proof.steps is not None else ""
    outside = ", outside the interval" if proof.kept is False else ""
    return f"{proof.cause}: {arguments(proof.settings)}: {predicted}measured {figure}{steps}{outside}"


def speedup_line(comparison: Comparison) -> str | None:
    """What one run gained over another; None if that is not known."""
    if comparison.speedup is not None:
        return f"Measured speed-up: {speedup(comparison.speedup)}"
    if comparison.steps is None or not comparison.before.step_s or not comparison.after.step_s:
        return None
    return f"Measured speed-up: not enough steps ({_both(comparison.steps)}, {ENOUGH_STEPS} each are needed)"


def _both(steps: tuple[int, int]) -> str:
    return f"{steps[0]} steps before, {steps[1]} after"


def change_line(change: Change) -> str:
    parts = [f"predicted {gain(change.predicted)}"] if change.predicted is not None else []
    if change.measured is not None:
        parts.append(f"measured {speedup(change.measured)}")
    parts.append(outcome(change))
    return f"{change.setting} {change.from_} → {change.to}: {', '.join(parts)}"


def outcome(change: Change) -> str:
    """``"kept"``, ``"undone"``, ``"advised"`` or ``"not tried"``, with the reason."""
    word = {True: "kept", False: "undone", None: "advised"}[change.kept]
    if change.kept is None and change.why.startswith(COSTS_MORE):
        word = "not tried"
    return f"{word} ({change.why})" if change.why else word


def outcome_heading(changes: Sequence[Change]) -> str:
    """What became of the changes, as a heading: ``"Changed: num_workers 1 → 6 (3.9x)"``; empty without any."""
    kept = [
        f"{each.setting} {each.from_} → {each.to}"
        + (f" ({speedup(each.measured)})" if each.measured is not None else "")
        for each in changes
        if each.kept
    ]
    return f"Changed: {', '.join(kept)}" if kept else "No change was kept" if changes else ""


def kept_code(changes: Sequence[Change]) -> list[str]:
    """The kept changes as code to paste: the last value of each setting."""
    kept = {each.setting: each.to for each in changes if each.kept}
    ahead, by_sample = kept.pop("device_prefetch", None), kept.pop("sample_parallel", None)
    name = "SampleLoader" if by_sample else "DataLoader"
    lines = [f"{name}({', '.join(filter(None, ('...', arguments(kept))))})"] if kept or by_sample else []
    return lines + (["Trainer(..., callbacks=[CudaPrefetcher()])"] if ahead else [])


def all_proofs(report: RunRecord, comparison: Comparison | None) -> list[Proof]:
    """The report's own proofs, and those against an earlier run that it does not have yet."""
    more = comparison.proofs if comparison is not None else []
    return [*report.proofs, *(proof for proof in more if proof not in report.proofs)]


def headroom_line(report: RunRecord) -> str | None:
    """That nothing is left to gain; None if a cause was found, or there is headroom in steps or between them."""
    if report.headroom is None or report.headroom >= HEADROOM_LEFT or report.findings:
        return None
    if sum(report.phases.get(phase, 0.0) for phase in BETWEEN_STEPS) >= HEADROOM_LEFT * report.wall_s:
        return None
    return f"Nothing is left to gain: {percent(1 - report.headroom)} of a step is its own work."


def measured_part(report: RunRecord) -> str:
    """Which steps the step time is of, and how long they took; empty if that is the whole run, or not known."""
    if report.step_s is None or report.measured_steps is None:
        return ""
    took_s = report.measured_steps * report.step_s
    if abs(took_s - report.wall_s) <= _ADDS_UP * report.wall_s:
        return ""
    if report.measured_steps >= report.steps:
        return f"the steps alone {took_s:.1f} s"
    between_s = sum(report.phases.get(phase, 0.0) for phase in BETWEEN_STEPS)
    how = "alone" if between_s > _ADDS_UP * report.wall_s else "in"
    return f"the last {'' if report.measured_steps == 1 else f'{report.measured_steps} '}{how} {took_s:.1f} s"


def standstill_line(report: RunRecord) -> str | None:
    """For how long GPUs stood still, by finding, and what that cost; None off CUDA and below a GPU-minute."""
    ranks = report.environment.get("ranks", "1")
    gpus = int(ranks) if ranks.isdecimal() else 1
    if not report.environment.get("device", "").startswith("cuda"):
        return None
    waiting = {"all": gpus, "others": gpus - 1, "none": 0}
    by_name: dict[str, float] = {}
    for each in report.findings:
        seconds = each.share * report.wall_s * waiting[cause_of(each.cause).waiting]
        by_name[finding_name(each)] = by_name.get(finding_name(each), 0.0) + seconds
    whole_s = min(sum(by_name.values()), report.wall_s * gpus)  # a GPU that waits for two things waits once
    if whole_s < _LEAST_STANDSTILL_S:
        return None
    unit_s, unit = (3600, "GPU-hours") if whole_s >= 3600 else (60, "GPU-minutes")
    parts = ", ".join(f"{name} {number(seconds / unit_s)}" for name, seconds in by_name.items() if seconds)
    who = "The GPU" if gpus == 1 else "The GPUs"
    return f"{who} idled for {number(whole_s / unit_s)} {unit}: {parts}{_money(whole_s / 3600)}"


def _money(hours: float) -> str:
    """The end of the line on GPU-hours: what they cost, or what is wrong with the price."""
    price = os.environ.get(PRICE_VARIABLE)
    if price is None:
        return "."
    try:
        each = float(price)
    except ValueError:
        each = float("nan")
    if not (0 <= each < float("inf")):
        return f". {PRICE_VARIABLE} should be the price of one GPU-hour, a number such as 2.50, got {price!r}."
    return f" (about {hours * each:.2f} at {price.strip()} a GPU-hour)."


def lightning_line(report: RunRecord) -> str | None:
    """What Lightning itself does in a step, with the largest parts."""
    if not report.lightning_work:
        return None
    whole = duration(sum(report.lightning_work.values()))
    largest = [f"{name} {duration(seconds)}" for name, seconds in list(report.lightning_work.items())[:3]]
    return f"Lightning's own work: {whole} a step ({', '.join(largest)})."


def kernel_kinds_line(report: RunRecord) -> str | None:
    """The kernels of a step by kind, the largest first; None if none were recorded."""
    kinds = sorted(report.kernel_kinds.items(), key=lambda item: -item[1])
    parts = [f"{name.replace('_', ' ')} {percent(share)}" for name, share in kinds if share >= _SMALL_KIND]
    if not parts:
        return None
    summary = report.kernel_summary
    took = f", {number(summary['ms_per_step'])} ms" if "ms_per_step" in summary else ""
    line = f"Kernels of a step{took}: {', '.join(parts)}."
    if summary.get("short_per_step"):
        line += f" {number(summary['short_per_step'])} are under 10 µs ({percent(summary['short_share'])} of the time)."
    if summary.get("unassigned_share"):
        line += f" {percent(summary['unassigned_share'])} could not be attributed to a module."
    return line


def kernel_rows(report: RunRecord) -> list[tuple[str, ...]]:
    """The dearest kernels: name, kind, share, calls in a step, module."""
    return [
        (each.name, each.kind.replace("_", " "), percent(each.share), number(each.calls_per_step), each.module)
        for each in report.kernels
    ]


def outlier_line(report: RunRecord) -> str | None:
    """How many steps stood out, the slowest of them, and where most of them lost their time."""
    times = report.step_times
    if not times.outliers:
        return None
    slowest = max(times.outliers, key=lambda each: each.seconds)
    (phase, _), *_ = Counter(each.phase for each in times.outliers).most_common(1)
    count = "1 step" if times.outlier_count == 1 else f"{times.outlier_count} steps"
    longest = f"the slowest, step {slowest.step}, {duration(slowest.seconds)}"
    who = "Most of them" if times.outlier_count > 1 else "It"
    return f"{count} took far longer than the rest; {longest}. {who} lost it in {phase}."


def gate_line(gate: Gate) -> str:
    """What a gate found: ``"Slower by 21 %, 5 % allowed: data_wait takes 30 ms a step, 12 ms before."``."""
    if gate.outcome == "not_judged":
        return f"Not judged: {gate.reason}."
    assert gate.slower_percent is not None
    how = "Slower" if gate.slower_percent >= 0 else "Faster"
    line = f"{how} by {abs(gate.slower_percent):.1f} %, {number(gate.allowed_percent)} % allowed"
    if gate.outcome == "passed":
        return f"{line}."
    return f"{line}: {_growth(gate)}{_median_clause(gate)}."


def _growth(gate: Gate) -> str:
    if gate.phase is None or gate.phase_after_s is None or gate.phase_before_s is None:
        return "no phase of the training process grew, the device's own work takes longer"
    return f"{gate.phase} takes {duration(gate.phase_after_s)} a step, {duration(gate.phase_before_s)} before"


def _median_clause(gate: Gate) -> str:
    median = gate.median_slower_percent
    if median is None or median > gate.allowed_percent:
        return ""
    return "; the median step is not, so few long steps make the difference"


def no_proof_line(comparison: Comparison) -> str | None:
    """Why two runs prove nothing of one another; None if they do, or where the later one has proofs of its own."""
    if comparison.proofs or (comparison.after.proofs and not comparison.differences):
        return None
    for name, run in (("earlier", comparison.before), ("later", comparison.after)):
        if run.why_not_measured:
            return f"The {name} run was not measured. {run.why_not_measured}"
    if comparison.differences:
        names = ", ".join(name.replace("_", " ") for name in comparison.differences)
        return f"The runs differ in {names}: this comparison does not verify the earlier advice."
    return "None of the settings advised before is used in the run after."


def comparison_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Two runs as (what, before, after): speed, then phases per step, after warm-up and since the last change."""
    runs = (comparison.before, comparison.after)
    before, after = (run.measured for run in runs)
    rows: list[tuple[str, ...]] = [
        ("step time", *(duration(run.step_s) if run.step_s is not None else "unknown" for run in runs)),
        ("steps per second", *(number(1 / run.step_s) if run.step_s else "unknown" for run in runs)),
    ]
    names = before.phases.keys() | after.phases.keys()
    shares = {phase: max(before.share(phase), after.share(phase)) for phase in names}
    for phase in sorted(shares, key=lambda name: (name in BETWEEN_STEPS, -shares[name], name)):
        if shares[phase] > 0:
            name = f"between steps: {phase}" if phase in BETWEEN_STEPS else phase
            rows.append((name, _phase_cell(before, phase), _phase_cell(after, phase)))
    return rows


def _phase_cell(stretch: Stretch, phase: str) -> str:
    share = percent(stretch.share(phase))
    return f"{number(stretch.step_phases_s.get(phase, 0.0) * 1e3)} ms ({share})" if stretch.steps else share


def comparison_base(comparison: Comparison) -> str:
    """Which steps of two runs their rows are of."""
    before, after = (_steps(run) for run in (comparison.before, comparison.after))
    return f"Measured: {before} before, {after} after (without warm-up, since the last change)."


def _steps(report: RunRecord) -> str:
    steps = report.measured_steps
    if report.step_s is None:
        return f"none of {report.steps} steps"
    return f"{report.steps} steps" if steps in (None, report.steps) else f"the last {steps} of {report.steps} steps"


def time_bases(report: RunRecord) -> list[tuple[str, Stretch]]:
    """What the table of phases is of: the measured steps and the whole run, or one of them where they are the same."""
    measured, whole = report.measured, report.whole
    if report.measured_steps is None or abs(measured.wall_s - whole.wall_s) <= _ADDS_UP * whole.wall_s:
        return [("the whole run", whole)]
    last = "last step" if report.measured_steps == 1 else f"last {report.measured_steps} steps"
    return [(last, measured), ("whole run", whole)]


def phase_rows(report: RunRecord) -> list[tuple[str, float, list[str]]]:
    """Each phase, the longest first: its name, its share of the first of :func:`time_bases`, and its time in each."""
    bases = [stretch for _, stretch in time_bases(report)]
    names = [name for name, seconds in report.phases.items() if seconds > 0 and report.wall_s > 0]
    return [
        (name, bases[0].share(name), [f"{duration(each.phases[name])} ({percent(each.share(name))})" for each in bases])
        for name in sorted(names, key=bases[0].share, reverse=True)
    ]
