from __future__ import annotations

import io
import random
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from lightning_gpuopt.storage import codec
from lightning_gpuopt.storage import value as value_module
from lightning_gpuopt.storage.errors import DamagedError
from lightning_gpuopt.storage.value import check, parse, sample_number

DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.bool]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]
DTYPES += [torch.complex64, torch.complex128]


def round_trip(sample: Any, image: Any = None) -> Any:
    value = codec.encode(sample).value(3, 7)
    source = b"before" + value + b"after"
    return codec.read(source, 6, 6 + len(value), sample_number(3, 7), image)


@pytest.mark.parametrize(
    "sample",
    [
        b"",
        b"\x00" * 70_000,
        "",
        "grün \ud800",
        0,
        -(1 << 63),
        (1 << 63) - 1,
        1 << 200,
        -(1 << 63) - 1,
        1.5,
        float("inf"),
        True,
        False,
        None,
        (),
        [],
        {},
        (1,),
        (b"x", [2, "y", {"z": (None, 3.5), 4: []}], ()),
        {"__key__": "a/b", "cls": 3, -1: b"q"},
        tuple(range(40)),
        [(1, 2), (3, 4)],
    ],
    ids=lambda sample: repr(sample)[:30],
)
def test_plain_values_come_back_with_their_types(sample: Any) -> None:
    got = round_trip(sample)
    assert got == sample
    assert type(got) is type(sample)
    assert repr(got) == repr(sample)  # the types within, and the order of a dict's keys


@pytest.mark.parametrize(
    "dtype",
    DTYPES,
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)], ids=str)
def test_tensors_of_every_dtype_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    size = torch.empty((), dtype=dtype).itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, size), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype).reshape(shape)
    got = round_trip(tensor)
    assert (got.dtype, got.shape) == (dtype, tensor.shape)
    assert torch.equal(got.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    got.reshape(-1).view(torch.uint8)[:1] = 0  # its own memory, which may be written


VIEW = st.sampled_from(
    ["first", "none", "reverse", "every other", "column", "transpose", "expand", "unsqueeze", "flat"]
)


def view_of(value: Any, how: list[str]) -> Any:
    """A view of an array or a tensor, by these steps as far as its shape allows them."""
    is_array = isinstance(value, np.ndarray)
    for step in how:
        if step == "first" and value.ndim:
            value = value[:1]
        elif step == "none" and value.ndim:
            value = value[:0]
        elif step == "reverse" and value.ndim and is_array:
            value = value[::-1]
        elif step == "every other" and value.ndim:
            value = value[..., ::2]
        elif step == "column" and value.ndim and value.shape[-1]:
            value = value[..., value.shape[-1] - 1]
        elif step == "transpose" and value.ndim >= 2:
            value = value.swapaxes(0, -1)
        elif step == "expand" and value.ndim < 4:
            value = np.broadcast_to(value, (2, *value.shape)) if is_array else value.expand(2, *value.shape)
        elif step == "unsqueeze" and value.ndim < 4:
            value = value[None]
        elif step == "flat" and not is_array:
            value = value.reshape(-1)
    return value


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(dtype=st.sampled_from(DTYPES), how=st.lists(VIEW, max_size=5), conjugate=st.booleans())
def test_views_of_tensors_are_stored_as_what_they_show(dtype: torch.dtype, how: list[str], conjugate: bool) -> None:
    base = torch.arange(24).reshape(2, 3, 4).to(dtype)
    view = view_of(base.conj() if conjugate and dtype.is_complex else base, how)
    got = round_trip(view)
    assert (got.dtype, got.shape) == (dtype, view.shape)
    assert got.tolist() == view.tolist()
    assert got.is_contiguous()


ARRAY_DTYPES = ["?", "i1", "<u2", ">i4", "<f2", ">f8", "<c8", "<U3", "S2", "<M8[ns]", "<m8[s]", "V3", "g"]
ARRAY_DTYPES_OF_FIELDS: list[Any] = [[("a", "<i2"), ("b", ">f8", (2,))], [("name", "<U2"), ("box", "<f4", (0,))]]


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(dtype=st.sampled_from([*ARRAY_DTYPES, *ARRAY_DTYPES_OF_FIELDS]), how=st.lists(VIEW, max_size=5))
def test_views_of_arrays_are_stored_as_what_they_show(dtype: Any, how: list[str]) -> None:
    size = np.dtype(dtype).itemsize
    base = np.frombuffer(bytes([1, *[0] * (size - 1)]) * 24, np.dtype(dtype)).reshape(2, 3, 4)
    view = view_of(base, how)
    got = round_trip(view)
    assert (type(got), got.dtype, got.shape) == (type(view), view.dtype, view.shape)
    assert got.tobytes() == view.tobytes()


def test_parameters_and_negative_views_are_stored_as_what_they_show() -> None:
    assert round_trip(torch.nn.Parameter(torch.ones(2))).tolist() == [1, 1]
    assert round_trip(torch.tensor([1 + 2j]).conj().imag).tolist() == [-2]


@pytest.mark.parametrize("texts", [["a", ""], ["", ""], [], [b"a", b""], ["", "\0"]], ids=repr)
def test_empty_texts_come_back(texts: list[Any]) -> None:
    array = np.array(texts)
    assert round_trip(array).tolist() == array.tolist()
    for element in array:
        got = round_trip(element)
        assert got == element
        assert isinstance(got, str) == isinstance(element, str)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array("x"),
        np.array(["a", "bcd"]),
        np.array([b"a", b"bcd"]),
        np.zeros((0, 3), np.float32),
        np.array([(1, 2.5, "q")], dtype=[("a", "<i2"), ("b", "<f8"), ("c", "<U3")]),
        np.array(["2024-01-01"], "datetime64[D]"),
        np.array([True, False]),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_come_back_with_dtype_and_shape(array: np.ndarray[Any, Any]) -> None:
    got = round_trip(array)
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert got.tolist() == array.tolist()
    assert got.flags.writeable
    assert got.flags.aligned


@pytest.mark.parametrize("scalar", [np.float32(1.5), np.float64(2.5), np.int8(-3), np.bool_(True), np.str_("ab")])
def test_numpy_scalars_stay_numpy_scalars(scalar: Any) -> None:
    got = round_trip((scalar, 1))[0]
    assert got == scalar
    assert type(got) is type(scalar)


def test_an_opened_image_is_stored_as_its_file() -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 10, 10)).save(file, "JPEG", quality=70)
    assert round_trip(Image.open(file)) == file.getvalue()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I", "I;16", "F"])
