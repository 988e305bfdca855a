"""How the samples of a dataset lie in a batch: what ``default_collate`` would make of them, each part at its offset."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from lightning_gpuopt.loading.collate import WORDS, is_plain

Array: TypeAlias = np.ndarray[Any, Any]
# puts a sample into a row; whether it is like the first one, and could be put there
Placer: TypeAlias = Callable[[Any, int], bool]
_ALIGNED: Final = 64
_TEXT_BYTES: Final = 4094  # a text of up to so many bytes lies in the batch's memory, after two bytes with its length
_NUMBERS: Final[dict[type, Any]] = {int: torch.int64, float: torch.float64, bool: torch.bool}


class Column(NamedTuple):
    """A part of every sample in a batch."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # of one sample's part, as it lies in memory
    is_channels_last: bool = False  # ``shape`` is [H, W, C], and the batch [B, C, H, W]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class _Other(Exception):
    """A sample that cannot be put into a row."""


class Layout:
    """Where the parts of each sample lie in a batch.

    With `tree` None nobody puts samples into rows one by one; `assemble` makes the batch of its columns, in the process
    that it is given in.
    """

    def __init__(self, columns: Sequence[Column], tree: Any, assemble: Callable[[Any], Any] | None = None) -> None:
        self.columns = list(columns)
        self._tree = tree
        self._assemble = assemble

    @classmethod
    def of(cls, sample: Any, collate: Callable[[list[Any]], Any]) -> Layout | None:
        """The layout of a dataset's samples, by one of them; None if it has parts that have no fixed layout."""
        columns: list[Column] = []
        try:
            return cls(columns, _tree(sample, collate([sample]), columns))
        except Exception:  # the collate_fn's: whoever trains with it is told
            return None

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.columns, self._tree)

    @property
    def row_bytes(self) -> int:
        return sum(column.row_bytes for column in self.columns)

    def starts(self, size: int) -> tuple[list[int], int]:
        """Where each column of a batch of `size` samples begins, in bytes; and the bytes of all."""
        starts, at = [], 0
        for column in self.columns:
            starts.append(at)
            at += -(-column.row_bytes * size // _ALIGNED) * _ALIGNED
        return starts, at

    def arrays(self, memory: Any, size: int) -> list[Array]:
        """The columns of a batch of `size` samples in memory, ``[size, *shape]``, as words that numpy knows."""
        starts, _ = self.starts(size)
        return [
            np.ndarray((size, *column.shape), _numpy(column.dtype), memory, start)
            for column, start in zip(self.columns, starts, strict=True)
        ]

    def tensors(self, memory: Any, size: int, count: int) -> list[torch.Tensor]:
        """The first `count` rows of each column, as they are in the batch; each of them holds `memory`."""
        starts, _ = self.starts(size)
        found = []
        for (dtype, shape, is_channels_last), start in zip(self.columns, starts, strict=True):
            items = count * math.prod(shape)
            if items:
                column = torch.frombuffer(memory, dtype=dtype, count=items, offset=start).view(count, *shape)
            else:
                column = torch.empty((count, *shape), dtype=dtype)
            found.append(column.permute(0, 3, 1, 2) if is_channels_last else column)
        return found

    def placer(self, arrays: list[Array]) -> Placer:
        if self._tree is None:
            return lambda sample, row: False
        return _placer(self._tree, self.columns, arrays)

    def assemble(self, columns: list[torch.Tensor]) -> Any:
        return _assembled(self._tree, columns) if self._assemble is None else self._assemble(columns)

    def sample(self, arrays: list[Array], row: int) -> Any:
        """The sample in a row, of the types that it had."""
        return _taken(self._tree, self.columns, arrays, row)


def _numpy(dtype: torch.dtype) -> Any:
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:  # such as bfloat16
        return torch.empty(0, dtype=WORDS[dtype.itemsize]).numpy().dtype


# -- what a sample is made of: (kind, ...), whose first part says what is done with it


def _tree(sample: Any, batch: Any, columns: list[Column]) -> tuple[Any, ...]:
    kind = type(sample)
    if kind is dict and type(batch) is dict:
        return "dict", tuple(sample), tuple(_tree(sample[key], batch[key], columns) for key in sample)
    if kind in (tuple, list) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        if len(sample) != len(batch):
            raise _Other
        parts = tuple(_tree(*each, columns) for each in zip(sample, batch, strict=True))
        return "sequence", kind, type(batch), parts
    if kind in (str, bytes):
        columns.append(Column(torch.uint8, (2 + _TEXT_BYTES,)))
        return "text", kind, len(columns) - 1, type(batch)
    if type(batch) is not torch.Tensor:
        raise _Other
    if kind is torch.Tensor and is_plain(sample) and sample.dtype == batch.dtype:
        columns.append(_column(batch))
        return "tensor", len(columns) - 1
    if kind is np.ndarray and sample.dtype.isnative and _numpy(batch.dtype) == sample.dtype:
        columns.append(_column(batch))
        return "array", len(columns) - 1
    is_number = batch.dtype == _NUMBERS.get(kind)
    is_number = is_number or (issubclass(kind, np.generic) and np.can_cast(sample.dtype, _numpy(batch.dtype)))
    if is_number and batch.dim() == 1:
        columns.append(_column(batch))
        return "number", kind, len(columns) - 1
    raise _Other


def _column(batch: torch.Tensor) -> Column:
    shape = tuple(batch.shape[1:])
    if len(shape) == 3 and not batch.is_contiguous() and batch.permute(0, 2, 3, 1).is_contiguous():
        return Column(batch.dtype, (*shape[1:], shape[0]), True)
    return Column(batch.dtype, shape)


def _placer(tree: tuple[Any, ...], columns: list[Column], arrays: list[Array]) -> Placer:
    what, *rest = tree
    if what == "dict":
        keys, children = rest[0], [_placer(child, columns, arrays) for child in rest[1]]

        def place_dict(sample: Any, row: int) -> bool:
            if type(sample) is not dict or tuple(sample) != keys:  # a batch's keys are in its first sample's order
                return False
            return all(child(sample[key], row) for key, child in zip(keys, children, strict=True))

        return place_dict
    if what == "sequence":
        kind, children = rest[0], [_placer(child, columns, arrays) for child in rest[2]]
        num_parts = len(children)

        def place_sequence(sample: Any, row: int) -> bool:
            if type(sample) is not kind or len(sample) != num_parts:
                return False
            return all(child(part, row) for child, part in zip(children, sample, strict=True))

        return place_sequence
    if what == "text":
        return _text_placer(rest[0], arrays[rest[1]])
    if what == "tensor":
        return _tensor_placer(columns[rest[0]], arrays[rest[0]])
    array = arrays[rest[-1]]
    if what == "array":
        shape, dtype = columns[rest[0]].shape, array.dtype

        def place_array(sample: Any, row: int) -> bool:
            if type(sample) is not np.ndarray or sample.dtype != dtype or sample.shape != shape:
                return False
            array[row] = sample
            return True

        return place_array
    kind = rest[0]

    def place_number(sample: Any, row: int) -> bool:
        if type(sample) is not kind:
            return False
        try:
            array[row] = sample
        except OverflowError:
            return False
        return True

    return place_number


def _tensor_placer(column: Column, array: Array) -> Placer:
    shape, dtype = torch.Size(column.shape), column.dtype
    is_numpys = np.dtype(_numpy(dtype)).name == str(dtype).removeprefix("torch.")
    words = None if is_numpys else WORDS[dtype.itemsize]

    def place_tensor(sample: Any, row: int) -> bool:
        if type(sample) is not torch.Tensor or sample.dtype != dtype or not is_plain(sample):
            return False
        if column.is_channels_last:
            if sample.dim() != 3 or sample.stride(0) != 1:
                return False
            sample = sample.permute(1, 2, 0)
        if sample.shape != shape:
            return False
        # By numpy: its copies take one thread only.
        array[row] = (sample if words is None else sample.view(words)).numpy()
        return True

    return place_tensor


def _text_placer(kind: Any, array: Array) -> Placer:
    def place_text(sample: Any, row: int) -> bool:
        if type(sample) is not kind:
            return False
        try:
            data: bytes = sample.encode() if kind is str else sample
        except UnicodeEncodeError:  # a lone surrogate
            return False
        if len(data) > _TEXT_BYTES:
            return False
        array[row, :2] = divmod(len(data), 256)
        array[row, 2 : 2 + len(data)] = np.frombuffer(data, np.uint8)
        return True

    return place_text


def _assembled(tree: tuple[Any, ...], columns: list[torch.Tensor]) -> Any:
    what, *rest = tree
    if what == "dict":
        return {key: _assembled(child, columns) for key, child in zip(*rest, strict=True)}
    if what == "sequence":
        kind, parts = rest[1], [_assembled(child, columns) for child in rest[2]]
        return parts if kind is list else kind(parts) if kind is tuple else kind(*parts)
    if what == "text":
        rows = columns[rest[1]].numpy()
        return rest[2](_text(rest[0], row) for row in rows)
    return columns[rest[-1]]


def _taken(tree: tuple[Any, ...], columns: list[Column], arrays: list[Array], row: int) -> Any:
    what, *rest = tree
    if what == "dict":
        return {key: _taken(child, columns, arrays, row) for key, child in zip(*rest, strict=True)}
    if what == "sequence":
        kind, parts = rest[0], [_taken(child, columns, arrays, row) for child in rest[2]]
        return kind(parts) if kind in (tuple, list) else kind(*parts)
    if what == "text":
        return _text(rest[0], arrays[rest[1]][row])
    value = arrays[rest[-1]][row]
    if what == "tensor":
        column = columns[rest[0]]
        tensor = torch.from_numpy(np.array(value)).view(column.dtype)
        return tensor.permute(2, 0, 1) if column.is_channels_last else tensor
    if what == "array":
        return np.array(value)
    return rest[0](value)


def _text(kind: type, row: Array) -> Any:
    data = row[2 : 2 + int(row[0]) * 256 + int(row[1])].tobytes()
    return data.decode() if kind is str else data
