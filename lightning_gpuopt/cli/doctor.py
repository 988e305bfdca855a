"""``lightning-gpuopt doctor``: what in this environment will hold a GPU back, measured."""

from __future__ import annotations

import json
import shutil

from jsonargparse import ArgumentParser, Namespace

from lightning_gpuopt.cli._parser import PROBLEM_FOUND, UsageError, termination_cleans_up

SUMMARY = "find out what in this environment slows a GPU down: driver, CPUs, memory, disk, versions"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=str,
        metavar="PATH",
        help="also measure how fast this dataset is read: a folder of files, an LMDB dataset, or a file",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(options: Namespace) -> int:
    """Look at everything, and print what was found, problems first; 1 if there is one."""
    from lightning_gpuopt.doctor.check import as_data
    from lightning_gpuopt.doctor.examine import examine
    from lightning_gpuopt.doctor.render import render_checks

    try:
        with termination_cleans_up():
            checks = examine(options.data)
    except OSError as error:
        if options.data is None or error.filename != options.data:
            raise
        raise UsageError(
            f"--data: expected an existing path, got {options.data}: {error.strerror}; give a folder or a file"
        ) from error
    if options.json:
        print(json.dumps(as_data(checks), indent=2, allow_nan=False))
    else:
        print(render_checks(checks, shutil.get_terminal_size().columns))
    return PROBLEM_FOUND if any(check.status == "problem" for check in checks) else 0
