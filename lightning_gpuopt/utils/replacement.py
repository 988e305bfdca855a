"""What is placed in front of a method of somebody else's, for the time of a ``fit``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Replacement:
    """A callable in front of another; pickled and copied as that other itself.

    A Trainer or loader that is sent to another process, or copied, so leaves what is measured here behind.

    Args:
        original: what it is in front of.
        replacement: what is called in its place; a subclass may override ``__call__`` instead.
    """

    def __init__(self, original: Callable[..., Any], replacement: Callable[..., Any] | None = None) -> None:
        self._original = original
        self._replacement = original if replacement is None else replacement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is in its place."""
        return self._replacement(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return identity, (self._original,)


def identity(value: T) -> T:
    """What was given: a :class:`Replacement` is unpickled through it."""
    return value
