"""A reference that keeps nothing alive, to objects of any class."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def weakly(value: T) -> Callable[[], T | None]:
    """What gives a value for as long as somebody else holds it, then None; a list and the like, for ever.

    The workers of an iterator that dies in a reference cycle end late: torch waits five seconds for each. So loaders
    and iterators are held by the program alone.
    """
    try:
        return weakref.ref(value)
    except TypeError:  # it has no place for weak references
        return lambda: value
