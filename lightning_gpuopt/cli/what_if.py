"""``lightning-gpuopt what-if``: what a run would be like with other workers, CPUs, decoding, batches or GPUs."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import restricted_number_type

from lightning_gpuopt.cli._parser import UsageError
from lightning_gpuopt.cli.report import load_report

if TYPE_CHECKING:
    from lightning_gpuopt.diagnosis.report import StallReport
    from lightning_gpuopt.diagnosis.what_if import WhatIf

SUMMARY = "forecast a run with other workers, CPUs, decoding, batches or GPUs, from its report.json"

PositiveNumber = restricted_number_type("0 < number <= 1e6", float, [(">", 0), ("<=", 1e6)])
Workers = restricted_number_type("0 <= workers <= 4096", int, [(">=", 0), ("<=", 4096)])
Prefetched = restricted_number_type("1 <= batches <= 65536", int, [(">=", 1), ("<=", 65536)])
BatchSize = restricted_number_type("1 <= samples <= 1e9", int, [(">=", 1), ("<=", 10**9)])

Ranks = restricted_number_type("2 <= ranks <= 65536", int, [(">=", 2), ("<=", 65536)])
GbPerS = restricted_number_type("0.001 <= GB/s <= 1e6", float, [(">=", 0.001), ("<=", 1e6)])
Bytes = restricted_number_type("1 <= bytes <= 1e15", int, [(">=", 1), ("<=", 10**15)])

_CHANGES = ("num_workers", "prefetch_factor", "cpus", "decode_speedup", "batch_size")


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("file", type=str, help="a report.json that StallDetector wrote")
    add("--num-workers", type=Workers, help="worker processes; 0: the training process loads")
    add("--prefetch-factor", type=Prefetched, help="batches that each worker prepares ahead")
    add("--cpus", type=PositiveNumber, help="CPUs that the run may use")
    add("--decode-speedup", type=PositiveNumber, help="factor by which the dataset's CPU time shrinks")
    add("--batch-size", type=BatchSize, help="samples in a batch")
    add(
        "--ranks",
        type=Ranks,
        metavar="N",
        help="GPUs, each with a process and a loader; --cpus counts those of all of them",
    )
    add("--link-gb-per-s", type=GbPerS, metavar="X", help="GB/s between the GPUs; default: NVLink, PCIe and a network")
    add(
        "--gradient-bytes",
        type=Bytes,
        metavar="B",
        help="bytes that a step reduces over the ranks, if the report lacks them",
    )
    add("--json", action="store_true", help="as JSON")


def run(options: Namespace) -> int:
    """Print the forecast; UsageError if nothing is changed, or the report does not say enough."""
    from lightning_gpuopt.diagnosis.what_if import CannotSayError, WhatIf

    for name in ("link_gb_per_s", "gradient_bytes"):
        if options[name] is not None and options.ranks is None:
            raise UsageError(f"--{name.replace('_', '-')}: expected --ranks with it, got none; give --ranks N")
    change = WhatIf(**{name: options[name] for name in _CHANGES if options[name] is not None})
    if change == WhatIf() and options.ranks is None:
        asked = ", ".join(f"--{name.replace('_', '-')}" for name in (*_CHANGES, "ranks"))
        raise UsageError(f"what-if: expected a change, got none; give one or more of {asked}")
    report = load_report(options.file)
    forecast = _on_one_gpu if options.ranks is None else _on_several
    try:
        data, text = forecast(report, change, options)
    except CannotSayError as error:
        raise UsageError(f"{options.file}: {error}; {error.remedy}") from error
    print(json.dumps(data, indent=2, allow_nan=False) if options.json else text)
    return 0


def _on_one_gpu(report: StallReport, change: WhatIf, options: Namespace) -> tuple[dict[str, Any], str]:
    from lightning_gpuopt.diagnosis.render.what_if import render_forecast
    from lightning_gpuopt.diagnosis.what_if import what_if

    forecast = what_if(report, change)
    return asdict(forecast), render_forecast(forecast, shutil.get_terminal_size().columns)


def _on_several(report: StallReport, change: WhatIf, options: Namespace) -> tuple[dict[str, Any], str]:
    from lightning_gpuopt.diagnosis.render.what_if import render_scaling
    from lightning_gpuopt.diagnosis.scaling import given_link, scaling

    rate = options.link_gb_per_s
    link = given_link(rate) if rate is not None else None
    found = scaling(report, options.ranks, change, link=link, gradient_bytes=options.gradient_bytes)
    data = {name: value for name, value in asdict(found).items() if value is not None}
    return data, render_scaling(found, shutil.get_terminal_size().columns)
