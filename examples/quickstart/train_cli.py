"""The same run through LightningCLI: ``python train_cli.py fit --config train.yaml``."""

from lightning.pytorch.cli import LightningCLI
from train import ShapesData, ShapesNet

if __name__ == "__main__":
    LightningCLI(ShapesNet, ShapesData)
