"""Samples to bytes and back: one msgpack array a sample, no pickle.

A stored value is ``[stamp, structure, buffer, buffer, ...]``. The structure is itself msgpack and says how the
buffers make up the sample; samples of the same make have byte-identical structures, so a reader compiles each one
once.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
import torch
import xxhash
from numpy.lib import format as npy_format
from PIL import Image

from lightning_gpuopt.images.decode import with_pixels_as_stored
from lightning_gpuopt.images.normalize import is_image_by_place
from lightning_gpuopt.storage import tv_tensors
from lightning_gpuopt.storage.errors import DamagedError
from lightning_gpuopt.storage.leaves import FLOAT, INT, PLAIN, Leaf, Source, array_reader, numpy_dtype
from lightning_gpuopt.storage.value import buffers, bytes_at, head_fields, pack, parse, sample_number

ImageDecoder = Callable[..., Any]
_Mode = str | None  # in place of a leaf's reader, for image files: the mode to read them in, None for photographs
_Assemble = Callable[[list[Any]], Any]


class EncodedImage(bytes):
    """The bytes of an image file (JPEG, PNG, WebP, ...), stored as they are and decoded when read."""

    mode: str | None  # None: a photograph, read as upright RGB; else PIL's mode, read exactly (masks, depth maps)

    def __new__(cls, data: bytes | bytearray | memoryview, mode: str | None = None) -> EncodedImage:
        self = super().__new__(cls, data)
        self.mode = mode
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return EncodedImage, (bytes(self), self.mode)


class Encoded(NamedTuple):
    structure: bytes
    buffers: list[bytes]

    def value(self, shard: int, index: int) -> bytes:
        """The stored value, stamped with its shard's number and its index there."""
        return pack(self.structure, self.buffers, sample_number(shard, index))


def encode(sample: Any) -> Encoded:
    """A sample's structure and buffers; TypeError, with the place in the sample, for what would need pickle."""
    buffers: list[bytes] = []
    try:
        described = _describe(sample, buffers, "sample")
    except RecursionError:
        raise TypeError("the sample is nested too deeply, or contains itself") from None
    try:
        encoded = Encoded(msgpack.packb(described), buffers)
    except (ValueError, OverflowError) as err:  # keys: lone surrogates, integers beyond 64 bits; depth
        raise TypeError(f"the sample's keys or nesting cannot be stored: {err}") from None
    exact = xxhash.xxh3_128_digest(encoded.structure)
    if exact not in _readable:
        kinds = xxhash.xxh3_128_digest(msgpack.packb(["kinds", _kinds(described)]))
        if kinds not in _readable:
            _read_back(encoded)
        if len(_readable) >= _MOST_READABLE:
            _readable.clear()
        _readable.update((exact, kinds))
    return encoded


_readable: Final[set[bytes]] = set()  # digests of structures, and of their kinds, of which a sample was read back
_MOST_READABLE: Final = 1 << 14


def _kinds(structure: list[Any]) -> list[Any]:
    """What structures have in common that differ in lengths only: sizes are none, one or several, repetitions one."""
    kind, *rest = structure
    if kind in ("tuple", "list", "dict"):
        keys = [type(key).__name__ for key, _ in groupby(rest[0], type)] if kind == "dict" else []
        children = [_kinds(child) for child, _ in groupby(rest[-1])]
        return [kind, keys, [child for child, _ in groupby(children)]]
    if kind in ("array", "tensor"):
        return [kind, rest[0], *map(_sizes, rest[1:])]
    return structure


def _sizes(described: Any) -> Any:
    if isinstance(described, dict):
        return {name: _sizes(value) for name, value in described.items()}
    return [min(size, 2) for size in described] if isinstance(described, list) else described


def _read_back(encoded: Encoded) -> None:
    """Read the first sample of a kind; TypeError if it comes back as something else, which nobody could use."""
    value = encoded.value(0, 0)
    try:
        structure = msgpack.packb(_describe(read(value, 0, len(value), 0, EncodedImage), [], "sample"))
    except Exception as err:
        raise TypeError(f"the sample could not be read again ({type(err).__name__}: {err})") from err
    if structure != encoded.structure:
        raise TypeError(f"the sample would come back as {tree(structure)}; expected {tree(encoded.structure)}")