def test_an_image_from_memory_is_stored_without_loss(mode: str) -> None:
    image = Image.new(mode, (5, 3))
    pixels = {"1": 255, "LA": (9, 8), "RGB": (1, 2, 3), "RGBA": (1, 2, 3, 4), "CMYK": (1, 2, 3, 4), "I": 100_000}
    image.putpixel((1, 1), pixels.get(mode, 1))
    got = Image.open(io.BytesIO(round_trip(image)))
    assert (got.mode, got.size) == (mode, image.size)
    assert got.tobytes() == image.tobytes()


def test_images_are_decoded_where_they_stand_in_the_sample() -> None:
    sample = {"a": (codec.EncodedImage(b"one"), 1), "b": codec.EncodedImage(b"two"), "c": b"three"}
    assert round_trip(sample, lambda data: ("decoded", bytes(data))) == {
        "a": (("decoded", b"one"), 1),
        "b": ("decoded", b"two"),
        "c": b"three",
    }


class _Strange:
    pass


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (_Strange(), "sample is a .*_Strange; expected bytes, int"),
        ((1, [2, _Strange()]), r"sample\[1\]\[1\] is a "),
        ({"x": {1, 2}}, r"sample\['x'\] is a builtins.set"),
        ({1.5: 2}, "sample has the key 1.5: keys must be str or int"),
        ({1 << 70: 2}, "keys or nesting cannot be stored"),
        ({"\ud800": 2}, "keys or nesting cannot be stored"),
        (np.array([object()]), "numpy array of Python objects, which would need pickle"),
        (torch.eye(2).to_sparse(), "sample is a sparse_coo tensor; expected a dense one: store value.to_dense"),
        (
            {"x": np.ma.masked_equal(np.arange(3), 1)},
            r"sample\['x'\] is a numpy masked array, whose mask would be lost",
        ),
        (np.ma.masked_array([1, 2]), r"expected a plain array: store value\.filled"),
        ((np.ma.masked,), r"sample\[0\] is a numpy masked array"),
    ],
)
def test_what_would_need_pickle_is_refused_with_its_place(sample: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        codec.encode(sample)


def test_what_could_not_be_read_again_is_refused_at_its_first_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_readable", set())
    monkeypatch.setattr(codec, "array_reader", lambda kind, rest: 1 / 0)
    with pytest.raises(TypeError, match=r"could not be read again \(DamagedError: .*ZeroDivisionError"):
        codec.encode((np.zeros((3, 5, 7)), "new here"))

    with monkeypatch.context() as patch:
        patch.setattr(codec, "PLAIN", {**codec.PLAIN, "int": lambda source, start, stop: "other"})
        with pytest.raises(TypeError, match=r"would come back as .*'str'.*; expected .*'int'"):
            codec.encode([("an int, which", ["is read otherwise"]), 5])


@pytest.mark.parametrize("text", [np.str_("a\0"), np.str_("\0")], ids=repr)
@pytest.mark.parametrize("before", [False, True])
def test_a_numpy_text_that_numpy_would_shorten_is_refused_whatever_came_before(text: Any, before: bool) -> None:
    if before:
        codec.encode([np.str_("ab")])
        codec.encode([np.str_("a")])
    with pytest.raises(TypeError, match=r"sample\[0\] is the numpy text .*x00', whose trailing zeros numpy drops"):
        codec.encode([text])


def _lists(length: int) -> Any:
    return [*range(length)], {"x": [torch.zeros(i % 5 + 2) for i in range(length)]}, (np.zeros((length, 3)),)


def test_a_sample_is_read_back_once_for_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_readable", set())
    whole, read_back = codec._read_back, []
    monkeypatch.setattr(codec, "_read_back", lambda encoded: (read_back.append(encoded), whole(encoded)))
    for length in range(3, 50):
        codec.encode(_lists(length))
    assert len(read_back) == 1
    for other in (_lists(1), (np.zeros((0, 3)),), (np.zeros((2, 3), "f4"),), (np.zeros((2, 3, 2)),), [(1,), [1]]):
        before = len(read_back)
        for _ in range(2):
            codec.encode(other)
        assert len(read_back) == before + 1
    assert all(len(digest) == 16 for digest in codec._readable)


def test_a_sample_that_contains_itself_is_refused() -> None:
    sample: list[Any] = []
    sample.append(sample)
    with pytest.raises(TypeError, match="contains itself"):
        codec.encode(sample)


@pytest.mark.parametrize("parts", [2, 13, 14, 20])
def test_a_value_is_a_msgpack_array_whose_stamp_covers_its_place_and_content(parts: int) -> None:
    value = codec.encode([b"x" * 300] * parts).value(1, 2)
    stamp, structure, *buffers = msgpack.unpackb(value)
    assert buffers == [b"x" * 300] * parts
    assert msgpack.unpackb(structure) == ["list", [["bytes"]] * parts]
    assert stamp[8:] == ((1 << 40) + 2).to_bytes(8, "big")
    head = parse(b"before" + value, 6)
    assert stamp[:8] == xxhash.xxh3_64_digest(value[head.content - 6 :])
    assert check(value, sample_number(1, 2)) == stamp[:8]
    assert (head.num_buffers, head.number) == (parts, (1 << 40) + 2)
    assert value[head.structure - 6 : head.buffers - 6] == structure
    assert [value[start:stop] for start, stop in value_module.buffers(value, parse(value))] == buffers
    with pytest.raises(DamagedError, match="another sample"):
        check(value, sample_number(1, 3))


def test_every_flipped_bit_is_found() -> None:
    """The checksum covers all but the array's head, which must fit the structure."""
    sample = (np.arange(4, dtype=np.int16), 5, "label", b"q" * 260)
    value = codec.encode(sample).value(0, 9)
    for bit in range(len(value) * 8):
        broken = bytearray(value)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError):
            _check_and_read(bytes(broken), 9)


def _check_and_read(value: bytes, number: int) -> None:
    check(value, sample_number(0, number))
    codec.read(value, 0, len(value), number, None)


def test_random_bytes_are_refused() -> None:
    generator = random.Random(0)
    for length in (0, 1, 10, 21, 100, 1000):
        with pytest.raises(DamagedError):
            codec.read(generator.randbytes(length), 0, length, 9, None)
        with pytest.raises(DamagedError):
            check(generator.randbytes(length), 9)


def test_a_value_that_is_longer_or_shorter_than_its_parts_is_refused() -> None:
    value = codec.encode((b"abc", 5)).value(0, 9)
    for stop in (len(value) - 1, len(value) + 1):
        with pytest.raises(DamagedError, match="its parts end 1 bytes"):
            codec.read(value + b"x", 0, stop, 9, None)
    with pytest.raises(DamagedError, match="its value is cut off"):
        codec.read(value[:-9], 0, len(value) - 9, 9, None)
