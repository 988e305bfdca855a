"""What the demonstration leaves in its folder."""

from __future__ import annotations

from pathlib import Path

RESULTS = ("report.json", "report.html", "metrics.csv", "stacks.speedscope.json")  # what a run leaves in its folder
MARK = ".lightning-gpuopt-demo"  # marks a folder as the demo's: only there does it remove an earlier run's results
BEFORE = "before"  # folder of the first run's results, where others followed it


def remove_results(folder: Path) -> None:
    """Remove the results of an earlier demo, so that this one is not compared with them."""
    for name in RESULTS:
        (folder / name).unlink(missing_ok=True)


def from_here(path: Path) -> Path:
    """A path as it is shown: from the working folder where it lies below that."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
