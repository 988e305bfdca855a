"""The parts of a stored sample that have none themselves: what reads each from its bytes."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.lib import format as npy_format

from lightning_gpuopt.storage import tv_tensors
from lightning_gpuopt.storage.errors import DamagedError

Source = bytes | mmap.mmap
Leaf = Callable[[Any, int, int], Any]

INT: Final = struct.Struct("<q")
FLOAT: Final = struct.Struct("<d")


def _number(form: struct.Struct) -> Leaf:
    size, unpack_from = form.size, form.unpack_from

    def number(source: Source, start: int, stop: int) -> Any:
        if stop - start != size:
            raise DamagedError(f"a number of {stop - start} bytes; expected {size}")
        return unpack_from(source, start)[0]

    return number


PLAIN: Final[dict[str, Leaf]] = {
    "bytes": lambda source, start, stop: source[start:stop],
    "str": lambda source, start, stop: str(source[start:stop], "utf-8", "surrogatepass"),
    "bool": lambda source, start, stop: source[start:stop] != b"\x00",
    "int": _number(INT),
    "bigint": lambda source, start, stop: int.from_bytes(source[start:stop], "little", signed=True),
    "float": _number(FLOAT),
}


def array_reader(kind: str, rest: list[Any]) -> Leaf:
    """What reads a number of numpy's, an array or a tensor, by what the structure says of it."""
    shape: tuple[int, ...] = ()
    if kind == "scalar":
        dtype = numpy_dtype(rest[0])
    elif kind == "array":
        dtype, shape = numpy_dtype(rest[0]), tuple(rest[1])
    elif kind == "tensor":
        plain = _tensor_reader(torch_dtype(rest[0]), tuple(rest[1]))
        if len(rest) == 2:
            return plain
        make = tv_tensors.maker(rest[2])
        return lambda source, start, stop: make(plain(source, start, stop))
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


def _tensor_reader(dtype: torch.dtype, shape: tuple[int, ...]) -> Leaf:
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
    """The torch dtype of that name; DamagedError if this torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedError(f"a tensor of dtype {name!r}, which this torch does not have")
    return dtype
