"""No OpenMP region on the way of a batch through the training process: its threads are begun by the first one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_gpuopt.loading.collate import Collate
from lightning_gpuopt.storage.writer import LMDBWriter
from tests.images.pictures import encoded, photo, with_orientation

REPOSITORY = Path(__file__).resolve().parents[2]

CODE = """
import os
import sys

import numpy as np
import torch
from torch.utils.data import TensorDataset

from lightning_gpuopt import ImageFolderDataModule, LMDBDataModule


def threads():
    return set(os.listdir("/proc/self/task"))


def from_numpy(*shape, dtype=np.uint8):
    return torch.from_numpy(np.zeros(shape, dtype))


assert torch.get_num_threads() == 2
what, path = sys.argv[1:3]
source = {
    "large tensors": lambda: TensorDataset(from_numpy(256, 3, 128, 128, dtype=np.float32), from_numpy(256)),
    "channels last": lambda: TensorDataset(from_numpy(256, 64, 64, 3).permute(0, 3, 1, 2)),
}.get(what, lambda: path)()
kind = ImageFolderDataModule if what == "folder" else LMDBDataModule
options = eval(sys.argv[3])
datamodule = kind(source, val=source, batch_size=128, num_workers=0, **options)
datamodule.setup("fit")
before = threads()
batches = [batch for loader in (datamodule.train_dataloader(), datamodule.val_dataloader()) for batch in loader]
print(len(threads() - before), sum(len(batch[0]) for batch in batches))

from_numpy(1 << 22).to(torch.float32)  # so that a region would have been seen
print(len(threads() - before))
"""


def threads_begun(what: str, path: Path, **options: Any) -> list[int]:
    """Threads that two epochs of a loader begin, the samples in them, and the threads that a region begins after it."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, what, str(path), repr(options)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "2", "OMP_DYNAMIC": "false"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not done.returncode, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_small_records_are_gathered_in_one_thread(tmp_path: Path) -> None:
    with LMDBWriter(tmp_path / "data") as writer:
        for index in range(512):
            writer.write((np.full((3, 32, 32), index % 256, np.uint8), torch.full((100,), 0.5), index))
    assert threads_begun("gather", tmp_path / "data") == [0, 1024, 1]


@pytest.mark.parametrize("memory_format", ["channels_last", "contiguous"])
@pytest.mark.parametrize("interpolation", ["bilinear", "nearest"])
def test_images_are_cropped_and_collated_in_one_thread(tmp_path: Path, memory_format: str, interpolation: str) -> None:
    (tmp_path / "a").mkdir()
    for index in range(16):
        (tmp_path / f"a/{index}.jpg").write_bytes(with_orientation(photo(300, 250), 1 + index % 8))
    options: dict[str, Any] = {"crop_size": 224, "memory_format": memory_format, "interpolation": interpolation}
    assert threads_begun("folder", tmp_path, decode="tensor", **options) == [0, 32, 1]


def test_images_with_masks_are_too(tmp_path: Path) -> None:
    mask = Image.fromarray(np.arange(300, dtype=np.int32)[None].repeat(250, 0))
    with LMDBWriter(tmp_path / "data") as writer:
        for index in range(16):
            writer.write((Image.open(_file(encoded(photo(300, 250)), tmp_path / f"{index}.jpg")), mask))
    for options in ({"crop_size": 224}, {}):
        assert threads_begun("masks", tmp_path / "data", decode="tensor", **options) == [0, 32, 1]


def _file(data: bytes, path: Path) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("what", ["large tensors", "channels last"])
def test_tensors_of_other_datasets_are_collated_in_one_thread(tmp_path: Path, what: str) -> None:
    assert threads_begun(what, tmp_path) == [0, 512, 1]


@pytest.mark.parametrize("memory_format", ["channels_last", "contiguous"])
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex128, torch.uint16]
)
@pytest.mark.parametrize("size", [4, 128])
def test_batches_are_those_of_torch(size: int, dtype: torch.dtype, memory_format: Any) -> None:
    values = torch.arange(4 * 3 * size * size).view(4, size, size, 3) % 251
    samples = [value.permute(2, 0, 1) for value in values.to(dtype)]
    batch = Collate(memory_format)(samples)
    assert torch.equal(batch.contiguous().view(torch.uint8), torch.stack(samples).contiguous().view(torch.uint8))
    assert batch.dtype == dtype
    expected = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format
    assert batch.is_contiguous(memory_format=expected)


def test_what_torch_refuses_or_converts_it_still_does() -> None:
    large = torch.zeros(3, 128, 128)
    with pytest.raises(
        RuntimeError, match=r"differ in type or shape: .*float32 \[3, 128, 128\].*float32 \[3, 128, 64\]"
    ):
        Collate()([large, large[:, :, :64]])
    with pytest.raises(RuntimeError, match="differ in type or shape"):
        Collate()([large, large.double().to_sparse()])
    assert Collate()([large, large.double()]).dtype == torch.float64
    needs_grad = torch.zeros(3, 128, 128, requires_grad=True)
    assert Collate()([needs_grad, large]).requires_grad
