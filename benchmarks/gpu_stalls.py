"""Section ``stalls`` of ``benchmarks/gpu.py``: StallDetector against known truth, in short training runs on a GPU.

What a sleep costs is the difference of two runs' wall clocks, with it and without it, each from a drained GPU to a
drained GPU. What a launch-bound step's kernels take is that by torch.profiler's records.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from gpu_devices import Device, a_device
from gpu_parts import Form, Skip, keep
from gpu_stall_runs import CONDITIONS, FAULTS, Outcome, Setup, line_of_the_wait, profiled, run

IDLE_SHARE, IDLE_MS = 0.05, 1.0
CAUSE_SHARE, CAUSE_MS = 0.1, 2.0
"""Beside a sleep the host's other work is exposed as well, which is no part of that cause."""

CLOSE = 0.15
INSIDE_SHARE = 0.08
BUSY_SHARE = 0.1
LOOK_COST = 0.05
MAX_BUSY = 0.6

VERDICTS = {
    "": "compute_bound",
    "fetch": "main_process_loading",
    "on_train_batch_start": "callback",
    "on_train_batch_end": "callback",
    "logger": "logging",
    "on_after_batch_transfer": "callback",
}

_LOOK_NOTE = re.compile(
    r"recorded (?P<steps>\d+) steps, which took (?P<took_s>[\d.]+) s: (?P<before_ms>[\d.]+) ms a step before it, "
    r"(?P<after_ms>[\d.]+) ms after it"
)

_LOOK_TOOK = re.compile(r"torch\.profiler recorded \d+ steps, which took ([\d.]+) s")


def stalls(*, simulated: bool = False, form: Form = "full") -> dict[str, Any]:
    """All set-ups.

    Args:
        simulated: on the tests' simulated GPU: tries the benchmark out, and says nothing of a GPU.
        form: ``"quick"``: two conditions, fewer steps, shorter runs; ``"trial"``: one condition, two faults.
    """
    with a_device(simulated=simulated) as device:
        return Section(device, form).run()


def close(seen_ms: float, true_ms: float) -> bool:
    """Within 5 %, or 1 ms a step."""
    return abs(seen_ms - true_ms) <= max(IDLE_SHARE * true_ms, IDLE_MS)


