"""Check and measure, on a machine with an NVIDIA GPU, everything this project claims about GPUs.

    python benchmarks/gpu.py [--part 1|2] [--minutes 10] [--sections SECTION ...] [--output DIR] [--full]

Two parts of about five minutes, in groups of sections (``docs/dev/gpu-run.md`` says what to expect of them, and how to
read them). Part 1, is what the code assumes true?

- ``probe``: what the machine does, whatever our code does (``benchmarks/gpu_probe.py``).
- clock, looks: what is assumed of CUDA, CUPTI, NVML and torch, each assumption by its name (``docs/limits.md``), and
  ``event_clock``: idle gaps put there on purpose, as the event clock sees them.
- callbacks: ``causes``, ``detector_idle``: StallDetector over large copies and a slow loader; ``overhead``: step times
  with the callbacks, while CUDA refuses any synchronize; ``telemetry``: NVML readings beside ``nvidia-smi``'s.

Part 2, the claims:

- ``stalls``: StallDetector against known truth. Idle time, verdicts and predicted gains under sleeps of known length,
  in plain steps and under a progress bar (``--full``: also mixed precision, torch.compile, augmentation on the GPU and
  accumulated gradients); launch-bound steps, and a line that waits for the GPU, as the looks inside the step see them.
- ``prefetch``: the share of the copies that CudaPrefetcher hides, and its host time; ``benchmarks/prefetch.py``.
- ``workers``: NumWorkersFinder behind a fast and a slow GPU.
- ``gpu_tests``: the lane of the tests that needs a GPU.
- ``demo``: ``lightning-gpuopt demo`` on the GPU: its utilization before the advice and after it.
- ``dali``: DALIDataModule over shares of the hardware JPEG decoder, beside NVIDIA's own iterator and torchcodec; and
  a network fed by it, by PIL, by LMDBDataModule and by a batch on the GPU; what is assumed of DALI and of two GPUs.

Each group has a process of its own (``benchmarks/gpu_groups.py``; simulated, all share one): an error of CUDA's that
stays, a crash or a hang costs no other group. The result is ``benchmarks/results/<gpu-name>.json``, written anew as
each section ends: GPU, driver and versions, date, the verdict on each claim, and each section's figures; a later run on
the same machine and versions adds to it. A section that is not for this machine (an optional package, a permission, a
second GPU) is under ``skipped``, one for which too little of ``--minutes`` is left under ``no_time``. One that is
stopped, or fails, keeps the figures that it had. ``--full`` runs every section at full length, in about 45 minutes.

``--simulated`` tries the benchmark itself out where there is no GPU: every section in its shortest form, on the tests'
simulated GPU or their NVML simulator (``dali``: on the CPU; ``gpu_tests``: collected only). Its result is marked as
simulated and says nothing of a GPU; without ``--output`` it goes to a new folder under the system's temporary one.

Exit code 1 if a claim does not hold; with ``--simulated``, if a section fails to run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_assumptions import EXPERIMENTS, assumption
from gpu_groups import Outcome, Reporter, run_group
from gpu_parts import ROOT, Form, OutOfTime, Skip, keep, keepers, time_limit

MINUTES = 5.0
"""For a part."""

OPTIONAL = ("h5py", "lmdb", "nvidia", "PIL", "pytest", "simplejpeg", "skimage", "timm", "torchcodec", "torchvision")
"""Top-level modules that a section may do without."""


@dataclass(frozen=True)
class Section:
    """A part of the benchmark.

    Attributes:
        run: called with whether it is simulated, and its form. It imports what it needs.
        quick_s: about how long its quick form takes, in seconds.
    """

    run: Callable[[bool, Form], Outcome]
    quick_s: float


def probe(simulated: bool, form: Form) -> Outcome:
    import gpu_probe

    return gpu_probe.probe(dry=simulated)


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


_TEST = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)")
_REASON = re.compile(r"^(?:FAILED|ERROR) (\S+::.+?) - (.+)$")


def gpu_tests(simulated: bool, form: Form) -> Outcome:
    """The tests of the lane ``gpu``, without the slowest in a short form; where there is no GPU, only collected."""
    if importlib.util.find_spec("pytest") is None:
        raise Skip("missing: pytest, of the extra [dev]")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]
    if form != "full":
        command += ["-k", "not sanitizer and not reduce_overhead and not ddp"]
    outcome: Outcome = {"passed": 0, "skipped_tests": 0, "failed": {}, "summary": "", "checks": {}}
    claim = "the tests that need a GPU are collected" if simulated else "the tests that need a GPU pass"
    command += ["--collect-only", "-q"] if simulated else []
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as tests,
        contextlib.ExitStack() as ended,
    ):
        assert tests.stdout is not None
        ended.callback(tests.kill)  # else leaving waits for it
        for line in tests.stdout:
            found = _TEST.match(line)
            outcome["summary"] = line.strip() or outcome["summary"]
            if found is not None:
                name, word = found.groups()
                outcome["passed"] += word == "PASSED"
                outcome["skipped_tests"] += word == "SKIPPED"
                if word in ("FAILED", "ERROR"):
                    outcome["failed"][name] = ""
                    outcome["checks"][claim] = False
                keep(outcome)
            reason = _REASON.match(line)
            if reason is not None:
                outcome["failed"][reason[1]] = reason[2]
        ended.pop_all()
    outcome["exit_code"] = tests.returncode
    outcome["checks"][claim] = tests.returncode == 0
    return outcome


def on_assumption(name: str) -> Callable[[bool, Form], Outcome]:
    return lambda simulated, form: assumption(name, simulated=simulated, form=form)


ASSUMPTIONS = "assumptions"
SECTIONS: dict[str, Section] = {
    "probe": Section(probe, 45.0),
    "event_clock": Section(on_callbacks("event_clock"), 10.0),
    "detector_idle": Section(on_callbacks("detector_idle"), 20.0),
    "causes": Section(on_callbacks("causes"), 10.0),
    "overhead": Section(on_callbacks("overhead"), 60.0),
    "telemetry": Section(telemetry, 25.0),
    "gpm_without_root": Section(gpm_without_root, 3.0),
    "stalls": Section(stalls, 75.0),
    "prefetch": Section(prefetch, 45.0),
    "workers": Section(on_callbacks("workers"), 15.0),
    "gpu_tests": Section(gpu_tests, 90.0),
    "demo": Section(demo, 90.0),
    "dali": Section(dali, 120.0),
    **{name: Section(on_assumption(name), each.seconds) for name, each in EXPERIMENTS.items()},
}
"""The lengths are estimates: they decide what is begun, and when one is stopped."""

GROUPS: dict[str, tuple[int, tuple[str, ...]]] = {
    "probe": (1, ("probe",)),
    "clock": (
        1,
        (
            *("event_clock", "event_stamps", "debug_mode", "trace_clock", "correlation", "wait_names"),
            *("pageable_copy", "prehooks"),
        ),
    ),
    "looks": (
        1,
        (
            *("before_cupti", "cost_after_look", "look_ahead", "short_kernels", "killed_in_look"),
            *("registered_memory", "side_stream", "neighbours", "gpm_without_root", "mig_utilization"),
        ),
    ),
    "callbacks": (1, ("causes", "detector_idle", "telemetry", "overhead")),
    "stalls": (2, ("stalls",)),
    "prefetch": (2, ("prefetch", "workers")),
    "tests": (2, ("gpu_tests",)),
    "demo": (2, ("demo",)),
    "more": (2, ("fsdp_step", "dali_depth", "dali_kept", "nvjpg_regions", "dali")),
}
"""Part and sections of each group: first what is quick, and what most rests on."""


# ---- running them ----


def environment(*, simulated: bool) -> dict[str, str]:
    versions = {}
    for package in ("torch", "lightning", "torchmetrics", "nvidia-ml-py", "lightning-gpuopt"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    name, driver = "simulated", ""
    if not simulated:  # asked of nvidia-smi: this process is not to hold a GPU beside those of the groups
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        name, driver = (
            subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].split(", ")
        )
    return {
        "gpu": name,
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "cpus": str(len(os.sched_getaffinity(0))),
        **versions,
    }


def measured(section: Section, *, simulated: bool, form: Form, limit_s: float | None) -> Outcome:
    """Run a section, whatever comes of it."""
    begin, kept = time.perf_counter(), Outcome()
    keepers.append(kept.update)
    try:
        with contextlib.nullcontext() if limit_s is None else time_limit(limit_s):
            outcome = section.run(simulated, form)
    except Skip as reason:
        outcome = {"skipped": str(reason)}
    except PermissionError as error:
        outcome = {"skipped": f"not allowed: {error}"}
    except OutOfTime as reason:
        outcome = {**kept, "stopped": str(reason)}
    except (Exception, SystemExit) as error:  # the other sections still have something to say
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if missing in OPTIONAL:
            outcome = {"skipped": f"missing: {missing}"}
        else:
            outcome = {**kept, "error": f"{type(error).__name__}: {error}"}
            outcome["traceback"] = traceback.format_exc().splitlines()[-12:]
            outcome["checks"] = {**kept.get("checks", {}), "ran": False}
    finally:
        keepers.remove(kept.update)
    outcome["seconds"] = round(time.perf_counter() - begin, 1)
    return outcome


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def print_outcome(name: str, outcome: Outcome) -> None:
    """Print a section's verdicts."""
    word = next((f"{key}: {outcome[key]}" for key in ("skipped", "no_time", "error", "stopped") if key in outcome), "")
    print(f"{name} ({outcome.get('seconds', 0.0)} s) {word}".rstrip())
    for what in ("assumed", "measured"):
        if what in outcome:
            print(f"  {what}: {outcome[what]}")
    for claim, held in outcome.get("checks", {}).items():
        print(f"  {'PASS' if held else 'FAIL'} {claim}", flush=True)


