"""Check and measure, on a machine with an NVIDIA GPU, everything this project claims about GPUs.

    python benchmarks/gpu.py [--minutes 9] [--sections SECTION ...] [--output DIR] [--full]

Sections, in the order in which they run:

- ``demo``: ``lightning-gpuopt demo`` on the GPU: its utilization before the advice and after it.
- ``event_clock``: idle gaps put there on purpose, as the event clock sees them.
- ``detector_idle``, ``causes``: StallDetector over a slow loader and large copies.
- ``overhead``: step times with the callbacks, while CUDA refuses any synchronize.
- ``telemetry``, ``gpm_without_root``: NVML and GPM readings beside ``nvidia-smi``'s.
- ``stalls``: StallDetector against known truth. Idle time, verdicts and predicted gains under sleeps of known length,
  in plain steps and under a progress bar (``--full``: also mixed precision, torch.compile, augmentation on the GPU and
  accumulated gradients); launch-bound steps, and a line that waits for the GPU, as the looks inside the step see them.
- ``prefetch``: the share of the copies that CudaPrefetcher hides, and its host time; ``benchmarks/prefetch.py``.
- ``workers``: NumWorkersFinder behind a fast and a slow GPU.
- ``dali``: DALIDataModule over shares of the hardware JPEG decoder, beside NVIDIA's own iterator and torchcodec; and
  a network fed by it, by PIL, by LMDBDataModule and by a batch on the GPU.
- ``gpu_tests``: the lane of the tests that needs a GPU.
- what is assumed of a real GPU, each assumption by its name (``docs/limits.md``): ``--only assumptions`` runs all of
  them, in about 6 minutes.

The result is ``benchmarks/results/<gpu-name>.json``, written anew as each section ends: GPU, driver and versions, date,
the verdict on each claim, and each section's figures. A section whose package or permission is missing, or for which
too little of ``--minutes`` is left, is skipped with a word, and listed with it; one that takes longer than what is left
is stopped. ``--full`` runs every section at full length, about 45 minutes, without a limit.

``--simulated`` tries the benchmark itself out where there is no GPU: every section in its shortest form, on the tests'
simulated GPU or their NVML simulator (``dali``: on the CPU; ``gpu_tests``: collected only). Its result is marked as
simulated and says nothing of a GPU; without ``--output`` it goes to a new folder under the system's temporary one.

Exit code 1 if a claim does not hold; with ``--simulated``, if a section fails to run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_assumptions import EXPERIMENTS, assumption
from gpu_parts import ROOT, Form, OutOfTime, Skip, time_limit

MINUTES = 9.0
Outcome = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """A part of the benchmark.

    Attributes:
        run: called with whether it is simulated, and its form. It imports what it needs.
        quick_s: about how long its quick form takes, in seconds.
    """

    run: Callable[[bool, Form], Outcome]
    quick_s: float


def telemetry(simulated: bool, form: Form) -> Outcome:
    import gpu_telemetry

    return gpu_telemetry.simulated_telemetry() if simulated else gpu_telemetry.telemetry(form)


def gpm_without_root(simulated: bool, form: Form) -> Outcome:
    import gpu_telemetry

    return gpu_telemetry.gpm_without_root(simulated=simulated)


def on_callbacks(name: str) -> Callable[[bool, Form], Outcome]:
    def run(simulated: bool, form: Form) -> Outcome:
        import gpu_callbacks
        from gpu_devices import a_device

        with a_device(simulated=simulated) as device:
            outcome: Outcome = getattr(gpu_callbacks, name)(device, form)
        return outcome

    return run


def demo(simulated: bool, form: Form) -> Outcome:
    import gpu_demo

    return gpu_demo.demo(simulated=simulated, form=form)


def stalls(simulated: bool, form: Form) -> Outcome:
    import gpu_stalls

    return gpu_stalls.stalls(simulated=simulated, form=form)


def prefetch(simulated: bool, form: Form) -> Outcome:
    import gpu_prefetch

    return gpu_prefetch.prefetch(simulated=simulated, form=form)


def dali(simulated: bool, form: Form) -> Outcome:
    import gpu_dali

    device = "cpu" if simulated else "cuda"
    return gpu_dali.dali(quick=form != "full", device=device, trial=simulated or form == "trial")


def gpu_tests(simulated: bool, form: Form) -> Outcome:
    """The tests of the lane ``gpu``; where there is no GPU they are only collected."""
    if importlib.util.find_spec("pytest") is None:
        raise Skip("missing: pytest, of the extra [dev]")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]
    done = subprocess.run(
        [*command, *(["--collect-only"] if simulated else [])], capture_output=True, text=True, check=False, cwd=ROOT
    )
    lines = done.stdout.strip().splitlines()
    outcome: Outcome = {"exit_code": done.returncode, "summary": lines[-1] if lines else "", "checks": {}}
    outcome["failed"] = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    claim = "the tests that need a GPU are collected" if simulated else "the tests that need a GPU pass"
    outcome["checks"][claim] = done.returncode == 0
    return outcome


def on_assumption(name: str) -> Callable[[bool, Form], Outcome]:
    return lambda simulated, form: assumption(name, simulated=simulated, form=form)


ASSUMPTIONS = "assumptions"
SECTIONS: dict[str, Section] = {
    "demo": Section(demo, 90.0),
    "event_clock": Section(on_callbacks("event_clock"), 10.0),
    "detector_idle": Section(on_callbacks("detector_idle"), 20.0),
    "causes": Section(on_callbacks("causes"), 10.0),
    "overhead": Section(on_callbacks("overhead"), 35.0),
    "telemetry": Section(telemetry, 25.0),
    "gpm_without_root": Section(gpm_without_root, 3.0),
    "stalls": Section(stalls, 75.0),
    "prefetch": Section(prefetch, 60.0),
    "workers": Section(on_callbacks("workers"), 20.0),
    "dali": Section(dali, 120.0),
    "gpu_tests": Section(gpu_tests, 60.0),
    **{name: Section(on_assumption(name), each.seconds) for name, each in EXPERIMENTS.items()},
}
"""By importance; the lengths are estimates, and decide only what is begun."""


# ---- running them ----


def environment(*, simulated: bool) -> dict[str, str]:
    versions = {}
    for package in ("torch", "lightning", "torchmetrics", "nvidia-ml-py", "lightning-gpuopt"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    driver = ""
    if shutil.which("nvidia-smi") and not simulated:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    return {
        "gpu": "simulated" if simulated else torch.cuda.get_device_name(0),
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "cpus": str(len(os.sched_getaffinity(0))),
        **versions,
    }


def measured(section: Section, *, simulated: bool, form: Form, limit_s: float | None) -> Outcome:
    """Run a section, whatever comes of it."""
    begin = time.perf_counter()
    try:
        if limit_s is None:
            outcome = section.run(simulated, form)
        else:
            with time_limit(limit_s):
                outcome = section.run(simulated, form)
    except Skip as reason:
        outcome = {"skipped": str(reason)}
    except ImportError as error:
        outcome = {"skipped": f"missing: {error.name or error}"}
    except PermissionError as error:
        outcome = {"skipped": f"not allowed: {error}"}
    except OutOfTime as reason:
        outcome = {"skipped": f"{reason}: the time was over"}
    except (Exception, SystemExit) as error:  # the other sections still have something to say
        outcome = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc().splitlines()[-12:]}
        outcome["checks"] = {"ran": False}
    outcome["seconds"] = round(time.perf_counter() - begin, 1)
    outcome["form"] = form
    outcome["date"] = now()
    return outcome


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def print_outcome(name: str, outcome: Outcome) -> None:
    """Print a section's verdicts."""
    word = next((f"{key}: {outcome[key]}" for key in ("skipped", "error", "stopped") if key in outcome), "")
    print(f"{name} ({outcome.get('seconds', 0.0)} s) {word}".rstrip())
    for what in ("assumed", "measured"):
        if what in outcome:
            print(f"  {what}: {outcome[what]}")
    for claim, held in outcome.get("checks", {}).items():
        print(f"  {'PASS' if held else 'FAIL'} {claim}", flush=True)


