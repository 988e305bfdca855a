"""Where does the time of a training run go? Two callbacks and one line to print the answer."""

import argparse

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt import GpuUtilMonitor, StallDetector


class Shapes(Dataset):
    """Noisy pictures of a square or a disc, drawn anew at every read: CPU work, as the decoding of JPEGs is."""

    def __init__(self, length: int, size: int = 96) -> None:
        self.length = length
        self.grid = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, size)] * 2, indexing="ij"))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % 2
        centre, radius = torch.empty(2, 1, 1).uniform_(-0.4, 0.4), torch.empty(()).uniform_(0.3, 0.5)
        distance = (self.grid - centre).norm(p=2 if label else torch.inf, dim=0)
        picture = (distance < radius).float() + 0.2 * torch.randn(3, *distance.shape)
        return picture, label


class ShapesData(LightningDataModule):
    """The loader, as it is before anybody has looked at it: ``num_workers=0``."""

    def __init__(self, length: int = 8192, batch_size: int = 32, num_workers: int = 0) -> None:
        super().__init__()
        self.length, self.batch_size, self.num_workers = length, batch_size, num_workers

    def train_dataloader(self) -> DataLoader:
        """Freshly drawn pictures, in batches."""
        return DataLoader(Shapes(self.length), self.batch_size, shuffle=True, num_workers=self.num_workers)


class ShapesNet(LightningModule):
    """A small convnet that tells squares from discs."""

    def __init__(self, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, kernel_size=5, stride=4),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, kernel_size=5, stride=4),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * 4, 2),
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """One step on ``(pictures [B,3,H,W], labels [B])``."""
        pictures, labels = batch
        loss = torch.nn.functional.cross_entropy(self.net(pictures), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-workers", type=int, default=0, help="worker processes of the DataLoader")
    parser.add_argument("--smoke", action="store_true", help="a few steps on the CPU, to see that it runs")
    arguments = parser.parse_args()

    trainer = Trainer(
        max_epochs=1,
        callbacks=[GpuUtilMonitor(), StallDetector()],
        **{"max_steps": 20, "accelerator": "cpu", "enable_progress_bar": False} if arguments.smoke else {},
    )
    trainer.fit(ShapesNet(), ShapesData(num_workers=arguments.num_workers))


if __name__ == "__main__":
    main()
