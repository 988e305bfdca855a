"""``python -m evaluation.patch [NAME ...]``: watch, patch and run each script; exit code 1 for one that fails."""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import lightning.pytorch  # noqa: F401 - what a script imports is there when it begins

from evaluation.patch.catalogue import SCRIPTS
from evaluation.patch.run import Outcome, outcome_of
from lightning_gpuopt.watch import factory, summary  # noqa: F401

_AT_ONCE = 2


def main() -> int:
    """Print a line for each script, and a summary."""
    names = sys.argv[1:] or list(SCRIPTS)
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory() as place, ProcessPoolExecutor(_AT_ONCE, get_context("fork")) as pool:
        for each in pool.map(partial(_outcome, place), names):
            print(f"{each.name:28} {each.kind:9} {each.detail}", flush=True)
            found.append(each)
    kinds = [each.kind for each in found]
    traps = sum(SCRIPTS[each.name].is_trap for each in found)
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    print(f"{len(found)} scripts, {traps} of them traps: {counts}")
    return int(any(each.is_failure for each in found))


def _outcome(place: str, name: str) -> Outcome:
    return outcome_of(name, SCRIPTS[name], Path(place).resolve() / name)


if __name__ == "__main__":
    sys.exit(main())