def _is_whole(outcome: Outcome) -> bool:
    """Whether a section ran, and to its end."""
    return bool(outcome.get("checks")) and not {"error", "errors", "stopped"} & outcome.keys()


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
        self.no_time: dict[str, str] = {}

    def _earlier(self) -> dict[str, Outcome]:
        try:
            earlier = json.loads(self.target.read_text())
        except (OSError, ValueError):
            return {}
        return dict(earlier["sections"]) if earlier.get("environment") == self.here else {}

    def add(self, name: str, outcome: Outcome) -> None:
        """Note a section's outcome; one that did not run does not take the place of an earlier one that did."""
        for word, named in (("skipped", self.skipped), ("no_time", self.no_time)):
            if word in outcome:
                named[name] = outcome[word]
                self.sections.setdefault(name, outcome)
                break
        else:
            before = self.sections.get(name, {})
            if _is_whole(before) and not _is_whole(outcome):
                outcome["earlier"] = before
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
            "no_time": self.no_time,
            "claims": claims,
            "sections": self.sections,
        }
        beside = self.target.with_suffix(".json.new")
        beside.write_text(json.dumps(whole, indent=2, default=str) + "\n")
        beside.replace(self.target)


def run_sections(names: list[str], reporter: Reporter, *, simulated: bool, form: Form, left_s: float | None) -> None:
    """Run these sections in this process, as many as fit."""
    end_s = None if left_s is None else time.monotonic() + left_s
    for name in names:
        section, limit_s = SECTIONS[name], None
        if end_s is not None:
            limit_s = end_s - time.monotonic()
            if limit_s < section.quick_s:
                reason = f"needs about {section.quick_s:.0f} s, {max(limit_s, 0):.0f} s are left (--minutes, --full)"
                reporter.tell("ends", name, {"no_time": reason})
                continue
            limit_s = min(limit_s, 2 * section.quick_s + 20)
        reporter.tell("begins", name, limit_s)
        keepers[:] = [partial(reporter.tell, "keeps", name)]
        reporter.tell("ends", name, measured(section, simulated=simulated, form=form, limit_s=limit_s))


