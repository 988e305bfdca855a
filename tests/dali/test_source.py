"""What goes into a pipeline: order, areas, errors and readings, without DALI."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_gpuopt.dali.encoded_images import EncodedImages, FileList
from lightning_gpuopt.dali.source import BatchSource, center_area, random_area
from lightning_gpuopt.images.crop import RandomCrops
from lightning_gpuopt.images.errors import CorruptSampleError
from lightning_gpuopt.loading.order import mix
from lightning_gpuopt.loading.sampler import BatchIndices
from lightning_gpuopt.loading.samples import SkippedSamples
from tests.dali.runs import write_list


@pytest.fixture
def images(tmp_path: Path) -> EncodedImages:
    return EncodedImages(FileList(write_list(tmp_path / "data", 20)))


@pytest.fixture
def source(images: EncodedImages) -> Iterator[BatchSource]:
    made = BatchSource(images, random_area, seed=3)
    yield made
    made.close()


def plan(*batches: list[int], epoch: int = 0) -> list[BatchIndices]:
    starts = np.cumsum([0, *map(len, batches)]).tolist()
    return [BatchIndices(batch, epoch, start) for batch, start in zip(batches, starts[:-1], strict=True)]


def test_batches_come_in_their_order_with_bytes_and_labels(source: BatchSource, images: EncodedImages) -> None:
    wanted = [[3, 1], [19], [0, 2, 4, 6, 8, 10, 12], [5]]
    given = list(source.batches(plan(*wanted)))
    assert [list(batch.indices) for batch in given] == wanted == [batch.labels.tolist() for batch in given]
    for batch in given:
        for index, image in zip(batch.indices, batch.images, strict=True):
            assert image.tobytes() == Path(images.name(index)).read_bytes()


def test_a_label_of_a_list_is_a_whole_number_of_64_bits(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(f"a b.jpg {2**63 - 1}\nc.jpg {-(2**63)}\n")
    assert FileList(tmp_path / "list.txt").targets.tolist() == [2**63 - 1, -(2**63)]
    for label in (2**63, -(2**63) - 1, 1.5, "b"):
        (tmp_path / "list.txt").write_text(f"a.jpg 1\nb.jpg {label}\n")
        with pytest.raises(ValueError, match=r"line 2: expected PATH LABEL, the label a whole number; got 'b\.jpg "):
            FileList(tmp_path / "list.txt")


def test_areas_are_those_of_the_fast_decoder(source: BatchSource) -> None:
    batches = list(source.batches(plan([4, 7], [1], epoch=2)))
    crops = RandomCrops(8, flip=True)
    for position, (batch, at) in enumerate([(batches[0], 0), (batches[0], 1), (batches[1], 0)]):
        crops.begin(mix(3, 2, position))
        expected = crops._area(16, 24)
        assert batch.areas is not None
        pixels = batch.areas[at, :4].astype(float) * [16, 24, 16, 24]
        assert pixels.tolist() == pytest.approx(expected[:4], abs=1e-4)
        assert bool(batch.areas[at, 4]) == expected.mirrored


@pytest.mark.parametrize(
    ("height", "width", "area"),
    [
        (256, 256, (16, 16, 240, 240)),
        (512, 512, (32, 32, 480, 480)),
        (256, 300, (16, 38, 240, 262)),
        (128, 128, (8, 8, 120, 120)),
        (300, 256, (38, 16, 262, 240)),
    ],
)
def test_the_middle_in_shares_of_the_image(height: int, width: int, area: tuple[float, ...]) -> None:
    found = center_area(256, 224, height, width, 0)
    assert np.multiply(found, (height, width, height, width)).tolist() == pytest.approx(area)


def test_bytes_that_are_no_image_go_nowhere(tmp_path: Path) -> None:
    (tmp_path / "sound.wav").write_bytes(b"RIFF")
    (tmp_path / "list.txt").write_text("sound.wav 1\n")
    source = BatchSource(EncodedImages(FileList(tmp_path / "list.txt")), None)
    with pytest.raises(CorruptSampleError, match=r"sound.wav: it is not an image that can be decoded \(Unidentified"):
        list(source.batches(plan([0])))
    source.close()


def test_a_sample_left_out_stays_out(tmp_path: Path, images: EncodedImages) -> None:
    skipped = SkippedSamples(tmp_path / "skipped.csv")
    source = BatchSource(images, None, skipped=skipped)
    with pytest.warns(UserWarning, match="image 4.bmp cannot be read and is skipped: it is bad"):
        source.leave_out(4, CorruptSampleError("it is bad"))
    given = [batch.indices for batch in source.batches(plan([3, 4, 5], [4, 6]))]
    source.close()
    assert given == [(3, 5), (6,)]
    assert skipped.read() == {images.name(4): "it is bad"}


def test_files_are_read_while_a_batch_is_used(images: EncodedImages) -> None:
    begun = {index: threading.Event() for index in range(4)}

    class Watched(EncodedImages):
        def read(self, index: int) -> Any:
            begun[index].set()
            return super().read(index)

    source = BatchSource(Watched(FileList(images._dataset.path)), None)
    batches = source.batches(plan([0], [1], [2], [3]))
    next(batches)
    assert begun[1].wait(60)
    assert begun[2].wait(60)
    batches.close()  # type: ignore[attr-defined]
    source.close()
    assert not begun[3].is_set()


def test_leaving_an_epoch_leaves_no_thread(source: BatchSource) -> None:
    before = set(threading.enumerate())
    batches = source.batches(plan([0], [1], [2], [3]))
    next(batches)
    assert set(threading.enumerate()) > before
    batches.close()  # type: ignore[attr-defined]
    source.close()
    assert set(threading.enumerate()) <= before


def test_what_reading_took_is_counted(source: BatchSource) -> None:
    list(source.batches(plan([0, 1], [2])))
    times = source.times
    assert times.cpu_s > 0
    assert times.wall_s > 0
    assert times.wait_s >= 0


class TestEncodedBatch:
    def test_without_some(self, source: BatchSource) -> None:
        (batch,) = source.batches(plan([3, 1, 7]))
        rest = batch.changed({}, [1])
        assert rest.indices == (3, 7)
        assert rest.labels.tolist() == [3, 7]
        assert [image.tobytes() for image in rest.images] == [batch.images[at].tobytes() for at in (0, 2)]
        assert batch.areas is not None
        assert rest.areas is not None
        assert rest.areas.tolist() == batch.areas[[0, 2]].tolist()

    def test_with_other_images(self, source: BatchSource) -> None:
        (batch,) = source.batches(plan([3, 1]))
        other = np.zeros(3, np.uint8)
        assert [image.tobytes() for image in batch.changed({1: other}, ()).images] == [
            batch.images[0].tobytes(),
            other.tobytes(),
        ]