class Results:
    """The file: what has been found so far, with what other runs on the same machine and versions have found.

    Args:
        target: where it is.
        here: the environment.
        simulated: marks it.
    """

    def __init__(self, target: Path, here: dict[str, str], *, simulated: bool) -> None:
        self.target, self.here, self.simulated = target, here, simulated
        self.sections: dict[str, Outcome] = self._earlier()
        self.skipped: dict[str, str] = {}

    def _earlier(self) -> dict[str, Outcome]:
        try:
            earlier = json.loads(self.target.read_text())
        except (OSError, ValueError):
            return {}
        return dict(earlier["sections"]) if earlier.get("environment") == self.here else {}

    def add(self, name: str, outcome: Outcome) -> None:
        """Note a section's outcome; one that was skipped does not take the place of an earlier one that ran."""
        if "skipped" in outcome:
            self.skipped[name] = outcome["skipped"]
            self.sections.setdefault(name, outcome)
        else:
            self.sections[name] = outcome
        self.write()

    @property
    def claims(self) -> list[dict[str, Any]]:
        """The verdict on each claim."""
        return [
            {"section": name, "claim": claim, "holds": held, "form": outcome["form"]}
            for name, outcome in self.sections.items()
            for claim, held in outcome.get("checks", {}).items()
        ]

    def write(self) -> None:
        """Replace the file in one go: a run that is killed leaves the one before."""
        claims = self.claims
        whole = {
            "gpu": self.here["gpu"],
            "simulated": self.simulated,
            "date": now(),
            "environment": self.here,
            "claims_held": sum(each["holds"] for each in claims),
            "claims_failed": sum(not each["holds"] for each in claims),
            "skipped": self.skipped,
            "claims": claims,
            "sections": self.sections,
        }
        beside = self.target.with_suffix(".json.new")
        beside.write_text(json.dumps(whole, indent=2, default=str) + "\n")
        beside.replace(self.target)


