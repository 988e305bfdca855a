"""What is placed in front of a method of somebody else's, for the time of a ``fit``, and stays out of tracebacks."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, TypeVar

T = TypeVar("T")

_PACKAGE: Final = os.path.dirname(os.path.dirname(__file__))
_ROOMS: Final = ("autofix", "callbacks", "detector", "loaders", "prefetch", "recorder", "timeline", "tuning", "utils")
# where code is that stands between Lightning and the program; datasets and loaders of ours are the program's own
_OURS: Final = tuple(os.path.join(_PACKAGE, room, "") for room in _ROOMS)


class Replacement:
    """A callable in front of another; pickled and copied as that itself, which leaves what is measured here behind."""

    def __init__(self, original: Callable[..., Any], replacement: Callable[..., Any] | None = None) -> None:
        self._original = original
        self._replacement = original if replacement is None else replacement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._replacement(*args, **kwargs)
        except BaseException as error:
            hide_us(error)
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return identity, (self._original,)


def identity(value: T) -> T:
    """What was given: a :class:`Replacement` is unpickled through it."""
    return value


def hide_us(error: BaseException) -> None:
    """Take our own frames out of the traceback of what somebody else has raised; our own errors stay as they are.

    Called in an ``except`` clause that ends with a bare ``raise``, which adds its frame to no traceback anew. Only
    Python 3.10 still shows that one frame: it raises with the traceback that it has caught.
    """
    entries: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    shown = [each for each in entries if not _is_ours(each)]
    if not entries or _is_ours(entries[-1]) or len(shown) == len(entries):
        return
    for outer, inner in zip([entries[0], *shown], shown, strict=False):
        if outer is not inner:
            outer.tb_next = inner
    error.__traceback__ = shown[0]


def _is_ours(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_OURS)
