"""Trainings that hang, one in each way; run as ``python hanging_script.py KIND FOLDER``."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt import SampleLoader, StallDetector

KIND, FOLDER = sys.argv[1], sys.argv[2]
HANG_TIMEOUT_S = 2.0
BEGINS_AT = 12
HELD = threading.Lock()
HELD.acquire()


def take_the_lock() -> None:
    with HELD:
        pass


def call_c() -> None:
    """As an extension does that keeps the interpreter's lock: no other thread of Python runs any more."""
    empty, _ = os.pipe()
    ctypes.PyDLL(None).read(empty, ctypes.create_string_buffer(1), 1)  # goes on where a signal interrupts it


def loop() -> None:
    while True:
        pass


def fill_a_pipe() -> None:
    _, into = os.pipe()
    while True:
        os.write(into, bytes(65536))


def fall_asleep() -> None:
    time.sleep(1000)


HANGS = {"lock": take_the_lock, "c": call_c, "loop": loop, "pipe": fill_a_pipe, "sleep": fall_asleep}
PLACE, _, HOW = KIND.partition("-")


def hang(place: str, number: int) -> None:
    if place == PLACE and number == BEGINS_AT:
        Path(FOLDER, "stuck").touch()
        HANGS[HOW]()


class Data(Dataset):
    def __len__(self):
        return 240

    def __getitem__(self, index):
        hang("data", index)
        hang("samples", index)
        return torch.ones(4)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        hang("step", batch_idx)
        if self.global_rank == 1:
            hang("rank1", batch_idx)
        self.log("loss", loss := self.layer(batch).sum())
        return loss

    def validation_step(self, batch, batch_idx):
        hang("validation", batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


class Hook(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        hang("hook", batch_idx)

    def on_train_epoch_end(self, trainer, module):
        if PLACE == "save":
            trainer.save_checkpoint(f"{FOLDER}/last.ckpt")

    def on_save_checkpoint(self, trainer, module, checkpoint):
        hang("save", BEGINS_AT)


class Logger(CSVLogger):
    def log_metrics(self, metrics, step=None):
        hang("logger", step)


if __name__ == "__main__":
    ranks = {"devices": 2, "strategy": "ddp"} if PLACE == "rank1" else {}
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=Logger(FOLDER) if PLACE == "logger" else False,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[StallDetector(hang_timeout=HANG_TIMEOUT_S, report_dir=FOLDER), Hook()],
        **ranks,
    )
    loader = DataLoader(Data(), 4, num_workers=2 if PLACE == "data" else 0)
    if PLACE == "samples":
        loader = SampleLoader(Data(), 4, num_workers=1)
    trainer.fit(Model(), loader, DataLoader(Data(), 4) if PLACE == "validation" else None)
