"""TorchGeo: segmentation of aerial images in the format of Inria's, from a loader with six workers."""

from pathlib import Path

import numpy as np
import rasterio
from lightning.pytorch import Trainer
from recording import Recording
from torch.utils.data import DataLoader
from torchgeo.datasets import InriaAerialImageLabeling
from torchgeo.trainers import SemanticSegmentationTask


def write(path: Path, pixels: np.ndarray) -> None:
    count, height, width = pixels.shape
    path.parent.mkdir(parents=True, exist_ok=True)
    where = rasterio.transform.from_origin(0, 0, 1, 1)
    with rasterio.open(path, "w", "GTiff", width, height, count, "EPSG:32614", where, "uint8") as file:
        file.write(pixels)


if __name__ == "__main__":
    recording = Recording(seed=1)
    for number in range(1, 166):  # the first five are for validation
        folder = Path("data/AerialImageDataset/train")
        image = np.random.randint(0, 256, (3, 64, 64), dtype=np.uint8)
        write(folder / f"images/austin{number:03}.tif", image)
        write(folder / f"gt/austin{number:03}.tif", np.where(image[:1] > 127, 255, 0).astype(np.uint8))
    loaders = [
        DataLoader(InriaAerialImageLabeling("data", split), batch_size=4, shuffle=split == "train", num_workers=6)
        for split in ("train", "val")
    ]
    task = SemanticSegmentationTask(
        model="unet", backbone="resnet18", weights=None, in_channels=3, task="binary", loss="bce"
    )
    trainer = Trainer(max_epochs=3 * recording.times, accelerator="cpu", callbacks=[recording.callback()])
    with recording:
        trainer.fit(task, *loaders)