def _describe(value: Any, buffers: list[bytes], where: str) -> list[Any]:
    kind = type(value)
    if kind is tuple or kind is list:
        return [kind.__name__, [_describe(v, buffers, f"{where}[{i}]") for i, v in enumerate(value)]]
    if kind is dict:
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"{where} has the key {key!r}: keys must be str or int")
        return ["dict", list(value), [_describe(v, buffers, f"{where}[{k!r}]") for k, v in value.items()]]
    if value is None:
        return ["none"]
    try:
        description, data = _leaf(value, where)
    except (TypeError, MemoryError):
        raise
    except Exception as err:  # PIL and torch have their own for what they cannot put into bytes
        raise TypeError(f"{where} has no bytes to store ({type(err).__name__}: {err})") from err
    buffers.append(data)
    return description


def _leaf(value: Any, where: str) -> tuple[list[Any], bytes]:
    if isinstance(value, EncodedImage):
        return _image(value.mode), bytes(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ["bytes"], bytes(value)
    if isinstance(value, bool):
        return ["bool"], b"\x01" if value else b"\x00"
    if isinstance(value, np.generic):  # before int and float: np.float64 is a float
        element = np.asarray(value)  # an empty text has no bytes, but an array of one has
        if isinstance(value, str) and element[()] != value:
            raise TypeError(
                f"{where} is the numpy text {''.join(value)!r}, whose trailing zeros numpy drops; store a plain str, "
                "created without numpy"
            )
        return ["scalar", _numpy_descr(element.dtype, where)], element.tobytes()
    if isinstance(value, int):
        if -(1 << 63) <= value < 1 << 63:
            return ["int"], INT.pack(value)
        return ["bigint"], value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if isinstance(value, float):
        return ["float"], FLOAT.pack(value)
    if isinstance(value, str):
        return ["str"], value.encode("utf-8", "surrogatepass")
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{where} is a numpy masked array, whose mask would be lost; expected a plain array: store "
            "value.filled(...), or value.data and np.ma.getmaskarray(value) as two parts"
        )
    if isinstance(value, np.ndarray):
        return ["array", _numpy_descr(value.dtype, where), list(value.shape)], value.tobytes()
    if isinstance(value, torch.Tensor):
        refuse_unstorable(value, where)
        described = tv_tensors.describe(value)
        more = [] if described is None else [described]
        dtype = str(value.dtype).removeprefix("torch.")
        return ["tensor", dtype, list(value.shape), *more], tensor_bytes(value)
    if isinstance(value, Image.Image):
        return _image(None if value.mode == "RGB" else value.mode), image_bytes(value)
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}; expected bytes, int, float, bool, str, "
        "None, a numpy array, a tensor, a PIL image, or a tuple, list or dict of these. "
        "Convert it first: nothing is pickled"
    )


def _image(mode: str | None) -> list[Any]:
    return ["image"] if mode is None else ["image", mode]


def _numpy_descr(dtype: np.dtype[Any], where: str) -> Any:
    if dtype.hasobject:
        raise TypeError(f"{where} is a numpy array of Python objects, which would need pickle; give it a plain dtype")
    descr = npy_format.dtype_to_descr(dtype)
    if npy_format.descr_to_dtype(descr) != dtype:
        raise TypeError(f"{where} has the numpy dtype {dtype}, which numpy cannot describe in a file; view it as uint8")
    return descr


def refuse_unstorable(tensor: torch.Tensor, where: str) -> None:
    """Raise TypeError, with what to store instead, for a tensor without elements in memory to be stored."""
    if tensor.is_nested:
        kind, instead = "nested", "value.unbind(), or value.to_padded_tensor(0)"
    elif tensor.layout != torch.strided:
        kind, instead = str(tensor.layout).removeprefix("torch."), "value.to_dense()"
    elif tensor.is_quantized:
        kind, instead = "quantized", "value.dequantize()"
    elif tensor.is_meta:
        kind, instead = "meta", "a tensor that has values"
    else:
        return
    raise TypeError(f"{where} is a {kind} tensor; expected a dense one: store {instead}, or its parts")


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's elements in C order, little endian, of any dtype."""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # Where a tensor has one element or none, torch calls it contiguous whatever its strides are.
    data: bytes = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
    return data


def image_bytes(image: Image.Image) -> bytes:
    """A PIL image as an image file: the file that it was opened from, if it is untouched and the only image in there.

    An EXIF orientation is taken out of it: pixels come back as they are in the image. Else it is written without loss:
    as PNG, or as TIFF in the modes that PNG does not have.
    """
    source = getattr(image, "fp", None)
    opened = source is not None and getattr(image, "tile", None) and image.format is not None  # and not yet decoded
    if source is not None and opened and _is_whole_file(image):
        position = source.tell()
        source.seek(0)
        data: bytes = source.read()
        source.seek(position)
        same = with_pixels_as_stored(image, data)
        if same is not None:
            return same
    out = io.BytesIO()
    if image.mode in _TIFF_MODES:
        image.save(out, "TIFF", compression="tiff_deflate")
    else:
        if image.mode in ("I;16L", "I;16N"):
            image = Image.fromarray(np.asarray(image).astype("<u2"))
        elif image.mode not in _PNG_MODES:  # its bands as they are; the reader knows the mode
            image = Image.frombytes(_CARRIERS[len(image.getbands())], image.size, image.tobytes())
        image.save(out, "PNG", compress_level=1, exif=b"")
    return out.getvalue()


