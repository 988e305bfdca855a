"""Sections of ``benchmarks/gpu.py``: one for each assumption about a real GPU in ``docs/limits.md``.

    python benchmarks/gpu.py --only assumptions      (or one by its name: --only trace_clock)

Each takes a minute at most, and says what is assumed, what was measured, and whether it held. None changes a setting of
the card. What needs several GPUs, DALI, NVJPG or MIG is skipped where that is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_assumed_records as records
import gpu_assumed_runs as runs
from gpu_assumed_records import Found
from gpu_devices import Device, a_device
from gpu_parts import Form, Skip

MOST_S = 60.0


@dataclass(frozen=True)
class Experiment:
    """An assumption, and what tells whether it holds.

    Attributes:
        run: the experiment.
        assumed: what is assumed.
        seconds: about how long it takes.
        alone: in a process of its own, in which CUPTI was not used before, or which starts ranks.
    """

    run: Callable[[Device, Form], Found]
    assumed: str
    seconds: float = 10.0
    alone: bool = False


EXPERIMENTS: dict[str, Experiment] = {
    "event_stamps": Experiment(
        records.event_stamps, "An event is stamped when its stream gets there; on a drained stream when it is recorded."
    ),
    "trace_clock": Experiment(
        records.trace_clock, "A trace's ts + baseTimeNanoseconds is the clock of time.time_ns, to 20 us."
    ),
    "correlation": Experiment(
        records.correlation, "A kernel or copy, and the call that issued it, carry one correlation of their own."
    ),
    "pageable_copy": Experiment(
        records.pageable_copy,
        "A copy to pageable memory blocks inside cudaMemcpyAsync, whose record ends with the copy's.",
    ),
    "before_cupti": Experiment(
        records.before_cupti, "Kernels launched before CUPTI was attached have no record.", 20.0, alone=True
    ),
    "debug_mode": Experiment(
        records.debug_mode,
        "torch's debug mode warns once of .item(), as that returns, and not of torch.cuda.synchronize(); the last call "
        "that a profile function heard of before the warning was .item()'s.",
    ),
    "wait_names": Experiment(
        records.wait_names, "Calls in which the host waits are named cuda*Synchronize, or are copies that block."
    ),
    "prehooks": Experiment(records.prehooks, "A node's prehook runs right before the node's kernels are launched."),
    "short_kernels": Experiment(
        records.short_kernels,
        "CUPTI sees kernels of 5 us every 10 us and the gaps between them; NVML, which may not, errs upwards.",
        20.0,
    ),
    "look_ahead": Experiment(
        runs.look_ahead, "A look finds its steps although the host is five steps ahead of the GPU.", 15.0
    ),
    "cost_after_look": Experiment(
        runs.cost_after_look, "After a look, with CUPTI attached, the run is at most 20 % slower.", 20.0, alone=True
    ),
    "fsdp_step": Experiment(
        runs.fsdp_step, "A step under FSDP is as long by the event clock as by CUPTI.", 45.0, alone=True
    ),
    "killed_in_look": Experiment(
        runs.killed_in_look, "A process that is killed while it records leaves CUPTI usable for others.", 30.0
    ),
    "side_stream": Experiment(
        runs.side_stream, "A prefetched batch stays whole until the compute stream has waited for its readers.", 15.0
    ),
    "registered_memory": Experiment(
        runs.registered_memory, "Batches in registered files in memory are page-locked, and free after their copies."
    ),
    "neighbours": Experiment(
        runs.neighbours, "nvmlDeviceGetComputeRunningProcesses lists other processes, by their numbers here.", 15.0
    ),
    "mig_utilization": Experiment(runs.mig_utilization, "NVML gives no utilization under MIG.", 3.0),
    "dali_depth": Experiment(runs.dali_depth, "prefetch_queue_depth=1 is as fast as 2 or 3.", 45.0),
    "dali_kept": Experiment(runs.dali_kept, "DALI has read a batch's bytes when two more have come out.", 40.0),
    "nvjpg_regions": Experiment(runs.nvjpg_regions, "NVJPG decodes where only regions are wanted.", 45.0),
}


def assumption(name: str, *, simulated: bool, form: Form) -> dict[str, Any]:
    """A section: run one of the experiments.

    Raises:
        Skip: it is not for this machine.
    """
    experiment = EXPERIMENTS[name]
    if experiment.alone:
        return _alone(name, simulated=simulated, form=form)
    with a_device(simulated=simulated) as device:
        return on_device(name, device, form)


def on_device(name: str, device: Device, form: Form) -> dict[str, Any]:
    """Run one of the experiments here."""
    measured, checks = EXPERIMENTS[name].run(device, form)
    return {"assumed": EXPERIMENTS[name].assumed, "measured": measured, "checks": checks}


def _alone(name: str, *, simulated: bool, form: Form) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", str(Path(__file__)), "--run", name, "--form", form]
    command += ["--simulated"] if simulated else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=2 * MOST_S)
    try:
        outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise RuntimeError(f"{name} ended with exit code {done.returncode}, and no outcome") from None
    if "skipped" in outcome:
        raise Skip(outcome["skipped"])
    return outcome


def main() -> int:
    """For the processes that experiments start; ``benchmarks/gpu.py`` is what users call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", choices=[name for name, each in EXPERIMENTS.items() if each.alone])
    parser.add_argument("--hold-a-look", action="store_true")
    parser.add_argument("--form", default="quick")
    parser.add_argument("--simulated", action="store_true")
    arguments = parser.parse_args()
    with a_device(simulated=arguments.simulated) as device:
        if arguments.hold_a_look:
            runs.hold_a_look(device)
            return 0
        try:
            outcome = on_device(arguments.run, device, arguments.form)
        except Skip as reason:
            outcome = {"skipped": str(reason)}
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(json.dumps(outcome))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
