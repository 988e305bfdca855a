"""``lightning-gpuopt what-if``: what a run would be like with other workers, CPUs, decoding or batches."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import restricted_number_type

from lightning_gpuopt.cli._parser import UsageError
from lightning_gpuopt.cli._reports import load_report

SUMMARY = "forecast a run with other workers, CPUs, decoding or batches, from its report.json"

PositiveNumber = restricted_number_type("0 < number <= 1e6", float, [(">", 0), ("<=", 1e6)])
Workers = restricted_number_type("0 <= workers <= 4096", int, [(">=", 0), ("<=", 4096)])
Prefetched = restricted_number_type("1 <= batches <= 65536", int, [(">=", 1), ("<=", 65536)])
BatchSize = restricted_number_type("1 <= samples <= 1e9", int, [(">=", 1), ("<=", 10**9)])

_CHANGES = ("num_workers", "prefetch_factor", "cpus", "decode_speedup", "batch_size")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``what-if``."""
    add = parser.add_argument
    add("file", type=str, help="a report.json that StallDetector wrote")
    add("--num-workers", type=Workers, help="worker processes; 0: the training process loads by itself")
    add("--prefetch-factor", type=Prefetched, help="batches that each worker prepares ahead")
    add("--cpus", type=PositiveNumber, help="CPUs that the run may use")
    add("--decode-speedup", type=PositiveNumber, help="the dataset's CPU time is divided by this")
    add("--batch-size", type=BatchSize, help="samples in a batch")
    add("--json", action="store_true", help="as JSON")


def run(options: Namespace) -> int:
    """Print the forecast.

    Returns:
        The exit code 0.

    Raises:
        UsageError: nothing is changed, the file is no report, or the report does not say enough.
    """
    from lightning_gpuopt.diagnosis.render.what_if import render_forecast
    from lightning_gpuopt.diagnosis.what_if import CannotSayError, WhatIf, what_if

    changes = {name: options[name] for name in _CHANGES if options[name] is not None}
    if not changes:
        asked = ", ".join(f"--{name.replace('_', '-')}" for name in _CHANGES)
        raise UsageError(f"what-if: expected a change, got none; give one or more of {asked}")
    report = load_report(options.file)
    try:
        forecast = what_if(report, WhatIf(**changes))
    except CannotSayError as error:
        raise UsageError(f"{options.file}: {error}; record one with StallDetector and give that") from error
    if options.json:
        print(json.dumps(asdict(forecast), indent=2, allow_nan=False))
    else:
        print(render_forecast(forecast, shutil.get_terminal_size().columns))
    return 0
