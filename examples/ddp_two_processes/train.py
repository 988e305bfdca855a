"""Two ranks over one dataset: every sample once, one report for both, and the rank that the other waits for."""

import argparse
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn import functional

from lightning_gpuopt import GpuUtilMonitor, LMDBDataModule, LMDBWriter, StallDetector


def write(path: Path, count: int) -> None:
    """Store points with their number and label, unless they are there already."""
    if path.exists():
        return
    points = torch.randn(count, 16, generator=torch.Generator().manual_seed(0)).numpy()
    with LMDBWriter(path) as writer:
        for index, point in enumerate(points):
            writer.write((point, index, int(point.sum() > 0)))


class Net(LightningModule):
    """A small classifier that remembers which samples its rank was given."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """One step on ``(points [B, 16], numbers [B], labels [B])``."""
        points, numbers, labels = batch
        self.seen.append(numbers)
        return functional.cross_entropy(self.net(points), labels)

    def on_train_epoch_end(self) -> None:
        """Count over the ranks how often each sample came."""
        count = torch.zeros(len(self.trainer.train_dataloader.dataset), device=self.device)
        for numbers in self.seen:
            count[numbers] += 1
        mine = int(count.sum())
        total = self.trainer.strategy.reduce(count, reduce_op="sum")
        if self.trainer.is_global_zero:
            once = int((total == 1).sum())
            print(f"{once} of {len(total)} samples came once, {mine} of them on rank 0", flush=True)
        self.seen.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class SlowRank(Callback):
    """Makes one rank slower in each step, as a throttled GPU or a busy machine does."""

    def __init__(self, rank: int, seconds: float) -> None:
        self.rank, self.seconds = rank, seconds

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if trainer.global_rank == self.rank:
            time.sleep(self.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few steps on the CPU")
    parser.add_argument("--devices", type=int, default=2, help="GPUs; without a GPU, processes on the CPU over gloo")
    parser.add_argument("--slow-rank", type=int, help="make this rank slower, to see it found")
    options = parser.parse_args()
    path = Path("points-smoke.lmdb" if options.smoke else "points.lmdb")
    write(path, 1_000 if options.smoke else 50_000)  # rank 0 is here first, and starts the others
    data = LMDBDataModule(path, batch_size=16 if options.smoke else 64)
    slow = [] if options.slow_rank is None else [SlowRank(options.slow_rank, 0.02)]
    trainer = Trainer(
        accelerator="cpu" if options.smoke else "auto",
        devices=options.devices,
        strategy="ddp",
        max_epochs=1,
        callbacks=[GpuUtilMonitor(), StallDetector(report_dir="report", on_stall="ignore"), *slow],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(Net(), data)


if __name__ == "__main__":
    main()
