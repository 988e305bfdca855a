import pickle
from typing import Any

import pytest
import torch

from lightning_gpuopt.images.normalize import Normalize

MEAN, STD = (0.1, 0.5, 0.9), (0.2, 0.25, 0.5)


def expected(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(each, dtype=torch.float64).view(-1, 1, 1) for each in (MEAN, STD))
    return (images.double() / 255 - mean) / std


def images(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 3, 1, 1), (4, 3, 8, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_batches_keep_their_memory_format(memory_format: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch = images(*shape).contiguous(memory_format=memory_format)
    before = batch.clone()
    done, found = Normalize(MEAN, STD)(batch, dtype)
    assert (found, done.dtype, done.shape) == (1, dtype, shape)
    assert done.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(
        done,
        expected(batch).to(dtype),
        rtol=2e-2 if dtype.itemsize == 2 else 1e-5,
        atol=2e-2 if dtype.itemsize == 2 else 1e-5,
    )
    assert torch.equal(batch, before)


def test_strided_images_and_lists_of_images_are_normalised() -> None:
    batch = images(2, 3, 8, 8)[:, :, ::2, 1:]
    torch.testing.assert_close(Normalize(MEAN, STD)(batch)[0], expected(batch).float())
    several = [images(3, 4, 5), images(3, 6, 2)]
    done, found = Normalize(MEAN, STD)((several, [{"boxes": torch.zeros(2, 4)}]))
    assert found == 2
    for one, other in zip(done[0], several, strict=True):
        torch.testing.assert_close(one, expected(other).float())


def test_paths_are_left_alone_with_all_that_is_below() -> None:
    batch = {"a": images(1, 3, 2, 2), "b": [images(1, 3, 2, 2), images(3, 2, 2)]}
    done, found = Normalize(MEAN, STD)(batch, exact=[("b",)])
    assert found == 1
    assert done["b"] is batch["b"]
    assert Normalize(MEAN, STD)(images(1, 3, 2, 2), exact=[()])[1] == 0


def test_a_pickle_takes_no_constants_along() -> None:
    normalize = Normalize(MEAN, STD)
    normalize(images(1, 3, 2, 2))
    assert normalize._constants
    assert not pickle.loads(pickle.dumps(normalize))._constants


def test_images_of_many_widths_keep_few_constants() -> None:
    normalize = Normalize(MEAN, STD)
    for width in range(1, 200):
        batch = images(1, 3, 2, width).contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(normalize(batch)[0], expected(batch).float())
    assert len(normalize._constants) <= 64
