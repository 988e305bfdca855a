"""lightly: SimCLR on a folder of images, which are read and augmented in the training process."""

import numpy as np
import torch
import torchvision
from lightly import loss, transforms
from lightly.data import LightlyDataset
from lightly.models.modules import heads
from PIL import Image
from pytorch_lightning import LightningModule, Trainer
from recording import Recording


class SimCLR(LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = torchvision.models.resnet18()
        self.backbone.fc = torch.nn.Identity()
        self.head = heads.SimCLRProjectionHead(512, 512, 128)
        self.criterion = loss.NTXentLoss()

    def training_step(self, batch, batch_idx):
        (first, second), _, _ = batch
        return self.criterion(*(self.head(self.backbone(view).flatten(start_dim=1)) for view in (first, second)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


if __name__ == "__main__":
    recording = Recording(seed=1)
    for number in range(240):
        pixels = np.random.randint(0, 256, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((96, 96)).save(f"{number:03}.jpg")
    dataset = LightlyDataset(input_dir=".", transform=transforms.SimCLRTransform(input_size=32, cj_prob=0.5))
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)
    trainer = Trainer(
        max_epochs=4 * recording.times,
        devices=1,
        accelerator="cpu",
        callbacks=[recording.callback("pytorch_lightning")],
    )
    with recording:
        trainer.fit(SimCLR(), loader)
