"""Trainings that die or hang in their workers, to see what ``lightning-gpuopt post-mortem`` says of them."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

KIB, MIB = 2**10, 2**20
BAD_SAMPLE = 101
INDEX_LOCK = threading.Lock()


class Samples(Dataset[torch.Tensor]):
    """Samples of a few milliseconds each, of which nothing is wrong."""

    def __init__(self, length: int = 16_000) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.003)
        return torch.full((4,), index / self.length)


class Leak(Samples):
    """A long list of Python strings, which each forked worker copies as it reads them, and a cache without a bound."""

    def __init__(self, length: int = 16_000) -> None:
        super().__init__(length)
        self.paths = [f"/data/train/class-{number % 1000}/{number:09d}.jpg" for number in range(100 * length)]
        self.cache: dict[int, bytearray] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        names = self.paths[100 * index : 100 * (index + 1)]  # counts references: the pages that they are in are copied
        self.cache[index] = bytearray("".join(names).encode()).ljust(128 * KIB)
        return super().__getitem__(index)


class Lock(Samples):
    """Reads under a lock that a thread of the training process holds while workers are forked."""

    def __getitem__(self, index: int) -> torch.Tensor:
        with INDEX_LOCK:
            return super().__getitem__(index)


class FullShm(Samples):
    """Reads one sample from shared memory that has no room for it: a file there that is shorter than it was."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == BAD_SAMPLE:
            with tempfile.TemporaryFile(dir="/dev/shm") as file:
                file.truncate(mmap.PAGESIZE)
                page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
                file.truncate(0)
                page[0] = 1  # SIGBUS, as where /dev/shm is full
        return super().__getitem__(index)


def hold_the_lock(seconds: float) -> None:
    """As a library's thread does that refreshes an index; a worker that is forked meanwhile never sees it released."""
    held = threading.Event()

    def refresh() -> None:
        with INDEX_LOCK:
            held.set()
            time.sleep(seconds)

    threading.Thread(target=refresh, daemon=True).start()
    held.wait()


def limit_memory(worker: int) -> None:
    """Lets worker 0 have 256 MiB more than it was forked with, and the next one twice as much: the machine has more."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = pages * mmap.PAGESIZE + 256 * MIB * (1 + worker)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


CASES: dict[str, type[Samples]] = {"leak": Leak, "lock": Lock, "full-shm": FullShm}


def train(case: str) -> None:
    """Train until it dies or hangs."""
    if case == "lock":
        hold_the_lock(seconds=60.0)
    loader = DataLoader(
        CASES[case](),
        batch_size=4,
        num_workers=2,
        multiprocessing_context="fork",
        worker_init_fn=limit_memory if case == "leak" else None,
    )
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), loader)


# ---- all of them, one after another, each under the command that watches it ----


def post_mortem(folder: Path) -> dict[str, Any]:
    """What ``lightning-gpuopt post-mortem`` says; of a run that has no rings yet, nothing."""
    command = [sys.executable, "-m", "lightning_gpuopt", "post-mortem", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found


def watched(case: str, folder: Path, until: Callable[[dict[str, Any]], bool] | None = None) -> dict[str, Any]:
    """Run a case under ``watch``.

    Args:
        case: which.
        folder: of its reports.
        until: what the post-mortem of the hanging run has to say before it is interrupted; None: it ends by itself.

    Returns:
        The post-mortem: of the run as it hung, or else as it had ended.
    """
    command = [sys.executable, "-m", "lightning_gpuopt", "watch", "--report-dir", str(folder), "--"]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where this script was started in the background
    with subprocess.Popen([*command, sys.executable, __file__, case], stderr=subprocess.PIPE, text=True) as process:
        found: dict[str, Any] = {}
        give_up_s = time.monotonic() + 60.0
        while until is not None and process.poll() is None and time.monotonic() < give_up_s:
            found = post_mortem(folder)
            if found and until(found):
                break
        if until is not None:
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    (run,) = folder.iterdir()
    if not (run / "post-mortem.json").is_file():
        raise SystemExit(f"{case}: no post-mortem; stderr was:\n{errors}")
    return found or post_mortem(folder)


def expect(case: str, found: dict[str, Any], ended: str, *said: str) -> None:
    """Print a post-mortem, and see that it says what has happened."""
    text = found.get("text", "")
    print(f"== {case}\n{text}\n", flush=True)
    if found.get("ended") != ended or (found.get("process") or {}).get("worker") is None:
        raise SystemExit(f"{case}: expected a worker with {ended!r}, got {found}")
    if missing := [each for each in said if each not in text]:
        raise SystemExit(f"{case}: expected {missing} in the post-mortem")


def smoke(folder: Path) -> None:
    """Each case, and what is said of it."""
    expect("leak", watched("leak", folder / "leak"), "exception", "MemoryError", "Leak.__getitem__")
    waits = watched("lock", folder / "lock", until=lambda found: "a lock" in found["likely"])
    expect("lock", waits, "unknown", "not a hang yet", "Lock.__getitem__", "held during the fork")
    full = watched("full-shm", folder / "full-shm")
    expect("full-shm", full, "bus_error", f"sample {BAD_SAMPLE}", "FullShm.__getitem__", "/dev/shm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES, nargs="?", help="which training")
    parser.add_argument("--smoke", action="store_true", help="each of them under watch, in a minute")
    options = parser.parse_args()
    if options.smoke:
        smoke(Path("post-mortems") / f"{time.strftime('%H-%M-%S')}-{os.getpid()}")
    elif options.case:
        train(options.case)
    else:
        parser.error("expected a case, or --smoke")


if __name__ == "__main__":
    main()
