"""Train on a loader that waits for its storage, and watch its workers become as many as training needs."""

from __future__ import annotations

import argparse
import time

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt import NumWorkersFinder

STEP_S = 0.01


class SlowStorage(Dataset[torch.Tensor]):
    """Every sample takes 5 ms to arrive, as from a network disk."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.005)
        return torch.full((32,), index / self.length)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(STEP_S)  # stands for the work of a larger model
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few steps")
    parser.add_argument("--mode", choices=("live", "probe", "off"), default="live")
    args = parser.parse_args()

    loader = DataLoader(SlowStorage(8 * (60 if args.smoke else 600)), batch_size=8, shuffle=True, num_workers=1)
    finder = NumWorkersFinder(args.mode, max_seconds=5.0)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[finder],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), loader)
    for trial in finder.trials:
        print(
            f"{trial.num_workers:3} workers: {trial.batches_per_s:6.1f} batches/s, "
            f"{trial.data_wait_s * 1e3:5.1f} ms of waiting in each step"
        )
    print(f"num_workers is now {loader.num_workers}")


if __name__ == "__main__":
    main()
