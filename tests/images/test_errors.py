"""Which errors are what a decoder says of an image's bytes, and which are the storage's or the program's."""

import io
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image, UnidentifiedImageError

from lightning_gpuopt.images.errors import is_bad_image
from tests.images.pictures import encoded, photo

JPEG = encoded(photo())
PNG = encoded(photo(300, 300), "PNG")
GREY = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))


def from_pil(data: bytes) -> Any:
    return Image.open(io.BytesIO(data)).convert("RGB")


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes(byte ^ 255 for byte in data[at : at + 8]) + data[at + 8 :]


def error_of(function: Callable[..., Any], *arguments: Any) -> Exception:
    with pytest.raises(Exception) as found:  # noqa: PT011
        function(*arguments)
    return found.value


@pytest.mark.parametrize(
    ("decode", "data"),
    [
        (from_pil, b"no image"),
        (from_pil, JPEG[:-2000]),
        (from_pil, PNG[:-2000]),
        (from_pil, damaged(PNG, PNG.index(b"IDAT", PNG.index(b"IDAT") + 4) - 4)),
        (from_pil, encoded(GREY, "GIF")[:500]),
        (from_pil, encoded(photo(), "WEBP")[:300]),
        (from_pil, damaged(encoded(photo(), "TIFF", compression="tiff_deflate"), 100)),
        (from_pil, b"P6 a b c"),
        (simplejpeg.decode_jpeg, b"no image"),
        (simplejpeg.decode_jpeg, JPEG[:2000]),
    ],
)
def test_what_a_decoder_says_is(decode: Any, data: bytes) -> None:
    assert is_bad_image(error_of(decode, data))


def test_an_image_that_pil_finds_too_large_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert is_bad_image(error_of(from_pil, JPEG))


def in_module(name: str, function: str, call: Callable[[], Any]) -> Callable[[], Any]:
    """`call` as a library's function of that name calls its operators: by a frame of its module."""
    module = types.ModuleType(name)
    exec(f"def {function}(call):\n    return call()", module.__dict__)
    return lambda: getattr(module, function)(call)


def fails_in_torch() -> None:
    torch.ops.aten.add(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize(
    ("module", "bad"), [("PIL.OfLaterImagePlugin", True), ("heifs.as_plugin", True), ("heifs.files", False)]
)
def test_what_a_plugin_of_pil_says_is_also_if_it_is_another_package_s(
    module: str, bad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call() -> None:
        raise OSError("broken")

    opens = types.FunctionType(call.__code__, {**globals(), "__name__": "heifs.as_plugin"})
    monkeypatch.setattr(Image, "OPEN", {**Image.OPEN, "HEIFS": (opens, None)})
    assert is_bad_image(error_of(types.FunctionType(call.__code__, {**globals(), "__name__": module}))) is bad


IMAGE_OF, TORCHCODEC = "torchvision.io.image", "torchcodec.decoders._image_decoders"


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (IMAGE_OF, "decode_jpeg"),
        (TORCHCODEC, "decode_image"),
        (TORCHCODEC, "_decode_to_mode"),
        ("torchcodec.decoders._video_decoder", "__init__"),
        ("torchcodec._core.ops", "decode_gif"),
    ],
)
def test_what_an_operator_raises_is_said_by_whoever_called_it(module: str, function: str) -> None:
    operator = types.FunctionType(fails_in_torch.__code__, {"torch": torch, "__name__": module})
    assert is_bad_image(error_of(in_module(module, function, operator)))
    assert not is_bad_image(error_of(fails_in_torch))


def test_a_format_that_torchcodec_does_not_know_is() -> None:
    def call() -> None:
        raise ValueError("Unsupported or unrecognized image format.")

    detects = types.FunctionType(call.__code__, {**globals(), "__name__": TORCHCODEC})
    assert is_bad_image(error_of(in_module(TORCHCODEC, "decode_image", detects)))
    assert not is_bad_image(error_of(in_module("torchcodecs.decoders", "decode_image", call)))


@pytest.mark.parametrize(
    ("module", "function"),
    [(IMAGE_OF, "read_file"), (TORCHCODEC, "_normalize_mode"), (TORCHCODEC, "_source_to_tensor")],
)
def test_what_a_decoders_library_says_of_files_and_arguments_is_not(module: str, function: str) -> None:
    def call() -> None:
        raise RuntimeError("[Errno 5] Input/output error: 'x.jpg'")

    reads = types.FunctionType(call.__code__, {**globals(), "__name__": "torch._ops"})
    assert not is_bad_image(error_of(in_module(module, function, reads)))
    assert is_bad_image(error_of(in_module(module, "decode_image", reads)))


class Storage(io.BytesIO):
    """A file of a library's own, whose reads fail without an errno, after a while."""

    def __init__(self, data: bytes, reads: int) -> None:
        super().__init__(data)
        self._left = reads

    def read(self, size: int | None = -1) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise OSError("Can't synchronously read data")
        return super().read(size)


@pytest.mark.parametrize("reads", [0, 4])
def test_storage_that_fails_under_pil_is_not(reads: int) -> None:
    error = error_of(lambda: Image.open(Storage(PNG, reads)).convert("RGB"))
    assert str(error) == "Can't synchronously read data"
    assert not is_bad_image(error)


def test_a_path_that_cannot_be_opened_is_not(tmp_path: Path) -> None:
    assert not is_bad_image(error_of(Image.open, tmp_path / "gone.jpg"))
    assert not is_bad_image(error_of(Image.open, tmp_path))


def raised(error: Exception) -> Exception:
    def fail() -> None:
        raise error

    return error_of(fail)


@pytest.mark.parametrize(
    "error", [OSError("unable to read"), EOFError(), SyntaxError("bad"), ValueError("x"), KeyError()]
)
def test_what_a_program_raises_itself_is_not(error: Exception) -> None:
    assert not is_bad_image(raised(error))


def test_an_error_that_a_program_makes_of_a_decoders_is_not() -> None:
    def wraps() -> None:
        try:
            from_pil(JPEG[:-2000])
        except OSError as error:
            raise RuntimeError("patient 7 has no scan") from error

    assert not is_bad_image(error_of(wraps))


def test_what_is_raised_again_keeps_its_place() -> None:
    def again() -> None:
        try:
            from_pil(JPEG[:-2000])
        except OSError as error:
            raise error

    assert is_bad_image(error_of(again))


def test_memory_that_runs_out_in_a_decoder_is_not() -> None:
    decoder = types.FunctionType((lambda: bytes(1 << 62)).__code__, {"__name__": "PIL.PngImagePlugin"})
    error = error_of(decoder)
    assert isinstance(error, MemoryError)
    assert not is_bad_image(error)


def test_pils_own_error_for_what_is_no_image_is_one_wherever_it_was_raised() -> None:
    assert is_bad_image(raised(UnidentifiedImageError("from another process")))