class Section:
    """Runs the set-ups, and holds the detector against the truth.

    Args:
        device: where.
        form: as for `stalls`.
    """

    def __init__(self, device: Device, form: Form) -> None:
        self.device, self.quick, self.trial = device, form != "full", form == "trial"
        self.conditions = {"full": CONDITIONS, "quick": ("plain", "bar"), "trial": ("plain",)}[form]
        self.faults = ("fetch", "on_train_batch_end") if self.trial else FAULTS
        self.result: dict[str, Any] = {"runs": {}, "inside": {}, "left_out": {}, "checks": {}}
        self.base = Setup(steps=24, warmup=6) if self.quick else Setup()
        self.sleep_ms = 2 * self.base.work_ms
        self.launch_bound: Outcome | None = None

    def run(self) -> dict[str, Any]:
        """Everything."""
        run(self.device, self.base)  # what the first run of a process loads and compiles
        for condition in self.conditions:
            self._part(condition, lambda condition=condition: self._condition(condition))  # type: ignore[misc]
        self._part("ranks", self._ranks)
        for inside in ("launch_bound", "gpu_sync"):  # the first look's cost is the whole one
            self._part(inside, lambda inside=inside: self._inside(inside))  # type: ignore[misc]
        self._part("kernel records", self._launch_bound_records)  # a look refuses to run beside another's profiler
        return self.result

    def _part(self, name: str, part: Callable[[], None]) -> None:
        begin_s = time.perf_counter()
        try:
            part()
        except Skip as reason:
            self.result["left_out"][name] = str(reason)
            print(f"  {name}: skipped, {reason}", flush=True)
        except Exception as error:  # the other parts still have something to say
            self.result.setdefault("errors", {})[name] = f"{type(error).__name__}: {error}"
            self.result["checks"][f"{name}: ran ({type(error).__name__}: {error})"] = False
        else:
            print(f"  {name}: {time.perf_counter() - begin_s:.0f} s", flush=True)
        keep(self.result)

    def _check(self, claim: str, held: bool) -> None:
        self.result["checks"][claim] = held

    def _ranks(self) -> None:
        raise Skip(f"two ranks on {torch.cuda.device_count()} GPU(s): this section runs on one")

    # ---- sleeps of known length, between the steps ----

    def _condition(self, condition: str) -> None:
        setup = replace(self.base, condition=condition)
        healthy = run(self.device, setup)
        busy_ms = setup.work_ms + (setup.augment_ms if condition == "augmentation" else 0.0)
        self._record(healthy, max(healthy.step_ms - busy_ms, 0.0), healthy.idle_ms)
        self._check(f"{setup.name}: verdict compute_bound", healthy.report.verdict == "compute_bound")
        hidden = replace(setup, fault="on_train_batch_end", sleep_ms=setup.work_ms / 2)
        if condition == "plain":
            self._judge(run(self.device, hidden), healthy, verdict="compute_bound")
        for fault in self.faults:
            base = healthy
            if fault == "logger":  # what it costs to log at all is no part of the sleep
                base = run(self.device, replace(setup, fault=fault))
            outcome = run(self.device, replace(setup, fault=fault, sleep_ms=self.sleep_ms))
            self._judge(outcome, base)

    def _judge(self, outcome: Outcome, base: Outcome, verdict: str | None = None) -> None:
        setup, report = outcome.setup, outcome.report
        expected = verdict or VERDICTS[setup.fault]
        true_ms, seen_ms = outcome.step_ms - base.step_ms, outcome.idle_ms - base.idle_ms
        entry = self._record(outcome, true_ms, seen_ms)
        right = report.verdict == expected
        if right and expected == "callback":
            right = report.findings[0].evidence.get("hook") == setup.fault
        self._check(f"{setup.name}: verdict {expected}", right)
        if expected == "compute_bound" or not right:
            return
        cause_ms = outcome.cause_ms(expected)
        looks = (_LOOK_TOOK.search(note) for note in report.notes)
        look_ms = sum(float(found[1]) for found in looks if found) / setup.steps * 1e3  # is no part of the cause
        entry |= {"cause_ms": round(cause_ms, 3), "look_ms": round(look_ms, 3)}
        true_ms -= look_ms
        claim = f"{setup.name}: {cause_ms:.2f} ms a step of this cause, {true_ms:.2f} ms of idle time in truth"
        self._check(claim, abs(cause_ms - true_ms) <= max(CAUSE_SHARE * true_ms, CAUSE_MS))
        self._judge_prediction(outcome, base, entry)

    def _record(self, outcome: Outcome, true_ms: float, seen_ms: float) -> dict[str, Any]:
        """Note a run, and whether its idle time is right."""
        report, name = outcome.report, outcome.setup.name
        entry: dict[str, Any] = {
            "step_ms": round(outcome.step_ms, 3),
            "idle_ms": round(outcome.idle_ms, 3),
            "true_idle_ms": round(true_ms, 3),
            "idle_error_ms": round(seen_ms - true_ms, 3),
            "idle_ratio": round(seen_ms / true_ms, 4) if true_ms > IDLE_MS else None,
            "verdict": report.verdict,
            "findings": {each.cause: round(each.share, 4) for each in report.findings},
            "evidence": report.findings[0].evidence if report.findings else {},
            "notes": report.notes,
        }
        self.result["runs"][name] = entry
        keep(self.result)
        self._check(f"{name}: idle {seen_ms:.2f} ms a step, {true_ms:.2f} in truth", close(seen_ms, true_ms))
        return entry

    def _judge_prediction(self, outcome: Outcome, base: Outcome, entry: dict[str, Any]) -> None:
        """Follow the advice, and compare."""
        setup, finding = outcome.setup, outcome.report.findings[0]
        if finding.predicted_speedup is None:
            self._check(f"{setup.name}: a gain is predicted", False)
            return
        if finding.settings:
            base = run(self.device, replace(setup, loader=finding.settings))
        low, mid, high = finding.predicted_speedup
        measured = outcome.step_ms / base.step_ms
        entry |= {"settings": finding.settings, "predicted": [low, mid, high], "measured": round(measured, 3)}
        text = f"{setup.name}: gain {mid:.2f} ({low:.2f}-{high:.2f}) predicted, {measured:.2f} measured"
        self._check(f"{text}, within {CLOSE:.0%}", abs(mid - measured) <= CLOSE * measured)
        self._check(f"{text}, inside the interval", low <= measured <= high)

    # ---- inside the step ----

    def _inside(self, inside: str) -> None:
        """A run that is long enough for the looks, which need 5 s of NVML's readings."""
        work_ms = 10.0 if inside == "launch_bound" else 12.0
        step_ms = work_ms if inside == "launch_bound" else 4 * work_ms / 3
        seconds = 7.0 if self.trial else 8.0 if self.quick else 12.0
        setup = Setup(inside=inside, work_ms=work_ms, warmup=10, steps=round(seconds * 1e3 / step_ms))
        outcome = run(self.device, setup)
        report = outcome.report
        evidence = next((each.evidence for each in report.findings if each.cause == inside), {})
        looked = next((found for note in report.notes if (found := _LOOK_NOTE.search(note))), None)
        entry: dict[str, Any] = {
            "step_ms": round(outcome.step_ms, 3),
            "first_steps_ms": round(outcome.first_ms, 3),
            "last_steps_ms": round(outcome.last_ms, 3),
            "verdict": report.verdict,
            "findings": {each.cause: round(each.share, 4) for each in report.findings},
            "evidence": evidence,
            "notes": report.notes,
            "look": {name: float(value) for name, value in looked.groupdict().items()} if looked else None,
        }
        self.result["inside"][inside] = entry
        self._check(f"{inside}: verdict", report.verdict == inside)
        self._check(f"{inside}: torch.profiler looked at it", looked is not None)
        self._check(f"{inside}: no profiler is left on", not outcome.profiler_left_on)
        self._check(f"{inside}: the synchronization debug mode is off", torch.cuda.get_sync_debug_mode() == 0)
        before_ms, after_ms = outcome.first_ms, outcome.last_ms
        claim = f"{inside}: {before_ms:.2f} ms a step before the look, {after_ms:.2f} after it"
        self._check(f"{claim}: at most {LOOK_COST:.0%} more", after_ms <= before_ms * (1 + LOOK_COST))
        if inside == "gpu_sync":
            where = str(evidence.get("where", ""))
            expected = f"gpu_stall_runs.py:{line_of_the_wait()}"
            self._check(f"gpu_sync: names {expected} (it says {where or 'nothing'})", expected in where)
        else:
            self.launch_bound = outcome

    def _launch_bound_records(self) -> None:
        """Busy time of the same steps by kernel records; recording slows the host, and so only that is compared."""
        outcome = self.launch_bound
        if outcome is None:
            raise Skip("the run itself failed")
        entry = self.result["inside"]["launch_bound"]
        seen = profiled(self.device, replace(outcome.setup, steps=20)).busy_and_idle_ms(marked=False)
        if seen is None:
            raise Skip("torch.profiler recorded no kernels here")
        true_ms = seen[0]
        entry["busy_ms_by_records"] = round(true_ms, 3)
        share = true_ms / outcome.step_ms
        self._check(f"launch_bound: the GPU works for {share:.2f} of a step (needs < {MAX_BUSY})", share < MAX_BUSY)
        told_ms = float(entry["evidence"].get("busy_ms_per_step", 0.0))
        claim = f"launch_bound: busy {told_ms:.2f} ms a step, {true_ms:.2f} by kernel records"
        self._check(claim, abs(told_ms - true_ms) <= BUSY_SHARE * true_ms)
        told = outcome.idle_ms / outcome.step_ms
        claim = f"launch_bound: idle for {told:.2f} of the time, {1 - share:.2f} by kernel records"
        self._check(claim, abs(told - (1 - share)) <= INSIDE_SHARE)
