"""Check and measure, on a machine with an NVIDIA GPU, everything this project claims about GPUs.

    python benchmarks/gpu.py [--sections SECTION ...] [--output DIR] [--quick]

Sections:

- ``telemetry``, ``gpm_without_root``: NVML and GPM readings beside ``nvidia-smi``'s.
- ``event_clock``: idle gaps put there on purpose, as the event clock sees them.
- ``detector_idle``, ``causes``: StallDetector over a slow loader and large copies.
- ``overhead``: step times with the callbacks, while CUDA refuses any synchronize.
- ``workers``: NumWorkersFinder behind a fast and a slow GPU.
- ``stalls``: StallDetector against known truth. Idle time, verdicts and predicted gains under sleeps of known length,
  in plain steps and under a progress bar, mixed precision, torch.compile, augmentation on the GPU and accumulated
  gradients; launch-bound steps, and a line that waits for the GPU, as the looks inside the step see them.
- ``prefetch``: the share of the copies that CudaPrefetcher hides, and its host time; ``benchmarks/prefetch.py``.
- ``dali``: DALIDataModule over shares of the hardware JPEG decoder, beside NVIDIA's own iterator and torchcodec; and
  ResNet-50 fed by it, by PIL, by LMDBDataModule and by a batch on the GPU.

Each section writes its figures into ``benchmarks/results/gpu-<name>.json`` as it ends, with a verdict for each claim; a
section whose package is missing is skipped with a word. All of them take about 40 minutes.

``--simulated`` runs section ``stalls``, or ``prefetch`` if ``--sections`` names it, on the tests' simulated GPU, to try
the benchmark out where there is no GPU. Nothing is written then.

Exit code 1 if a claim does not hold.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_parts import ROOT, Skip


def telemetry() -> dict[str, Any]:
    import gpu_telemetry

    return gpu_telemetry.telemetry()


def gpm_without_root() -> dict[str, Any]:
    import gpu_telemetry

    return gpu_telemetry.gpm_without_root()


def on_callbacks(name: str) -> dict[str, Any]:
    import gpu_callbacks

    outcome: dict[str, Any] = getattr(gpu_callbacks, name)()
    return outcome


def stalls(*, simulated: bool, quick: bool) -> dict[str, Any]:
    import gpu_stalls

    return gpu_stalls.stalls(simulated=simulated, quick=quick)


def prefetch(*, simulated: bool, quick: bool) -> dict[str, Any]:
    import gpu_prefetch

    return gpu_prefetch.prefetch(simulated=simulated, quick=quick)


def dali(*, quick: bool) -> dict[str, Any]:
    import gpu_dali

    return gpu_dali.dali(quick=quick)


def sections(*, simulated: bool, quick: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    return {
        "telemetry": telemetry,
        "gpm_without_root": gpm_without_root,
        **{name: partial(on_callbacks, name) for name in ("event_clock", "detector_idle", "causes", "overhead")},
        "workers": partial(on_callbacks, "workers"),
        "stalls": partial(stalls, simulated=simulated, quick=quick),
        "prefetch": partial(prefetch, simulated=simulated, quick=quick),
        "dali": partial(dali, quick=quick),
    }


def environment() -> dict[str, str]:
    versions = {}
    for package in ("torch", "lightning", "torchmetrics", "nvidia-ml-py", "lightning-gpuopt"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    driver = ""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    return {
        "gpu": torch.cuda.get_device_name(0),
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "cpus": str(len(os.sched_getaffinity(0))),
        **versions,
    }


def measured(section: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a section, whatever comes of it."""
    begin = time.perf_counter()
    try:
        outcome = section()
    except Skip as reason:
        outcome = {"skipped": str(reason)}
    except ImportError as error:
        outcome = {"skipped": f"missing: {error.name}"}
    except Exception as error:  # the other sections still have something to say
        outcome = {"error": f"{type(error).__name__}: {error}", "checks": {"ran": False}}
    outcome["seconds"] = round(time.perf_counter() - begin, 1)
    return outcome


def print_outcome(section: str, outcome: dict[str, Any]) -> int:
    """Print a section's verdicts; returns how many claims do not hold."""
    print(f"{section} ({outcome['seconds']} s) {outcome.get('skipped') or outcome.get('error') or ''}".rstrip())
    for claim, held in outcome.get("checks", {}).items():
        print(f"  {'PASS' if held else 'FAIL'} {claim}", flush=True)
    return sum(not held for held in outcome.get("checks", {}).values())


def earlier_sections(target: Path, here: dict[str, str]) -> dict[str, Any]:
    """What other runs on the same machine, with the same versions, have found."""
    try:
        earlier = json.loads(target.read_text())
    except (OSError, ValueError):
        return {}
    return dict(earlier["sections"]) if earlier.get("environment") == here else {}


def main() -> int:
    names = list(sections(simulated=False, quick=False))
    parser = argparse.ArgumentParser(description="Check every claim about GPUs on this machine's GPU.")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the result")
    parser.add_argument("--sections", "--only", nargs="+", choices=names, help="sections to run (default: all)")
    parser.add_argument("--quick", action="store_true", help="stalls, prefetch, dali: fewer set-ups, shorter runs")
    parser.add_argument("--simulated", action="store_true", help="stalls, prefetch: a simulated GPU; writes nothing")
    arguments = parser.parse_args()
    made = sections(simulated=arguments.simulated, quick=arguments.quick)
    if arguments.simulated:
        chosen = arguments.sections or ["stalls"]
        if not {"stalls", "prefetch"}.issuperset(chosen):
            parser.error("--simulated: expected --sections stalls or prefetch, the only ones that a simulated GPU has")
        print("simulated: these figures are of a simulated GPU, and say nothing of a real one", flush=True)
        return 1 if sum(print_outcome(f"{section} (simulated)", measured(made[section])) for section in chosen) else 0
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py: expected a CUDA GPU and a CUDA build of torch, found none", file=sys.stderr)
        return 2
    here = environment()
    name = re.sub(r"[^a-z0-9]+", "-", here["gpu"].lower()).strip("-")
    target = arguments.output / f"gpu-{name}.json"
    arguments.output.mkdir(parents=True, exist_ok=True)
    print(", ".join(f"{what} {value}" for what, value in here.items()), flush=True)
    results: dict[str, Any] = {"environment": here, "sections": earlier_sections(target, here)}
    failed = 0
    for section in arguments.sections or names:
        outcome = measured(made[section])
        results["sections"][section] = outcome
        target.write_text(json.dumps(results, indent=2, default=str) + "\n")
        failed += print_outcome(section, outcome)
    print(f"written to {target}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
