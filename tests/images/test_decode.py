import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from lightning_gpuopt.images.checks import shrink_image
from lightning_gpuopt.images.crop import CenterCrops, RandomCrops
from lightning_gpuopt.images.decode import decode_pil, decode_tensor, jpeg_size
from lightning_gpuopt.images.jpeg import orientation_of
from lightning_gpuopt.images.other_decoder import for_other_decoder
from tests.images.flavours import deep_greys
from tests.images.pictures import encoded, photo, pixels, with_orientation


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_exif_orientation_is_applied_by_both_decoders(orientation: int) -> None:
    data = with_orientation(photo(), orientation)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert orientation_of(data) == orientation
    assert np.array_equal(np.asarray(decode_pil(data)), np.asarray(upright))
    assert decode_tensor(data).shape == (3, upright.height, upright.width)
    difference = np.abs(pixels(decode_tensor(data)).astype(int) - np.asarray(upright))
    assert difference.mean() < 1  # two builds of libjpeg may round differently


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_big_endian_exif_block_is_read(orientation: int) -> None:
    tiff = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0" + bytes([orientation]) + b"\0\0\0\0\0\0"
    segment = b"Exif\0\0" + tiff
    data = b"\xff\xd8\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + b"\xff\xda"
    assert orientation_of(data) == orientation


@pytest.mark.parametrize(
    ("data", "orientation"),
    [
        (b"", 1),
        (b"\xff\xd8\xff\xe1\0\x10Exif\0\0II", None),
        (b"\xff\xd8\xff\xe1\xff\xffExif\0\0MM\0*\xff\xff\xff\xff", None),
    ],
)
def test_pil_is_asked_of_a_broken_exif_block(data: bytes, orientation: int | None) -> None:
    assert orientation_of(data) == orientation


def in_segment(marker: int, content: bytes, *, fill: int = 0, before: bytes = b"") -> bytes:
    """A photograph's JPEG file with another segment, behind fill bytes, before its frame header."""
    data = encoded(photo())
    at = data.index(before) if before else 2
    return (
        data[:at] + b"\xff" * (fill + 1) + bytes([marker]) + (len(content) + 2).to_bytes(2, "big") + content + data[at:]
    )


def exif(orientation: bytes) -> bytes:
    """An EXIF block with one entry: the orientation in a form of one's own, behind its tag."""
    return b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12" + orientation + b"\0\0\0\0"


SHORT_6, LONG_6 = b"\0\x03\0\0\0\x01\0\x06\0\0", b"\0\x04\0\0\0\x01\0\0\0\x06"
XMP = b"http://ns.adobe.com/xap/1.0/\0" + b'<x tiff:Orientation="6"/>'


@pytest.mark.parametrize(
    ("name", "file"),
    {
        "long": (in_segment(0xE1, exif(LONG_6)), True),
        "byte": (in_segment(0xE1, exif(b"\0\x01\0\0\0\x01\x06\0\0\0")), False),
        "two of them": (in_segment(0xE1, exif(b"\0\x03\0\0\0\x02\0\x06\0\x06")), True),
        "fill bytes": (in_segment(0xE1, exif(SHORT_6), fill=3), True),
        "behind the frame": (in_segment(0xE1, exif(SHORT_6), before=b"\xff\xda"), True),
        "XMP": (in_segment(0xE1, XMP), None),  # depends on PIL's version
        "no TIFF": (in_segment(0xE1, b"Exif\0\0none at all"), False),
        "none": (in_segment(0xFE, exif(SHORT_6)), False),
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:Metadata Warning")
def test_what_turns_an_image_turns_it_for_both_decoders(name: str, file: tuple[bytes, bool | None]) -> None:
    data, is_turned = file
    by_pil = np.asarray(decode_pil(data))
    assert is_turned is None or by_pil.shape == ((200, 120, 3) if is_turned else (120, 200, 3))
    assert np.abs(pixels(decode_tensor(data)).astype(int) - by_pil).mean() < 1
    assert pixels(CenterCrops(100, 120)(data)).shape == (100, 100, 3)
    header, by_other = jpeg_size(data), for_other_decoder(data)
    assert header is not None
    assert ((header[1], header[0]) if header[2] >= 5 else header[:2]) == by_pil.shape[:2] == by_other[1:]


@pytest.mark.parametrize("decode", [decode_pil, decode_tensor, RandomCrops(8), CenterCrops(8), for_other_decoder])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_above_pils_limit_is_refused_alike(
    monkeypatch: pytest.MonkeyPatch, decode: Callable[..., Any]
) -> None:
    data = encoded(photo())
    if isinstance(decode, RandomCrops):
        decode.begin(0)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200 * 120 // 2)
    decode(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200 * 120 // 2 - 1)
    with pytest.raises(Image.DecompressionBombError):
        decode(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    decode(data)


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


@pytest.mark.parametrize("name", deep_greys())
def test_a_grey_image_is_scaled_by_the_largest_value_of_its_file(name: str) -> None:
    data, expected = deep_greys()[name]
    decoded = np.asarray(decode_pil(data))
    assert decoded[-1, -1].tolist() == [255] * 3
    assert np.array_equal(decoded, np.repeat(expected[:, :, None], 3, 2))
    assert np.array_equal(pixels(decode_tensor(data)), decoded)
    smaller = Image.open(io.BytesIO(shrink_image(data, 8, 100)))
    assert smaller.getpixel((7, 7)) > (240,) * 3


@pytest.mark.parametrize(("kind", "values"), [("TIFF", np.float32), ("PPM", np.float32), ("IM", np.int32)])
def test_values_without_a_largest_one_are_cut_with_a_warning(kind: str, values: type) -> None:
    data = encoded(Image.fromarray(np.array([[-3, 0, 7, 300]], values)), kind)
    with pytest.warns(UserWarning, match="have no maximum in a .* file: they are clipped to 0 to 255"):
        assert np.asarray(decode_pil(data))[0, :, 0].tolist() == [0, 0, 7, 255]


def test_a_cmyk_and_a_grey_jpeg_become_rgb() -> None:
    for mode in ("CMYK", "L"):
        data = encoded(photo().convert(mode))
        assert decode_tensor(data).shape == (3, 120, 200)
        assert np.abs(pixels(decode_tensor(data)).astype(int) - np.asarray(decode_pil(data))).mean() < 1


@pytest.mark.parametrize("decode", [decode_pil, decode_tensor, CenterCrops(32)])
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
