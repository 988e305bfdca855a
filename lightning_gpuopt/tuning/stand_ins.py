"""What stands in the place of a part of torch's iterator for a moment: of work, of a sampler, of its iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class End:
    """Sent to a worker in place of work: as it unpickles this, it leaves its loop as it would at a Ctrl-C.

    torch has a way to end one worker only for iterable datasets, or with all the others. At a KeyboardInterrupt the
    worker's loop ends without a word, its results are flushed, and its exit code is 0.
    """

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _leave, ()


def _leave() -> None:
    raise KeyboardInterrupt


def raises(error: Exception) -> Iterator[Any]:
    """In place of a sampler's iterator: raises what that has raised, and ends."""
    yield from ()
    raise error


class Same:
    """In place of a sampler: its iterator that there is already."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __iter__(self) -> Any:
        return self._iterator
