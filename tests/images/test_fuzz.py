"""Image files of all kinds, whole and damaged: every decoder shows the same, or refuses alike."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from lightning_gpuopt.dali.library import load_dali
from lightning_gpuopt.dali.pipelines import ENCODED, PipelineSettings, undecodable
from lightning_gpuopt.images.checks import BadImage, check_image
from lightning_gpuopt.images.crop import CenterCrops, RandomCrops
from lightning_gpuopt.images.decode import decode_pil, decode_tensor, jpeg_size
from lightning_gpuopt.images.errors import is_bad_image
from lightning_gpuopt.images.other_decoder import for_other_decoder
from tests.images.pictures import photo, pixels

MODES = {
    "JPEG": ("RGB", "L", "CMYK"),
    "PNG": ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"),
    "WEBP": ("RGB", "RGBA"),
    "TIFF": ("RGB", "RGBA", "L", "P", "1", "CMYK", "I;16", "I", "F"),
    "GIF": ("L", "P", "RGB"),
}
FORMS = {3: "H", 4: "I", 9: "i", 1: "B"}
"""Types of an EXIF entry, and their struct formats."""

ICC = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def image_of(mode: str, width: int, height: int) -> Image.Image:
    image = photo(width, height)
    if mode == "I;16":
        return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    return image.convert("RGBA").convert("LA") if mode == "LA" else image.convert(mode)


def exif_block(orientation: int, form: int, order: str, magic: int) -> bytes:
    """An EXIF block that has only an orientation, as a number of this type."""
    endian = "little" if order == "II" else "big"

    def number(value: int, size: int) -> bytes:
        return value.to_bytes(size, endian)  # type: ignore[arg-type]

    value = number(orientation, {1: 1, 3: 2, 4: 4, 9: 4}[form]).ljust(4, b"\0")
    entry = number(0x0112, 2) + number(form, 2) + number(1, 4) + value
    return b"Exif\0\0" + order.encode() + number(magic, 2) + number(8, 4) + number(1, 2) + entry + bytes(4)


@st.composite
def image_files(draw: Any, *, damaged: bool = True) -> bytes:
    """An image file in a format and mode, with metadata; maybe broken off, longer, or with other bytes in it."""
    kind = draw(st.sampled_from(sorted(MODES)))
    mode = draw(st.sampled_from(MODES[kind]))
    image = image_of(mode, draw(st.integers(1, 70)), draw(st.integers(1, 70)))
    options: dict[str, Any] = {}
    if kind == "JPEG":
        options = {"quality": draw(st.integers(20, 100)), "progressive": draw(st.booleans())}
        options |= {} if mode == "L" else {"subsampling": draw(st.integers(0, 2))}
        options |= {"restart_marker_blocks": 1} if draw(st.booleans()) else {}
    if kind != "GIF" and draw(st.booleans()):
        block = exif_block(
            draw(st.integers(0, 9)),
            draw(st.sampled_from(sorted(FORMS))),
            draw(st.sampled_from(["II", "MM"])),
            draw(st.sampled_from([42, 42, 42, 43, 0])),
        )
        if kind == "TIFF":  # which has it among its own entries
            options["tiffinfo"] = {0x0112: draw(st.integers(1, 8))}
        else:
            options["exif"] = block
    if mode in ("RGB", "RGBA", "L") and draw(st.booleans()):
        options["icc_profile"] = ICC
    out = io.BytesIO()
    image.save(out, kind, **options)
    data = out.getvalue()
    if kind == "JPEG" and draw(st.booleans()):  # fill bytes before the second marker
        data = data[:2] + b"\xff" * draw(st.integers(1, 4)) + data[2:]
    if not damaged:
        return data
    data += draw(st.sampled_from([b"", b"", b"\0", b"\xff\xd9", b"more"]))
    if draw(st.booleans()):
        data = data[: draw(st.integers(0, len(data)))]
    changed = bytearray(data)
    for _ in range(draw(st.integers(0, 3)) if data else 0):
        changed[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(changed)


def outcome(decode: Any, data: bytes) -> np.ndarray[Any, Any] | None:
    """What a decoder shows; None where it says that the file is bad. Any other error is a fault."""
    try:
        decoded = decode(data)
    except Exception as error:
        if not is_bad_image(error):
            raise
        return None
    return np.asarray(decoded) if isinstance(decoded, Image.Image) else pixels(decoded)


def fuzz(examples: int) -> Any:
    return settings(max_examples=examples, suppress_health_check=list(HealthCheck))


def compare(data: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PIL's, of metadata
        by_pil, by_tensor = outcome(decode_pil, data), outcome(decode_tensor, data)
        assert (by_pil is None) == (by_tensor is None)
        crops = RandomCrops(8)
        crops.begin(0)
        for crop in (crops, CenterCrops(8)):
            cropped = outcome(crop, data)
            assert by_pil is None or (cropped is not None and cropped.shape == (8, 8, 3))
        if by_pil is None or by_tensor is None:
            return
        assert by_pil.shape == by_tensor.shape
        assert np.abs(by_pil.astype(int) - by_tensor).mean() <= 2
        header = jpeg_size(data)
        if header is not None:
            assert (header[:2] if header[2] < 5 else header[1::-1]) == by_pil.shape[:2]
        assert for_other_decoder(data)[1:] == by_pil.shape[:2]


@given(image_files())
@fuzz(20)
def test_both_decoders_show_the_same_or_refuse_alike(data: bytes) -> None:
    compare(data)


@pytest.mark.matrix
@given(image_files())
@fuzz(600)
def test_both_decoders_show_the_same_or_refuse_alike_in_many_files(data: bytes) -> None:
    compare(data)


@pytest.mark.matrix
@given(image_files())
@fuzz(300)
def test_a_file_that_is_found_good_can_be_decoded(data: bytes) -> None:
    """But for a JPEG with damage inside, which is not looked at."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            check_image(data)
        except BadImage:
            return
        assert outcome(decode_pil, data) is not None or data[:3] == b"\xff\xd8\xff"


