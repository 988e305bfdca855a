"""Samples in their rows are what torch's ``default_collate`` makes of them."""

from __future__ import annotations

import warnings
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gpuopt.loading.collate import Collate
from lightning_gpuopt.loading.engine.layout import Layout

Pair = namedtuple("Pair", ["image", "label"])


def image(number: int) -> torch.Tensor:
    """An image in channels-last memory, as decoders give it."""
    pixels = np.random.default_rng(number).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    return torch.from_numpy(pixels).permute(2, 0, 1)


SAMPLES: dict[str, Any] = {
    "image and label": lambda i: (image(i), i),
    "negative number": lambda i: -(2**62) + i,
    "floats": lambda i: (i / 3, np.float32(i / 7), np.float64(i)),
    "flags": lambda i: (i % 2 == 0, np.bool_(i % 3 == 0)),
    "dict": lambda i: {"x": torch.full((2, 3), i / 2), "name": f"sample {i} ü", "n": i},
    "nested": lambda i: [{"a": (np.arange(4) + i, [np.int16(i)])}, Pair(image(i), i)],
    "named tuple": lambda i: Pair(torch.tensor(i), f"{i}"),
    "bytes": lambda i: (bytes([i, 0, 255]), ""),
    "text alone": lambda i: f"text {i}",
    "bfloat16": lambda i: torch.full((3,), i / 3, dtype=torch.bfloat16),
    "complex": lambda i: torch.full((2,), complex(i, -i)),
    "half": lambda i: np.full(3, i / 3, np.float16),
    "empty tensor": lambda i: (torch.empty(0, 3), i),
    "0-d array": lambda i: np.array(i, np.int32),
    "array of bools": lambda i: np.array([i % 2 == 0, True]),
    "strided tensor": lambda i: torch.arange(12).reshape(3, 4).t() + i,
    "strided array": lambda i: (np.arange(12).reshape(3, 4) + i)[:, ::2],
}


def placed(layout: Layout, samples: list[Any], size: int) -> Any:
    """A batch of `size` samples, of which the first ones are there."""
    _, num_bytes = layout.starts(size)
    memory = bytearray(b"\xaa" * max(1, num_bytes))
    place = layout.placer(layout.arrays(memory, size))
    assert all(place(sample, row) for row, sample in enumerate(samples))
    return layout.assemble(layout.tensors(memory, size, len(samples)))


def same(one: Any, other: Any) -> None:
    """Both are the same, to the type, dtype, stride and bit."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for each, its in zip(one, other, strict=True):
            same(each, its)
    else:
        assert one == other


@pytest.mark.parametrize("memory_format", ["channels_last", "contiguous"])
@pytest.mark.parametrize("name", SAMPLES)
def test_a_batch_is_what_torch_makes_of_its_samples(name: str, memory_format: Any) -> None:
    collate, samples = Collate(memory_format), [SAMPLES[name](i) for i in range(6)]
    layout = Layout.of(samples[0], collate)
    assert layout is not None
    same(placed(layout, samples, 6), collate(samples))
    same(placed(layout, samples[:4], 9), collate(samples[:4]))


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_taken_out_as_it_was_put_in(name: str) -> None:
    samples = [SAMPLES[name](i) for i in range(3)]
    layout = Layout.of(samples[0], Collate())
    assert layout is not None
    _, num_bytes = layout.starts(3)
    arrays = layout.arrays(bytearray(max(1, num_bytes)), 3)
    place = layout.placer(arrays)
    for row, sample in enumerate(samples):
        assert place(sample, row)
    taken = [layout.sample(arrays, row) for row in range(3)]
    same(Collate("contiguous")(taken), Collate("contiguous")(samples))
    assert [type(each) for each in taken] == [type(each) for each in samples]


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (1, 2.0),
        (1, True),
        (1, 2**70),
        (np.int32(1), np.int64(1)),
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), np.zeros(2, np.float32)),
        (torch.zeros(2), torch.zeros(2, requires_grad=True)),
        (torch.zeros(2), torch.nn.Parameter(torch.zeros(2))),
        (np.zeros(2), np.zeros((2, 1))),
        (np.zeros(2), np.ma.masked_array([1.0, 2.0], [0, 1])),
        ((1, 2), [1, 2]),
        ((1, 2), (1, 2, 3)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ("short", "x" * 4095),
        ("text", b"bytes"),
        ("text", "\udc80"),
        (1, None),
        (image(0), image(0).contiguous()),
        (Pair(1, 2), (1, 2)),
    ],
)
def test_what_is_not_like_the_first_sample_is_not_put_there(first: Any, other: Any) -> None:
    layout = Layout.of(first, Collate())
    assert layout is not None
    place = layout.placer(layout.arrays(bytearray(layout.starts(2)[1]), 2))
    assert place(first, 0)
    assert not place(other, 1)


class Odd(dict[str, int]):
    """A dict that may do anything."""


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates such tensors
        return torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)


@pytest.mark.parametrize(
    "sample",
    [
        None,
        object(),
        Odd(a=1),
        (1, None),
        torch.zeros(2).to_sparse(),
        quantized(),
        np.zeros(2, ">f4"),
        np.array(["a"]),
        {1, 2},
    ],
)
def test_samples_without_a_layout_have_no_layout(sample: Any) -> None:
    assert Layout.of(sample, Collate()) is None


def test_a_collate_fn_of_another_kind_gives_no_layout() -> None:
    assert Layout.of((torch.zeros(2), 1), lambda samples: [samples]) is None
    assert Layout.of(1, lambda samples: 1 / 0) is None
