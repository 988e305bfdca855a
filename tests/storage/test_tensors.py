"""Files of tensors as sources: what torch.save and safetensors write, whole and damaged."""

import datetime
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lightning_gpuopt.storage.errors import DamagedError
from lightning_gpuopt.storage.writing.build import build_lmdb
from tests.storage.source_files import stored

ROWS, LABELS = torch.arange(60, dtype=torch.float16).reshape(5, 3, 4), torch.arange(5) * 7


def built(source: Path, out: Path, **options: Any) -> list[Any]:
    build_lmdb(source, out, progress=False, **options)
    return stored(out)


def assert_alike(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for each, its in zip(one, other, strict=True):
            assert_alike(each, its)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_alike(list(one.values()), list(other.values()))
    else:
        assert one == other


SAVED = {
    "tensor": (ROWS, list(ROWS)),
    "strided": (ROWS.transpose(1, 2), list(ROWS.transpose(1, 2))),
    "numbers": (LABELS, list(LABELS)),
    "tuple": ((ROWS, LABELS), list(zip(ROWS, LABELS, strict=True))),
    "dict": ({"x": ROWS, "y": LABELS}, [{"x": x, "y": y} for x, y in zip(ROWS, LABELS, strict=True)]),
    "ordered": (OrderedDict(x=ROWS), [{"x": x} for x in ROWS]),
    "list": ([(ROWS[0], 3, "a"), {"x": LABELS}], [(ROWS[0], 3, "a"), {"x": LABELS}]),
}


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("old_format", [False, True])
def test_what_torch_save_writes_becomes_samples(tmp_path: Path, name: str, old_format: bool) -> None:
    saved, samples = SAVED[name]
    path = tmp_path / ("x.pth" if old_format else "x.pt")
    torch.save(saved, path, _use_new_zipfile_serialization=not old_format)
    assert_alike(built(path, tmp_path / "out"), samples)


@pytest.mark.parametrize("tensors", [{"x": ROWS}, {"x": ROWS, "y": LABELS}], ids=["one", "two"])
def test_safetensors_become_samples(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / "x.safetensors")
    samples = list(ROWS) if len(tensors) == 1 else SAVED["dict"][1]
    assert_alike(built(tmp_path / "x.safetensors", tmp_path / "out"), samples)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_on_several_processes_it_is_the_same(tmp_path: Path, suffix: str) -> None:
    rows, path = torch.arange(6000).reshape(3000, 2), tmp_path / f"x{suffix}"
    torch.save(rows, path) if suffix == ".pt" else save_file({"x": rows}, path)
    assert_alike(built(path, tmp_path / "two", num_proc=2), list(rows))


@pytest.mark.parametrize(
    ("saved", "complaint"),
    [
        ({"x": ROWS, "y": LABELS[:2]}, r"expected arrays with the same number of rows, got x 5, y 2"),
        ((ROWS, "text"), r"got a tuple of Tensor, str; pass a Dataset"),
        ({}, r"got a dict; pass a Dataset"),
        ([], r"there is no sample in its list"),
        (torch.tensor(3), r"expected arrays with the same number of rows, got  a single value"),
        (torch.zeros(0, 3), r"there is no row in it"),
        (datetime.date(2020, 1, 1), r"it holds datetime\.date; expected tensors.*: pass a Dataset"),
    ],
)
def test_what_is_no_samples_is_refused(tmp_path: Path, saved: Any, complaint: str) -> None:
    torch.save(saved, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=complaint):
        built(tmp_path / "x.pt", tmp_path / "out")


WITHOUT_ELEMENTS = {
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2), torch.zeros(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "meta": lambda: torch.empty(3, 2, device="meta"),
}


@pytest.mark.filterwarnings("ignore:.*(quantized tensor creation|nested tensors|Sparse CSR|TypedStorage)")
@pytest.mark.parametrize("kind", WITHOUT_ELEMENTS)
def test_a_tensor_that_has_no_elements_in_memory_is_named(tmp_path: Path, kind: str) -> None:
    path, out, tensor = tmp_path / "x.pt", tmp_path / "out", WITHOUT_ELEMENTS[kind]()
    cases = [
        (tensor, "its tensor"),
        ((ROWS[:3], tensor), r"its tensor \[1\]"),
        ({"x": tensor}, "its tensor x"),
        ([ROWS, {"x": tensor}], r"row 1: sample\['x'\]"),
    ]
    for saved, where in cases:
        torch.save(saved, path)
        with pytest.raises(TypeError, match=rf"x\.pt: {where} is a {kind} tensor; expected a dense one: store "):
            built(path, out, overwrite=True)


@pytest.mark.parametrize("old_format", [False, True])
def test_views_in_a_list_become_samples(tmp_path: Path, old_format: bool) -> None:
    boxes = torch.arange(5.0)[None]
    views = [boxes[:, 4], boxes[:0, 4], boxes.T, boxes.expand(3, 5), torch.zeros(1, 1, 1).expand(1, 2, 0)]
    torch.save(views, tmp_path / "x.pt", _use_new_zipfile_serialization=not old_format)
    assert_alike(built(tmp_path / "x.pt", tmp_path / "out"), views)


@pytest.mark.parametrize("left", [0, 1, 100, -1])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_file_that_is_broken_off_is_named(tmp_path: Path, suffix: str, left: int) -> None:
    path = tmp_path / f"x{suffix}"
    torch.save(ROWS, path) if suffix == ".pt" else save_file({"x": ROWS}, path)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(DamagedError, match=rf"x\{suffix}: not a .* that can be read"):
        built(path, tmp_path / "out")
