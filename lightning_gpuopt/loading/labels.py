"""The labels of a dataset's samples: a list to its users, a numpy array in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


class Labels(Sequence[Any]):
    """Whole numbers, read-only: Python ints (or bools) by index and in loops, a list by slice, equal to a list of them.

    ``np.asarray`` gives int64 (or bool), as of a list. That would take 8 to 40 bytes for each; this takes its array's.
    """

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self._values = values.view()
        self._values.flags.writeable = False

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        return self._values[index].tolist()

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), 4096):
            yield from self[start : start + 4096]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Labels):
            return np.array_equal(self._values, other._values)
        return self._values.tolist() == other if isinstance(other, list) else NotImplemented

    def __add__(self, other: Sequence[Any]) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Sequence[Any]) -> list[Any]:
        return [*other, *self]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        usual = self._values.dtype if self._values.dtype in (np.bool_, np.uint64) else np.int64
        return np.array(self._values, usual if dtype is None else dtype, copy=copy is not False)

    def __repr__(self) -> str:
        return f"Labels({np.array2string(self._values, threshold=20, separator=', ')})"
