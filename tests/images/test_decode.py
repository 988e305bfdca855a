import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from skimage import data as pictures

from lightning_gpuopt.images import decode as images
from lightning_gpuopt.images.decode import (
    decode_pil,
    decode_tensor,
    jpeg_orientation,
    random_resized_crop,
    resize_and_center_crop,
)


def photo(width: int = 200, height: int = 120) -> Image.Image:
    return Image.fromarray(pictures.astronaut()).resize((width, height))


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **({"quality": 95} if kind == "JPEG" else {}) | options)
    return out.getvalue()


def with_orientation(image: Image.Image, orientation: int, **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, exif=exif, **options)


def pixels(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_exif_orientation_is_applied_by_both_decoders(orientation: int) -> None:
    data = with_orientation(photo(), orientation)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert jpeg_orientation(data) == orientation
    assert np.array_equal(np.asarray(decode_pil(data)), np.asarray(upright))
    assert decode_tensor(data).shape == (3, upright.height, upright.width)
    difference = np.abs(pixels(decode_tensor(data)).astype(int) - np.asarray(upright))
    assert difference.mean() < 1  # two builds of libjpeg may round differently


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_big_endian_exif_block_is_read(orientation: int) -> None:
    tiff = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0" + bytes([orientation]) + b"\0\0\0\0\0\0"
    segment = b"Exif\0\0" + tiff
    data = b"\xff\xd8\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + b"\xff\xda"
    assert jpeg_orientation(data) == orientation


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xd8\xff\xe1\0\x10Exif\0\0II", b"\xff\xd8\xff\xe1\xff\xffExif\0\0MM\0*\xff\xff\xff\xff"]
)
def test_a_broken_exif_block_counts_as_none(data: bytes) -> None:
    assert jpeg_orientation(data) == 1


@pytest.mark.parametrize(
    "image",
    [
        photo().convert("L"),
        photo().convert("P"),
        photo().convert("RGBA"),
        photo().convert("1"),
        photo().convert("L").convert("LA"),
        photo().convert("L").convert("I"),
    ],
    ids=lambda image: image.mode,
)
def test_every_mode_becomes_rgb(image: Image.Image) -> None:
    data = encoded(image, "TIFF" if image.mode == "I" else "PNG")
    assert decode_pil(data).mode == "RGB"
    assert np.array_equal(pixels(decode_tensor(data)), np.asarray(decode_pil(data)))


def test_a_16_bit_image_keeps_its_range() -> None:
    ramp = np.linspace(0, 65535, 256, dtype=np.uint16).reshape(16, 16)
    data = encoded(Image.fromarray(ramp), "PNG")
    assert np.array_equal(np.asarray(decode_pil(data))[:, :, 0], ramp >> 8)


def test_a_cmyk_and_a_grey_jpeg_become_rgb() -> None:
    for mode in ("CMYK", "L"):
        data = encoded(photo().convert(mode))
        assert decode_tensor(data).shape == (3, 120, 200)
        assert np.abs(pixels(decode_tensor(data)).astype(int) - np.asarray(decode_pil(data))).mean() < 1


@pytest.mark.parametrize("decode", [decode_pil, decode_tensor, lambda d: resize_and_center_crop(d, 32)])
@pytest.mark.parametrize("data", [b"", b"no image", encoded(photo())[:2000], encoded(photo(), "PNG")[:5000]])
def test_a_broken_image_is_an_error(decode: Callable[[bytes], Any], data: bytes) -> None:
    with pytest.raises((OSError, SyntaxError, ValueError)):
        decode(data)


def test_what_pil_lets_pass_is_decoded() -> None:
    good = encoded(photo())
    scan = good.index(b"\xff\xda")
    doubtful = good[: scan + 2000] + b"\xff\xd3" + good[scan + 2000 :]  # a restart marker where none belongs
    assert decode_pil(doubtful).size == (200, 120)
    assert np.array_equal(pixels(decode_tensor(doubtful)), np.asarray(decode_pil(doubtful)))


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (300, 300), (257, 400)])
def test_the_evaluation_crop_is_pils_resize_and_centre(width: int, height: int) -> None:
    data = encoded(photo(width, height))
    wide, high = (256, 256 * height // width) if width <= height else (256 * width // height, 256)
    image = decode_pil(data).resize((wide, high), Image.Resampling.BILINEAR)
    left, top = round((wide - 224) / 2), round((high - 224) / 2)
    expected = np.asarray(image.crop((left, top, left + 224, top + 224))).astype(int)
    got = pixels(resize_and_center_crop(data, 224)).astype(int)
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


def gradient(width: int, height: int) -> bytes:
    """Red tells the column and green the row, in sixteenths of the image."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return encoded(Image.fromarray(np.stack([x, y, 0 * x], 2).astype(np.uint8)), "PNG")


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
@pytest.mark.parametrize("size", [64, 16])  # decoded in full, and at half size
def test_rows_below_a_crop_are_left_out_without_a_trace(
    options: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(photo(500, 375), **options)
    crops = [random_resized_crop(data, size, np.random.default_rng(seed)) for seed in range(20)]
    monkeypatch.setattr(images, "_baseline_frame", lambda data: None)
    whole = [random_resized_crop(data, size, np.random.default_rng(seed)) for seed in range(20)]
    assert all(torch.equal(crop, other) for crop, other in zip(crops, whole, strict=True))


def test_only_the_rows_that_a_crop_needs_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    heights = []
    decode = images._decode_upper

    def counted(*arguments: Any) -> Any:
        pixels = decode(*arguments)
        heights.append(len(pixels))
        return pixels

    monkeypatch.setattr(images, "_decode_upper", counted)
    data = encoded(photo(500, 375))
    for seed in range(200):
        random_resized_crop(data, 224, np.random.default_rng(seed))
    assert len(heights) == 200
    assert np.mean(heights) < 0.9 * 375


def test_a_truncated_jpeg_is_an_error_also_where_the_crop_is_above() -> None:
    data = encoded(photo(500, 375))
    cut = data[: len(data) * 9 // 10]
    for seed in range(20):
        with pytest.raises(OSError, match="truncated"):
            random_resized_crop(cut, 64, np.random.default_rng(seed))
