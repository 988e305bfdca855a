import io
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from lightning_gpuopt.images.crop import CenterCrops, RandomCrops
from lightning_gpuopt.loading.collate import Collate, as_it_is
from lightning_gpuopt.loading.elastic_loader import ElasticLoader, make_loader
from lightning_gpuopt.loading.order import Order, mix
from lightning_gpuopt.loading.sampler import ElasticBatchSampler, ElasticSampler
from lightning_gpuopt.loading.samples import EpochSamples
from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.writer import LMDBWriter
from tests.helpers import ends_new_workers
from tests.images.pictures import random_resized_crop


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
    loader = make_loader(dataset, sampler, crops=RandomCrops(32, flip=True), num_workers=workers)
    return {label: crop for batch, labels in loader for crop, label in zip(batch, labels.tolist(), strict=True)}


def test_a_random_crop_depends_on_seed_epoch_and_position_only(images: LMDBDataset) -> None:
    alone, with_workers = crops(images, 0), crops(images, 2)
    ranks = {k: v for rank in range(2) for k, v in crops(images, 1, rank=rank, world_size=2).items()}
    assert sorted(alone) == sorted(with_workers) == sorted(ranks) == list(range(20))
    order = Order(20, seed=3).at(1, np.arange(20)).tolist()
    for position, index in enumerate(order):
        crop = alone[index]
        rng = np.random.Generator(np.random.Philox(key=mix(3, 1, position)))
        assert torch.equal(crop, random_resized_crop(jpeg(index), 32, rng, flip=True))
        assert torch.equal(crop, with_workers[index])
        assert torch.equal(crop, ranks[index])
    another_epoch = crops(images, 0, epoch=2)
    assert not any(torch.equal(crop, another_epoch[index]) for index, crop in alone.items())


def test_repeated_draws_of_a_sample_get_crops_of_their_own(images: LMDBDataset) -> None:
    for dataset, order in (
        (images, Order(20, weights=[0.0] * 7 + [1.0] + [0.0] * 12)),
        (Subset(images, [7] * 20), Order(20, shuffle=False)),
    ):
        loader = make_loader(dataset, ElasticSampler(order, 20), crops=RandomCrops(32))
        ((batch, labels),) = loader
        assert labels.tolist() == [7] * 20
        assert len({crop.numpy().tobytes() for crop in batch}) == 20


def test_evaluation_crops_the_middle(images: LMDBDataset) -> None:
    loader = make_loader(images, ElasticSampler(Order(20, shuffle=False), 6), crops=CenterCrops(32))
    batch, labels = next(iter(loader))
    assert labels.tolist() == list(range(6))
    assert torch.equal(batch, torch.stack([CenterCrops(32)(jpeg(index)) for index in range(6)]))


