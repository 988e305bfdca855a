"""Samples to bytes and back: one msgpack array a sample, no pickle.

A stored value is ``[stamp, structure, buffer, buffer, ...]``. The structure is itself msgpack and says how the
buffers make up the sample; samples of the same make have byte-identical structures, so a reader compiles each one
once. docs/lmdb-format.md has the whole description.
"""

from __future__ import annotations

import io
import math
import mmap
import struct
from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final

import msgpack
import numpy as np
import torch
import xxhash
from numpy.lib import format as npy_format
from PIL import Image

from lightning_gpuopt.storage.errors import DamagedError

MAX_VALUE_BYTES: Final = 0xFFFFFFFF  # LMDB's limit for a value
STAMP_BYTES: Final = 16
_SHARD_BITS: Final = 40
_STAMP_HEAD: Final = b"\xc4\x10"  # msgpack: 16 bytes follow

Source = bytes | mmap.mmap
ImageDecoder = Callable[[memoryview], Any]
_Leaf = Callable[[Any, int, int], Any]
_Assemble = Callable[[list[Any]], Any]

_INT = struct.Struct("<q")
_FLOAT = struct.Struct("<d")
_BIG_LENGTH = struct.Struct(">I")
# Array head, stamp (its head, checksum, sample id), first byte and length of the structure.
_HEAD = struct.Struct(">BHQQBB")


class EncodedImage(bytes):
    """The bytes of an image file (JPEG, PNG, WebP, ...), stored as they are and decoded when read."""


class Encoded:
    """A sample ready to be stored: its structure and its buffers."""

    __slots__ = ("buffers", "structure")

    def __init__(self, structure: bytes, buffers: list[bytes]) -> None:
        self.structure = structure
        self.buffers = buffers

    def value(self, shard: int, index: int) -> bytes:
        """The stored value, stamped for its place.

        Args:
            shard: Number of the shard.
            index: Index of the sample within the shard.
        """
        body = [sample_id(shard, index), _bytes_head(len(self.structure)), self.structure]
        for buffer in self.buffers:
            body += (_bytes_head(len(buffer)), buffer)
        state = xxhash.xxh3_64()
        for piece in body:
            state.update(piece)
        return b"".join((_array_head(2 + len(self.buffers)), _STAMP_HEAD, state.digest(), *body))


def _array_head(length: int) -> bytes:
    head: bytes = msgpack.Packer().pack_array_header(length)
    return head


def _bytes_head(length: int) -> bytes:
    """What msgpack puts before that many bytes."""
    if length < 1 << 8:
        return b"\xc4" + length.to_bytes(1, "big")
    if length < 1 << 16:
        return b"\xc5" + length.to_bytes(2, "big")
    if length < 1 << 32:
        return b"\xc6" + length.to_bytes(4, "big")
    raise TypeError(f"the sample has {length} bytes in one piece; LMDB stores at most {MAX_VALUE_BYTES} a sample")


def head_bytes(length: int) -> int:
    """Length of what msgpack puts before that many bytes."""
    return len(_bytes_head(length))


def sample_number(shard: Any, index: Any) -> Any:
    """The number that names a sample within its dataset; of integers, or of integer tensors element by element."""
    return (shard << _SHARD_BITS) | index


def sample_id(shard: int, index: int) -> bytes:
    """A sample's number as it is stored: eight bytes, big endian."""
    number: int = sample_number(shard, index)
    return number.to_bytes(8, "big")


# --- writing -----------------------------------------------------------------------------------------------------


def encode(sample: Any) -> Encoded:
    """Turn a sample into its structure and buffers.

    Args:
        sample: bytes, int, float, bool, str, None, a numpy array or scalar, a tensor, a PIL image, an
            `EncodedImage`, or a tuple, list or dict (keys: str or int) of these.

    Raises:
        TypeError: There is something in it that would need pickle; the text says where in the sample.
    """
    buffers: list[bytes] = []
    try:
        structure = _describe(sample, buffers, "sample")
    except RecursionError:
        raise TypeError("the sample is nested too deeply, or contains itself") from None
    try:
        return Encoded(msgpack.packb(structure), buffers)
    except (ValueError, OverflowError) as err:  # keys: lone surrogates, integers beyond 64 bits; depth
        raise TypeError(f"the sample's keys or nesting cannot be stored: {err}") from None


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
    description, data = _leaf(value, where)
    buffers.append(data)
    return description


