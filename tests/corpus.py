"""Image files that nobody made for these tests, through the three DataModules: see corpus.md.

python tests/corpus.py pillow-12.0.0.tar.gz    # or a folder of image files
"""

from __future__ import annotations

import contextlib
import sys
import tarfile
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from lightning_gpuopt import DALIDataModule, LMDBDataset, build_lmdb
from lightning_gpuopt.images.errors import CorruptSampleError
from lightning_gpuopt.loading.image_folder import ImageFolder

SIDE = 512
"""DALI's pictures are compared in this corner: those of a batch must be of one size."""


def copy_images(source: Path, folder: Path) -> None:
    """The files of a folder or of a source package's test images, each with its number and name, in one class."""
    folder.mkdir(parents=True)
    if source.is_dir():
        files = [(path.name, path.read_bytes()) for path in sorted(source.rglob("*")) if path.is_file()]
    else:
        with tarfile.open(source) as tar:
            members = [each for each in tar if "/Tests/images/" in each.name and each.isfile()]
            files = [(Path(each.name).name, tar.extractfile(each).read()) for each in members]  # type: ignore[union-attr]
    for number, (name, data) in enumerate(files):
        (folder / f"{number:05d} {name}").write_bytes(data)


def by_folder(root: Path) -> dict[str, torch.Tensor | None]:
    """What the folder module shows of each file, uint8 ``[3, H, W]``; None where it says that it is no image."""
    images, shown = ImageFolder(root, decode="tensor"), {}
    for index in range(len(images)):
        with contextlib.suppress(CorruptSampleError):
            shown[images.files.name(index)] = images[index][0]
    return {images.files.name(index): shown.get(images.files.name(index)) for index in range(len(images))}


def by_dali(names: list[str], root: Path) -> list[torch.Tensor]:
    """The upper left corners as DALI shows them, in batches of 64."""
    from nvidia.dali import fn, pipeline_def

    @pipeline_def
    def corners(encoded: Any, labels: Any) -> Any:
        images = fn.decoders.image(encoded, device="cpu")
        return fn.crop(images, crop=(SIDE, SIDE), crop_pos_x=0, crop_pos_y=0, out_of_bounds_policy="pad"), labels

    (root / "list.txt").write_text("".join(f"{name} {number}\n" for number, name in enumerate(names)))
    module = DALIDataModule(val=root / "list.txt", batch_size=64, device="cpu", eval_pipeline=corners)
    return [image.clone() for images, _ in module.val_dataloader() for image in images]


def padded(image: torch.Tensor) -> torch.Tensor:
    corner = torch.zeros(SIDE, SIDE, 3, dtype=torch.uint8)
    part = image[:, :SIDE, :SIDE].permute(1, 2, 0)
    corner[: part.shape[0], : part.shape[1]] = part
    return corner


def main(source: Path) -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        root, lmdb = Path(temporary, "images"), Path(temporary, "lmdb")
        copy_images(source, root / "c")
        shown = by_folder(root)
        good = {name: image for name, image in shown.items() if image is not None}
        info = build_lmdb(root, lmdb, max_skipped=1.0, progress=False)
        pixels, stored = LMDBDataset(lmdb, decode="tensor"), LMDBDataset(lmdb, decode="raw")
        other = [at for at, image in enumerate(good.values()) if not torch.equal(pixels[at][0], image)]
        changed = [at for at, name in enumerate(good) if stored[at][0] != (root / name).read_bytes()]
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # which says so where DALI ends its process
            corners = pool.submit(by_dali, list(good), root).result()
        far = [(a.int() - padded(b).int()).abs().max().item() for a, b in zip(corners, good.values(), strict=True)]
    print("| module | files | images | refused | other pixels | other bytes |\n|---|---|---|---|---|---|")
    print(f"| folder | {len(shown)} | {len(good)} | {len(shown) - len(good)} | | |")
    print(f"| LMDB | {len(shown)} | {info.num_samples} | {info.num_skipped} | {len(other)} | {len(changed)} |")
    print(f"| DALI | {len(good)} | {len(corners)} | | {sum(each > 0 for each in far)}, by {max(far)} at most | |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