SETTINGS = PipelineSettings(32, 2, None, 8, (0.5,) * 3, (0.5,) * 3, "uint8", "HWC", 0.0)


def by_dali(images: list[bytes]) -> list[np.ndarray[Any, Any]]:
    dali = load_dali()

    def whole() -> Any:
        encoded = dali.fn.external_source(name=ENCODED, ndim=1, dtype=dali.types.UINT8)
        return dali.fn.decoders.image(encoded, device="cpu", output_type=dali.types.RGB)

    pipeline = dali.pipeline_def(whole)(batch_size=len(images), num_threads=2, device_id=None, exec_dynamic=True)
    pipeline.build()
    pipeline.feed_input(ENCODED, [np.frombuffer(each, np.uint8) for each in images])
    (decoded,) = pipeline.run()
    return [np.asarray(decoded[number]) for number in range(len(images))]


@pytest.mark.matrix
@given(st.lists(image_files(damaged=False), min_size=8, max_size=8))
@fuzz(30)
def test_dali_shows_whole_files_in_the_same_shape(files: list[bytes]) -> None:
    given_to_dali = [for_other_decoder(data) for data in files]
    shown = by_dali([bytes(data) for data, _, _ in given_to_dali])
    for data, (_, height, width), image in zip(files, given_to_dali, shown, strict=True):
        assert image.shape == np.asarray(decode_pil(data)).shape == (height, width, 3)


@pytest.mark.matrix
@given(st.lists(image_files(), min_size=4, max_size=4))
@fuzz(30)
def test_dali_names_the_damaged_files_that_it_cannot_decode(files: list[bytes]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handed = [for_other_decoder(data) for data in files if outcome(decode_pil, data) is not None]
    refused = undecodable(SETTINGS, [np.frombuffer(data, np.uint8) for data, _, _ in handed])
    for number, (data, height, width) in enumerate(handed):
        if number not in refused:
            assert by_dali([bytes(data)])[0].shape == (height, width, 3)