def _leaf(value: Any, where: str) -> tuple[list[Any], bytes]:
    if isinstance(value, EncodedImage):
        return ["image"], bytes(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ["bytes"], bytes(value)
    if isinstance(value, bool):
        return ["bool"], b"\x01" if value else b"\x00"
    if isinstance(value, np.generic):  # before int and float: np.float64 is a float
        return ["scalar", _numpy_descr(value.dtype, where)], value.tobytes()
    if isinstance(value, int):
        if -(1 << 63) <= value < 1 << 63:
            return ["int"], _INT.pack(value)
        return ["bigint"], value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if isinstance(value, float):
        return ["float"], _FLOAT.pack(value)
    if isinstance(value, str):
        return ["str"], value.encode("utf-8", "surrogatepass")
    if isinstance(value, np.ndarray):
        return ["array", _numpy_descr(value.dtype, where), list(value.shape)], value.tobytes()
    if isinstance(value, torch.Tensor):
        return ["tensor", _tensor_dtype(value, where), list(value.shape)], tensor_bytes(value)
    if isinstance(value, Image.Image):
        return ["image"], image_bytes(value)
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}; expected bytes, int, float, bool, str, "
        "None, a numpy array, a tensor, a PIL image, or a tuple, list or dict of these. "
        "Convert it first: nothing is pickled"
    )


def _numpy_descr(dtype: np.dtype[Any], where: str) -> Any:
    if dtype.hasobject:
        raise TypeError(f"{where} is a numpy array of Python objects, which would need pickle; give it a plain dtype")
    descr = npy_format.dtype_to_descr(dtype)
    if npy_format.descr_to_dtype(descr) != dtype:
        raise TypeError(f"{where} has the numpy dtype {dtype}, which numpy cannot describe in a file; view it as uint8")
    return descr


def _tensor_dtype(tensor: torch.Tensor, where: str) -> str:
    if tensor.is_sparse or tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"{where} is a sparse or quantized tensor; store its parts, or a dense tensor")
    return str(tensor.dtype).removeprefix("torch.")


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's elements in C order, little endian, of any dtype."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data: bytes = flat.view(torch.uint8).numpy().tobytes()
    return data


def image_bytes(image: Image.Image) -> bytes:
    """A PIL image as an image file: the file it was opened from if it is untouched, else lossless.

    PNG, or TIFF for the modes that PNG does not have.
    """
    source = getattr(image, "fp", None)
    if source is not None and getattr(image, "tile", None) and image.format is not None:  # opened, not yet decoded
        position = source.tell()
        source.seek(0)
        data: bytes = source.read()
        source.seek(position)
        return data
    out = io.BytesIO()
    if image.mode in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA"):
        image.save(out, "PNG", compress_level=1)
    else:
        image.save(out, "TIFF", compression="tiff_deflate")
    return out.getvalue()


# --- reading -----------------------------------------------------------------------------------------------------


