"""Executors of which a test says what they do to a unit."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any


class Immediately(Executor):
    """Does each unit in this thread when it is submitted, as often as it is told; the first result is the unit's."""

    def __init__(self, times: int = 1) -> None:
        self.times = times
        self.units: list[tuple[Any, ...]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.units.append(args)
        future: Future[Any] = Future()
        results = [fn(*args) for _ in range(self.times)]
        future.set_result(results[0])
        return future


class Elsewhere(Immediately):
    """A worker to which a folder is not what it is here."""

    def __init__(self, here: Path, there: Path) -> None:
        super().__init__()
        self.here, self.there = here, there

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.here.rename(self.there)
        try:
            return super().submit(fn, *args)
        finally:
            self.there.rename(self.here)