def run_all(names: list[str], results: Results, *, form: Form, minutes: float | None) -> None:
    """Run these sections, as many as fit."""
    end = None if minutes is None else time.monotonic() + 60 * minutes
    for name in names:
        section = SECTIONS[name]
        left_s = None if end is None else end - time.monotonic()
        if left_s is not None and left_s < section.quick_s:
            reason = f"needs about {section.quick_s:.0f} s, {max(left_s, 0):.0f} s are left (--minutes, --full)"
            outcome: Outcome = {"skipped": reason, "form": form, "date": now()}
        else:
            outcome = measured(section, simulated=results.simulated, form=form, limit_s=left_s)
        results.add(name, outcome)
        print_outcome(f"{name} (simulated)" if results.simulated else name, outcome)


def main() -> int:
    parser = argparse.ArgumentParser(description="Check every claim about GPUs on this machine's GPU.")
    parser.add_argument("--output", type=Path, help="folder of the result (default: benchmarks/results)")
    parser.add_argument(
        "--sections", "--only", nargs="+", choices=[*SECTIONS, ASSUMPTIONS], help="sections to run (default: all)"
    )
    parser.add_argument("--minutes", type=float, help=f"take no longer in all (default: {MINUTES:g})")
    parser.add_argument("--full", action="store_true", help="every set-up, without a limit: about 45 minutes")
    parser.add_argument("--simulated", action="store_true", help="try the benchmark out on the tests' simulators")
    arguments = parser.parse_args()
    simulated = arguments.simulated
    if not simulated and not torch.cuda.is_available():
        print("benchmarks/gpu.py: expected a CUDA GPU and a CUDA build of torch, found none", file=sys.stderr)
        return 2
    here = environment(simulated=simulated)
    name = re.sub(r"[^a-z0-9]+", "-", here["gpu"].lower()).strip("-")
    folder = arguments.output
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="gpuopt-simulated-")) if simulated else ROOT / "benchmarks" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if simulated:
        print("simulated: these figures are of a simulated GPU, and say nothing of a real one", flush=True)
    print(", ".join(f"{what} {value}" for what, value in here.items() if value), flush=True)
    results = Results(folder / f"{name}.json", here, simulated=simulated)
    form: Form = "full" if arguments.full else "trial" if simulated else "quick"
    chosen = arguments.sections or list(SECTIONS)
    if ASSUMPTIONS in chosen:
        chosen = [*(each for each in chosen if each != ASSUMPTIONS), *EXPERIMENTS]
    minutes = arguments.minutes if arguments.full or simulated or arguments.minutes is not None else MINUTES
    run_all(chosen, results, form=form, minutes=minutes)
    print(f"written to {results.target}")
    if simulated:
        return 1 if any({"error", "errors"} & results.sections[each].keys() for each in chosen) else 0
    failed = [each for each in results.claims if each["section"] in chosen and not each["holds"]]
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
