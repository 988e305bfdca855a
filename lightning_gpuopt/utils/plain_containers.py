"""What Python's own containers hold, without running code of the user's classes that are derived from them.

A dataset's list may read a file for an entry, or count how often it is asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Any, Final

CONTAINERS: Final = (list, tuple, dict, set, frozenset, deque)


def length_of(values: Collection[Any]) -> int:
    """Entries of a container; a class of the user's that is derived from Python's is not asked itself."""
    base = _python_class(values)
    return len(values) if base is None else int(base.__len__(values))


def entries_of(values: Collection[Any]) -> Iterable[Any]:
    """Entries of a container, of a dict its values, likewise."""
    base = _python_class(values)
    if base is None:
        return values
    go_through: Any = dict.values if base is dict else base.__iter__
    found: Iterable[Any] = go_through(values)
    return found


def entry_at(values: Any, index: Any) -> Any:
    """An entry or slice of a container or an array, likewise; of a deque by no index below 0: that asks its class."""
    base = _python_class(values)
    return values[index] if base is None else base.__getitem__(values, index)


def _python_class(values: object) -> Any:
    kind = type(values)
    return kind if kind in CONTAINERS else next((each for each in CONTAINERS if issubclass(kind, each)), None)
