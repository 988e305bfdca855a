"""Scripts for ``lightning-gpuopt watch``: they know nothing of it, but for those whose users have callbacks of ours."""

from __future__ import annotations

PARTS = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
import lightning.pytorch as pl


class Slow(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.full((4,), float(index))


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def trainer(**kwargs):
    defaults = dict(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_steps=20,
    )
    return pl.Trainer(**{**defaults, **kwargs})
"""

PLAIN = (
    PARTS
    + """
if __name__ == "__main__":
    own = trainer(max_steps=100)
    own.fit(Model(), DataLoader(Slow(), 2))
    print("callbacks afterwards:", [type(each).__name__ for each in own.callbacks])
    sys.exit(int(sys.argv[1]))
"""
)

STARVES = (
    PARTS
    + """
if __name__ == "__main__":
    trainer(max_steps=360, max_epochs=3).fit(Model(), DataLoader(Slow(), 2, num_workers=1))
    print("ended")
"""
)

MANY = (
    PARTS
    + """
import threading
import pytorch_lightning
from lightning_gpuopt import StallDetector


class OtherModel(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    training_step = Model.training_step
    configure_optimizers = Model.configure_optimizers


def names(trainer):
    return [type(each).__name__ for each in trainer.callbacks]


class Seen(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        print("during:", [name for name in names(trainer) if name != "Seen"])


loader = lambda: DataLoader(Slow(), 2)
shared = [Seen()]
for fold in range(2):  # one list of callbacks for two Trainers
    each = trainer(callbacks=shared)
    each.validate(Model(), loader(), verbose=False)
    each.fit(Model(), loader())
    print("after:", names(each))
own = trainer(callbacks=[Seen(), StallDetector(report_dir="own", on_stall="ignore", print_report=False)])
own.fit(Model(), loader())
print("after:", names(own))
other = pytorch_lightning.Trainer(
    accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    max_steps=20,
)
thread = threading.Thread(target=lambda: other.fit(OtherModel(), loader()))
thread.start()
thread.join()
"""
)

FAILS = (
    PARTS
    + """
class Fails(Model):
    def training_step(self, batch, batch_idx):
        if batch_idx == 15:
            if sys.argv[1] == "raise":
                raise RuntimeError("the model's own")
            os.kill(os.getpid(), {"kill": 9, "interrupt": 2}[sys.argv[1]])
        return super().training_step(batch, batch_idx)


trainer().fit(Fails(), DataLoader(Slow(), 2))
"""
)

NO_PACKAGE = (
    """
import sys
sys.modules["lightning_gpuopt"] = None
"""
    + PARTS
    + """
trainer().fit(Model(), DataLoader(Slow(), 2))
print("trained")
"""
)

RANKS = (
    PARTS
    + """
if __name__ == "__main__":
    own = trainer(devices=2, strategy="ddp", max_steps=12)
    own.fit(Model(), DataLoader(Slow(), 2))
    sys.stdout.write(f"rank {own.global_rank} ended\\n")  # one write: the ranks share the pipe
"""
)

CLI = (
    PARTS
    + """
from lightning.pytorch.cli import LightningCLI


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Slow(), 2)


LightningCLI(Model, Data, args=[
    "fit", "--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.max_steps=20",
    "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false",
], save_config_callback=None)
"""
)

CEILING = (
    PARTS.replace("time.sleep(0.004)", "time.sleep(0.001)")
    + """
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import IterableDataset, Subset


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.full((4,), float(index)) for index in range(60))


class Changes(Model):
    def training_step(self, batch, batch_idx):
        number = int(sum(each[0, 0] for each in batch.values()) if isinstance(batch, dict) else batch[0, 0])
        print(f"rank {self.global_rank} trains on {number}", flush=True)
        for each in batch.values() if isinstance(batch, dict) else [batch]:
            each.add_(100_000)
        self.trainer.should_stop |= sys.argv[1] == f"stops-{self.global_step}"
        return super().training_step(batch if not isinstance(batch, dict) else batch["a"], batch_idx)

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            print("validates", flush=True)


def loaders(kind):
    if kind == "combined":
        workers = dict(batch_size=2, num_workers=1, persistent_workers=True)
        return CombinedLoader({"a": DataLoader(Slow(), **workers), "b": DataLoader(Stream(), 2)}, "max_size_cycle")
    if kind == "uneven":
        return DataLoader(Subset(Slow(), range(150 if "LOCAL_RANK" in os.environ else 300)), 1)
    own = kind in ("plain", "stream") or kind.startswith("stops")
    return DataLoader(Stream() if kind == "stream" else Slow(), 2, num_workers=0 if own else 2)


if __name__ == "__main__":
    kind, settings = sys.argv[1], eval(sys.argv[2])
    callbacks = [ModelCheckpoint(dirpath="checkpoints", every_n_train_steps=5)]
    if kind == "prefetched":
        from lightning_gpuopt import CudaPrefetcher
        callbacks.append(CudaPrefetcher(enabled=True))
    if kind == f"fails-{os.environ.get('LOCAL_RANK', 0)}":
        from lightning_gpuopt.watch import ceiling_run
        ceiling_run.more_than_a_step_follows = None
    own = trainer(
        callbacks=callbacks, enable_checkpointing=True, logger=CSVLogger("logs"),
        **{"max_epochs": 30, "max_steps": -1, "limit_train_batches": 25, **settings},
    )
    own.logger.log_hyperparams({"a": 1})
    own.fit(Changes(), loaders(kind), DataLoader(range(2)))
    print("after fit", [type(each).__name__ for each in own.loggers], own.checkpoint_callback)
    torch.save({}, "after.pt")
    sys.exit(4)
"""
)