_PNG_MODES: Final = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
_TIFF_MODES: Final = ("I", "F", "I;16B", "CMYK", "LAB", "PA")
_CARRIERS: Final = {2: "LA", 3: "RGB", 4: "RGBA"}


def _is_whole_file(image: Image.Image) -> bool:
    """Whether a reader of the image's file gets this image: the first of a photograph and its previews, or the only."""
    return getattr(image, "n_frames", 1) == 1 or (image.format == "MPO" and image.tell() == 0)


def read(source: Source, start: int, stop: int, number: int, image: ImageDecoder | None) -> Any:
    """The sample in ``source[start:stop]``, whose stamp must bear `number`; arrays, tensors and bytes are copies.

    `image` gets an image file, and its mode where it is to come back as written; None: the bytes of the file.
    DamagedError if the value is not what was written; what `image` or a malformed leaf raises comes through.
    """
    begin, structure, layout = _latest
    at = start + _STRUCTURE + len(structure)
    stamped = source[start + _NUMBER : at] == number.to_bytes(8, "big") + structure
    if not stamped or source[start : start + len(begin)] != begin:
        at, layout = _read_layout(source, start, number)
    leaves, assemble = layout
    values = []
    try:
        for leaf in leaves:
            if source[at] == 0xC4:  # bytes_at without the call: most buffers are short
                length = source[at + 1]
                at += 2
            else:
                length, at = bytes_at(source, at)
            end = at + length
            if leaf is None:
                values.append(source[at:end] if image is None else image(memoryview(source)[at:end]))
            elif not isinstance(leaf, str):
                values.append(leaf(source, at, end))
            elif image is None:
                values.append(source[at:end])
            else:
                values.append(image(memoryview(source)[at:end], leaf))
            at = end
    except (IndexError, struct.error):
        raise DamagedError("its value is cut off") from None
    if at != stop:
        raise DamagedError(f"its parts end {abs(stop - at)} bytes {'before' if at < stop else 'after'} its end")
    return assemble(values)


_NUMBER: Final = 11
_STRUCTURE: Final = 19  # where these are in a value of fewer than 16 parts
_latest: tuple[bytes, bytes, tuple[list[Leaf | _Mode], _Assemble]] = (b"\0", b"", ([], tuple))
"""Of the sample read last: what its value begins with, its structure with the head, and what that makes of it.

Most samples are of the make of the one before, and need not be parsed."""


def _read_layout(source: Source, start: int, number: int) -> tuple[int, tuple[list[Leaf | _Mode], _Assemble]]:
    """Where the buffers of the value at `start` begin, and what reads them."""
    global _latest
    num_buffers, _, found, content, at, end = head_fields(source, start)
    if found != number:
        raise DamagedError("another sample lies in its place")
    layout = _layout(source[at:end])
    if num_buffers != len(layout[0]):
        raise DamagedError(f"{num_buffers} buffers; its structure tells of {len(layout[0])}")
    if content == start + _NUMBER:
        _latest = source[start : start + 3], source[start + _STRUCTURE : end], layout
    return end, layout


def part(source: Source, start: int, number: int, key: int | str) -> Any:
    """One part (an image as its file's bytes), read alone; LookupError: no such part, TypeError: none, DamagedError."""
    head = parse(source, start)
    if head.number != number:
        raise DamagedError("another sample lies in its place")
    leaves, assemble, first = _part_layout(source[head.structure : head.buffers], key)
    spans = islice(buffers(source, head), first, first + len(leaves))
    return assemble(
        [
            leaf(source, at, end) if callable(leaf) else source[at:end]
            for leaf, (at, end) in zip(leaves, spans, strict=True)
        ]
    )


def number_from_end(structure: Any, key: int | str) -> tuple[np.dtype[Any], int] | None:
    """A part's dtype, and how many bytes before a value's end it begins; None: no number, or its place varies."""
    kind, *rest = structure
    if kind not in ("tuple", "list", "dict"):
        return None
    keys = rest[0] if kind == "dict" else range(len(rest[-1]))
    wanted = key + len(keys) if kind != "dict" and isinstance(key, int) and key < 0 else key
    before_end = 0
    for name, child in zip(reversed(keys), reversed(rest[-1]), strict=True):
        dtype = numpy_dtype(child[1]) if child[0] == "scalar" else _NUMBERS.get(child[0])
        if dtype is None or dtype.itemsize > 0xFF or dtype.hasobject:
            return None
        before_end += dtype.itemsize
        if name == wanted:
            return dtype, before_end
        before_end += 2  # a buffer's head
    return None


