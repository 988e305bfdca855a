"""What ``lightning-gpuopt demo`` prints on this machine; README shows its table.

    python benchmarks/demo.py [--output FILE]

Its lines go into ``benchmarks/results/demo-cpu.json``, with the machine and the versions.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "demo-cpu.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            [sys.executable, "-m", "lightning_gpuopt", "demo", "--accelerator", "cpu"],
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | {"COLUMNS": "80"},
        )
    found = {
        "machine": f"{len(os.sched_getaffinity(0))} CPUs, {platform.machine()}, no GPU is used",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "lightning")},
        "printed": ran.stdout.splitlines(),
    }
    options.output.write_text(json.dumps(found, indent=2) + "\n")
    print(ran.stdout)


if __name__ == "__main__":
    main()
