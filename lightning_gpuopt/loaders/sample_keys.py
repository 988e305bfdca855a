"""Which samples of a batch are read: for datasets of ours, which take the keys of a batch at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

# in a process whose samples are recorded: gives the keys of a batch, and notes each as it is taken
noted: Callable[[Sequence[Any]], Iterable[Any]] | None = None


def each_of(keys: Sequence[Any]) -> Iterable[Any]:
    return keys if noted is None else noted(keys)