def read(source: Source, start: int, stop: int, number: int, image: ImageDecoder | None) -> Any:
    """The sample whose stored value is ``source[start:stop]``.

    Arrays, tensors and bytes are copies; images are decoded from the source itself.

    Args:
        source: What holds the value.
        start: Where the value begins.
        stop: Where it ends.
        number: The sample's number, which its stamp must bear.
        image: What makes an image of an image file; None: its bytes.

    Raises:
        DamagedError: The value is not what was written.
        Exception: What `image`, or a leaf that is not what its structure says, raises.
    """
    at = start
    try:
        array, stamp, _, found, kind, length = _HEAD.unpack_from(source, at)
        if array == 0xDC:  # 16 parts or more
            array = 0x90 + (source[at + 1] << 8 | source[at + 2])
            at += 2
            _, stamp, _, found, kind, length = _HEAD.unpack_from(source, at)
    except (struct.error, IndexError):
        raise DamagedError("its value is cut off") from None
    if stamp != 0xC410:
        raise DamagedError("its value does not begin with a stamp")
    if found != number:
        raise DamagedError("another sample lies in its place")
    at += _HEAD.size
    if kind != 0xC4:
        at -= 2
        length, at = bytes_at(source, at)
    leaves, assemble = _layout(source[at : at + length])
    if array != 0x92 + len(leaves):
        raise DamagedError(f"{array - 0x92} buffers; its structure tells of {len(leaves)}")
    at += length
    values = []
    try:
        for leaf in leaves:
            if source[at] == 0xC4:  # bytes_at without the call: most buffers are short
                length = source[at + 1]
                at += 2
            else:
                length, at = bytes_at(source, at)
            end = at + length
            if leaf is not None:
                values.append(leaf(source, at, end))
            elif image is None:
                values.append(source[at:end])
            else:
                values.append(image(memoryview(source)[at:end]))
            at = end
    except IndexError:
        raise DamagedError("its value is cut off") from None
    if at != stop:
        raise DamagedError(f"its parts end {abs(stop - at)} bytes {'before' if at < stop else 'after'} its end")
    return assemble(values)


def bytes_at(source: Source | memoryview, at: int) -> tuple[int, int]:
    """Length and begin of the msgpack bytes whose head is at `at`."""
    kind = source[at]
    if kind == 0xC4:
        return source[at + 1], at + 2
    if kind == 0xC5:
        return source[at + 1] << 8 | source[at + 2], at + 3
    if kind == 0xC6:
        return _BIG_LENGTH.unpack_from(source, at + 1)[0], at + 5
    raise DamagedError(f"byte {kind:#04x} where the head of a buffer should be")


@lru_cache(maxsize=4096)
def _layout(structure: bytes) -> tuple[list[_Leaf | None], _Assemble]:
    """What reads each buffer (None: an image), and what makes the sample of their values."""
    try:
        leaves: list[_Leaf | None] = []
        root = msgpack.unpackb(structure)
        assemble = _compile(root, leaves)
        if root[0] in ("tuple", "list") and all(child[0] not in _NESTED for child in root[1]):
            assemble = tuple if root[0] == "tuple" else list  # the common case, without a call for each part
    except DamagedError:
        raise
    except Exception as err:
        raise DamagedError(f"not a structure ({type(err).__name__}: {err})") from None
    return leaves, assemble


def tree(structure: bytes) -> Any:
    """A structure as a tree: ``[kind, ...]`` with such trees within."""
    return msgpack.unpackb(structure)


def split(value: bytes | memoryview) -> list[bytes]:
    """A stored value's parts: stamp, structure, buffers.

    Raises:
        DamagedError: It is not what `Encoded.value` writes.
    """
    try:
        parts = msgpack.unpackb(value)
    except Exception as err:
        raise DamagedError(f"not a msgpack value ({type(err).__name__}: {err})") from None
    if type(parts) is not list or len(parts) < 2 or any(type(part) is not bytes for part in parts):
        raise DamagedError("not a list of a stamp, a structure and buffers")
    if len(parts[0]) != STAMP_BYTES:
        raise DamagedError(f"a stamp of {len(parts[0])} bytes; expected {STAMP_BYTES}")
    return parts


def body_offset(value: bytes | memoryview) -> int:
    """Where a value's content begins: after the array head and the stamp."""
    return (1 if value[0] < 0xA0 else 3 if value[0] == 0xDC else 5) + len(_STAMP_HEAD) + STAMP_BYTES


def check(value: bytes | memoryview, place: bytes) -> bytes:
    """Compare a value with its own checksum: XXH3-64 of the sample's id and content, 8 bytes, big endian.

    Args:
        value: The stored value.
        place: The sample's id.

    Returns:
        The checksum.

    Raises:
        DamagedError: It differs, or the value is another sample's.
    """
    value = memoryview(value)
    if len(value) < 1 + len(_STAMP_HEAD) + STAMP_BYTES:
        raise DamagedError("its value is cut off")
    start = body_offset(value)
    stamp = bytes(value[start - STAMP_BYTES : start])
    if bytes(value[start - STAMP_BYTES - len(_STAMP_HEAD) : start - STAMP_BYTES]) != _STAMP_HEAD:
        raise DamagedError("its value does not begin with a stamp")
    if stamp[8:] != place:
        raise DamagedError("another sample lies in its place")
    if xxhash.xxh3_64_digest(value[start - 8 :]) != stamp[:8]:
        raise DamagedError("its checksum does not match its content")
    return stamp[:8]


