import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset, TensorDataset, default_collate

from lightning_gpuopt.images.decode import random_resized_crop, resize_and_center_crop
from lightning_gpuopt.loading.loader import Cropped, collate_images, make_loader
from lightning_gpuopt.loading.order import Order, mix
from lightning_gpuopt.loading.sampler import BatchIndices, ElasticSampler
from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.writer import LMDBWriter


def jpeg(seed: int) -> bytes:
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(small).resize((80, 60)).save(out, "JPEG")
    return out.getvalue()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> LMDBDataset:
    path = tmp_path_factory.mktemp("images") / "data"
    with LMDBWriter(path, samples_per_shard=8) as writer:
        for index in range(20):
            writer.write((EncodedImage(jpeg(index)), index))
    return LMDBDataset(path, decode="tensor")


def crops(dataset: Any, workers: int, epoch: int = 1, **options: Any) -> dict[int, torch.Tensor]:
    sampler = ElasticSampler(Order(len(dataset), seed=3), 6, **options)
    sampler.set_epoch(epoch)
    loader = make_loader(dataset, sampler, crop_size=32, train=True, num_workers=workers)
    return {label: crop for batch, labels in loader for crop, label in zip(batch, labels.tolist(), strict=True)}


def test_a_random_crop_depends_on_seed_epoch_and_sample_only(images: LMDBDataset) -> None:
    alone, with_workers = crops(images, 0), crops(images, 2)
    ranks = {k: v for rank in range(2) for k, v in crops(images, 1, rank=rank, world_size=2).items()}
    assert sorted(alone) == sorted(with_workers) == sorted(ranks) == list(range(20))
    for index, crop in alone.items():
        rng = np.random.Generator(np.random.Philox(key=mix(3, 1, index)))
        assert torch.equal(crop, random_resized_crop(jpeg(index), 32, rng))
        assert torch.equal(crop, with_workers[index])
        assert torch.equal(crop, ranks[index])
    another_epoch = crops(images, 0, epoch=2)
    assert not any(torch.equal(crop, another_epoch[index]) for index, crop in alone.items())


def test_evaluation_crops_the_middle(images: LMDBDataset) -> None:
    loader = make_loader(images, ElasticSampler(Order(20, shuffle=False), 6), crop_size=32)
    batch, labels = next(iter(loader))
    assert labels.tolist() == list(range(6))
    assert torch.equal(batch, torch.stack([resize_and_center_crop(jpeg(index), 32) for index in range(6)]))


def test_a_subset_keeps_the_crops_of_its_samples(images: LMDBDataset) -> None:
    part = Subset(images, [7, 3])
    batch, _ = Cropped(images, np.array([7, 3]), 32, seed=3, train=True).__getitems__(BatchIndices([1], 1))[0]
    assert torch.equal(batch, crops(images, 0)[3])
    assert sorted(crops(part, 0)) == [3, 7]


def test_batches_of_crops_are_default_collates_in_channels_last_memory(images: LMDBDataset) -> None:
    samples = Cropped(images, None, 32, train=True).__getitems__([0, 1, 2])
    batch, labels = collate_images(samples)
    expected, expected_labels = default_collate(samples)
    assert torch.equal(batch, expected)
    assert torch.equal(labels, expected_labels)
    assert batch.is_contiguous(memory_format=torch.channels_last)


def test_other_tensors_are_collated_as_ever() -> None:
    for samples in (
        [torch.arange(12.0).view(3, 2, 2) + i for i in range(3)],
        [torch.zeros(1, 1, 1), torch.ones(1, 1, 1)],
        [{"a": torch.zeros(2), "b": "text"}] * 2,
    ):
        one, other = collate_images(samples), default_collate(samples)
        assert str(one) == str(other)
        if isinstance(one, torch.Tensor):
            assert one.stride() == other.stride()


def test_any_map_style_dataset_is_loaded() -> None:
    dataset = TensorDataset(torch.arange(10))
    loader = make_loader(dataset, ElasticSampler(Order(10, shuffle=False), 4), num_workers=1, prefetch_factor=3)
    assert [batch.tolist() for (batch,) in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert (loader.prefetch_factor, loader.persistent_workers) == (3, True)


def test_the_loader_shows_its_elastic_sampler() -> None:
    sampler = ElasticSampler(Order(10), 4)
    assert make_loader(TensorDataset(torch.arange(10)), sampler).sampler is sampler
