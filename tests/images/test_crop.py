from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_gpuopt.images import jpeg
from lightning_gpuopt.images.crop import CenterCrops, RandomCrops, draw_area, keyed_generator
from lightning_gpuopt.images.decode import decode_pil
from tests.images.pictures import encoded, photo, pixels, random_resized_crop, with_orientation


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (300, 300), (257, 400)])
def test_the_evaluation_crop_is_pils_resize_and_centre(width: int, height: int) -> None:
    data = encoded(photo(width, height))
    wide, high = (256, 256 * height // width) if width <= height else (256 * width // height, 256)
    image = decode_pil(data).resize((wide, high), Image.Resampling.BILINEAR)
    left, top = round((wide - 224) / 2), round((high - 224) / 2)
    expected = np.asarray(image.crop((left, top, left + 224, top + 224))).astype(int)
    got = pixels(CenterCrops(224)(data)).astype(int)
    assert got.shape == expected.shape
    assert np.abs(got - expected).mean() < 0.5
    assert np.abs(got - expected).max() <= 3


def test_a_random_crop_is_what_its_generator_says() -> None:
    data = encoded(photo(500, 375))
    crops = [random_resized_crop(data, 64, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert crops[0].shape == (3, 64, 64)
    assert crops[0].dtype == torch.uint8
    assert torch.equal(crops[0], crops[1])
    assert not torch.equal(crops[0], crops[2])


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_crop_of_everything_is_a_resize(orientation: int) -> None:
    data = with_orientation(photo(240, 240), orientation)
    got = random_resized_crop(data, 80, np.random.default_rng(0), scale=(1, 1), ratio=(1, 1))
    expected = np.asarray(decode_pil(data).resize((80, 80), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(pixels(got).astype(int) - expected).mean() < 3  # decoded at half size


@pytest.mark.parametrize("kind", ["TIFF", "PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_crops_are_of_the_upright_image_in_every_format(kind: str, orientation: int) -> None:
    rows, columns = np.mgrid[0:90, 0:240]
    image = Image.fromarray(np.stack([columns, rows * 2, 0 * rows], 2).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(image, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    upright = decode_pil(data)
    assert upright.size == ((90, 240) if orientation >= 5 else (240, 90))
    crops = RandomCrops(24)
    for key in range(4):
        crops.begin(key)
        area = draw_area(upright.height, upright.width, np.random.Generator(np.random.Philox(key=key)))
        box = (area.left, area.top, area.left + area.width, area.top + area.height)
        expected = np.asarray(upright.crop(box).resize((24, 24), Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(pixels(crops(data)).astype(int) - expected).mean() < 4


def test_another_thread_than_the_samples_is_refused_with_a_sentence() -> None:
    crops = RandomCrops(8)
    crops.begin(1)
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="in another thread"):
        pool.submit(crops, encoded(photo())).result()


def gradient(width: int, height: int) -> bytes:
    """Red tells the column and green the row, in sixteenths of the image."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return encoded(Image.fromarray(np.stack([x, y, 0 * x], 2).astype(np.uint8)), "PNG")


@pytest.mark.matrix
def test_random_areas_have_the_distribution_of_torchvision() -> None:
    """Areas uniform in 8-100 %, aspect ratios log-uniform in 3/4-4/3, places uniform."""
    data, rng = gradient(400, 400), np.random.default_rng(0)
    spans = []
    for _ in range(600):
        crop = pixels(random_resized_crop(data, 16, rng)).astype(float)
        left, right = crop[:, 0, 0].mean(), crop[:, -1, 0].mean()
        top, bottom = crop[0, :, 1].mean(), crop[-1, :, 1].mean()
        spans.append(((right - left) / 255, (bottom - top) / 255, left, top))
    wide, high = np.array([s[:2] for s in spans]).T * 16 / 15  # centres of the outer pixels
    area, aspect = wide * high, wide / high
    # Areas of more than about 75 % are drawn again more often, because they must fit: the mean is below 54 %.
    assert 0.45 < area.mean() < 0.55
    assert 0.06 < area.min() < 0.12
    assert area.max() > 0.9
    assert np.log(aspect).mean() == pytest.approx(0, abs=0.03)
    assert 0.7 < aspect.min() < aspect.max() < 1.45


def test_a_panorama_is_cropped_in_the_middle_when_no_area_fits() -> None:
    got = random_resized_crop(gradient(1000, 10), 8, np.random.default_rng(0), scale=(1, 1))
    red = pixels(got)[:, :, 0].mean()
    assert red == pytest.approx(127, abs=5)


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_blocks": 5}], ids=str
)
@pytest.mark.parametrize("size", [pytest.param(64, marks=pytest.mark.matrix), 16])  # decoded in full, and at half size
def test_rows_below_a_crop_are_left_out_without_a_trace(
    options: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(photo(500, 375), **options)
    crops = [random_resized_crop(data, size, np.random.default_rng(seed)) for seed in range(100)]
    monkeypatch.setattr(jpeg, "baseline_frame", lambda data: None)
    whole = [random_resized_crop(data, size, np.random.default_rng(seed)) for seed in range(100)]
    assert all(torch.equal(crop, other) for crop, other in zip(crops, whole, strict=True))


def test_only_the_rows_that_a_crop_needs_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    heights = []
    decode = jpeg.decode_upper

    def counted(*arguments: Any) -> Any:
        pixels = decode(*arguments)
        heights.append(len(pixels))
        return pixels

    monkeypatch.setattr(jpeg, "decode_upper", counted)
    data = encoded(photo(500, 375))
    for seed in range(200):
        random_resized_crop(data, 224, np.random.default_rng(seed))
    assert len(heights) == 200
    assert np.mean(heights) < 0.95 * 375


def test_a_truncated_jpeg_is_an_error_also_where_the_crop_is_above() -> None:
    data = encoded(photo(500, 375))
    cut = data[: len(data) * 9 // 10]
    for seed in range(20):
        with pytest.raises(OSError, match="truncated"):
            random_resized_crop(cut, 64, np.random.default_rng(seed))


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1])
def test_a_keyed_generator_is_the_one_of_its_key(key: int) -> None:
    keyed_generator(7).integers(10, size=3)  # leaves half a draw in the buffer
    fresh = np.random.Generator(np.random.Philox(key=key))
    assert np.array_equal(keyed_generator(key).integers(1000, size=9), fresh.integers(1000, size=9))
