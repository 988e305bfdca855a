"""An ordinary Lightning script, which knows nothing of lightning-gpuopt."""

import argparse
import math

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    """Sums of sine waves, computed sample by sample in Python: slow, as much feature code is."""

    def __init__(self, length: int, points: int = 256) -> None:
        self.length, self.points = length, points

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        frequency = 1 + index % 7
        wave = [math.sin(frequency * 0.05 * at) + 0.1 * math.cos(3.0 * at) for at in range(self.points)]
        return torch.tensor(wave), torch.tensor(float(frequency))


class FrequencyNet(LightningModule):
    """Tells the frequency of a wave."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(256, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        waves, frequencies = batch
        loss = torch.nn.functional.mse_loss(self.net(waves).squeeze(1), frequencies)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few steps on the CPU")
    parser.add_argument("--num-workers", type=int, default=0)
    options = parser.parse_args()
    loader = DataLoader(Waves(640 if options.smoke else 32_000), 32, shuffle=True, num_workers=options.num_workers)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu" if options.smoke else "auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(FrequencyNet(), loader)
    print(f"{trainer.global_step} steps, loss {float(trainer.callback_metrics['loss']):.3f}")


if __name__ == "__main__":
    main()
