"""Trainings that die, one in each way; run as ``python dying_script.py CASE WORKERS``."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import sys
import tempfile
import threading
import time

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_gpuopt import LMDBDataModule, SampleLoader

CASE, WORKERS = sys.argv[1], int(sys.argv[2])
HELD = threading.Lock()


def read_beyond_the_end() -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(4096)
        page = mmap.mmap(file.fileno(), 4096)
        file.truncate(0)
        page[0]


def keep_all() -> None:
    kept = []
    while True:
        kept.append(bytearray(8 << 20))


def fall_asleep() -> None:
    time.sleep(1000)


def break_out() -> None:
    raise KeyError("nothing there")


def open_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    while True:
        os.open(os.devnull, os.O_RDONLY)


def take_the_lock() -> None:
    with HELD:
        pass


ENDS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "crash": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "quit": lambda: os._exit(7),
    "exit": lambda: sys.exit(4),
    "leave": lambda: os._exit(0),
    "raise": break_out,
    "bus": read_beyond_the_end,
    "eat": keep_all,
    "files": open_files,
    "sleep": fall_asleep,
    "lock": take_the_lock,
}
CAUGHT = {
    "exit": lambda: sys.exit(3),
    "raise": lambda: [].pop(),
    "well": lambda: None,
}
"""What a script does that has caught the exception of fit."""


class Data(Dataset):
    def __len__(self):
        return 240

    def __getitem__(self, index):
        time.sleep(0.002)
        if CASE == "data-lock" or (index == 101 and CASE.startswith("data-")):
            ENDS[CASE.split("-")[1]]()
        return torch.ones(4)


class Stream(IterableDataset):
    def __iter__(self):
        for _ in range(100 + 48 * (os.environ.get("LOCAL_RANK", "0") == "0")):
            yield torch.ones(4)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 20:
            if CASE.startswith("step-"):
                ENDS[CASE.removeprefix("step-")]()
            if CASE.startswith("rank1-") and self.global_rank == 1:
                ENDS[CASE.split("-")[1]]()
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        if batch_idx == 20:
            ENDS[CASE.removeprefix("validation-")]()

    def test_step(self, batch, batch_idx):
        if batch_idx == 20 and CASE.startswith("test-"):
            ENDS[CASE.removeprefix("test-")]()

    def predict_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


class Hook(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if CASE.startswith("hook-"):
            time.sleep(0.005)  # hooks that do nothing are not timed by themselves
            if batch_idx == 50:
                ENDS[CASE.removeprefix("hook-")]()


if __name__ == "__main__":
    if CASE == "data-lock":
        HELD.acquire()
    strategy = "ddp_fork" if CASE.endswith("-forked") else "ddp"
    ranks = {"devices": 2, "strategy": strategy} if CASE.startswith(("rank1-", "uneven")) else {}
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Hook()],
        **ranks,
    )
    loader = DataLoader(Stream() if CASE == "uneven" else Data(), 4, num_workers=WORKERS)
    if CASE.endswith("-module"):
        loader = LMDBDataModule(Data(), batch_size=4, num_workers=WORKERS)
    if CASE.endswith("-samples"):
        loader = SampleLoader(Data(), 4, num_workers=WORKERS)
    if CASE == "before-raise":
        break_out()
    if CASE.startswith("test-") or CASE.endswith("-test"):
        trainer.test(Model(), loader)
    if CASE.endswith("-predict"):
        trainer.predict(Model(), loader)
    try:
        trainer.fit(Model(), loader, DataLoader(Data(), 4) if CASE.startswith("validation-") else None)
    except KeyError:
        if "caught" not in CASE:
            raise
    if "caught" in CASE:
        time.sleep(2.5)  # what comes sooner may be how a script comes to its end
        CAUGHT.get(CASE.rpartition("-")[2], ENDS["kill"])()
    if CASE == "after-raise":
        break_out()