def _compile(tree: Any, leaves: list[_Leaf | None]) -> _Assemble:
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
    leaves.append(None if kind == "image" else _PLAIN[kind] if kind in _PLAIN else _array_reader(kind, rest))
    return itemgetter(at)


_NESTED: Final = ("tuple", "list", "dict", "none")


def _number(form: struct.Struct) -> _Leaf:
    size, unpack_from = form.size, form.unpack_from

    def number(source: Source, start: int, stop: int) -> Any:
        if stop - start != size:
            raise DamagedError(f"a number of {stop - start} bytes; expected {size}")
        return unpack_from(source, start)[0]

    return number


_PLAIN: Final[dict[str, _Leaf]] = {
    "bytes": lambda source, start, stop: source[start:stop],
    "str": lambda source, start, stop: str(source[start:stop], "utf-8", "surrogatepass"),
    "bool": lambda source, start, stop: source[start:stop] != b"\x00",
    "int": _number(_INT),
    "bigint": lambda source, start, stop: int.from_bytes(source[start:stop], "little", signed=True),
    "float": _number(_FLOAT),
}


def _array_reader(kind: str, rest: list[Any]) -> _Leaf:
    shape: tuple[int, ...] = ()
    if kind == "scalar":
        dtype = numpy_dtype(rest[0])
    elif kind == "array":
        dtype, shape = numpy_dtype(rest[0]), tuple(rest[1])
    elif kind == "tensor":
        return _tensor_reader(torch_dtype(rest[0]), tuple(rest[1]))
    else:
        raise DamagedError(f"an unknown kind of value, {kind!r}")
    num_bytes = dtype.itemsize * math.prod(shape)

    def array(source: Source, start: int, stop: int) -> Any:
        if stop - start != num_bytes:
            raise DamagedError(f"an array of {stop - start} bytes; expected {num_bytes}")
        if not num_bytes:
            return np.zeros(shape, dtype)
        return np.ndarray(shape, dtype, source, start).copy()

    if kind == "scalar":
        return lambda source, start, stop: array(source, start, stop)[()]
    return array


def _tensor_reader(dtype: torch.dtype, shape: tuple[int, ...]) -> _Leaf:
    empty = torch.empty(shape, dtype=dtype) if 0 in shape else torch.empty((), dtype=dtype)
    num_bytes = empty.itemsize * math.prod(shape)
    try:
        same: np.dtype[Any] | None = empty.numpy().dtype
    except TypeError:  # bfloat16 and others that numpy does not have
        same = None

    def tensor(source: Source, start: int, stop: int) -> torch.Tensor:
        if stop - start != num_bytes:
            raise DamagedError(f"a tensor of {stop - start} bytes; expected {num_bytes}")
        if not num_bytes:
            return torch.empty(shape, dtype=dtype)
        if same is not None:
            return torch.from_numpy(np.ndarray(shape, same, source, start).copy())
        return torch.from_numpy(np.ndarray(num_bytes, np.uint8, source, start).copy()).view(dtype).reshape(shape)

    return tensor


def numpy_dtype(descr: Any) -> np.dtype[Any]:
    """The dtype of a description from a structure (msgpack has turned its tuples into lists)."""
    return npy_format.descr_to_dtype(_tuples(descr) if isinstance(descr, list) else descr)


def _tuples(descr: list[Any]) -> list[Any]:
    fields = []
    for name, kind, *shape in descr:
        name = tuple(name) if isinstance(name, list) else name
        kind = _tuples(kind) if isinstance(kind, list) else kind
        fields.append((name, kind, *(tuple(s) for s in shape)))
    return fields


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name.

    Raises:
        DamagedError: This torch has none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedError(f"a tensor of dtype {name!r}, which this torch does not have")
    return dtype