def run_all(names: list[str], results: Results, arguments: argparse.Namespace, form: Form) -> None:
    """Run these sections, by groups."""
    minutes = None if arguments.full else arguments.minutes
    if minutes is None and not (arguments.full or arguments.simulated):
        minutes = MINUTES if arguments.part else 2 * MINUTES
    end_s = None if minutes is None else time.monotonic() + 60 * minutes

    def add(name: str, outcome: Outcome) -> None:
        outcome |= {"form": form, "date": now()}
        results.add(name, outcome)
        print_outcome(f"{name} (simulated)" if results.simulated else name, outcome)

    groups = [names] if results.simulated else [group for _, group in GROUPS.values()]
    for group in groups:
        chosen = [each for each in group if each in names]
        if chosen:
            command = [sys.executable, "-W", "ignore", str(Path(__file__)), "--form", form]
            command += ["--simulated"] if results.simulated else []
            command += [] if end_s is None else ["--left", str(end_s - time.monotonic())]
            run_group([*command, "--group"], chosen, add)


def chosen_sections(arguments: argparse.Namespace) -> list[str]:
    """What was asked for, in the order in which it runs."""
    asked = arguments.sections or list(SECTIONS)
    if ASSUMPTIONS in asked:
        asked = [*asked, *EXPERIMENTS]
    parts = (1, 2) if arguments.part is None else (arguments.part,)
    return [name for part, group in GROUPS.values() if part in parts for name in group if name in asked]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Check every claim about GPUs on this machine's GPU.")
    made.add_argument("--output", type=Path, help="folder of the result (default: benchmarks/results)")
    made.add_argument("--part", type=int, choices=[1, 2], help="1: is what the code assumes true? 2: the claims")
    made.add_argument(
        "--sections", "--only", nargs="+", choices=[*SECTIONS, ASSUMPTIONS], help="sections to run (default: all)"
    )
    made.add_argument("--minutes", type=float, help=f"take no longer in all (default: {MINUTES:g} a part)")
    made.add_argument("--full", action="store_true", help="every set-up, without a limit: about 45 minutes")
    made.add_argument("--simulated", action="store_true", help="try the benchmark out on the tests' simulators")
    for name, more in (("--group", {"nargs": "+"}), ("--form", {}), ("--left", {"type": float})):
        made.add_argument(name, help=argparse.SUPPRESS, **more)  # of a group's process
    return made


