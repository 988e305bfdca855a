"""No OpenMP region on the way of a batch through the training process: its threads are begun by the first one."""

import json
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
import json
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


TENSORS = {
    "large tensors": lambda: TensorDataset(from_numpy(256, 3, 128, 128, dtype=np.float32), from_numpy(256)),
    "channels last": lambda: TensorDataset(from_numpy(256, 64, 64, 3).permute(0, 3, 1, 2)),
}


def two_epochs(name, path, options):
    source = TENSORS[name]() if path is None else path
    kind = ImageFolderDataModule if path is not None and os.path.isdir(path + "/a") else LMDBDataModule
    datamodule = kind(source, val=source, batch_size=128, num_workers=0, **options)
    datamodule.setup("fit")
    before = threads()
    batches = [batch for loader in (datamodule.train_dataloader(), datamodule.val_dataloader()) for batch in loader]
    return len(threads() - before), sum(len(batch[0]) for batch in batches)


assert torch.get_num_threads() == 2
found = {case[0]: two_epochs(*case) for case in json.loads(sys.argv[1])}
before = threads()
from_numpy(1 << 22).to(torch.float32)  # so that a region would have been seen
print(json.dumps({**found, "a region": (len(threads() - before), 0)}))
"""


def threads_begun(*cases: tuple[str, Path | None, dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Threads that two epochs of a loader begin, and the samples in them; for each of these cases, in one process.

    Args:
        cases: name, where the samples are (None: in memory), options of the DataModule.
    """
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps([(name, path and str(path), more) for name, path, more in cases])],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "2", "OMP_DYNAMIC": "false"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not done.returncode, done.stderr
    return {name: tuple(counts) for name, counts in json.loads(done.stdout).items()}


@pytest.mark.matrix
def test_no_way_of_a_batch_begins_a_thread(tmp_path: Path) -> None:
    with LMDBWriter(tmp_path / "records") as writer:
        for index in range(512):
            writer.write((np.full((3, 32, 32), index % 256, np.uint8), torch.full((100,), 0.5), index))
    (tmp_path / "folder/a").mkdir(parents=True)
    for index in range(16):
        (tmp_path / f"folder/a/{index}.jpg").write_bytes(with_orientation(photo(300, 250), 1 + index % 8))
    mask = Image.fromarray(np.arange(300, dtype=np.int32)[None].repeat(250, 0))
    with LMDBWriter(tmp_path / "masks") as writer:
        for index in range(16):
            writer.write((Image.open(_file(encoded(photo(300, 250)), tmp_path / f"{index}.jpg")), mask))
    crops = {
        f"{interpolation} {memory_format}": {
            "decode": "tensor",
            "crop_size": 224,
            "memory_format": memory_format,
            "interpolation": interpolation,
        }
        for interpolation in ("bilinear", "nearest")
        for memory_format in ("channels_last", "contiguous")
    }
    assert threads_begun(
        ("records", tmp_path / "records", {}),
        *((name, tmp_path / "folder", options) for name, options in crops.items()),
        ("cropped masks", tmp_path / "masks", {"decode": "tensor", "crop_size": 224}),
        ("masks", tmp_path / "masks", {"decode": "tensor"}),
        ("large tensors", None, {}),
        ("channels last", None, {}),
    ) == {
        "records": (0, 1024),
        **dict.fromkeys(crops, (0, 32)),
        "cropped masks": (0, 32),
        "masks": (0, 32),
        "large tensors": (0, 512),
        "channels last": (0, 512),
        "a region": (1, 0),
    }


def _file(data: bytes, path: Path) -> Path:
    path.write_bytes(data)
    return path


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
