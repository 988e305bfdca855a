"""Train on a dataset with a few slow samples: with a DataLoader, and with a SampleLoader in its place."""

from __future__ import annotations

import argparse
import time

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt import SampleLoader

SAMPLE_S, SLOW_S = 0.002, 0.1
STEP_S = 0.01


class Uneven(Dataset[torch.Tensor]):
    """Each sample takes 2 ms to arrive, and one in 50 takes 100 ms, as a large file or a retry does."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SLOW_S if index % 50 == 7 else SAMPLE_S)
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
    args = parser.parse_args()

    weights = []
    for make in (DataLoader, SampleLoader):
        loader = make(Uneven(8 * (40 if args.smoke else 600)), batch_size=8, num_workers=4)
        seed_everything(0, verbose=False)
        model = Model()
        trainer = Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False
        )
        began = time.perf_counter()
        trainer.fit(model, loader)
        print(f"{make.__name__}: {time.perf_counter() - began:.1f} s")
        weights.append(model.layer.weight)
    print(f"the same weights: {torch.equal(*weights)}")


if __name__ == "__main__":
    main()
