"""``python -m evaluation.patch [NAME ...]``: watch, patch and run each script; exit code 1 for a wrong or missing patch."""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from evaluation.patch.catalogue import SCRIPTS
from evaluation.patch.run import Outcome, outcome_of

_AT_ONCE = 2


def main() -> int:
    """Print a line for each script, and a summary."""
    names = sys.argv[1:] or list(SCRIPTS)
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(_AT_ONCE) as pool:
        found: list[Outcome] = list(pool.map(lambda name: outcome_of(name, SCRIPTS[name], Path(place) / name), names))
    for each in found:
        print(f"{each.name:28} {each.kind:9} {each.detail}")
    kinds = [each.kind for each in found]
    traps = sum(SCRIPTS[each.name].is_trap for each in found)
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    print(f"{len(found)} scripts, {traps} of them traps: {counts}")
    return int(any(each.is_failure for each in found))


if __name__ == "__main__":
    sys.exit(main())
