"""torchvision's tensors in a dataset: with torchvision they keep class and format, without it their values.

In processes of their own, with classes that stand in for torchvision's where that is not installed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.fork_server import run_code

CLASSES = """
import enum
import torch

class BoundingBoxFormat(enum.Enum):
    XYXY, XYWH, CXCYWHR = "XYXY", "XYWH", "CXCYWHR"

class TVTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

class Image(TVTensor):
    def __new__(cls, data):
        return torch.as_tensor(data).as_subclass(cls)

class Video(Image): ...
class Mask(Image): ...

class BoundingBoxes(TVTensor):
    def __new__(cls, data, *, format, canvas_size, clamping_mode="soft"):
        boxes = torch.as_tensor(data).as_subclass(cls)
        boxes.format = BoundingBoxFormat[format] if isinstance(format, str) else format
        boxes.canvas_size, boxes.clamping_mode = canvas_size, clamping_mode
        return boxes
"""

WRITE = """
import torch
from torchvision import tv_tensors as tv
from lightning_gpuopt.storage.writer import LMDBWriter
pixels = torch.arange(48, dtype=torch.uint8).view(3, 4, 4)
samples = [
    {
        "image": tv.Image(pixels), "mask": tv.Mask(pixels[:1] > 7), "video": tv.Video(pixels.expand(2, 3, 4, 4)),
        "boxes": tv.BoundingBoxes(torch.rand(count, 4), format=name, canvas_size=(4, width)),
        "turned": tv.BoundingBoxes(torch.rand(1, 5), format="CXCYWHR", canvas_size=(9, 8), clamping_mode=None),
        "list": [tv.Mask(pixels), torch.ones(2)],
    }
    for count, name, width in ((2, "XYXY", 7), (0, "XYWH", 1000), (1, tv.BoundingBoxFormat.XYWH, 7))
]
with LMDBWriter("data") as writer:
    for sample in samples:
        writer.write(sample)
torch.save([{name: value.as_subclass(torch.Tensor) for name, value in each.items() if name != "list"}
            for each in samples], "plain.pt")
"""

COMPARE = """
import pickle
from lightning_gpuopt.storage.reader import LMDBDataset
dataset = LMDBDataset("data")

def facts(value):
    known = {name: getattr(value, name, None) for name in ("format", "canvas_size", "clamping_mode")}
    return type(value), value.dtype, value.as_subclass(torch.Tensor).tolist(), known

def all_facts(sample):
    return [facts(each) for value in sample.values() for each in (value if type(value) is list else [value])]

for read in (pickle.loads(pickle.dumps(dataset)).__getitems__([0, 1, 2]), [dataset[index] for index in range(3)]):
    assert list(map(all_facts, read)) == list(map(all_facts, samples))
print(type(dataset[0]["boxes"]).__name__, dataset[1]["boxes"].canvas_size)
"""

WITHOUT = """
import sys, warnings
import torch
sys.modules["torchvision"] = None
from lightning_gpuopt.storage.reader import LMDBDataset
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    dataset = LMDBDataset("data")
    read = [dataset[index] for index in range(3)]
for sample, plain in zip(read, torch.load("plain.pt"), strict=True):
    assert all(type(sample[name]) is torch.Tensor and sample[name].equal(value) for name, value in plain.items())
print([str(each.message).split(" (")[0] for each in told])
"""


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The beginning of each program: torchvision's classes can be imported."""
    monkeypatch.chdir(tmp_path)
    if importlib.util.find_spec("torchvision") is not None:
        return ""
    package = tmp_path / "stand_in/torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "tv_tensors.py").write_text(CLASSES)
    return f"import sys; sys.path.insert(0, {str(tmp_path / 'stand_in')!r})\n"


def test_class_format_and_canvas_size_come_back(own_folder: str, tmp_path: Path) -> None:
    ended = run_code(own_folder + WRITE + COMPARE, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "BoundingBoxes (4, 1000)\n"), ended.stderr


def test_without_torchvision_they_are_plain_tensors_which_is_said_once(own_folder: str, tmp_path: Path) -> None:
    written = run_code(own_folder + WRITE, cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    ended = run_code(WITHOUT, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == '["samples have tensors of torchvision\'s classes"]\n'