def main() -> int:
    arguments = parser().parse_args()
    simulated = arguments.simulated
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if arguments.group:
        fd, *names = arguments.group
        reporter = Reporter(int(fd))
        run_sections(names, reporter, simulated=simulated, form=arguments.form, left_s=arguments.left)
        return 0
    if not simulated and not torch.cuda.is_available():
        print("benchmarks/gpu.py: expected a CUDA GPU and a CUDA build of torch, found none", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *of_signal: sys.exit(143))  # so that no group's process is left
    here = environment(simulated=simulated)
    name = re.sub(r"[^a-z0-9]+", "-", here["gpu"].lower()).strip("-")
    folder = arguments.output
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="gpuopt-simulated-")) if simulated else ROOT / "benchmarks" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    if simulated:
        print("simulated: these figures are of a simulated GPU, and say nothing of a real one", flush=True)
    print(", ".join(f"{what} {value}" for what, value in here.items() if value), flush=True)
    results = Results(folder / f"{name}.json", here, simulated=simulated)
    chosen = chosen_sections(arguments)
    run_all(chosen, results, arguments, "full" if arguments.full else "trial" if simulated else "quick")
    print(f"written to {results.target}")
    if simulated:
        return 1 if any({"error", "errors"} & results.sections[each].keys() for each in chosen) else 0
    failed = [each for each in results.claims if each["section"] in chosen and not each["holds"]]
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
