"""Every flavour of the image formats: with DALI the same pixels as in the other DataModules, and no crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_gpuopt import build_lmdb
from tests.fork_server import run_code
from tests.images.flavours import SIDE, flavours

COUNT = 128  # two batches of 64

COMPARE = f"""
import sys, warnings
warnings.simplefilter("ignore")
import torch
from lightning_gpuopt import DALIDataModule, ImageFolderDataModule, LMDBDataModule
folder, lmdb = sys.argv[1:]
shown = []
for source, peer in ((folder, ImageFolderDataModule), (lmdb, LMDBDataModule)):
    ours = DALIDataModule(val=source, batch_size=64, crop_size={SIDE}, resize_size={SIDE}, dtype="uint8", device="cpu")
    theirs = peer(val=source, batch_size=64, decode="tensor", num_workers=0)
    theirs.setup("validate")
    batches = zip(ours.val_dataloader(), theirs.val_dataloader(), strict=True)
    both = [torch.stack((images.int(), expected.int())) for (images, _), (expected, _) in batches]
    differences = torch.cat(both, 1)
    shown.append((differences[0] - differences[1]).abs().amax((1, 2, 3)).tolist())
print([number for numbers in shown for number, differs in enumerate(numbers) if differs], [len(each) for each in shown])
"""


@pytest.mark.matrix
def test_every_flavour_has_the_pixels_that_the_other_datamodules_give(tmp_path: Path) -> None:
    """In a process of its own: DALI may crash at one of them."""
    files = flavours()
    names = sorted(files)
    (tmp_path / "folder/c").mkdir(parents=True)
    for number in range(COUNT):
        name = names[number % len(names)]
        (tmp_path / f"folder/c/{number:03d} {name}").write_bytes(files[name])
    assert build_lmdb(tmp_path / "folder", tmp_path / "lmdb", progress=False).num_samples == COUNT
    ended = run_code(COMPARE, tmp_path / "folder", tmp_path / "lmdb")
    assert ended.returncode == 0, ended.stderr
    wrong, counts = ended.stdout.split("] [")
    assert wrong == "[", [names[int(number) % len(names)] for number in wrong[1:].split(", ")]
    assert counts == f"{COUNT}, {COUNT}]\n"