class Labelled(LMDBDataset):
    """A subclass that makes more of a sample."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image, label, f"sample {label}"


@pytest.mark.parametrize("workers", [0, 1])
def test_subclasses_subsets_and_concatenations_are_cropped(images: LMDBDataset, workers: int) -> None:
    nest = ConcatDataset([Subset(images, [7, 3]), Labelled(images.path), Subset(Subset(images, range(5)), [-1])])
    with pytest.raises(TypeError, match="with_decoder"):
        make_loader(
            ConcatDataset([images, TensorDataset(torch.zeros(2))]), ElasticSampler(Order(2), 1), crops=CenterCrops(8)
        )
    loader = make_loader(nest, ElasticSampler(Order(23, shuffle=False), 1), crops=CenterCrops(32), num_workers=workers)
    seen = list(loader)
    assert [int(sample[1]) for sample in seen] == [7, 3, *range(20), 4]
    assert [len(sample) for sample in seen] == [2, 2, *[3] * 20, 2]
    for sample in seen:
        assert torch.equal(sample[0][0], CenterCrops(32)(jpeg(int(sample[1]))))
    assert images._decoder is LMDBDataset(images.path, decode="tensor")._decoder  # the user's own are as they were


def test_batches_of_crops_are_default_collates_in_the_memory_format_asked_for(images: LMDBDataset) -> None:
    samples = EpochSamples(images, RandomCrops(32)).__getitems__([0, 1, 2])
    expected, expected_labels = default_collate(samples)
    for name, memory_format in (("channels_last", torch.channels_last), ("contiguous", torch.contiguous_format)):
        batch, labels = Collate(name)(samples)  # type: ignore[arg-type]
        assert torch.equal(batch, expected)
        assert torch.equal(labels, expected_labels)
        assert batch.is_contiguous(memory_format=memory_format)


def test_other_tensors_are_collated_as_ever() -> None:
    for samples in (
        [torch.arange(12.0).view(3, 2, 2) + i for i in range(3)],
        [torch.zeros(1, 1, 1), torch.ones(1, 1, 1)],
        [{"a": torch.zeros(2), "b": "text"}] * 2,
    ):
        one, other = Collate()(samples), default_collate(samples)
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


def jagged(path: Path, *samples: Any) -> LMDBDataset:
    with LMDBWriter(path) as writer:
        for sample in samples:
            writer.write(sample)
    return LMDBDataset(path)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_different_makes_are_named(tmp_path: Path, workers: int) -> None:
    for number, (one, other, makes) in enumerate(
        (
            (np.zeros((2, 3)), np.zeros((2, 4)), (r"float64 \[2, 3\]", r"float64 \[2, 4\]")),
            ((1, 2), (1, "a"), (r"\(int, int\)", r"\(int, str\)")),
            ({"a": 1}, {"b": 1}, (r"\{a: int\}", r"\{b: int\}")),
            ((1, 2), (1, 2, 3), (r"\(int, int\)", r"\(int, int, int\)")),
        )
    ):
        dataset = jagged(tmp_path / str(number), one, one, other)
        loader = make_loader(Subset(dataset, [1, 2]), ElasticSampler(Order(2, shuffle=False), 2), num_workers=workers)
        expected = rf"sample 1 is {makes[0]}, .*sample 2 is {makes[1]}; bring them"
        with pytest.raises(RuntimeError, match=expected), ends_new_workers():
            list(loader)


def test_pil_images_cannot_be_batched_and_the_error_says_what_can(images: LMDBDataset) -> None:
    loader = make_loader(LMDBDataset(images.path), ElasticSampler(Order(20, shuffle=False), 2))
    with pytest.raises(RuntimeError, match=r"sample 0 is \(a PIL image RGB of 80x60, int\); use decode='tensor'"):
        next(iter(loader))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_that_raises_is_named_with_its_sample(images: LMDBDataset, workers: int) -> None:
    dataset = LMDBDataset(images.path, transform=_raises)
    loader = make_loader(dataset, ElasticSampler(Order(20, shuffle=False), 2), num_workers=workers)
    with pytest.raises(ZeroDivisionError) as caught:
        list(loader)
    text = "".join(traceback.format_exception(caught.value))
    assert f"raised by a transform of {images.path}: sample 0" in text


def _raises(image: Any) -> Any:
    return 1 / 0


def test_subclasses_that_make_more_of_a_sample_are_not_gathered(tmp_path: Path) -> None:
    jagged(tmp_path / "d", *[(np.full(3, i), i) for i in range(6)])

    class Doubled(LMDBDataset):
        def __getitem__(self, index: int) -> Any:
            values, label = super().__getitem__(index)
            return values * 2, label

    class Plain(LMDBDataset):
        """Adds nothing to a sample."""

    for kind, gathers, factor in ((Doubled, False, 2), (Plain, True, 1)):
        dataset = ConcatDataset([kind(tmp_path / "d"), Subset(kind(tmp_path / "d"), [5, 0])])
        loader = make_loader(dataset, ElasticSampler(Order(8, shuffle=False), 3))
        assert getattr(loader.dataset, "gathers_batches", False) is gathers
        values, labels = (torch.cat(each) for each in zip(*loader, strict=True))
        assert labels.tolist() == [0, 1, 2, 3, 4, 5, 5, 0]
        assert torch.equal(values, labels[:, None].expand(-1, 3) * factor)


def test_datasets_of_other_makes_are_not_gathered_together(tmp_path: Path) -> None:
    both = ConcatDataset([jagged(tmp_path / "a", 1, 2), jagged(tmp_path / "b", 1.5, 2.5)])
    loader = make_loader(both, ElasticSampler(Order(4, shuffle=False), 2))
    assert [batch.tolist() for batch in loader] == [[1, 2], [1.5, 2.5]]


def test_a_dataset_of_ones_own_may_offer_the_same(images: LMDBDataset) -> None:
    class Own(Dataset[Any]):
        """What a user writes to have crops: a method that gives a copy."""

        def __init__(self, decoder: Any = None) -> None:
            self.decoder = decoder

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return self.decoder(jpeg(index)), index

        def with_decoder(self, decoder: Any) -> "Own":
            return Own(decoder)

    loader = make_loader(Subset(Own(), [2, 0]), ElasticSampler(Order(2, shuffle=False), 2), crops=CenterCrops(32))
    ((batch, labels),) = loader
    assert labels.tolist() == [2, 0]
    assert torch.equal(batch, torch.stack([CenterCrops(32)(jpeg(index)) for index in (2, 0)]))


class _Announced(Dataset[torch.Tensor]):
    gathers_batches = True

    def __init__(self) -> None:
        self.announced: list[int] = []

    def announce(self, indices: list[int]) -> None:
        self.announced.append(indices[0])

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor(indices)


def test_batches_are_announced_before_they_are_gathered() -> None:
    source, sampler = _Announced(), ElasticSampler(Order(20, shuffle=False), 4)
    loader = ElasticLoader(source, batch_sampler=ElasticBatchSampler(sampler, 4, False), collate_fn=as_it_is)
    seen = []
    for batch in loader:
        seen.append(int(batch[0]))
        assert source.announced == [0, 4, 8, 12, 16][: len(seen) + 2]
    assert seen == [0, 4, 8, 12, 16]
