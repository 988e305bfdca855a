"""The same by LightningCLI: ``python train_cli.py fit --config files.yaml``, and then ``--config lmdb.yaml``."""

from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI
from train import PatternNet

if __name__ == "__main__":
    LightningCLI(PatternNet, LightningDataModule, subclass_mode_data=True)
