"""What ``lightning-gpuopt watch --fix`` brings to a script as it is, beside ``watch`` alone.

    python benchmarks/watch.py [--rounds N] [--output FILE] [--sections forked spawned] [--page FILE]

The script's samples wait 2 ms each, as for a remote storage, in batches of 8, with one worker; its step takes 3 ms.
In section ``spawned`` the worker is started by spawn, anew for each of five epochs of 200 steps: there starting
workers is what costs, and the whole training is compared. The two ways take turns. Printed are the medians over the
rounds, with the machine and the versions; they go into ``benchmarks/results/watch-cpu.json``, with what the last round
has printed, of which README's text is a part. ``--page`` keeps the page of its run without ``--fix``, which README's
picture shows:

    chromium --headless --hide-scrollbars --window-size=900,1120 --screenshot=docs/report.png file://$PWD/page.html
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results" / "watch-cpu.json"

SCRIPT = """
import sys
import time

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset


class Remote(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((64,), float(index))


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(0.003)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    method, epochs, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(Remote(length), 8, shuffle=True, num_workers=1, multiprocessing_context=method))
"""


SECTIONS = {"forked": ("fork", "1", "6000"), "spawned": ("spawn", "5", "1600")}


def watched(folder: Path, section: str, *arguments: str, page: Path | None = None) -> dict[str, Any]:
    """The report of the script under ``watch``, and what was printed of it."""
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "lightning_gpuopt", "watch", *arguments, "--report-dir", "reports", "--"]
    ran = subprocess.run(
        [*command, sys.executable, "train.py", *SECTIONS[section]],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "80"},
    )
    newest = max((folder / "reports").glob("*/fit-1/report.json"), key=lambda path: path.stat().st_mtime)
    if page is not None:
        shutil.copy(newest.with_name("report.html"), page)
    report: dict[str, Any] = json.loads(newest.read_text())
    printed = ran.stderr.partition("── lightning-gpuopt watch ")[2].partition("\nReport: ")[0]
    return report | {"printed": printed.splitlines()[1:]}


def ceiling(folder: Path) -> list[str]:
    """What ``--ceiling`` prints of the script."""
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "lightning_gpuopt", "watch", "--ceiling", "--", sys.executable, "train.py"]
    ran = subprocess.run([*command, *SECTIONS["forked"]], cwd=folder, check=True, capture_output=True, text=True)
    lines = ran.stderr.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("Ceiling:"))
    return lines[first : first + 3]


def figures(reports: list[dict[str, Any]]) -> dict[str, float]:
    return {
        "training_s": median(each["wall_s"] for each in reports),
        "step_ms": median(each["step_s"] for each in reports) * 1e3,
        "data_wait_percent": median(each["phases"]["data_wait"] / each["wall_s"] for each in reports) * 100,
    }


def compared(section: str, rounds: int, page: Path | None = None) -> dict[str, Any]:
    """The figures of both ways."""
    plain, fixed = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            plain.append(watched(Path(folder), section, page=page))
            fixed.append(watched(Path(folder), section, "--fix"))
    before, after = figures(plain), figures(fixed)
    return {
        "as_it_was": before,
        "fixed": after,
        "changes": [each["changes"] for each in fixed],
        "printed": plain[-1]["printed"],
        "printed_of_fixed": fixed[-1]["printed"],
        "speedup_of_the_step": before["step_ms"] / after["step_ms"],
        "speedup_of_the_training": before["training_s"] / after["training_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    sections = {name: compared(name, options.rounds, options.page) for name in options.sections}
    with tempfile.TemporaryDirectory() as folder:
        printed = ceiling(Path(folder))
    found = {
        "machine": f"{len(os.sched_getaffinity(0))} CPUs, {platform.machine()}, no GPU is used",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "lightning")},
        "rounds": options.rounds,
        **sections.pop("forked", {}),
        "printed_of_ceiling": printed,
        **sections,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(found, indent=2) + "\n")
    left_out = ("changes", "printed", "printed_of_fixed", "printed_of_ceiling")
    print(json.dumps({name: value for name, value in found.items() if name not in left_out}, indent=2))


if __name__ == "__main__":
    main()