_NUMBERS: Final = {"int": np.dtype("<i8"), "float": np.dtype("<f8"), "bool": np.dtype("?")}


@lru_cache(maxsize=4096)
def _part_layout(structure: bytes, key: int | str) -> tuple[list[Leaf | _Mode], _Assemble, int]:
    """As `_layout`, of one part; and the number of its first buffer."""
    root = tree(structure)
    kind, *rest = root
    if kind not in ("tuple", "list", "dict"):
        raise TypeError(f"the sample is not a tuple, list or dict: it has no part {key!r}")
    children = rest[-1]
    try:
        at = rest[0].index(key) if kind == "dict" else range(len(children))[key]  # type: ignore[index]
    except (ValueError, IndexError, TypeError):
        there = f"the keys {rest[0]}" if kind == "dict" else f"{len(children)} parts"
        raise LookupError(f"the sample has no part {key!r}; it has {there}") from None
    before: list[Leaf | _Mode] = []
    for child in children[:at]:
        _compile(child, before)
    leaves: list[Leaf | _Mode] = []
    return leaves, _compile(children[at], leaves), len(before)


@lru_cache(maxsize=4096)
def _layout(structure: bytes) -> tuple[list[Leaf | _Mode], _Assemble]:
    """What reads each buffer, and what makes the sample of their values."""
    try:
        leaves: list[Leaf | _Mode] = []
        root = msgpack.unpackb(structure)
        assemble = _compile(root, leaves)
        if root[0] in ("tuple", "list") and all(child[0] not in _NESTED for child in root[1]):
            assemble = tuple if root[0] == "tuple" else list  # the common case, without a call for each part
    except DamagedError:
        raise
    except Exception as err:
        raise DamagedError(f"not a structure ({type(err).__name__}: {err})") from None
    return leaves, assemble


def as_written(structure: Any, path: tuple[int | str, ...] = ()) -> Iterator[tuple[int | str, ...]]:
    """Paths of arrays, tensors and images that are kept exactly, but for a sample's image written as an array."""
    kind, *rest = structure
    if kind in ("array", "tensor"):
        of_an_image = len(rest) == 2 or rest[2]["class"] == "Image"
        if not (of_an_image and rest[0] in _UINT8 and len(rest[1]) == 3 and is_image_by_place(path)):
            yield path
    elif kind == "image" and rest:
        yield path
    elif kind in ("tuple", "list", "dict"):
        for key, child in zip(rest[0] if kind == "dict" else range(len(rest[-1])), rest[-1], strict=True):
            yield from as_written(child, (*path, key))


_UINT8: Final = ("|u1", "uint8")


def has_images(structure: Any) -> bool:
    """Whether there are image files in a structure, given as a tree."""
    kind, *rest = structure
    return kind == "image" or (kind in ("tuple", "list", "dict") and any(map(has_images, rest[-1])))


def structure_of(value: Source | memoryview) -> Any:
    """The structure of a stored value, as a tree."""
    head = parse(value)
    return tree(bytes(value[head.structure : head.buffers]))


def tree(structure: bytes) -> Any:
    """A structure as a tree: ``[kind, ...]`` with such trees within."""
    return msgpack.unpackb(structure)


def _compile(tree: Any, leaves: list[Leaf | _Mode]) -> _Assemble:
    """What makes the sample of `tree` from the values of all leaves; the leaves of `tree` are appended."""
    kind, *rest = tree
    if kind in ("tuple", "list", "dict"):
        children = [_compile(child, leaves) for child in rest[-1]]
        if kind == "dict":
            keys = rest[0]
            if len(keys) != len(children):
                raise DamagedError("a dict with more keys than values")
            return lambda values: {key: child(values) for key, child in zip(keys, children, strict=True)}
        if kind == "tuple":
            return lambda values: tuple([child(values) for child in children])
        return lambda values: [child(values) for child in children]
    if kind == "none":
        return lambda values: None
    at = len(leaves)
    if kind == "image":
        leaves.append(rest[0] if rest else None)
    else:
        leaves.append(PLAIN[kind] if kind in PLAIN else array_reader(kind, rest))
    return itemgetter(at)


_NESTED: Final = ("tuple", "list", "dict", "none")
